"""`from privlora.lab import X`: each name loads, and nothing is loaded before it is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from privlora import lab

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = [name for names in lab._NAMES.values() for name in names]


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_loads(name: str) -> None:
    assert getattr(lab, name) is not None
    assert name in dir(lab)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'audit_steps'"):
        _ = lab.audit_steps


def test_every_name_that_the_docs_import_is_public() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    shown = re.findall(r"from privlora\.lab import (.+)", text)
    assert shown
    assert {name for names in shown for name in names.split(", ")} <= set(PUBLIC)


def test_the_table_loads_nothing() -> None:
    code = "import sys, privlora.lab; print([name for name in sys.modules if name in ('torch', 'scipy')])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
