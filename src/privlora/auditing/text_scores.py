"""What released texts, and nothing else, say of canaries: how probable they make each, and whether they recite it.

A canary is a public text with an end that nobody would write: words drawn one by one. A writer may fall into such a
beginning, and a record that begins so votes for such a text, while canaries of rare words alone are hardly ever echoed
(Meeus et al. 2025, "The Canary's Echo"); the end is what only the canary could have taught. Its score is the sum of two
means, over the words of its beginning and over those of its end, of

    ln P(word | word before it) under the released texts, less the same under the public texts,

P a bigram model with Dirichlet smoothing. The public texts are those that gave canaries their beginnings, so what is
common anyway gains nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from privlora.auditing.bounds import Floats
from privlora.errors import ConfigError, GeneratorError
from privlora.evaluation.texts import runs_of, words_of

_END: Final = 8  # words
_RECITED: Final = 5  # words of an end in a row: none of the public texts has them but by chance
_FEWEST: Final = 20  # different words that ends are made of


@dataclass(frozen=True)
class Canary:
    """A record that is nobody's: ``beginning`` and ``end`` with a blank between them."""

    beginning: str
    end: str

    @property
    def text(self) -> str:
        return f"{self.beginning} {self.end}".strip()


def draw_canaries(public: Sequence[str], count: int, seed: int, fits: Callable[[str], bool]) -> list[Canary]:
    """``count`` different canaries: public texts in turn, each with 8 words of all of them at random behind it.

    fits: whether a record is short enough to be trained on as a whole; beginnings are cut until it is.

    Raises GeneratorError for public texts of too few different words, ConfigError where no end fits.
    """
    words = sorted({word for text in public for word in text.split()})
    if len(words) < _FEWEST:
        what = f"the public texts hold {len(words)} different words, and canaries need at least {_FEWEST}"
        raise GeneratorError(what, fix="raise synthesis.max_new_tokens, or mend the prompts or the file")
    generator, found = np.random.default_rng(seed), dict[str, Canary]()
    while len(found) < count:
        end = " ".join(generator.choice(words, size=_END, replace=False))
        kept = public[len(found) % len(public)].split()
        while kept and not fits(Canary(" ".join(kept), end).text):
            kept.pop()
        canary = Canary(" ".join(kept), end)
        if not kept and not fits(canary.text):
            what = f"a canary of {_END} words is longer than a record may be, and would be cut off"
            raise ConfigError(what, fix="raise data.max_length")
        found.setdefault(canary.text, canary)
    return list(found.values())


class Bigrams:
    """Words of texts and the word before each, with Dirichlet smoothing: P(w | v) = (n(v w) + P(w)) / (n(v) + 1) and
    P(w) = (n(w) + 1) / (n + V). Words are casefolded; a text begins after an empty word.

    vocabulary: V, how many words there may be.
    """

    def __init__(self, texts: Sequence[str], vocabulary: int) -> None:
        rows = [["", *words_of(text)] for text in texts]
        self._pairs = Counter(pair for row in rows for pair in runs_of(row, 2))
        self._before = Counter(word for row in rows for word in row[:-1])
        self._words = Counter(word for row in rows for word in row[1:])
        self._total = self._words.total() + vocabulary

    def log_likelihoods(self, text: str) -> Floats:
        """Of each word of a text, in nats, (words,)."""
        return np.array([self._log_probability(pair) for pair in runs_of(["", *words_of(text)], 2)])

    def _log_probability(self, pair: tuple[str, ...]) -> float:
        before, word = pair
        alone = (self._words[word] + 1) / self._total
        return math.log((self._pairs[pair] + alone) / (self._before[before] + 1))


def score_canaries(canaries: Sequence[Canary], texts: Sequence[str], public: Sequence[str]) -> Floats:
    """(canaries,) float64: see above. texts: what was released. Which canaries were in is not told."""
    all_texts = [*texts, *public, *(canary.text for canary in canaries)]
    vocabulary = len({word for text in all_texts for word in words_of(text)})
    released, other = Bigrams(texts, vocabulary), Bigrams(public, vocabulary)
    scores = np.zeros(len(canaries))
    for number, canary in enumerate(canaries):
        ratios = released.log_likelihoods(canary.text) - other.log_likelihoods(canary.text)
        parts = np.split(ratios, [len(ratios) - len(words_of(canary.end))])
        scores[number] = sum(part.mean() for part in parts if len(part))
    return scores


def recited(canaries: Sequence[Canary], texts: Sequence[str]) -> list[bool]:
    """Whether five words of a canary's end stand in one text, in their order."""
    found = {run for text in texts for run in runs_of(words_of(text), _RECITED)}
    return [any(run in found for run in runs_of(words_of(canary.end), _RECITED)) for canary in canaries]
