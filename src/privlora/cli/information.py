"""``privlora methods``, ``privlora settings`` and ``privlora demo``."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Annotated

from rich.console import Console

from privlora.cli.console import JsonOption, argument, emit, option, quiet_libraries, show, stoppable
from privlora.config.methods import known_methods
from privlora.config.names import unknown_method
from privlora.consoles import loading
from privlora.errors import ConfigError, named


def methods(
    name: Annotated[str | None, argument("[METHOD]", "One method, with what its settings mean.")] = None,
    rules: Annotated[bool, option("Instead: the rules of federations.", "--rules")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the table of methods, one of them, or the rules of federations."""
    if rules:
        if name is not None:
            raise ConfigError("--rules is a table of its own", fix=f"leave out {named(name)}, or --rules")
        with loading():
            from privlora.cli.method_page import show_rules
        show_rules(as_json)
        return
    if name is not None and name not in known_methods():
        raise unknown_method(name)
    with loading():  # no model is needed, and so no transformers
        from privlora.cli.method_page import facts_of_row, lines
        from privlora.methods import METHODS, VOTE_METHODS, find_row
    if name is not None:
        facts = facts_of_row(find_row(name))
        show(facts, lines(facts), as_json)
        return
    rows = [*METHODS.values(), *VOTE_METHODS.values()]
    content = {"methods": [{**asdict(row), "optimizer": row.optimizer} for row in rows]}
    summaries = {each.name: each.summary for each in rows}
    wide = max(map(len, summaries))
    listed = [f"{name:<{wide}}  {summary}" for name, summary in summaries.items()]
    show(content, [*listed, "", "`privlora methods NAME` shows what may be set of one"], as_json)


def settings(
    place: Annotated[
        list[str] | None,
        argument("[GROUP[.NAME] | WORD...]", "A group, a setting, or words of what it means."),
    ] = None,
    schema: Annotated[bool, option("Print the JSON Schema of a run's YAML.", "--schema")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting of a run's YAML: what it may be, its default, and what it means."""
    # Not at the top: the sources of the groups are parsed, which no other command needs.
    from privlora.config.reference import find_settings, groups, purpose

    if schema:
        if place:
            raise ConfigError("the schema is of a whole file", fix="leave out the group, or --schema")
        from privlora.config.schema import written

        print(written(), end="")
        return
    found = find_settings(" ".join(place) if place else None)
    lines, kinds, indent = list[str](), groups(), " " * 6
    for group, some in groupby(found, key=lambda each: each.place.partition(".")[0]):
        lines.append(f"{chr(10) if lines else ''}{group}: {purpose(kinds[group])}")
        for each in some:
            default = "required" if each.default is None else f"default {each.default}"
            lines.append(f"  {each.place}  ({each.kind}; {default})")
            lines.append(textwrap.fill(each.meaning, 100, initial_indent=indent, subsequent_indent=indent))
    show({"settings": [each.to_dict() for each in found]}, lines, as_json)


def demo(
    output: Annotated[Path | None, option("Where to keep the runs; else a new folder.")] = None,
    federated: Annotated[bool, option("Five clinics: each alone, and all together.", "--federated")] = False,
    few: Annotated[bool, option("A clinic with 120 notes: PRISM against PE-SGD.", "--few")] = False,
    model: Annotated[str | None, option("A folder or hub name; else the embedded one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train privately and otherwise on generated records, and show what each model gives away."""
    if federated and few:
        raise ConfigError("--federated and --few are two demos", fix="give one of them")
    if model is not None and (federated or few):
        raise ConfigError("--federated and --few are of the embedded model", fix="leave out --model, or them")
    # Made before stdout is redirected; the demo prints tables and colours.
    console = Console(file=sys.stderr if as_json else sys.stdout)
    # A demo's notes are generated, so that nothing is worth resuming.
    with quiet_libraries(told=True), stoppable("the demo is not whole; run it again for all of it"):
        script = import_module(f"privlora.demo.{'federated' if federated else 'few' if few else 'run'}")
        result = script.main(output, console, *([] if federated or few else [model]))
    if as_json:
        emit(result)
