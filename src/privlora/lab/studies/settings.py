"""What a study compares: one YAML file, checked in full before the first run starts.

A study is a grid of cells. Every cell is an ordinary run: ``base`` holds groups of settings as in a run's file, a
task and a method lay theirs over it, and the axes (epsilon, rank, learning rate, seed) fill in the rest. What
would make a comparison unequal (a method with its own data, steps or delta) is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from privlora.config import Settings, checked, read_yaml, settings_from
from privlora.config.base import Wrong
from privlora.errors import ConfigError, nearest
from privlora.methods import find_row
from privlora.training.misfits import refuse_misfits, refuse_unsettled

Groups = dict[str, dict[str, Any]]
Rule = Literal["own-best", "shared"]

RULES: tuple[Rule, ...] = ("own-best", "shared")
# Settings on which no result depends.
_WITHOUT_EFFECT: Any = {"run": True, "data": {"unchecked"}}
# What an axis decides, so that nothing else may.
_BY_AXIS = {
    "privacy.target_epsilon": "epsilon",
    "privacy.noise_multiplier": "epsilon",
    "adapter.r": "rank",
    "method.learning_rate": "learning_rate",
    "method.name": "methods",
    "run.seed": "seeds",
    "run.output": "--output",
    "privacy.insecure_noise_seed": "insecure_noise_seed",
}
# Of the privacy settings, those that a method may choose: they change neither epsilon nor what it protects.
_METHODS_PRIVACY = ("bands", "clip_norm", "clip_quantile", "private")


_Value = TypeVar("_Value")


def _distinct(values: list[_Value]) -> list[_Value]:
    if len(set(values)) != len(values):
        raise Wrong("a value is named twice", "name each once")
    return values


Distinct = Annotated[list[_Value], AfterValidator(_distinct)]
Rates = Annotated[Distinct[PositiveFloat], Field(min_length=1)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class _Named(_Checked):
    """A method of the file; what else it sets is laid over base."""

    model_config = ConfigDict(extra="allow")

    name: str
    label: str | None = None
    learning_rate: Rates | None = None


class SelectionSettings(_Checked):
    """How each method's learning rate is chosen: on other seeds and other records than those reported."""

    by: Literal["own-best", "shared", "both"] = "own-best"
    """own-best: a rate for each (task, epsilon, rank, method). shared: one for each (epsilon, rank, method) over all
    tasks. both: the runs that both tables need."""
    seeds: Distinct[int] = []
    """Seeds of the runs that only choose; needed where a method has several rates."""


class StudySettings(_Checked):
    """The file. Axes are lists; see docs/compare.md."""

    base: dict[str, Any]
    tasks: dict[str, Any] = Field(min_length=1)
    methods: list[str | dict[str, Any]] = Field(min_length=1)
    learning_rate: Rates
    seeds: Annotated[Distinct[int], Field(min_length=1)]
    epsilon: Distinct[PositiveFloat] = []
    """Needed unless no method is private."""
    rank: Annotated[Distinct[PositiveInt], Field(min_length=1)] = [8]
    selection: SelectionSettings = SelectionSettings()
    insecure_noise_seed: Literal["paired"] | None = None
    """paired: all methods of a (task, seed) see the same batches and the same stream of noise. Stamped NOT PRIVATE."""

    @model_validator(mode="after")
    def _consistent(self) -> StudySettings:
        if both := set(self.seeds) & set(self.selection.seeds):
            what = f"seed {min(both)} is in seeds and in selection.seeds, and would choose what it reports"
            raise Wrong(what, "give selection seeds of their own")
        return self


Place = tuple[str, str, float, int]
"""(task, method, epsilon, rank): one cell of a table; its runs differ in learning rate and seed."""


@dataclass(frozen=True)
class Arm:
    """An arm of the comparison: a method with settings of its own. ``private`` False: it has no epsilon."""

    label: str
    method: str
    private: bool
    learning_rates: tuple[float, ...]
    own_grid: bool
    overrides: Groups


@dataclass(frozen=True, order=True)
class Cell:
    """One run of a study. ``epsilon`` is 0 for a run without noise (so that cells can be sorted)."""

    task: str
    method: str
    epsilon: float
    rank: int
    learning_rate: float
    seed: int

    @property
    def folder(self) -> str:
        """Of the run, inside the study's ``runs``."""
        epsilon = f"eps{self.epsilon:g}" if self.epsilon else "no-noise"
        return f"{slug(self.task)}/{slug(self.method)}/{epsilon}-r{self.rank}-lr{self.learning_rate:g}-s{self.seed}"


@dataclass(frozen=True)
class Study:
    """A checked study; ``source`` is the file's name, for messages."""

    source: str
    settings: StudySettings
    arms: tuple[Arm, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.settings.tasks)

    @property
    def selects(self) -> bool:
        """Whether any method has more than one learning rate to choose from."""
        return any(len(arm.learning_rates) > 1 for arm in self.arms)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The tables for which report runs are made."""
        by = self.settings.selection.by if self.selects else "own-best"
        return RULES if by == "both" else (by,)

    @cached_property
    def by_label(self) -> dict[str, Arm]:
        return {arm.label: arm for arm in self.arms}

    def epsilons(self, method: str) -> tuple[float, ...]:
        """An arm's epsilons: the axis, or (0,) without noise."""
        return tuple(self.settings.epsilon) if self.by_label[method].private else (0.0,)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every cell of the tables, task by task, so that processes keep what they loaded."""
        return tuple(
            (task, arm.label, epsilon, rank)
            for task, rank, arm in product(self.tasks, self.settings.rank, self.arms)
            for epsilon in self.epsilons(arm.label)
        )

    def grid(self, seeds: Iterable[int]) -> Iterator[Cell]:
        """Every learning rate with each of these seeds, task by task."""
        seeds = tuple(seeds)
        for place in self.places:
            for rate, seed in product(self.by_label[place[1]].learning_rates, seeds):
                yield Cell(*place, rate, seed)

    def of_task(self, task: str) -> Groups:
        """What a task lays over base. Raises ConfigError."""
        return _groups(self.settings.tasks[task] or {}, f"{self.source}: tasks.{task}")

    def data_task(self, task: str) -> str | None:
        """data.task of a task, which brings a metric of its own."""
        found = {**self.settings.base.get("data", {}), **self.of_task(task).get("data", {})}.get("task")
        return None if found is None else str(found)

    def fingerprint(self, cell: Cell, role: str) -> str:
        """Of everything that a run's result depends on, but for the contents of files and privlora's version."""
        records = "every second of evaluation" if self.selects else "all of evaluation"
        whole = [self._digests[cell.task, cell.method, cell.epsilon, cell.rank], role, records]
        return _digest([*whole, cell.learning_rate, cell.seed])

    @cached_property
    def _digests(self) -> dict[Place, str]:
        """Of the settings of each place, without rate and seed. What has its default is left out, so that a setting
        that a later version adds changes nothing; a method whose defaults changed has another revision."""
        found = {}
        for place in self.places:
            settings = self.run_settings(Cell(*place, 1.0, 0))
            content = settings.model_dump(mode="json", exclude_defaults=True, exclude=_WITHOUT_EFFECT)
            method = find_row(settings.method.name)
            # Of runs in entries it is left out, as of those that were before there was another unit.
            content["method"].pop("relative_rate", None)
            if method.is_relative(settings.method.relative_rate):
                content["method"]["relative_rate"] = True
            if method.revision:
                content["revision"] = method.revision
            found[place] = _digest(content)
        return found

    def run_settings(self, cell: Cell) -> Settings:
        """The settings of a cell's run, but for its folder. Raises ConfigError."""
        arm = self.by_label[cell.method]
        source = f"{self.source}: task {cell.task!r}, method {cell.method!r}"
        axes: Groups = {
            "adapter": {"r": cell.rank},
            "method": {"name": arm.method, "learning_rate": cell.learning_rate},
            "privacy": {"target_epsilon": cell.epsilon} if arm.private else {"private": False},
            "run": {"seed": cell.seed},
        }
        if self.settings.insecure_noise_seed == "paired":
            # The same for all methods of a (task, seed).
            number = self.tasks.index(cell.task) + 1
            axes["privacy"]["insecure_noise_seed"] = number * 2**32 + cell.seed % 2**32
        merged: Groups = {}
        label = {"run": {"label": cell.task}}
        for layer in (label, self.settings.base, self.of_task(cell.task), arm.overrides, axes):
            for group, values in layer.items():
                merged[group] = {**merged.get(group, {}), **values}
        steps = merged.get("privacy", {}).get("steps")
        if isinstance(steps, int) and steps > 0:
            merged["run"]["checkpoint_every"] = steps  # a cell is repeated, not resumed
        return settings_from(merged, source=source)


def load_study(path: str | Path) -> Study:
    """Read and check a study's file: every setting of every run. Raises ConfigError."""
    return study_from(read_yaml(path), source=str(path))


def study_from(content: Mapping[str, Any], source: str = "study") -> Study:
    """A checked study from plain nested mappings. Raises ConfigError."""
    selection = content.get("selection")
    for kind, given in ((StudySettings, content), (SelectionSettings, selection)):
        for key in set(given) - kind.model_fields.keys() if isinstance(given, Mapping) else ():
            raise ConfigError(f"{source}: unknown setting {key}", fix=nearest(str(key), kind.model_fields))
    settings = checked(StudySettings, content, source)
    base = _groups(settings.base, f"{source}: base")
    settings = settings.model_copy(update={"base": base, "epsilon": sorted(settings.epsilon)})
    study = Study(source, settings, tuple(_arm(item, settings, source) for item in settings.methods))
    _refuse_equal_names((arm.label for arm in study.arms), "methods", source)
    _refuse_equal_names(study.tasks, "tasks", source)
    _check(study)
    return study


def slug(name: str) -> str:
    """A name for a folder.

    >>> slug("prism (optimizer scalar)")
    'prism-optimizer-scalar'
    """
    return re.sub(r"[^a-z0-9._+]+", "-", name.lower()).strip("-.") or "unnamed"


def _arm(item: str | dict[str, Any], settings: StudySettings, source: str) -> Arm:
    given = checked(_Named, {"name": item} if isinstance(item, str) else item, f"{source}: methods")
    try:
        method = find_row(given.name)
    except ConfigError as error:
        raise error.of(f"{source}: methods") from None
    own = given.model_extra or {}
    label = given.label or _label(given.name, own)
    rates = tuple(sorted(given.learning_rate or settings.learning_rate))
    overrides = _groups(own, f"{source}: methods.{label}", default="method")
    for group, values in overrides.items():
        others = set(values) if group not in ("method", "adapter", "privacy") else set()
        if group == "privacy":
            others = set(values) - {*_METHODS_PRIVACY}
        if others:
            what = f"{source}: method {label!r} sets {group}.{min(others)}"
            why = "methods are compared on the same data, at the same privacy and the same number of steps"
            raise ConfigError(what, why=why, fix="set it in base or in a task")
    private = method.private and overrides.get("privacy", {}).get("private", True) is not False
    if private and not settings.epsilon:
        raise ConfigError(f"{source}: epsilon is missing or empty", fix="give target epsilons, as [1, 3]")
    return Arm(label, given.name, private, rates, given.learning_rate is not None, overrides)


def _label(name: str, given: Mapping[str, Any]) -> str:
    """The name, and what is special: ``prism (optimizer scalar)``, ``prism (non-private)``."""
    special = [
        "non-private" if (key, value) == ("privacy.private", False) else f"{key} {value}"
        for key, value in given.items()
    ]
    return f"{name} ({', '.join(special)})" if special else name


def _groups(given: Any, where: str, default: str | None = None) -> Groups:
    """``{data: {path: x}}`` and ``{data.path: x}`` alike; a bare key belongs to ``default``."""
    fix = "write group.key: value"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a mapping", fix=fix)
    found: Groups = {}
    for key, value in given.items():
        group, dot, name = str(key).partition(".")
        if dot:
            found.setdefault(group, {})[name] = value
        elif isinstance(value, Mapping):
            found.setdefault(group, {}).update(value)
        elif default is not None:
            found.setdefault(default, {})[group] = value
        else:
            raise ConfigError(f"{where}: {key!r} is not a group of settings", fix=fix)
    places = [f"{group}.{name}" for group, values in found.items() for name in values]
    decided = [place for place in places if place in _BY_AXIS]
    if decided:
        fix = f"use {', '.join(_BY_AXIS[place] for place in decided)} instead"
        raise ConfigError(f"{where} sets {', '.join(decided)}, which the study decides", fix=fix)
    return found


def _refuse_equal_names(names: Iterable[str], what: str, source: str) -> None:
    twice = [name for name, count in Counter(map(slug, names)).items() if count > 1]
    if twice:
        fix = "give one of them another (for methods: label)"
        raise ConfigError(f"{source}: several {what} share a name, {twice[0]!r}", fix=fix)


def _check(study: Study) -> None:
    """Whatever any run would refuse before it reads a record."""
    for name in study.tasks:
        if own := study.of_task(name).get("method"):
            fix = "set it in base.method or for a method"
            raise ConfigError(f"{study.source}: task {name!r} sets method.{next(iter(own))}", fix=fix)
    if study.selects and not study.settings.selection.seeds:
        fix = "give seeds of their own to the choice, as selection: {seeds: [100, 101]}"
        raise ConfigError(f"{study.source}: selection.seeds is missing", fix=fix)
    for place in study.places:
        cell = Cell(*place, study.by_label[place[1]].learning_rates[0], study.settings.seeds[0])
        settings = study.run_settings(cell)
        method = find_row(settings.method.name)
        try:
            if settings.data.chosen is not None:
                fix = "remove data.chosen and data.rejected, or train with `privlora train`"
                raise ConfigError("a study compares no preferences, as data.chosen asks for", fix=fix)
            if settings.data.evaluation is None:
                fix = "give held-out records that may be shown"
                raise ConfigError(f"task {cell.task!r} has no data.evaluation", fix=fix)
            settings.refuse_a_federation()
            method.resolve(settings.method, settings.adapter.init, settings.privacy.steps)
            refuse_misfits(settings, method)
            refuse_unsettled(settings)
        except ConfigError as misfit:
            raise misfit.of(f"{study.source}: task {cell.task!r}, method {cell.method!r}") from None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
