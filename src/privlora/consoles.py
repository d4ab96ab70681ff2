"""The two places that are written to: results go to stdout, progress to stderr; and what is said of slow work.

Nothing is wrapped or recoloured, so that paths and numbers can be copied and piped."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console

VARIABLE: Final = "PRIVLORA_PROGRESS"
"""Of the environment: 0 where calls in Python are to show nothing, unless they are told to."""


def is_wanted(asked: bool | None) -> bool:
    """Whether a call shows its run. asked: its show_progress; None: as the environment says."""
    return os.environ.get(VARIABLE, "1") != "0" if asked is None else asked


class _Unbroken:
    """A stream that goes nowhere once nobody reads it: its pipe is broken, or its terminal gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115 - as long as the process

    def write(self, text: str) -> int:
        with self._going_nowhere():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_nowhere():
            self._stream.flush()

    def isatty(self) -> bool:
        """Also where it leads to a live line."""
        return bool(getattr(self._stream, "rich_proxied_file", self._stream).isatty())

    @contextlib.contextmanager
    def _going_nowhere(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also what is in buffers, and what libraries write
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":  # by which a second console would write into the line of a live one
            raise AttributeError(name)
        return getattr(self._stream, name)


def _unbroken(stream: Any) -> Any:
    return stream if isinstance(stream, _Unbroken) else _Unbroken(stream)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Inside, output that nobody reads any more goes nowhere, and stops nothing."""
    with contextlib.redirect_stdout(_unbroken(sys.stdout)), contextlib.redirect_stderr(_unbroken(sys.stderr)):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def out() -> Console:
    """For results, on stdout as it now is."""
    return _console(sys.stdout)


def err() -> Console:
    """For progress, on stderr as it now is."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    """A terminal only where somebody sits at one: neither a log, which FORCE_COLOR makes rich call so, nor a recorded
    one of CI may show what is private, or a line that moves."""
    whole = _unbroken(stream)
    attended = whole.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    terminal = None if attended else False
    return Console(file=whole, force_terminal=terminal, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def saying(what: str, *, piped: bool = False) -> Iterator[None]:
    """Says on a terminal what takes seconds. piped: also as a line of logs and pipes, when it begins."""
    console = err()
    if not console.is_terminal:
        if piped:
            console.print(what)
        yield
        return
    with console.status(what, refresh_per_second=1):
        yield


def loading(*, piped: bool = False) -> contextlib.AbstractContextManager[None]:
    """Says on a terminal that torch and transformers are being imported, which takes seconds. piped: as there."""
    return saying("loading torch and transformers", piped=piped)


def loading_for_a_call(asked: bool | None, observer: object) -> contextlib.AbstractContextManager[None]:
    """The same of a call in Python, also where it may be passed on; nothing where the call shows nothing, or all of it
    was imported by an earlier one. asked: as of ``is_wanted``."""
    told = observer is None and is_wanted(asked) and "privlora.running" not in sys.modules
    return loading(piped=True) if told else contextlib.nullcontext()
