"""``privlora methods``, ``privlora report`` and ``privlora demo``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privlora.cli.console import CHECKING, JsonOption, Stopped, emit, loading, out, quiet_libraries, saying
from privlora.config.methods import Choice, known_methods
from privlora.config.names import unknown_method
from privlora.errors import ConfigError
from privlora.training.files import RunFolder, refuse_no_run, refuse_unfinished

if TYPE_CHECKING:
    from privlora.methods import Method


def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[ROW]", help="One method, with what its settings mean.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the table of methods, or one row of it."""
    if name is not None and name not in known_methods():
        raise unknown_method(name)
    with loading():  # no model is needed, and so no transformers
        from privlora.methods import CHOICES, METHODS, RATE_STEPS, VOTE_METHODS, find_row
    if name is not None:
        _one_method(CHOICES[name] if name in CHOICES else find_row(name), as_json)
        return
    rows = [*METHODS.values(), *VOTE_METHODS.values()]
    if as_json:
        emit(
            {
                "methods": [{**asdict(row), "optimizer": row.optimizer} for row in rows],
                "choices": [asdict(choice) for choice in CHOICES.values()],
            }
        )
        return
    for row in rows:
        optimizers = ", ".join([f"{row.optimizer} (default)", *row.optimizers[1:]])
        own, rate = row.optimizer_settings(row.optimizer, {}), row.rate_of(RATE_STEPS)
        settings = ", ".join(f"{name} {value:g}" for name, value in own.items())
        falls = f" in {RATE_STEPS} steps (falls with their root)" if row.rate_falls else ""
        falls += ", relative" if row.relative_rate else ""
        out().print(
            f"{row.name}: {row.summary}\n"
            f"  private     {'yes' if row.private else 'NO'}\n"
            f"  releases    {row.releases}\n"
            f"  space       {row.space}\n"
            f"  optimizers  {optimizers}\n"
            f"  defaults    start {row.init}, learning_rate {rate:g}{falls}, schedule {row.schedule}, "
            f"warm-up {row.warmup_fraction:.0%}, averaging {row.averaging:g}\n"
            f"  settings    {settings}\n"
            f"  reference   {row.reference}",
        )
    for choice in CHOICES.values():
        out().print(
            f"{choice.name}: {choice.summary}\n"
            f"  methods     {', '.join(choice.rows)}\n"
            f"  reference   {choice.reference}",
        )


def _one_method(row: Method | Choice, as_json: bool) -> None:
    """All of one row: for whoever has read its name, and is about to write its settings."""
    from privlora.cli.method_page import facts_of_choice, facts_of_row, lines

    facts = facts_of_choice(row) if isinstance(row, Choice) else facts_of_row(row)
    if as_json:
        emit(facts)
        return
    for line in lines(facts):
        out().print(line)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Write a run's report.html and README.md again, from its own files."""
    folder = RunFolder(run)
    refuse_no_run(folder)  # at once, before seconds of imports
    refuse_unfinished(folder)
    with saying(CHECKING, piped=True):
        from privlora.reporting import rewrite_report

        written = rewrite_report(folder)
    if as_json:
        emit({"report": str(written)})
    else:
        out().print(str(written))


def demo(
    output: Annotated[
        Path | None, typer.Option(help="Where to keep the runs; else a new folder.", show_default=False)
    ] = None,
    federated: Annotated[
        bool, typer.Option("--federated", help="Five clinics: each alone, and all together.")
    ] = False,
    few: Annotated[
        bool, typer.Option("--few", help="A clinic with 120 notes: PRISM against PE-SGD.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Local folder or hub name of your own; the embedded one unless given.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train privately and otherwise on generated records, and show what each model gives away."""
    if federated and few:
        raise ConfigError("--federated and --few are two demos", fix="give one of them")
    if model is not None and (federated or few):
        raise ConfigError("--federated and --few are of the embedded model", fix="leave out --model, or them")
    # Made before stdout is redirected; the demo prints tables and colours.
    console = Console(file=sys.stderr if as_json else sys.stdout)
    with quiet_libraries(told=True), _stopped():
        if federated:
            from privlora.demo.federated import main as together

            result = together(output, console)
        elif few:
            from privlora.demo.few import main as compared

            result = compared(output, console)
        else:
            from privlora.demo.run import main

            result = main(output, console, model)
    if as_json:
        emit(result)


@contextlib.contextmanager
def _stopped() -> Iterator[None]:
    """Inside, an interruption ends in one line; a demo's notes are generated, so that nothing is worth resuming."""
    from privlora.training.loop import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        raise Stopped("the demo is not whole; run it again for all of it") from None
