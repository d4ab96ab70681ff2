"""``privlora synthesize``: a private data set of generated texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from privlora.cli.console import JsonOption, accounting, counted, quiet_libraries
from privlora.cli.training import (
    WRITING,
    ConfigArgument,
    OverridesArgument,
    explained_stops,
    observed,
    show_choice,
    show_data,
    show_texts,
)
from privlora.config import Settings, load_settings
from privlora.errors import ConfigError
from privlora.training.files import RunFolder
from privlora.training.model_names import refuse_unknown_model


def synthesize(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A finished run: ask its adapter, at no further cost.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a private synthetic data set as CONFIG says: texts, a ledger, a card and a report in run.output.

    The texts are the last population of methods whose texts evolve; with others, the trained adapter writes them.
    """
    settings = _publishing(load_settings(config, overrides or ()), source)
    refuse_unknown_model(settings.model.name)
    folder = RunFolder(Path(settings.run.output))
    with quiet_libraries():
        from privlora.api import synthesize_run
        from privlora.rehearsals.choosing import plan_run

        if source is None:
            with accounting(settings.privacy.steps):
                plan = plan_run(settings)
            result = observed(
                folder,
                plan,
                lambda observer: synthesize_run(
                    settings,
                    observer=observer,
                    on_data=show_data,
                    on_choice=show_choice,
                    progress=observer.on_texts,
                ),
            )
        else:
            with explained_stops(folder), counted(WRITING) as progress:
                result = synthesize_run(settings, progress=progress)
    show_texts(folder, result, as_json)


def _publishing(settings: Settings, source: Path | None) -> Settings:
    """The settings of a run whose release is texts. Raises ConfigError."""
    settings.refuse_a_federation()
    if settings.synthesis is None:
        raise ConfigError(
            "nothing says who writes the texts, and in which words",
            fix="add the group synthesis, as `synthesis: {generator: model, preset: clinical-note}`",
        )
    updates: dict[str, Any] = {"publish": True}
    if source is None and settings.synthesis.source is not None:
        raise ConfigError(
            "synthesis.source is for --from alone",
            why="a run that trains has a release of its own",
            fix="remove it, or give the finished run as --from RUN",
        )
    if source is not None:
        updates["source"] = str(source.expanduser().resolve())
    return settings.model_copy(update={"synthesis": settings.synthesis.model_copy(update=updates)})
