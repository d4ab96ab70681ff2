"""Turning records into token ids and labels: plain text, prompt and completion, or chat messages."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from jinja2 import TemplateError

from privlora.data.records import missing_column, text_of
from privlora.errors import ConfigError, DataError, named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a position that carries no loss (the value that torch and transformers ignore)."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CHUNK = 1000  # records handed to the tokenizer at once
_OWN_WORDS = 16  # labelled tokens from which on they are a record's own, and no answer that many share


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenised record."""

    input_ids: np.ndarray
    """(T,) int32 token ids."""
    labels: np.ndarray
    """(T,) int32: equal to ``input_ids`` where the loss is taken, -100 elsewhere; not shifted."""
    dropped: int = 0
    """Tokens of the record that did not fit into max_length."""
    blank: bool = False
    """Whether the trained part is empty: only blanks and the end of the text."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of tokens and labels; private."""
        return sha256(self.input_ids.tobytes() + self.labels.tobytes()).digest()


class Examples(Sequence[Example]):
    """Tokenised records in the order of the records. Everything that it counts is private.

    pad_token_id: any id of their tokenizer's vocabulary, for what batches are filled up with.
    """

    def __init__(self, examples: Iterable[Example], *, pad_token_id: int) -> None:
        if pad_token_id < 0:
            raise ConfigError(
                f"pad_token_id={pad_token_id} is not a token",
                fix="use the tokenizer's padding or end-of-text id",
            )
        self.pad_token_id = pad_token_id
        self._examples = list(examples)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) int64: tokens of each example."""
        return np.array([len(e.input_ids) for e in self._examples], dtype=np.int64)

    @cached_property
    def label_counts(self) -> np.ndarray:
        """(N,) int64: predicted tokens of each example; an example with 0 stays and has a zero gradient."""
        return np.array([(e.labels[1:] != IGNORED).sum() for e in self._examples], dtype=np.int64)

    @cached_property
    def dropped(self) -> np.ndarray:
        """(N,) int64: tokens that did not fit into max_length."""
        return np.array([e.dropped for e in self._examples], dtype=np.int64)

    @cached_property
    def blank(self) -> np.ndarray:
        """(N,) whether what is trained on says nothing."""
        return np.array([e.blank for e in self._examples], dtype=bool)

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> Examples: ...

    def __getitem__(self, index: int | slice) -> Example | Examples:
        return self.like(self._examples[index]) if isinstance(index, slice) else self._examples[index]

    def like(self, examples: Iterable[Example]) -> Examples:
        """Others of the same tokenizer."""
        return Examples(examples, pad_token_id=self.pad_token_id)


@dataclass(frozen=True)
class Template:
    """Which columns make an example. Give ``text``, or ``prompt`` and ``completion``, or ``messages``.

    A value without braces is a column's name; with braces it is a format such as
    ``"{instruction}\\n\\n{input}"``, in which each ``{name}`` is a column, taken literally: no attribute,
    index, conversion or format is evaluated.
    """

    text: str | None = None
    """All of it is trained on."""
    prompt: str | None = None
    """What the model is given."""
    completion: str | None = None
    """What the model should answer."""
    messages: str | None = None
    """Column with a list of ``{"role": ..., "content": ...}``, rendered by the tokenizer's chat template."""

    def __post_init__(self) -> None:
        given = {name for name, value in vars(self).items() if value is not None}
        if given not in ({"text"}, {"prompt", "completion"}, {"messages"}):
            raise ConfigError(
                "the template names no column, or those of several kinds of record",
                fix="give text, or prompt and completion, or messages",
            )
        for value in (self.text, self.prompt, self.completion):
            if value is not None:
                _parse(value)

    @property
    def used(self) -> frozenset[str]:
        """Names of the columns that an example is made of."""
        given = [value for value in (self.text, self.prompt, self.completion) if value is not None]
        fields = {field for value in given for _, field in _parse(value) if field is not None}
        return frozenset(fields if self.messages is None else {self.messages})


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is the same for all examples: how they begin and end, and which tokens are labels."""

    bos: list[int]
    """The token that may begin a sequence, as a list of one or none."""
    adds_bos: bool
    eos: list[int]
    max_length: int
    label_all: bool


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of text that is tokenised on its own, so that where the loss starts and ends is exact."""

    text: str
    trained: bool


def build_examples(
    records: Sequence[Mapping[str, Any]],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    loss_on: Literal["all", "completion"] = "all",
    add_eos: bool = True,
) -> Examples:
    """Tokenise every record; none is dropped, whatever it holds.

    Prompt and completion (and, with ``loss_on="completion"``, each assistant turn) are tokenised separately:
    the prompt's ids are those that the model meets when it is asked, and no token straddles the boundary.
    A tokenizer that starts sequences with BOS does so once. Chat templates write their own BOS and ends.

    Too long examples lose tokens of the prompt first, from its left (after BOS); only if the completion alone
    is too long is it cut, at its end (and then its EOS with it: the text did not end there).

    Args:
        records: what ``load_records`` returns.
        template: the columns.
        tokenizer: a Hugging Face tokenizer.
        max_length: most tokens of an example, at least 2.
        loss_on: ``"all"`` tokens, or only those of the ``"completion"`` (of the assistant's turns in a chat).
        add_eos: end text and completions with EOS; chat messages never get one here.

    Raises:
        ConfigError: a setting is out of range, or does not go with the template or the tokenizer.
        DataError: a record lacks a column, or holds something that is not text (its contents are not shown).
    """
    if max_length < 2:
        raise ConfigError(f"max_length={max_length} leaves nothing to predict", fix="set it to 2 or more")
    if loss_on not in ("all", "completion"):
        raise ConfigError(f"loss_on={loss_on!r} is unknown", fix='use "all" or "completion"')
    if loss_on == "completion" and template.text is not None:
        raise ConfigError(
            'loss_on="completion" needs a template with a completion',
            fix='give prompt and completion columns, or set loss_on to "all"',
        )
    if add_eos and template.messages is None and tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token", fix="set tokenizer.eos_token, or add_eos=False")
    if template.messages is not None and not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template, so messages cannot be rendered",
            fix="use the tokenizer of an instruction-tuned model, set tokenizer.chat_template, "
            "or use prompt and completion columns",
        )
    frame = _frame(tokenizer, max_length, loss_on == "all", add_eos, is_chat=template.messages is not None)

    examples = []
    for start in range(0, len(records), _CHUNK):
        chunk = records[start : start + _CHUNK]
        rendered = [_render(r, start + i + 1, template, tokenizer, loss_on) for i, r in enumerate(chunk)]
        token_ids = _tokenize([segment.text for segments in rendered for segment in segments], tokenizer)
        for segments in rendered:
            parts = [(next(token_ids), segment.trained) for segment in segments]
            blank = not any(segment.trained and segment.text.strip() for segment in segments)
            examples.append(replace(_assemble(parts, frame), blank=blank))
    return Examples(examples, pad_token_id=pad_token(tokenizer))


def pad_token(tokenizer: Any) -> int:
    """A ``pad_token_id``. Any id serves: padding is masked and carries no weight."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def token_hashes(examples: Iterable[Example]) -> set[bytes]:
    """SHA-256 of each example's tokens, and of its labelled ones alone where there are at least 16 of them.

    So the same long completion is found under another prompt, and a short answer that many records share is not.
    """
    hashes = set()
    for example in examples:
        hashes.add(sha256(example.input_ids.tobytes()).digest())
        labelled = example.labels[example.labels != IGNORED]
        if len(labelled) >= _OWN_WORDS:
            hashes.add(sha256(labelled.tobytes()).digest())
    return hashes


def encode_prompts(
    prompts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    is_chat: bool = False,
) -> list[np.ndarray]:
    """The token ids, (T,) int32 each, with which a trained model is asked: those that stand before its completions.

    Too long prompts lose tokens from their left (after BOS), as in ``build_examples``. is_chat: a chat template has
    rendered them, and has written what begins them.
    """
    frame = _frame(tokenizer, max_length, label_all=False, add_eos=False, is_chat=is_chat)
    return [_assemble([(ids, False)], frame).input_ids for ids in _tokenize(list(prompts), tokenizer)]


def encode_completions(completions: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The token ids of completions as they follow a prompt: without BOS, without EOS."""
    return list(_tokenize(list(completions), tokenizer)) if completions else []


def _render(
    record: Mapping[str, Any],
    number: int,
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    loss_on: str,
) -> list[_Segment]:
    if template.messages is not None:
        return _render_chat(record, number, template.messages, tokenizer, loss_on)
    if template.text is not None:
        return [_Segment(_fill(template.text, record, number), trained=True)]
    pair = [(template.prompt, False), (template.completion, True)]
    return [_Segment(_fill(column, record, number), flag) for column, flag in pair if column is not None]


def _parse(template: str) -> list[tuple[str, str | None]]:
    """A column's name or a format as (literal text, column or None) pieces."""
    if "{" not in template and "}" not in template:
        return [("", template)]
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"template {named(template)} cannot be read: {error}", fix="write {{ and }} for literal braces"
        ) from None
    for _, field, spec, conversion in pieces:
        if field == "" or spec or conversion:
            raise ConfigError(
                f"template {named(template)} has a field that is not a plain {{column}}",
                fix="name one column between each pair of braces, without ! or :",
            )
    return [(literal, field) for literal, field, _, _ in pieces]


def _fill(template: str, record: Mapping[str, Any], number: int) -> str:
    return "".join(
        literal + (text_of(record, field, number) if field is not None else "")
        for literal, field in _parse(template)
    )


def _render_chat(
    record: Mapping[str, Any], number: int, column: str, tokenizer: PreTrainedTokenizerBase, loss_on: str
) -> list[_Segment]:
    """The rendered conversation, cut where the loss starts and ends.

    An assistant turn starts where the conversation before it, with the generation prompt, ends: that is what
    the model is given when it has to write the turn.
    """
    messages = _messages(record, number, column)

    def render(count: int, add_generation_prompt: bool = False) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages[:count], tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except TemplateError:
            raise DataError(
                f"record {number}: the tokenizer's chat template refuses these messages",
                fix="most want an optional system message, then user and assistant in turn",
            ) from None

    whole = render(len(messages))
    if loss_on == "all":
        return [_Segment(whole, trained=True)]
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
                f"record {number}: the chat template shows message {i + 1} differently once others follow",
                why="the tokens of the assistant cannot be told from the others",
                fix='make a record of each assistant turn and the messages before it, or set loss_on="all"',
            )
        segments += [_Segment(whole[end:start], trained=False), _Segment(whole[start:turn_end], trained=True)]
        end = turn_end
    return [*segments, _Segment(whole[end:], trained=False)]


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


def _messages(record: Mapping[str, Any], number: int, column: str) -> list[Mapping[str, Any]]:
    if column not in record:
        raise missing_column(column, record, number)
    messages = record[column]
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"record {number}: column {column!r} is not a list of messages",
            fix='write it as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise DataError(
                f"record {number}: message {i + 1} of column {column!r} has no known role",
                fix=f"give it a role and a content; the roles are {', '.join(_ROLES)}",
            )
        text_of(message, "content", number)
    return messages


def _frame(
    tokenizer: PreTrainedTokenizerBase, max_length: int, label_all: bool, add_eos: bool, *, is_chat: bool
) -> _Frame:
    encoded = tokenizer("a", return_special_tokens_mask=True)
    adds_bos = not is_chat and encoded["special_tokens_mask"][:1] == [1]
    bos = encoded["input_ids"][0] if adds_bos else tokenizer.bos_token_id
    eos = [tokenizer.eos_token_id] if add_eos and not is_chat else []
    return _Frame([] if bos is None else [bos], adds_bos, eos, max_length, label_all)


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    # verbose=False: the warning about long texts would print the length of a private one.
    return iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])


def _assemble(parts: list[tuple[list[int], bool]], frame: _Frame) -> Example:
    ids = [token for tokens, _ in parts for token in tokens]
    trained = [is_trained for tokens, is_trained in parts for _ in tokens]
    begins_with_bos = bool(ids) and ids[:1] == frame.bos  # a chat template or the text itself wrote it
    if begins_with_bos:
        ids, trained = ids[1:], trained[1:]
    bos = frame.bos if frame.adds_bos or begins_with_bos else []
    prompt_length = trained.index(True) if True in trained else len(trained)
    if ids[-1:] != frame.eos:
        ids, trained = ids + frame.eos, trained + [True] * len(frame.eos)

    excess = max(0, len(bos) + len(ids) - frame.max_length)
    dropped = min(excess, prompt_length)
    ids = (bos + ids[dropped:])[: frame.max_length]
    # Nothing precedes BOS, so it is never predicted.
    trained = ([False] * len(bos) + trained[dropped:])[: frame.max_length]
    input_ids = np.array(ids, dtype=np.int32)
    labels = input_ids.copy()
    if not frame.label_all:
        labels[~np.array(trained, dtype=bool)] = IGNORED
    return Example(input_ids, labels, dropped=excess)
