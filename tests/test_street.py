"""The one-way street in the source: who may make a release, who may have noise, and who never meets whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_layers import SOURCE, imported_rooms, room_of

# What is called -> the files that may, each for a reason.
MAY_CALL = {
    "Release": {
        "mechanisms/gaussian.py",  # the release
        "mechanisms/distributed.py",  # of a secure sum, whose shares have their noise
        "mechanisms/votes.py",  # of votes on generated texts
        "mechanisms/nonprivate.py",  # of the mode that is stamped NOT PRIVATE
    },
    "noised": {"mechanisms/noising.py"},  # where a sum meets noise
    "rounded": {"mechanisms/noising.py"},  # where a client's integers do
    "discrete_gaussian": {
        "mechanisms/noise.py",  # the source
        "mechanisms/noising.py",
        "stacked/parts.py",  # a source for each client of a stack
    },
    "Charged": {
        "mechanisms/noising.py",  # once the ledger has the charge
        "lab/wishart/mechanism.py",  # one release an object, whose cost the caller states
        "lab/diagnostics/bench.py",  # replays noise of a public seed
    },
    "PrivateSum": {"mechanisms/release.py"},
    "votes": {"synthesis/rounds.py"},  # which hands them to a mechanism at once
}
# Room -> rooms that it never meets, though the layers would let it.
NEVER = {
    "optimizers": {"adapters", "data", "accounting"},
    "mechanisms": {"data"},
    "coordinates": {"accounting"},
    "data": {"adapters"},
    "lab/wishart": {"adapters", "coordinates"},
    "synthesis": {"adapters", "coordinates"},
}

SYNTHESIS = sorted(path.name for path in (SOURCE / "synthesis").glob("*.py"))


def imported_modules(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@cache
def calls(path: Path) -> frozenset[tuple[str, str]]:
    """(name, "call" or "method") of all that a file calls."""
    return frozenset(_calls(path))


def _calls(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, "call"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, "method"


@pytest.mark.parametrize("name", MAY_CALL)
def test_only_these_files_make(name: str) -> None:
    callers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if (name, "call") in calls(path) or (name, "method") in calls(path)
    }
    assert callers == MAY_CALL[name]


def test_private_sums_are_seen_in_mechanisms_and_audits_alone() -> None:
    seen = {
        room_of(path)
        for path in SOURCE.rglob("*.py")
        for name, kind in calls(path)
        if (name, kind) == ("clipped_sum", "method")
    }
    assert seen == {"mechanisms", "auditing"}  # an attacker who knows the records


@pytest.mark.parametrize("room", NEVER)
def test_rooms_that_never_meet(room: str) -> None:
    met = {
        (path.name, used)
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).as_posix().startswith((f"{room}/", f"{room}.py"))
        for used in imported_rooms(path) & NEVER[room]
    }
    assert met == set()


def test_whoever_writes_texts_meets_no_voter() -> None:
    """Of the room's files one sees units of records, and one hands their votes to a mechanism."""
    seen = {name: imported_modules(SOURCE / "synthesis" / name) for name in SYNTHESIS}
    units = {"privlora.data.units", "privlora.data.sampling"}
    assert {name for name in SYNTHESIS if seen[name] & units} == {"votes.py"}
    assert {name for name in SYNTHESIS if "privlora.synthesis.votes" in seen[name]} == {"rounds.py"}


def test_the_picture_of_the_rooms_is_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = SOURCE.parent.parent / "docs"
    monkeypatch.syspath_prepend(str(docs))
    from draw_rooms import picture

    assert (docs / "rooms.svg").read_text(encoding="utf-8") == picture(), "run: python docs/draw_rooms.py"
