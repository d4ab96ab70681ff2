"""The first signal is answered at once, while what is under way goes on; the second one acts as usual."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from privlora.training.stopping import exit_code, interrupting, stop_on_signal

WORDS = "stopping after this step, and saving. A second Ctrl-C or SIGTERM stops at once"


def said(log: pytest.LogCaptureFixture) -> list[str]:
    """Within a second, as work goes on."""
    until = time.monotonic() + 1
    while not log.messages and time.monotonic() < until:
        time.sleep(0.001)
    return log.messages


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_the_first_signal_is_answered_before_the_step_ends(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    with stop_on_signal() as stop:
        assert not caplog.messages
        os.kill(os.getpid(), number)
        (told,) = said(caplog)
        assert stop.is_set()
        assert told.startswith(WORDS)
        assert told.endswith("a step that is not saved by then is lost, and its epsilon is spent")
    assert len(caplog.messages) == 1


def test_the_second_ctrl_c_stops_at_once(caplog: pytest.LogCaptureFixture) -> None:
    handler, threads = signal.getsignal(signal.SIGINT), threading.active_count()

    def work() -> None:
        with stop_on_signal("saving, then stopping"):
            os.kill(os.getpid(), signal.SIGINT)
            assert said(caplog) == ["saving, then stopping"]
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(caplog.messages) == 1
    assert signal.getsignal(signal.SIGINT) is handler
    assert threading.active_count() == threads


def test_a_line_that_is_gone_stops_once_however_often_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Shell and system both send SIGHUP."""
    handler = signal.getsignal(signal.SIGHUP)
    with stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGHUP) is handler
    assert len(caplog.messages) == 1


def test_what_nohup_ignores_stays_ignored() -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupting(), stop_on_signal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_signals_interrupt_a_command_wherever_it_is() -> None:
    @interrupting()
    def work(number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)

    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(KeyboardInterrupt):
            work(number)
        assert exit_code() == 128 + number
