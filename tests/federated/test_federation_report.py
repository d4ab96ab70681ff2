"""A federation's release: the report's key, the statement on top, what card and page make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fact_cases import NAMES, facts_of, ledger_of, rounds_with, settings_for
from test_federation_facts import MODELS

from privlora.accounting import LedgerSummary, read_ledger
from privlora.federated.plans import server_plan
from privlora.reporting import publish, rewrite_report
from privlora.training.files import RunFolder, append_line


def released(name: str, root: Path, *answered: int) -> RunFolder:
    """The folder of a federation that has ended. The ledgers beside the report are as `Prepared.serve` leaves them."""
    privacy, federation = MODELS[name]
    settings = settings_for(privacy, **federation)
    folder = RunFolder(root / "run")
    folder.create(protects=privacy is not None)
    folder.settings.write_text(settings.to_yaml())
    for step, loss in ((0, 3.5), (len(answered), 3.25)):
        row = {"loss_per_token": loss, "loss_per_example": loss, "standard_error": 0.125, "accuracy": 0.5}
        append_line(folder.evaluations, {"step": step, **row, "examples": 7, "tokens": 70})
    steps = federation.get("local_steps", 1)
    charges = tuple(steps * sum(i < count for count in answered) for i in range(len(NAMES)))
    facts, parts, summary = facts_of(settings, root, charges, rounds_with(*answered))
    if summary is not None:
        folder.ledger.write_bytes(summary.path.read_bytes())
    own = server_plan(settings)
    if own is not None:
        summary = ledger_of(folder.ledger, own, len(answered))
    publish(folder, parts, _at(summary, folder), federation=facts)
    return folder


def _at(summary: LedgerSummary | None, folder: RunFolder) -> LedgerSummary | None:
    return None if summary is None else read_ledger(folder.ledger)


def report_of(folder: RunFolder) -> dict[str, Any]:
    loaded = json.loads(folder.report.read_text())
    assert isinstance(loaded, dict)
    return loaded


def pages(folder: RunFolder) -> tuple[str, str]:
    """The report's page and the card."""
    page, card = ((folder.release / name).read_text() for name in ("report.html", "README.md"))
    return page.replace("&#39;", "'"), card


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("joint", "adding or removing one record. This holds against whoever sees no more than sums"),
        ("local", "Each client has a budget of its own; stated is the largest, that of client-1."),
        ("whole clients", "adding or removing one client. This holds against whoever sees no more than sums"),
        ("trusted", "but not against the server, which sees each client's update"),
        ("open", "nobody: nothing was clipped"),
    ],
)
def test_the_statement_says_against_whom(name: str, said: str, tmp_path: Path) -> None:
    folder = released(name, tmp_path, 4, 4, 3)
    report, (page, card) = report_of(folder), pages(folder)
    assert said in page
    assert said in card
    private = name != "open"
    assert ("NOT PRIVATE" in page, "NOT PRIVATE" in card) == (not private, not private)
    assert ("differentially private" in card) == private
    assert name != "whole clients" or "user" not in card
    shares = report["federation"]["noise_by"] == "shares"
    assert ("Against one of these clients, which knows its own share, epsilon is" in page) == shares


def test_limits_are_those_of_the_privacy_model(tmp_path: Path) -> None:
    """Shares and keys where noise is spread, the server where it is trusted, budgets where clients have their own."""
    limits = {}
    for name in ("joint", "local", "trusted"):
        (tmp_path / name).mkdir()
        limits[name] = " ".join(report_of(released(name, tmp_path / name, 4))["not_protected"])
    for text, name in (
        ("counts on 4 clients of every sum", "joint"),
        ("keys of its own", "joint"),
        ("their budgets add up", "local"),
        ("Anything from the server", "trusted"),
        ("That a client takes part", "trusted"),
    ):
        assert [other for other in limits if text in limits[other]] == [name]


def test_writing_the_report_again_keeps_the_federation(tmp_path: Path) -> None:
    folder = released("joint", tmp_path, 4, 4, 4)
    before = {path.name: path.read_bytes() for path in folder.release.iterdir()}
    (folder.release / "report.html").unlink()
    rewrite_report(folder)
    assert {path.name: path.read_bytes() for path in folder.release.iterdir()} == before


def test_no_file_of_the_release_has_a_clock(tmp_path: Path) -> None:
    folder = released("joint", tmp_path, 4)
    midnights = {path.stat().st_mtime % 86400 for path in (folder.release, *folder.release.iterdir())}
    assert midnights == {0}
