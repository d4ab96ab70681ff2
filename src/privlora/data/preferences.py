"""Records of preferences: a prompt, the answer that was chosen and the one that was not; a record is one unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from privlora.data.assembling import Reader, Tokens
from privlora.data.examples import (
    Examples,
    Preferences,
    Template,
    TruncationMode,
    framed,
    pad_token,
    tokens_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK: Final = 1000  # records handed to the tokenizer at once


def build_preferences(
    records: Iterable[Mapping[str, Any]],
    chosen: Template,
    rejected: Template,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    add_eos: bool,
    beta: float,
    truncation_mode: TruncationMode = "keep_start",
) -> Examples:
    """Tokenise both answers of every record as completions, by the rules of `build_examples`; none is dropped.

    beta: of the loss. Raises what `build_examples` does.
    """
    both = [
        framed(
            each,
            tokenizer,
            max_length=max_length,
            loss_on="completion",
            add_eos=add_eos,
            truncation_mode=truncation_mode,
        )
        for each in (chosen, rejected)
    ]
    found: tuple[list[Tokens], list[Tokens]] = ([], [])
    read, numbered, spelled = Reader(tokenizer), enumerate(records, start=1), 0
    while some := list(islice(numbered, _CHUNK)):
        answers = [[render(record, number) for number, record in some] for _, render in both]
        spelled += sum(bool(a.spelled or b.spelled) for a, b in zip(*answers, strict=True))
        for parts, rendered, (frame, _) in zip(found, answers, both, strict=True):
            parts.append(tokens_of(rendered, read, frame))
    pad = pad_token(tokenizer)
    others = Examples.of(Tokens.joined(found[1]), pad_token_id=pad)
    examples = Examples.of(Tokens.joined(found[0]), pad_token_id=pad, preferences=Preferences(others, beta))
    examples.spelled = spelled
    return examples
