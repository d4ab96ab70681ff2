"""A report of every space of the table, and that it needs no code of the space to be written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from reporting_cases import Run, base_model, leaf_paths, make_run
from test_facts import ALLOWED, SOMETIMES
from tiny_models import loaded_by_peft

from privlora.methods import METHODS, SPACES
from privlora.reporting import rewrite_report
from privlora.reporting.wording import mechanism

BY_SPACE = {row.space: row.name for row in reversed(METHODS.values()) if row.private}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """One run of each space, averaged where its iterates are."""

    @cache
    def made(space: str) -> Run:
        row, folder = METHODS[BY_SPACE[space]], tmp_path_factory.mktemp("spaces") / "run"
        averaging = 0.0 if row.coordinates.dense else 0.5
        return make_run(folder, row.name, privacy={"noise_multiplier": 1.0}, averaging=averaging)

    return made


@pytest.mark.parametrize("space", SPACES)
def test_facts_words_and_page(
    space: str, run_of: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(space)
    report = json.loads(run.folder.report.read_text())
    assert set(leaf_paths(report)) <= ALLOWED | SOMETIMES | {
        "statement.projections[][]",
        "statement.projections[]",
    }
    coordinates = run.parts.coordinates
    assert report["method"]["coordinates"] == space
    assert report["method"]["described"] == coordinates.described
    assert report["noise"]["law"] == coordinates.noise_law
    for module in report["noise"]["modules"]:
        if METHODS[BY_SPACE[space]].public_texts or coordinates.forward_only:
            assert module["closed_form"] is None
        else:
            assert module["measured"] == pytest.approx(module["closed_form"], rel=0.25)
    pages = {name: (run.folder.release / name).read_text() for name in ("report.html", "README.md")}
    shown = "M2: whole per-record gradients" if report["statement"]["projections"] else coordinates.described
    assert all(shown in page for page in pages.values())
    assert coordinates.noise_law in pages["report.html"]
    taken = "no gradient is taken" in mechanism(report)
    assert taken == coordinates.forward_only != ("gradients" in mechanism(report))
    monkeypatch.setattr("privlora.methods.SPACES", {})
    monkeypatch.setattr("privlora.methods.METHODS", {})
    rewrite_report(run.folder)
    assert pages == {name: (run.folder.release / name).read_text() for name in pages}


def test_each_space_has_its_own_words() -> None:
    words = [space.coordinates.described for space in SPACES.values()]
    assert len(set(words)) == len(SPACES)


@pytest.mark.parametrize("space", SPACES)
def test_what_is_evaluated_is_what_is_exported(space: str, run_of: Callable[[str], Run]) -> None:
    row, run = METHODS[BY_SPACE[space]], run_of(space)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        last = run.parts.adapter.model(ids).logits
        run.parts.install_result()
        ours = run.parts.adapter.model(ids).logits
        run.parts.coordinates.install()
        again = run.parts.adapter.model(ids).logits
        theirs = loaded_by_peft(base_model(), run.folder.release)(ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert torch.equal(again, last)
    assert torch.equal(ours, last) is row.coordinates.dense  # else the average is another adapter
