"""A run on the screen: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.progress import Progress, TaskID, TimeRemainingColumn
from rich.spinner import Spinner
from rich.text import Text

from privlora.accounting import Plan, read_ledger
from privlora.config import Settings
from privlora.data.summary import DataSummary
from privlora.methods import find_row
from privlora.pages.numbers import duration
from privlora.rounding import rounded_up, to_one_digit
from privlora.training.checkpoint import read_mark
from privlora.training.files import RunFolder
from privlora.training.loggers import spent
from privlora.training.observer import Observer, StepReport
from privlora.training.takeover import OVER, is_over

_LINES = 10  # plain lines of a run
_PLAIN_SECONDS = 30.0  # a log without a line for longer looks dead
_SMOOTHING = 0.9
_BAR, _BLOCKS = 12, "▁▂▃▄▅▆▇█"
_ACCOUNTING_SHARE = 0.05  # of the time, at most, composes epsilon for live lines
# A second, of the live line's moving sign: each is a line of a terminal that is recorded. Its columns.
_FRAMES, _SIGN = 1, 2
_SHORTER = (False, False), (True, False), (True, True)  # (short, bare), see `RichObserver._line`

PER_TOKEN: Final = "nats per token"

WRITING: Final = "writing what the run leaves, with its report"
"""What is said when the last step is taken: that takes seconds, as packages for it are imported."""

IN_WORDS: Final = "; 0.1 lower makes tokens about 10 % more probable"
"""What a nat is, behind the first loss that is shown in nats per token."""

_ROUNDED: Final = 0.1  # how far a rounded number of units may be from theirs without a word
_MOST: Final = 0.5  # share of records that repeat others


class RichObserver(Observer):
    """A run on a rich console; a context manager around it.

    Epsilon is what the steps so far have cost, exactly, rounded up. A log has that of each line's own step. A live line
    has the last one that is known, with its step, since composing one takes up to some tenths of a second.

    Args:
        console: where to write, for example ``Console(stderr=True)``.
        plan: the run's plan, of one that does not say it (`Observer.on_plan`); None in the non-private mode.
        unit: of the held-out loss.
        timed: show seconds, which are PRIVATE: a step takes as long as its batch is large. Else on a terminal alone,
            since a log may be passed on.
    """

    def __init__(
        self, console: Console, plan: Plan | None = None, unit: str = PER_TOKEN, *, timed: bool | None = None
    ) -> None:
        self._console = console
        self._timed = console.is_terminal if timed is None else timed
        self._every: int | None = None  # steps from one plain line to the next; None: a tenth of the run
        self._unit = unit
        self._losses = list[float]()  # on public records
        self._untrained: float | None = None  # the loss before the first step
        self._plan = plan
        self._live = Live(console=console, refresh_per_second=_FRAMES, transient=True)
        self._sign = Spinner("dots", style="dim")
        self._layouts = list[Text]()  # of the last step's live line, from the fullest to the shortest
        self._progress = Progress(console=console)  # never drawn: it tells how long public work will take
        self._work, self._working, self._work_began, self._work_done = TaskID(0), "", 0.0, 0
        self._begun: set[str] = set()  # kinds of public work that a log has named
        self._unfinished: set[str] = set()  # of these, whose last line is not the last of its work
        self._seconds, self._timings = 0.0, 0  # a step's, in the mean of the last ones
        self._printed_at = self._account_again_at = time.monotonic()
        self._known = 0, 0.0  # the last step whose epsilon was composed, and that

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_plan(self, plan: Plan | None, settings: Settings) -> None:
        """What is promised; where a run goes on."""
        self._plan, self._unit = plan, _unit_of(settings)
        if "log_every" in settings.run.model_fields_set:
            self._every = settings.run.log_every
        words = "NOT PRIVATE: no clipping, no noise"
        if plan is not None:
            words = f"plan: {plan.promise()} (terms: docs/glossary.md)"
        self._console.print(words)
        if (begun := _going_on(RunFolder(Path(settings.run.output)), settings)) is not None:
            self._console.print(begun)

    def on_run(self, plan: Plan | None, settings: Settings) -> None:
        """Training is about to begin."""
        self._plan = plan

    def on_step(self, report: StepReport) -> None:
        """Show the step: public numbers, and the private loss if it was given."""
        self._timings += 1
        weight = max(1 - _SMOOTHING, 1 / self._timings)  # the first of few must not weigh more than others
        self._seconds += weight * (report.seconds - self._seconds)
        every = self._every or max(1, report.steps // _LINES)
        now, last = time.monotonic(), report.step == report.steps
        late = self._timed and now - self._printed_at >= _PLAIN_SECONDS
        live = self._live.is_started
        plain = last or (not live and (self._timings == 1 or report.step % every == 0 or late))
        if plain or (live and now >= self._account_again_at):
            self._known = report.step, spent(self._plan, report.step) or 0.0
            ended = time.monotonic()
            self._account_again_at = ended + (ended - now) / _ACCOUNTING_SHARE
        if plain:
            self._console.print(self._line(report))
            self._printed_at = time.monotonic()
        if live:
            bar, losses = bar_of(report.step, report.steps), losses_drawn(self._losses)
            lines = (self._line(report, short=short, bare=bare) for short, bare in _SHORTER)
            self._layouts = layouts(bar, losses, *lines)
            self._show()

    def on_evaluation(self, step: int, loss: float) -> None:
        """Show the held-out loss, which is public."""
        self._losses.append(loss)
        meant = IN_WORDS if self._unit == PER_TOKEN and len(self._losses) == 1 else ""
        if step == 0:
            self._untrained = loss
        elif self._untrained is not None and loss >= self._untrained:
            meant = f": no lower than the {self._untrained:.4f} before training"
        self._console.print(
            f"held-out loss after step {step}: {loss:.4f} {self._unit} (mean over records){meant}"
        )

    def on_public_work(self, what: str, done: int, total: int) -> None:
        """Show how far writing public texts and the like is: beside the step's line, or now and then in a log."""
        shown = Text(f"{what}: {done} of {total}")
        if self._live.is_started:
            if what != self._working:
                self._working, self._work = what, self._progress.add_task(what)
            self._progress.update(self._work, completed=done, total=total)
            left = TimeRemainingColumn(compact=True).render(self._progress.tasks[-1])
            shown = Text("  ").join([bar_of(done, total), shown, Text("left ").append_text(left)])
            self._show(*(() if done == total else (shown,)))
            return
        now, begins = time.monotonic(), what not in self._begun
        if begins or done <= self._work_done:
            self._work_began = now
        self._work_done = done
        # Beside steps, and since the work before, time is theirs, too, and they are private.
        timed = self._timed or self._timings == 0
        late = timed and now - max(self._printed_at, self._work_began) >= _PLAIN_SECONDS
        if begins or late or (done == total and what in self._unfinished):
            self._begun.add(what)
            (self._unfinished.discard if done == total else self._unfinished.add)(what)
            if timed and 0 < done < total and not begins:
                shown.append(f", about {clock((now - self._work_began) * (total - done) / done)} left")
            self._console.print(shown)
            self._printed_at = time.monotonic()

    def on_warning(self, what: str) -> None:
        """Show what is odd about the run."""
        self._console.print(Text(f"WARNING: {what}", style="bold yellow"))

    def on_phase(self, what: str) -> None:
        """Show what begins before the first step or after the last: on a terminal while it lasts, else as a line."""
        if self._live.is_started:
            self._show(Text(what))
        else:
            self._console.print(what)

    def on_texts(self, done: int, total: int) -> None:
        """Show how many texts of a release are written."""
        self.on_public_work("texts to release", done, total)

    def on_data(self, summary: DataSummary, settings: Settings) -> None:
        """On a terminal, to whoever may see the records: what they are, and what is odd about them. Elsewhere, as in a
        log that may be passed on, only where the numbers are: a warning would be a bit of them."""
        show, privacy = self._console.print, settings.privacy
        if not self._console.is_terminal:
            show("statistics of the records: private/data_summary.json")
            return
        show(f"PRIVATE, here and in private/ only: {summary.describe(privacy.unit)}")
        if privacy.unit == "record" and summary.repeated > _MOST:
            self.on_warning(
                "most records say what another one says, and what is there k times is protected about k times less: "
                "remove copies, or protect people (privacy.unit: user)"
            )
        share = summary.units / privacy.n
        # A rounding such as that of `privlora init`, to one digit, needs no word.
        if abs(share - 1) > _ROUNDED and to_one_digit(summary.units) != privacy.n:
            show(
                f"PRIVATE, too: these are {share:.2f} times the {privacy.n:g} {privacy.unit}s of public_dataset_size. "
                f"Epsilon holds; next to the noise, steps weigh {share:.2f} times what was planned. Mend the file, or "
                "that number, if one of them is wrong"
            )

    def on_choice(self, why: str) -> None:
        """What was left to the run."""
        self._console.print(f"chosen: {why}")

    def on_profile(self, trace: Path) -> None:
        """Where the trace is, for whoever may see the records."""
        self._console.print(f"PRIVATE, where the time of a step went: {trace}")

    def _line(self, report: StepReport, *, short: bool = False, bare: bool = False) -> Text:
        """Step, epsilon, learning rate and time left. short: without delta, which the plan says; bare: without the
        epsilon of an earlier step."""
        word = "round" if report.learning_rate is None else "step"
        line, (step, epsilon) = Text(f"{word} {report.step}/{report.steps}"), self._known
        if self._plan is None or self._plan.insecure_noise:
            line.append("  NOT PRIVATE", style="bold red")
        elif step == report.step:
            delta = "" if short else f" (δ {self._plan.delta:g})"
            line.append(f"  ε {math.ceil(epsilon * 100) / 100:.2f}{delta}", style="bold")
        elif not bare:
            line.append(f"  ε {math.ceil(epsilon * 100) / 100:.2f} (step {step})")
        line.append("" if report.learning_rate is None else f"  lr {report.learning_rate:.2g}")
        line.append(pace(self._seconds, word, report.steps - report.step) if self._timed else "")
        return line

    def _show(self, *more: Text) -> None:
        """The last step's line behind a moving sign, since a step may take minutes. more: shown next to it, or below
        where there is no room."""
        line = fitting(self._layouts, self._console.width - _SIGN, more)
        self._sign.update(text=line)
        self._live.update(self._sign, refresh=True)


def layouts(bar: Text, losses: Text, line: Text, *shorter: Text) -> list[Text]:
    """A live line, from the fullest to the shortest."""
    fullest = (bar, losses, line) if losses else (bar, line)
    less = (bar, shorter[0]), *((each,) for each in shorter)
    return [Text("  ").join(parts) for parts in (fullest, (bar, line), *less)]


def fitting(layouts: Sequence[Text], width: int, beside: Sequence[Text] = ()) -> Text:
    """The fullest layout that a terminal of so many columns is wide enough for, so that nothing of it is cut.

    beside: shown with it, or below where there is no room.
    """
    if not layouts:
        return Text("  ").join(beside)
    for layout in layouts:
        line = Text("  ").join([layout, *beside])
        if line.cell_len <= width:
            return line
    fits = [each for each in layouts if each.cell_len <= width]
    return Text("\n").join([(fits or layouts[-1:])[0], *beside])


def bar_of(done: int, total: int) -> Text:
    """What is done; on a terminal alone."""
    full = _BAR * done // total
    return Text("━" * full, style="green").append("─" * (_BAR - full), style="dim")


def losses_drawn(losses: Sequence[float]) -> Text:
    """How the held-out loss went; nothing before it was taken twice."""
    return Text(f"loss {_spark(losses)} {losses[-1]:.3f}" if len(losses) > 1 else "")


def pace(seconds: float, word: str, left: int) -> str:
    """PRIVATE. How long a step or a round takes, and so many of them that are left."""
    return f"  {duration(seconds)}/{word}  ETA {clock(seconds * left)}"


def _spark(values: Sequence[float]) -> str:
    """Numbers as one line of blocks, the least of them the lowest; a blank for what is not finite.

    >>> _spark([4.0, 2.0, 1.0, 0.0])
    '█▅▃▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def _unit_of(settings: Settings) -> str:
    """Of a run's held-out loss."""
    if settings.data.chosen is not None:
        return "nats per preference"
    classes = settings.data.classes
    if classes is None:
        return PER_TOKEN
    return "nats" if classes.outputs > 1 else "squared error"


def clock(seconds: float) -> str:
    """3725.2 as "1:02:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _going_on(folder: RunFolder, settings: Settings) -> str | None:
    """Where a run goes on, in a line; None before its first step and where it takes none."""
    if is_over(folder):
        return OVER
    if settings.synthesis is not None and settings.synthesis.source is not None:
        return None
    private, written, done = settings.privacy.private, None, 0
    if private and folder.has_plan:
        written = read_ledger(folder.ledger)
        done = written.charges - written.plan.before_training
    elif not private and folder.checkpoint.exists():
        done = read_mark(folder.checkpoint).step
    if done < 1:
        return None
    word = "step" if find_row(settings.method.name).releases == "gradients" else "round"
    spent = "NOT PRIVATE"
    if written is not None and not written.plan.insecure_noise:
        spent = f"epsilon so far {rounded_up(written.epsilon())} (δ {written.plan.delta:g})"
    where = f"{word} {done} of {settings.privacy.steps}"
    return f"going on after {where}, {spent}, by its first settings; later changes of the YAML are ignored"
