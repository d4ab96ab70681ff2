"""``privlora lab``: the commands of the lab, which the program's command line loads when they are asked for."""

from __future__ import annotations

import typer

from privlora.lab.cli.comparing import compare
from privlora.lab.cli.diagnosing import diagnose

_HELP = {"help_option_names": ["-h", "--help"]}

lab = typer.Typer(help="Research: methods compared at equal privacy, and the diagnostics of PRISM's paper.")
lab.command(context_settings=_HELP)(compare)
lab.command(context_settings=_HELP)(diagnose)


@lab.callback(invoke_without_command=True)
def _start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
