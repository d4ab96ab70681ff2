"""Settings from a YAML file or plain mappings, with ``group.key=value`` laid over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel

from privlora.config.auto import spelt_out, with_all_auto
from privlora.config.groups import Settings
from privlora.config.mistakes import Origin, Place, checked_group, checked_settings, is_shown, natural
from privlora.config.names import meant
from privlora.config.plain_yaml import UnboundedError, read_plain
from privlora.errors import ConfigError, Together, close, named, typed
from privlora.names import PRIVATE_FOLDER, PUBLIC_FOLDERS, SETTINGS_FILE

_OF_RECORDS: Final = (".jsonl", ".ndjson", ".csv", ".parquet")
_Checked = TypeVar("_Checked", bound=BaseModel)


def load_settings(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a YAML file, apply ``group.key=value`` overrides and ask what its method can have. Raises ConfigError."""
    return settings_from(read_yaml(path), list(overrides), str(path), Path(path), methods=True)


def kept_settings(path: str | Path) -> Settings:
    """Those that a run keeps in its folder. Raises ConfigError."""
    return settings_from(read_yaml(path), source=str(path), file=Path(path))


def read_yaml(path: str | Path, *, quoted: bool = True) -> dict[str, Any]:
    """The mapping that a YAML file holds; a key that is given twice is an error. Raises ConfigError.

    quoted: whether the error may say what is wrong in words of the file, among which may be keys of services.
    """
    path = Path(path)
    if "=" in path.name and not path.exists():
        fix = "write the YAML, then settings, as run.yaml privacy.steps=200"
        raise ConfigError(f"{path.name.partition('=')[0]!r} is a setting, and the YAML comes first", fix=fix)
    if path.is_dir() or path.name.lower().removesuffix(".gz").endswith(_OF_RECORDS):
        what = "a folder" if path.is_dir() else "a file of records"
        run = path.parent if path.name in PUBLIC_FOLDERS else path
        fix = f"give a YAML, as `privlora init {path} --model NAME` writes one"
        if (run / PRIVATE_FOLDER / SETTINGS_FILE).exists():
            fix = f"give the YAML that it began with; what was stopped goes on with `privlora resume {run}`"
        raise ConfigError(f"cannot read {str(path)!r}: it is {what}, and no file of settings", fix=fix)
    try:
        content = read_plain(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        fix = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "check the path"
        if isinstance(error, FileNotFoundError):
            found = close(path.name, [each.name for each in _yamls(path.parent)], 0.6)
            fix = fix if found is None else f"did you mean {str(path.with_name(found))!r}?"
        raise ConfigError(f"cannot read {str(path)!r} ({type(error).__name__})", fix=fix) from None
    except UnboundedError as error:
        raise ConfigError(f"{str(path)!r}{error.where} holds {error.problem}", fix=error.fix) from None
    except yaml.YAMLError as error:
        # What yaml quotes may be of a file of records. Its own marks are a line late where a colon is missing.
        lines = {
            mark.line + 1 for mark in (_mark(error, "context_mark"), _mark(error, "problem_mark")) if mark
        }
        where = f", line {' or '.join(map(str, sorted(lines)))}" if lines else ""
        what = type(error).__name__
        if quoted and (twice := getattr(error, "twice", None)):
            what = f"{twice} is given twice"
        fix = "check colons (name: value), indentation (spaces, no tabs) and names that are given twice"
        raise ConfigError(f"{str(path)!r}{where} is not valid YAML ({what})", fix=fix) from None
    if not isinstance(content, dict):
        fix = "write groups such as model:, data:, privacy:, as `privlora init` does"
        raise ConfigError(f"{str(path)!r} holds no settings", fix=fix)
    return content


def _mark(error: yaml.YAMLError, name: str) -> Any:
    return getattr(error, name, None)


def _yamls(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if each.suffix in (".yaml", ".yml")]
    except OSError:
        return []


def settings_from(
    content: Mapping[str, Any],
    overrides: Iterable[str] = (),
    source: str = "settings",
    file: Path | None = None,
    *,
    methods: bool = False,
    arguments: Mapping[Place, str] | None = None,
) -> Settings:
    """Check plain nested mappings (as from YAML) and overrides. file: where they stand, whose lines errors name.
    methods: whether what the method cannot have is wrong, too. arguments: of a call, see `Origin`. Raises ConfigError
    for all that is wrong with them."""
    merged: dict[str, Any] = {}
    for group, values in spelt_out(content).items():
        merged[group] = dict(values) if isinstance(values, Mapping) else values
    unread, overrides = Together(), list(overrides)
    overridden = {unread.of(None, _apply, merged, override) for override in overrides}
    merged = dict(with_all_auto(merged))
    places = frozenset(place for place in overridden if place is not None)
    origin = Origin(source, places, file, arguments)
    with typed(override.partition("=")[2].strip() for override in overrides):
        settings = unread.of(None, checked_settings, merged, origin, methods)
    unread.tell()
    assert settings is not None
    return settings


def checked(kind: type[_Checked], values: Mapping[str, Any], source: str) -> _Checked:
    """A group of settings, or all of them, from plain values. Raises ConfigError for all that is wrong with them."""
    found: _Checked = checked_group(kind, values, source)
    return found


def _apply(merged: dict[str, Any], override: str) -> tuple[str, str]:
    """Lay one over the settings. Returns its group and name."""
    key, equals, value = override.partition("=")
    if key.strip() == "auto" and value.strip().lower() == "true":  # as in a file and a call
        key = "auto.all"
    group, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        plain = key.strip().lstrip("-")
        place = None if dot else (natural(plain, value or "…") or meant(plain)).place
        shown = "true" if place == "auto.all" else value if value and is_shown(plain, value) else "…"
        raise ConfigError(
            f"cannot read override {named(override)}",
            fix=_GENERAL if place is None else f"write {place}={shown} (group.key=value)",
        )
    try:
        parsed = read_plain(value)
    except yaml.YAMLError:
        fix = """put quotes inside those of the shell, as 'data.text="{title}"'"""
        raise ConfigError(f"the value of override {named(key)} is not valid YAML", fix=fix) from None
    section = merged.setdefault(group, {})
    if isinstance(section, dict):  # else the file holds no group there, which is reported
        section[name] = parsed
    return group, name


_GENERAL: Final = "write group.key=value, as privacy.steps=100"
