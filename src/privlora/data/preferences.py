"""Records of preferences: a prompt, the answer that was chosen and the one that was not; a record is one unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from privlora.data.assembling import Reader, Tokens, TruncationMode
from privlora.data.examples import Examples, Preferences, Template, framed, pad_token, tokens_of
from privlora.data.rendering import portions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_preferences(
    records: Iterable[Mapping[str, Any]],
    chosen: Template,
    rejected: Template,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    beta: float,
    truncation_mode: TruncationMode = "keep_start",
) -> Examples:
    """Tokenise both answers of every record as completions, by the rules of `build_examples`; none is dropped.

    beta: of the loss. Raises what `build_examples` does.
    """
    given = (tokenizer, max_length, "completion", True, truncation_mode)
    both = [framed(each, *given) for each in (chosen, rejected)]
    found: tuple[list[Tokens], list[Tokens]] = ([], [])
    read, spelled = Reader(tokenizer), 0
    every = ([render(record, number) for _, render in both] for number, record in enumerate(records, start=1))
    for some in portions(every, lambda each: sum(len(answer.text) for answer in each)):
        spelled += sum(any(answer.spelled for answer in each) for each in some)
        for parts, rendered, (frame, _) in zip(found, zip(*some, strict=True), both, strict=True):
            parts.append(tokens_of(list(rendered), read, frame))
    pad = pad_token(tokenizer)
    others = Examples.of(Tokens.joined(found[1]), pad_token_id=pad)
    examples = Examples.of(Tokens.joined(found[0]), pad_token_id=pad, preferences=Preferences(others, beta))
    examples.spelled = spelled
    return examples
