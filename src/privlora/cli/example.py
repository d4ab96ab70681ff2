"""What `init` and `plan` show of how a record is read: an invented one, with what is learnt marked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from privlora.config import DataSettings
from privlora.data.examples import IGNORED, Template, build_examples
from privlora.data.rendering import Renderer, is_chat
from privlora.data.templates import fields_of
from privlora.errors import DataError, RecordError

_ASKED: Final = "What is two and two?"
_ANSWER: Final = "It is four."
_LONGEST: Final = 10_000  # tokens, more than an invented example has


def example_rows(data: DataSettings, tokenizer: Any) -> list[tuple[str, str]]:
    """Rows of a table; none for labels and for a benchmark, whose form is its own. Raises ConfigError."""
    if data.task is not None or data.label is not None:
        return []
    template = Template(**data.columns)
    try:
        text = _invented_example(template, tokenizer, data.loss_on)
    except DataError as error:  # the template refuses a question and its answer, or drops them
        return [
            ("example", f"none can be shown: {error.bare if isinstance(error, RecordError) else error.what}")
        ]
    rows = [
        (
            "example",
            f"{json.dumps(text, ensure_ascii=False)[1:-1]} (invented example; only the text in « » is trained on)",
        )
    ]
    system = _own_system_prompt(template, tokenizer)
    if system is not None:
        rows.append(
            (
                "system",
                f"added by the chat template where a chat has none, also in use: {json.dumps(system)}",
            )
        )
    return rows


def _invented_example(template: Template, tokenizer: Any, loss_on: Literal["all", "completion"]) -> str:
    """The text that is trained on for an invented record, in which « and » stand around what is learnt.

    Raises what `build_examples` does.
    """
    record: dict[str, Any] = dict.fromkeys(fields_of([template.text, template.completion]), _ANSWER)
    record |= dict.fromkeys(fields_of([template.prompt]), _ASKED)
    if template.messages is not None:
        record[template.messages] = _talk(user=_ASKED, assistant=_ANSWER)
    (example,) = build_examples([record], template, tokenizer, max_length=_LONGEST, loss_on=loss_on)
    learnt = example.labels != IGNORED
    turns = [0, *(np.flatnonzero(np.diff(learnt)) + 1).tolist(), len(learnt)]
    shown = [tokenizer.decode(example.input_ids[:end].tolist()) for end in turns]
    parts = [after[len(before) :] for before, after in pairwise(shown)]
    return "".join(f"«{part}»" if learnt[at] else part for at, part in zip(turns, parts, strict=False))


def _own_system_prompt(template: Template, tokenizer: Any) -> str | None:
    """What a chat template says to the model where a record has no system message; None for nothing."""
    if not is_chat(template, tokenizer):
        return None
    alone = replace(template, text=None, prompt=None, completion=None, messages="messages", template="auto")
    render, mark = Renderer(alone, tokenizer, "all"), "SYSTEM"
    try:
        with_mark, without = (
            render.asked({"messages": _talk(**said)}, 1).text
            for said in ({"system": mark, "user": _ASKED}, {"user": _ASKED})
        )
    except DataError:  # a template that knows no system message
        return None
    before, _, after = with_mark.partition(mark)
    if not (before and without.startswith(before) and without.endswith(after)):
        return None
    return without[len(before) : len(without) - len(after)].strip() or None


def _talk(**said: str) -> list[Mapping[str, str]]:
    return [{"role": role, "content": content} for role, content in said.items()]
