"""Every setting with its kind, default and meaning, read off the groups: for a terminal, the docs and editors."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from privlora.config.auto import AUTO, OrAuto
from privlora.config.base import Group, group_in
from privlora.config.groups import Settings
from privlora.config.names import meant
from privlora.errors import ConfigError, named, nearest

_LIMITS: Final = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))
_KINDS: Final = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "mapping"}


@dataclass(frozen=True)
class Setting:
    """One setting. place: in full, as ``privacy.steps``; inside a list of groups as ``federation.clients.name``. kind:
    in words, with choices and limits. default: as YAML; None where one is required."""

    place: str
    kind: str
    default: str | None
    meaning: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def groups() -> dict[str, type[Group]]:
    """Of a run's file, in their order."""
    found = {name: group_in(field.annotation) for name, field in Settings.model_fields.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def purpose(kind: type[Group]) -> str:
    """What a group is for, in a line."""
    return (inspect.getdoc(kind) or "").split("\n")[0].replace("``", "`")


def settings_in(kind: type[Group], place: str) -> Iterator[Setting]:
    """All of a group, each followed by those of the group or list of groups that it holds."""
    found = meanings(kind)
    for name, field in kind.model_fields.items():
        yield Setting(f"{place}.{name}", _kind_in_words(field), _default_in_yaml(field), found.get(name, ""))
        inner = group_in(field.annotation)
        if inner is not None:
            yield from settings_in(inner, f"{place}.{name}")


def find_settings(place: str | None = None) -> list[Setting]:
    """Those of a group, one of them with what it holds, or all; else those in whose name, kind and meaning all words of
    ``place`` begin a word. Raises ConfigError for what there is not, and for what has another name elsewhere."""
    every = [setting for name, kind in groups().items() for setting in settings_in(kind, name)]
    if place is None:
        return every
    found = [each for each in every if each.place == place or each.place.startswith(f"{place}.")]
    if not found:
        # A name without its group.
        found = [each for each in every if each.place.split(".")[1] == place and each.place.count(".") == 1]
    if not found:
        words = _words(place)
        found = [each for each in every if words and words <= _beginnings(each)]
    if not found:
        known = [*groups(), *(each.place for each in every)] if "." in place else list(groups())
        what = f"there is no setting or group {named(place)}"
        if len(place.split()) > 1:
            what, known = f"no setting has all of these words: {', '.join(place.split())}", []
        elsewhere = meant(place)
        fix = elsewhere.fix if elsewhere.place else nearest(place, known) if known else "give fewer of them"
        raise ConfigError(what, fix=fix)
    return found


def _words(text: str) -> set[str]:
    """Those of a name or a sentence, in small letters; parts of a name are words."""
    return set(re.findall(r"[^\W_]+", text.lower()))


def _beginnings(setting: Setting) -> set[str]:
    """Of all words that are said of it."""
    said = _words(f"{setting.place} {setting.kind} {setting.meaning}")
    return {word[:length] for word in said for length in range(1, len(word) + 1)}


@cache
def meanings(kind: type[BaseModel]) -> dict[str, str]:
    """What stands below each field of a group in its source, in one line."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    body = next(
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    found: dict[str, str] = {}
    for field, below in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        text = (
            below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        )
        found[field.target.id] = " ".join(str(text).replace("``", "`").split())
    return found


def _default_in_yaml(field: FieldInfo) -> str | None:
    """One line; None for a setting that is required."""
    return None if field.is_required() else yaml.safe_dump(field.default).splitlines()[0]


def _kind_in_words(field: FieldInfo) -> str:
    """What it may be, as "whole number, at least 1, or auto, or null"."""
    limits = [
        f"{words} {getattr(each, name):g}"
        for each in _metadata(field)
        for name, words in _LIMITS
        if getattr(each, name, None) is not None
    ]
    parts = list(dict.fromkeys(_parts(field.annotation)))
    if OrAuto in field.metadata:
        parts.append(AUTO)
    null = [part for part in parts if part == "null"]
    parts = [part for part in parts if part != "null"]
    words = parts[0] + "".join(f", {limit}" for limit in limits)
    return " or ".join([words, *parts[1:], *null])


def _metadata(field: FieldInfo) -> Iterator[Any]:
    """Limits of a field, and of what it may be."""
    yield from field.metadata
    for inner in get_args(field.annotation):
        for each in getattr(inner, "__metadata__", ()):
            yield from getattr(each, "metadata", (each,))


def _parts(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for inner in get_args(annotation):
            yield from _parts(inner)
    elif origin is Literal:
        yield ", ".join(map(str, get_args(annotation)))
    elif origin is list:
        inner = get_args(annotation)[0]
        if isinstance(inner, type) and issubclass(inner, Group):
            yield "list of groups"
        else:
            words = next(_parts(inner))
            yield f"list of {words}" + ("" if get_origin(inner) is Literal else "s")
    elif annotation is NoneType:
        yield "null"
    elif isinstance(annotation, type) and issubclass(annotation, Group):
        yield "group"
    else:
        yield _KINDS.get(origin or annotation, str(annotation))
