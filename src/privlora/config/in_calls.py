"""How an error of settings is mended in a call in Python, whose arguments are the groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import yaml

from privlora.config.groups import Settings
from privlora.config.places import field_of
from privlora.errors import PrivloraError

_PLACE: Final = r"(model|data|adapter|privacy|method|run|synthesis|federation|auto)\.(\w+)"
_ARGUMENT: Final = {"data": "columns", "model": "loading"}
"""Groups of settings that arguments call otherwise."""
_OWN: Final = {
    ("data", "path"): "data",
    ("data", "evaluation"): "evaluation",
    ("model", "name"): "model",
    ("run", "output"): "output",
}
"""Settings that are arguments of their own."""
_WHOLE: Final = r"\[[^\]]*\]|\{[^}]*\}"
"""A list or a mapping."""
_VALUE: Final = rf"({_WHOLE}|[^\s,;]+)(?=$|[,;]| in the group )"
_SETTING: Final = re.compile(rf"\b{_PLACE}\b(?:=({_WHOLE}|[^\s,;()]+))?")
_LINE: Final = re.compile(rf"^(add |)(\w+): {_VALUE}|(, as |Write )(\w+): {_VALUE}(?: in the group (\w+))?")
_VERBATIM: Final = re.compile(r"[-+.\d][-+.\de_]*|[A-Z]+|…|'.*'|\".*\"")
"""Numbers, strings and what stands for a value are written alike."""


_CALLED: ContextVar[Mapping[tuple[str, str], str] | None] = ContextVar("called", default=None)


@contextmanager
def called(names: Mapping[tuple[str, str], str]) -> Iterator[None]:
    """Inside, errors of calls say what a caller typed; names: as of ``as_in_python``."""
    token = _CALLED.set(names)
    try:
        yield
    finally:
        _CALLED.reset(token)


def as_in_python(error: PrivloraError, names: Mapping[tuple[str, str], str] | None = None) -> None:
    """Let an error of settings say how each mistake is mended in a call.

    names: arguments that stand for settings, by (argument that holds the group, name); those of ``called`` without it.

    >>> error = PrivloraError("privacy.steps is missing", fix="add steps: 200, or data.text=NAME")
    >>> as_in_python(error)
    >>> error.fix
    'add privacy=dict(steps=200), or columns=dict(text=NAME)'
    """
    names = names or _CALLED.get() or {}

    def argument(group: str, name: str, value: str | None) -> str:
        held = _ARGUMENT.get(group, group)
        own = names.get((held, name)) or _OWN.get((group, name))
        shown = "…" if value is None else _as_python(value)
        return f"{own}={shown}" if own else f"{held}=dict({name}={shown})"

    def known(group: str, name: str) -> bool:
        return field_of(Settings.model_fields, f"{group}.{name}") is not None

    def mended(one: PrivloraError, fix: str) -> str:
        of_what = re.search(_PLACE, one.what)

        def line(found: re.Match[str]) -> str:
            before, name, value = (
                (found[1], found[2], found[3]) if found[2] else (found[4], found[5], found[6])
            )
            group = found[7] or (of_what[1] if of_what else "")
            return f"{before}{argument(group, name, value)}" if known(group, name) else found[0]

        fix = _LINE.sub(line, fix)
        return _SETTING.sub(
            lambda found: argument(found[1], found[2], found[3]) if known(found[1], found[2]) else found[0],
            fix,
        )

    error.mend_by(lambda one: [mended(one, fix) for fix in one.fixes])


def _as_python(value: str) -> str:
    """
    >>> _as_python("1e-5"), _as_python("true"), _as_python("prism")
    ('1e-5', 'True', "'prism'")
    >>> _as_python("{0: bad, 1: good}"), _as_python("[negative, positive]")
    ("{0: 'bad', 1: 'good'}", "['negative', 'positive']")
    """
    if _VERBATIM.fullmatch(value):
        return value
    try:
        return repr(yaml.safe_load(value))
    except yaml.YAMLError:  # the beginning of a value with commas
        return value
