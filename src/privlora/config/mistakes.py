"""What is said of wrong settings: all that is unknown, missing or of a wrong value, each with how to mend it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from privlora.config.auto import AUTO, OrAuto
from privlora.config.base import Truth, group_in
from privlora.config.federation import FederationSettings
from privlora.config.groups import PrivacySettings, QuantizationSettings, Settings
from privlora.config.method_names import known, unknown_method
from privlora.config.nearby import Located, meant_by, named_here
from privlora.config.one_place import misplaced, of_mapping
from privlora.config.other_names import NO_GROUPS, OTHER_VALUES, TRUTHS, called_here
from privlora.config.places import at_lines, field_of
from privlora.config.rows import wrong_for_row
from privlora.data.labels import SCORE
from privlora.data.records import is_data_file_name
from privlora.errors import ConfigError, PrivloraError, echoed, in_one, named, nearest
from privlora.ranges import MOST_STEPS

# A Python caller may have put records where these name files, so what they hold is never shown.
_RECORDS = frozenset(("path", "evaluation", "public_text", "file"))
_INNER: Final = {
    f"federation.{name}": inner
    for name, field in FederationSettings.model_fields.items()
    if (inner := group_in(field.annotation)) is not None
}
"""Groups of which a setting holds a list."""
_HELD: Final[Mapping[str, type[BaseModel]]] = {"model.quantization": QuantizationSettings}
"""Groups of which a setting holds one."""
_INDEX = re.compile(r"\[\d+\]")
_BRANCH = re.compile(r"constrained-|literal\[")
"""One of the kinds of value that a setting may be, as pydantic calls it."""

_SHOWN, _NAMES_SHOWN = 20, 12
"""Wrong values, and unknown names, that an error tells: a file of something else is no page of names."""
_WHY_UNKNOWN: Final = "were it ignored, the run might lack a protection that you meant to ask for"
_MORE_SAID = re.compile(r"\.? Fix: ")

Location = tuple[int | str, ...]
Problem = Mapping[str, Any]
"""One of pydantic's errors."""


@dataclass(frozen=True)
class Origin:
    """Where settings were read. overridden: those of the command line; file: the YAML, whose lines can be named."""

    source: str
    overridden: frozenset[tuple[str, str]] = frozenset()
    file: Path | None = None

    def called(self, place: Location) -> bool:
        """Whether it was given on the command line."""
        return place[:2] in self.overridden

    def where(self, place: Location) -> str:
        """In brackets, where a setting was given; nothing where that is not known.

        >>> Origin("run.yaml", frozenset({("privacy", "steps")})).where(("privacy", "steps"))
        ' (on the command line)'
        """
        if self.called(place):
            return " (on the command line)"
        line = next((self._lines[key] for key in (place[:2], place[:1]) if key in self._lines), None)
        if line is None and len(place) == 1 and any(place[0] == group for group, _ in self.overridden):
            return " (on the command line)"
        return "" if line is None else f" (line {line})"

    def line_to_write(self, group: object, name: object, value: str) -> str:
        """As it is written where it stands.

        >>> Origin("run.yaml").line_to_write("privacy", "steps", "200")
        'steps: 200'
        """
        called = self.called((str(group), str(name)))
        return f"{group}.{name}={value}" if called else f"{name}: {value}"

    @cached_property
    def _lines(self) -> Mapping[Location, int]:
        """Of groups and settings; empty for a file that has changed meanwhile."""
        if self.file is None:
            return {}
        try:
            root = yaml.compose(self.file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return {}
        return {place: node.start_mark.line + 1 for place, node in _keys(root)}


def _keys(root: Any) -> Iterator[tuple[Location, yaml.Node]]:
    for group, inside in root.value if isinstance(root, yaml.MappingNode) else ():
        yield (group.value,), group
        for name, _ in inside.value if isinstance(inside, yaml.MappingNode) else ():
            if isinstance(name, yaml.ScalarNode):
                yield (group.value, name.value), name


def checked_settings(values: Mapping[str, Any], origin: Origin, rows: bool = False) -> Settings:
    """The settings of a run. rows: whether to ask what the method's row can have. Raises ConfigError for all that is
    wrong with them."""
    no_groups = _no_groups(values, origin)
    groups = Located((group, v) for group, v in values.items() if group not in no_groups)
    groups.where = origin.where
    unknown = _unknown_in(groups)
    rest: dict[str, Any] = {
        group: {key: v for key, v in inner.items() if (group, key) not in unknown}
        if isinstance(inner, Mapping)
        else inner
        for group, inner in values.items()
        if (group,) not in unknown and group not in no_groups
    }
    rest |= {group: _stands_in(group, values) for group in no_groups if group not in _MAY_LACK}
    problems, found = _problems(rest)
    method, privacy = rest.get("method", {}), rest.get("privacy", {})
    of_row = []
    if rows and isinstance(method, Mapping) and isinstance(privacy, Mapping):
        private = privacy.get("private", True) is True
        of_row = wrong_for_row(method, private=private, federated=rest.get("federation") is not None)
    alone = found is not None and not (problems or unknown or no_groups)
    # Of those that read a run's own file, which holds it, one that only the table knows is left to the table.
    named_wrong = [] if alone and not rows else _wrong_method(rest, origin)
    if found is not None and alone and not (of_row or named_wrong):
        found.given_at(origin.where)
        return found
    told = [*_unknown_names(unknown, values, origin), *no_groups.values()]
    alone = not (unknown or named_wrong or of_row or no_groups)
    meant = {meant_by(str(place[0]), fix) for place, fix in unknown.items() if len(place) == 2}
    told += [*_told(problems, rest, origin, alone=alone, meant=meant), *named_wrong]
    told += [_of_row(name, error, origin) for name, error in of_row]
    places = [*unknown, *((group,) for group in no_groups), *map(_of_what, problems)]
    places += [("method", name) for name, _ in of_row]
    raise _one_of(told, origin, places)


def _of_row(name: str, error: ConfigError, origin: Origin) -> ConfigError:
    """What a row refuses, with where it stands."""
    called, where = f"method.{name}", origin.where(("method", name))
    what = at_lines(error.what, origin.where, Settings.model_fields) if called in error.what else error.what
    if where and called not in error.what:
        what = f"{called}{where}: {what}"
    return ConfigError(what, why=error.why, fix=error.fixes)


_MAIN: Final = {
    "model": "name",
    "data": "path",
    "privacy": "target_epsilon",
    "adapter": "r",
    "method": "name",
    "run": "output",
    "federation": "rule",
    "auto": "passes",
}
"""The setting of a group that is meant by a value in the place of the whole group."""
_ALL: Final = ("true", "yes", "all", "on")
"""In the place of the group auto: what is meant is all that is not given."""

_MAY_LACK: Final = frozenset(
    name for name, field in Settings.model_fields.items() if type(None) in get_args(field.annotation)
)
"""Groups that a run may be without."""


def natural(group: str, value: object) -> str | None:
    """How to write what was given in the place of a group, on the command line; None for what is no group's name.

    >>> natural("method", "prism"), natural("data", "a b c")
    ('write method.name=prism', 'write data.path=…')
    >>> natural("auto", True), natural("auto", "true"), natural("auto", 3)
    ('write auto.all=true', 'write auto.all=true', 'write auto.passes=3')
    """
    if group == "auto" and str(value).lower() in _ALL:
        return "write auto.all=true"
    name = _MAIN.get(group)
    return None if name is None else f"write {group}.{name}={value if _is_shown(group, value) else '…'}"


def _is_shown(group: str, value: object) -> bool:
    """Whether an error may hold it: of data nothing but the name of a file, since it may be a record; else numbers,
    names of models, and what is nearly a method."""
    if named(value) != repr(value) or value is None:
        return False
    if group == "data":
        return is_data_file_name(str(value))
    return group == "model" or echoed(value, known() if group == "method" else ()) == repr(value)


def _no_groups(values: Mapping[str, Any], origin: Origin) -> dict[str, ConfigError]:
    """Of groups that hold no settings: nothing, or a value in their place."""
    found = dict[str, ConfigError]()
    for group, inner in values.items():
        if group not in Settings.model_fields or isinstance(inner, Mapping):
            continue
        where = origin.where((group,))
        if inner is None:
            if group not in _MAY_LACK:  # else written by a machine
                found[group] = ConfigError(
                    f"group {group!r}{where} is empty", fix=f"{group}: remove it or give it settings"
                )
            continue
        name = _MAIN.get(group)
        fix = f"write {group}.key: value as two levels"
        if inner is False and group in _MAY_LACK:
            fix = "remove it, or give it settings"
        elif group == "auto" and str(inner).lower() in _ALL:
            name, fix = None, "write auto: true"
        if name is not None and isinstance(inner, str | int | float) and not isinstance(inner, bool):
            pair = yaml.safe_dump(
                {name: inner if _is_shown(group, inner) else "..."},
                default_flow_style=True,
                allow_unicode=True,
            ).strip()
            fix = f"write {group}: {pair}, or {pair[1:-1]} on a line of its own below {group}:, indented"
        found[group] = ConfigError(f"{group!r}{where} must be a group of settings", fix=fix)
    return found


def _stands_in(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the place of a group that cannot be read, which contradict nothing: what is told of others holds."""
    if group == "privacy":
        given = values.get(group)
        private = not isinstance(given, Mapping) or given.get("private") is not False
        return neutral_privacy(federated=values.get("federation") is not None, private=private)
    name = _MAIN.get(group)
    given = values.get(group)
    if isinstance(given, str) and group in ("model", "method"):
        return {"name": given}
    return {"model": {"name": "model"}, "data": {"path": "records.jsonl"}}.get(group, {}) if name else {}


def neutral_privacy(*, federated: bool = False, private: bool = True) -> dict[str, Any]:
    """A group privacy that contradicts nothing beside it, while it is looked at."""
    found = {name: value for name, value in _NEUTRAL.items() if name != "steps" or not federated}
    return found if private else {**found, "private": False, "target_epsilon": None}


UNTOLD_SIZE: Final = 10**9
"""Of privacy.public_dataset_size, where what was given is none: it contradicts nothing, and stands for no number."""
_DATA: Final[Mapping[str, Any]] = {"path": "records.jsonl", "labels": SCORE}
_NEUTRAL: Final[Mapping[str, Any]] = {
    "target_epsilon": 1.0,
    "delta": 1e-15,
    "steps": MOST_STEPS,
    "expected_batch_size": 1.0,
    "public_dataset_size": UNTOLD_SIZE,
}
_ROUNDS: Final = 5  # problems of values, of groups, of all groups together, and what is left of each


def _problems(values: Mapping[str, Any]) -> tuple[list[Any], Settings | None]:
    """All of pydantic's; and the settings without what is wrong, if that makes any. It looks at values first, then at
    each group and then at all of them, so each time what is wrong is mended and the rest looked at again."""
    found, seen = list[Any](), set[tuple[Any, ...]]()
    federated = "federation" in values
    for number in range(_ROUNDS):
        try:
            settings = Settings(**values)
        except ValidationError as error:
            new = [p for p in error.errors() if (p["loc"], p["type"], p["msg"]) not in seen]
        else:
            return found, settings
        if not new:
            break
        seen |= {(p["loc"], p["type"], p["msg"]) for p in new}
        # What lacks beside a contradiction of all groups was not looked at before; later it was taken out here.
        hidden = number == 1 and {p["loc"] for p in found} == {()} and not federated
        found += [
            p for p in new if number == 0 or hidden or not (p["type"] in _TAKEN_OUT or _follows(p, found))
        ]
        values = _mended(values, new)
    return found, None


_LACKS_LABELS: Final = "Value error, label needs labels"


def _of_what(problem: Problem) -> Location:
    """Which setting, or group, a problem is about: of labels that lack these."""
    return ("data", "labels") if problem["msg"].startswith(_LACKS_LABELS) else problem["loc"]


_TAKEN_OUT: Final = ("missing", "lacking")


def _follows(problem: Problem, found: list[Any]) -> bool:
    """Whether it may be said of a group because a wrong value of it was taken out."""
    taken = [
        place["loc"][1] for place in found if len(place["loc"]) > 1 and place["loc"][:1] == problem["loc"]
    ]
    if problem["loc"] == ("privacy",):  # where another number is put in the place of most
        msg = problem["msg"].replace("1/N", "public_dataset_size")
        return any(re.search(rf"\b{name}\b", msg) for name in taken)
    return bool(taken)


def _mended(values: Mapping[str, Any], problems: list[Any]) -> dict[str, Any]:
    """The same without what is wrong."""
    mended = _without_auto(values, of_all=any(problem["loc"] == () for problem in problems))
    for problem in problems:
        group, *names = map(str, _of_what(problem) or ("",))
        inner = mended.get(group)
        if inner is None and group not in values:  # a group that is missing, or all of them
            if group:
                mended[group] = _stands_in(group, values)
        elif not names or not isinstance(inner, dict) or group == "federation":
            mended.pop(group, None)
            if group not in _MAY_LACK:
                mended[group] = _stands_in(group, values)
        else:
            inner.pop(names[0], None)
            neutral = {"data": _DATA, "privacy": _NEUTRAL}.get(group) or _stands_in(group, values)
            if names[0] in neutral and (names[0] != "labels" or "label" in inner):
                inner[names[0]] = neutral[names[0]]
    return mended


def _without_auto(values: Mapping[str, Any], *, of_all: bool) -> dict[str, Any]:
    """A copy with numbers for what is auto. of_all: without what no federation has, too: before values are checked,
    what is said of all groups is about these two."""
    federated = "federation" in values
    numbers = {"expected_batch_size": 1} | ({} if federated else {"steps": 1})
    without = {each.place for each in misplaced(of_mapping(values))} if of_all and federated else set()
    mended = {
        group: {
            key: numbers.get(key, 1.0) if value == AUTO and _is_auto(group, key) else value
            for key, value in inner.items()
            if f"{group}.{key}" not in without
        }
        if isinstance(inner, Mapping)
        else inner
        for group, inner in values.items()
        if group != "auto"
    }
    if federated and isinstance(mended.get("privacy"), dict) and values["privacy"].get("steps") == AUTO:
        mended["privacy"].pop("steps", None)  # they follow
    return mended


def mistakes(error: ValidationError, values: Mapping[str, Any], origin: Origin) -> ConfigError:
    """Of one group of settings, or of settings of another kind. values: what was read."""
    problems = error.errors()
    return _one_of(_told(problems, values, origin, alone=True), origin, [p["loc"] for p in problems])


def _one_of(found: list[ConfigError], origin: Origin, places: list[Location]) -> ConfigError:
    """All of them; the source is the command line alone where nothing of it is of the file."""
    called = all(origin.called(place) for place in places) and bool(places)
    if not called:
        return _of(found, origin.source)
    bare = [error.reworded(lambda text: text.replace(" (on the command line)", "")) for error in found]
    return _of(bare, "on the command line")


def _of(found: Sequence[PrivloraError], whom: str) -> ConfigError:
    error = in_one(found, whom)  # at least one of them is a ConfigError
    assert isinstance(error, ConfigError)
    return error


def _is_auto(group: str, name: str) -> bool:
    field = _field(f"{group}.{name}")
    return field is not None and OrAuto in field.metadata


def _told(
    problems: list[Any],
    values: Mapping[str, Any],
    origin: Origin,
    *,
    alone: bool,
    meant: Container[Location | None] = (),
) -> list[ConfigError]:
    """What is missing, then each wrong value. alone: whether nothing else is told with it. meant: settings that are
    told with another name, and so not missing."""
    several = _lacking_of_privacy(problems, values)
    # One sentence of its own says most of a single thing that the promise lacks.
    if alone and len(problems) == 1 and problems[0]["type"] == "lacking" and len(several) < 2:
        return [_wrong(problems[0], problems, origin)]
    extra = {problem["loc"][:-1] for problem in problems if problem["type"] == "extra_forbidden"}
    lacking = [
        loc
        for problem in problems
        # Inside a list, a name from elsewhere tells more than that the one from here is missing.
        if problem["type"] == "missing" and not (len(loc := problem["loc"]) > 2 and loc[:-1] in extra)
    ]
    lacking += [("privacy", name) for name in several]
    lacking = [place for place in lacking if place not in meant]
    groups = list(Settings.model_fields)
    lacking.sort(key=lambda place: groups.index(str(place[0])) if place[0] in groups else 0)
    found = _missing(lacking, federated=values.get("federation") is not None)
    problems = _furthest(problems)
    wrong = [_wrong(problem, problems, origin) for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        last = wrong.pop()
        more = f"{last.what}, and {len(problems) - _SHOWN} more"
        wrong.append(ConfigError(more, why=last.why, fix=last.fixes))
    return found + wrong


def _furthest(problems: list[Any]) -> list[Any]:
    """One of each setting: of a value that may be several things, the one that was read furthest."""
    wrong = [problem for problem in problems if problem["type"] not in ("missing", "lacking")]
    places = [_place(problem["loc"]) for problem in wrong]
    around = {place[:end] for place in places for end, sign in enumerate(place) if sign in ".["}
    found: dict[tuple[str, str], Any] = {}
    for place, problem in zip(places, wrong, strict=True):
        if "." in place and place in around:
            continue
        key = place, "" if "." in place else problem["msg"]  # of a group, or all of them, each is another
        if key not in found or len(problem["loc"]) > len(found[key]["loc"]):
            found[key] = problem
    return list(found.values())


def _lacking_of_privacy(problems: list[Any], values: Mapping[str, Any]) -> list[str]:
    """What the promise lacks of its settings; [] for settings of another kind."""
    privacy = values.get("privacy")
    if not isinstance(privacy, Mapping) or not problems:
        return []
    told = {problem["loc"] for problem in problems}
    if problems[0]["loc"] == ():  # says itself what of privacy it is about
        return []
    return [name for name in PrivacySettings.lacks(privacy) if ("privacy", name) not in told]


def _wrong_method(values: Mapping[str, Any], origin: Origin) -> list[ConfigError]:
    """What `methods.find_row` would say of method.name, beside what else is wrong."""
    method = values.get("method")
    name = method.get("name") if isinstance(method, Mapping) else None
    if not isinstance(name, str) or name in known():
        return []
    alone = unknown_method(name)
    what = at_lines(alone.what, origin.where, Settings.model_fields)
    return [ConfigError(what, fix=alone.fix)]


def _called(place: tuple[object, ...]) -> str:
    """An unknown group or setting, as errors call it."""
    if len(place) == 1:
        return f"group {named(place[0])}"
    return f"setting {named(f'{place[0]}.{place[1]}', longest=80)}"


def _unknown_in(values: Mapping[str, Any]) -> dict[tuple[Any, ...], str]:
    """Groups and settings, as (group, ) and (group, name), that nothing is called here, and how each is mended."""
    groups, unknown = Settings.model_fields, dict[tuple[Any, ...], str]()
    for group, inner in values.items():
        if group not in groups:
            unknown[(group,)] = NO_GROUPS.get(str(group)) or named_here("", group, inner, values)
            continue
        annotation = groups[group].annotation
        kind = next(k for k in (annotation, *get_args(annotation)) if isinstance(k, type))
        assert issubclass(kind, BaseModel)
        for key in inner or ():
            if key not in kind.model_fields:
                told = len(unknown) < _NAMES_SHOWN  # of thousands it would take minutes
                unknown[(group, key)] = named_here(group, key, inner[key], values) if told else ""
    return unknown


_MEANT = re.compile(r"did you mean '(?:(\w+)\.)?(\w+)'\?")


def _unknown_names(
    unknown: Mapping[tuple[Any, ...], str], values: Mapping[str, Any], origin: Origin
) -> list[ConfigError]:
    """One of each, or of all that are mended alike: for some that is the list of all that is known. unknown: how each
    is mended, by (group, ) or (group, name)."""
    alike: dict[str, list[tuple[Any, ...]]] = {}
    for place in list(unknown)[:_NAMES_SHOWN]:
        fix = unknown[place] + _line_meant(place, unknown[place], values, origin)
        alike.setdefault(fix, []).append(place)
    found = list[ConfigError]()
    for fix, places in alike.items():
        names = ", ".join(f"{_called(place)}{origin.where(place)}" for place in places)
        why = _WHY_UNKNOWN if any(len(place) == 2 for place in places) else None
        found.append(ConfigError(f"unknown {names}", why=why, fix=fix))
    if len(unknown) > _NAMES_SHOWN:
        found.append(ConfigError(f"{len(unknown) - _NAMES_SHOWN} more unknown names", fix="mend these first"))
    return found


def _line_meant(place: tuple[Any, ...], fix: str, values: Mapping[str, Any], origin: Origin) -> str:
    """The line to write, of a slip of the pen, where the value is one that the setting that was meant can have: a
    number or true and false, or one of its words. Any other may be a key of a service or a record."""
    meant = _MEANT.match(fix)
    if meant is None or len(place) < 2:
        return ""
    value = values[place[0]][place[1]]
    group, name = meant[1] or str(place[0]), meant[2]
    field = _field(f"{group}.{name}")
    if field is None or name in _RECORDS or not _is_one_of(value, field):
        return ""
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    if not isinstance(value, str) and echoed(value) != repr(value):
        shown = "…"  # a number of a person
    if origin.called(place):
        return f" Write {group}.{name}={shown}"
    return f" Write {name}: {shown}" + (f" in the group {group}" if meant[1] else "")


def _is_one_of(value: Any, field: Any) -> bool:
    """Whether a setting takes such a number, truth or word."""
    kinds = _kinds_in(field.annotation)
    if isinstance(value, str):
        return value in kinds or (value == AUTO and OrAuto in field.metadata)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, int | float) and bool({int, float} & {k for k in kinds if isinstance(k, type)})


def _kinds_in(annotation: Any) -> set[Any]:
    """The types and words of an annotation, however deep; of lists none."""
    if get_origin(annotation) in (list, dict, tuple):
        return set()
    inner = get_args(annotation)
    return set().union(*map(_kinds_in, inner)) if inner else {annotation}


def _wrong(problem: Problem, problems: list[Any], origin: Origin) -> ConfigError:
    """One wrong value: what was given, where, and what belongs there."""
    location, kind, given = problem["loc"], problem["type"], problem["input"]
    where, place = _place(location), origin.where(location)
    if kind in ("value_error", "lacking"):  # says how to mend it
        message = problem["msg"].removeprefix("Value error, ")
        what, *fix = _MORE_SAID.split(message, maxsplit=1)
        if len(location) == 1 and (first := re.match(r"\w+", what)):  # of which of the group's settings it is
            place = origin.where((location[0], first[0])) or place
        whose = f"{where}{place}"
        what = what if whose else at_lines(what, origin.where, Settings.model_fields)
        return ConfigError(f"{whose}: {what}" if whose else what, fix=fix[0] if fix else None)
    if kind == "extra_forbidden":
        return _unknown(problem)
    if isinstance(given, Truth):
        mend = TRUTHS.get(str(location[-1])) or TRUTHS.get(where.rpartition(".")[2])
        number = kind.partition("_")[0] in ("int", "float")
        usual = f"{_to_mend(problem)}{_example(problem, origin)}" if number else "write a number or a word"
        # In a call nobody wrote YAML.
        yaml_reads = "; YAML reads yes, no, on and off as true and false" * (origin.file is not None)
        return ConfigError(
            f"{where}={given}{place} is {_what_not(problem)}",
            fix=mend or f"{usual}{yaml_reads}",
        )
    if kind in ("model_type", "model_attributes_type"):
        return ConfigError(
            f"{where}{place} must be a group of settings", fix="write each setting as key: value"
        )
    if kind == "too_short":
        return ConfigError(f"{where}{place} is an empty list", fix="give at least one, or remove it")
    if given is None:
        return ConfigError(f"{where}{place} has no value", fix=f"give it one, or remove {where}")
    beside = [p for p in problems if p["loc"][:2] == location[:2] and p["type"] == "literal_error"]
    words = [] if kind == "literal_error" else [f", or {option}" for p in beside for option in _options(p)]
    shown = "" if _hides(location) else f"={echoed(given, _allowed(problem, beside))}"
    return ConfigError(
        f"{where}{shown}{place} is {_what_not(problem)}",
        fix=f"{''.join([_to_mend(problem), *words])}{_example(problem, origin)}",
    )


def _hides(location: Location) -> bool:
    """Whether nothing that is given for a setting is shown, not even a number: files, and what names keys."""
    return bool(_RECORDS.intersection(location)) or any("key" in str(name).split("_") for name in location)


def _allowed(problem: Problem, beside: list[Problem]) -> list[str]:
    """Words that a setting may have, or that other tools have for them."""
    options = [option for each in (problem, *beside) for option in _options(each)]
    return [
        *options,
        *OTHER_VALUES.get(_plain_place(problem["loc"]), ()),
        AUTO,
        "true",
        "false",
        "null",
        "none",
    ]


_BOUNDS: Final = {
    "gt": ("not above {}", "a number above {}"),
    "ge": ("below {}", "{} or more"),
    "lt": ("not below {}", "a number below {}"),
    "le": ("above {}", "at most {}"),
}
_KINDS: Final = {
    "int": ("no whole number", "a whole number"),
    "float": ("no number", "a number"),
    "finite": ("no finite number", "a finite number"),
    "bool": ("neither true nor false", "true or false"),
    "list": ("no list", "a list, as [a, b]"),
    "dict": ("no mapping", "a mapping, as {a: b}"),
    "string": ("no text", "write one word or text"),
}
"""By the first word of pydantic's name: what a wrong value is not, and a value that would do."""


def _what_not(problem: Problem) -> str:
    if problem["type"] == "literal_error":
        options = _options(problem)
        return f"none of {', '.join(options)}" if len(options) > 1 else f"not {options[0]}"
    bound = next((b for b in _BOUNDS if b in problem.get("ctx", {})), None)
    if bound is not None:
        return _BOUNDS[bound][0].format(f"{problem['ctx'][bound]:g}")
    return _KINDS.get(problem["type"].partition("_")[0], ("no value for this setting", ""))[0]


def _to_mend(problem: Problem) -> str:
    """A value that would do, in words."""
    limits, given, kind = problem.get("ctx", {}), problem["input"], problem["type"]
    if kind == "literal_error":
        options = _options(problem)
        elsewhere = OTHER_VALUES.get(_plain_place(problem["loc"]), {}).get(str(given).lower())
        return elsewhere or nearest(named(given).strip("'"), options)
    shown = not _hides(problem["loc"]) and echoed(given) == repr(given)
    if kind == "string_type" and isinstance(given, int | float) and shown:
        if isinstance(given, bool):
            return 'YAML reads yes, no, on and off as true and false: write them in quotes, as ["yes", "no"]'
        return f'write it in quotes: "{given}"'
    if kind == "string_type" and isinstance(given, Mapping) and problem["loc"][0] == "data":
        name = _plain_place(problem["loc"])
        return (
            f'braces are a mapping in YAML where no quotes are around them: {name.rpartition(".")[2]}: "{{column}}", '
            f"or, for the shell, '{name}=\"{{column}}\"'"
        )
    found = [words.format(f"{limits[name]:g}") for name, (_, words) in _BOUNDS.items() if name in limits]
    mend = (found or [_KINDS.get(kind.partition("_")[0], ("", "write another value"))[1]])[0]
    field = _field(_plain_place(problem["loc"]))
    return f"{mend}, or {AUTO}" if field is not None and OrAuto in field.metadata else mend


_EXAMPLES: Final = {
    "target_epsilon": "3",
    "noise_multiplier": "1.0",
    "delta": "1e-5",
    "steps": "200",
    "expected_batch_size": "64",
    "sample_rate": "0.01",
    "public_dataset_size": "10000",
    "learning_rate": "0.001",
    "right_weight": "0.5",
    "metric_power": "1",
    "warmup_steps": "10",
    "rounds": "20",
}
"""Of numbers without a default: a usual one."""


def _example(problem: Problem, origin: Origin) -> str:
    """The line to write, of a setting that takes a number; nothing for others, nor inside of lists."""
    location = problem["loc"]
    number = problem["type"].partition("_")[0] in ("int", "float", "finite", "greater", "less")
    place = _plain_place(location)
    field = _field(place)
    if not number or field is None or place.count(".") != 1 or "[" in _place(location):
        return ""
    group, _, name = place.partition(".")
    default = field.default
    usual = f"{default}" if isinstance(default, int | float) and not isinstance(default, bool) else None
    usual = _EXAMPLES.get(name, usual) or ("10" if _whole(field.annotation) else "0.1")
    return f", as {origin.line_to_write(group, name, usual)}"


def _whole(annotation: Any) -> bool:
    """Whether a number has to be whole."""
    kinds = get_args(annotation) or (annotation,)
    return int in kinds or any(_whole(kind) for kind in get_args(annotation))


def _field(place: str) -> Any:
    """Of a setting of a run, as ``group.name``; None of others."""
    return field_of(Settings.model_fields, place)


def _missing(places: list[Location], *, federated: bool) -> list[ConfigError]:
    """federated: whether the settings are of a federation, whose steps follow from its rounds."""
    found = list[ConfigError]()
    for place in places:
        added = _to_add(place).replace(" steps,", "") if federated else _to_add(place)
        found.append(ConfigError(f"{_place(place)} is missing", fix=f"add {added}"))
    return found


_SEVERAL_OWNERS: Final = " (or, of several owners, the group federation with a path for each client)"
_MISSING: Final = {
    "model": "the group model with name: a local folder or a hub name",
    "model.name": "name: a local folder or a hub name",
    "data": f"the group data with path: records.jsonl{_SEVERAL_OWNERS}",
    "data.path": f"path: records.jsonl{_SEVERAL_OWNERS}",
    "privacy": "the group privacy with target_epsilon, delta, steps, expected_batch_size and public_dataset_size",
    "privacy.target_epsilon": "target_epsilon: 3, or a noise_multiplier",
    "privacy.delta": "delta: 1e-5, or another number well below 1 / number of records",
    "privacy.expected_batch_size": "expected_batch_size: 64, or a sample_rate",
    "privacy.public_dataset_size": "public_dataset_size: your number of units as you are willing to publish it",
    "privacy.steps": "steps: 200, or as many as the optimizer shall take; or set auto.all=true, which finds what is "
    "not given",
    "federation.clients": "clients: 3 to cut data.path into, or one line “- {name: north, path: north.jsonl}” for each",
    "federation.rounds": "rounds: 20",
    "federation.clients.name": "name: north, or another public name",
}


def _plain_place(location: Location) -> str:
    """Of what kind of setting, wherever in a list it stands."""
    return _INDEX.sub("", _place(location))


def _to_add(location: Location) -> str:
    return _MISSING.get(_plain_place(location), f"{location[-1]}: and its value")


def _unknown(problem: Problem) -> ConfigError:
    """A setting that no group has; of groups that settings hold, since the others are looked through before."""
    location = problem["loc"]
    group = _plain_place(location[:-1])
    fix = called_here(group, location[-1])
    if fix is None:
        inner = _HELD.get(group) or _INNER.get(group)
        fields = () if inner is None else inner.model_fields
        fix = nearest(str(location[-1]), fields) if fields else "remove it, or check its spelling"
    name = str(location[-1])
    shown = name if named(name) == repr(name) else named(name)  # what stands for a name may be a record
    return ConfigError(f"{_place(location[:-1])}.{shown} is an unknown setting", fix=fix)


def _options(problem: Problem) -> list[str]:
    """The words that a setting may be."""
    return re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))


def _place(location: Location) -> str:
    """Group, setting, and of a list of groups which one and what of it; branches of a union say nothing to a user."""
    where = ".".join(str(part) for part in location[:2] if not _BRANCH.match(str(part)))
    if where in _HELD:
        return ".".join((where, *(str(part) for part in location[2:3])))
    for at, part in enumerate(location[2:], start=2):
        if isinstance(part, int):
            inner = "".join(f".{name}" for name in location[at + 1 : at + 2])
            return f"{where}[{part}]{inner}"
    return where
