"""The clients of a federation, from their files: one file is one owner's, and its name is the client's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from privlora.data.records import is_data_file_name
from privlora.errors import DataError
from privlora.starting.proposal import Owner

_LONGEST = 63


def owners_of(paths: Sequence[str]) -> tuple[Owner, ...]:
    """paths: of files, or of folders whose data files are meant. Raises DataError for fewer than two files."""
    files = [file for path in paths for file in _files(path)]
    if len(files) < 2:
        raise DataError(
            f"--clients, and {len(files)} file{'s' * (len(files) != 1)} of records: each owner has a file of its own, "
            "and a federation at least two",
            fix="give each owner's file, or a folder that holds them; without --clients it is a run in one place",
        )
    names = [_name(file) for file in files]
    if len({name.lower() for name in names}) < len(names) or not all(names):
        names = [f"client-{number}" for number in range(1, len(files) + 1)]
    return tuple(map(Owner, names, files))


def _files(path: str) -> list[str]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [path]
    return [str(each) for each in sorted(folder.iterdir()) if each.is_file() and is_data_file_name(each.name)]


def _name(file: str) -> str:
    """What a client may be called, after its file; empty where nothing is left."""
    stem = Path(file).name.removesuffix(".gz").partition(".")[0]
    return re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:_LONGEST]
