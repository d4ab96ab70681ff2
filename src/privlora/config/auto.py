"""What ``auto`` stands for in a run's settings: numbers that follow from public ones, or that public texts choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final, Literal, TypeGuard

from pydantic import Field, field_validator
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from privlora.config.base import Group, Wrong
from privlora.config.methods import facts_of
from privlora.names import EITHER
from privlora.ranges import MOST_STEPS

AUTO: Final = "auto"

PASSES: Final = 5.0
"""Of a run over its units, where nobody says how many."""

VERY_NOISY: Final = 500
"""Up to so many units noise is so large that gradients of all sizes are clipped to one (docs/choosing.md)."""

RANK: Final = 8
"""Of a first adapter: small ones were best (docs/results.md)."""

MOST_TEXTS: Final = 2000
"""Of auto.file, from the first on."""

_BALANCE = 0.3
_FEWEST_STEPS = 10

_SIZES: Final = ("steps", "expected_batch_size")
REHEARSED: Final = {"right_weight": "method", "clip_norm": "privacy", "learning_rate": "method"}
"""What may be chosen before a run begins -> its group; in the order in which each rests on those before it."""


class OrAuto:
    """In an annotation: a file may say auto, which is gone once the file is read."""

    @staticmethod
    def __get_pydantic_json_schema__(core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = dict(handler(core))
        kinds = found.pop("anyOf", None) or [
            {name: found.pop(name) for name in list(found) if name not in ("title", "default")}
        ]
        return {"anyOf": [*kinds, {"const": AUTO, "type": "string"}], **found}


class OrTrue:
    """In an annotation: a file may say true instead of the group, which is gone once the file is read."""

    @staticmethod
    def __get_pydantic_json_schema__(core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = dict(handler(core))
        return {**found, "anyOf": [*found["anyOf"], {"const": True, "type": "boolean"}]}


class AutoSettings(Group):
    """How settings are found that are auto: from public numbers and PUBLIC texts alone, so that it costs no epsilon."""

    all: bool = Field(default=False, strict=True)
    """Whatever is not given becomes what `privlora init` writes, where it goes with what is given. That is auto for
    steps, expected_batch_size, clip_norm, right_weight, learning_rate and target_modules, metric_power 1 and rank 8.
    For 500 units or fewer it is clipping automatic."""
    passes: float = Field(default=PASSES, gt=0, le=1000)
    """With privacy.steps or expected_batch_size auto: how often a unit takes part in the run, on average. More passes
    take more time, and their noise is divided among more units a step."""
    file: str | list[str] | None = None
    """PUBLIC records of the form that the group data describes, which choose method.learning_rate, method.right_weight
    and privacy.clip_norm; the first 2000 are read. Never private ones, and others than those of data.evaluation."""
    choose: list[Literal["right_weight", "clip_norm", "learning_rate"]] = Field(default=[])
    """What is chosen before the run begins, by rehearsals on file. Without a file it is chosen on texts that the model
    writes, the learning rate by noise alone. auto in a setting's own place says the same."""

    @field_validator("file", mode="before")
    @classmethod
    def _names_files(cls, given: Any) -> Any:
        names = given if isinstance(given, list) else [given]
        if given is not None and not all(isinstance(name, str | PurePath) for name in names):
            raise Wrong(
                "it names files, and what was given are no names",
                "write the PUBLIC records to a file, one JSON object a line, and give its path",
            )
        if isinstance(given, PurePath):
            return str(given)
        return [str(name) for name in given] if isinstance(given, list) else given

    @property
    def places(self) -> str:
        """What is chosen, as settings are named: "privacy.clip_norm and method.learning_rate"."""
        *others, last = [f"{REHEARSED[name]}.{name}" for name in self.choose]
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def rehearses_rate(self) -> bool:
        """Whether the learning rate is rehearsed on public records."""
        return self.file is not None and "learning_rate" in self.choose

    @property
    def rate_by_noise(self) -> bool:
        """Whether the learning rate follows from what noise alone does to the model."""
        return self.file is None and "learning_rate" in self.choose

    @property
    def chosen_on(self) -> str:
        """In words, what decides."""
        if self.file is not None:
            return "on auto.file"
        alone = self.choose == ["learning_rate"]
        return ("by noise alone " if alone else "") + "on texts that the model writes itself"


def run_sizes(
    units: float, passes: float = PASSES, *, steps: int | None = None, batch: float | None = None
) -> tuple[int, float]:
    """(steps T, expected batch size b) of a run of about ``passes`` over ``units``; one that is given stays.

    T = 0.3 sqrt(R) and b = R / T, where R = passes * units is the number of gradients: larger batches leave less noise,
    more steps use it better, and this was the best division of R in each measured case (docs/choosing.md). At least 10
    steps, and no batch of more than half of the units.

    >>> run_sizes(10_000), run_sizes(500), run_sizes(10_000, steps=200)
    ((67, 746.0), (15, 167.0), (200, 250.0))
    """
    gradients = passes * units
    if steps is None:
        steps = max(_FEWEST_STEPS, round(_BALANCE * math.sqrt(gradients)))
        if batch is not None:
            steps = max(1, round(gradients / batch))
        steps = min(steps, MOST_STEPS)
    if batch is None:
        batch = float(max(1, round(min(gradients / steps, units / 2))))
    return steps, batch


def in_whole_passes(units: float, passes: float, steps: int, batch: float | None = None) -> tuple[int, float]:
    """(steps, expected batch size) of about as many steps that are whole passes, in each of which every unit is once.
    batch: one that is given.

    >>> in_whole_passes(10_000, 5, 67), in_whole_passes(2000, 5, 30), in_whole_passes(2000, 5, 12, 500)
    ((65, 769.2), (30, 333.3), (20, 500.0))
    """
    whole = max(1, round(passes))
    bins = max(2, round(steps / whole if batch is None else units / batch))
    return whole * bins, round(units / bins, 1)


def of_few(units: float, passes: float, steps: int, batch: float) -> str | None:
    """In a sentence what the bounds of ``run_sizes`` made of few gradients.

    None where they bound nothing, and of sizes that are not its own.

    >>> of_few(10_000, 5, 67, 746.0)
    >>> of_few(200, 5, 10, 100.0)
    'passes 5 over 200 units would make 9 steps: a run has at least 10, so it is 10 steps of 100, passes 5'
    """
    if (steps, batch) != run_sizes(units, passes):
        return None
    wanted, taken = max(1, round(_BALANCE * math.sqrt(passes * units))), steps * batch / units
    bounds = [f"a run has at least {_FEWEST_STEPS}"] if wanted < _FEWEST_STEPS else []
    if taken < 0.9 * passes:
        bounds.append("no batch has more than half of the units")
    elif taken > 1.1 * passes:
        bounds.append("no batch has less than one unit")
    if not bounds:
        return None
    return (
        f"passes {passes:g} over {units:g} units would make {wanted} steps: {', and '.join(bounds)}, so it is "
        f"{steps} steps of {batch:g}, passes {taken:.2g}"
    )


def spelt_out(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a file, whose ``auto: true`` has become the group that it stands for."""
    return {**values, "auto": {"all": True}} if values.get("auto") is True else values


def with_all_auto(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a file, in which auto.all has become what it stands for: what is not given, as init writes it.

    >>> few = {"privacy": {"public_dataset_size": 300, "steps": 9}, "auto": {"all": True, "passes": 3}}
    >>> with_all_auto(few)["privacy"]
    {'public_dataset_size': 300, 'steps': 9, 'expected_batch_size': 'auto'}
    >>> with_all_auto(few)["method"], with_all_auto(few)["auto"]
    ({'clipping': 'automatic', 'learning_rate': 'auto'}, {'passes': 3})
    """
    own = values.get("auto")
    if not isinstance(own, Mapping) or own.get("all") is not True:
        return values
    if values.get("federation") is not None:
        return values  # which is refused where groups are held against each other
    rest = {name: value for name, value in own.items() if name != "all"}
    filled = {**values, "auto": rest}
    data, adapter, method, privacy = (
        values.get(name) or {} for name in ("data", "adapter", "method", "privacy")
    )
    if not all(isinstance(group, Mapping) for group in (data, adapter, method, privacy)) or not privacy:
        return filled  # which is refused where groups are checked
    privacy, method, adapter = dict(privacy), dict(method), dict(adapter)
    filled["privacy"] = privacy
    _unless_given(privacy, "steps", AUTO)
    if privacy.get("sample_rate") is None:
        _unless_given(privacy, "expected_batch_size", AUTO)
    name = method.get("name", "prism")
    facts = facts_of(name) if isinstance(name, str) else None
    if facts is None or not facts.weighed or privacy.get("private", True) is not True:
        return filled
    filled |= {"method": method, "adapter": adapter}
    fresh = adapter.get("init") is None  # else an adapter of its own rank and layers may go on
    if fresh:
        _unless_given(adapter, "r", RANK)
    texts = data.get("label") is None and data.get("chosen") is None and values.get("synthesis") is None
    units, learnt = _number(privacy.get("public_dataset_size")), privacy.get("clip_quantile") is not None
    if _positive(units) and units <= VERY_NOISY:
        if not learnt and privacy.get("clip_norm") is None and "automatic" in facts.clippings:
            _unless_given(method, "clipping", "automatic")
    elif texts:
        if not learnt and method.get("clipping") not in _OF_ONE_LENGTH:
            _unless_given(privacy, "clip_norm", AUTO)
        optimizer = method.get("optimizer") or facts.optimizer
        known = facts.settings_of(optimizer) if optimizer in facts.optimizers else ()
        if fresh:
            _unless_given(adapter, "target_modules", EITHER)
        if fresh and privacy.get("bands") in (None, 1) and "metric_power" in known:
            _unless_given(method, "metric_power", 1.0)
            _unless_given(method, "right_weight", AUTO)
    if texts:
        _unless_given(method, "learning_rate", AUTO)
    return filled


_OF_ONE_LENGTH: Final = ("automatic", "normalized")
"""Clippings after which each gradient is as long as another, whatever the clip norm."""


def _unless_given(group: dict[str, Any], name: str, value: Any) -> None:
    if group.get(name) is None:
        group[name] = value


def without_auto(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a file, in which no size is auto any more, and auto.choose names what is to be rehearsed.

    Raises Wrong where sizes do not follow from anything.
    """
    privacy, method = (values.get(name) for name in ("privacy", "method"))
    asked = [
        (group, name)
        for group, given, names in (
            ("privacy", privacy, (*_SIZES, "clip_norm")),
            ("method", method, ("learning_rate", "right_weight")),
        )
        for name in names
        if isinstance(given, Mapping) and given.get(name) == AUTO
    ]
    if not asked:
        return values
    filled = {name: dict(group) if isinstance(group, Mapping) else group for name, group in values.items()}
    own = filled.get("auto") or {}
    if not isinstance(own, dict):
        return values  # which is refused where the group is checked
    filled["auto"] = own
    for group, name in asked:
        if name in REHEARSED:
            del filled[group][name]
            chosen = own.setdefault("choose", [])
            if isinstance(chosen, list) and name not in chosen:
                own["choose"] = [*chosen, name]
    if any(name in _SIZES for _, name in asked):
        _size(filled["privacy"], own, [name for _, name in asked if name in _SIZES])
    return filled


def _size(privacy: dict[str, Any], own: Mapping[str, Any], names: list[str]) -> None:
    """Put numbers instead of the sizes that are auto."""
    units, passes = _number(privacy.get("public_dataset_size")), _number(own.get("passes", PASSES))
    if not _positive(units):
        raise Wrong(
            f"privacy.{names[0]}=auto follows from privacy.public_dataset_size, which is missing",
            "give your number of units as you are willing to publish it, for example rounded",
            f"privacy.{names[0]}",
        )
    if "sample_rate" in privacy and "expected_batch_size" in names:
        raise Wrong(
            "sample_rate follows from expected_batch_size and public_dataset_size",
            "remove sample_rate, or give it instead of expected_batch_size",
            "privacy.sample_rate",
        )
    if not _positive(passes):
        passes = PASSES  # what is wrong is refused where the group is checked
    batch, steps = _number(privacy.get("expected_batch_size")), _number(privacy.get("steps"))
    if _positive(rate := _number(privacy.get("sample_rate"))):
        batch = rate * units
    steps, batch = run_sizes(
        units,
        passes,
        steps=int(steps) if _positive(steps) and "steps" not in names else None,
        batch=batch if _positive(batch) and "expected_batch_size" not in names else None,
    )
    if privacy.get("sampling") == "balls-in-bins":
        of_batch = None if "expected_batch_size" in names else batch
        steps, batch = in_whole_passes(units, passes, steps, of_batch)
    privacy |= {name: value for name, value in zip(_SIZES, (steps, batch), strict=True) if name in names}


def _number(value: Any) -> Any:
    """The number that a text holds, which a setting takes for it; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
