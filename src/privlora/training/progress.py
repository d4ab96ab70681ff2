"""A run on the screen: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from functools import cached_property
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from privlora.accounting import Plan, epsilon_curve
from privlora.training.loop import StepReport

_POINTS = 10  # checkpoints of epsilon, and plain lines of a run
_PLAIN_SECONDS = 30.0  # a log without a line for longer looks dead
_SMOOTHING = 0.9


class RichObserver:
    """Implements `privlora.training.loop.Observer` on a rich console; a context manager around the run.

    The epsilon of a step is that of the next checkpoint, so it never shows less than was spent.

    Args:
        console: where to write, for example ``Console(stderr=True)``.
        plan: the run's plan; None in the non-private mode.
    """

    def __init__(self, console: Console, plan: Plan | None) -> None:
        self._console = console
        self._plan = plan
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._private_loss: float | None = None
        self._seconds: float | None = None
        self._printed_at = time.monotonic()

    def __enter__(self) -> RichObserver:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    @cached_property
    def _checkpoints(self) -> list[tuple[int, float]]:
        # At the first step and not before: it takes a second, and most refusals come earlier.
        return epsilon_checkpoints(self._plan) if self._plan is not None else []

    def on_step(self, report: StepReport) -> None:
        """Show the step: public numbers, and the private loss if it was given."""
        before = report.seconds if self._seconds is None else self._seconds
        self._seconds = _SMOOTHING * before + (1 - _SMOOTHING) * report.seconds
        line = self._line(report, self._seconds)
        if self._live.is_started:
            self._live.update(line, refresh=True)
            if report.step == report.steps:
                self._console.print(line)
            return
        every = max(1, report.steps // _POINTS)
        late = time.monotonic() - self._printed_at >= _PLAIN_SECONDS
        if report.step == 1 or report.step % every == 0 or report.step == report.steps or late:
            self._console.print(line)
            self._printed_at = time.monotonic()

    def on_evaluation(self, step: int, loss: float) -> None:
        """Show the held-out loss, which is public."""
        self._console.print(f"held-out loss after step {step}: {loss:.4f} nats per token (mean over records)")

    def on_private_loss(self, step: int, loss: float) -> None:
        """Keep it for the step's line."""
        self._private_loss = loss

    def _line(self, report: StepReport, seconds: float) -> Text:
        line = Text(f"step {report.step}/{report.steps}")
        if self._plan is not None and not self._plan.insecure_noise:
            spent = next(epsilon for step, epsilon in self._checkpoints if step >= report.step)
            line.append(f"  ε {math.ceil(spent * 100) / 100:.2f} (δ {self._plan.delta:g})", style="bold")
        else:
            line.append("  NOT PRIVATE", style="bold red")
        line.append(f"  lr {report.learning_rate:.2g}  {seconds:.2g} s/step")
        line.append(f"  ETA {_clock(seconds * (report.steps - report.step))}")
        if self._private_loss is not None:
            line.append(f"  PRIVATE training loss {self._private_loss:.4f}", style="magenta")
        return line


def epsilon_checkpoints(plan: Plan) -> list[tuple[int, float]]:
    """At most ten pairs (steps, PLD epsilon after them), the last for all steps of the plan."""
    count = min(_POINTS, plan.steps)
    steps = [-(-plan.steps * k // count) for k in range(1, count + 1)]
    return list(
        zip(steps, epsilon_curve(plan.event, steps, plan.delta, adjacency=plan.adjacency), strict=True)
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
