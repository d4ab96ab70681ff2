"""Mutants: small wrong edits of the package, each with what it would break and the tests that must find it.

They stand in the *.toml files of this folder, one file a theme; docs/testing.md says how to write one. Edits replace
text and name no line, so what happens elsewhere in a file does not move them.
"""

from __future__ import annotations

import ast
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PACKAGE = "privlora"


class MutantError(Exception):
    """A mutant that is not written as it must be."""


class StaleError(MutantError):
    """An edit that does not fit the source any more."""


@dataclass(frozen=True)
class Edit:
    """``old`` stands in ``file`` (below the package) exactly ``count`` times, and ``new`` takes its place each time."""

    file: str
    old: str
    new: str
    count: int = 1

    def applied(self, text: str) -> str:
        """Raises StaleError if the text is not found as often as it should be."""
        found = text.count(self.old)
        if found != self.count:
            raise StaleError(
                f"{self.file}: found {found} times, not {self.count}: {self.old.strip().splitlines()[0]!r}"
            )
        return text.replace(self.old, self.new)

    @property
    def module(self) -> str:
        parts = [PACKAGE, *Path(self.file).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(frozen=True)
class Mutant:
    """name: theme/name. breaks: one line. tests: pytest files or node ids. audit: a method whose one-step audit must
    convict it, or None."""

    name: str
    breaks: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    audit: str | None = None


def load_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants of a folder, by file and in the order of each. Raises MutantError."""
    mutants = [mutant for path in sorted(folder.glob("*.toml")) for mutant in _read(path)]
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MutantError(f"{twice[0]} is there twice")
    return mutants


def chosen(mutants: Iterable[Mutant], patterns: Iterable[str]) -> list[Mutant]:
    """Those whose name, or theme, matches one of the globs; all without a glob. Raises MutantError for none."""
    mutants, patterns = list(mutants), list(patterns)
    for pattern in patterns:
        if not any(_matches(mutant, pattern) for mutant in mutants):
            raise MutantError(f"no mutant is called {pattern!r}")
    return [m for m in mutants if not patterns or any(_matches(m, pattern) for pattern in patterns)]


def mutate(mutant: Mutant, source: Path, target: Path) -> None:
    """A copy of ``source``, the folder that holds the package, in ``target``, with the mutant's edits.

    Raises StaleError.
    """
    shutil.copytree(source, target)
    for file, text in mutated_files(mutant, source).items():
        path = target / PACKAGE / file
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # of the old text, and perhaps of the same second


def mutated_files(mutant: Mutant, source: Path) -> dict[str, str]:
    """Of each file that is edited, the new text. Raises StaleError."""
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        path = source / PACKAGE / edit.file
        if not path.is_file():
            raise StaleError(f"{edit.file}: no such file")
        texts[edit.file] = edit.applied(texts.get(edit.file) or path.read_text(encoding="utf-8"))
    return texts


def missing_tests(mutant: Mutant, root: Path) -> list[str]:
    """Tests of the mutant that are not below ``root``, by path and name of the function; nothing is imported."""
    return [test for test in mutant.tests if not _exists(test, root)]


def _exists(test: str, root: Path) -> bool:
    file, *names = test.split("[")[0].split("::")
    path = root / file
    return path.is_file() and set(names) <= _names(path)


@lru_cache
def _names(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))


def _matches(mutant: Mutant, pattern: str) -> bool:
    return fnmatch(mutant.name, pattern) or fnmatch(mutant.name.split("/")[0], pattern)


def _read(path: Path) -> Iterator[Mutant]:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    if set(content) != {"mutant"}:
        raise MutantError(f"{path.name} holds {sorted(content)}, not [[mutant]] alone")
    for entry in content["mutant"]:
        name = f"{path.stem}/{entry.get('name', '?')}"
        unknown = set(entry) - {"name", "breaks", "file", "old", "new", "count", "also", "tests", "audit"}
        lacking = {"name", "breaks", "file", "old", "new", "tests"} - set(entry)
        if unknown or lacking or not entry["tests"] or "\n" in entry["breaks"]:
            raise MutantError(
                f"{name}: unknown {sorted(unknown)}, lacking {sorted(lacking)}, or not one line"
            )
        edits = (_edit(entry), *(_edit(also, entry["file"]) for also in entry.get("also", [])))
        yield Mutant(name, entry["breaks"], edits, tuple(entry["tests"]), entry.get("audit"))


def _edit(content: Mapping[str, Any], file: str = "") -> Edit:
    return Edit(content.get("file", file), content["old"], content["new"], content.get("count", 1))
