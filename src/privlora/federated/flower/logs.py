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
from typing import TYPE_CHECKING, Final

from privlora.config import Settings
from privlora.errors import PrivloraError, RunError
from privlora.federated.history import Round, RoundObserver
from privlora.federated.plans import federation_of
from privlora.federated.progress import in_bytes
from privlora.rounding import rounded_up

if TYPE_CHECKING:
    from privlora.federated.run import Federated

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
    return _filtered(_no_banner)


def _no_banner(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not (text.startswith("DEPRECATED FEATURE:") and "`run_simulation`" in text)


_log = logging.getLogger(__name__)


class Told(RoundObserver):
    """A line a round, and one for each held-out loss."""

    def __init__(self, settings: Settings) -> None:
        self._secret = federation_of(settings).trusted_server

    def on_round(self, done: Round, rounds: int) -> None:
        """Who answered, who dropped out, and the bytes of all messages."""
        of = f"round {done.step}/{rounds}"
        if done.void is not None:
            _log.warning("%s is VOID, nothing moved: %s", of, done.void)
        elif self._secret:
            _log.info("%s: done; who was drawn is a secret", of)
        else:
            _log.info("%s: %s", of, _answers(done))

    def on_evaluation(self, step: int, loss: float) -> None:
        """The loss on public records."""
        _log.info("held-out loss after round %d: %.4f nats per token (mean over records)", step, loss)


def _answers(done: Round) -> str:
    gone = sorted(set(done.asked) - set(done.answered))
    names = f" ({', '.join(sorted(done.answered))})" if done.answered else ""
    lost = f"; dropped out: {', '.join(gone)}" if gone else ""
    sent = f"{in_bytes(done.down)} down, {in_bytes(done.up)} up"
    return f"{len(done.answered)} of {len(done.asked)} clients answered{names}{lost}; {sent}"


def tell_start(settings: Settings, timeout: float) -> None:
    """Where the run lies, and whom it waits for."""
    federation = federation_of(settings)
    _log.info("run folder: %s", settings.run.output)
    _log.info("base model of the server: %s", settings.model.name)
    _log.info("clients: %s; each has %g s for an answer", ", ".join(federation.names), timeout)
    _log.info(
        "next all of them are asked to join; every message starts a process there, so this may take a minute"
    )


def tell_end(done: Federated) -> None:
    """Where the result lies, and what it promises."""
    promise = (
        "NOT PRIVATE"
        if done.epsilon is None or done.delta is None
        else f"at most ε {rounded_up(done.epsilon)} (δ {done.delta:g})"
    )
    _log.info("the run is over: adapter, report and ledgers lie in %s; %s", done.release, promise)


def stopped(step: int) -> RunError:
    """For a run that a signal ended."""
    return RunError(
        f"the server was stopped after round {step}, which is saved",
        fix="start it again with `flwr run`; it goes on where it was",
    )
