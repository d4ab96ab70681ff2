"""``privlora resume``, of runs and of federations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privlora.cli import federating, training
from privlora.cli.console import JsonOption, processes, refuse_alone
from privlora.errors import ConfigError
from privlora.training.files import RunFolder


def resume(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of the interrupted run.", show_default=False)
    ],
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Where the same records lie now.", show_default=False),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option("--evaluation", metavar="FILE", help="Where the public ones lie.", show_default=False),
    ] = None,
    profile: training.ProfileOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue an interrupted run or federation with fresh noise; what was charged stays charged."""
    folder = RunFolder(run)
    moved = {
        name: path for name, path in {"records": data, "evaluation": evaluation}.items() if path is not None
    }
    with processes() as ranks:
        settings = ranks.same(lambda: training.load_run_settings(folder))
        if settings.federation is not None:
            refuse_alone("resume of a federation")
            if moved:
                raise ConfigError(
                    "a federation's records are its clients'",
                    fix="leave --data and --evaluation out, and resume in the folder in which it was started",
                )
            if profile:
                raise ConfigError(
                    "a federation's steps are its clients', so there is nothing to profile here",
                    fix="leave --profile out",
                )
        if not ranks.first:
            training.go_on_beside(folder, moved)
        elif settings.federation is None:
            training.go_on(folder, settings, as_json, moved, profile=profile)
        else:
            federating.go_on(folder, settings, as_json)
