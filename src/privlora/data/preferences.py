"""Records of preferences: a prompt, the answer that was chosen and the one that was not; a record is one unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from privlora.data.assembling import Tokens
from privlora.data.examples import Examples, Preferences, Template, frame_for, pad_token, tokens_of
from privlora.data.rendering import renderer

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
) -> Examples:
    """Tokenise both answers of every record as completions, by the rules of `build_examples`; none is dropped.

    beta: of the loss. Raises what `build_examples` does.
    """
    both = (chosen, rejected)
    frames = [
        frame_for(each, tokenizer, max_length=max_length, loss_on="completion", add_eos=add_eos)
        for each in both
    ]
    renders = [renderer(each, tokenizer, "completion") for each in both]
    found: tuple[list[Tokens], list[Tokens]] = ([], [])
    numbered = enumerate(records, start=1)
    while some := list(islice(numbered, _CHUNK)):
        for parts, render, frame in zip(found, renders, frames, strict=True):
            parts.append(tokens_of([render(record, number) for number, record in some], tokenizer, frame))
    pad = pad_token(tokenizer)
    others = Examples.of(Tokens.joined(found[1]), pad_token_id=pad)
    return Examples.of(Tokens.joined(found[0]), pad_token_id=pad, preferences=Preferences(others, beta))
