"""Figures on generated texts that need no private record: how probable, how varied, how near to other texts.

All are functions of the texts, of a public model and of public texts. None may be computed against private records:
what it said would be released without noise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.evaluation.batches import evaluating
from privlora.losses import label_logits, weighted_cross_entropy
from privlora.ranges import NEAR_COPY_RUN

_SHARED: Final = 0.5  # of a text's runs of words
"""What makes a text a near copy; one that is shorter, that the other holds it whole."""


@dataclass(frozen=True)
class TextFigures:
    """Of N texts.

    tokens: of each text, those that are predicted. perplexities: of each, exp of its mean loss per token under the
    base model; None where nothing is predicted. perplexity: of all tokens together. distinct: n -> different n-grams of
    words over all of them, n = 1, 2, 3. near_copies: share of texts that are near copies of an earlier one.
    near_public: name of a set of public texts -> share of texts that are near copies of one of them.
    """

    tokens: list[int]
    perplexities: list[float | None]
    perplexity: float | None
    distinct: dict[int, float | None]
    near_copies: float
    near_public: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "perplexity": self.perplexity,
            "distinct": {str(n): share for n, share in self.distinct.items()},
            "near_copies": self.near_copies,
            "near_public": self.near_public,
            "tokens_per_text": self.tokens,
            "perplexity_per_text": self.perplexities,
        }


def text_figures(
    model: torch.nn.Module,
    examples: Examples,
    texts: Sequence[str],
    public: Mapping[str, Sequence[str]],
    *,
    max_tokens: int = 8192,
) -> TextFigures:
    """model: the base model, without an adapter. examples: ``texts`` as they are tokenised. public: sets of texts."""
    losses, tokens = token_losses(model, examples, max_tokens=max_tokens)
    total = int(tokens.sum())
    with np.errstate(over="ignore"):
        each = [float(np.exp(loss / n)) if n else None for loss, n in zip(losses, tokens, strict=True)]
        whole = float(np.exp(losses.sum() / total)) if total else None
    return TextFigures(
        tokens=[int(n) for n in tokens],
        perplexities=each,
        perplexity=whole,
        distinct={n: distinct(texts, n) for n in (1, 2, 3)},
        near_copies=_share(repeated(texts)),
        near_public={name: _share(copies_of(texts, others)) for name, others in public.items()},
    )


def token_losses(
    model: torch.nn.Module, examples: Examples, *, max_tokens: int = 8192
) -> tuple[np.ndarray, np.ndarray]:
    """Of each example its loss in nats, summed over its label tokens, (N,) float64, and how many these are, (N,)."""
    losses, tokens = np.zeros(len(examples)), np.zeros(len(examples), dtype=np.int64)
    with evaluating(model) as device:
        for batch in sequential_batches(examples, max_tokens=max_tokens, device=device):
            moved = batch.to(device)
            found = label_logits(model, moved.input_ids, moved.attention_mask, moved.labels)
            _, each = weighted_cross_entropy(found, moved.token_weight)
            rows = batch.record_index.cpu().numpy()
            losses[rows] = found.per_row(each.double()).cpu().numpy()
            tokens[rows] = found.counts().cpu().numpy()
    return losses, tokens


def distinct(texts: Sequence[str], n: int) -> float | None:
    """Different n-grams of words over all of them, in all texts together; None where no text has n words."""
    grams = [gram for text in texts for gram in runs_of(words_of(text), n)]
    return len(set(grams)) / len(grams) if grams else None


def repeated(texts: Sequence[str]) -> list[bool]:
    """Whether each text is a near copy of an earlier one."""
    return _near(texts, [])


def copies_of(texts: Sequence[str], others: Sequence[str]) -> list[bool]:
    """Whether each text is a near copy of one of ``others``."""
    return _near(texts, others, among=False)


def _near(texts: Sequence[str], others: Sequence[str], *, among: bool = True) -> list[bool]:
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def add(number: int, text: str) -> None:
        words = words_of(text)
        for size in range(1, NEAR_COPY_RUN + 1):  # those of shorter texts are looked for by all their words
            for run in set(runs_of(words, size)) if size == NEAR_COPY_RUN or size in short else ():
                places[run].append(number)

    short = {min(len(words_of(text)), NEAR_COPY_RUN) for text in texts}
    for number, text in enumerate(others):
        add(number, text)
    found = []
    for number, text in enumerate(texts):
        words = words_of(text)
        runs = set(runs_of(words, min(len(words), NEAR_COPY_RUN))) if words else set()
        shared = Counter(place for run in runs for place in places.get(run, ()))
        found.append(bool(runs) and max(shared.values(), default=0) >= _SHARED * len(runs))
        if among:
            add(number, text)
    return found


def words_of(text: str) -> list[str]:
    """In order, between blanks; capitals do not count."""
    return text.casefold().split()


def runs_of(words: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """All runs of so many words, in order."""
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else 0.0
