"""The page about tests names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/testing.md").read_text(encoding="utf-8")


def test_every_test_that_it_names_exists() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", PAGE)
    assert len(named) > 20
    for file, name in named:
        nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        assert name in {n.name for n in nodes if isinstance(n, ast.FunctionDef)}, f"{file}::{name}"


def test_all_demands_on_methods_with_public_texts_are_held() -> None:
    rows = re.findall(r"^\| (\d+) \|.*::test_", PAGE, flags=re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 15))
