"""Output whose reader has gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from privlora.consoles import err, out, unbroken


def test_what_nobody_reads_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        for _ in range(3):
            out().print("a result")
            err().print("a line")
        with unbroken():
            print("another")
        assert os.fstat(writer).st_rdev == os.stat(os.devnull).st_rdev


def test_a_full_disk_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as stream:
        monkeypatch.setattr("sys.stdout", stream)
        with pytest.raises(OSError, match="No space"):
            out().print("a result")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_a_stream_that_was_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    with unbroken():
        print("a line")
    out().print("a result")


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_log_is_no_terminal_whatever_the_environment_says(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is private is shown on terminals alone."""
    monkeypatch.setenv(name, "1")
    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        assert not out().is_terminal
        assert not err().is_terminal
