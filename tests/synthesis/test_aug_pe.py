"""Private evolution on letters: what is kept, what follows, and that little noise finds what records are like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vote_cases import LETTERS, Doubling, count_letters, ledger_of, voters

from privlora.errors import ConfigError
from privlora.mechanisms import NoiseSource
from privlora.synthesis.aug_pe import AugPE
from privlora.synthesis.generators import FileGenerator
from privlora.synthesis.population import Population
from privlora.synthesis.rounds import Rounds
from privlora.synthesis.votes import NearestVotes


def evolution(texts: list[str], **settings: Any) -> AugPE:
    defaults: dict[str, Any] = {"generator": Doubling(), "embed": count_letters, "keep": 2, "variations": 1}
    return AugPE(Population(texts), **{**defaults, **settings})


FOUR = ["a", "b", "c", "d"]


def test_rank_keeps_the_highest_counts_and_the_first_of_equal_ones() -> None:
    for votes, kept in (
        ([0.1, 3.0, -7.0, 2.0], [1, 3]),
        ([1.0, 1.0, 1.0, 1.0], [0, 1]),
        ([-1.0, -3.0, 0.5, -2.0], [2, 0]),
    ):
        assert evolution(FOUR).kept(np.array(votes)) == kept


def test_fresh_texts_may_stand_beside_what_is_kept() -> None:
    evolving = evolution(FOUR, fresh=True)
    evolving.use(np.array([0.0, 5.0, 0.0, 4.0]), 1)
    assert evolving.population.texts == ["b", "d", "a", "b"]


def test_what_is_kept_and_its_variations_are_the_next_population() -> None:
    evolving = evolution(FOUR)
    evolving.use(np.array([0.0, 5.0, 0.0, 4.0]), 1)
    assert evolving.population.texts == ["b", "d", "bb", "dd"]
    evolving = evolution([*FOUR, "e", "f"], variations=2)
    evolving.use(np.array([9.0, 5.0, 0.0, 4.0, 0.0, 0.0]), 1)
    assert sorted(evolving.population.texts) == ["a", "aa", "aa", "b", "bb", "bb"]


def test_a_generator_of_the_room_may_vary() -> None:
    evolving = evolution(FOUR, generator=FileGenerator(["e", "f", "g"], seed=0))
    evolving.use(np.array([0.0, 5.0, 0.0, 4.0]), 1)
    assert evolving.population.texts[:2] == ["b", "d"]
    assert set(evolving.population.texts[2:]) < {"e", "f", "g"}


def test_candidates_stand_where_they_are() -> None:
    generator = Doubling()
    plain = evolution(["ab", "cd"], keep=1, generator=generator).propose()
    np.testing.assert_allclose(plain[0, :2], [0.5**0.5] * 2)
    assert generator.asked == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "too small"),
        ({"variations": -1}, "too small"),
        ({"keep": 3}, "keep its size"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evolution(FOUR, **settings)


class Mixing:
    """Varies a text by a public draw: one of its letters becomes another."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(0)

    def random(self, count: int) -> list[str]:
        return ["".join(self.draw.choice(list(LETTERS), 6)) for _ in range(count)]

    def vary(self, texts: Any) -> list[str]:
        varied = []
        for text in texts:
            place, letter = int(self.draw.integers(len(text))), str(self.draw.choice(list(LETTERS)))
            varied.append(text[:place] + letter + text[place + 1 :])
        return varied


def test_evolution_finds_what_the_records_are_like(tmp_path: Path) -> None:
    """Two kinds of records, of which no first text is one; little noise against their numbers."""
    records = ["aaaabb"] * 300 + ["cddddd"] * 200
    generator = Mixing()
    first = generator.random(20)
    evolving = AugPE(Population(first), generator, count_letters, keep=5, variations=3)
    with ledger_of(tmp_path, 12, sigma=4.0, expected_batch_size=500.0) as ledger:
        rounds = Rounds(
            evolving,
            voters(records, NearestVotes(1)),
            ledger,
            divisor=500.0,
            noise=NoiseSource(insecure_seed=2),
        )
        rounds.run(lambda state: None)
    assert len(rounds.released) == 12

    def nearness(texts: list[str]) -> float:
        """Mean over records of the cosine to their nearest text."""
        ours, theirs = (count_letters(t) for t in (texts, ["aaaabb", "cddddd"]))
        cosines = (theirs @ ours.T) / np.outer(np.linalg.norm(theirs, axis=1), np.linalg.norm(ours, axis=1))
        return float(cosines.max(axis=1) @ [0.6, 0.4])

    assert nearness(first) < 0.85
    assert nearness(evolving.population.texts) > 0.97
    # The generator was handed texts of its own alone.
    assert not {"aaaabb", "cddddd"} & set(first)
