"""What an adapter says to public prompts, next to its base model: post-processing of releases."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Final

import numpy as np

from privlora.config import DataSettings
from privlora.data.examples import IGNORED, Template
from privlora.errors import PrivloraError, reason_of
from privlora.evaluation.generation import decoded, generate_tokens, start_of_text
from privlora.synthesis.embeddings import Attached, base_alone
from privlora.training.inputs import tokenise
from privlora.training.model_checks import positions_of
from privlora.training.sharding import is_sharded

_log = logging.getLogger(__name__)

_ASKED, _BEGUN, _LOOKED = 3, 12, 200  # prompts that are answered, and whose first token is looked at; records
_NEW, _BEGINNING, _READ = (
    40,
    16,
    512,
)  # tokens of an answer, of a text that is gone on with, of a prompt at least
_LONGEST, _COPIED = 300, 20  # characters that are shown of a text, and that are no chance
_LOOP, _WHOLE = 12, 1 << 20  # tokens
_OWN: Final = ("What is the capital of France?", "Write a note about the weather.", "How do I make tea?")


def answers(
    model: Any,
    tokenizer: Any,
    data: DataSettings,
    records: Sequence[Mapping[str, Any]],
    adapter: Attached | None = None,
) -> dict[str, Any] | None:
    """The most probable answers to a few prompts, with the adapter and without, and of some more whether they end at
    once; JSON-ready.

    records: PUBLIC, of the form that ``data`` describes; without any, prompts are privlora's own. adapter: attached to
    ``model``; None for a model of peft. None of classifiers, and of models that write nothing.
    """
    if data.classes is not None or not hasattr(model, "generate") or is_sharded(model):
        return None
    try:
        public = list(islice(records, _LOOKED)) or _own_records(data)
        room = max(1, min(max(data.max_length, _READ), (positions_of(model) or 2**31) - _NEW))
        found = dict[bytes, np.ndarray]()
        for ids in _prompts(public, data, tokenizer):
            found[ids.tobytes()] = ids[-room:]
            if len(found) == _BEGUN:
                break
        prompts = list(found.values()) or [start_of_text(tokenizer, fix="give data.evaluation")]
        written = _rows(model, tokenizer, prompts)
        with base_alone(model, adapter) as base:
            before = _rows(base, tokenizer, prompts)
    except Exception as error:  # noqa: BLE001 - a model of others raises anything, and what it was asked is public
        _log.warning("the adapter could not be asked, so the report shows no answers: %s", reason_of(error))
        return None
    shown = []
    asked = [decoded(tokenizer, prompt.tolist()) for prompt in prompts[:_ASKED]]
    start, end = _common_lines(asked)
    for words, *both in zip(asked, before, written, strict=False):
        base_says, adapter_says = (_told(decoded(tokenizer, row), row, words) for row in both)
        shown.append(
            {
                "prompt": _clean(words[start : len(words) - end].rstrip("\n")[-_LONGEST:]),
                "base": base_says,
                "adapter": adapter_says,
            }
        )
    return {
        "asked": "data.evaluation" if len(records) else "own",
        "max_new_tokens": _NEW,
        "shown": shown,
        "begun": len(prompts),
        "ends_at_once": {"base": before.count([]), "adapter": written.count([])},
    }


def _rows(model: Any, tokenizer: Any, prompts: Sequence[np.ndarray]) -> list[list[int]]:
    """The first few answers, and of the others the first token."""
    whole = generate_tokens(model, tokenizer, prompts[:_ASKED], max_new_tokens=_NEW)
    return whole + generate_tokens(model, tokenizer, prompts[_ASKED:], max_new_tokens=1)


def _prompts(
    records: Sequence[Mapping[str, Any]], data: DataSettings, tokenizer: Any
) -> Iterator[np.ndarray]:
    """What stands before each record's answer as training tokenises it, but whole, as a model is asked: (T,) int32; of
    a text, its beginning."""
    of_answers = data.model_copy(update={"loss_on": "completion", "max_length": _WHOLE})
    for record in records:
        try:
            asks = data.columns["text"] is None
            example = tokenise([record], of_answers if asks else data, tokenizer)[0]
        except PrivloraError:
            continue  # a conversation without an answer, a column that is not there
        ids, learnt = example.input_ids, np.flatnonzero(example.labels != IGNORED)
        end = int(learnt[0]) if asks and len(learnt) else min(len(ids) // 2, _BEGINNING)
        if end:
            yield ids[:end]


def _own_records(data: DataSettings) -> list[dict[str, Any]]:
    """Records of the form of ``data``."""
    forms = [Template(**each) for each in (data.columns, data.rejected_columns) if each is not None]
    return [
        {
            column: [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            if form.messages
            else text
            for form in forms
            for column in form.used
        }
        for text in _OWN
    ]


def _common_lines(asked: Sequence[str]) -> tuple[int, int]:
    """Characters of the lines that all begin with, such as a template's own system prompt, and that all end with, such
    as the name of who answers: they ask for nothing. None of one text."""

    def alike(texts: Sequence[Sequence[str]]) -> int:
        same = takewhile(lambda lines: len(set(lines)) == 1, zip(*texts, strict=False))
        return sum(len(line) for line, *others in same if others)

    lines = [text.splitlines(keepends=True) for text in asked]
    return alike(lines), alike([each[::-1] for each in lines])


def _told(text: str, row: Sequence[int], prompt: str) -> dict[str, str | None]:
    """An answer and what is odd about it."""
    short, long = sorted((text.strip(), prompt.strip()), key=len)
    fault = None
    if not text.strip():
        fault = "says nothing" if len(row) else "ends at once"
    elif any(_loops(row, period) for period in range(1, len(row) // 3 + 1)):
        fault = "repeats itself"
    elif len(short) >= _COPIED and short in long:
        fault = "repeats the prompt"
    more = "…" if len(row) == _NEW or len(text.strip()) > _LONGEST else ""
    return {"text": _clean(text.strip()[:_LONGEST]) + more, "fault": fault}


def _loops(row: Sequence[int], period: int) -> bool:
    """Whether it ends in a pattern that came three times at least."""
    looked = max(_LOOP, 3 * period)
    return len(row) >= looked and all(row[-i] == row[-i - period] for i in range(1, looked - period + 1))


def _clean(text: str) -> str:
    """Without characters that no reader sees, or that turn others round."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd" for c in text)
