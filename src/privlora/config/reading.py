"""Settings from a YAML file or plain mappings, with ``group.key=value`` laid over them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from privlora.config.auto import AUTO, OrAuto
from privlora.config.base import group_in
from privlora.config.federation import FederationSettings
from privlora.config.foreign_names import GROUPS_ELSEWHERE
from privlora.config.groups import PrivacySettings, QuantizationSettings, Settings
from privlora.config.method_names import known, unknown_method
from privlora.config.other_names import NO_GROUPS, OTHER_VALUES, called_here, plain
from privlora.config.rows import refuse_for_row
from privlora.errors import ConfigError, in_one, named, nearest

_Checked = TypeVar("_Checked", bound=BaseModel)
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


def load_settings(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a YAML file, apply ``group.key=value`` overrides and ask what its row can have. Raises ConfigError."""
    settings = settings_from(read_yaml(path), overrides, source=str(path))
    refuse_for_row(settings)
    return settings


def kept_settings(path: str | Path) -> Settings:
    """Those that a run keeps in its folder. Raises ConfigError.

    A file of a version without method.relative_rate is of a run whose rate was in entries, and it stays so: what this
    version writes always says it.
    """
    content = read_yaml(path)
    method = {} if content.get("method") is None else content["method"]
    if isinstance(method, dict) and method.get("relative_rate") is None:
        content["method"] = {**method, "relative_rate": False}
    return settings_from(content, source=str(path))


def read_yaml(path: str | Path, *, quoted: bool = True) -> dict[str, Any]:
    """The mapping that a YAML file holds; a key that is given twice is an error. Raises ConfigError.

    quoted: whether the error may say what is wrong in words of the file, among which may be keys of services.
    """
    _refuse_other_than_settings(Path(path))
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {str(path)!r} ({type(error).__name__})", fix="check the path"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        if not quoted:
            problem = "a key is given twice" if problem.endswith(_TWICE) else type(error).__name__
        raise ConfigError(
            f"{str(path)!r}{where} is not valid YAML ({problem})", fix="check indentation, colons and names"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{str(path)!r} holds no settings", fix="write groups such as model:, data:, privacy:"
        )
    return content


def settings_from(
    content: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "settings"
) -> Settings:
    """Check plain nested mappings (as from YAML) and overrides. Raises ConfigError."""
    merged: dict[str, Any] = {}
    for group, values in content.items():
        merged[group] = dict(values) if isinstance(values, Mapping) else values
    for override in overrides:
        _apply(merged, override)
    unknown = _unknown_in(merged, source)
    if not unknown:
        try:
            return Settings(**merged)
        except ValidationError as error:
            missing, method = _missing_in(error, merged), _wrong_method(merged)
            if missing is None or not method:
                raise _readable(error, source, merged) from None
            raise in_one([missing.of(source), *method]) from None
    wrong = [_unknown_names({_called(place): fix for place, fix in unknown.items()}, source)]
    rest: dict[str, Any] = {
        group: {key: v for key, v in values.items() if (group, key) not in unknown}
        if isinstance(values, Mapping)
        else values
        for group, values in merged.items()
        if (group,) not in unknown
    }
    try:
        Settings(**rest)
    except ValidationError as error:
        # What an unknown name was meant to be is told with that name.
        meant = " ".join(fix for fix in unknown.values() if not fix.startswith("known: "))
        missing = _missing_in(error, merged, besides=set(re.findall(r"\w+", meant)))
        wrong += [] if missing is None else [missing]
    raise in_one([*wrong, *_wrong_method(merged)])


def _refuse_other_than_settings(path: Path) -> None:
    """Raise ConfigError for a folder, and for a file of records by its name; neither is opened."""
    if path.is_dir():
        raise ConfigError(
            f"cannot read {str(path)!r}: it is a folder, and no file of settings",
            fix=f"give the YAML; a run is continued with `privlora resume {path}`",
        )
    if path.is_file() and path.name.lower().removesuffix(".gz").endswith(_OF_RECORDS):
        raise ConfigError(
            f"cannot read {str(path)!r}: it is a file of records, by its name, and not of settings",
            fix=f"`privlora init {path} --model NAME` proposes settings for it",
        )


_OF_RECORDS: Final = (".jsonl", ".ndjson", ".csv", ".parquet")


def checked(kind: type[_Checked], values: Mapping[str, Any], source: str) -> _Checked:
    """A group of settings, or all of them, from plain values. Raises ConfigError in one line."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise _readable(error, source, values) from None


def _apply(merged: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    group, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        told = None if dot else whereabouts(key.strip().lstrip("-"))
        raise ConfigError(
            f"cannot read override {named(override)}",
            fix="write group.key=value, as privacy.steps=100" + (f"; {told}" if told else ""),
        )
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"the value of override {named(key)} is not valid YAML", fix="quote it") from None
    section = merged.setdefault(group, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{named(group)} is not a group of settings", fix="write group.key=value")
    section[name] = parsed


def _wrong_method(merged: Mapping[str, Any]) -> list[ConfigError]:
    """What `methods.find_row` would say of method.name, beside what else is wrong."""
    method = merged.get("method")
    name = method.get("name") if isinstance(method, Mapping) else None
    if not isinstance(name, str) or name in known():
        return []
    alone = unknown_method(name)
    return [ConfigError(alone.what, fix=f"method.name: {alone.fix}")]


def _missing_in(
    error: ValidationError, values: Mapping[str, Any], besides: Collection[str] = ()
) -> ConfigError | None:
    """What is missing, without the source; None where something else is wrong. besides: names that are told already."""
    errors = error.errors()
    lacking = [place for place in _lacking(errors, errors[0], values) if place[-1] not in besides]
    return _missing(lacking, "", federated=values.get("federation") is not None) if lacking else None


def _called(place: tuple[object, ...]) -> str:
    """An unknown group or setting, as errors call it."""
    if len(place) == 1:
        return f"group {named(place[0])}"
    return f"setting {named(f'{place[0]}.{place[1]}', longest=80)}"


def _unknown_in(merged: Mapping[str, Any], source: str) -> dict[tuple[object, ...], str]:
    """Groups and settings, as (group, ) and (group, name), that nothing is called here, and how each is mended. Raises
    ConfigError for groups that are none."""
    groups, unknown = Settings.model_fields, dict[tuple[object, ...], str]()
    for group, values in merged.items():
        if group not in groups:
            fix = NO_GROUPS.get(str(group)) or _group_here(group, values, merged) or nearest(group, groups)
            unknown[(group,)] = fix
            continue
        annotation = groups[group].annotation
        kind = next(k for k in (annotation, *get_args(annotation)) if isinstance(k, type))
        assert issubclass(kind, BaseModel)
        if values is None:
            if type(None) in get_args(annotation):  # a group that a run may lack, written by a machine
                continue
            raise ConfigError(f"{source}: group {group!r} is empty", fix="remove it or give it settings")
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{source}: {group!r} must be a group of settings",
                fix=f"write {group}.key: value as two levels",
            )
        for key in values:
            if key not in kind.model_fields:
                fix = called_here(group, key, values[key], merged) or _homes(key) or _near(group, key, kind)
                unknown[(group, key)] = fix
    return unknown


_SHOWN: Final = 8


def _unknown_names(mended: Mapping[str, str], source: str) -> ConfigError:
    """mended: how, by what is unknown: a group or a setting, and its name."""
    why = "a setting that is ignored may be one that privacy rests on"
    if len(mended) == 1:
        ((what, fix),) = mended.items()
        return ConfigError(
            f"{source}: unknown {what}", why=why if what.startswith("setting") else None, fix=fix
        )
    shown = list(mended)[:_SHOWN]
    more = f" and {len(mended) - _SHOWN} more" if len(mended) > _SHOWN else ""
    alike: dict[str, list[str]] = {}  # by fix, which for some is the list of all that is known
    for what in shown:
        alike.setdefault(mended[what], []).append(what.partition(" ")[2])
    fixes = "; ".join(f"{', '.join(names)}: {fix}" for fix, names in alike.items())
    return ConfigError(f"{source}: unknown {', '.join(shown)}{more}", why=why, fix=fixes)


def _group_here(group: object, values: Any, merged: Mapping[str, Any]) -> str | None:
    """Where what stands outside of all groups belongs: a group of another tool, or one of its flat settings."""
    flat = called_here("", group, values, merged) or _homes(group)
    elsewhere = GROUPS_ELSEWHERE.get(plain(group))
    inside = isinstance(values, Mapping | list)
    return (elsewhere or flat) if inside else (flat or elsewhere)


def _homes(name: object) -> str | None:
    """For a setting that stands in another group than its own, or in none."""
    found = [
        f"{group}.{plain(name)}"
        for group, field in Settings.model_fields.items()
        if (kind := group_in(field.annotation)) is not None and plain(name) in kind.model_fields
    ]
    return f"it belongs elsewhere: write {' or '.join(found)}" if found else None


def whereabouts(name: str) -> str | None:
    """What is called ``name`` elsewhere or here, with its group or without one; None for what nothing is called."""
    group, _, setting = plain(name).rpartition(".")
    known = Settings.model_fields.get(group)
    kind = None if known is None else group_in(known.annotation)
    if kind is not None and setting in kind.model_fields:
        return f"write {group}.{setting}=…"
    return called_here(group if kind is not None else "", setting) or _homes(setting)


def _near(group: str, key: object, kind: type[BaseModel]) -> str:
    """The setting that is spelt nearly so. In group privacy alone what can only be a slip of the pen: one number of
    it in another's place would be a promise that nobody meant."""
    if group != "privacy":
        return nearest(str(key), kind.model_fields)
    words = plain(key).split("_")
    alike = [
        name
        for name in kind.model_fields
        if name != "insecure_noise_seed"
        and (
            name.replace("_", "") == "".join(words)
            or all(difflib.get_close_matches(part, words, n=1, cutoff=0.8) for part in name.split("_"))
        )
    ]
    near = nearest(str(key), alike, cutoff=0.85)
    return near if near.startswith("did") else f"known: {', '.join(kind.model_fields)}"


def _readable(error: ValidationError, source: str, values: Mapping[str, Any]) -> ConfigError:
    """The first problem; if that is a setting that is missing, then all that are missing, so that they are added at
    once. Of a value that may be several things, the one that was read furthest. values: what was read."""
    errors = error.errors()
    first = max((e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]), key=lambda e: len(e["loc"]))
    where = _place(first["loc"])
    prefix = f"{source}: {where}" if where else source
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        # A name from elsewhere tells more than that the one from here is missing.
        extra = (e for e in errors if e["type"] == "extra_forbidden" and e["loc"][:-1] == first["loc"][:-1])
        other = next(extra, None)
        if other is not None and len(other["loc"]) > 2:
            return _unknown(other, source)
    lacking = _lacking(errors, first, values)
    if first["type"] == "missing" or len(lacking) > 1:
        return _missing(lacking, source, federated=values.get("federation") is not None)
    if first["type"] == "extra_forbidden":
        return _unknown(first, source)
    if first["type"] in ("model_type", "model_attributes_type"):
        return ConfigError(f"{prefix} must be a group of settings", fix="write each setting as key: value")
    if first["type"] == "value_error":  # says how to mend it
        return ConfigError(f"{prefix}: {message}")
    if first["type"] == "too_short":
        return ConfigError(f"{prefix} is an empty list", fix="give at least one, or remove it")
    if first["input"] is None:
        return ConfigError(f"{prefix} has no value", fix="give it one, or remove it")
    shown = "" if _RECORDS.intersection(first["loc"]) else f"={named(first['input'])}"
    literals = [e for e in errors if e["loc"][:2] == first["loc"][:2] and e["type"] == "literal_error"]
    words = [] if first in literals else [f", or {option}" for e in literals for option in _options(e)]
    return ConfigError(f"{prefix}{shown}: {message}", fix="".join([_to_mend(first) or "", *words]))


def _lacking(
    errors: list[Any], first: Mapping[str, Any], values: Mapping[str, Any]
) -> list[tuple[int | str, ...]]:
    """Places of what is missing: groups, their settings, what stands beside ``first``; none if it is something else."""
    privacy = values.get("privacy")
    several = PrivacySettings.lacks(privacy) if isinstance(privacy, Mapping) else []
    among = first["loc"] == ("privacy",) and first["type"] == "value_error" and bool(several)
    if first["type"] != "missing" and not among:
        return []
    missing = [error["loc"] for error in errors if error["type"] == "missing"]
    found = [place for place in missing if len(place) <= 2 or place[:-1] == first["loc"][:-1]]
    found += [("privacy", name) for name in several]
    groups = list(Settings.model_fields)
    return sorted(found, key=lambda place: groups.index(str(place[0])) if place[0] in groups else 0)


def _missing(places: list[tuple[int | str, ...]], source: str, *, federated: bool) -> ConfigError:
    """federated: whether the settings are of a federation, whose steps follow from its rounds."""
    *others, last = map(_place, places)
    names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    apart = len({place[:-1] for place in places}) > 1
    added = [f"{_place(place[:-1])}." * (apart and len(place) > 1) + _to_add(place) for place in places]
    told = ", and ".join(added)
    return ConfigError(
        f"{source}: {names} missing".removeprefix(": "),
        fix=f"add {told.replace(' steps,', '') if federated else told}",
    )


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


def _plain_place(location: tuple[int | str, ...]) -> str:
    """Of what kind of setting, wherever in a list it stands."""
    return _INDEX.sub("", _place(location))


def _to_add(location: tuple[int | str, ...]) -> str:
    return _MISSING.get(_plain_place(location), f"{location[-1]}: and its value")


def _unknown(problem: Mapping[str, Any], source: str) -> ConfigError:
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
    return ConfigError(f"{source}: {_place(location[:-1])}.{shown} is an unknown setting", fix=fix)


def _to_mend(problem: Mapping[str, Any]) -> str | None:
    """What pydantic leaves to the reader: a value that would do."""
    limits, given, kind = problem.get("ctx", {}), problem["input"], problem["type"]
    if kind == "literal_error":
        options = _options(problem)
        elsewhere = OTHER_VALUES.get(_plain_place(problem["loc"]), {}).get(str(given).lower())
        return elsewhere or nearest(named(given).strip("'"), options)
    if kind == "string_type":
        simple = isinstance(given, int | float) and not _RECORDS.intersection(problem["loc"])
        return f'write it in quotes: "{given}"' if simple else "write one word or text"
    bounds = {"gt": "a number above {}", "ge": "{} or more", "lt": "a number below {}", "le": "at most {}"}
    found = [words.format(f"{limits[name]:g}") for name, words in bounds.items() if name in limits]
    kinds = {
        "int": "a whole number",
        "float": "a number",
        "finite": "a finite number",
        "bool": "true or false",
        "list": "a list, as [a, b]",
    }
    mend = (found or [kinds.get(kind.partition("_")[0], "write another value")])[0]
    group, _, name = _plain_place(problem["loc"]).partition(".")
    holder = Settings.model_fields.get(group)
    own = None if holder is None else group_in(holder.annotation)
    field = None if own is None else own.model_fields.get(name)
    return f"{mend}, or {AUTO}" if field is not None and OrAuto in field.metadata else mend


def _options(problem: Mapping[str, Any]) -> list[str]:
    """The words that a setting may be."""
    return re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))


def _place(location: tuple[int | str, ...]) -> str:
    """Group, setting, and of a list of groups which one and what of it; branches of a union say nothing to a user."""
    where = ".".join(str(part) for part in location[:2] if not _BRANCH.match(str(part)))
    if where in _HELD:
        return ".".join((where, *(str(part) for part in location[2:3])))
    for at, part in enumerate(location[2:], start=2):
        if isinstance(part, int):
            inner = "".join(f".{name}" for name in location[at + 1 : at + 2])
            return f"{where}[{part}]{inner}"
    return where


_TWICE: Final = "is given twice"


class _StrictLoader(yaml.SafeLoader):
    """YAML's plain types, and no key twice in a mapping: one of two clip_norm would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # a list or a mapping, which yaml itself refuses as a key
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key_node.value} {_TWICE}", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)
