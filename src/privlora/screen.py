"""What a call in Python shows of its run while it goes on: on standard error, as `privlora train` does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from privlora.accounting import Plan, read_ledger
from privlora.config import PrivacySettings, Settings
from privlora.consoles import err, is_wanted
from privlora.data.summary import DataSummary
from privlora.methods import find_row
from privlora.rounding import rounded_up
from privlora.starting.numbers import to_one_digit
from privlora.training.checkpoint import read_mark
from privlora.training.files import RunFolder
from privlora.training.observer import Observer
from privlora.training.progress import WRITING, RichObserver, unit_of
from privlora.training.takeover import OVER, is_over

_ROUNDED: Final = 0.1  # how far a rounded number of units may be from theirs without a word
_MOST: Final = 0.5  # share of records that repeat others


def tell_records(shown_on: Console, summary: DataSummary, settings: Settings) -> None:
    """On a terminal, to whoever may see the records: what they are, and what is odd about them. Elsewhere, as in a log
    that may be passed on, nothing: a warning would be a bit of them. private/data_summary.json has the numbers."""
    if not shown_on.is_terminal:
        return
    privacy = settings.privacy
    shown_on.print(f"PRIVATE, here and in private/ only: {summary.describe()}")
    if privacy.unit == "record" and summary.repeated > _MOST:
        shown_on.print(
            "WARNING: most records say what another one says, and what is there k times is protected about k times "
            "less: remove copies, or protect people (privacy.unit: user)",
            style="bold yellow",
        )
    if (share := _times_the_public(summary, privacy)) is not None:
        shown_on.print(
            f"PRIVATE, too: these are {share:.2f} times {_public(privacy)}. Epsilon holds; beside the noise, steps "
            f"weigh {share:.2f} times what was planned. Mend the file, or that number, if one of them is wrong"
        )


def _times_the_public(summary: DataSummary, privacy: PrivacySettings) -> float | None:
    """None where that is one by a rounding such as that of `privlora init`, to one digit."""
    share = summary.units / privacy.n
    told = abs(share - 1) > _ROUNDED and to_one_digit(summary.units) != privacy.n
    return share if told else None


def _public(privacy: PrivacySettings) -> str:
    return f"the {privacy.n:g} {privacy.unit}s that group privacy says (public_dataset_size)"


def going_on(folder: RunFolder, settings: Settings) -> str | None:
    """Where a run goes on, in a line; None before its first step and where it takes none."""
    if is_over(folder) or (settings.synthesis is not None and settings.synthesis.source is not None):
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
    return f"going on after {where}, {spent}, by the settings that it began with, whatever its YAML says now"


class Screen(RichObserver):
    """A run of a call, which tells its plan and its records when they are known.

    A terminal shows what `privlora train` shows there. Anything else may be kept and passed on, as notebooks and logs
    of jobs are: it gets public numbers alone, so no seconds, which tell how large batches are, and nothing of the
    records.
    """

    def __init__(self, shown_on: Console) -> None:
        super().__init__(shown_on, None)

    def on_run(self, plan: Plan | None, settings: Settings) -> None:
        """Training is about to begin."""
        self._plan, self._unit = plan, unit_of(settings)
        if "log_every" in settings.run.model_fields_set:
            self._every = settings.run.log_every
        claim = "NOT PRIVATE: no clipping, no noise" if plan is None else f"plan: {plan.describe()}"
        self._console.print(claim)
        folder = RunFolder(Path(settings.run.output))
        begun = OVER if is_over(folder) else going_on(folder, settings)
        if begun is not None:
            self._console.print(begun)

    def on_data(self, summary: DataSummary, settings: Settings) -> None:
        """What the records are, and what is odd about them."""
        tell_records(self._console, summary, settings)

    def on_phase(self, what: str) -> None:
        """On a terminal; elsewhere the last one alone: a log that has times would tell how long reading took."""
        if self._console.is_terminal or what == WRITING:
            super().on_phase(what)

    def on_choice(self, why: str) -> None:
        """What was left to the run: its row, the tokens of a micro-batch."""
        self._console.print(f"chosen: {why}")


@contextmanager
def without_bars() -> Iterator[None]:
    """No bars of transformers and of the hub inside, as they show while a model is loaded; afterwards as before."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    of_models, of_the_hub = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the environment may have the last word on bars of the hub
        logging.disable_progress_bar()  # both kinds
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if of_models:
                logging.enable_progress_bar()
            (enable_progress_bars if of_the_hub else disable_progress_bars)()


@contextmanager
def shown(asked: bool | None, observer: Observer | None) -> Iterator[dict[str, Any]]:
    """Arguments of `train_run` that show the run, unless the caller has an observer or wants nothing shown."""
    if observer is not None or not is_wanted(asked):
        with nullcontext() if is_wanted(asked) else without_bars():
            yield {"observer": observer}
        return
    with Screen(err()) as screen:
        yield {"observer": screen, "on_data": screen.on_data, "on_choice": screen.on_choice}
