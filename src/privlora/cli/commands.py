"""The commands, and how they end: every error of the user is one line on stderr, with a line below it for each of
several ways to mend it, and exit code 2.

Each command is imported when it is asked for, and torch and transformers once it needs them: help, accounting and most
refusals are quick, and what takes longer says so at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from privlora.cli.console import Stopped, option, refuse_alone
from privlora.errors import ConfigError, PrivloraError, in_one, named, nearest, typed
from privlora.training.stopping import exit_code
from privlora.version import __version__

_WITH_OVERRIDES = ("train", "plan", "synthesize", "audit", "lab diagnose")


_CONTEXT = {"help_option_names": ["-h", "--help"]}

_PANELS: Final[Mapping[str, Mapping[str, str]]] = {
    "Train": {
        "init": "starting",
        "plan": "planning",
        "train": "training",
        "resume": "training",
        "synthesize": "synthesizing",
        "demo": "information",
    },
    "Measure": {"evaluate": "evaluation", "audit": "auditing"},
    "Publish": {"export": "models", "report": "filing", "verify": "filing", "push": "models"},
    "Research": {"lab": "privlora.lab.cli"},
    "Look up": {
        "settings": "information",
        "methods": "information",
        "calibrate": "accounting",
        "budget": "accounting",
    },
}
"""Panel of the help -> command -> where it is."""
_ROOMS: Final = {name: room for panel in _PANELS.values() for name, room in panel.items()}


def app_of(*names: str) -> typer.Typer:
    """The command line with these commands alone; with all of them where none is named."""
    app = typer.Typer(
        name="privlora",
        help="Fine-tune language models on private text with low-rank adapters under differential privacy.",
        context_settings=_CONTEXT,
        pretty_exceptions_enable=False,
    )
    for panel, rooms in _PANELS.items():
        for name in [name for name in rooms if name in (names or rooms)]:
            room = rooms[name] if "." in rooms[name] else f"privlora.cli.{rooms[name]}"
            found = getattr(import_module(room), name)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=name, rich_help_panel=panel, context_settings=_CONTEXT)
            else:
                app.command(rich_help_panel=panel, context_settings=_CONTEXT)(found)
    app.callback(invoke_without_command=True)(_start)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"privlora {__version__}")
        raise typer.Exit


def _start(
    context: typer.Context,
    version: Annotated[
        bool, option("Show the version.", "--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        return
    refuse_alone(context.invoked_subcommand)


def run(argv: Sequence[str] | None, of: Sequence[str] = ()) -> int:
    """As `privlora.cli.main`; raises KeyboardInterrupt where nothing was started or changed."""
    given = sys.argv[1:] if argv is None else list(argv)
    command, known = next(iter(given), "-"), tuple(of) or tuple(_ROOMS)
    if command not in known and not command.startswith("-"):
        error = ConfigError(f"there is no command {named(command)}", fix=nearest(command, known))
        return _stop("error", error.lines(), 2)
    try:
        # A command by itself: what the others import takes longer than many a refusal.
        with typed(word for each in given for word in (each, each.partition("=")[2]) if word):
            code = app_of(*[command] if command in known else of)(
                args=given, prog_name="privlora-verify" if of else "privlora", standalone_mode=False
            )
    except (PrivloraError, Stopped) as error:
        # Whoever stopped first says why, and the first process speaks for all.
        from privlora.training.ranks import RankStopped, first_process

        ended = exit_code() if isinstance(error, Stopped) else 2
        if isinstance(error, Stopped | RankStopped) and not first_process():
            return ended
        if isinstance(error, Stopped):
            return _stop("interrupted", [str(error)], ended)
        return _stop("error", error.lines(), ended)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # Usage errors: their class is public in no typer, their method in all.
        if not hasattr(error, "format_message"):
            raise
        return _stop("error", _misused(error, command, given).lines(), 2)
    if code == 130:  # typer turns ctrl-C into this code
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _misused(error: Any, command: str, argv: Sequence[str]) -> PrivloraError:
    """What is wrong with the words of a command, and how to mend it."""
    if command == "resume" and (places := [found[1] for each in argv if (found := _SETTING.match(each))]):
        return ConfigError(
            f"{named(places[0], longest=80)} is given, and settings of a run cannot change",
            fix="resume with the folder alone; other settings take a new run with another run.output",
        )
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None and command in _ROOMS else "privlora"
    said = ConfigError(error.format_message(), fix=f"see `{path} --help`")
    if path.removeprefix("privlora ") not in _WITH_OVERRIDES or getattr(error, "option_name", None) is None:
        return said
    own = {parameter.name for parameter in context.command.params} - {"config"}
    options = dict.fromkeys(each.partition("=")[0] for each in argv if each.startswith("--"))
    told = [_as_override(each) for each in options if each.strip("-").replace("-", "_") not in own]
    return in_one([mended for mended in told if mended] or [said])


_SETTING: Final = re.compile(r"([a-z_]+(?:\.[a-z_.0-9]+)?)=")


def _as_override(option: str) -> PrivloraError | None:
    """What is wrong with a setting that is written as an option; None for what is called so nowhere."""
    from privlora.config.names import meant

    name = option.strip("-")
    if name in ("config", "config-file", "config_file", "yaml"):
        fix = "the file of settings stands by itself, without an option"
    elif (place := meant(name).place) is not None:
        fix = f"settings have no dashes: write {place}=…"
    else:
        return None
    return ConfigError(f"there is no option {named(option)}", fix=fix)


def _stop(kind: str, lines: Sequence[str], code: int) -> int:
    first, *more = lines
    print("\n".join([f"{kind}: {' '.join(first.split())}", *more]), file=sys.stderr)
    return code
