"""``privlora resume``, of runs and of federations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privlora.cli import federating, training
from privlora.cli.console import JsonOption
from privlora.training.files import RunFolder


def resume(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of the interrupted run.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Continue an interrupted run or federation with fresh noise; what was charged stays charged."""
    folder = RunFolder(run)
    settings = training.load_run_settings(folder)
    room = training if settings.federation is None else federating
    room.go_on(folder, settings, as_json)
