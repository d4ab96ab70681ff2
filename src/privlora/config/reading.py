"""Settings from a YAML file or plain mappings, with ``group.key=value`` laid over them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from privlora.config.groups import Settings
from privlora.config.mistakes import Origin, checked_settings, mistakes, natural
from privlora.config.nearby import whereabouts
from privlora.errors import ConfigError, Together, named

_Checked = TypeVar("_Checked", bound=BaseModel)


def load_settings(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a YAML file, apply ``group.key=value`` overrides and ask what its row can have. Raises ConfigError."""
    return settings_from(read_yaml(path), overrides, source=str(path), file=Path(path), rows=True)


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
        tab = "\\t" in problem
        problem = _QUOTED.sub("what is not shown", problem)  # of a file that may be one of records
        raise ConfigError(
            f"{str(path)!r}{where} is not valid YAML ({problem})",
            fix="indent with spaces, not with tabs" if tab else "check indentation, colons and names",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{str(path)!r} holds no settings", fix="write groups such as model:, data:, privacy:"
        )
    return content


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
    for group, values in content.items():
        merged[group] = dict(values) if isinstance(values, Mapping) else values
    unread = Together()
    overridden = {unread.of(None, _apply, merged, override) for override in overrides}
    origin = Origin(source, frozenset(place for place in overridden if place is not None), file)
    settings = unread.of(None, checked_settings, merged, origin, rows)
    unread.tell()
    assert settings is not None
    return settings


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
    """A group of settings, or all of them, from plain values. Raises ConfigError for all that is wrong with them."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise mistakes(error, values, Origin(source)) from None


def _apply(merged: dict[str, Any], override: str) -> tuple[str, str]:
    """Lay one over the settings. Returns its group and name."""
    key, equals, value = override.partition("=")
    group, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        plain = key.strip().lstrip("-")
        told = None if dot else natural(plain, value) or whereabouts(plain)
        raise ConfigError(
            f"cannot read override {named(override)}",
            fix="write group.key=value, as privacy.steps=100" + (f"; {told}" if told else ""),
        )
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"the value of override {named(key)} is not valid YAML", fix="quote it") from None
    section = merged.setdefault(group, {})
    if isinstance(section, dict):  # else the file holds no group there, which is told
        section[name] = parsed
    return group, name


_TWICE: Final = "is given twice"
_QUOTES: Final = "'\""
_QUOTED: Final = re.compile(r"'(?!<)[^']{3,}'")


class _StrictLoader(yaml.SafeLoader):
    """YAML's plain types, and no key twice in a mapping: one of two clip_norm would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # a list or a mapping, which yaml itself refuses as a key
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{named(key_node.value).strip(_QUOTES)} {_TWICE}",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)
