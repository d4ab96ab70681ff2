"""Checkpoints are safetensors of one run, written whole; with its other files they prove what a ledger lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_cases import PUBLIC, STEPS, STOPPED, Bench, releases, side_log
from safetensors import SafetensorError

from privlora.accounting import Ledger, compose_ledgers, read_ledger
from privlora.errors import PrivacyError, RunError
from privlora.training.checkpoint import Mark, load_checkpoint, read_mark, save_checkpoint
from privlora.training.files import RunFolder, append_line

PARTS = {
    "coordinates": {"0.U": torch.randn(2, 3), "0.S": torch.rand(2, dtype=torch.float64)},
    "optimizer": {"count": torch.tensor(3)},
}

pytestmark = pytest.mark.usefixtures("quick_reports")


def test_it_gives_back_the_bits(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, PARTS, Mark(7, "run", None))
    step, found = load_checkpoint(path, run_id="run")
    assert step == 7
    assert found.keys() == PARTS.keys()
    for part, tensors in PARTS.items():
        assert found[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[part][name].dtype == tensor.dtype
            assert torch.equal(found[part][name], tensor)


def test_parts_may_share_tensors(tmp_path: Path) -> None:
    shared = torch.randn(2, 3)
    parts = {"a": {"x": shared}, "b": {"x": shared, "transposed": shared.T}}
    save_checkpoint(tmp_path / "c", parts, Mark(1, "run", None))
    _, found = load_checkpoint(tmp_path / "c", run_id="run")
    assert torch.equal(found["b"]["transposed"], shared.T)


@pytest.mark.parametrize("other", ["one", "", None])
def test_another_runs_checkpoint_is_refused(other: str | None, tmp_path: Path) -> None:
    """Also one that does not say whose it is."""
    save_checkpoint(tmp_path / "c", PARTS, Mark(1, other, None))
    with pytest.raises(RunError, match="belongs to another run"):
        load_checkpoint(tmp_path / "c", run_id="two")


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "pickle", "missing"])
def test_a_damaged_one_is_one_clear_error(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, PARTS, Mark(1, "run", None))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "pickle":
        torch.save({"step": 1}, path)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else bytes(range(256)))
    with pytest.raises(RunError, match="is damaged"):
        load_checkpoint(path, run_id="run")
    if damage != "cut":  # the mark is at the front
        with pytest.raises(RunError, match="is damaged"):
            read_mark(path)


def test_it_is_written_from_where_the_tensors_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of large models have hundreds of megabytes: no second copy in memory."""
    seen: dict[str, int] = {}

    def save(tensors: dict[str, torch.Tensor], path: Path, metadata: object = None) -> None:
        seen.update({name: t.data_ptr() for name, t in tensors.items()})
        path.write_bytes(b"")

    monkeypatch.setattr("privlora.training.checkpoint.save_file", save)
    save_checkpoint(tmp_path / "c", PARTS, Mark(1, "run", None))
    assert seen == {f"{p}/{name}": t.data_ptr() for p, named in PARTS.items() for name, t in named.items()}


def test_a_disk_without_room_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, PARTS, Mark(1, "run", None))

    def fail(tensors: object, half: Path, metadata: object = None) -> None:
        half.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("privlora.training.checkpoint.save_file", fail)
    with pytest.raises(RunError, match="No space left"):
        save_checkpoint(path, PARTS, Mark(2, "run", None))
    assert [found.name for found in tmp_path.iterdir()] == ["c"]
    assert read_mark(path).step == 1


def cut(folder: RunFolder, charges: int) -> bytes:
    """The ledger as it was after so many charges, as from a backup."""
    lines = folder.ledger.read_bytes().splitlines(keepends=True)
    folder.ledger.write_bytes(b"".join(lines[: 1 + charges]))
    assert read_ledger(folder.ledger).charges == charges
    return folder.ledger.read_bytes()


def report_says(folder: RunFolder, charges: int) -> None:
    folder.report.write_text(json.dumps({"statement": {"steps_charged": charges}}))


def refused(bench: Bench, folder: RunFolder, log: Path, match: str) -> None:
    before = folder.ledger.read_bytes() if folder.ledger.exists() else None
    with side_log(log), pytest.raises(PrivacyError, match=match):
        bench.resume(folder.root, PUBLIC)
    assert releases(log) == []
    assert (folder.ledger.read_bytes() if folder.ledger.exists() else None) == before


def test_an_older_ledger_is_refused(bench: Bench, run: RunFolder, tmp_path: Path) -> None:
    cut(run, 4)
    refused(
        bench, run, tmp_path / "log", r"shows 4 releases, but .*checkpoint.safetensors was written after 8"
    )


# Each file that is left alone proves the eight releases by itself.
FILES: dict[str, Callable[[RunFolder], None]] = {
    "checkpoint.safetensors": lambda folder: None,
    "training_loss.jsonl": lambda folder: None,
    "evaluations.jsonl": lambda folder: None,
    "privacy_report.json": lambda folder: report_says(folder, STOPPED),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("charges", [0, STOPPED - 1])
def test_any_file_of_the_run_is_evidence(
    name: str, charges: int, bench: Bench, run: RunFolder, tmp_path: Path
) -> None:
    FILES[name](run)
    for path in (run.checkpoint, run.private_losses, run.evaluations):
        if path.name != name:
            path.unlink()
    cut(run, charges)
    refused(bench, run, tmp_path / "log", name)


def test_a_ledger_that_is_gone_is_refused(bench: Bench, run: RunFolder, tmp_path: Path) -> None:
    """A run without a ledger is otherwise taken for one that has released nothing."""
    run.checkpoint.unlink()
    run.ledger.unlink()
    refused(bench, run, tmp_path / "log", "shows 0 releases, but .*training_loss.jsonl")


def test_every_line_of_losses_is_a_release(bench: Bench, run: RunFolder, tmp_path: Path) -> None:
    """Where an earlier version went on under an older ledger, the steps are numbered twice."""
    append_line(run.private_losses, {"step": 5, "units": 3, "loss": 1.0})
    refused(bench, run, tmp_path / "log", r"shows 8 releases, but .*training_loss.jsonl was written after 9")


@pytest.mark.parametrize("line", ['{"x": 1}', "null", '{"step": "9"}', '{"step": true}', "[9]", "9"])
def test_damaged_lines_are_one_error(line: str, bench: Bench, run: RunFolder, tmp_path: Path) -> None:
    for path in (run.private_losses, run.evaluations):
        whole = path.read_text()
        path.write_text(f"{whole}{line}\n")
        with side_log(tmp_path / "log"), pytest.raises(RunError, match=f"{path.name}' is damaged"):
            bench.resume(run.root, PUBLIC)
        path.write_text(whole)
    assert releases(tmp_path / "log") == []
    assert read_ledger(run.ledger).charges == STOPPED


def test_a_closed_ledger_of_a_shorter_past_is_refused(bench: Bench, run: RunFolder, tmp_path: Path) -> None:
    cut(run, 4)
    Ledger.open(run.ledger).finish()
    refused(bench, run, tmp_path / "log", "shows 4 releases")


def test_files_of_copies_that_went_on_apart_are_not_mixed(
    bench: Bench, run: RunFolder, tmp_path: Path
) -> None:
    other = RunFolder(Path(shutil.copytree(run.root, tmp_path / "other")))
    for folder in (run, other):
        bench.resume(folder.root, PUBLIC)
    assert compose_ledgers([run.ledger, other.ledger]).runs[0].releases == STEPS + (STEPS - STOPPED)
    shutil.copy(other.ledger, run.ledger)
    refused(bench, run, tmp_path / "log", "copies of the run that went on apart")


def test_losses_tell_copies_apart_where_there_is_no_checkpoint(
    bench: Bench, run: RunFolder, tmp_path: Path
) -> None:
    other = RunFolder(Path(shutil.copytree(run.root, tmp_path / "other")))
    for folder in (run, other):
        bench.resume(folder.root, PUBLIC)
    shutil.copy(other.ledger, run.ledger)
    run.checkpoint.unlink()
    refused(
        bench, run, tmp_path / "log", "training_loss.jsonl come from copies of the run that went on apart"
    )


def test_a_run_with_all_its_files_goes_on(bench: Bench, run: RunFolder, tmp_path: Path) -> None:
    hashes = read_ledger(run.ledger).charge_hashes
    mark = read_mark(run.checkpoint)
    assert (mark.step, mark.charge) == (STOPPED, hashes[-1])
    report_says(run, STOPPED)
    run.private_losses.write_text("")  # nothing that is missing is held against a run
    with side_log(tmp_path / "log"):
        bench.resume(run.root, PUBLIC)
    assert releases(tmp_path / "log") == list(range(STOPPED + 1, STEPS + 1))


def test_an_unreadable_report_proves_nothing(bench: Bench, run: RunFolder, tmp_path: Path) -> None:
    run.report.write_text("half a rep")
    bench.resume(run.root, PUBLIC)
    assert read_ledger(run.ledger).closed
