"""Which test files --quick takes: those that, with the case files they import, use no room from training upwards."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from test_layers import LEVEL, imported_rooms

_FILES = {path.stem: path for path in Path(__file__).parent.rglob("*.py")}


@cache
def highest_floor(path: Path) -> int:
    """Of the rooms that the file uses, itself or through others of tests/; -1 if it uses none."""
    floors = [LEVEL.get(room, max(LEVEL.values())) for room in imported_rooms(path)]
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return max([-1, *floors, *(highest_floor(_FILES[name]) for name in modules & _FILES.keys())])


def is_quick(path: Path) -> bool:
    return highest_floor(path) < LEVEL["training"]
