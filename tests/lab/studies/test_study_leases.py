"""Who may work on a study's folder: one process for each part, whatever machine it is on and however others ended."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from privlora.errors import RunError
from privlora.lab.studies import leases
from privlora.lab.studies.leases import STALE_SECONDS, Holder, Lease
from privlora.lab.studies.shares import WHOLE, Part

ONE, TWO = Part(1, 2), Part(2, 2)


def left_behind(folder: Path, part: Part, *, content: str = "same", **changes: object) -> Path:
    """A lease that another process wrote; of another machine unless ``changes`` say otherwise."""
    holder = Holder((part.number, part.count), content, "far", "another machine", 77, "then", "token")
    path = folder / "parts" / f"{part.file}.running"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(replace(holder, **changes))))  # type: ignore[arg-type]
    return path


def test_one_process_a_part(tmp_path: Path) -> None:
    with Lease(tmp_path, ONE, "same") as one:
        with (
            pytest.raises(RunError, match="in use by another process: part 1/2"),
            Lease(tmp_path, ONE, "same"),
        ):
            pass
        with Lease(tmp_path, TWO, "same") as two:
            assert one.running() == two.running() == [ONE, TWO]
        assert one.running() == [ONE]
        one.check()
    assert list(tmp_path.iterdir()) == []


def test_other_parts_and_other_contents_wait(tmp_path: Path) -> None:
    with Lease(tmp_path, ONE, "same"):
        for part in (WHOLE, Part(2, 3)):
            with pytest.raises(RunError, match=r"part 1/2 .* in other parts"), Lease(tmp_path, part, "same"):
                pass
        with pytest.raises(RunError, match="study of another content"), Lease(tmp_path, TWO, "changed"):
            pass
        assert [path.name for path in (tmp_path / "parts").iterdir()] == ["1-of-2.running"]
    with Lease(tmp_path, WHOLE, "changed") as now:
        assert now.running() == [WHOLE]


def test_a_process_of_this_machine_that_is_gone_is_replaced_at_once(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    born = leases._born(ended.pid)
    ended.wait()
    here = {"machine": leases._machine(), "process": ended.pid, "born": born}
    left_behind(tmp_path, ONE, **here)
    left_behind(tmp_path, Part(3, 3), content="old", **here)  # of other parts, and over
    with Lease(tmp_path, ONE, "same") as lease:
        assert lease.running() == [ONE]
        lease.check()
    # A later process of the same number is another one.
    left_behind(tmp_path, ONE, **{**here, "process": os.getpid(), "born": "earlier"})
    with Lease(tmp_path, ONE, "same") as lease:
        lease.check()


def test_another_machine_is_believed_until_its_lease_is_old(tmp_path: Path) -> None:
    path = left_behind(tmp_path, ONE)
    with pytest.raises(RunError, match=r"process 77 on far.*oth would run the same cells.*3 minutes later"):
        Lease(tmp_path, ONE, "same").__enter__()
    assert json.loads(path.read_text())["token"] == "token"
    long_ago = path.stat().st_mtime - STALE_SECONDS - 5
    os.utime(path, (long_ago, long_ago))
    with Lease(tmp_path, ONE, "same") as lease:
        lease.check()
    assert not path.exists()


def test_a_lease_is_kept_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_FRESH_SECONDS", 0.01)
    with Lease(tmp_path, ONE, "same") as lease:
        os.utime(lease._path, (1e9, 1e9))
        while lease._path.stat().st_mtime < 1.1e9:
            assert lease._refresher.is_alive()


def test_a_part_that_another_process_took_over_is_left_to_it(tmp_path: Path) -> None:
    with Lease(tmp_path, ONE, "same") as lease:
        left_behind(tmp_path, ONE)
        with pytest.raises(RunError, match="no longer this process'"):
            lease.check()
    assert (tmp_path / "parts/1-of-2.running").exists()  # the other one's


@pytest.mark.parametrize("other", [WHOLE, Part(1, 3)])
def test_a_process_that_stood_still_finds_the_folder_taken_by_other_parts(
    tmp_path: Path, other: Part
) -> None:
    with Lease(tmp_path, ONE, "same") as still, Lease(tmp_path, TWO, "same") as second:
        for path in (still._path, second._path):
            os.utime(path, (1e9, 1e9))
        with Lease(tmp_path, other, "same") as now:
            with suppress(FileNotFoundError):
                os.utime(still._path)  # its refresher goes on
            for gone in (still, second):
                assert not gone.claim.held()
                with pytest.raises(RunError, match="no longer this process'"):
                    gone.check()
            now.check()
            assert now.running() == [other]


def test_a_part_that_stood_still_goes_on_beside_others_of_the_same_study(tmp_path: Path) -> None:
    with Lease(tmp_path, ONE, "same") as still:
        os.utime(still._path, (1e9, 1e9))
        with Lease(tmp_path, TWO, "same") as two:
            still.check()
            two.check()


def test_a_read_that_fails_does_not_end_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_FRESH_SECONDS", 0.01)
    read, failed = leases._read, list[Path]()

    def stale_handle(path: Path) -> Holder | None:
        failed.append(path)
        return None if len(failed) == 1 else read(path)

    with Lease(tmp_path, ONE, "same") as lease:
        monkeypatch.setattr(leases, "_read", stale_handle)
        os.utime(lease._path, (1e9, 1e9))
        while len(failed) < 2 or lease._path.stat().st_mtime < 1.1e9:
            assert lease._refresher.is_alive()
        left_behind(tmp_path, ONE)  # of another holder, which is not kept fresh for it
        lease._refresher.join()


def test_what_is_not_known_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_behind(tmp_path, TWO, content="other")
    holder = leases._read(path)

    def unreadable(self: Path, **_: object) -> os.stat_result:
        raise OSError(errno.ESTALE, "stale")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", unreadable)
        assert not leases._is_gone(path, holder, 1e12)
    path.write_text("unreadable")
    with pytest.raises(RunError, match="in use by another process"):
        Lease(tmp_path, ONE, "same").__enter__()
    assert path.exists()
    path.unlink()
    assert leases._is_gone(path, holder, 0)


def test_processes_that_the_system_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_behind(tmp_path, ONE, machine=leases._machine(), process=77, born="1234")
    answers: list[type[OSError] | None] = [None, PermissionError, ProcessLookupError]

    def kill(process: int, signal: int) -> None:
        assert (process, signal) == (77, 0)
        if (answer := answers.pop(0)) is not None:
            raise answer

    def hidden(self: Path, **_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "hidden")

    holder = leases._read(path)
    assert holder is not None
    monkeypatch.setattr(leases.os, "kill", kill)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", hidden)
        assert [holder.gone() for _ in range(3)] == [False, False, True]


def test_a_lease_that_somebody_took_in_between_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left_behind(tmp_path, ONE)
    os.utime(path, (1e9, 1e9))
    now = Lease._now

    def late(self: Lease) -> float:
        found = now(self)
        path.unlink()
        left_behind(tmp_path, ONE, token="newer")
        os.utime(path, (1e9, 1e9))
        monkeypatch.setattr(Lease, "_now", lambda self: path.stat().st_mtime)
        return found

    monkeypatch.setattr(Lease, "_now", late)
    with pytest.raises(RunError, match="in use by another process"):
        Lease(tmp_path, ONE, "same").__enter__()
    assert json.loads(path.read_text())["token"] == "newer"
    assert sorted(p.name for p in path.parent.iterdir()) == ["1-of-2.running"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"), Lease(tmp_path / "file", ONE, "same"):
        pass
