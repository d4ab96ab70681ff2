"""What of a record is tokenised: the texts that its template makes of it, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, UndefinedError

from privlora.data.canonical import canonical, is_rounded
from privlora.data.jinja import refuse_chance, without_clock
from privlora.data.records import text_of, value_of
from privlora.data.sandbox import TemplateRefusedError, rendering
from privlora.data.templates import parse
from privlora.errors import DataError, article

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from privlora.data.examples import Template

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of text that is tokenised on its own, so that where the loss starts and ends is exact."""

    text: str
    trained: bool


Render = Callable[[Mapping[str, Any], int], list[Segment]]
"""The segments of a record, which has this number (from 1). Raises DataError."""

Apply = Callable[[list[dict[str, Any]], bool], str]


def renderer(template: Template, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> Render:
    """How records are rendered; the template is read once."""
    if template.messages is not None:
        refuse_chance(template.chat_template or tokenizer.chat_template)
        text = without_clock(template.chat_template or tokenizer.get_chat_template())
        apply = _applied(text, tokenizer, template.chat_template_kwargs)
        column, whose = template.messages, _TOKENIZERS if template.chat_template is None else _OWN
        return lambda record, number: _render_chat(record, number, column, apply, loss_on, whose)
    given = [(template.text, True), (template.prompt, False), (template.completion, True)]
    parts = [(parse(value), trained) for value, trained in given if value is not None]
    return lambda record, number: [
        Segment(_fill(pieces, record, number), trained) for pieces, trained in parts
    ]


def _applied(text: str, tokenizer: PreTrainedTokenizerBase, told: Mapping[str, Any]) -> Apply:
    """A chat template, to messages and whether an answer is asked for."""
    import transformers  # takes seconds, and whoever lists settings needs none of it

    if type(tokenizer).apply_chat_template is transformers.PreTrainedTokenizerBase.apply_chat_template:
        return rendering(text, tokenizer, told)
    # A tokenizer that renders by code of its own.
    return lambda messages, ask: str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask, chat_template=text, **told
        )
    )


def _fill(pieces: list[tuple[str, str | None]], record: Mapping[str, Any], number: int) -> str:
    return "".join(
        literal + (text_of(record, field, number) if field is not None else "") for literal, field in pieces
    )


_TOKENIZERS: Final = "the tokenizer's chat template"
_OWN: Final = "data.chat_template"
_MEND: Final = {
    _TOKENIZERS: "mend the records, or give another template as data.chat_template",
    _OWN: "mend it, or the records",
}
"""Of which template an error speaks -> what to do where it fails."""


def _render_chat(
    record: Mapping[str, Any], number: int, column: str, apply: Apply, loss_on: str, whose: str
) -> list[Segment]:
    """The rendered conversation, cut where the loss starts and ends. apply: the chat template, to messages. whose: as
    `_MEND` has it.

    An assistant turn starts where the conversation before it, with the generation prompt, ends: that is what
    the model is given when it has to write the turn.
    """
    messages = messages_of(record, number, column)

    def render(count: int, add_generation_prompt: bool = False) -> str:
        try:
            return apply(messages[:count], add_generation_prompt)
        except TemplateRefusedError as error:
            raise DataError(
                f"record {number}: {whose} {error.message}",
                why="a record's text would depend on what was rendered before it, and no clipping bounds what a record "
                "changes then",
                fix="mend the template, or give another one as data.chat_template",
            ) from None
        except UndefinedError:
            raise DataError(
                f"record {number}: {whose} asks for what these messages, or the template itself, do not have",
                fix="mend the template: a message has role and content and what else the record says of it; what the "
                "template is told beside is data.chat_template_kwargs",
            ) from None
        except TemplateError:
            raise DataError(
                f"record {number}: {whose} refuses these messages",
                fix=f"{_MEND[whose]}: most want an optional system message, then user and assistant in turn",
            ) from None
        except Exception as error:  # noqa: BLE001 - a template is a program, and its own words may hold a record
            raise DataError(
                f"record {number}: {whose} fails on these messages ({type(error).__name__})",
                fix=_MEND[whose],
            ) from None

    whole = render(len(messages))
    if loss_on == "all":
        return [Segment(whole, trained=True)]
    segments, end = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise DataError(
                f"record {number}: the conversation starts with the assistant",
                fix='put what it answers in front (a system or user message), or set loss_on="all"',
            )
        before = render(i)
        # Asked for an answer, some templates open it differently (a thinking tag): what is common counts.
        start = _common_prefix(render(i, add_generation_prompt=True), whole)
        turn_end = _turn_end(whole, start, render(i + 1), message["content"].strip())
        if not whole.startswith(before) or start < len(before) or turn_end is None:
            raise DataError(
                f"record {number}: {whose} shows message {i + 1} differently once others follow",
                why="the tokens of the assistant cannot be told from the others",
                fix='make a record of each assistant turn and the messages before it, or set loss_on="all"',
            )
        segments += [Segment(whole[end:start], trained=False), Segment(whole[start:turn_end], trained=True)]
        end = turn_end
    return [*segments, Segment(whole[end:], trained=False)]


def _common_prefix(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    differing = (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def _turn_end(whole: str, start: int, until_turn: str, content: str) -> int | None:
    """Where the assistant turn that starts at ``start`` ends in ``whole``; None where that is not certain."""
    if whole.startswith(until_turn):
        return len(until_turn)
    # Some templates show an answer differently once others follow (without its thoughts); its closing stays.
    _, found, closing = until_turn.rpartition(content)
    if content and found and whole.startswith(content + closing, start):
        return start + len(content) + len(closing)
    return None


_SHAREGPT: Final = {"human": "user", "gpt": "assistant"}
"""Speakers of ShareGPT, whose messages have from and value, in the place of roles."""


def messages_of(record: Mapping[str, Any], number: int, column: str) -> list[dict[str, Any]]:
    """The messages in ``column`` of record ``number`` (from 1): checked, those of ShareGPT with role and content, and
    written as if each were the only one of its source. Raises DataError."""
    messages = value_of(record, column, number)
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"record {number}: column {column!r} is not a list of messages",
            fix='write it as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    messages = [with_role(message) for message in messages]
    for i, message in enumerate(messages):
        _refuse_unspoken(message, number, f"message {i + 1} of column {column!r}")
        if is_rounded(message):
            raise DataError(
                f"record {number}: message {i + 1} of column {column!r} has a number of more than 15 digits",
                why="tables round such a number once another record has a fraction there, so one record would change "
                "another's text",
                fix="write it as a string",
            )
    return [canonical({**message, "content": message.get("content") or ""}) for message in messages]


def with_role(message: Any) -> Any:
    """A message of ShareGPT as others are written; any other as it is. Keys with null are as good as none, since tables
    add them."""
    if not isinstance(message, Mapping):
        return message
    speaker, said, role, content = (message.get(key) for key in ("from", "value", "role", "content"))
    if not isinstance(speaker, str) or said is None or role is not None or content is not None:
        return message
    return {**message, "from": None, "value": None, "role": _SHAREGPT.get(speaker, speaker), "content": said}


def _refuse_unspoken(message: Any, number: int, whose: str) -> None:
    """Raise DataError for a message, with a role where it has a known one, of which nobody speaks or nothing is said.
    whose: of which one it is told."""
    role, speaker = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "from"))
    speaks = role is None and isinstance(speaker, str) and _SHAREGPT.get(speaker, speaker) in ROLES
    said = "value" if speaks else "content"
    if (role not in ROLES and not speaks) or (speaks and message.get("value") is not None):
        raise DataError(
            f"record {number}: {whose} has no known role",
            fix=f"give it a role and a content; the roles are {', '.join(ROLES)}, and of messages with from and "
            f"value {', '.join(_SHAREGPT)}, too",
        )
    if not speaks and speaks_by_calls(message):
        return
    if message.get(said) is None:
        raise DataError(
            f"record {number}: {whose} has no {said}",
            fix='write it as a string, an empty one ("") if there is nothing to say',
        )
    if not isinstance(message[said], str):
        raise DataError(
            f"record {number}: {whose} has a {said} that is no text but {article(type(message[said]).__name__)}",
            fix="write it as one string",
        )
    text_of(message, said, number)


def speaks_by_calls(message: Mapping[str, Any]) -> bool:
    """Whether it says nothing but calls of tools, for which APIs write null as its content, or none."""
    calls = message.get("role") == "assistant" and bool(message.get("tool_calls"))
    return calls and message.get("content") is None
