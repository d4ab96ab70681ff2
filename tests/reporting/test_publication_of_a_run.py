from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from reporting_cases import STEPS, Run, base_model, make_run
from tiny_models import loaded_by_peft

from privlora.accounting import Ledger
from privlora.errors import PrivacyError, RunError
from privlora.reporting import publish, rewrite_report
from privlora.training.files import RunFolder, append_line

pytestmark = pytest.mark.usefixtures("drawn")

GIVEN = {"ledger.jsonl", "evaluations.jsonl"}
WRITTEN = {
    "adapter_config.json",
    "adapter_model.safetensors",
    "privacy_report.json",
    "README.md",
    "report.html",
}
PAGES = ("privacy_report.json", "README.md", "report.html")


@pytest.fixture
def copy(private_run: Run, tmp_path: Path) -> RunFolder:
    shutil.copytree(private_run.folder.root, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_release_holds_exactly_the_promised_files(private_run: Run, public_run: Run) -> None:
    assert {p.name for p in private_run.folder.release.iterdir()} == GIVEN | WRITTEN
    assert {p.name for p in public_run.folder.release.iterdir()} == (GIVEN | WRITTEN) - {"ledger.jsonl"}
    assert {p.name for p in private_run.folder.root.iterdir()} == {"release", "private"}
    assert {p.name for p in public_run.folder.root.iterdir()} == {"not-private", "private"}


@pytest.mark.parametrize(
    ("method", "averaging", "use_rslora"),
    [("prism", 0.0, False), ("prism", 0.5, True), ("dp-adamw", 0.0, True)],
)
def test_peft_gives_our_logits(tmp_path: Path, method: str, averaging: float, use_rslora: bool) -> None:
    privacy = {"noise_multiplier": 1.0, "insecure_noise_seed": 5}
    run = make_run(tmp_path / "run", method, privacy=privacy, averaging=averaging, use_rslora=use_rslora)
    ids = torch.arange(12).reshape(2, 6)
    adapter = run.parts.adapter
    if run.parts.average is not None:
        for group, (a, b) in zip(adapter.groups, run.parts.average.factors(), strict=True):
            adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)
    with torch.no_grad():
        ours = adapter.model(ids).logits
        base = base_model()
        plain = base(ids).logits
        theirs = loaded_by_peft(base, run.folder.release)(ids).logits
    assert (ours - plain).abs().max() > 1e-2  # the update is not zero
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_writing_again_replaces_everything(copy: RunFolder, private_run: Run) -> None:
    for name in WRITTEN:
        (copy.release / name).write_text("old")
    publish(copy, private_run.parts, private_run.summary)
    for name in WRITTEN:
        assert (copy.release / name).read_bytes() == (private_run.folder.release / name).read_bytes()
    assert json.loads((copy.release / "privacy_report.json").read_text())["statement"]["epsilon"] > 0


def test_an_unwritable_folder_is_one_clear_error(copy: RunFolder, private_run: Run) -> None:
    shutil.rmtree(copy.release)
    with pytest.raises(RunError, match="cannot write"):
        publish(copy, private_run.parts, private_run.summary)


def test_rewriting_needs_the_report_alone_and_gives_the_same_bytes(copy: RunFolder) -> None:
    before = {name: (copy.release / name).read_bytes() for name in PAGES}
    for name in (WRITTEN | {"evaluations.jsonl"}) - {"privacy_report.json"}:
        (copy.release / name).unlink()
    assert rewrite_report(copy) == copy.release / "report.html"
    assert {name: (copy.release / name).read_bytes() for name in PAGES} == before


@pytest.mark.parametrize("kind", ["public_run", "insecure_run"])
def test_rewriting_keeps_a_run_not_private(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(kind).folder.root, root)
    before = {name: (root / "not-private" / name).read_bytes() for name in PAGES}
    rewrite_report(RunFolder(root))
    assert {name: (root / "not-private" / name).read_bytes() for name in PAGES} == before


def test_the_ledger_decides_after_a_crash(copy: RunFolder) -> None:
    old = json.loads((copy.release / "privacy_report.json").read_text())
    with Ledger.open(copy.ledger) as ledger:
        ledger.charge(ledger.plan.event)
        truth = ledger.epsilon()
    append_line(copy.evaluations, {**old["evaluation"][-1], "step": STEPS + 1})
    rewrite_report(copy)
    new = json.loads((copy.release / "privacy_report.json").read_text())
    assert new["statement"]["epsilon"] == truth > old["statement"]["epsilon"]
    assert new["statement"]["steps_charged"] == STEPS + 1
    assert new["epsilon_over_steps"][-1] == {"step": STEPS + 1, "epsilon": truth}
    assert [row["step"] for row in new["evaluation"]] == [0, STEPS, STEPS + 1]
    assert f"{STEPS + 1} charged" in (copy.release / "README.md").read_text()
    assert f"{STEPS + 1} charged" in (copy.release / "report.html").read_text()


def test_a_ledger_that_lost_a_release_is_refused(copy: RunFolder) -> None:
    lines = copy.ledger.read_text().splitlines(keepends=True)
    copy.ledger.write_text("".join(lines[:-1]))
    with pytest.raises(PrivacyError, match="cut or replaced"):
        rewrite_report(copy)


def test_foreign_and_missing_files_are_refused(copy: RunFolder, insecure_run: Run) -> None:
    shutil.copy(insecure_run.folder.ledger, copy.ledger)
    with pytest.raises(RunError, match="another run"):
        rewrite_report(copy)
    path = copy.release / "privacy_report.json"
    path.write_text('{"schema_version": 99}')
    with pytest.raises(RunError, match="schema version 3"):
        rewrite_report(copy)
    path.write_text("{")
    with pytest.raises(RunError, match="no readable report"):
        rewrite_report(copy)
    path.unlink()
    with pytest.raises(RunError, match="privlora resume"):
        rewrite_report(copy)
