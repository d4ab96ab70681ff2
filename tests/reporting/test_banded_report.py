"""What is published of a run with correlated noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from annex_cases import failed
from banded_cases import BANDED, BANDS, FLAT, kept_noise, seen, watched
from push_cases import sealed_again
from run_cases import Bench, StopAt

from privlora.accounting import read_ledger
from privlora.optimizers import Optimizer
from privlora.reporting.annex import size_of
from privlora.reporting.filing import file_annex
from privlora.reporting.limits import risks_of
from privlora.reporting.statement import noise_facts
from privlora.reporting.tables import privacy_table, sentence
from privlora.reporting.verifying import verify
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def test_the_report_says_what_was_sampled_and_how_large_noise_is(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stds: list[float] = []
    step = Optimizer.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Optimizer, "step", lambda self, r, rate: (stds.append(r.noise_std), step(self, r, rate))[1]
        )
        bench.start(folder, method=FLAT, privacy=BANDED)
    report = json.loads((folder / "release/privacy_report.json").read_text())
    noise = report["noise"]
    assert noise["noise_std"] == pytest.approx(max(stds))
    assert noise["bands"]["noise_std_of_first_step"] == pytest.approx(stds[0])
    assert (
        noise["bands"]["coefficients"]
        == json.loads((folder / "private/cycles.json").read_text())["coefficients"]
    )
    words = sentence(report)
    assert "which cost what 4 noisy steps of the" in words
    assert "dealt to one of 3 classes, once and by itself" in words
    assert "rate 0.6 of a class" in words
    assert dict(privacy_table(report))["Sampling rate q"] == "0.2"  # of all; a class is a third of them


@pytest.mark.usefixtures("drawn")
def test_bands_are_those_of_the_ledger(bench: Bench, tmp_path: Path) -> None:
    """Else the page would name noise that is a thousand times what was added."""
    bench.start(tmp_path / "run", method=FLAT, privacy=BANDED)
    folder = RunFolder(tmp_path / "run")
    noise = json.loads(folder.report.read_text())["noise"]
    assert not failed(verify(folder.root))
    plan = read_ledger(folder.ledger).plan
    for bands in ([0.05, 0.0, 0.9987], [1.0], []):
        left = {name: value for name, value in noise.items() if name != "bands"}
        sealed_again(folder, noise={**left, **noise_facts(plan, adaptive=False, coefficients=bands)})
        assert "epsilon" in failed(verify(folder.root))


def test_nothing_that_is_kept_is_released(bench: Bench, tmp_path: Path) -> None:
    """Neither the key of classes nor any noise, while the run goes on and when it is over."""
    folder = tmp_path / "run"
    with watched(tmp_path / "seen"), pytest.raises(Interrupted):
        bench.start(folder, method=FLAT, privacy=BANDED, observer=StopAt(5))
    assert len(kept_noise(folder)) > BANDS - 1
    assert (folder / "private/cycles.json").stat().st_mode & 0o77 == 0
    bench.resume(folder)
    assert kept_noise(folder) == []
    key = json.loads((folder / "private/cycles.json").read_text())["key"]
    noise = [each.noise for each in seen(tmp_path / "seen").values()]
    secrets = [key.encode(), *(t[:1].numpy().tobytes() for t in noise)]
    secrets += [repr(float(t[0]))[:12].encode() for t in noise]
    for path in (folder / "release").rglob("*"):
        assert not [secret for secret in secrets if secret in path.read_bytes()], path


def test_whoever_has_the_release_verifies_it(bench: Bench, tmp_path: Path) -> None:
    """Its epsilon, by cycles, from the ledger again; and what is filed of it says how many units there are."""
    folder = RunFolder(tmp_path / "run")
    bench.start(folder.root, method=FLAT, privacy=BANDED)
    file_annex(folder)
    assert verify(folder.release).passed
    report = json.loads(folder.report.read_text())
    assert size_of(report)["units"] == 30
    edges = {row["edge"] for row in risks_of(report)}
    assert sum("privacy.bands" in edge for edge in edges) == 2
    # Report, page and card name what the annex names.
    risks = [row["risk"] for row in risks_of(report) if "privacy.bands" in row["edge"]]
    for risk in risks:
        assert any(risk in text for text in report["not_protected"])
        for page in ("README.md", "report.html"):
            assert risk in (folder.release / page).read_text()
