"""What is said of wrong settings: all that is unknown, missing or of a wrong value, each with how to mend it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
from privlora.config.nearby import named_here
from privlora.config.other_names import NO_GROUPS, OTHER_VALUES, TRUTHS, called_here
from privlora.errors import ConfigError, in_one, named, nearest

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
_WHY_UNKNOWN: Final = "a setting that is ignored may be one that privacy rests on"
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


def checked_settings(values: Mapping[str, Any], origin: Origin) -> Settings:
    """The settings of a run. Raises ConfigError for all that is wrong with them; for a group that is none, at once."""
    unknown = _unknown_in(values, origin.source)
    rest: dict[str, Any] = {
        group: {key: v for key, v in inner.items() if (group, key) not in unknown}
        if isinstance(inner, Mapping)
        else inner
        for group, inner in values.items()
        if (group,) not in unknown
    }
    problems = []
    try:
        found = Settings(**rest)
        if not unknown:
            return found
    except ValidationError as error:
        problems = _beside(error.errors(), rest)
    method = _wrong_method(values)
    beside = bool(problems or method)
    told = [_unknown_names(unknown, values, origin, beside=beside)] if unknown else []
    told += [*_told(problems, values, origin, alone=not (unknown or method)), *method]
    raise _one_of(told, origin, [*unknown, *(p["loc"] for p in problems)])


def mistakes(error: ValidationError, values: Mapping[str, Any], origin: Origin) -> ConfigError:
    """Of one group of settings, or of settings of another kind. values: what was read."""
    problems = error.errors()
    return _one_of(_told(problems, values, origin, alone=True), origin, [p["loc"] for p in problems])


def _one_of(found: list[ConfigError], origin: Origin, places: list[Location]) -> ConfigError:
    """All of them; the source is the command line alone where nothing of it is of the file."""
    called = all(origin.called(place) for place in places) and bool(places)
    error = in_one(found)
    if called:
        what = error.what.replace(" (on the command line)", "")
        return ConfigError(f"on the command line: {what}", why=error.why, fix=error.fixes)
    return ConfigError(f"{origin.source}: {error.what}", why=error.why, fix=error.fixes)


def _beside(problems: list[Any], values: Mapping[str, Any]) -> list[Any]:
    """With those of single settings that a contradiction of whole groups hides: it is looked for first."""
    if [problem["loc"] for problem in problems] != [()]:
        return problems
    numbers = {"steps": 1, "expected_batch_size": 1}
    plain: dict[str, Any] = {
        group: {
            key: numbers.get(key, 1.0) if value == AUTO and _is_auto(group, key) else value
            for key, value in inner.items()
        }
        if isinstance(inner, Mapping)
        else inner
        for group, inner in values.items()
        if group != "federation"
    }
    try:
        Settings(**plain)
    except ValidationError as error:
        hidden = [problem for problem in error.errors() if len(problem["loc"]) > 1]
        return problems + [p for p in hidden if p["type"] != "missing" or "federation" not in values]
    return problems


def _is_auto(group: str, name: str) -> bool:
    field = _field(f"{group}.{name}")
    return field is not None and OrAuto in field.metadata


def _told(
    problems: list[Any], values: Mapping[str, Any], origin: Origin, *, alone: bool
) -> list[ConfigError]:
    """What is missing, then each wrong value. alone: whether nothing else is told with it."""
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
    groups = list(Settings.model_fields)
    lacking.sort(key=lambda place: groups.index(str(place[0])) if place[0] in groups else 0)
    found = [] if not lacking else [_missing(lacking, federated=values.get("federation") is not None)]
    wrong = [_wrong(problem, problems, origin) for problem in _furthest(problems)]
    if not alone or found or len(wrong) > 1:
        wrong = [_with_its_name(one) for one in wrong]
    if len(wrong) > _SHOWN:
        last = wrong[_SHOWN - 1]
        more = ConfigError(f"{last.what}, and {len(wrong) - _SHOWN} more", why=last.why, fix=last.fixes)
        wrong = [*wrong[: _SHOWN - 1], more]
    return found + wrong


def _with_its_name(error: ConfigError) -> ConfigError:
    """The same, whose ways to mend it say of what they are, since they are read beside others."""
    name = re.split(r"[=: ]", error.what, maxsplit=1)[0]
    return ConfigError(
        error.what, why=error.why, fix=[f"{name}: {fix}" for fix in error.fixes] if name else error.fixes
    )


def _furthest(problems: list[Any]) -> list[Any]:
    """One of each setting: of a value that may be several things, the one that was read furthest."""
    wrong = [problem for problem in problems if problem["type"] not in ("missing", "lacking")]
    places = [_place(problem["loc"]) for problem in wrong]
    found: dict[str, Any] = {}
    for place, problem in zip(places, wrong, strict=True):
        inner = place and any(other.startswith((f"{place}.", f"{place}[")) for other in places)
        if inner:
            continue
        if place not in found or len(problem["loc"]) > len(found[place]["loc"]):
            found[place] = problem
    return list(found.values())


def _lacking_of_privacy(problems: list[Any], values: Mapping[str, Any]) -> list[str]:
    """What the promise lacks of its settings; [] for settings of another kind."""
    privacy = values.get("privacy")
    if not isinstance(privacy, Mapping) or not problems:
        return []
    told = {problem["loc"] for problem in problems}
    if any(problem["loc"] == () for problem in problems):  # says itself what of privacy it is about
        return []
    return [name for name in PrivacySettings.lacks(privacy) if ("privacy", name) not in told]


def _wrong_method(values: Mapping[str, Any]) -> list[ConfigError]:
    """What `methods.find_row` would say of method.name, beside what else is wrong."""
    method = values.get("method")
    name = method.get("name") if isinstance(method, Mapping) else None
    if not isinstance(name, str) or name in known():
        return []
    alone = unknown_method(name)
    return [ConfigError(alone.what, fix=f"method.name: {alone.fix}")]


def _called(place: tuple[object, ...]) -> str:
    """An unknown group or setting, as errors call it."""
    if len(place) == 1:
        return f"group {named(place[0])}"
    return f"setting {named(f'{place[0]}.{place[1]}', longest=80)}"


def _unknown_in(values: Mapping[str, Any], source: str) -> dict[tuple[Any, ...], str]:
    """Groups and settings, as (group, ) and (group, name), that nothing is called here, and how each is mended. Raises
    ConfigError for groups that are none."""
    groups, unknown = Settings.model_fields, dict[tuple[Any, ...], str]()
    for group, inner in values.items():
        if group not in groups:
            unknown[(group,)] = NO_GROUPS.get(str(group)) or named_here("", group, inner, values)
            continue
        annotation = groups[group].annotation
        kind = next(k for k in (annotation, *get_args(annotation)) if isinstance(k, type))
        assert issubclass(kind, BaseModel)
        if inner is None:
            if type(None) in get_args(annotation):  # a group that a run may lack, written by a machine
                continue
            raise ConfigError(f"{source}: group {group!r} is empty", fix="remove it or give it settings")
        if not isinstance(inner, Mapping):
            raise ConfigError(
                f"{source}: {group!r} must be a group of settings",
                fix=f"write {group}.key: value as two levels",
            )
        for key in inner:
            if key not in kind.model_fields:
                unknown[(group, key)] = named_here(group, key, inner[key], values)
    return unknown


_MEANT = re.compile(r"did you mean '(?:(\w+)\.)?(\w+)'\?")


def _unknown_names(
    unknown: Mapping[tuple[Any, ...], str], values: Mapping[str, Any], origin: Origin, *, beside: bool
) -> ConfigError:
    """unknown: how each is mended, by (group, ) or (group, name). beside: whether more is wrong."""
    if len(unknown) == 1 and not beside:
        ((place, fix),) = unknown.items()
        why = _WHY_UNKNOWN if len(place) == 2 else None
        return ConfigError(
            f"unknown {_called(place)}{origin.where(place)}",
            why=why,
            fix=fix + _line_meant(place, fix, values, origin),
        )
    shown = [f"{_called(place)}{origin.where(place)}" for place in list(unknown)[:_NAMES_SHOWN]]
    more = f" and {len(unknown) - _NAMES_SHOWN} more" if len(unknown) > _NAMES_SHOWN else ""
    alike: dict[str, list[str]] = {}  # by fix, which for some is the list of all that is known
    for place in list(unknown)[:_NAMES_SHOWN]:
        fix = unknown[place] + _line_meant(place, unknown[place], values, origin)
        alike.setdefault(fix, []).append(_called(place).partition(" ")[2])
    fixes = [f"{', '.join(names)}: {fix}" for fix, names in alike.items()]
    return ConfigError(f"unknown {', '.join(shown)}{more}", why=_WHY_UNKNOWN, fix=fixes)


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
        whose = f"{where}{place}"
        return ConfigError(f"{whose}: {what}" if whose else what, fix=fix[0] if fix else None)
    if kind == "extra_forbidden":
        return _unknown(problem)
    if isinstance(given, Truth):
        mend = TRUTHS.get(str(location[-1])) or TRUTHS.get(where.rpartition(".")[2])
        return ConfigError(
            f"{where}={given}{place} is not a value for this setting",
            fix=mend or "write a number or a word; YAML reads yes, no, on and off as true and false",
        )
    if kind in ("model_type", "model_attributes_type"):
        return ConfigError(
            f"{where}{place} must be a group of settings", fix="write each setting as key: value"
        )
    if kind == "too_short":
        return ConfigError(f"{where}{place} is an empty list", fix="give at least one, or remove it")
    if given is None:
        return ConfigError(f"{where}{place} has no value", fix=f"give it one, or remove {where}")
    shown = "" if _RECORDS.intersection(location) else f"={named(given)}"
    beside = [p for p in problems if p["loc"][:2] == location[:2] and p["type"] == "literal_error"]
    words = [] if kind == "literal_error" else [f", or {option}" for p in beside for option in _options(p)]
    return ConfigError(
        f"{where}{shown}{place} is {_what_not(problem)}",
        fix=f"{''.join([_to_mend(problem), *words])}{_example(problem, origin)}",
    )


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
    if kind == "string_type" and isinstance(given, int | float) and not _RECORDS.intersection(problem["loc"]):
        return f'write it in quotes: "{given}"'
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
    group, _, name = place.partition(".")
    holder = Settings.model_fields.get(group)
    own = None if holder is None else group_in(holder.annotation)
    return None if own is None else own.model_fields.get(name)


def _missing(places: list[Location], *, federated: bool) -> ConfigError:
    """federated: whether the settings are of a federation, whose steps follow from its rounds."""
    *others, last = map(_place, places)
    names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    apart = len({place[:-1] for place in places}) > 1
    added = [f"{_place(place[:-1])}." * (apart and len(place) > 1) + _to_add(place) for place in places]
    if federated:
        added = [each.replace(" steps,", "") for each in added]
    return ConfigError(f"{names} missing", fix=[f"add {each}" for each in added])


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
    "privacy.steps": "steps: 200, or as many as the optimizer shall take",
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
