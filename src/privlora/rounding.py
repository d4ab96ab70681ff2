"""How an upper bound is written: never below itself."""

from __future__ import annotations

import math


def rounded_up(value: float | None, decimals: int = 3) -> str:
    """An upper bound stays one: never rounded down.

    >>> rounded_up(2.0001), rounded_up(3.0), rounded_up(None)
    ('2.001', '3.000', '–')
    """
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    scaled = value * 10**decimals
    # the product itself is rounded: 4.963 * 1000 may be a hair above 4963
    whole = round(scaled) if math.isclose(scaled, round(scaled), rel_tol=1e-12) else math.ceil(scaled)
    return f"{whole / 10**decimals:.{decimals}f}"


def to_one_digit(units: int) -> int:
    """To one digit, which tells of the true number only roughly.

    >>> [to_one_digit(n) for n in (1, 14, 15, 949, 4306, 96_000)]
    [1, 10, 20, 900, 4000, 100000]
    """
    size = 10 ** (len(str(units)) - 1)
    return (units + size // 2) // size * size
