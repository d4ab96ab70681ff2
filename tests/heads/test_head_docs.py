"""The code on the page about heads runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "projection-studies.md"


def test_code_on_the_page_runs() -> None:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    for block in found:
        exec(compile(block, PAGE.name, "exec"), {})
