"""Who is told how a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from privlora.accounting import Plan
from privlora.config import Settings
from privlora.errors import ConfigError

if TYPE_CHECKING:
    from privlora.data.summary import DataSummary


@dataclass(frozen=True)
class StepReport:
    """What is shown to whoever trains while a run goes on: no loss, no count."""

    step: int
    steps: int
    learning_rate: float | None
    """None of rounds of votes, which train nothing."""
    seconds: float
    """PRIVATE, unlike the rest: a step takes as long as the batch that was drawn is large. Never publish it."""
    clip_norm: float | None = None
    """As it stands after the step; None in the non-private mode."""


class Observer:
    """Whoever wants to see a run go on overrides what it wants to hear of. By itself it is silent."""

    def on_phase(self, what: str) -> None:
        """Work before the first step or after the last one begins."""

    def on_plan(self, plan: Plan | None, settings: Settings) -> None:
        """What the run will cost, before its model is loaded. plan: None in the non-private mode."""

    def on_data(self, summary: DataSummary, settings: Settings) -> None:
        """PRIVATE: what the records are, once they are found fit."""

    def on_choice(self, why: str) -> None:
        """What was left to the run, and why: its method, its learning rate, the tokens of a micro-batch."""

    def on_run(self, plan: Plan | None, settings: Settings) -> None:
        """Training is about to begin, with all that was left to the run in its plan and settings."""

    def on_start(self, done: int, stop: Callable[[], None]) -> None:
        """``done`` steps are over, and the next one is about to be charged. ``stop()`` ends the run as Ctrl-C does."""

    def on_step(self, report: StepReport) -> None:
        """A step was taken."""

    def on_evaluation(self, step: int, loss: float) -> None:
        """The held-out loss after a step, on public records."""

    def on_public_work(self, what: str, done: int, total: int) -> None:
        """How far work on public things is: public texts, or what is found out about the model. Also within a step."""

    def on_texts(self, done: int, total: int) -> None:
        """How many texts of a release are written (synthesis.publish)."""

    def on_profile(self, trace: Path) -> None:
        """PRIVATE: where the trace of a profiled run lies, also of one that stops early."""

    def on_warning(self, what: str) -> None:
        """Something is odd that does not stop the run, such as public texts that are copies."""


def refuse_no_observer(observer: Any, kind: type = Observer) -> None:
    """Raise ConfigError, before anything is charged, for what is no ``kind``, or has a method that cannot be called."""
    if observer is None:
        return
    fix = f"derive its class from {kind.__module__}.{kind.__name__}"
    if not isinstance(observer, kind):
        raise ConfigError(f"observer is no {kind.__name__}", why=_WHY, fix=fix)
    for name, method in vars(kind).items():
        if name.startswith("on_"):
            try:
                signature(getattr(observer, name)).bind(*[None] * (len(signature(method).parameters) - 1))
            except TypeError:
                raise ConfigError(f"observer.{name} takes other arguments", why=_WHY, fix=fix) from None


_WHY: Final = "it would fail after a step that is charged"
