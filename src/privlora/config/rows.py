"""What settings may ask of a row of the table of methods, told without the table, and so before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from privlora.errors import ConfigError, echoed

CLIPPINGS: Final = ("flat", "automatic", "spectral", "normalized", "per-module")
"""Those of all rows."""
_FIXED: Final = ("flat", "automatic", "spectral", "per-module")
_OF_SPANS: Final = ("normalized", "flat")


@dataclass(frozen=True)
class Row:
    """Of a method: as `methods.Method` has them. optimizers: and the settings that each has. relative: whether its
    modules have a unit of their own. weighed: whether what its noise alone does to a model says how far it may go."""

    optimizers: Mapping[str, tuple[str, ...]]
    clippings: tuple[str, ...] = _FIXED
    private: bool = True
    relative: bool = True
    weighed: bool = True


_ADAMW: Final = "beta1 beta2 weight_decay"
_OF: Final = {
    "adamw": _ADAMW,
    "sgd": "beta1",
    "adambc": "beta1 beta2 floor",
    "lora+": f"{_ADAMW} learning_rate_ratio",
    "lora-fa": "beta1 beta2",
    "lamb": _ADAMW,
    "rite": "beta1 beta2",
    "riemannian": _ADAMW,
    "paper": "beta1 beta2",
}
"""Optimizer -> the settings that it has."""
_TANGENT: Final = dict.fromkeys(("rank", "scalar", "sgd"), "beta1 beta2 error_feedback")
_SPAN: Final = " alpha ridge top_k hold_out"


def _plain(*optimizers: str, more: str = "") -> dict[str, tuple[str, ...]]:
    """Optimizers with their settings, and what their space has beside."""
    return _with({name: _OF[name] for name in optimizers or ("adamw",)}, more)


def _with(optimizers: Mapping[str, str], more: str) -> dict[str, tuple[str, ...]]:
    return {name: tuple(f"{own}{more}".split()) for name, own in optimizers.items()}


def _on_texts(
    more: str = _SPAN, clippings: tuple[str, ...] = _OF_SPANS, optimizers: Mapping[str, str] | None = None
) -> Row:
    own = _with(optimizers, more) if optimizers else _plain("adamw", "sgd", more=more)
    return Row(own, clippings, relative=False, weighed=False)


ROWS: Final = {
    "prism": Row({**_with(_TANGENT, " right_weight metric_power"), **_plain("paper")}),
    "dp-adamw": Row(_plain()),
    "dp-sgd": Row(_plain("sgd")),
    "dp-adambc": Row(_plain("adambc")),
    "lora+": Row(_plain("lora+")),
    "ffa": Row(_plain()),
    "lora-fa": Row(_plain("lora-fa")),
    "lamb": Row(_plain("lamb")),
    "lora-rite": Row(_plain("rite")),
    "riemannian": Row(_plain("riemannian")),
    "projected": Row(_plain("sgd", "adamw")),
    "wishart-m2": Row(_plain("sgd", "adamw"), ("flat", "automatic"), weighed=False),
    "dp-zo": Row(_plain("sgd", "adamw", more=" perturbation"), ("flat",), relative=False, weighed=False),
    "pe-sgd": _on_texts(),
    "pe-sgd-fix": _on_texts(),
    "span-prism": _on_texts(optimizers={name: _TANGENT[name] for name in ("scalar", "sgd", "rank")}),
    "guided-prism": _on_texts(" ridge top_k beside", ("normalized", *_FIXED), _TANGENT),
    "pdp-sgd": _on_texts(" ridge top_k beside", ("flat", "normalized", "spectral", "per-module")),
    "gep": _on_texts(" top_k embedding_clip residual_clip", ("normalized",)),
    "b-gep": _on_texts(),
    "adamw": Row(_plain(), private=False, weighed=False),
    "aug-pe": Row(_plain(), weighed=False),
    "popri": Row(_plain(), weighed=False),
}
"""Those of the package; a test compares them with the table."""

_SETTINGS: Final = frozenset(name for row in ROWS.values() for own in row.optimizers.values() for name in own)
"""Those that some optimizer has."""

_tables: list[Callable[[str], Row | None]] = []


def ask(table: Callable[[str], Row | None]) -> None:
    """From now on rows are asked of the table itself, to which users add some."""
    _tables.append(table)


def row_of(name: str) -> Row | None:
    """Of the table where that is loaded; None for a name of several rows, of none, and of a user's own before."""
    return _tables[-1](name) if _tables else ROWS.get(name)


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
    row = row_of(name)
    if row is None:
        return []
    found = list[tuple[str, ConfigError]]()
    if private and not row.private:
        found.append(("name", adds_no_noise(name)))
    optimizer, clipping = chosen.get("optimizer"), chosen.get("clipping")
    if isinstance(optimizer, str) and optimizer not in row.optimizers:
        found.append(("optimizer", no_optimizer(name, optimizer, tuple(row.optimizers))))
    elif optimizer is None or isinstance(optimizer, str):
        used = optimizer or next(iter(row.optimizers))
        own = row.optimizers[used]
        found += [
            (each, no_setting(name, used, each, own))
            for each, value in chosen.items()
            if value is not None and each in _SETTINGS and each not in own
        ]
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


def no_setting(method: str, optimizer: str, name: str, known: Sequence[str]) -> ConfigError:
    """Of a setting that another optimizer has."""
    return ConfigError(
        f"optimizer {optimizer!r} of method {method!r} has no setting {name!r}",
        why="a setting that is ignored would make two runs look different that are the same",
        fix=f"remove it; the optimizer has {', '.join(known)}",
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
