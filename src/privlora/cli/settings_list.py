"""``privlora settings``: every setting with its kind, default and meaning."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from privlora.cli.console import JsonOption, emit, out
from privlora.errors import ConfigError

_WIDTH = 100


def settings(
    place: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[GROUP[.NAME] | WORD...]",
            help="A group, one setting, or words of what it means; else all.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a run's file, for editors.")
    ] = False,
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
    if as_json:
        emit({"settings": [each.to_dict() for each in found]})
        return
    kinds = groups()
    last = None
    for each in found:
        group = each.place.partition(".")[0]
        if group != last:
            out().print(f"{'' if last is None else chr(10)}{group}: {purpose(kinds[group])}")
            last = group
        default = "required" if each.default is None else f"default {each.default}"
        out().print(f"  {each.place}  ({each.kind}; {default})")
        out().print(textwrap.fill(each.meaning, _WIDTH, initial_indent="      ", subsequent_indent="      "))
