"""Where output goes: results to stdout, progress to stderr; with --json one JSON object alone on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import ERROR, getLogger
from pathlib import Path
from typing import Annotated, Any

import typer

from privlora.consoles import err, loading, out, saying
from privlora.errors import ConfigError
from privlora.pages.numbers import finite
from privlora.training.files import RunFolder, refuse_no_run, refuse_unfinished
from privlora.training.ranks import Ranks, refuse_several, several_processes


class Stopped(Exception):
    """The user interrupted a run; the message says how to go on."""


def finished_run(run: Path) -> RunFolder:
    """A folder. Raises RunError for what is no run, or one that goes on."""
    folder = RunFolder(run)
    refuse_no_run(folder)
    refuse_unfinished(folder)
    return folder


@contextmanager
def stoppable(words: str) -> Iterator[None]:
    """Inside, an interruption ends in ``words``, which say how to go on."""
    from privlora.training.loop import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        raise Stopped(words) from None


_TOGETHER = ("train", "resume")


def refuse_alone(command: str) -> None:
    """Raise ConfigError where a launcher started several processes of a command that runs in one."""
    if command not in _TOGETHER:
        refuse_several(f"`privlora {command}`")


@contextmanager
def processes() -> Iterator[Ranks]:
    """Those that this one was started with; torch is imported only where there are several."""
    if not several_processes():
        yield Ranks()
        return
    from privlora.training.torch_ranks import joined

    with joined() as ranks:
        yield ranks


def option(help: str, *names: str, **more: Any) -> Any:
    """A command's option whose default is said in its help, if at all. names: unless it is called as its parameter."""
    return typer.Option(*names, help=help, show_default=False, **more)


def argument(metavar: str, help: str) -> Any:
    """A command's argument."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def refuse_given(options: Mapping[str, object], words: str, fix: str | Sequence[str]) -> None:
    """Raise ConfigError where options are given that do not go with the rest. options: by name; None is not given."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"{' and '.join(given)} {words}", fix=fix)


JsonOption = Annotated[bool, option("Print one JSON object on stdout, nothing else.", "--json")]

CHECKING = "checking every file of the release against its report and ledger"
"""What is shown while a release is looked at, which takes seconds."""

_MANY = 5000  # steps whose noise may take more than a few seconds to find


def accounting(steps: int) -> contextlib.AbstractContextManager[None]:
    """Says that the noise and the cost of so many steps are being computed: on a terminal, and elsewhere of many."""
    return saying(f"finding the noise of {steps} steps", piped=steps >= _MANY)


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how far long work is, by calls with (done, all): a bar on a terminal, a line for each tenth elsewhere."""
    with phased(what) as tell:
        yield lambda done, total: tell(what, done, total)


@contextlib.contextmanager
def phased(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """``counted`` for work of several phases, by calls with (phase, done, all). what: the first one."""
    console = err()
    if console.is_terminal:
        from rich.progress import Progress

        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda phase, done, total: bar.update(task, description=phase, completed=done, total=total)
        return
    console.print(what)
    shown = what, 0

    def tell(phase: str, done: int, total: int) -> None:
        nonlocal shown
        if phase != shown[0]:
            shown = phase, 0
            console.print(phase)
        if (tenth := 10 * done // total) > shown[1]:
            shown = phase, tenth
            console.print(f"{phase}: {done} of {total}")

    yield tell


def emit(content: dict[str, Any]) -> None:
    """Print one JSON object; numbers that JSON does not have (infinity, NaN) become null."""
    print(json.dumps(finite(content), allow_nan=False))


def show(content: dict[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """The result of a command: all of it as JSON, or its lines."""
    if as_json:
        emit(content)
        return
    for line in lines:
        out().print(line)


def named(rows: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Lines of pairs (name, what it is); without those of which there is nothing."""
    return (f"{name + ':':<10}{what}" for name, what in rows if what is not None)


@contextlib.contextmanager
def quiet_libraries(*, told: bool = False) -> Iterator[None]:
    """No progress bars, advice or warnings of model libraries inside; what they still print goes to stderr.

    Imports transformers, so enter it only when a model is needed. told: say so, as a line of logs and pipes, too.
    """
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    # Forked workers of a tokenizer would warn at every start.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        with loading(piped=True) if told else contextlib.nullcontext():
            from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        getLogger("absl").setLevel(ERROR)  # the RDP accountant tells of every order that it leaves out
        yield
