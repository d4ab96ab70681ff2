"""Numbers for reading, and for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

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


def number(value: float | None, digits: int = 4) -> str:
    """A number for reading; None and NaN, which stand for no value, become a dash."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
        return f"{int(value)}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")


def duration(seconds: float) -> str:
    """A time for reading, with three digits: 1234 s, 2.34 s, 8.4 ms, 180 µs, 12 ns."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{number(seconds / size, 3)} {unit}"
    return f"{number(seconds * 1e9, 3)} ns" if seconds else "0"


def nats(loss: float | None) -> str:
    """A loss for reading."""
    return "–" if loss is None else f"{loss:.3f}"


def finite(value: Any) -> Any:
    """``value``, a number or nested containers of them, with None for what JSON does not have: infinity and NaN."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
