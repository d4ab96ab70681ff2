"""A federation on the screen: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from privlora.federated.history import Round, RoundObserver
from privlora.training.progress import IN_WORDS, bar_of, fitting, layouts, losses_drawn, pace

_LINES = 10  # plain lines of a federation
_SMOOTHING = 0.7


class RoundProgress(RoundObserver):
    """Rounds on a rich console; a context manager around them.

    What it shows is public: numbers of clients, steps and bytes, and the loss on public records. How long a round takes
    is not: it is shown on a terminal alone, and no line elsewhere follows a clock. What goes on inside of a round is
    shown on a terminal; elsewhere of the first round.

    Args:
        console: where to write, for example ``Console(stderr=True)``.
        private: whether noise protects what is shown.
    """

    def __init__(self, console: Console, *, private: bool) -> None:
        self._console, self._private = console, private
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._losses = list[float]()  # on public records
        self._loss: tuple[int, float] | None = None
        self._seconds: float | None = None
        self._layouts = list[Text]()  # of the last round's line
        self._phase, self._ended = "", 0  # what is done now; rounds that are over
        self._ended_at = time.monotonic()

    def __enter__(self) -> RoundProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_round(self, done: Round, rounds: int) -> None:
        """Show a round: who answered, and the bytes of its messages."""
        now = time.monotonic()
        took, self._ended_at = now - self._ended_at, now
        before = took if self._seconds is None else self._seconds
        self._seconds = _SMOOTHING * before + (1 - _SMOOTHING) * took
        line = self._line(done, rounds, self._seconds)
        last, self._ended = done.step == rounds, done.step
        if done.void is not None:  # stays on the screen
            self._console.print(line)
        elif self._live.is_started:
            bar, short = bar_of(done.step, rounds), self._line(done, rounds, self._seconds, short=True)
            self._layouts = layouts(bar, losses_drawn(self._losses), line, short)
            self._live.update(fitting(self._layouts, self._console.width), refresh=True)
            if last:
                self._console.print(line)
        elif done.step in (1, rounds) or done.step % max(1, rounds // _LINES) == 0:
            self._console.print(line)

    def on_phase(self, what: str, answered: int | None, asked: int | None) -> None:
        """Show what goes on between two rounds' lines. answered, asked: clients; None where that is a secret."""
        self._phase = what if not answered else f"{what}, {answered} of {asked} answered"
        self._show_phase(self._phase, first=not answered)

    def on_local_step(self, done: int, steps: int) -> None:
        """Show how far clients that train in this process are."""
        self._show_phase(f"{self._phase}, local step {done} of {steps} done", first=False)

    def _show_phase(self, what: str, *, first: bool) -> None:
        """first: whether it begins."""
        if self._live.is_started:
            self._live.update(fitting(self._layouts, self._console.width, [Text(what)]), refresh=True)
        elif first and not self._ended:
            self._console.print(what)

    def on_evaluation(self, step: int, loss: float) -> None:
        """Show the held-out loss, which is public."""
        self._loss = step, loss
        self._losses.append(loss)
        self._console.print(
            f"held-out loss after round {step}: {loss:.4f} nats per token (mean over records)"
            + (IN_WORDS if len(self._losses) == 1 else "")
        )
        if step == 0:
            self._ended_at = time.monotonic()  # what comes before the first round is no part of it

    def _line(self, done: Round, rounds: int, seconds: float, *, short: bool = False) -> Text:
        """Round, who answered, bytes and time left, in the order of a run's line. short: without bytes."""
        line = Text(f"round {done.step}/{rounds}")
        if done.asked:  # else who was drawn is the server's secret, and so is how long they took
            line.append(f"  {len(done.answered)}/{len(done.asked)} clients", style="bold")
        if not self._private:
            line.append("  NOT PRIVATE", style="bold red")
        if done.void is not None:
            return line.append(f"  VOID, nothing moved: {done.void}", style="bold red")
        if done.asked:
            line.append("" if short else f"  {in_bytes(done.down)} down  {in_bytes(done.up)} up")
            if self._console.is_terminal:
                line.append(pace(seconds, "round", rounds - done.step))
        if self._loss is not None and self._loss[0] == done.step and not short:
            line.append(f"  held-out loss {self._loss[1]:.4f}")
        return line


def in_bytes(count: float) -> str:
    """1234567 as "1.2 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
