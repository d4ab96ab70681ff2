"""How the rows of the table of methods are called, for errors of settings, which do not load the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from privlora.config.other_names import OTHER_VALUES
from privlora.config.rows import ROWS
from privlora.errors import ConfigError, echoed, nearest

_tables: list[Callable[[], Iterable[str]]] = []


def ask(table: Callable[[], Iterable[str]]) -> None:
    """From now on names are asked of the table itself, to which users add rows."""
    _tables.append(table)


def known() -> list[str]:
    """All names that ``method.name`` may have."""
    return list(_tables[-1]()) if _tables else [*ROWS, "auto"]


def unknown_method(name: str) -> ConfigError:
    """Of a name that is not among ``known``."""
    elsewhere = OTHER_VALUES["method.name"].get(name.lower().replace("_", "-"))
    return ConfigError(
        f"method.name: unknown method {echoed(name, [*known(), *OTHER_VALUES['method.name']])}",
        fix=elsewhere or f"{nearest(name, known())} (privlora methods)",
    )
