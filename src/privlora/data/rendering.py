"""What a record says to the model: one text, which stretches of it are learnt, and where it spells control tokens.

A chat template renders messages, and by default a prompt and its completion as turns of a user and an assistant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jinja2 import TemplateError, UndefinedError

from privlora.data.canonical import canonical, is_json, is_rounded
from privlora.data.records import field_of, text_of, value_of
from privlora.data.sandbox import DATE, TemplateRefusedError, rendering
from privlora.data.templates import TAKEN, no_chat_template, parse, template_named
from privlora.errors import ConfigError, RecordError, article

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from privlora.data.examples import Template

ROLES = ("system", "developer", "user", "assistant", "tool")

Span = tuple[int, int]
"""Where a stretch of a text begins and ends, in characters."""


_MOST: Final = 1000, 2**20  # records, and characters of them, that are handed to the tokenizer at once
_T = TypeVar("_T")


def portions(rendered: Iterable[_T], length: Callable[[_T], int]) -> Iterator[list[_T]]:
    """What is handed to the tokenizer at once: memory is that of a portion, whatever a format adds to each record."""
    part, characters = list[_T](), 0
    for each in rendered:
        part.append(each)
        characters += length(each)
        if len(part) >= _MOST[0] or characters >= _MOST[1]:
            yield part
            part, characters = [], 0
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class Rendered:
    """What is tokenised of a record.

    trained: what is learnt, where not all of it is. spelled: control tokens that the record itself spells, which are
    read as its text. says: whether what is learnt says something. open: whether nothing in the text ends it, so that
    the end-of-sequence token belongs behind it.
    """

    text: str
    trained: tuple[Span, ...] = ()
    spelled: tuple[Span, ...] = ()
    says: bool = True
    open: bool = True


Piece = tuple[str, bool]
"""A text, and whether a record says it; else the settings do."""

Apply = Callable[..., str]
"""A chat template: messages, whether an answer is asked for, tools, and what else it is given, to a text."""


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """What finds a tokenizer's special tokens in a text; None if it has none. Words and signs count as text."""
    known = tokenizer.added_tokens_decoder.values()
    special = (token.content for token in known if token.special)
    names = {
        name for name in (*special, *tokenizer.all_special_tokens) if len(name) > 2 and not name.isalnum()
    }
    parts = sorted((re.escape(name) for name in names if name.strip()), key=len, reverse=True)
    return re.compile("|".join(parts)) if parts else None


def is_chat(template: Template, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether records are rendered by a chat template. Raises ConfigError where one is needed and there is none."""
    there = bool(template.chat_template or tokenizer.chat_template)
    if template.messages is not None or template.template == "chat":
        if not there:
            raise no_chat_template()
        return True
    if template.prompt is None or template.template == "none" or not there:
        return False
    control = control_tokens(tokenizer)
    written = "".join(literal for form in template.forms for literal, _ in parse(form))
    return control is None or control.search(written) is None  # else a chat's marks are in the format itself


class Renderer:
    """From records to texts, by one template and tokenizer; the template is read once."""

    def __init__(self, template: Template, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
        """Raises ConfigError for a chat template that cannot be used, and for one that is needed and not there."""
        self._template, self._tokenizer, self._loss_on = template, tokenizer, loss_on
        self._control = control_tokens(tokenizer) if template.split_special_tokens else None
        self._pieces = {form: parse(form) for form in template.forms}
        self._whose = "data.chat_template" if template.chat_template else "the tokenizer's chat template"
        self._applied: dict[bool, Apply] = {}
        self.is_chat = is_chat(template, tokenizer)
        if self.is_chat:
            self._applied[False] = self._apply(with_tools=False)
            special, known = control_tokens(tokenizer), tokenizer.added_tokens_decoder.values()
            marks = [
                re.escape(token.content) for token in known if "|" in token.content
            ]  # not all are special
            mark = "|".join([*marks, "(?!)" if special is None else special.pattern])
            self._ends, self._follows = re.compile(rf"(?:{mark})\s*\Z"), re.compile(rf"\s*(?:{mark})")

    def __call__(self, record: Mapping[str, Any], number: int) -> Rendered:
        """The text of a record, which has this number (from 1). Raises DataError."""
        given = self._template
        if given.messages is not None:
            return self._conversation(messages_of(record, number, given.messages), 0, record, number)
        if given.prompt is None or given.completion is None:
            return self._joined([self._fill(form, record, number) for form in given.forms])
        if not self.is_chat:
            if any(holds_turns(record, form) for form in given.forms):
                raise RecordError(
                    number,
                    "holds messages, and no chat template renders them",
                    fix="use the tokenizer of an instruction-tuned model, or set data.chat_template; remove "
                    "data.template",
                )
            return self._joined([self._fill(form, record, number) for form in given.forms])
        prompt = self._turns(given.prompt, record, number, "user")
        completion = self._turns(given.completion, record, number, "assistant")
        return self._conversation([*prompt, *completion], len(prompt), record, number)

    def asked(self, record: Mapping[str, Any], number: int) -> Rendered:
        """The text with which a model is asked for a record's completion, which need not be there, or for the last
        answer of a chat. Of a record that is all text it is empty."""
        given = self._template
        if given.messages is not None:
            messages = messages_of(record, number, given.messages)
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            messages = messages[: answers[-1]] if answers else messages
        elif given.prompt is None or given.completion is None:
            return Rendered("")
        elif self.is_chat:
            messages = self._turns(given.prompt, record, number, "user")
        else:
            columns = (field for _, field in self._pieces[given.completion] if field is not None)
            answer = self._fill(given.completion, {**dict.fromkeys(columns, ""), **record}, number)
            whole = self._joined([self._fill(given.prompt, record, number), answer])
            end = whole.trained[0][0]
            return Rendered(whole.text[:end], spelled=tuple(span for span in whole.spelled if span[1] <= end))
        talk = self._talk(messages, record, number)
        return talk.restored(talk.render(len(messages), ask=True))

    def _fill(self, form: str, record: Mapping[str, Any], number: int) -> list[Piece]:
        filled = []
        for literal, field in self._pieces[form]:
            filled.append((literal, False))
            if field is not None:
                filled.append((text_of(record, field, number), True))
        return filled

    def _joined(self, parts: list[list[Piece]]) -> Rendered:
        """Texts one behind the other, of which the last is learnt, with a newline where no white space is between."""
        *before, last = ("".join(text for text, _ in part) for part in parts)
        if before and before[0] and not before[0][-1].isspace() and not last[:1].isspace():
            parts = [[*parts[0], ("\n", False)], parts[1]]
        pieces = list(chain.from_iterable(parts))
        text = "".join(piece for piece, _ in pieces)
        start = len(text) - len(last)
        return Rendered(text, ((start, len(text)),), self._spelled(pieces, text), bool(last.strip()))

    def _spelled(self, pieces: list[Piece], text: str) -> tuple[Span, ...]:
        """Control tokens that the settings did not write, without an end of sequence where the text ends."""
        found = [] if self._control is None else [match.span() for match in self._control.finditer(text)]
        if not found:
            return ()
        ends = accumulate(len(piece) for piece, _ in pieces)
        own = [(end - len(piece), end) for (piece, said), end in zip(pieces, ends, strict=True) if not said]
        if text[found[-1][0] :] == self._tokenizer.eos_token:
            own.append(found[-1])
        return tuple((a, b) for a, b in found if not any(first <= a and b <= last for first, last in own))

    def _turns(self, form: str, record: Mapping[str, Any], number: int, role: str) -> list[dict[str, Any]]:
        """Messages that a column holds, or its text as one of them."""
        if holds_turns(record, form):
            return messages_of(record, number, form)
        return [{"role": role, "content": "".join(text for text, _ in self._fill(form, record, number))}]

    def _apply(self, with_tools: bool) -> Apply:
        text = template_named(
            self._template.chat_template, self._tokenizer.chat_template, with_tools=with_tools
        )
        return _applied(text, self._tokenizer)

    def _talk(self, messages: list[dict[str, Any]], record: Mapping[str, Any], number: int) -> _Talk:
        tools = tools_of(record, number, self._template.tools)
        apply = self._applied.get(bool(tools)) or self._applied.setdefault(True, self._apply(with_tools=True))
        told = self._template.chat_template_kwargs
        return _Talk(
            messages, tools, _told_by(record, number), told, apply, number, self._whose, self._control
        )

    def _conversation(
        self, messages: list[dict[str, Any]], first: int, record: Mapping[str, Any], number: int
    ) -> Rendered:
        """The rendered conversation, whose assistant's turns from message ``first`` on are learnt.

        Such a turn starts where the conversation before it, with the generation prompt, ends: that is what the model is
        given when it has to write the turn. Its end is learnt with it.
        """
        talk, last = self._talk(messages, record, number), len(messages) - 1
        whole = talk.render(last + 1)
        messages = talk.messages
        learnt = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if first and not learnt:
            raise RecordError(
                number, "the completion has no message of the assistant", fix="give it that role"
            )
        others = [i for i in range(last + 1) if messages[i]["role"] != "assistant"]
        talk.refuse_lost(whole, others, with_tools=True)
        is_open = bool(learnt) and learnt[-1] == last and self._ends.search(whole) is None
        if self._loss_on == "all":
            talk.refuse_lost(whole, range(first, last + 1))
            says = any(map(str.strip, chain.from_iterable(map(_said, messages))))
            return talk.restored(whole, [(0, len(whole))], says, is_open)
        spans, end = [], 0
        for i in learnt:
            start, stop = talk.turn(i, whole)
            talk.refuse_lost(whole[end:stop], [i])
            if self._ends.search(whole[start:stop]) is None and not (is_open and i == last):
                follows = self._follows.match(whole, stop)
                if follows is None:
                    raise RecordError(
                        number,
                        f"{self._whose} does not end message {i + 1} by a token of its own",
                        why="the model would not learn where its answers end",
                        fix="write {{ eos_token }} behind an assistant's message in data.chat_template, or make a "
                        "record of each answer",
                    )
                stop = follows.end()
            spans.append((start, stop))
            end = stop
        says = any(said.strip() for i in learnt for said in _said(messages[i]))
        return talk.restored(whole, spans, says, is_open)


def _applied(text: str, tokenizer: PreTrainedTokenizerBase) -> Apply:
    import transformers  # takes seconds, and whoever lists settings needs none of it

    if type(tokenizer).apply_chat_template is transformers.PreTrainedTokenizerBase.apply_chat_template:
        return rendering(text, tokenizer)
    # A tokenizer that renders by code of its own, in no sandbox of ours.
    if re.search(r"\b(random|lipsum)\b", text):
        raise ConfigError(
            "the chat template draws at random, or may",
            why="a record's text would depend on how many records came before",
            fix="give data.chat_template without it",
        )
    text = f"{{%- macro strftime_now(form='') -%}}{DATE}{{%- endmacro -%}}{text}"
    return lambda messages, ask, tools, told: str(
        tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=ask, chat_template=text, **told
        )
    )


@dataclass
class _Talk:
    """A record's messages on their way through a chat template.

    While they are rendered, other characters stand for the control tokens that they spell, so that what the
    template writes itself can be known from it. own: what else the record gives the template. told: what the
    settings tell it.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    own: Mapping[str, Any]
    told: Mapping[str, Any]
    template: Apply
    number: int
    whose: str
    control: re.Pattern[str] | None

    def __post_init__(self) -> None:
        objects = _with_objects(self.messages)
        if objects != self.messages:
            with suppress(Exception):  # a template that takes arguments as text fails on objects
                self._written(objects)
                self.messages = objects
        (self.messages, self.tools, self.own), self._stand_ins = _guarded(
            [self.messages, self.tools, self.own], self.control
        )

    def _written(self, messages: list[dict[str, Any]], ask: bool = False) -> str:
        return self.template(messages, ask, self.tools, {**self.told, **self.own})

    def render(self, count: int, ask: bool = False) -> str:
        """The first ``count`` messages, and the beginning of an answer if one is asked for. Raises DataError."""
        try:
            return self._written(self.messages[:count], ask)
        except TemplateRefusedError as error:
            raise RecordError(
                self.number,
                f"{self.whose} {error.message}",
                why="a record's text would depend on what was rendered before it, and no clipping bounds what a record "
                "changes then",
                fix="mend the template, or give another one as data.chat_template",
            ) from None
        except UndefinedError:
            raise RecordError(
                self.number,
                f"{self.whose} asks for what these messages, or the template itself, do not have",
                fix="mend the template: a message has role and content and what else the record says of it; "
                "data.chat_template_kwargs gives the template more",
            ) from None
        except TemplateError:
            raise RecordError(
                self.number,
                f"{self.whose} refuses these messages",
                fix="mend the records, or give another template as data.chat_template: most want an optional system "
                "message, then user and assistant in turn",
            ) from None
        except Exception as error:  # noqa: BLE001 - a template is a program, and its own words may hold a record
            raise RecordError(
                self.number,
                f"{self.whose} fails on these messages ({type(error).__name__})",
                fix="mend the records, or give another template as data.chat_template",
            ) from None

    def turn(self, i: int, whole: str) -> Span:
        """Where message ``i``, the assistant's, starts and ends in the whole conversation. Raises DataError."""
        if i == 0:
            raise RecordError(
                self.number,
                "the conversation starts with the assistant",
                fix='put what it answers in front (a system or user message), or set loss_on="all"',
            )
        # Asked for an answer, some templates open it differently (a thinking tag): what is common counts.
        asked = self.render(i, ask=True)
        start = _common_prefix(asked, whole)
        before = asked if start == len(asked) else self.render(i)
        until_turn = whole if i == len(self.messages) - 1 else self.render(i + 1)
        stop = _turn_end(whole, start, until_turn, self.messages[i]["content"].strip())
        if stop is None or (before is not asked and (not whole.startswith(before) or start < len(before))):
            raise RecordError(
                self.number,
                f"{self.whose} shows message {i + 1} differently once others follow",
                why="the tokens of the assistant cannot be told from the others",
                fix='make a record of each assistant turn and the messages before it, or set loss_on="all"',
            )
        return start, stop

    def refuse_lost(self, text: str, messages: Iterable[int], *, with_tools: bool = False) -> None:
        """Raise DataError where the text lacks what one of these messages says, or what a tool is for."""
        packed, lost = _packed(text), None
        tools = [each.get("function", each) for each in self.tools or [] if with_tools]
        told = [
            each.get(key) for each in tools if isinstance(each, Mapping) for key in ("name", "description")
        ]
        if any(_lacks(packed, said) for said in told if isinstance(said, str)):
            lost = "one of the tools"
        for i in messages:
            if any(_lacks(packed, said) for said in _said(self.messages[i])):
                lost = f"something that message {i + 1} says"
        if lost is not None:
            raise RecordError(
                self.number,
                f"{self.whose} leaves out {lost}",
                why="the model would learn an answer without it",
                fix="give a template that shows it as data.chat_template (many lack tools or reasoning), or "
                "take it out of the records",
            )

    def restored(
        self, text: str, trained: Iterable[Span] = (), says: bool = True, is_open: bool = True
    ) -> Rendered:
        """With the control tokens that the messages spell, which are as long as what stood for them."""
        if not self._stand_ins:
            return Rendered(text, tuple(trained), (), says, is_open)
        stand_in = re.compile("|".join(self._stand_ins))
        spelled = tuple(match.span() for match in stand_in.finditer(text))
        text = stand_in.sub(lambda match: self._stand_ins[match[0]], text)
        return Rendered(text, tuple(trained), spelled, says, is_open)


def _guarded(value: Any, control: re.Pattern[str] | None) -> tuple[Any, dict[str, str]]:
    """The value with each control token in its strings replaced by as many of a character that stands nowhere in them,
    and what stands for what."""
    texts = list(_strings(value)) if control is not None else []
    found = {match[0] for text in texts for match in control.finditer(text)} if control is not None else set()
    if control is None or not found:
        return value, {}
    held = set(chain.from_iterable(texts))
    free = (sign for sign in map(chr, range(0xF0000, 0xFFFFE)) if sign not in held)
    stand_ins = {name: next(free) * len(name) for name in sorted(found)}
    guarded = _replaced(value, lambda text: control.sub(lambda match: stand_ins[match[0]], text))
    return guarded, {sign: name for name, sign in stand_ins.items()}


def _strings(value: Any) -> Iterator[str]:
    """All strings in it, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_strings, chain.from_iterable(value.items())))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_strings, value))


def _replaced(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_replaced(key, change): _replaced(part, change) for key, part in value.items()}
    return [_replaced(part, change) for part in value] if isinstance(value, list) else value


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the arguments of calls as objects where they are JSON, which templates would write as JSON once more."""

    def read(arguments: Any) -> Any:
        with suppress(ValueError):
            found = json.loads(arguments) if isinstance(arguments, str) else None
            return found if isinstance(found, dict) else arguments
        return arguments

    def of(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": of(call["function"])}
        return {**call, "arguments": read(call["arguments"])} if "arguments" in call else call

    return [
        {**each, "tool_calls": list(map(of, each["tool_calls"]))}
        if isinstance(each.get("tool_calls"), list)
        else each
        for each in messages
    ]


def _said(message: Mapping[str, Any]) -> Iterator[str]:
    """What a turn says: its content, its reasoning, and names and values of calls of tools."""
    yield message["content"]
    yield from (message[key] for key in _REASONING if isinstance(message.get(key), str))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if isinstance(function, Mapping):
            yield from _leaves([function.get("name"), function.get("arguments")])


_REASONING: Final = ("reasoning_content", "reasoning", "thinking")


def _leaves(value: Any) -> Iterator[str]:
    """Strings and numbers in it, keys included."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_leaves, chain.from_iterable(value.items())))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_leaves, value))
    elif isinstance(value, str):
        yield value


def _packed(text: str) -> str:
    """Without white space, which templates trim."""
    return "".join(text.split())


def _lacks(packed: str, said: str) -> bool:
    """Whether a text without white space lacks what was said, also as JSON writes it."""
    if _packed(said) in packed:
        return False
    return all(_packed(json.dumps(said, ensure_ascii=ascii)[1:-1]) not in packed for ascii in (False, True))


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


def tools_of(record: Mapping[str, Any], number: int, column: str | None) -> list[Any] | None:
    """Descriptions of tools in ``column``, a list or one in JSON; None where there are none. Raises DataError."""
    given = record.get(column) if column is not None else None
    with suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    if not given or given != given:  # NaN, which pandas writes where a record has none
        return None
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise RecordError(
            number,
            f"column {column!r} is no list of tools",
            fix='write it as [{"type": "function", "function": {"name": "...", ...}}], or set data.tools to another '
            "column, or to null",
        )
    return [_of_its_own(each, number, f"column {column!r}") for each in given]


def _of_its_own(value: Any, number: int, whose: str) -> Any:
    """As if the record were the only one of its source. Raises DataError where that is not known."""
    if not is_json(value):
        raise RecordError(
            number,
            f"{whose} has a value that is neither text, number, truth, list nor mapping",
            why="tables read texts as dates unless another record's is none, so one record would change another's text",
            fix="write it as a string, and keep readers from making dates of it",
        )
    if is_rounded(value):
        raise RecordError(
            number,
            f"{whose} has a number of more than 15 digits",
            why="tables round such a number once another record has a fraction there, so one record would change "
            "another's text",
            fix="write it as a string",
        )
    return canonical(value)


def _told_by(record: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """What a record gives its template besides messages, in the column that TRL reads. Raises DataError."""
    told = record.get("chat_template_kwargs")
    if not isinstance(told, Mapping):
        return {}
    if TAKEN & {key for key, value in told.items() if value is not None}:
        raise RecordError(
            number,
            "column 'chat_template_kwargs' holds what is decided by settings",
            fix="leave in it what the template asks for, as {enable_thinking: false}",
        )
    found: Mapping[str, Any] = _of_its_own(told, number, "column 'chat_template_kwargs'")
    return found


def holds_turns(record: Mapping[str, Any], form: str) -> bool:
    """Whether a form is the name of a column, and that holds messages."""
    return "{" not in form and isinstance(field_of(record, form), list)


_SHAREGPT: Final = {"human": "user", "gpt": "assistant"}
"""Speakers of ShareGPT, whose messages have from and value, instead of roles."""


def messages_of(record: Mapping[str, Any], number: int, column: str) -> list[dict[str, Any]]:
    """The messages in ``column`` of record ``number`` (from 1): checked, those of ShareGPT with role and content, and
    written as if each were the only one of its source. Raises DataError."""
    messages = value_of(record, column, number)
    if not isinstance(messages, list) or not messages:
        raise RecordError(
            number,
            f"column {column!r} is not a list of messages",
            fix='write it as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    messages = [with_role(message) for message in messages]
    said = []
    for i, message in enumerate(messages):
        whose = f"message {i + 1} of column {column!r}"
        _refuse_unspoken(message, number, whose)
        said.append(_of_its_own({**message, "content": message.get("content") or ""}, number, whose))
    return said


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
    whose: of which one it is said."""
    role, speaker = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "from"))
    speaks = role is None and isinstance(speaker, str) and _SHAREGPT.get(speaker, speaker) in ROLES
    said = "value" if speaks else "content"
    wrong, fix = "", ""
    if (role not in ROLES and not speaks) or (speaks and message.get("value") is not None):
        wrong, fix = "has no known role", f"give it a role ({', '.join(ROLES)}) and a content"
        fix += f", or from ({', '.join(_SHAREGPT)}, or a role) and value"
    elif not speaks and speaks_by_calls(message):
        return
    elif message.get(said) is None:
        wrong, fix = f"has no {said}", 'write it as a string, an empty one ("") if there is nothing to say'
    elif not isinstance(message[said], str):
        wrong, fix = (
            f"has a {said} that is no text but {article(type(message[said]).__name__)}",
            "write it as one string",
        )
    if wrong:
        raise RecordError(number, f"{whose} {wrong}", fix=fix)
    text_of(message, said, number)


def speaks_by_calls(message: Mapping[str, Any]) -> bool:
    """Whether it says nothing but calls of tools, for which APIs write null as its content, or none."""
    calls = message.get("role") == "assistant" and bool(message.get("tool_calls"))
    return calls and message.get("content") is None
