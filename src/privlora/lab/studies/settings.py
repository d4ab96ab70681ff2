"""What a study compares: one YAML file, checked in full before the first run starts.

A study is a grid of cells. Every cell is an ordinary run: ``base`` holds groups of settings as in a run's file, a
task and a method lay theirs over it, and the axes (epsilon, rank, learning rate, seed) fill in the rest. What
would make a comparison unequal (a method with its own data, steps or delta) is refused.

With a group ``federation`` a cell is a federation whose clients are all in one process. Its methods are rules, and runs
in one place as their upper lines. All of them take the same number of private steps.
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
from privlora.config.federation import JOINT, OF_ONE_RULE, FederationSettings
from privlora.errors import ConfigError, nearest
from privlora.federated.plans import resolved, rule_in, with_local_method
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
_METHODS_FEDERATION = ("rule", *OF_ONE_RULE)
# Of a federation, what says how many steps are taken.
_TIMETABLE = ("rounds", "local_steps")


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

    name: str | None = None
    """None: the local method of its federation.rule."""
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
    """An arm of the comparison: a method with settings of its own. ``private`` False: it has no epsilon.

    method: None for the local method of the arm's rule. in_one_place: it trains without the study's federation.
    """

    label: str
    method: str | None
    in_one_place: bool
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
            "method": {"learning_rate": cell.learning_rate},
            "privacy": {"target_epsilon": cell.epsilon} if arm.private else {"private": False},
            "run": {"seed": cell.seed},
        }
        if arm.method is not None:
            axes["method"]["name"] = arm.method
        if self.settings.insecure_noise_seed == "paired":
            # The same for all methods of a (task, seed).
            number = self.tasks.index(cell.task) + 1
            axes["privacy"]["insecure_noise_seed"] = number * 2**32 + cell.seed % 2**32
        merged: Groups = {}
        label = {"run": {"label": cell.task}}
        for layer in (label, self.settings.base, self.of_task(cell.task), arm.overrides, axes):
            for group, values in layer.items():
                merged[group] = {**merged.get(group, {}), **values}
        if "federation" in merged:
            _take_equal_steps(merged, arm, source)
        steps = merged["privacy"].get("steps")
        if "federation" not in merged and isinstance(steps, int) and steps > 0:
            merged["run"]["checkpoint_every"] = steps  # a cell is repeated, not resumed
        settings = settings_from(merged, source=source)
        return settings if settings.federation is None else with_local_method(settings)


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
    own = dict(given.model_extra or {})
    in_one_place = "federation" in own and own["federation"] is None
    if in_one_place:
        del own["federation"]
    called = given.label or given.name or own.get("federation.rule", "")
    overrides = _groups(own, f"{source}: methods.{called}", default="method")
    federation = overrides.get("federation", {})
    if given.name is None and "rule" not in federation:
        fix = "give the method's name, or federation.rule in a study of federations"
        raise ConfigError(f"{source}: methods: name is missing", fix=fix)
    try:
        method = None if given.name is None else find_row(given.name)
    except ConfigError as error:
        raise error.of(f"{source}: methods") from None
    label = given.label or _label(given, own, in_one_place, federation)
    rates = tuple(sorted(given.learning_rate or settings.learning_rate))
    may_set = {"privacy": _METHODS_PRIVACY, "federation": _METHODS_FEDERATION}
    for group, values in overrides.items():
        others = set() if group in ("method", "adapter") else set(values) - {*may_set.get(group, ())}
        if others:
            what = f"{source}: method {label!r} sets {group}.{min(others)}"
            why = "methods are compared on the same data, at the same privacy and the same number of steps"
            raise ConfigError(what, why=why, fix="set it in base or in a task")
    is_private = method is None or method.private
    private = is_private and overrides.get("privacy", {}).get("private", True) is not False
    if private and not settings.epsilon:
        raise ConfigError(f"{source}: epsilon is missing or empty", fix="give target epsilons, as [1, 3]")
    return Arm(label, given.name, in_one_place, private, rates, given.learning_rate is not None, overrides)


def _label(given: _Named, own: Mapping[str, Any], in_one_place: bool, federation: Mapping[str, Any]) -> str:
    """The rule or the name, and what is special: ``prism (optimizer scalar)``, ``fedavg (dp-sgd, non-private)``.

    own: what the item sets, without null for a federation. federation: of that, what is of this group.
    """
    options = dict(federation)
    names = [str(name) for name in (options.pop("rule", None), given.name) if name is not None]
    special = [*names[1:], *(["in one place"] if in_one_place else [])]
    special += [f"{key} {value}" for key, value in options.items()]
    special += [
        "non-private" if (key, value) == ("privacy.private", False) else f"{key} {value}"
        for key, value in own.items()
        if key.partition(".")[0] != "federation"
    ]
    return f"{names[0]} ({', '.join(special)})" if special else names[0]


def _take_equal_steps(merged: Groups, arm: Arm, source: str) -> None:
    """Give an arm of a study of federations as many private steps as all others have.

    Rule joint takes them one a round. A run in one place takes all of them, without the group federation.
    """
    group = merged["federation"]
    if not arm.in_one_place and "rule" not in group:
        fix = "set federation.rule for it or in base; federation: null trains it in one place"
        raise ConfigError(f"{source}: no rule says how clients train together", fix=fix)
    if not arm.in_one_place and group["rule"] != JOINT:
        return
    timetable = {name: group[name] for name in _TIMETABLE if name in group}
    found = checked(
        FederationSettings, {"clients": 2, "rule": "fedavg", **timetable}, f"{source}: federation"
    )
    if not arm.in_one_place:
        others = {name: value for name, value in group.items() if name not in _TIMETABLE}
        merged["federation"] = {**others, "rounds": found.steps}
    elif group.get("privacy_model") == "client" or not isinstance(group.get("clients"), int):
        why = "it hides records, and reads data.path"
        fix = "leave out this method, or privacy_model: client and paths of clients"
        raise ConfigError(
            f"{source}: a run in one place does not compare with this federation", why=why, fix=fix
        )
    else:
        del merged["federation"]
        merged["privacy"]["steps"] = found.steps


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
            if settings.federation is None:
                method.resolve(settings.method, settings.adapter.init, settings.privacy.steps)
            elif rule_in(settings)["common"]:
                resolved(settings)
            else:
                what = f"federation.rule={settings.federation.rule} has an adapter for each client"
                raise ConfigError(what, why="a study scores one adapter", fix="leave this rule out")
            refuse_misfits(settings, method)
            refuse_unsettled(settings)
        except ConfigError as misfit:
            raise misfit.of(f"{study.source}: task {cell.task!r}, method {cell.method!r}") from None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
