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
