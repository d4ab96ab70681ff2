"""What a run is doing, said where it does it: heard by a profile of the run, and by nobody otherwise.

Outside a profile a stage is a look at one variable. A listener is of its own thread, so runs beside it go unheard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Final, ParamSpec, Protocol, TypeVar

PREPARE, DRAW, COLLATE = "prepare", "draw", "collate"
FORWARD, LOSS, BACKWARD, CAPTURE, ACCUMULATE = "forward", "loss", "backward", "capture", "accumulate"
CHARGE, NOISE, OPTIMIZER, AVERAGING, INSTALL = "charge", "noise", "optimizer", "averaging", "install"
PROCESSES, EVALUATION, CHECKPOINT = "processes", "evaluation", "checkpoint"

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Listener(Protocol):
    """Whoever profiles a run. What it hears is PRIVATE: times and lengths follow from the records that were drawn."""

    def stage(self, name: str) -> AbstractContextManager[None]: ...

    def step_begins(self) -> None: ...

    def micro_batch(self) -> None: ...


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)
_UNHEARD: Final = nullcontext()


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Inside, ``listener`` is told what this thread's run does."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def listener() -> Listener | None:
    """Who is told at present."""
    return _LISTENER.get()


def stage(name: str) -> AbstractContextManager[None]:
    """Around what belongs to a stage; of stages in one another the innermost counts."""
    found = _LISTENER.get()
    return _UNHEARD if found is None else found.stage(name)


def staged(name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """The same for all of a function."""

    def of(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def inside(*args: _P.args, **options: _P.kwargs) -> _T:
            with stage(name):
                return function(*args, **options)

        return inside

    return of
