"""A report of every space of the table, and that it needs no code of the space to be written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from reporting_cases import Run, base_model, make_run
from tiny_models import loaded_by_peft

from privlora.config import methods
from privlora.config.methods import space_in_words
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
    coordinates = run.parts.coordinates
    described, law = space_in_words(space, report["method"])
    assert report["method"]["coordinates"] == space
    assert report["method"]["described"] == described
    assert report["noise"]["law"] == law
    for module in report["noise"]["modules"]:
        if METHODS[BY_SPACE[space]].public_texts or coordinates.forward_only:
            assert module["closed_form"] is None
        else:
            assert module["measured"] == pytest.approx(module["closed_form"], rel=0.25)
    pages = {name: (run.folder.release / name).read_text() for name in ("report.html", "README.md")}
    shown = "M2: whole per-record gradients" if report["statement"]["projections"] else described
    assert all(shown in page for page in pages.values())
    assert law in pages["report.html"]
    taken = "no gradient is taken" in mechanism(report)
    assert taken == coordinates.forward_only != ("gradients" in mechanism(report))
    monkeypatch.setattr("privlora.methods.SPACES", {})
    monkeypatch.setattr("privlora.methods.METHODS", {})
    rewrite_report(run.folder)
    assert pages == {name: (run.folder.release / name).read_text() for name in pages}


def test_each_space_has_its_own_words() -> None:
    assert SPACES.keys() == methods.SPACES.keys()
    assert len({space.described for space in methods.SPACES.values()}) == len(SPACES)
    for name, space in SPACES.items():
        assert methods.SPACES[name].forward_only == space.coordinates.forward_only


def test_a_weight_and_a_metric_are_said() -> None:
    plain, weighed, metric = (
        space_in_words("tangent", {"right_weight": w, "metric_power": p})
        for w, p in ((1.0, 0.0), (0.25, 0.0), (0.25, 0.5))
    )
    assert "isometric" in plain[0]
    assert weighed[0].endswith("with what turns V weighed by 0.25")
    assert "weighed by its singular values" in metric[0]
    assert all("w = 0.25" in law for _, law in (weighed, metric))
    assert "root mean square" in metric[1]


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
