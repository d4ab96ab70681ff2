"""One writing for nested values of records, whatever table they stood in.

Arrow (Parquet, `datasets`) gives all structs of a column the keys of every record, in one order, and all numbers of a
field one type. So in another record's company a record gains ``"note": null``, its keys change places, or 1 becomes
1.0. A text must be a function of its own record, so what such company can change is taken away from every source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

_FIRST: Final = ("role", "content", "id", "type", "name", "description", "parameters", "arguments")
"""Keys that come first, in the order in which models have seen them; the others follow by their letters."""

_EXACT: Final = 2.0**53
"""From it on a float may be an integer that was rounded, since another record has a fraction there."""


def canonical(value: Any) -> Any:
    """A copy: no key whose value is None, keys in one order, whole floats as integers. Lists keep their Nones.

    What JSON has no kind for stays as it is.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        present = [(key, part) for key, part in value.items() if part is not None]
        return {key: canonical(part) for key, part in sorted(present, key=lambda item: _place(item[0]))}
    if isinstance(value, list | tuple):
        return [canonical(part) for part in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def is_rounded(value: Any) -> bool:
    """Whether there is a whole number in it that perhaps was a larger table's rounding of another one."""
    if isinstance(value, Mapping):
        return any(map(is_rounded, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_rounded, value))
    return isinstance(value, float) and value.is_integer() and abs(value) >= _EXACT


def is_json(value: Any) -> bool:
    """Whether JSON has a kind for all that is in it, so no date, which a table makes of texts that look like one."""
    if isinstance(value, Mapping):
        return all(map(is_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | bool | int | float | np.bool_ | np.integer | np.floating)


def _place(key: Any) -> tuple[int, str]:
    return (_FIRST.index(key) if key in _FIRST else len(_FIRST), str(key))
