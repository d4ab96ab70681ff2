"""What is said of wrong settings: each name that there is not, each value that is none, each contradiction, with the
line or the argument in which it stands and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from privlora.config.auto import AUTO, OrAuto
from privlora.config.base import Truth, Wrong, group_in
from privlora.config.groups import PrivacySettings, Settings
from privlora.config.methods import known_methods, wrong_for_method
from privlora.config.names import VALUES, Meant, meant, settings_by_group, unknown_method
from privlora.config.one_place import misplaced, of_mapping
from privlora.data.records import is_data_file_name
from privlora.errors import ConfigError, echoed, in_one, named, nearest
from privlora.ranges import MOST_STEPS

Place = tuple[Any, ...]
"""(group, name), or (group,)."""
_HIDDEN: Final = frozenset(("path", "evaluation", "public_text", "file"))
"""A Python caller may have put records where these name files, so what they hold is never shown."""
_MOST: Final = 20
"""Mistakes of a file that are reported: a file of something else is no page of names."""
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
"""The setting that a value instead of the whole group means."""
_EXAMPLES: Final = {
    "model.name": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "data.path": "records.jsonl",
    "privacy.target_epsilon": "3",
    "privacy.noise_multiplier": "1.0",
    "privacy.target_right_guesses": "0.6",
    "privacy.target_found": "0.05",
    "privacy.delta": "1e-5",
    "privacy.steps": "200",
    "privacy.expected_batch_size": "64",
    "privacy.sample_rate": "0.01",
    "privacy.public_dataset_size": "10000",
    "method.learning_rate": "0.001",
    "federation.clients": "3",
    "federation.rounds": "20",
}
_SIZES: Final = {"steps": MOST_STEPS, "expected_batch_size": 1.0, "public_dataset_size": 10**9}
_INSTEAD: Final = ("noise_multiplier", "target_right_guesses", "target_found", "sample_rate")
"""Settings that are given instead of others."""
_STAND_INS: Final[Mapping[str, Mapping[str, Any]]] = {
    "model": {"name": "model"},
    "data": {"path": "records.jsonl"},
    "privacy": {"target_epsilon": 1.0, "delta": 1e-15, **_SIZES},
}
"""Instead of settings that are needed, while what is wrong with the others is looked for: they contradict nothing."""
_ARGUMENTS: Final = {
    ("data", "path"): "records",
    ("data", "evaluation"): "evaluation",
    ("model", "name"): "model",
    ("run", "output"): "output",
}
"""Settings that are arguments of their own in a call."""
_GROUP_ARGUMENTS: Final = {"model": "loading"}


@dataclass(frozen=True)
class Origin:
    """Where settings were given. overridden: on the command line. file: the YAML, whose lines can be named. arguments:
    of a call, what stands for a setting there; None of a file."""

    source: str
    overridden: frozenset[tuple[str, str]] = frozenset()
    file: Path | None = None
    arguments: Mapping[Place, str] | None = None

    def where(self, *places: Place) -> str:
        """In brackets, where settings were given; "" where that is not known.

        >>> Origin("run.yaml", frozenset({("privacy", "steps")})).where(("privacy", "steps"))
        ' (on the command line)'
        """
        if any(place[:2] in self.overridden for place in places):
            return " (on the command line)"
        lines = sorted({line for place in places if (line := self._line(place)) is not None})
        if not lines:
            return ""
        return f" (line {lines[0]})" if len(lines) == 1 else f" (lines {' and '.join(map(str, lines))})"

    def called(self, place: Place) -> str:
        """A setting or a group, as whoever gave it calls it.

        >>> Origin("fine_tune", arguments={}).called(("data", "max_length")), Origin("x").called(("run",))
        ("data['max_length']", 'run')
        """
        if self.arguments is None or not place or place[0] not in Settings.model_fields:
            return _dotted(place)
        inner = (f"[{name!r}]" if isinstance(name, str) else f"[{echoed(name)}]" for name in place[1:])
        own = {**_ARGUMENTS, **self.arguments}.get(place)
        return own or f"{_GROUP_ARGUMENTS.get(place[0], place[0])}{''.join(inner)}"

    def written(self, place: Place, value: Any) -> str:
        """A setting with a value, or a group with values, as it is written where the others stand.

        >>> Origin("run.yaml").written(("privacy", "steps"), "200")
        'steps: 200'
        >>> Origin("fine_tune", arguments={}).written(("privacy", "steps"), "200")
        'privacy=dict(steps=200)'
        """
        if place[:2] in self.overridden:
            return f"{_dotted(place)}={value}"
        if self.arguments is None:
            if isinstance(value, dict):
                value = f"{{{', '.join(f'{name}: {each}' for name, each in value.items())}}}"
            return f"{place[-1]}: {value}"
        own = {**_ARGUMENTS, **self.arguments}
        values = value if isinstance(value, dict) else {place[-1]: value}
        shown = {name: each if each[:1].isdigit() else repr(each) for name, each in values.items()}
        if place in own:
            return f"{own[place]}={shown[place[-1]]}"
        inner = ", ".join(f"{name}={each}" for name, each in shown.items())
        return f"{_GROUP_ARGUMENTS.get(place[0], place[0])}=dict({inner})"

    def _line(self, place: Place) -> int | None:
        return next((self._lines[at] for at in (place[:2], place[:1]) if at in self._lines), None)

    @cached_property
    def _lines(self) -> Mapping[Place, int]:
        """Of groups and settings; empty for a file that has changed meanwhile."""
        try:
            root = None if self.file is None else yaml.compose(self.file.read_text("utf-8"), yaml.SafeLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return {}
        found = dict[Place, int]()
        for group, inside in root.value if isinstance(root, yaml.MappingNode) else ():
            found[(group.value,)] = group.start_mark.line + 1
            for name, _ in inside.value if isinstance(inside, yaml.MappingNode) else ():
                if isinstance(name, yaml.ScalarNode):
                    found[(group.value, name.value)] = name.start_mark.line + 1
        return found


@dataclass
class _Found:
    """What is wrong. meant: settings that a wrong name means, so that they are not missing. bad: settings and groups
    that are wrong by themselves."""

    origin: Origin
    errors: list[ConfigError] = field(default_factory=list)
    meant: set[Place] = field(default_factory=set)
    bad: set[Place] = field(default_factory=set)

    def add(self, what: str, fix: str | Sequence[str] | None, *bad: Place) -> None:
        self.errors.append(ConfigError(what, fix=fix))
        self.bad |= set(bad)

    def tell(self) -> None:
        if self.errors:
            more = len(self.errors) - _MOST
            told = self.errors[:_MOST]
            if more > 0:
                told.append(ConfigError(f"{more} more mistakes", fix="mend these first"))
            error = in_one(told, self.origin.source)
            assert isinstance(error, ConfigError)
            raise error


def checked_settings(values: Mapping[str, Any], origin: Origin, methods: bool = False) -> Settings:
    """The settings of a run. methods: whether to ask what the method can have. Raises ConfigError for all that is wrong
    with them."""
    found = _Found(origin)
    rest = _known(values, found)
    settings, problems = _validated(Settings, rest)
    _add(problems, found, rest)
    method, privacy, federated = rest.get("method"), rest.get("privacy"), rest.get("federation") is not None
    if isinstance(method, Mapping):
        name = method.get("name")
        # Of settings that are right otherwise, a name that only the table knows is left to the table.
        if isinstance(name, str) and (found.errors or problems or methods) and name not in known_methods():
            error = unknown_method(name)
            found.add(f"method.name{origin.where(('method', 'name'))}: {error.what}", error.fix)
        elif methods:
            private = not isinstance(privacy, Mapping) or privacy.get("private", True) is True
            for name, error in wrong_for_method(method, private=private, federated=federated):
                found.add(f"{error.what}{origin.where(('method', name))}", error.fixes)
    if problems:  # contradictions are looked for where values are right: here in the rest of them
        others = {
            group: {name: value for name, value in inner.items() if (group, name) not in found.bad}
            if isinstance(inner, Mapping)
            else inner
            for group, inner in rest.items()
            if (group,) not in found.bad
        }
        for group, instead in _STAND_INS.items():
            inner = others.setdefault(group, {})
            if isinstance(inner, Mapping):
                # Of a federation steps and paths may follow.
                needed = [name for name in instead if not (federated and name in ("steps", "path"))]
                if group == "privacy":
                    needed = [name for name in needed if name in ("steps", *PrivacySettings.lacks(inner))]
                lacking = {name: instead[name] for name in needed if name not in inner}
                others[group] = {**inner, **lacking}
                found.bad |= {(group, name) for name in lacking}
        _, later = _validated(Settings, others)
        told = [problem["msg"] for problem in problems if problem["type"] == "value_error"]
        later = [p for p in later if p["type"] != "missing" and p["msg"] not in told]
        _add(later, found, others, late=True)
    found.tell()
    assert settings is not None
    settings.given_at(origin.where)
    return settings


def checked_group(kind: type[BaseModel], values: Mapping[str, Any], source: str) -> Any:
    """Settings of another kind than those of a run. Raises ConfigError for all that is wrong with them."""
    found = _Found(Origin(source))
    settings, problems = _validated(kind, values)
    _add(problems, found, {})
    found.tell()
    return settings


def natural(group: str, value: object) -> Meant | None:
    """What a value instead of a group means; None for what is no group's name. Of data nothing but the name of a file
    is shown, since it may be a record; of others a model's name, and what is no secret.

    >>> natural("method", "prism").fix, natural("data", "a b c").fix
    ('write name: prism in the group method', "write path: '...' in the group data")
    """
    if (
        group == "auto"
        and isinstance(value, str | bool)
        and str(value).lower() in ("true", "all", "yes", "on")
    ):
        return Meant("write auto: true", "auto.all")
    name = _MAIN.get(group)
    if name is None:
        return None
    pair = yaml.safe_dump({name: value if is_shown(group, value) else "..."}, allow_unicode=True).strip()
    return Meant(f"write {pair} in the group {group}", f"{group}.{name}")


def is_shown(group: str, value: object) -> bool:
    """Whether an error may show what stands instead of a group."""
    if type(value) not in (str, int, float) or named(value) != repr(value):
        return False
    if group == "data":
        return is_data_file_name(str(value))
    return (group == "model" and isinstance(value, str)) or echoed(
        value, known_methods() if group == "method" else ()
    ) == repr(value)


def _known(values: Mapping[str, Any], found: _Found) -> dict[str, Any]:
    """The groups and settings that there are; the others are reported."""
    groups, rest, origin = settings_by_group(), dict[str, Any](), found.origin
    for group, inner in values.items():
        where = origin.where((group,))
        if group not in groups:
            fix, other = meant(group)
            found.add(f"unknown group {_called(group)}{where}", fix)
            found.meant |= {tuple(other.split("."))} if other else set()
        elif isinstance(inner, Mapping):
            rest[group] = {name: value for name, value in inner.items() if name in groups[group]}
            for name in inner:
                if name not in groups[group]:
                    fix, other = meant(name, group)
                    where = origin.where((group, name))
                    found.add(f"unknown setting {_called(name, group)}{where}", fix)
                    found.meant |= {tuple(other.split("."))} if other else set()
        elif inner is None and type(None) in get_args(Settings.model_fields[group].annotation):
            rest[group] = None
        elif isinstance(inner, BaseModel):
            rest[group] = inner
        else:
            what, means = f"{group!r}{where} must be a group of settings", natural(group, inner)
            fix = "remove it, or give it settings" if means is None or inner is None else means.fix
            if origin.arguments is not None:
                called = origin.called((group,))
                what = f"{called} is of type {type(inner).__name__}, not a mapping of settings"
                fix = f"pass a mapping, as {called}=dict({_MAIN.get(group, 'name')}=...)"
            found.add(what, fix, (group,))
    if rest.get("federation") is not None:  # here, so that each is reported next to what else is wrong
        for one in misplaced(of_mapping(rest)):
            own, name = one.place.split(".")
            if name == "steps":  # which may be those that follow
                continue
            found.add(f"{one.what}{origin.where((own, name))}", one.fix, (own, name))
            rest[own] = {key: value for key, value in rest[own].items() if key != name}
    return rest


def _validated(kind: type[BaseModel], values: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    try:
        return kind.model_validate(dict(values)), []  # names may be no text, which keywords are
    except ValidationError as error:
        return None, list(error.errors())


def _add(problems: list[Any], found: _Found, values: Mapping[str, Any], *, late: bool = False) -> None:
    """Tell pydantic's problems. late: of what is left without settings that are wrong, which are not missing."""
    origin, told = found.origin, dict[str, list[Any]]()
    for problem in problems:
        loc = problem["loc"]
        if loc[:1] in found.bad or (problem["type"] == "missing" and loc[:2] in found.meant):
            continue
        if problem["type"] == "value_error":
            wrong = problem["ctx"]["error"]
            for one in getattr(wrong, "parts", (wrong,)):
                _add_contradiction(one, loc, found, late=late)
        else:
            told.setdefault(_dotted(_of_setting(loc, problem["type"])), []).append(problem)
            found.bad.add(loc[:2])
    for place, several in told.items():
        if not any(other.startswith((f"{place}.", f"{place}[")) for other in told):  # which was read further
            found.errors.append(_of_value(several, origin))
    privacy = values.get("privacy")
    own = any(problem["loc"][:1] == ("privacy",) and len(problem["loc"]) > 1 for problem in problems)
    if isinstance(privacy, Mapping) and not late and own and ("privacy",) not in found.bad:
        for name in PrivacySettings.lacks(privacy):  # which it says itself once its values are right
            at = ("privacy", name)
            if at not in found.meant | found.bad:
                found.add(f"{origin.called(at)} is missing", f"add {origin.written(at, _example(at))}", at)


def _add_contradiction(one: Any, loc: Place, found: _Found, *, late: bool) -> None:
    if not isinstance(one, Wrong):
        # Its own words may hold the value.
        found.add(f"{found.origin.called(loc)} is no value for it", None, loc[:2])
        return
    places = [tuple(each.split(".")) if "." in each else (*loc[:1], each) for each in one.places]
    if len(loc) > 1:
        places = [loc[:2], *places]
    if one.lacking and (late or found.meant.intersection(places)):
        return
    # What is left of a group may lack what was taken out of it; privacy names what it is about.
    own = loc[:1] != ("privacy",) and any(at[:1] == loc for at in found.bad)
    if late and (own or any({place, place[:1]} & found.bad for place in places)):
        return
    where = found.origin.where(*places) or (found.origin.where(loc) if loc else "")
    whose = found.origin.called(_of_setting(loc))
    bad = [loc] if len(loc) == 1 else places[:1]
    found.add(f"{whose}{where}: {one.what}" if whose else f"{one.what}{where}", one.fix, *bad)


def _of_value(several: list[Any], origin: Origin) -> ConfigError:
    """A value that is missing, or that is none of the kinds that a setting may be."""
    problem = several[0]
    loc, given = problem["loc"], problem["input"]
    place = _of_setting(loc, problem["type"])
    whose, where, dotted = origin.called(place), origin.where(loc), _dotted(place)
    if problem["type"] == "missing":
        owners = " (or, of several owners, the group federation)" if dotted in ("data", "data.path") else ""
        return ConfigError(f"{whose} is missing", fix=f"add {origin.written(place, _example(place))}{owners}")
    if problem["type"] == "extra_forbidden":
        return ConfigError(
            f"unknown setting {_called(place[-1], _dotted(place[:-1]))}{where}",
            fix=meant(place[-1], ".".join(str(part) for part in place[:-1] if not isinstance(part, int))).fix,
        )
    options = [word for each in several for word in _words(loc) if each["type"] == "literal_error"]
    other = VALUES.get(dotted, {})
    hidden = bool(_HIDDEN.intersection(loc)) or any("key" in str(part).split("_") for part in loc)
    shown = "" if hidden else f"={echoed(given, [*options, *other, AUTO, 'true', 'false', 'null', 'none'])}"
    if isinstance(given, Truth):
        shown = f"={given}"
    said = ", or ".join(dict.fromkeys(each["msg"][:1].lower() + each["msg"][1:] for each in several))
    fix: str | None = other.get(str(given).lower()) if isinstance(given, str | bool | Truth) else None
    if fix is None and options and isinstance(given, str):
        fix = nearest(named(given).strip("'"), options)
    if fix is None and isinstance(given, Truth | bool) and origin.file is not None:
        fix = "YAML reads yes, no, on and off as true and false: write a number, or a word in quotes"
    if fix is None and dotted in _EXAMPLES:
        fix = f"as {origin.written(place, _EXAMPLES[dotted])}" + f", or {AUTO}" * (
            OrAuto in getattr(_field(loc), "metadata", ())
        )
    if fix is None and loc[0] in Settings.model_fields:
        fix = f"see `privlora settings {dotted}`"
    return ConfigError(f"{whose}{shown}{where}: {said}", fix=fix)


def _called(name: object, group: str = "") -> str:
    """An unknown name: what stands for one may be a record, or a number of a person."""
    if not isinstance(name, str):
        return f"{group and f'{group}: '}a name of type {type(name).__name__}"
    return named(f"{group}.{name}" if group else name, longest=80)


def _words(loc: Place) -> list[str]:
    """The words that a setting may be."""
    field = _field(loc)
    return [] if field is None else [word for word in _literals(field.annotation) if isinstance(word, str)]


def _literals(annotation: Any) -> Iterable[Any]:
    for inner in get_args(annotation):
        yield from _literals(inner) if get_args(inner) else [inner]


def _field(loc: Place) -> FieldInfo | None:
    """The innermost setting of a run that a place leads to."""
    kind, field = (
        group_in(Settings.model_fields[loc[0]].annotation) if loc[0] in settings_by_group() else None,
        None,
    )
    for name in loc[1:]:
        if kind is not None and name in kind.model_fields:
            field = kind.model_fields[name]
            kind = group_in(field.annotation) or kind
    return field


def _example(place: Place) -> Any:
    """A usual value of a setting, or, of a group, of those that it needs."""
    if len(place) == 1 and place[0] in Settings.model_fields:
        given = ((each.split("."), value) for each, value in _EXAMPLES.items())
        return {name: value for (group, name), value in given if group == place[0] and name not in _INSTEAD}
    return _EXAMPLES.get(_dotted(place), "…")


def _of_setting(loc: Place, kind: str = "") -> Place:
    """Without pydantic's names for the kinds of value that a setting may be, which say nothing to a user."""
    if loc[:1] and loc[0] not in Settings.model_fields:  # settings of another kind have no groups
        kinds = ("int", "float", "str", "bool")
        return tuple(
            p for p in loc if isinstance(p, int) or (p.replace("_", "").isalnum() and p not in kinds)
        )
    own, last = settings_by_group().get(".".join(map(str, loc[:2])), ()), len(loc) - 1
    unknown = kind == "extra_forbidden"  # whose name is the last
    inner = [
        part
        for at, part in enumerate(loc[2:], 2)
        if isinstance(part, int) or part in own or (unknown and at == last)
    ]
    return (*loc[:2], *inner[:2])


def _dotted(place: Place) -> str:
    """
    >>> _dotted(("federation", "clients", 2, "name"))
    'federation.clients[2].name'
    """
    text = ""
    for part in place:
        text += f"[{echoed(part)}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
