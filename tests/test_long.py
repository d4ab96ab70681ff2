"""What `make test` leaves out takes long, and is no guard of privacy that nothing else holds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GUARDS = ("accounting", "contracts", "coordinates", "mechanisms", "federated/secure")
"""Rooms in which whole tests are never long, only single parameters of them."""


def marks(node: ast.AST) -> list[str]:
    return [ast.unparse(each) for each in getattr(node, "decorator_list", [])]


@pytest.mark.parametrize("room", GUARDS)
def test_no_guard_is_left_out_as_a_whole(room: str) -> None:
    files = sorted((HERE / room).rglob("test_*.py"))
    assert files
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        whole = [n for n in tree.body if any("mark.long" in mark for mark in marks(n))]
        assert whole == [], [getattr(n, "name", "") for n in whole]
        assigned = [ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign)]
        assert not any("pytestmark" in words and "long" in words for words in assigned), path


def test_make_runs_both_halves() -> None:
    makefile = (HERE.parent / "Makefile").read_text(encoding="utf-8")
    assert '$(PYTEST) -m "not long"\n' in makefile
    assert "$(PYTEST) -m long\n" in makefile
    ci = HERE.parent / ".ci/run"
    if not ci.exists():  # not in the sdist
        pytest.skip("no .ci")
    lines = ci.read_text(encoding="utf-8").splitlines()
    assert {"make test", "make test-long"} <= set(lines)
