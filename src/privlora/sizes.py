"""Sizes of memory, in words."""

from __future__ import annotations

from collections.abc import Callable

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_LEAST = 0.01  # of a unit, below which numbers say little


def in_one_unit(*sizes: float) -> Callable[[float], str]:
    """How to write sizes (bytes) that stand in one line with these: a number of three digits and the same unit for all.

    The unit of the largest; the one below it where the smallest would hardly show.
    """
    given = [size for size in sizes if size > 0] or [0.0]
    names = list(_UNITS)
    at = next((at for at, name in enumerate(names) if max(given) >= _UNITS[name]), len(names) - 1)
    if min(given) < _LEAST * _UNITS[names[at]]:
        at = min(at + 1, len(names) - 1)
    name = names[at]

    def written(size: float) -> str:
        number = size / _UNITS[name]
        if 0 < number < _LEAST:
            return f"less than {_LEAST} {name}"
        return f"{number:,.0f} {name}" if number >= 99.95 else f"{number:.3g} {name}"

    return written
