"""How the rows of the table of methods are called, for errors of settings, which do not load the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from privlora.config.other_names import OTHER_VALUES
from privlora.errors import ConfigError, named, nearest

ROWS: Final = (
    *(
        "prism",
        "dp-adamw",
        "dp-sgd",
        "dp-adambc",
        "lora+",
        "ffa",
        "lora-fa",
        "lamb",
        "lora-rite",
        "riemannian",
    ),
    *(
        "projected",
        "wishart-m2",
        "dp-zo",
        "pe-sgd",
        "pe-sgd-fix",
        "span-prism",
        "guided-prism",
        "pdp-sgd",
        "gep",
    ),
    *("b-gep", "adamw", "aug-pe", "popri", "auto"),
)
"""Those of the package; a test compares them with the table."""

_tables: list[Callable[[], Iterable[str]]] = []


def ask(table: Callable[[], Iterable[str]]) -> None:
    """From now on names are asked of the table itself, to which users add rows."""
    _tables.append(table)


def known() -> list[str]:
    """All names that ``method.name`` may have."""
    return list(_tables[-1]()) if _tables else list(ROWS)


def unknown_method(name: str) -> ConfigError:
    """Of a name that is not among ``known``."""
    elsewhere = OTHER_VALUES["method.name"].get(name.lower().replace("_", "-"))
    return ConfigError(
        f"method.name: unknown method {named(name)}",
        fix=elsewhere or f"{nearest(name, known())} (privlora methods)",
    )
