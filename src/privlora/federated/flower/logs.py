"""Flower's logger shows what privlora logs in an app's process, and privlora's errors without a traceback.

Flower streams what a ServerApp's process writes, through a logger of its own or otherwise, to whoever reaches the
SuperLink, and keeps it there (``flwr run --stream``, ``flwr log``). So every line of a server is public to the
operator: names of clients, numbers of messages, the loss on public records. Where the server draws clients in secret,
lines say neither who nor how many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from privlora.errors import PrivloraError

_FLOWER: Final = logging.getLogger("flwr")
_PRIVLORA: Final = logging.getLogger("privlora")


class _ToFlower(logging.Handler):
    """Hands records to Flower's logger, which writes them as its own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        _FLOWER.log(record.levelno, "%s", record.getMessage())


class _OneLine(logging.Filter):
    """An error of privlora says what to mend, and needs no traceback around it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, PrivloraError):
            record.msg, record.args, record.exc_info = str(error), (), None
        return True


_ONE_LINE: Final = _OneLine()


@contextmanager
def through_flower() -> Iterator[None]:
    """Inside, Flower's logger shows what privlora logs; from then on, errors of privlora as one line.

    Flower itself logs what an app raised, after the app: only its own logger can leave the traceback out.
    """
    handler, before = _ToFlower(logging.INFO), _PRIVLORA.level
    _FLOWER.addFilter(_ONE_LINE)  # once, however often it is added
    _PRIVLORA.addHandler(handler)
    if before == logging.NOTSET:
        _PRIVLORA.setLevel(logging.INFO)
    try:
        yield
    finally:
        _PRIVLORA.removeHandler(handler)
        _PRIVLORA.setLevel(before)


@contextmanager
def _filtered(shown: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    _FLOWER.addFilter(shown)
    try:
        yield
    finally:
        _FLOWER.removeFilter(shown)


def aside_of_flower(aside: Callable[[str], None] | None) -> AbstractContextManager[None]:
    """Inside, what Flower itself would log is said aside; with None, nothing changes.

    Its grid says which messages were too large or could not be sent: of a trusted server, how many it drew.
    """
    if aside is None:
        return nullcontext()

    def said(record: logging.LogRecord) -> bool:
        aside(f"Flower: {record.getMessage()}")
        return False

    return _filtered(said)


def without_banner() -> AbstractContextManager[None]:
    """Inside, Flower does not say that its function ``run_simulation`` is deprecated; all else is shown."""

    def shown(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (text.startswith("DEPRECATED FEATURE:") and "`run_simulation`" in text)

    return _filtered(shown)
