"""Chat templates as programs: a text must be a function of its own record and of the settings, and of nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jinja2 import TemplateSyntaxError, nodes

from privlora.data.sandbox import Environment
from privlora.errors import ConfigError

DATE: Final = "26 Jul 2024"
"""What `strftime_now` gives, whatever the day and the format: no clock reaches a text. Llama's own say it
where there is no clock."""


def parse(text: str) -> nodes.Template:
    """The syntax tree of what is rendered. Raises jinja2's TemplateSyntaxError."""
    return Environment().parse(text)


def draws(text: str) -> str | None:
    """The name of what draws at random in a template, if anything does."""
    tree = parse(text)
    filters = {node.name for node in tree.find_all(nodes.Filter)}
    for node in tree.find_all(nodes.Filter):
        if node.name != "map":
            continue
        # map calls the filter that its first argument names, which is only known here where it is written out.
        if node.dyn_args is not None or not all(isinstance(one, nodes.Const) for one in node.args[:1]):
            return "map with a filter that is not written out"
        filters |= {one.value for one in node.args[:1] if isinstance(one, nodes.Const)}
    names = {node.name for node in tree.find_all(nodes.Name)}
    return next(iter(sorted((filters & {"random"}) | (names & {"lipsum"}))), None)


def refuse_chance(template: Any) -> None:
    """Raise ConfigError for a chat template that draws at random; templates by name are looked at one by one."""
    for text in template.values() if isinstance(template, Mapping) else [template]:
        try:
            found = draws(text)
        except (TemplateSyntaxError, TypeError, AttributeError):
            continue  # whoever renders it says so
        if found is not None:
            raise ConfigError(
                f"the chat template uses {found}, which draws at random, or may",
                why="what it draws for a record depends on how many records came before, so that no clipping bounds "
                "what a record changes",
                fix="give data.chat_template without it",
            )


def without_clock(text: str) -> str:
    """The template with a date that stands still, if it asks for today's."""
    if "strftime_now" not in text:
        return text
    return f"{{%- macro strftime_now(form='') -%}}{DATE}{{%- endmacro -%}}{text}"
