"""Turning records into token ids and labels: plain text, prompt and completion, or chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from privlora.data.assembling import (
    Frame,
    Reader,
    Tokens,
    TruncationMode,
    assemble,
    divided,
    frame_of,
    starts_of,
)
from privlora.data.rendering import Rendered, Renderer, control_tokens, portions
from privlora.data.templates import fields_of, parse
from privlora.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a position that carries no loss (the value that torch and transformers ignore)."""

OWN_WORDS = 16  # labelled tokens from which on they are a record's own, and no answer that many share


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
    """Whether what is learnt says nothing, or its prompt is cut away altogether."""
    answer: float | None = None
    """Of a labelled text: its class's number, or its score."""
    second: int = 0
    """Of a labelled pair whose texts the model tells apart: where the second one begins; else 0."""
    rejected: Example | None = None
    """Of a preference: the answer that was not chosen, behind the same prompt."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of tokens and labels; private."""
        told = b"" if self.answer is None else np.float64(self.answer).tobytes()
        told += b"" if self.rejected is None else self.rejected.digest
        return sha256(self.input_ids.tobytes() + self.labels.tobytes() + told).digest()


@dataclass(frozen=True, slots=True)
class Answers:
    """Labels of N examples; private."""

    values: np.ndarray
    """(N,) float64: the number of each one's class, or its score."""
    seconds: np.ndarray
    """(N,) int32: where each one's second text begins, for a model that tells texts apart; else its length."""
    outputs: int
    """PUBLIC. How many numbers the model gives: one a class, or 1 for a score."""
    typed: bool = False
    """PUBLIC. Whether examples are pairs of texts that the model tells apart."""


@dataclass(frozen=True, slots=True)
class Preferences:
    """What makes N examples preferences: their own tokens are of the chosen answers."""

    rejected: Examples
    """N, private: the same prompts with the answers that were not chosen."""
    beta: float
    """PUBLIC. Of the loss (preference_losses)."""


class Examples(Sequence[Example]):
    """Tokenised records in the order of the records, in flat arrays. Everything that it counts is private.

    An `Example` is made when it is asked for, of new arrays.

    pad_token_id: any id of their tokenizer's vocabulary, for what batches are filled up with.
    """

    def __init__(self, examples: Iterable[Example], *, pad_token_id: int) -> None:
        if pad_token_id < 0:
            fix = "use the tokenizer's padding or end-of-text id"
            raise ConfigError(f"pad_token_id={pad_token_id} is not a token", fix=fix)
        self.pad_token_id = pad_token_id
        self._labels: np.ndarray | None = None  # (T,) int32 where labels are other tokens than the ids
        self.answers: Answers | None = None
        self.chunks: np.ndarray | None = None  # (records,) int64: into how many examples each is divided
        self.preferences: Preferences | None = None
        self.spelled = 0  # records that spell control tokens, which are read as text
        self._tokens = self._flat(list(examples))

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        *,
        pad_token_id: int,
        answers: Answers | None = None,
        preferences: Preferences | None = None,
    ) -> Examples:
        """Those in the arrays, which are kept. answers: of labelled texts."""
        examples = cls((), pad_token_id=pad_token_id)
        examples._tokens, examples.answers, examples.preferences = tokens, answers, preferences
        return examples

    @property
    def rows(self) -> int:
        """PUBLIC. How many rows of a micro-batch each example takes: two where they are preferences."""
        return 1 if self.preferences is None else 2

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) int64: tokens of each example; of a preference those of its longer answer, prompt included."""
        own = np.diff(self._tokens.starts)
        return own if self.preferences is None else np.maximum(own, self.preferences.rejected.lengths)

    @cached_property
    def label_counts(self) -> np.ndarray:
        """(N,) int64: predicted tokens of each example, of a preference those of its shorter answer; an example with 0
        stays, and without any label it has a zero gradient."""
        starts, predicted = self._tokens.starts, self._tokens.codes >= 0
        predicted[starts[:-1][starts[:-1] < starts[1:]]] = False  # nothing precedes the first token
        own = np.diff(starts_of(predicted)[starts])
        return own if self.preferences is None else np.minimum(own, self.preferences.rejected.label_counts)

    @property
    def dropped(self) -> np.ndarray:
        """(N,) int32: tokens that did not fit into max_length."""
        own = self._tokens.dropped
        return own if self.preferences is None else np.maximum(own, self.preferences.rejected.dropped)

    @property
    def blank(self) -> np.ndarray:
        """(N,) whether what is trained on says nothing."""
        own = self._tokens.blank
        return own if self.preferences is None else own | self.preferences.rejected.blank

    @property
    def tokens(self) -> Tokens:
        """The arrays, if the labels are the ids of their own positions, as ``build_examples`` makes them."""
        assert self._labels is None
        return self._tokens

    @property
    def largest_id(self) -> int:
        """The largest token id; -1 if there is no token."""
        more = -1 if self.preferences is None else self.preferences.rejected.largest_id
        return int(self._tokens.ids.max(initial=more))

    def __len__(self) -> int:
        return len(self._tokens.starts) - 1

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> Examples: ...

    def __getitem__(self, index: int | slice) -> Example | Examples:
        if isinstance(index, slice):
            return self.like(self[i] for i in range(*index.indices(len(self))))
        number = as_index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"there are {len(self)} examples, none with the number {number}")
        return self._example(number % len(self))

    def like(self, examples: Iterable[Example]) -> Examples:
        """Others of the same tokenizer, labelled or preferences if these are."""
        given = list(examples)
        found = Examples(given, pad_token_id=self.pad_token_id)
        if self.preferences is not None:
            others = [example.rejected for example in given]
            rejected = self.preferences.rejected.like(other for other in others if other is not None)
            found.preferences = replace(self.preferences, rejected=rejected)
        if self.answers is not None:
            values = np.array([example.answer for example in given], np.float64)
            seconds = np.array([example.second for example in given], np.int32)
            found.answers = replace(self.answers, values=values, seconds=seconds)
        return found

    def _example(self, number: int) -> Example:
        tokens = self._tokens
        start, stop = tokens.starts[number : number + 2]
        codes = tokens.codes[start:stop]
        ids = np.maximum(codes, ~codes)
        labels = np.where(codes < 0, IGNORED, ids if self._labels is None else self._labels[start:stop])
        answer, second = None, 0
        if self.answers is not None:
            answer, second = float(self.answers.values[number]), int(self.answers.seconds[number])
        other = None if self.preferences is None else self.preferences.rejected[number]
        dropped, blank = int(tokens.dropped[number]), bool(tokens.blank[number])
        return Example(ids, labels, dropped, blank, answer, second, other)

    def _flat(self, examples: Sequence[Example]) -> Tokens:
        none = np.empty(0, np.int32)
        ids = np.concatenate([none, *(e.input_ids for e in examples)], dtype=np.int32)
        labels = np.concatenate([none, *(e.labels for e in examples)], dtype=np.int32)
        if (ids < 0).any():
            raise DataError("a token's id is negative", fix="give ids as the tokenizer makes them")
        starts, labelled = starts_of(np.array([len(e.input_ids) for e in examples])), labels != IGNORED
        if not np.array_equal(labels[labelled], ids[labelled]):
            self._labels = labels
        dropped = np.array([e.dropped for e in examples], np.int32)
        blank = np.array([e.blank for e in examples], bool)
        return Tokens(np.where(labelled, ids, ~ids), starts, dropped, blank)


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
    """What the model is given; also a column with a list of messages."""
    completion: str | None = None
    """What the model should answer; also a column with a list of messages."""
    messages: str | None = None
    """Column with a list of ``{"role": ..., "content": ...}``, rendered by the chat template, which gets the tools that
    a record's column "tools" describes."""
    template: Literal["auto", "chat", "none"] = "auto"
    """How prompt and completion meet, as ``data.template``: as turns of a chat if there is a chat template (auto), or
    else it is refused (chat); or as they stand, with a newline where no white space is between (none)."""
    split_special_tokens: bool = True
    """Whether control tokens that a record spells are read as its text."""
    chat_template: str | None = None
    """Instead of the tokenizer's, or the name of one of its own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""

    def __post_init__(self) -> None:
        names = ("text", "prompt", "completion", "messages")
        given = {name for name in names if getattr(self, name) is not None}
        if given not in ({"text"}, {"prompt", "completion"}, {"messages"}):
            what = "the template names no column, or those of several kinds of record"
            raise ConfigError(what, fix="give text, or prompt and completion, or messages")
        for value in self.forms:
            parse(value)

    @property
    def forms(self) -> tuple[str, ...]:
        """Columns or formats of texts, in their order."""
        return tuple(form for form in (self.text, self.prompt, self.completion) if form is not None)

    @property
    def used(self) -> frozenset[str]:
        """Names of the columns that an example is made of."""
        if self.messages is not None:
            return frozenset({self.messages})
        return fields_of(self.forms)


def build_examples(
    records: Iterable[Mapping[str, Any]],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    loss_on: Literal["all", "completion"] = "all",
    add_eos: bool = True,
    chunk: bool = False,
    truncation_mode: TruncationMode = "keep_start",
) -> Examples:
    """Tokenise every record; none is dropped, whatever it holds.

    A text is tokenised as a whole, as transformers does. With ``loss_on="completion"`` what is learnt begins where the
    completion (an assistant's turn) does; a token that begins in the prompt and ends in the completion is learnt, as in
    TRL. A tokenizer that starts sequences with BOS does so once. Chat templates write their own BOS and ends; where one
    does not end the last answer, EOS does.

    Args:
        records: what ``load_records`` returns or ``iterate_records`` yields; a thousand of them are held at a time.
        template: the columns.
        tokenizer: a Hugging Face tokenizer.
        max_length: most tokens of an example, at least 2.
        loss_on: ``"all"`` tokens, or only those of the ``"completion"`` (of the assistant's turns in a chat).
        add_eos: end with EOS what nothing else ends.
        chunk: of whole texts, divide too long ones instead; ``Examples.chunks`` says into how many.
        truncation_mode: whether too long examples keep their first tokens or (after BOS) their last ones.

    Raises:
        ConfigError: a setting is out of range, or does not go with the template or the tokenizer.
        DataError: a record lacks a column, or holds something that is not text, or the chat template leaves out what it
            says (its contents are not shown).
    """
    if chunk and template.text is None:
        raise ConfigError("chunk divides whole texts alone", fix="give a template with text, or remove chunk")
    frame, render = framed(template, tokenizer, max_length, loss_on, add_eos, truncation_mode)
    read, counts = Reader(tokenizer), list[int]()
    found = Examples([], pad_token_id=pad_token(tokenizer))

    def chunks() -> Iterator[Tokens]:
        every = (render(record, number) for number, record in enumerate(records, start=1))
        for rendered in portions(every, lambda each: len(each.text)):
            found.spelled += sum(bool(each.spelled) for each in rendered)
            if not chunk:
                yield tokens_of(rendered, read, frame)
                continue
            parts = [divided(ids, frame) for ids in read(rendered)[0]]
            counts.extend(map(len, parts))
            blank = [not each.says for each, some in zip(rendered, parts, strict=True) for _ in some]
            texts = [part for some in parts for part in some]
            learnt = [np.ones(len(part), bool) for part in texts]
            yield assemble(texts, learnt, frame, blank, [False] * len(texts))

    found._tokens = Tokens.joined(chunks())
    found.chunks = np.array(counts, np.int64) if chunk else None
    return found


def framed(
    template: Template, tokenizer: Any, max_length: int, loss_on: str, add_eos: bool, keeps: TruncationMode
) -> tuple[Frame, Renderer]:
    """What is the same for all examples of a template, and what renders them. Raises the ConfigErrors of
    `build_examples`."""
    if max_length < 2:
        raise ConfigError(f"max_length={max_length} leaves nothing to predict", fix="set it to 2 or more")
    if loss_on not in ("all", "completion"):
        raise ConfigError(f"loss_on={loss_on!r} is unknown", fix='use "all" or "completion"')
    if loss_on == "completion" and template.text is not None:
        what = 'loss_on="completion" needs a template with a completion'
        raise ConfigError(what, fix='give prompt and completion columns, or set loss_on to "all"')
    render = Renderer(template, tokenizer, loss_on)
    if add_eos and not render.is_chat and tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token", fix="set tokenizer.eos_token")
    return frame_of(tokenizer, max_length, loss_on == "all", add_eos, render.is_chat, keeps), render


def tokens_of(rendered: Sequence[Rendered], read: Reader, frame: Frame) -> Tokens:
    """Examples of rendered records."""
    return assemble(
        *read(rendered), frame, [not each.says for each in rendered], [each.open for each in rendered]
    )


def pad_token(tokenizer: Any) -> int:
    """A ``pad_token_id``. Any serves models of texts, where padding is masked and weightless; classifiers are told."""
    given = (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None)
    return int(next(given, 0))


def token_hashes(examples: Iterable[Example]) -> set[bytes]:
    """SHA-256 of each example's tokens, and of its labelled ones alone where there are at least 16 of them.

    So the same long completion is found under another prompt, and a short answer that many records share is not.
    """
    hashes = set()
    for example in examples:
        hashes.add(sha256(example.input_ids.tobytes()).digest())
        labelled = example.labels[example.labels != IGNORED]
        if len(labelled) >= OWN_WORDS:
            hashes.add(sha256(labelled.tobytes()).digest())
    return hashes


def have_shared_tokens(private: Examples, public: Examples) -> bool:
    """Whether a hash of ``token_hashes`` is one of both."""
    hashes = token_hashes(public)
    return any(not hashes.isdisjoint(token_hashes([each])) for each in private)


def encode_asked(
    records: Iterable[Mapping[str, Any]], template: Template, tokenizer: Any, *, max_length: int
) -> list[np.ndarray]:
    """The token ids, (T,) int32 each, with which a trained model is asked about records: those that stand before their
    completions (before a chat's last answer) in training. Records need no completion; of whole texts nothing is asked.

    Prompts of more than max_length tokens lose some from their left (after BOS). Raises what `build_examples` does.
    """
    render = Renderer(template, tokenizer, "completion")
    asked = [render.asked(record, number) for number, record in enumerate(records, start=1)]
    return _encode(asked, tokenizer, max_length, is_chat=render.is_chat)


def encode_prompts(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> list[np.ndarray]:
    """The token ids, (T,) int32 each, of prompts as they stand, for a model that was trained without a chat template.
    Those of records are `encode_asked`; the rest is as there."""
    control = control_tokens(tokenizer)
    found = ([] if control is None else control.finditer(each) for each in prompts)
    spans = ([match.span() for match in some] for some in found)
    asked = [Rendered(each, (), tuple(some)) for each, some in zip(prompts, spans, strict=True)]
    return _encode(asked, tokenizer, max_length, is_chat=False)


def _encode(
    asked: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase, max_length: int, *, is_chat: bool
) -> list[np.ndarray]:
    frame = frame_of(tokenizer, max_length, False, False, is_chat, "keep_end")
    found = tokens_of(asked, Reader(tokenizer), frame)
    return np.split(found.ids, found.starts[1:-1])[: len(asked)]


def encode_completions(
    completions: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, prompt: str = ""
) -> list[list[int]]:
    """The token ids of completions as they follow this prompt: without BOS, without EOS."""
    texts = [Rendered(prompt + each, ((len(prompt), len(prompt + each)),)) for each in completions]
    read = zip(*Reader(tokenizer)(texts), strict=True)
    return [[token for token, is_own in zip(ids, flags, strict=True) if is_own] for ids, flags in read]
