"""What a call in Python shows of its run while it goes on: on standard error, as `privlora train` does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from privlora.consoles import err, is_wanted
from privlora.training.observer import Observer
from privlora.training.progress import WRITING, RichObserver


class Screen(RichObserver):
    """A run of a call. A terminal shows what `privlora train` shows there. Anything else may be kept and passed on, as
    notebooks and logs of jobs are: it gets no phases, whose times would tell how long reading took."""

    def on_phase(self, what: str) -> None:
        """On a terminal; elsewhere the last one alone."""
        if self._console.is_terminal or what == WRITING:
            super().on_phase(what)


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
def shown(asked: bool | None, observer: Observer | None) -> Iterator[Observer | None]:
    """The caller's observer; without one, one that shows the run, unless the caller wants nothing shown."""
    if observer is not None or not is_wanted(asked):
        with nullcontext() if is_wanted(asked) else without_bars():
            yield observer
        return
    with Screen(err()) as screen:
        yield screen
