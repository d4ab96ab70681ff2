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
from itertools import pairwise
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from privlora.cli.processes import refuse_alone
from privlora.cli.stops import Stopped
from privlora.errors import PrivloraError, in_one, named, typed
from privlora.version import __version__

# The base of all usage errors, wherever this typer keeps its click.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


_WITH_OVERRIDES = ("train", "plan", "recommend", "federate", "synthesize", "diagnose", "audit")


class _Command(TyperCommand):
    """Of typer, whose help of arguments and options is escaped for markup that is switched off here."""

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace("\\[", "[")


_WIDE = {"help_option_names": ["-h", "--help"], "max_content_width": 120}

_ROOMS: Final[Mapping[str, str]] = {
    "demo": "information",
    "init": "starting",
    "train": "training",
    "synthesize": "synthesizing",
    "federate": "federating",
    "resume": "resuming",
    "plan": "planning",
    "recommend": "recommending",
    "evaluate": "evaluation",
    "compare": "comparing",
    "diagnose": "diagnosing",
    "audit": "auditing",
    "export": "models",
    "push": "pushing",
    "report": "information",
    "annex": "filing",
    "verify": "filing",
    "calibrate": "accounting",
    "budget": "accounting",
    "methods": "information",
    "settings": "settings_list",
}
"""Command -> where it is, in the order of the help."""

_CALLED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("finetune", "fine-tune", "fine_tune", "sft", "fit", "run", "start"), "train"),
    **dict.fromkeys(("study", "sweep", "benchmark"), "compare"),
    **dict.fromkeys(("eval", "test", "predict"), "evaluate"),
    **dict.fromkeys(("generate", "sample"), "synthesize"),
    **dict.fromkeys(("continue", "restart"), "resume"),
    **dict.fromkeys(("merge", "save", "convert"), "export"),
    **dict.fromkeys(("upload", "publish"), "push"),
    **dict.fromkeys(("epsilon", "noise", "sigma"), "calibrate"),
    **dict.fromkeys(("attack", "canaries"), "audit"),
    **dict.fromkeys(("config", "options"), "settings"),
    "dry-run": "plan",
    "version": "--version",
    "help": "--help",
}
"""What others call a command -> what it is called here."""


def app_of(*names: str) -> typer.Typer:
    """The command line with these commands alone, in their order; with all of them where none is named."""
    app = typer.Typer(
        name="privlora",
        help="Fine-tune language models on private text with low-rank adapters under differential privacy.",
        context_settings=_WIDE,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name in names or _ROOMS:
        command = getattr(import_module(f"privlora.cli.{_ROOMS[name]}"), name)
        app.command(cls=_Command, context_settings=_WIDE)(command)
    app.callback(invoke_without_command=True)(_start)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"privlora {__version__}")
        raise typer.Exit


def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        return
    refuse_alone(context.invoked_subcommand)


def run(argv: Sequence[str] | None) -> int:
    """As `privlora.cli.main`; raises KeyboardInterrupt where nothing was started or changed."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0] in _CALLED:
        return _stop(
            "error", [f"there is no command {given[0]}. Fix: it is `privlora {_CALLED[given[0]]}` here"], 2
        )
    try:
        # A command by itself: what the others import takes longer than many a refusal.
        with typed(word for each in given for word in (each, each.partition("=")[2]) if word):
            code = app_of(*[name for name in given[:1] if name in _ROOMS])(
                args=argv, prog_name="privlora", standalone_mode=False
            )
    except PrivloraError as error:
        # Whoever stopped first says why, and the first process speaks for all.
        from privlora.training.ranks import RankStopped, first_process

        return (
            2 if isinstance(error, RankStopped) and not first_process() else _stop("error", error.lines(), 2)
        )
    except _UsageError as error:
        # Some typers hint twice, of several commands in two ways.
        twice = r"( Did you mean [^?]*\?)(\1| \(Did you mean one of: [^)]*\))"
        usage = re.sub(twice, r"\1", getattr(error, "format_message", error.__str__)())
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "privlora"
        meant = (
            _as_overrides(error, usage, command, given)
            or _of_a_run(command, given)
            or _missing(error, command)
        )
        meant = meant or _out_of_range(error, usage)
        if meant is not None:
            return _stop("error", meant.lines(), 2)
        ending = "" if usage.endswith((".", "?")) else "."
        return _stop("error", [f"{usage}{ending} Fix: see `{command} --help`"], 2)
    except Stopped as stopped:
        from privlora.training.ranks import first_process

        return _stop("interrupted", [str(stopped)], 130) if first_process() else 130
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == 130:  # newer versions of typer turn ctrl-C into this code
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _as_overrides(error: Exception, usage: str, command: str, argv: Sequence[str]) -> PrivloraError | None:
    """What is wrong and how to mend it, where settings are written as options, each of them; None where that is not
    it."""
    context: Any = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    if not isinstance(option, str) or command.rpartition(" ")[2] not in _WITH_OVERRIDES or context is None:
        return None
    own = {name for each in context.command.params for name in each.opts}
    given = [option, *(each.partition("=")[0] for each in argv if _OPTION.match(each))]
    told = {name: _as_override(name, argv) for name in dict.fromkeys(given) if name not in own}
    if not any(told.values()):
        return None
    see = f"see `{command} --help`"
    return in_one(
        [
            mended or PrivloraError(usage if name == option else _no_option(name), fix=see)
            for name, mended in told.items()
        ]
    )


_OPTION: Final = re.compile(r"--[A-Za-z]")


def _no_option(name: str) -> str:
    return f"there is no option {named(name)}"


def _as_override(option: str, argv: Sequence[str]) -> PrivloraError | None:
    """The same of one option."""
    from privlora.config.nearby import slip, whereabouts

    name = option.lstrip("-")
    if name in ("config", "config-file", "config_file", "yaml"):
        return PrivloraError(
            _no_option(option), fix="the file of settings stands by itself, without an option"
        )
    where = whereabouts(name)
    if where is None and "." in name and (meant := slip(name)) is not None:
        where = f"write {meant}"
    if where is None:
        return None
    value = next((each.partition("=")[2] for each in argv if each.startswith(f"{option}=")), None)
    if value is None:
        value = next((after for each, after in pairwise(argv) if each == option), "VALUE")
    shown = value if named(value) == repr(value) else "VALUE"
    mended = re.fullmatch(r"(?:it belongs elsewhere: )?write ([a-z_.0-9]+)(?:=…)?(;.*)?", where)
    if mended is None:
        return PrivloraError(_no_option(option), fix=f"settings are written as group.name=value; {where}")
    return PrivloraError(
        _no_option(option), fix=f"settings have no dashes: write {mended[1]}={shown}{mended[2] or ''}"
    )


def _out_of_range(error: Exception, usage: str) -> PrivloraError | None:
    """What is wrong and how to mend it, where an option takes numbers of a range; None where that is not it."""
    param: Any = getattr(error, "param", None)
    least, most = (getattr(getattr(param, "type", None), name, None) for name in ("min", "max"))
    if type(error).__name__ != "BadParameter" or (least is None and most is None):
        return None
    kind = "a whole number" if isinstance(least if most is None else most, int) else "a number"
    if least is None or most is None:
        words = f"at most {most:g}" if least is None else f"{least:g} or more"
    else:
        words = f"{least:g} to {most:g}"
    return PrivloraError(usage, fix=f"give {kind}, {words}")


def _of_a_run(command: str, argv: Sequence[str]) -> PrivloraError | None:
    """What is wrong and how to mend it, where resume is given a setting; None where that is not it."""
    setting = re.compile(r"([a-z_]+(?:\.[a-z_.0-9]+)?)=")
    places = [found[1] for each in argv for found in [setting.match(each)] if found]
    if command.rpartition(" ")[2] != "resume" or not places:
        return None
    return PrivloraError(
        f"{named(places[0], longest=80)} is given, and settings of a run cannot change: its plan and its ledger were "
        "made with them",
        fix="resume with the folder alone; other settings take a new run, `privlora train CONFIG group.name=value` "
        "with another run.output",
    )


def _missing(error: Exception, command: str) -> PrivloraError | None:
    """What is wrong and how to mend it, where arguments are missing; None where that is not it."""
    missing: Any = getattr(error, "param", None)
    context: Any = getattr(error, "ctx", None)
    if (
        type(error).__name__ != "MissingParameter"
        or getattr(missing, "help", None) is None
        or context is None
    ):
        return None
    needed = [each for each in context.command.params if each.param_type_name == "argument" and each.required]
    if missing not in needed:
        return None
    name = missing.make_metavar(context).strip("[].")
    usage = " ".join([command, *(each.make_metavar(context) for each in needed)])
    return PrivloraError(
        f"{name} is missing: {missing.help.rstrip('.')}", fix=f"write `{usage}`; `{command} --help` says more"
    )


def _stop(kind: str, lines: Sequence[str], code: int) -> int:
    first, *more = lines
    print("\n".join([f"{kind}: {' '.join(first.split())}", *more]), file=sys.stderr)
    return code
