"""A study as cells that are computed once and kept as JSON lines, so that a stopped study goes on where it was."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine


class Cells:
    """Results by key in ``path``, a file of JSON lines. A cell is computed only if its key is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.found[_key(row["cell"])] = row

    def __call__(self, cell: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of ``cell``: its settings, its results and the CPU seconds that they took."""
        if _key(cell) not in self.found:
            start = time.process_time()
            results = compute()
            row = {"cell": cell, **results, "cpu_seconds": round(time.process_time() - start, 1)}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            self.found[_key(cell)] = row
        return self.found[_key(cell)]


def write(path: Path, content: dict[str, Any]) -> None:
    """A result file: the machine, then ``content``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe_machine(), **content}, indent=1) + "\n", encoding="utf-8")


def _key(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)
