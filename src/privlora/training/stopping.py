"""Signals that end a run: Ctrl-C, SIGTERM, and SIGHUP, which a terminal sends that is closed or loses its line."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_log = logging.getLogger(__name__)

_AFTER_STEP: Final = (
    "stopping after this step, and saving. A second Ctrl-C or SIGTERM stops at once: a step that "
    "is not saved by then is lost, and its epsilon is spent"
)
_HANGUP: Final = getattr(signal, "SIGHUP", None)  # Windows has none

_heard = list[int]()


def exit_code() -> int:
    """Of a command that ``interrupting`` or ``stop_on_signal`` ended: 128 and the last signal's number."""
    return 128 + (_heard[-1] if _heard else signal.SIGINT)


@contextmanager
def interrupting() -> Iterator[None]:
    """Inside, each of these signals raises KeyboardInterrupt, so that whoever works can clean up."""
    _heard.clear()

    def interrupt(number: int, frame: FrameType | None) -> None:
        _heard.append(number)
        raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextmanager
def stop_on_signal(words: str = _AFTER_STEP) -> Iterator[threading.Event]:
    """An event that the first of these signals sets. The second Ctrl-C or SIGTERM acts as usual; SIGHUP never does,
    since shell and system both send it. Only the main thread may do this.

    words: logged as a warning at the first signal, since what is under way may take minutes; "" for none.
    """
    stop = threading.Event()
    telling: list[threading.Thread] = []

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()
        _heard.append(number)
        if number != _HANGUP:
            signal.signal(number, old[number])
        if words and not telling:
            # Not here: what the signal broke into may be half-way through a line of its own.
            telling.append(threading.Thread(target=_log.warning, args=("%s", words), daemon=True))
            telling[0].start()

    try:
        with _handled(ask) as old:
            yield stop
    finally:
        for thread in telling:
            thread.join()


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """The handlers before, in whose place ``handle`` stands inside. What nohup has ignored stays so."""
    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if _HANGUP is not None and signal.getsignal(_HANGUP) != signal.SIG_IGN:
            old[_HANGUP] = signal.getsignal(_HANGUP)
    for number in old:
        signal.signal(number, handle)
    try:
        yield old
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
