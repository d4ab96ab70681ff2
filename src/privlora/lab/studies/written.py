"""The file of a study as it is written: its own keys, checked without torch, before what the runs make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from privlora.config import checked
from privlora.config.method_names import known, unknown_method
from privlora.errors import ConfigError, PrivloraError, Together, nearest

Metric = Literal["auto", "loss", "accuracy", "task"]
Records = Literal["first half of evaluation", "every second of evaluation", "all of evaluation"]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class SelectionSettings(_Checked):
    """How each method's learning rate is chosen: on other seeds and other records than those reported."""

    by: Literal["own-best", "shared", "both"] = "own-best"
    """own-best: a rate for each (task, epsilon, rank, method). shared: one for each (epsilon, rank, method) over all
    tasks. both: the runs that both tables need."""
    seeds: list[int] = []
    """Seeds of the runs that only choose; needed where a method has several rates."""
    records: Records = "first half of evaluation"
    """The evaluation records that only choose; the others are reported. "all of evaluation" lets both use all."""


class StudySettings(_Checked):
    """The file. Axes are lists; see docs/compare.md."""

    base: dict[str, Any]
    tasks: dict[str, Any] = Field(min_length=1)
    methods: list[str | dict[str, Any]] = Field(min_length=1)
    learning_rate: list[float] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    epsilon: list[float] = []
    """Needed unless no method is private."""
    rank: list[int] = Field(default=[8], min_length=1)
    selection: SelectionSettings = SelectionSettings()
    report: Literal["chosen", "all"] = "chosen"
    """Report seeds run at the chosen rates only, or at every rate of the grid."""
    metric: Metric = "auto"
    """auto: the task's own metric where data.task is set, else the loss."""
    output: str | None = None
    """Folder of the study; studies/<name of the file> unless given."""
    keep_runs: bool = True
    """Keep each run's adapter and settings beside its ledger; false keeps the ledger only."""
    insecure_noise_seed: Literal["paired"] | None = None
    """paired: all methods of a (task, seed) see the same batches and the same stream of noise. Stamped NOT PRIVATE."""

    @model_validator(mode="after")
    def _consistent(self) -> StudySettings:
        for name in ("learning_rate", "seeds", "epsilon", "rank"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} names a value twice")
            if name != "seeds" and any(value <= 0 for value in values):
                raise ValueError(f"{name} holds a value that is not above 0")
        both = set(self.seeds) & set(self.selection.seeds)
        if both:
            raise ValueError(
                f"seed {min(both)} is in seeds and in selection.seeds: a rate chosen on a run would be reported on "
                "that run. Fix: give selection seeds of their own"
            )
        if len(set(self.selection.seeds)) != len(self.selection.seeds):
            raise ValueError("selection.seeds names a seed twice")
        return self


_NEEDED: Final[Mapping[str, Any]] = {
    "base": {},
    "tasks": {"task": None},
    "methods": ["dp-sgd"],
    "learning_rate": [1.0],
    "seeds": [-1],
}
"""Keys that every study has, each with what contradicts nothing while the others are looked at."""


def read_study(content: Mapping[str, Any], source: str) -> tuple[list[PrivloraError], StudySettings | None]:
    """All that is wrong with the keys of a file and the names of its methods, and what is left of it to look at; None
    where that is no study."""
    problems = Together()
    problems.found += _unknown(content, StudySettings, source, "")
    values = {key: value for key, value in content.items() if key in StudySettings.model_fields}
    if isinstance(chosen := content.get("selection"), Mapping):
        misspelt = _unknown(chosen, SelectionSettings, source, "selection.")
        problems.found += misspelt
        own = {key: value for key, value in chosen.items() if key in SelectionSettings.model_fields}
        # Else seeds would be told to lack, which may stand under the wrong name.
        values["selection"] = {"seeds": [-2], **own} if misspelt else own
    lacking = [key for key in _NEEDED if not content.get(key)]
    problems.found += [
        ConfigError(f"{source}: {key} is missing or empty", fix=f"give at least one under {key}:")
        for key in lacking
    ]
    if "base" not in lacking and not isinstance(content["base"], Mapping):
        lacking.append("base")
        problems.found.append(
            ConfigError(
                f"{source}: base is no group of settings",
                fix="write the run's settings themselves below base:, as base: {model: {name: NAME}, data: …}",
            )
        )
    if isinstance(methods := values.get("methods"), list):
        wrong = {name for name in map(_name_of, methods) if isinstance(name, str) and name not in known()}
        problems.found += [_unknown_method(name, source) for name in sorted(wrong)]
        values["methods"] = [each for each in methods if _name_of(each) not in wrong]
        lacking += ["methods"] * bool(wrong and not values["methods"])
    settings = problems.of(
        None, checked, StudySettings, {**values, **{key: _NEEDED[key] for key in lacking}}, source
    )
    return problems.found, None if lacking else settings


def _name_of(item: Any) -> Any:
    """Of a method as a study lists it."""
    name = item.get("name") if isinstance(item, Mapping) else item
    return name if isinstance(name, str) else None


def _unknown_method(name: str, source: str) -> ConfigError:
    return unknown_method(name).reworded(lambda text: text.replace("method.name:", "methods:", 1)).of(source)


def _unknown(
    content: Mapping[str, Any], kind: type[BaseModel], source: str, prefix: str
) -> list[ConfigError]:
    return [
        ConfigError(f"{source}: unknown setting {prefix}{key}", fix=nearest(str(key), kind.model_fields))
        for key in content
        if key not in kind.model_fields
    ]
