"""Records with a label: a text, or a pair of texts, and the class that it belongs to or the score that it got."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from privlora.data.assembling import Tokens, starts_of
from privlora.data.examples import Answers, Examples, Template, pad_token
from privlora.data.labels import Classes
from privlora.data.rendering import Renderer, portions
from privlora.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_labelled(
    records: Iterable[Mapping[str, Any]],
    template: Template,
    pair: Template | None,
    classes: Classes,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
) -> Examples:
    """Tokenise every record as ``tokenizer(text, pair)`` does, special tokens included; none is dropped.

    Control tokens that texts spell are read as text (``split_special_tokens``), also those of a format.
    Too long ones are cut as ``truncation=True`` cuts them: at the end, of a pair the longer text. All of an example's
    tokens count as labelled, which is how they are counted; what is learned is ``Examples.answers``.

    Raises DataError for a record without a text or with a label that is none of the classes.
    """
    parts = [Renderer(each, tokenizer, "all") for each in (template, pair) if each is not None]
    split = template.split_special_tokens
    answers, seconds = list[float](), list[int]()

    def render(record: Mapping[str, Any], number: int) -> tuple[tuple[str, ...], float]:
        return tuple(part(record, number).text for part in parts), classes.answer_of(record, number)

    def chunks() -> Iterator[Tokens]:
        every = (render(record, number) for number, record in enumerate(records, start=1))
        for some in portions(every, lambda each: sum(map(len, each[0]))):
            ids, dropped, second = _encode([texts for texts, _ in some], tokenizer, max_length, split)
            answers.extend(answer for _, answer in some)
            seconds.extend(second)
            starts = starts_of(np.array([len(row) for row in ids]))
            flat = np.concatenate([np.empty(0, np.int32), *(np.array(row, np.int32) for row in ids)])
            blank = np.array([not any(text.strip() for text in texts) for texts, _ in some], bool)
            yield Tokens(flat, starts, np.array(dropped, np.int32), blank)

    tokens = Tokens.joined(chunks())
    typed = pair is not None and _tells_apart(tokenizer)
    found = Answers(np.array(answers, np.float64), np.array(seconds, np.int32), classes.outputs, typed)
    return Examples.of(tokens, pad_token_id=pad_token(tokenizer), answers=found)


def _tells_apart(tokenizer: Any) -> bool:
    return "token_type_ids" in tokenizer.model_input_names


def _encode(
    texts: list[tuple[str, ...]], tokenizer: Any, max_length: int, split: bool
) -> tuple[list[list[int]], list[int], list[int]]:
    """Ids of each record, how many tokens did not fit, and where the second text's types begin."""
    typed = len(texts[0]) == 2 and _tells_apart(tokenizer)

    def encode(some: list[tuple[str, ...]], **cut: Any) -> Any:
        columns = [list(column) for column in zip(*some, strict=True)]
        # verbose=False: the warning about long texts would print the length of a private one.
        cut |= {"return_token_type_ids": typed, "split_special_tokens": split, "verbose": False}
        return tokenizer(*columns, **cut)

    found = encode(texts)
    ids, types = found["input_ids"], found["token_type_ids"] if typed else None
    dropped = [max(0, len(row) - max_length) for row in ids]
    long = [at for at, over in enumerate(dropped) if over]
    if long:
        shorter = encode([texts[at] for at in long], truncation=True, max_length=max_length)
        if max(map(len, shorter["input_ids"])) > max_length:
            what = f"data.max_length={max_length} leaves no room for a text next to the tokenizer's special tokens"
            raise ConfigError(what, fix="raise it")
        for place, at in enumerate(long):
            ids[at] = shorter["input_ids"][place]
            if types is not None:
                types[at] = shorter["token_type_ids"][place]
    none = [len(row) for row in ids]
    second = none if types is None else [row.index(1) if 1 in row else len(row) for row in types]
    return ids, dropped, second
