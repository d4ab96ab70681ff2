"""The folder of a start that failed before its first charge is taken over; any other run in it is left as it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_cases import tree
from run_cases import PRIVACY, STEPS, STOPPED, Bench

from privlora.accounting import Ledger, read_ledger
from privlora.errors import RunError
from privlora.training.files import RunFolder, append_line
from privlora.training.takeover import make_room

pytestmark = pytest.mark.usefixtures("quick_reports")

OTHER = {**PRIVACY, "target_epsilon": None, "noise_multiplier": 2.0, "steps": 2}


def fail(*_: object, **__: object) -> None:
    raise RunError("the device is gone")


@pytest.fixture
def failed(bench: Bench, tmp_path: Path) -> RunFolder:
    """A run whose ledger is there, and whose training failed before its first step."""
    folder = RunFolder(tmp_path / "failed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlora.training.loop.build_step", fail)
        with pytest.raises(RunError, match="the device is gone"):
            bench.start(folder.root)
    assert read_ledger(folder.ledger).charges == 0
    return folder


def refused(folder: RunFolder, *words: str) -> None:
    """By what a new start does in the folder, which changes nothing there."""
    before = tree(folder.root)
    with pytest.raises(RunError, match="holds a run already") as error:
        make_room(folder)
    for word in words:
        assert word in str(error.value)
    assert tree(folder.root) == before


def test_a_start_that_charged_nothing_is_replaced_with_other_settings(
    bench: Bench, failed: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    first = read_ledger(failed.ledger)
    with caplog.at_level(logging.WARNING, "privlora"):
        bench.start(failed.root, privacy=OTHER)
    (told,) = [record.getMessage() for record in caplog.records]
    assert (
        told
        == f"{failed.root}: an earlier start failed there before anything was charged; this one takes its place"
    )
    second = read_ledger(failed.ledger)
    assert second.run_id != first.run_id
    assert (second.charges, second.plan.steps, second.closed) == (2, 2, True)


def test_nothing_is_said_and_nothing_removed_where_no_run_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "notes.txt").write_text("mine")
    make_room(RunFolder(tmp_path))
    assert not caplog.records
    assert tree(tmp_path) == {"release": None, "release/notes.txt": b"mine"}


def test_nothing_that_follows_from_the_first_start_is_left(failed: RunFolder) -> None:
    append_line(failed.evaluations, {"step": 0, "loss": 4.0})  # of the base model, on public records
    failed.choice.write_text("{}")
    (failed.private / ".config.resolved.yaml.privlora-tmp").write_text("half")
    make_room(failed)
    assert tree(failed.root) == {"private": None, "release": None}
    failed.create(protects=False)  # another promise takes another folder
    assert failed.release.name == "not-private"


def test_a_takeover_that_was_killed_is_gone_on_with(bench: Bench, failed: RunFolder) -> None:
    failed.settings.unlink()
    bench.start(failed.root, privacy=OTHER)
    assert read_ledger(failed.ledger).charges == 2


def test_a_ledger_whose_first_line_was_never_whole_is_no_run(failed: RunFolder) -> None:
    failed.ledger.write_bytes(failed.ledger.read_bytes()[:-1])
    make_room(failed)
    assert not failed.ledger.exists()


def test_a_start_at_which_a_process_still_works_is_left(failed: RunFolder) -> None:
    with Ledger.open(failed.ledger):
        refused(failed, "cannot be locked", "wait for the other process", "or give another folder")
    make_room(failed)


@pytest.mark.parametrize("charges", [1, STOPPED])
def test_a_run_that_was_charged_is_left(charges: int, bench: Bench, run: RunFolder) -> None:
    """Also where nothing but the ledger shows it, as after a crash between a charge and what follows it."""
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    run.ledger.write_bytes(b"".join(lines[: 1 + charges]))
    for path in (run.checkpoint, run.private_losses, run.evaluations):
        path.unlink()
    refused(run, "its ledger shows charges", f"privlora resume {run.root}")
    with pytest.raises(RunError, match="its ledger shows charges"):
        bench.start(run.root)


def test_a_charge_that_was_cut_short_counts_as_one(run: RunFolder) -> None:
    first, second, *_ = run.ledger.read_bytes().splitlines(keepends=True)
    for path in (run.checkpoint, run.private_losses, run.evaluations):
        path.unlink()
    run.ledger.write_bytes(first + second[:-1])
    refused(run, "its ledger shows charges")


def test_a_run_whose_ledger_is_gone_is_left(failed: RunFolder) -> None:
    failed.ledger.unlink()
    refused(failed, "no ledger that shows that nothing was released", "or remove that folder")


def write(name: str, content: str = "x") -> Callable[[RunFolder], None]:
    def put(folder: RunFolder) -> None:
        path = folder.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)

    return put


def link(folder: RunFolder) -> None:
    kept = folder.root.parent / "elsewhere.json"
    folder.identity.replace(kept)
    folder.identity.symlink_to(kept)


# Each by itself says that more happened here than the ledger shows, or that somebody keeps something here.
MORE = {
    "training_loss.jsonl": write("private/training_loss.jsonl", '{"step": 1, "units": 3, "loss": 1.0}\n'),
    "a torn line of losses": write("private/training_loss.jsonl", '{"st'),
    "evaluations.jsonl": write("release/evaluations.jsonl", '{"step": 2, "loss": 1.0}\n'),
    "a torn line of evaluations": write("release/evaluations.jsonl", '{"step": 0}\n{"step": 2'),
    "checkpoint.safetensors": write("private/checkpoint.safetensors"),
    "half of a checkpoint": write("private/.checkpoint.safetensors.privlora-tmp"),
    "texts": write("private/texts.safetensors"),
    "report": write("release/privacy_report.json", json.dumps({"statement": None})),
    "adapter": write("release/adapter_model.safetensors"),
    "an earlier ledger": write("earlier-ledger-1.jsonl"),
    "a client": write("clients/north"),
    "canaries": write("private/canaries.safetensors"),
    "somebody's own folder": write("notes/of-mine.txt"),
    "an audit": write("release/AUDIT-NOT-FOR-RELEASE.txt"),
    "a link": link,
}


@pytest.mark.parametrize("name", MORE)
def test_whatever_is_not_of_a_start_keeps_the_folder(name: str, failed: RunFolder) -> None:
    """Also under a ledger that is an older copy, and shows no charge."""
    MORE[name](failed)
    refused(failed, "its ledger shows no charge, but", "is not left by a start that failed")


@pytest.mark.parametrize(
    "name", ["checkpoint.safetensors", "half of a checkpoint", "texts", "report", "adapter"]
)
def test_a_run_without_settings_and_ledger_is_no_empty_folder(
    name: str, bench: Bench, tmp_path: Path
) -> None:
    """Its adapter would lie beside another run's ledger."""
    folder = RunFolder(tmp_path / "left")
    folder.create()
    MORE[name](folder)
    with pytest.raises(RunError, match=r"holds no ledger, and .*, which a run left"):
        bench.start(folder.root)
    assert not folder.settings.exists()
    assert not folder.identity.exists()


def test_a_link_in_the_place_of_the_ledger_is_no_empty_folder(failed: RunFolder) -> None:
    for path in (failed.settings, failed.ledger):
        path.unlink()
    failed.ledger.symlink_to(failed.root / "elsewhere.jsonl")
    with pytest.raises(RunError, match=r"holds no ledger, and .*ledger\.jsonl"):
        make_room(failed)


def test_a_ledger_that_a_disk_left_as_zeros_counts_as_charged(failed: RunFolder) -> None:
    failed.ledger.write_bytes(bytes(failed.ledger.stat().st_size))
    refused(failed, "its ledger shows charges")


def test_the_ledger_goes_last_and_nobody_can_go_on_before(
    failed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[Path] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        with pytest.raises(RunError, match="cannot be locked"):
            Ledger.open(failed.ledger)
        unlink(path, missing_ok=missing_ok)
        gone.append(path)

    monkeypatch.setattr(Path, "unlink", watched)
    make_room(failed)
    assert gone[-1] == failed.ledger
    assert failed.settings in gone[:-1]


def test_a_run_under_the_first_copy_of_its_ledger_is_left(run: RunFolder) -> None:
    run.ledger.write_bytes(run.ledger.read_bytes().splitlines(keepends=True)[0])
    assert read_ledger(run.ledger).charges == 0
    refused(run, "its ledger shows no charge, but")


def test_a_start_that_failed_may_also_be_gone_on_with(bench: Bench, failed: RunFolder) -> None:
    bench.resume(failed.root)
    assert read_ledger(failed.ledger).charges == STEPS
