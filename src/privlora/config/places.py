"""Where settings were given, in the words of errors: the line of a file, or the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from privlora.config.base import group_in
from privlora.errors import PrivloraError

_Error = TypeVar("_Error", bound=PrivloraError)
Where = Callable[[tuple[str, str]], str]
"""Of (group, name): " (line 3)", " (on the command line)", or "" where nothing is known."""

_SETTING: Final = re.compile(r"\b([a-z]+)\.([a-z0-9_]+)\b(?:=(?:'[^']*'|[^\s,;:()]++))?+(?! \()")


def nowhere(place: tuple[str, str]) -> str:
    return ""


class Places:
    """What a run's settings remember of it. All are equal, since settings are the same wherever they stood."""

    def __init__(self, where: Where = nowhere) -> None:
        self.where = where

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places)

    def __hash__(self) -> int:
        return 0


def field_of(groups: Mapping[str, Any], place: str) -> Any:
    """Of a setting, as ``group.name``; None of what is none. groups: fields of `Settings`."""
    group, _, name = place.partition(".")
    holder = groups.get(group)
    own = None if holder is None else group_in(holder.annotation)
    return None if own is None else own.model_fields.get(name)


def at_lines(what: str, where: Where, groups: Mapping[str, Any]) -> str:
    """The same, with where each setting stands behind its first mention."""
    told = set[tuple[str, str]]()

    def with_line(found: re.Match[str]) -> str:
        place = found[1], found[2]
        if place in told or field_of(groups, f"{found[1]}.{found[2]}") is None:
            return found[0]
        told.add(place)
        return f"{found[0]}{where(place)}"

    return _SETTING.sub(with_line, what)


def placed(error: _Error, where: Where, groups: Mapping[str, Any], about: str | None) -> _Error:
    """The error itself, which from now on tells the lines of settings that it names. about: the one that it is about,
    as group.name, where it names none."""
    if error.parts:
        for part in error.parts:
            placed(part, where, groups, about)
        error.retell()
        return error
    what = at_lines(error.what, where, groups)
    if what == error.what and about is not None:
        group, _, name = about.partition(".")
        if line := where((group, name)):
            what = f"{about}{line}: {what}"
    if what != error.what:
        error.say(what)
    return error
