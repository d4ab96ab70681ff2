"""Output whose reader has gone."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.file_proxy import FileProxy

from privlora.consoles import err, out, unbroken


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_what_nobody_reads_goes_nowhere(
    opened: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither into a broken pipe, nor to a terminal that is gone."""
    reader, writer = opened()
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


def test_lines_stand_above_a_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live line's console writes them, since it alone knows where its line is."""
    raw, live = io.StringIO(), Console(file=io.StringIO(), record=True)
    monkeypatch.setattr("sys.stdout", FileProxy(live, raw))
    out().print("a result")
    assert live.export_text() == "a result\n"
    assert raw.getvalue() == ""


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


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_a_terminal_that_is_recorded_counts_as_a_log(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        assert err().is_terminal == (value == "xterm")
    os.close(reader)
