"""What settings may ask of a row of the table of methods, told without the table, and so before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from privlora.errors import ConfigError, echoed

CLIPPINGS: Final = ("flat", "automatic", "spectral", "normalized", "per-module")
"""Those of all rows."""
_FIXED: Final = ("flat", "automatic", "spectral", "per-module")
_OF_SPANS: Final = ("normalized", "flat")


@dataclass(frozen=True)
class Row:
    """Of a method: as `methods.Method` has them. relative: whether its modules have a unit of their own."""

    optimizers: tuple[str, ...] = ("adamw",)
    clippings: tuple[str, ...] = _FIXED
    private: bool = True
    relative: bool = True


def _on_texts(optimizers: tuple[str, ...] = ("adamw", "sgd"), clippings: tuple[str, ...] = _OF_SPANS) -> Row:
    return Row(optimizers, clippings, relative=False)


_TANGENT: Final = ("rank", "scalar", "sgd")
ROWS: Final = {
    "prism": Row((*_TANGENT, "paper")),
    "dp-adamw": Row(),
    "dp-sgd": Row(("sgd",)),
    "dp-adambc": Row(("adambc",)),
    "lora+": Row(("lora+",)),
    "ffa": Row(),
    "lora-fa": Row(("lora-fa",)),
    "lamb": Row(("lamb",)),
    "lora-rite": Row(("rite",)),
    "riemannian": Row(("riemannian",)),
    "projected": Row(("sgd", "adamw")),
    "wishart-m2": Row(("sgd", "adamw"), ("flat", "automatic")),
    "dp-zo": Row(("sgd", "adamw"), ("flat",), relative=False),
    "pe-sgd": _on_texts(),
    "pe-sgd-fix": _on_texts(),
    "span-prism": _on_texts(("scalar", "sgd", "rank")),
    "guided-prism": _on_texts(_TANGENT, ("normalized", *_FIXED)),
    "pdp-sgd": _on_texts(clippings=("flat", "normalized", "spectral", "per-module")),
    "gep": _on_texts(clippings=("normalized",)),
    "b-gep": _on_texts(),
    "adamw": Row(private=False),
    "aug-pe": Row(),
    "popri": Row(),
}
"""Those of the package; a test compares them with the table."""

_tables: list[Callable[[str], Row | None]] = []


def ask(table: Callable[[str], Row | None]) -> None:
    """From now on rows are asked of the table itself, to which users add some."""
    _tables.append(table)


def wrong_for_row(
    chosen: Mapping[str, Any], *, private: bool, federated: bool
) -> list[tuple[str, ConfigError]]:
    """What is wrong with ``chosen``, the group method as given, since its row cannot have it: (setting, what the table
    would say).

    A name that stands for several rows, that of a user's own before the table is loaded, and the row that a federation
    takes by its rule are left to the table.
    """
    name = chosen.get("name", "prism")
    if not isinstance(name, str) or (federated and "name" not in chosen):
        return []
    row = _tables[-1](name) if _tables else ROWS.get(name)
    if row is None:
        return []
    found = list[tuple[str, ConfigError]]()
    if private and not row.private:
        found.append(("name", adds_no_noise(name)))
    optimizer, clipping = chosen.get("optimizer"), chosen.get("clipping")
    if isinstance(optimizer, str) and optimizer not in row.optimizers:
        found.append(("optimizer", no_optimizer(name, optimizer, row.optimizers)))
    if (
        clipping in CLIPPINGS and clipping not in row.clippings
    ):  # what is no clipping at all is told elsewhere
        found.append(("clipping", cannot_clip(name, clipping, row.clippings)))
    if chosen.get("relative_rate") is True and not row.relative:
        found.append(("relative_rate", no_unit(name)))
    return found


def adds_no_noise(method: str) -> ConfigError:
    return ConfigError(
        f"method.name={method} adds no noise, so it cannot meet a privacy target",
        fix=[
            "to keep the promise write method.name: prism, or dp-adamw",
            "to train without one write privacy.private: false, and remove target_epsilon or noise_multiplier",
        ],
    )


def no_optimizer(method: str, optimizer: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"method {method!r} has no optimizer {echoed(optimizer, known)}", fix=f"one of {', '.join(known)}"
    )


def cannot_clip(method: str, clipping: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"method {method!r} cannot clip as clipping={clipping!r} does",
        why="what that does to a unit is not defined in its coordinates",
        fix=f"one of {', '.join(known)}",
    )


def no_unit(method: str) -> ConfigError:
    """Of a row whose learning rate cannot be in the size of the frozen weights."""
    return ConfigError(
        f"method.relative_rate=true cannot be used with method {method!r}",
        why="what it releases belongs to no single module, so no module's frozen weight says how far a step may move "
        "it; ignored, the rate would be one in entries",
        fix="remove relative_rate, and give a learning_rate in entries; or choose another method, such as prism or "
        "dp-adamw",
    )
