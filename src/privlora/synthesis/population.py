"""A population of public texts: chosen from by released scores, evolved by a generator, kept in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from privlora.errors import ConfigError, RunError

if TYPE_CHECKING:
    from privlora.synthesis.generators import Generator


@dataclass
class Population:
    """N texts in a fixed order; all public."""

    texts: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def choose(self, scores: np.ndarray, keep: int, generator: np.random.Generator) -> list[int]:
        """``keep`` different indices, ascending, drawn one after another with probability ∝ |score| among those left.

        Which texts are chosen does not depend on the order in which they stand. Where fewer than ``keep`` scores are
        other than 0, those are chosen, and the rest uniformly.

        Args:
            scores: (N,), of a release, and so public. Their signs do not count.
            keep: 1 to N.
            generator: of public randomness.

        Raises:
            ConfigError: ``keep`` or the shape of ``scores`` does not fit, or a score is not finite.
        """
        weights = np.abs(np.asarray(scores, dtype=np.float64))
        if weights.shape != (len(self),) or not np.isfinite(weights).all():
            raise ConfigError(
                f"scores of shape {weights.shape} for {len(self)} texts, or one that is not finite",
                fix="give one finite score for each text, in the order of the texts",
            )
        if not 1 <= keep <= len(self):
            raise ConfigError(f"keep={keep} of {len(self)} texts", fix=f"keep 1 to {len(self)}")
        if keep == len(self):
            return list(range(keep))
        order = np.array(sorted(range(len(self)), key=lambda i: (self.texts[i], weights[i])))
        # Divided by the largest: the sum of large scores may be infinite.
        p = weights[order] / (weights.max() or 1.0)
        sure = np.flatnonzero(p)
        if len(sure) > keep:
            chosen = generator.choice(len(self), size=keep, replace=False, p=p / p.sum())
        else:
            others = generator.choice(np.flatnonzero(p == 0), size=keep - len(sure), replace=False)
            chosen = np.concatenate([sure, others])
        return sorted(order[chosen].tolist())

    def evolve(self, kept: Sequence[int], generator: Generator, variations: int) -> Population:
        """The kept texts, then the first variation of each, the second of each, and so on: K (1 + variations) texts.

        One call of the generator for K ``variations`` texts. If it fails, this population is what it was.
        """
        seeds = [self.texts[i] for i in kept]
        return Population(seeds + (generator.vary(seeds * variations) if variations else []))

    def state_dict(self) -> dict[str, Tensor]:
        """The texts one after another in UTF-8, (bytes,) uint8, and the bytes of each, (N,) int64."""
        encoded = [text.encode() for text in self.texts]
        joined = np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()
        return {
            "utf8": torch.from_numpy(joined),
            "lengths": torch.tensor([len(text) for text in encoded], dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Texts as ``state_dict`` gave them. Raises RunError if they are damaged."""
        joined, ends = state["utf8"].cpu().numpy().tobytes(), state["lengths"].cumsum(0).tolist()
        try:
            if (ends[-1] if ends else 0) != len(joined):
                raise ValueError
            starts = [0, *ends][: len(ends)]
            self.texts = [joined[a:b].decode() for a, b in zip(starts, ends, strict=True)]
        except ValueError:
            raise RunError(
                "the texts of the checkpoint's population are damaged",
                fix="remove the checkpoint to restart from the beginning with the remaining budget",
            ) from None


def start(generator: Generator, *, seeds: int, variations: int) -> Population:
    """The first population: ``seeds`` fresh texts, and ``variations`` of each as ``Population.evolve`` orders them."""
    fresh = Population(generator.random(seeds))
    return fresh.evolve(range(seeds), generator, variations)


def deduplicate(
    texts: Sequence[str],
    *,
    similarity: np.ndarray | Callable[[list[str]], np.ndarray] | None = None,
    limit: float = 0.99,
) -> list[int]:
    """Indices of the texts that stay, ascending: of texts that are alike, the first.

    Alike are texts that differ in blanks and capitals at most, and those whose similarity is above ``limit``.

    Args:
        similarity: of each pair, such as the cosine of their gradients or embeddings: (N, N) for ``texts``, or a
            function that gives (k, k) for the k texts that no exact copy removed. NaN is alike to nothing.

    Raises ConfigError if its shape does not fit.
    """
    first: dict[str, int] = {}
    for index, text in enumerate(texts):
        first.setdefault(normalised(text), index)
    left = list(first.values())
    if similarity is None:
        return left
    given = callable(similarity)
    matrix = np.asarray(similarity([texts[i] for i in left]) if callable(similarity) else similarity)
    size = len(left) if given else len(texts)
    if matrix.shape != (size, size):
        raise ConfigError(
            f"similarities of shape {matrix.shape} for {size} texts", fix="give one for each pair of texts"
        )
    if not given:
        matrix = matrix[np.ix_(left, left)]
    stay: list[int] = []
    for place in range(len(left)):
        if not (matrix[place, stay] > limit).any():
            stay.append(place)
    return [left[place] for place in stay]


def normalised(text: str) -> str:
    """Without what copying may change: capitals, and how many blanks there are."""
    return " ".join(text.casefold().split())
