"""Which setting a wrong name means: one of another tool, one of another group, or one that is spelt nearly so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from privlora.config.base import group_in
from privlora.config.foreign_names import GROUPS_ELSEWHERE, RATES
from privlora.config.groups import Settings
from privlora.config.other_names import called_here, plain
from privlora.errors import named, nearest


def named_here(group: str, name: object, value: Any, content: Mapping[str, Any]) -> str:
    """How to mend a name that no setting of ``group`` has, or no group where that is "". value: what was set; content:
    all groups as given."""
    if not group and not re.fullmatch(r"[\w.-]+", str(name)):
        return "a group is its name and a colon, as model: on a line of its own"
    if not group:
        return _group_here(name, value, content) or nearest(str(name), Settings.model_fields)
    told = called_here(group, name, value, content) or _slip_beside(group, name) or _homes(name)
    return _said_once(group, name, told or _near(group, name), content)


def meant_by(group: str, told: str) -> tuple[str, str] | None:
    """The setting, as (group, name), that `named_here` advises in the place of a name in ``group``."""
    meant = _MEANT.match(told)
    return None if meant is None else (meant[2] or group, meant[3])


class Located(dict[str, Any]):
    """Groups of settings as they were given. where: a setting stands, by (group, name), in words to put behind it."""

    where: Callable[[tuple[int | str, ...]], str] = staticmethod(lambda place: "")


_MEANT: Final = re.compile(r"(did you mean '|it is called |it belongs elsewhere: write )(?:(\w+)\.)?(\w+)\b")


def _said_once(group: str, name: object, told: str, content: Mapping[str, Any]) -> str:
    """``told``, but not so that a file would then say a setting twice. On the command line it takes its place."""
    meant = _MEANT.match(told)
    if meant is None or not isinstance(content, Located) or not _in_file(content.where((group, str(name)))):
        return told
    place = (meant[2] or group, meant[3])
    inner, where = content.get(place[0]), content.where(place)
    if not isinstance(inner, Mapping) or place[1] not in inner:
        return told
    given = f"{'.'.join(place) if place[0] != group else place[1]} is given already{where}"
    if meant[1].startswith("did"):
        return f"remove {named(name)}: {given}"
    return f"{told}; {given}, so remove this one"


def _in_file(where: str) -> bool:
    return where.startswith(" (line ")


def whereabouts(name: str) -> str | None:
    """What is called ``name`` elsewhere or here, with its group or without one; None for what nothing is called."""
    group, _, setting = plain(name).rpartition(".")
    fields = _fields().get(group)
    if fields is not None and setting in fields:
        return f"write {group}.{setting}=…"
    return called_here(group if fields is not None else "", setting) or _homes(setting)


def slip(name: str) -> str | None:
    """The setting that a dotted name is spelt nearly as, in full; None for what is far from all of them.

    >>> slip("privacy.stepz"), slip("privacy.lerning_rate"), slip("privcy.steps"), slip("privacy.foo")
    ('privacy.steps', 'method.learning_rate', 'privacy.steps', None)
    """
    group, _, setting = plain(name).partition(".")
    groups = _fields()
    if group not in groups:
        group = _closest(group, groups) or group
    if setting in groups.get(group, ()):
        return f"{group}.{setting}"
    return _slip_in(group, setting)


def _fields() -> dict[str, list[str]]:
    found = {name: group_in(field.annotation) for name, field in Settings.model_fields.items()}
    return {name: list(kind.model_fields) for name, kind in found.items() if kind is not None}


def _group_here(group: object, values: Any, content: Mapping[str, Any]) -> str | None:
    """Where what stands outside of all groups belongs: a group of another tool, or one of its flat settings."""
    flat = called_here("", group, values, content) or _homes(group)
    elsewhere = GROUPS_ELSEWHERE.get(plain(group))
    inside = isinstance(values, Mapping | list)
    return (elsewhere or flat) if inside else (flat or elsewhere)


def _homes(name: object) -> str | None:
    """For a setting that stands in another group than its own, or in none."""
    found = [f"{group}.{plain(name)}" for group, fields in _fields().items() if plain(name) in fields]
    other = f"; {RATES}" if found == ["method.learning_rate"] else ""
    return f"it belongs elsewhere: write {' or '.join(found)}{other}" if found else None


def _slip_beside(group: str, key: object) -> str | None:
    """A slip of the pen in a group's own name, which another group happens to have as it stands."""
    own, home = _closest(plain(key), _fields()[group], careful=True), _homes(key)
    if group == "privacy" or own is None or home is None:
        return None
    return f"did you mean '{own}'? Else {home}."


def _near(group: str, key: object) -> str:
    """The setting that is spelt nearly so: in its group, then in all. In group privacy alone what can only be a slip of
    the pen: one number of it in another's place would be a promise that nobody meant."""
    found = _slip_in(group, plain(key))
    if found is not None:
        return f"did you mean '{found.removeprefix(f'{group}.')}'?"
    fields = _fields()[group]
    return f"known: {', '.join(fields)}" if group == "privacy" else nearest(str(key), fields)


def _slip_in(group: str, key: str) -> str | None:
    groups = _fields()
    own = _closest(key, groups.get(group, ()), careful=group == "privacy")
    if own is not None:
        return f"{group}.{own}"
    others = {name: other for other, fields in groups.items() if other != group for name in fields}
    found = _closest(key, others, careful=True)
    return None if found is None else f"{others[found]}.{found}"


_NEVER: Final = "insecure_noise_seed"  # nobody is advised to switch privacy off


def _closest(name: str, known: Iterable[str], *, careful: bool = False) -> str | None:
    """The one of ``known`` that a slip of the pen leads to: one letter of a short name, two or three of a long one.
    Underscores do not count. careful: at most one letter of each word, two of a long one."""
    found = []
    for each in known:
        away = _away(name, each, careful=careful)
        if away is not None and each != _NEVER:
            found.append((away, each))
    return min(found)[1] if found else None


def _away(name: str, right: str, *, careful: bool) -> int | None:
    """Letters between two names; None for too many."""
    ours, theirs = name.split("_"), right.split("_")
    if careful and len(ours) == len(theirs):
        allowed = [0 if len(word) < 3 else 1 if len(word) < 8 else 2 for word in theirs]
        apart = [_slips(*words) for words in zip(ours, theirs, allowed, strict=True)]
        return sum(apart) if all(n <= most for n, most in zip(apart, allowed, strict=True)) else None
    size = len(right)
    most = 0 if size < 3 else 1 if careful or size < 6 else 2 if size < 11 else 3
    away = _slips("".join(ours), "".join(theirs), most)
    return away if away <= most else None


def _slips(first: str, second: str, most: int) -> int:
    """Letters that are left out, put in, taken for others or swapped with their neighbours (Damerau, 1964); a number
    above ``most`` where they are more."""
    if abs(len(first) - len(second)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        new = [i]
        for j, b in enumerate(second, start=1):
            least = min(row[j] + 1, new[j - 1] + 1, row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and first[i - 2] == b:
                least = min(least, before[j - 2] + 1)
            new.append(least)
        before, row = row, new
    return row[-1]
