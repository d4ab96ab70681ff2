"""What stands where a file of settings belongs, told by its name: a folder of a run, of records or of YAMLs, a file of
records, a setting. Nothing is opened."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from privlora.errors import ConfigError, named
from privlora.names import PRIVATE_FOLDER, PUBLIC_FOLDERS, SETTINGS_FILE

_OF_RECORDS: Final = (".jsonl", ".ndjson", ".csv", ".parquet")
_OF_SETTINGS: Final = (".yaml", ".yml")
_PARTS: Final = (PRIVATE_FOLDER, *PUBLIC_FOLDERS)
_OF_A_RUN: Final = (SETTINGS_FILE, "ledger.jsonl", "privacy_report.json")
"""Files in the parts of a run's folder, of which each run has one."""
_OVERRIDE: Final = re.compile(r"[A-Za-z_-]+\.[\w.-]+=")


def refuse_other_than_settings(path: Path) -> None:
    """Raise ConfigError for a folder, and for a file of records by its name."""
    if path.is_dir():
        raise _folder(path)
    if path.is_file() and is_of_records(path):
        raise ConfigError(
            f"cannot read {str(path)!r}: it is a file of records, by its name, and not of settings",
            fix=f"`privlora init {path} --model NAME` proposes settings for it",
        )


def refuse_settings_first(path: str | Path, overrides: Iterable[str]) -> None:
    """Raise ConfigError for a setting in the place of the file, which comes first."""
    first = str(path)
    if _OVERRIDE.match(first) is None or Path(first).exists():
        return
    file = next((each for each in overrides if each.endswith(_OF_SETTINGS)), None)
    place, _, value = first.partition("=")
    shown = value if named(value) == repr(value) else "…"
    raise ConfigError(
        f"{place!r} is a setting, and the YAML comes first",
        fix=f"write the YAML, then settings: {file or 'run.yaml'} {place}={shown}",
    )


def is_of_records(path: Path) -> bool:
    """Whether it is called as files of records are."""
    return path.name.lower().removesuffix(".gz").endswith(_OF_RECORDS)


def _folder(path: Path) -> ConfigError:
    """The error for a folder: of a run, of records, of YAMLs, or of something else."""
    run = path.parent if path.name in _PARTS else path
    if _is_run(run):
        return ConfigError(
            f"cannot read {str(path)!r}: it is a folder, and no file of settings",
            fix=f"give the YAML that it began with; what was stopped goes on with `privlora resume {run}`",
        )
    here = _files(path)
    records = [each for each in here if is_of_records(each)]
    if records:
        return ConfigError(
            f"cannot read {str(path)!r}: it is a folder that holds files of records, and no file of settings",
            fix=_for_records(path, records),
        )
    yamls = [each for each in here if each.suffix.lower() in _OF_SETTINGS]
    fix = f"give a YAML in it, as {yamls[0]}" if yamls else "give a YAML, as `privlora init` writes one"
    return ConfigError(f"cannot read {str(path)!r}: it is a folder, and no file of settings", fix=fix)


def _for_records(path: Path, records: list[Path]) -> list[str]:
    """Ways to settings of files in a folder, of one owner or of several."""
    if len(records) == 1:
        return [f"`privlora init {records[0]} --model NAME` proposes settings for the one in it"]
    return [
        f"where each file is of another owner, `privlora init {path} --clients --model NAME` proposes settings",
        "else give its files to `privlora init FILE... --model NAME`",
    ]


def _is_run(folder: Path) -> bool:
    try:
        return any((folder / part / name).exists() for part in _PARTS for name in _OF_A_RUN)
    except OSError:  # of somebody else
        return False


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))
    except OSError:
        return []
