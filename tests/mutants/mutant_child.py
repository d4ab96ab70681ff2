"""Runs tests on one copy of the package, in a process of its own, and writes down how the first of them failed.

    python mutant_child.py RESULT MODULE,MODULE PYTEST-ARGUMENT...

The copy comes first in PYTHONPATH. Its modules are imported before any test, so a copy that cannot be imported ends
the process without a RESULT.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest


class Watch:
    """A pytest plugin that keeps what failed: test, phase (or "collect"), classes of the exception."""

    def __init__(self) -> None:
        self.failures: list[dict[str, Any]] = []

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        kinds = [kind.__name__ for kind in call.excinfo.type.__mro__]
        phase = getattr(report, "when", None) or "collect"
        self.failures.append({"test": node.nodeid, "phase": phase, "kinds": kinds})


def main(result: str, modules: str, *arguments: str) -> None:
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    watch = Watch()
    code = int(pytest.main(list(arguments), plugins=[watch]))
    package = sys.modules.get("privlora")
    origin = None if package is None else package.__file__
    found = {"code": code, "failures": watch.failures, "package": origin, "seconds": cpu_seconds()}
    Path(result).write_text(json.dumps(found))


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    main(*sys.argv[1:])
