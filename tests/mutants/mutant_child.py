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
    """A pytest plugin that keeps what failed: test, phase (or "collect") and kind of exception."""

    def __init__(self) -> None:
        self.failures: list[dict[str, str]] = []

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        phase = getattr(report, "when", None) or "collect"
        excinfo = call.excinfo
        kinds = [kind.__name__ for kind in excinfo.type.__mro__]
        self.failures.append(
            {"test": node.nodeid, "phase": phase, "kind": kinds[0], "kinds": " ".join(kinds)}
        )


def main(result: str, modules: str, *arguments: str) -> None:
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    watch = Watch()
    code = int(pytest.main(list(arguments), plugins=[watch]))
    package = sys.modules.get("privlora")
    origin = None if package is None else package.__file__
    seconds = sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    Path(result).write_text(
        json.dumps({"code": code, "failures": watch.failures, "package": origin, "seconds": seconds})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
