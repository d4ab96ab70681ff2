"""Settings from a YAML file or plain mappings, with ``group.key=value`` laid over them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from privlora.config.auto import spelt_out, with_all_auto
from privlora.config.foreign_names import tool_of
from privlora.config.groups import Settings
from privlora.config.mistakes import Origin, checked_settings, mistakes, natural
from privlora.config.nearby import whereabouts
from privlora.config.not_settings import refuse_other_than_settings, refuse_settings_first
from privlora.config.plain_yaml import TWICE, UnboundedError, read_plain
from privlora.errors import ConfigError, Together, named, typed

_Checked = TypeVar("_Checked", bound=BaseModel)


def load_settings(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a YAML file, apply ``group.key=value`` overrides and ask what its row can have. Raises ConfigError."""
    overrides = list(overrides)
    refuse_settings_first(path, overrides)
    content = read_yaml(path)
    _refuse_other_tool(path, content)
    return settings_from(content, overrides, str(path), Path(path), rows=True)


def _refuse_other_tool(path: str | Path, content: Mapping[str, Any]) -> None:
    """Raise ConfigError for a file of another tool: one sentence in the place of one for each of its names."""
    own = sum(isinstance(content.get(group), Mapping) for group in Settings.model_fields)
    tool = tool_of(content)
    if tool is not None and own < 2 and "privacy" not in content:  # of litgpt, data is a group, too
        raise ConfigError(
            f"{str(path)!r} holds settings of {tool}, and not of privlora",
            fix="`privlora init records.jsonl --model NAME`, with your own records, proposes settings of privlora",
        )


def kept_settings(path: str | Path) -> Settings:
    """Those that a run keeps in its folder. Raises ConfigError.

    A file of a version without method.relative_rate is of a run whose rate was in entries, and it stays so: what this
    version writes always says it.
    """
    content = read_yaml(path)
    method = {} if content.get("method") is None else content["method"]
    if isinstance(method, dict) and method.get("relative_rate") is None:
        content["method"] = {**method, "relative_rate": False}
    return settings_from(content, source=str(path), file=Path(path))


def read_yaml(path: str | Path, *, quoted: bool = True) -> dict[str, Any]:
    """The mapping that a YAML file holds; a key that is given twice is an error. Raises ConfigError.

    quoted: whether the error may say what is wrong in words of the file, among which may be keys of services.
    """
    refuse_other_than_settings(Path(path))
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = read_plain(text)
    except (OSError, UnicodeDecodeError) as error:
        near = _near(Path(path)) if isinstance(error, FileNotFoundError) else None
        raise ConfigError(
            f"cannot read {str(path)!r} ({type(error).__name__})",
            fix="save it as UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else "check the path"
            if near is None
            else f"did you mean {near!r}?",
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        colonless = _line_without_a_colon(error, text)
        line = colonless or (mark.line + 1 if mark else None)
        where = f", line {line}" if line else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        if isinstance(error, UnboundedError):
            raise ConfigError(f"{str(path)!r}{where} holds {problem}", fix=error.fix) from None
        if not quoted:
            problem = "a key is given twice" if problem.endswith(TWICE) else type(error).__name__
        tab = "\\t" in problem
        problem = _QUOTED.sub(
            "what is not shown", _OWN.sub(r"\1", problem)
        )  # of a file that may be one of records
        if colonless:
            problem, fix = "a name without its colon", _COLON
        else:
            fix = "indent with spaces, not with tabs" if tab else "check indentation, colons and names"
        raise ConfigError(f"{str(path)!r}{where} is not valid YAML ({problem})", fix=fix) from None
    if not isinstance(content, dict):
        fixes = ["write groups such as model:, data:, privacy:"]
        if Path(path).suffix.lower() == ".txt":
            fixes.insert(0, f"of a file of texts, `privlora init {path} --model NAME` proposes settings")
        raise ConfigError(f"{str(path)!r} holds no settings", fix=fixes)
    return content


_COLON: Final = "write a colon and a space after the name, as steps: 200; after that of a group a colon"


def _line_without_a_colon(error: Exception, text: str) -> int | None:
    """The line, from 1, of a name that its colon, or the space behind that, is missing after: yaml tells it a line
    late. None for other mistakes."""
    begun, mark = getattr(error, "context_mark", None), getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", ""))
    if begun is not None and problem.startswith("could not find expected ':'"):
        return int(begun.line) + 1
    late = ("mapping values are not allowed", "expected <block end>, but found '<block mapping start>'")
    if mark is None or not problem.startswith(late):
        return None
    before = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines()[: mark.line], start=1)
        if line.strip() and not line.strip().startswith("#")
    ]
    if before and re.fullmatch(r"\w+(:\S.*)?", before[-1][1]):
        return before[-1][0]
    return None


def settings_from(
    content: Mapping[str, Any],
    overrides: Iterable[str] = (),
    source: str = "settings",
    file: Path | None = None,
    *,
    rows: bool = False,
) -> Settings:
    """Check plain nested mappings (as from YAML) and overrides. file: where they stand, whose lines errors name. rows:
    whether what the method's row cannot have is wrong, too. Raises ConfigError for all that is wrong with them."""
    merged: dict[str, Any] = {}
    for group, values in spelt_out(content).items():
        merged[group] = dict(values) if isinstance(values, Mapping) else values
    unread, overrides = Together(), list(overrides)
    overridden = {unread.of(None, _apply, merged, override) for override in overrides}
    merged = dict(with_all_auto(merged))
    origin = Origin(source, frozenset(place for place in overridden if place is not None), file)
    with typed(override.partition("=")[2].strip() for override in overrides):
        settings = unread.of(None, checked_settings, merged, origin, rows)
    unread.tell()
    assert settings is not None
    return settings


def _near(path: Path) -> str | None:
    """The file of settings in the same folder that is called nearly as one that is not there."""
    try:
        here = [each.name for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml")]
    except OSError:
        return None
    close = [name for name in here if Path(name).stem == path.stem or name == path.name + Path(name).suffix]
    close = close or difflib.get_close_matches(path.name, here, n=1)
    return str(path.parent / close[0]) if close else None


def checked(kind: type[_Checked], values: Mapping[str, Any], source: str) -> _Checked:
    """A group of settings, or all of them, from plain values. Raises ConfigError for all that is wrong with them."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise mistakes(error, values, Origin(source)) from None


def _apply(merged: dict[str, Any], override: str) -> tuple[str, str]:
    """Lay one over the settings. Returns its group and name."""
    key, equals, value = override.partition("=")
    if key.strip() == "auto" and value.strip().lower() == "true":  # as in a file and a call
        key = "auto.all"
    group, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        plain = key.strip().lstrip("-")
        told = None if dot else natural(plain, value or "…") or whereabouts(plain)
        fix = _GENERAL if told is None else _as_written(told, value)
        raise ConfigError(f"cannot read override {named(override)}", fix=fix)
    try:
        parsed = read_plain(value)
    except yaml.YAMLError:
        raise ConfigError(
            f"the value of override {named(key)} is not valid YAML",
            fix="""put quotes inside those of the shell, as 'data.text="{title}"'""",
        ) from None
    section = merged.setdefault(group, {})
    if isinstance(section, dict):  # else the file holds no group there, which is told
        section[name] = parsed
    return group, name


_GENERAL: Final = "write group.key=value, as privacy.steps=100"


def _as_written(told: str, value: str) -> str:
    """Of what tells where a setting belongs, the setting with its value, where that may be shown.

    >>> _as_written("it belongs elsewhere: write privacy.steps", "3")
    'write privacy.steps=3 (group.key=value)'
    >>> _as_written("write model.name=…", "")
    'write model.name=… (group.key=value)'
    """
    found = re.fullmatch(r"(?:it belongs elsewhere: )?write ([a-z_.0-9]+)(=[^;]*)?(;.*)?", told)
    if found is None:
        return f"{_GENERAL}; {told}"
    shown = value if value and named(value) == repr(value) else "…"
    return f"write {found[1]}{found[2] or f'={shown}'} (group.key=value){found[3] or ''}"


_OWN: Final = re.compile(r"'(<[a-z ]+>)'")
"""YAML's own words, among what it quotes."""
_QUOTED: Final = re.compile(r"""['"].{3,}['"]""", re.DOTALL)
