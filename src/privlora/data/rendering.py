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
from os.path import commonprefix
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

Message = dict[str, Any]
TOOLS: Final = "tools"
"""The column with descriptions of tools, in chats that have it."""
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

Apply = Callable[[list[Message], bool, Any, Mapping[str, Any]], str]
"""A chat template: messages, whether an answer is asked for, tools, and what else it is given, to a text."""


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """What finds a tokenizer's special tokens in a text; None if it has none. Words and signs count as text."""
    known = tokenizer.added_tokens_decoder.values()
    special = (token.content for token in known if token.special)
    names = {*special, *tokenizer.all_special_tokens}
    marks = (re.escape(name) for name in names if len(name) > 2 and name.strip() and not name.isalnum())
    parts = sorted(marks, key=len, reverse=True)
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
        self.template, self._tokenizer, self._loss_on = template, tokenizer, loss_on
        self.control = control_tokens(tokenizer) if template.split_special_tokens else None
        self._pieces = {form: parse(form) for form in template.forms}
        self.whose = "data.chat_template" if template.chat_template else "the tokenizer's chat template"
        self._applied: dict[bool, Apply] = {}
        self.is_chat = is_chat(template, tokenizer)
        if self.is_chat:
            self.applied(with_tools=False)
            special, known = control_tokens(tokenizer), tokenizer.added_tokens_decoder.values()
            # Some marks of templates are no special tokens.
            marks = [re.escape(token.content) for token in known if "|" in token.content]
            mark = "|".join([*marks, "(?!)" if special is None else special.pattern])
            self._ends, self._follows = re.compile(rf"(?:{mark})\s*\Z"), re.compile(rf"\s*(?:{mark})")

    def applied(self, *, with_tools: bool) -> Apply:
        """The chat template of records with or without tools. Raises ConfigError."""
        if with_tools not in self._applied:
            own, tokenizers = self.template.chat_template, self._tokenizer.chat_template
            text = template_named(own, tokenizers, with_tools=with_tools)
            self._applied[with_tools] = _applied(text, self._tokenizer)
        return self._applied[with_tools]

    def __call__(self, record: Mapping[str, Any], number: int) -> Rendered:
        """The text of a record, which has this number (from 1). Raises DataError."""
        given = self.template
        if given.messages is not None:
            return self._conversation(messages_of(record, number, given.messages), 0, record, number)
        if self.is_chat and given.prompt is not None and given.completion is not None:
            prompt = self._turns(given.prompt, record, number, "user")
            completion = self._turns(given.completion, record, number, "assistant")
            return self._conversation([*prompt, *completion], len(prompt), record, number)
        if given.text is None and any(holds_turns(record, form) for form in given.forms):
            fix = "use an instruction-tuned model, or set data.chat_template; remove data.template"
            raise RecordError(number, "holds messages, and no chat template renders them", fix=fix)
        return self._joined([self._fill(form, record, number) for form in given.forms])

    def asked(self, record: Mapping[str, Any], number: int) -> Rendered:
        """The text with which a model is asked for a record's completion, which need not be there, or for the last
        answer of a chat. Of a record that is all text it is empty."""
        given = self.template
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
        talk = _Talk(messages, record, number, self)
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
        found = [] if self.control is None else [match.span() for match in self.control.finditer(text)]
        if not found:
            return ()
        ends = accumulate(len(piece) for piece, _ in pieces)
        own = [(end - len(piece), end) for (piece, said), end in zip(pieces, ends, strict=True) if not said]
        if text[found[-1][0] :] == self._tokenizer.eos_token:
            own.append(found[-1])
        return tuple((a, b) for a, b in found if not any(first <= a and b <= last for first, last in own))

    def _turns(self, form: str, record: Mapping[str, Any], number: int, role: str) -> list[Message]:
        """Messages that a column holds, or its text as one of them."""
        if holds_turns(record, form):
            return messages_of(record, number, form)
        return [{"role": role, "content": "".join(text for text, _ in self._fill(form, record, number))}]

    def _conversation(
        self, messages: list[Message], first: int, record: Mapping[str, Any], number: int
    ) -> Rendered:
        """The rendered conversation, whose assistant's turns from message ``first`` on are learnt.

        Such a turn starts where the conversation before it, with the generation prompt, ends: that is what the model is
        given when it has to write the turn. Its end is learnt with it.
        """
        talk, last = _Talk(messages, record, number, self), len(messages) - 1
        whole = talk.render(last + 1)
        messages = talk.messages
        learnt = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if first and not learnt:
            what = "the completion has no message of the assistant"
            raise RecordError(number, what, fix="give one of its messages that role")
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
                    raise talk.error(
                        f"does not end message {i + 1} by a token of its own",
                        "write {{ eos_token }} behind each answer in data.chat_template, or divide the record",
                        why="the model would not learn where its answers end",
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
        why = "a record's text would depend on how many records came before"
        what = "the chat template draws at random, or may"
        raise ConfigError(what, why=why, fix="give data.chat_template without it")
    text = f"{{%- macro strftime_now(form='') -%}}{DATE}{{%- endmacro -%}}{text}"
    return lambda messages, ask, tools, told: str(
        tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=ask, chat_template=text, **told
        )
    )


class _Talk:
    """A record's messages on their way through a chat template.

    While they are rendered, other characters stand for the control tokens that they spell, so that what the
    template writes itself can be known from it.
    """

    def __init__(
        self, messages: list[Message], record: Mapping[str, Any], number: int, renderer: Renderer
    ) -> None:
        """Raises DataError for tools, or what else the template is given, that are not of the record alone."""
        self.messages, self.number, self._whose = messages, number, renderer.whose
        self.tools = tools_of(record, number)
        self._own = told_by(record, number)  # what else the record gives the template, and the settings do
        self._told = renderer.template.chat_template_kwargs
        self._template = renderer.applied(with_tools=bool(self.tools))
        objects = _with_objects(messages)
        if objects != messages:
            with suppress(Exception):  # a template that takes arguments as text fails on objects
                self._written(objects)
                self.messages = objects
        (self.messages, self.tools, self._own), self._stand_ins = _guarded(
            [self.messages, self.tools, self._own], renderer.control
        )

    def _written(self, messages: list[Message], ask: bool = False) -> str:
        return self._template(messages, ask, self.tools, {**self._told, **self._own})

    def error(self, what: str, fix: str, why: str | None = None) -> RecordError:
        """What the template does to this record."""
        return RecordError(self.number, f"{self._whose} {what}", why=why, fix=fix)

    def render(self, count: int, ask: bool = False) -> str:
        """The first ``count`` messages, and the beginning of an answer if one is asked for. Raises DataError."""
        fix = "mend the records, or give another template as data.chat_template"
        try:
            return self._written(self.messages[:count], ask)
        except TemplateRefusedError as error:
            why = "a record's text would depend on what was rendered before it, which no clipping bounds"
            fix = "mend it, or give another as data.chat_template"
            raise self.error(str(error.message), fix, why) from None
        except UndefinedError:
            what = "asks for what these messages, or the template itself, do not have"
            raise self.error(what, f"{fix}; data.chat_template_kwargs gives the template more") from None
        except TemplateError:
            usual = "most want an optional system message, then user and assistant in turn"
            raise self.error("refuses these messages", f"{fix}: {usual}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program, and its own words may hold a record
            raise self.error(f"fails on these messages ({type(error).__name__})", fix) from None

    def turn(self, i: int, whole: str) -> Span:
        """Where message ``i``, the assistant's, starts and ends in the whole conversation. Raises DataError."""
        if i == 0:
            fix = 'put what it answers in front (a system or user message), or set loss_on="all"'
            raise RecordError(self.number, "the conversation starts with the assistant", fix=fix)
        # Asked for an answer, some templates open it differently (a thinking tag): what is common counts.
        asked = self.render(i, ask=True)
        start = len(commonprefix([asked, whole]))  # noqa: RUF071 - of characters
        before = asked if start == len(asked) else self.render(i)
        until_turn = whole if i == len(self.messages) - 1 else self.render(i + 1)
        stop = _turn_end(whole, start, until_turn, self.messages[i]["content"].strip())
        if stop is None or (before is not asked and (not whole.startswith(before) or start < len(before))):
            raise self.error(
                f"shows message {i + 1} differently once others follow",
                'make a record of each assistant turn and the messages before it, or set loss_on="all"',
                why="the tokens of the assistant cannot be told from the others",
            )
        return start, stop

    def refuse_lost(self, text: str, messages: Iterable[int], *, with_tools: bool = False) -> None:
        """Raise DataError where the text lacks what one of these messages says, or what a tool is for."""
        packed = _packed(text)
        tools = [each.get("function", each) for each in self.tools or [] if with_tools]
        told = [
            each.get(key) for each in tools if isinstance(each, Mapping) for key in ("name", "description")
        ]
        lost = ["one of the tools"] * _lacks(packed, (said for said in told if isinstance(said, str)))
        silent = (i for i in messages if _lacks(packed, _said(self.messages[i])))
        lost += [f"something that message {i + 1} says" for i in silent]
        if lost:
            raise self.error(
                f"leaves out {lost[-1]}",
                "give one that shows it as data.chat_template (many lack tools), or take it out of the records",
                why="the model would learn an answer without it",
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
    texts = list(_leaves(value))
    found = {match[0] for text in texts for match in control.finditer(text)} if control is not None else set()
    if control is None or not found:
        return value, {}
    held = set(chain.from_iterable(texts))
    free = (sign for sign in map(chr, range(0xF0000, 0xFFFFE)) if sign not in held)
    stand_ins = {name: next(free) * len(name) for name in sorted(found)}
    guarded = _replaced(value, lambda text: control.sub(lambda match: stand_ins[match[0]], text))
    return guarded, {sign: name for name, sign in stand_ins.items()}


def _replaced(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_replaced(key, change): _replaced(part, change) for key, part in value.items()}
    return [_replaced(part, change) for part in value] if isinstance(value, list) else value


def _with_objects(messages: list[Message]) -> list[Message]:
    """With the arguments of calls as objects where they are JSON, which templates would write as JSON once more."""

    def of(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": of(call["function"])}
        with suppress(ValueError, KeyError, TypeError):
            if isinstance(found := json.loads(call["arguments"]), dict):
                return {**call, "arguments": found}
        return call

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


def _lacks(packed: str, texts: Iterable[str]) -> bool:
    """Whether a text without white space lacks one of those that were said, also as JSON writes it."""
    for said in texts:
        as_json = (json.dumps(said, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        if not any(_packed(each) in packed for each in (said, *as_json)):
            return True
    return False


def _turn_end(whole: str, start: int, until_turn: str, content: str) -> int | None:
    """Where the assistant turn that starts at ``start`` ends in ``whole``; None where that is not certain."""
    if whole.startswith(until_turn):
        return len(until_turn)
    # Some templates show an answer differently once others follow (without its thoughts); its closing stays.
    _, found, closing = until_turn.rpartition(content)
    if content and found and whole.startswith(content + closing, start):
        return start + len(content) + len(closing)
    return None


def tools_of(record: Mapping[str, Any], number: int) -> list[Any] | None:
    """Descriptions of tools in the column ``tools``, a list or one in JSON; None where there are none. Raises
    DataError."""
    given = record.get(TOOLS)
    with suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    if not given or given != given:  # NaN, which pandas writes where a record has none
        return None
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        fix = 'write [{"type": "function", "function": {"name": "...", ...}}], or call the column otherwise'
        raise RecordError(number, f"column {TOOLS!r} is no list of tools", fix=fix)
    return [_of_its_own(each, number, f"column {TOOLS!r}") for each in given]


def _of_its_own(value: Any, number: int, whose: str) -> Any:
    """As if the record were the only one of its source. Raises DataError where that is not known."""
    if not is_json(value):
        what = "a value that is neither text, number, truth, list nor mapping"
        why = "tables read texts as dates unless another record's is none, so one record would change another's text"
        fix = "write it as a string, and keep readers from making dates of it"
        raise RecordError(number, f"{whose} has {what}", why=why, fix=fix)
    if is_rounded(value):
        why = "tables round it once another record has a fraction there, so one record would change another's text"
        what = f"{whose} has a number of more than 15 digits"
        raise RecordError(number, what, why=why, fix="write it as a string")
    return canonical(value)


def told_by(record: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """What a record gives its template besides messages, in the column that TRL reads. Raises DataError."""
    told = record.get("chat_template_kwargs")
    if not isinstance(told, Mapping):
        return {}
    if TAKEN & {key for key, value in told.items() if value is not None}:
        fix = "leave in it what the template asks for, as {enable_thinking: false}"
        raise RecordError(number, "column 'chat_template_kwargs' holds what is decided by settings", fix=fix)
    found: Mapping[str, Any] = _of_its_own(told, number, "column 'chat_template_kwargs'")
    return found


def holds_turns(record: Mapping[str, Any], form: str) -> bool:
    """Whether a form is the name of a column, and that holds messages."""
    return "{" not in form and isinstance(field_of(record, form), list)


_SHAREGPT: Final = {"human": "user", "gpt": "assistant"}
"""Speakers of ShareGPT, whose messages have from and value, instead of roles."""


def messages_of(record: Mapping[str, Any], number: int, column: str) -> list[Message]:
    """The messages in ``column`` of record ``number`` (from 1): checked, those of ShareGPT with role and content, and
    written as if each were the only one of its source. Raises DataError."""
    messages = value_of(record, column, number)
    if not isinstance(messages, list) or not messages:
        fix = 'write it as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        raise RecordError(number, f"column {column!r} is not a list of messages", fix=fix)
    said = []
    for i, message in enumerate(map(with_role, messages), start=1):
        whose = f"message {i} of column {column!r}"
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
    """Raise DataError for a message, as `with_role` gives it, that has no speaker or no content. whose: which one."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        fix = f"give it role ({', '.join(ROLES)}) and content, or from ({', '.join(_SHAREGPT)}, or a role) and value"
        raise RecordError(number, f"{whose} has no known role", fix=fix)
    said = message.get("content")
    if said is None and not speaks_by_calls(message):
        fix = 'write it as a string, an empty one ("") if there is nothing to say'
        raise RecordError(number, f"{whose} has no content", fix=fix)
    if said is not None and not isinstance(said, str):
        what = f"has a content that is no text but {article(type(said).__name__)}"
        raise RecordError(number, f"{whose} {what}", fix="write it as one string")
    if said is not None:
        text_of(message, "content", number)


def speaks_by_calls(message: Mapping[str, Any]) -> bool:
    """Whether it says nothing but calls of tools, for which APIs write null as its content, or none."""
    calls = message.get("role") == "assistant" and bool(message.get("tool_calls"))
    return calls and message.get("content") is None
