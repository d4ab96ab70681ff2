"""What is pushed is what the run wrote: the promise is the ledger's, and each file the one that the report names."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from push_cases import BASE, Hub, appended, refused, sealed_again
from safetensors.torch import load_file, save_file

from privlora.accounting import Ledger, read_ledger
from privlora.adapters.peft_files import CONFIG_NAME, WEIGHTS_NAME
from privlora.api import resume_run
from privlora.demo import private_records
from privlora.errors import PrivacyError, PrivloraError, RunError
from privlora.reporting import publication, pushing, rewrite_report, verifying
from privlora.reporting.publication import check_statement, stated
from privlora.reporting.pushing import checked, push
from privlora.reporting.seals import PAGES, sealed
from privlora.reporting.statement import evaluation_rows
from privlora.training.files import RunFolder


def _told(run: RunFolder, path: str, value: Any) -> None:
    """Let the report say ``value`` at ``path``, keys and places in lists with dots between them."""
    report = json.loads(run.report.read_text())
    *way, last = (int(part) if part.isdecimal() else part for part in path.split("."))
    inner = report
    for part in way:
        inner = inner[part]
    inner[last] = value
    run.report.write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0.01),
        ("epsilon", "0.01"),
        ("epsilon", None),
        ("epsilon_replace_one", 0.01),
        ("delta", 1e-5),
        ("unit", "user"),
        ("records_per_user", 3),
        ("adjacency", "replace-one"),
        ("noise_multiplier", 2.0),
        ("noise_multiplier", 1.0 + 1e-9),
        ("sampling.rate", 0.05),
        ("clip_norm", 0.5),
        ("expected_batch_size", 4),
        ("expected_batch_size", 8.0),
        ("steps_planned", 4),
        ("steps_charged", 2),
        ("dataset", "others"),
        ("created", "2020-01-01"),
        ("accountant", "gdp"),
        ("note", 1),
        ("projections", [[1, 2]]),
    ],
)
def test_the_statement_is_that_of_the_ledger(field: str, value: Any, run: RunFolder) -> None:
    _told(run, f"statement.{field}", value)
    hub = Hub()
    says = rf"says (statement\.{field} = .*|one thing of statement\.{field}), and by the ledger"
    with pytest.raises(PrivacyError, match=says):
        push(run, "me/notes", base_model=BASE, api=hub)
    assert not hub.made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("means.right_guesses", 0.5),
        ("epsilon_over_steps.0.epsilon", 0.0),
        ("epsilon_over_steps.0.step", 2),
        ("epsilon_over_steps", []),
        ("stamp.reason", "a patient"),
        ("statement", None),
    ],
)
def test_all_that_follows_from_the_ledger_is_checked(path: str, value: Any, run: RunFolder) -> None:
    _told(run, path, value)
    with pytest.raises(PrivloraError, match=r"by the ledger it is|another run than its report"):
        push(run, "me/notes", base_model=BASE, dry_run=True)


def test_another_machines_rounding_is_no_difference(run: RunFolder) -> None:
    epsilon = json.loads(run.report.read_text())["statement"]["epsilon"]
    _told(run, "statement.epsilon", epsilon * (1 + 1e-9))
    report, summary = json.loads(run.report.read_text()), read_ledger(run.ledger)
    check_statement(report, summary)
    _told(run, "statement.epsilon", epsilon * (1 - 1e-5))
    with pytest.raises(PrivacyError, match=r"statement.epsilon"):
        check_statement(json.loads(run.report.read_text()), summary)


def test_the_ledger_is_that_of_the_report(run: RunFolder, tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.jsonl", read_ledger(run.ledger).plan) as other:
        for _ in range(3):
            other.charge(other.plan.event)
        other.finish()
    shutil.copyfile(tmp_path / "ledger.jsonl", run.ledger)
    with pytest.raises(RunError, match="belongs to another run than its report"):
        push(run, "me/notes", base_model=BASE, api=Hub())


def _metadata(release: Path) -> None:
    save_file(load_file(release / WEIGHTS_NAME), release / WEIGHTS_NAME, metadata={"note": "a patient"})


def _another_tensor(release: Path) -> None:
    more = {**load_file(release / WEIGHTS_NAME), "more": torch.ones(2)}
    save_file(more, release / WEIGHTS_NAME, metadata={"format": "pt"})


def _swapped(release: Path) -> None:
    moved = {name: tensor + 0.5 for name, tensor in load_file(release / WEIGHTS_NAME).items()}
    save_file(moved, release / WEIGHTS_NAME, metadata={"format": "pt"})


def _another_key(release: Path) -> None:
    config = json.loads((release / CONFIG_NAME).read_text())
    (release / CONFIG_NAME).write_text(json.dumps({**config, "note": "a patient"}))


def _a_key_twice(name: str) -> Callable[[Path], None]:
    def write(release: Path) -> None:
        content = (release / name).read_text()
        (release / name).write_text('{"step": 1, ' + content.lstrip()[1:])

    return write


def _another_key_of_the_report(release: Path) -> None:
    report = json.loads((release / "privacy_report.json").read_text())
    (release / "privacy_report.json").write_text(json.dumps({**report, "note": "a patient"}))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (WEIGHTS_NAME, _metadata),
        (WEIGHTS_NAME, _another_tensor),
        (WEIGHTS_NAME, _swapped),
        (WEIGHTS_NAME, appended(WEIGHTS_NAME, "a patient")),
        (CONFIG_NAME, _another_key),
        (CONFIG_NAME, appended(CONFIG_NAME)),
        (CONFIG_NAME, _a_key_twice(CONFIG_NAME)),
        ("evaluations.jsonl", _a_key_twice("evaluations.jsonl")),
        ("evaluations.jsonl", appended("evaluations.jsonl")),
        ("metrics.jsonl", _a_key_twice("metrics.jsonl")),
        ("metrics.jsonl", appended("metrics.jsonl", "\n")),
        ("ledger.jsonl", appended("ledger.jsonl", "a patient")),
        ("privacy_report.json", _another_key_of_the_report),
    ],
)
def test_no_byte_of_a_file_is_altered(name: str, harm: Callable[[Path], None], run: RunFolder) -> None:
    harm(run.release)
    hub = Hub()
    with pytest.raises(PrivacyError, match=f"{name} in .* is not as the run wrote it"):
        push(run, "me/notes", base_model=BASE, api=hub)
    assert not hub.made


def test_pages_are_not_made_of_an_altered_report(run: RunFolder) -> None:
    """Whose own hash stayed as it was."""
    _another_key_of_the_report(run.release)
    with pytest.raises(PrivacyError, match=r"privacy_report.json in .* is not as the run wrote it"):
        rewrite_report(run)


@pytest.mark.parametrize("private", [True, False])
def test_hashes_that_were_written_anew_are_not_the_runs(private: bool, run: RunFolder) -> None:
    """Where private/ is at hand; a release that was taken elsewhere says for itself what it says."""
    _swapped(run.release)
    kept = run.private.rename(run.root / "kept")
    sealed_again(run)
    if private:
        kept.rename(run.private)
        refused(run)
        for harm in (run.seal.write_bytes, lambda _: run.seal.unlink(), lambda _: run.settings.unlink()):
            harm(b"")
            refused(run)
    else:
        assert push(run, "me/notes", base_model=BASE, dry_run=True).files


def test_a_report_that_names_no_hashes_is_not_the_runs(run: RunFolder) -> None:
    report = json.loads(run.report.read_text())
    del report["files"], report["sha256"]
    run.report.write_text(json.dumps(report))
    for change in (lambda: rewrite_report(run), lambda: push(run, "me/notes", base_model=BASE, dry_run=True)):
        with pytest.raises(PrivacyError, match=r"is not as the run wrote it.*`privlora resume"):
            change()
    resume_run(run.root, records=private_records(40, seed=1), evaluation=private_records(4, seed=2))
    assert push(run, "me/notes", base_model=BASE, dry_run=True).files


def test_what_is_uploaded_names_its_own_hashes(run: RunFolder) -> None:
    hub = Hub()
    (run.release / "metrics.jsonl").unlink()  # which nobody has to publish
    push(run, "me/notes", base_model=BASE, api=hub)
    report = json.loads(hub.files["privacy_report.json"])
    assert report == sealed(report)
    names = set(hub.files) - set(PAGES)
    assert report["files"] == {name: hashlib.sha256(hub.files[name]).hexdigest() for name in names}
    assert json.loads(run.report.read_text())["files"].keys() == names | {"metrics.jsonl"}


def test_the_seal_is_for_its_owners_eyes(run: RunFolder) -> None:
    rewrite_report(run)
    assert stat.S_IMODE(run.seal.stat().st_mode) == 0o600
    assert run.seal.read_text() == json.loads(run.report.read_text())["sha256"] + "\n"


@pytest.mark.parametrize("after", [0, 1])
def test_a_report_that_was_being_written_when_the_process_ended(
    after: int, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the report got its name, and after: the run wrote either of them."""
    write, calls = publication.write_atomically, list[Path]()

    def ends(path: Path, *content: Any, **options: Any) -> None:
        if len(calls) > after:
            raise KeyboardInterrupt
        calls.append(path)
        write(path, *content, **options)

    monkeypatch.setattr(publication, "write_atomically", ends)
    monkeypatch.setattr(publication, "evaluation_rows", lambda rows: evaluation_rows(rows[:1]))
    with pytest.raises(KeyboardInterrupt):
        rewrite_report(run)
    assert calls == [run.seal, run.report][: after + 1]
    monkeypatch.undo()
    rewrite_report(run)
    assert push(run, "me/notes", base_model=BASE, dry_run=True).files
    assert run.seal.read_text() == json.loads(run.report.read_text())["sha256"] + "\n"


@pytest.mark.parametrize("harm", [_another_key_of_the_report, _a_key_twice("evaluations.jsonl")])
def test_what_was_altered_is_not_sealed_by_writing_the_report_again(
    harm: Callable[[Path], None], run: RunFolder
) -> None:
    harm(run.release)
    with pytest.raises(PrivacyError, match="is not as the run wrote it"):
        rewrite_report(run)


def test_weights_are_not_sealed_by_writing_the_report_again(run: RunFolder) -> None:
    _swapped(run.release)
    rewrite_report(run)
    refused(run, "adapter_model.safetensors")


def test_a_promise_of_another_accountant_is_made_anew(run: RunFolder) -> None:
    report = json.loads(run.report.read_text())
    sealed_again(run, statement={**report["statement"], "epsilon": 0.5})
    rewrite_report(run)
    assert json.loads(run.report.read_text())["statement"] == report["statement"]
    assert push(run, "me/notes", base_model=BASE, dry_run=True).files


def test_what_changes_while_it_is_copied_is_not_uploaded(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked at is what goes up, however files change places meanwhile."""
    copy, secret = pushing.copy_plain, run.private / "training_loss.jsonl"

    def linked(source: Path, target: Path, most: int) -> None:
        if source.name == "metrics.jsonl":
            source.unlink()
            source.symlink_to(secret.absolute())
        copy(source, target, most)

    monkeypatch.setattr(pushing, "copy_plain", linked)
    hub = Hub()
    with pytest.raises(PrivacyError, match=r"'metrics.jsonl' in .* is no file that can be copied"):
        push(run, "me/notes", base_model=BASE, api=hub)
    assert not hub.made


def test_what_is_looked_at_is_the_copy(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = pushing.copy_plain

    def meanwhile(source: Path, target: Path, most: int) -> None:
        whole = source.read_bytes()
        if source.name == WEIGHTS_NAME:
            _swapped(run.release)
        copy(source, target, most)
        source.write_bytes(whole)

    monkeypatch.setattr(pushing, "copy_plain", meanwhile)
    hub = Hub()
    with pytest.raises(PrivacyError, match=f"{WEIGHTS_NAME} in .* is not as the run wrote it"):
        push(run, "me/notes", base_model=BASE, api=hub)
    assert not hub.made


def test_what_changes_after_it_was_copied_stays(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, refuse = (run.release / WEIGHTS_NAME).read_bytes(), pushing.refuse_altered

    def later(*arguments: Any) -> None:
        refuse(*arguments)
        _swapped(run.release)
        (run.release / CONFIG_NAME).write_text("a patient")

    monkeypatch.setattr(pushing, "refuse_altered", later)
    hub = Hub()
    push(run, "me/notes", base_model=BASE, api=hub)
    assert hub.files[WEIGHTS_NAME] == weights
    assert b"a patient" not in hub.files[CONFIG_NAME]


def test_copies_are_for_their_owners_eyes(run: RunFolder) -> None:
    with checked(run) as found:
        assert found.files == tuple(sorted(path.name for path in found.place.iterdir()))
        assert stat.S_IMODE(found.place.parent.stat().st_mode) == 0o700
        modes = {stat.S_IMODE((found.place / name).stat().st_mode) for name in (WEIGHTS_NAME, CONFIG_NAME)}
        assert modes == {0o600}
    assert not found.place.exists()


def test_a_report_that_says_federation_is_checked_like_any_other(run: RunFolder) -> None:
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    run.ledger.write_bytes(b"".join(lines[:-1]))
    sealed_again(run, federation={})
    with pytest.raises(RunError, match="is not finished"):
        push(run, "me/notes", base_model=BASE, dry_run=True)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"\xff", b"[" * 100_000, b'{"schema_version": 3}', b'{"schema_version": 3, "stamp": 1}'],
)
def test_a_damaged_report_is_one_clear_error(content: bytes, run: RunFolder) -> None:
    run.report.write_bytes(content)
    with pytest.raises(PrivloraError):
        push(run, "me/notes", base_model=BASE, dry_run=True)


def test_a_closed_ledger_has_all_releases_of_its_run(run: RunFolder, tmp_path: Path) -> None:
    whole, report = read_ledger(run.ledger), json.loads(run.report.read_text())
    verifying._again(report, stated(whole), whole)
    with Ledger.create(tmp_path / "cut.jsonl", whole.plan) as ledger:
        ledger.charge(whole.plan.event_of(1))
        ledger.finish()
    cut = read_ledger(tmp_path / "cut.jsonl")
    with pytest.raises(PrivacyError, match="has not all the releases of a run in one place"):
        verifying._again(report, stated(cut), cut)
