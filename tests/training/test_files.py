"""Files of a run: whole or not at all, and torn lines are cut."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from privlora.errors import RunError
from privlora.training.files import (
    AUDIT_MARK,
    RunFolder,
    append_line,
    no_run,
    read_lines,
    refuse_unfinished,
    release_at,
    set_times,
    write_atomically,
)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(RunError, match="No space left on device"):
        write_atomically(path, "new" * 1000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_leftover_of_a_crash_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / ".file.privlora-tmp").write_text("half")
    write_atomically(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    leftovers = [
        folder.private / ".checkpoint.safetensors.privlora-tmp",
        folder.release / ".card.privlora-tmp",
    ]
    kept = [
        folder.private / ".config.resolved.yaml.privlora-tmp",  # written before the run is locked
        folder.release / ".notes.tmp",
        folder.release / "notes.privlora-tmp",
        folder.private / "checkpoint.safetensors",
        folder.private / ".hidden",
        folder.root / ".mine.privlora-tmp",
        folder.private / "deeper" / ".mine.privlora-tmp",
        folder.private / ".folder.privlora-tmp" / "file",
        tmp_path / ".mine.privlora-tmp",
    ]
    for path in (*leftovers, *kept):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    link = folder.private / ".link.privlora-tmp"
    link.symlink_to(kept[-1])
    folder.remove_leftovers()
    assert not any(path.exists() for path in leftovers)
    assert all(path.read_text() == "x" for path in (*kept, link))


def test_the_new_content_is_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (calls.append("fsync"), fsync(f))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    write_atomically(tmp_path / "file", "x")
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize("torn", ["", '{"step": 9', '{"step": 9, "loss": 1.0}'])
def test_a_torn_last_line_is_skipped_and_then_cut(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, {"step": 1})
    append_line(path, {"step": 2, "name": "é"})
    with open(path, "a") as file:
        file.write(torn)
    assert [row["step"] for row in read_lines(path)] == [1, 2]
    append_line(path, {"step": 3})
    assert [row["step"] for row in read_lines(path)] == [1, 2, 3]


def test_what_is_private_is_so_wherever_its_folder_is_copied_to(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_atomically(folder.data_summary, "{}")
    append_line(folder.private_losses, {"step": 1})
    append_line(folder.evaluations, {"step": 1})
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.data_summary, folder.private_losses)} == {
        0o600
    }
    (tmp_path / "other").touch()
    assert folder.evaluations.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_folder_with_a_run_is_not_taken_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    folder.create()  # nothing began there yet
    folder.settings.write_text("x: 1")
    with pytest.raises(RunError, match="holds a run already"):
        folder.create()
    folder.settings.unlink()
    folder.ledger.write_text("")
    with pytest.raises(RunError, match="holds a run already"):
        folder.create()


def test_a_part_of_a_run_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert no_run(folder.release).what.startswith("no run in")  # nothing began there yet
    folder.ledger.write_text("{}\n")
    for part in (folder.release, folder.private):
        told = str(no_run(part))
        assert told == f"{str(part)!r} is a part of a run. Fix: give the run's folder, {str(folder.root)!r}"
    monkeypatch.chdir(folder.release)
    assert no_run(Path()).fix == f"give the run's folder, {str(folder.root.resolve())!r}"
    assert no_run(Path("../private")).fix == "give the run's folder, '..'"
    assert no_run(tmp_path).what.startswith("no run in")


def begun(root: Path) -> RunFolder:
    """A run with its settings and nothing else."""
    folder = RunFolder(root)
    folder.create()
    folder.settings.touch()
    return folder


def test_runs_below_a_folder_are_named_and_what_goes_on_comes_first(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        begun(tmp_path / name).report.touch()
    begun(tmp_path / "z")
    (tmp_path / "data").mkdir()
    (tmp_path / "y.jsonl").touch()
    fix = no_run(tmp_path).fix
    assert fix.endswith(f"{tmp_path}/z (not finished), {tmp_path}/a, {tmp_path}/b, {tmp_path}/c")
    assert "in it" not in str(no_run(tmp_path / "data"))


def test_a_misspelt_run_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begun(Path("runs/notes"))
    begun(Path("runs/other"))
    Path("runs/nodes").mkdir()  # no run
    for name in ("runs/note", "notse", "run/note", str(tmp_path / "runs/note")):
        meant = "runs/notes" if not name.startswith("/") else str(tmp_path / "runs/notes")
        assert no_run(Path(name)).fix == f"did you mean the run {meant!r}?"
        with pytest.raises(RunError, match="there is no release in") as told:
            release_at(Path(name))
        assert told.value.fix == f"did you mean the run {meant!r}?"
    for name in ("runs/nodes", "runs/nothing-like-it"):
        assert "did you mean" not in str(no_run(Path(name)))


def test_a_run_that_goes_on_is_no_release_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(tmp_path / "run")
    for ledger in (False, True):
        if ledger:
            folder.ledger.write_text("{}\n")
        places = [folder.root, *[folder.release] * ledger]
        for path in places:
            with pytest.raises(RunError, match="is not finished: it has no report yet") as told:
                release_at(path)
            assert f"`privlora resume {folder.root}`" in str(told.value)
    monkeypatch.chdir(folder.release)
    with pytest.raises(RunError, match=re.escape(f"`privlora resume {folder.root.resolve()}`")):
        release_at(Path())
    (folder.release / AUDIT_MARK).touch()
    refuse_unfinished(folder)  # which leaves no report
    (folder.release / AUDIT_MARK).unlink()
    folder.report.touch()
    refuse_unfinished(folder)
    assert release_at(folder.root) == release_at(folder.release) == folder.release.resolve()
    shutil.rmtree(folder.private)  # as somebody else has it, of whom nothing is known but the files
    folder.report.unlink()
    assert release_at(folder.root) == folder.release.resolve()


def test_what_protects_nobody_lies_elsewhere(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert folder.release == folder.root / "release"
    folder.create(protects=False)  # the first start failed before it wrote anything
    assert folder.release == folder.ledger.parent == folder.root / "not-private"
    assert {path.name for path in folder.root.iterdir()} == {"not-private", "private"}
    (folder.release / "adapter_model.safetensors").write_text("")
    with pytest.raises(RunError, match="not empty"):
        folder.create()


def test_all_files_get_one_time(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    set_times(tmp_path, "1970-01-03")
    assert {path.stat().st_mtime_ns for path in (tmp_path, tmp_path / "a")} == {2 * 86400 * 10**9}
    with pytest.raises(RunError, match="cannot set the times"):
        set_times(tmp_path / "none", "1970-01-03")


def test_a_damaged_line_inside_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"st\n{"step": 2}\n')
    with pytest.raises(RunError, match="is damaged"):
        read_lines(path)


def test_a_path_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot create"):
        RunFolder(tmp_path / "file" / "run").create()
