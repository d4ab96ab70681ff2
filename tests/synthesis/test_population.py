"""Populations: the law of choosing, the order of evolving, and texts that come back from a checkpoint."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from synthesis_cases import StubGenerator

from privlora.errors import ConfigError, GeneratorError, RunError
from privlora.synthesis.population import Population, deduplicate, start

LETTERS = Population(list("dacb"))


def test_choosing_draws_one_after_another_in_proportion() -> None:
    """Against the law written out: the probability of each pair, whichever of the two came first."""
    scores, draws = np.array([0.1, -0.4, 0.3, -0.2]), 20_000
    p = np.abs(scores) / np.abs(scores).sum()
    law = {
        pair: sum(p[a] * p[b] / (1 - p[a]) for a, b in permutations(pair))
        for pair in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    }
    assert sum(law.values()) == pytest.approx(1)
    generator = np.random.default_rng(1)
    found = dict.fromkeys(law, 0)
    for _ in range(draws):
        found[tuple(LETTERS.choose(scores, 2, generator))] += 1  # type: ignore[index]
    for pair, probability in law.items():
        assert abs(found[pair] / draws - probability) < 5 * (probability * (1 - probability) / draws) ** 0.5


@given(
    scores=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=30),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_choosing_gives_different_texts_and_does_not_see_their_order(
    scores: list[float], seed: int, data: st.DataObject
) -> None:
    count = len(scores)
    keep = data.draw(st.integers(1, count))
    texts = [f"text {i % 7} {i}" for i in range(count)]
    chosen = Population(texts).choose(np.array(scores), keep, np.random.default_rng(seed))
    assert chosen == sorted(set(chosen))
    assert len(chosen) == keep
    assert all(0 <= i < count for i in chosen)
    order = data.draw(st.permutations(range(count)))
    moved = Population([texts[i] for i in order]).choose(
        np.array([scores[i] for i in order]), keep, np.random.default_rng(seed)
    )
    assert {texts[i] for i in chosen} == {texts[order[i]] for i in moved}


def test_signs_and_sizes_do_not_count() -> None:
    for seed in range(20):
        drawn = [
            LETTERS.choose(np.array([1.0, 2, 3, 4]) * factor, 2, np.random.default_rng(seed))
            for factor in (1, -1, 1e-300, 4e307)
        ]
        assert drawn[1:] == drawn[:1] * 3


def test_scores_of_zero_come_last() -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        assert 1 in LETTERS.choose(np.array([0.0, -3, 0, 0]), 2, generator)
        assert LETTERS.choose(np.array([0.0, -3, 0, 1]), 2, generator) == [1, 3]
    every = {tuple(LETTERS.choose(np.zeros(4), 2, np.random.default_rng(seed))) for seed in range(100)}
    assert len(every) == 6


@pytest.mark.parametrize(
    ("scores", "keep"),
    [([1.0, 2, 3], 2), ([1.0, 2, 3, np.nan], 2), ([1.0, 2, 3, np.inf], 2), ([1.0] * 4, 0), ([1.0] * 4, 5)],
)
def test_what_cannot_be_chosen_from(scores: list[float], keep: int) -> None:
    with pytest.raises(ConfigError):
        LETTERS.choose(np.array(scores), keep, np.random.default_rng(0))


def test_evolving_asks_for_each_variation_once_and_keeps_the_order() -> None:
    generator = StubGenerator()
    population = start(generator, seeds=4, variations=2)
    assert generator.asked == [4, [f"seed {i}" for i in range(4)] * 2]
    assert population.texts[:4] == [f"seed {i}" for i in range(4)]
    assert population.texts[4:] == [f"seed {i % 4}, varied {i}" for i in range(8)]
    generator.asked.clear()
    evolved = population.evolve([1, 3], generator, 3)
    assert generator.asked == [["seed 1", "seed 3"] * 3]  # K (L - 1) texts
    assert evolved.texts[:2] == ["seed 1", "seed 3"]
    assert len(evolved) == 2 * (1 + 3)
    assert population.texts[0] == "seed 0"


def test_no_variations_are_no_calls() -> None:
    generator = StubGenerator()
    fixed = start(generator, seeds=3, variations=0)
    assert fixed.evolve([0, 1, 2], generator, 0).texts == fixed.texts
    assert generator.asked == [3]


def test_a_failing_generator_changes_nothing() -> None:
    class Failing(StubGenerator):
        def vary(self, texts: object) -> list[str]:
            raise GeneratorError("it broke", fix="mend it")

    population = Population(["a", "b"])
    with pytest.raises(GeneratorError):
        population.evolve([0], Failing(), 1)
    assert population.texts == ["a", "b"]


@given(texts=st.lists(st.text(max_size=20), max_size=8))
@settings(max_examples=200, deadline=None)
def test_texts_come_back(texts: list[str]) -> None:
    other = Population([])
    other.load_state_dict(Population(texts).state_dict())
    assert other.texts == texts


def test_texts_come_back_from_a_file() -> None:
    texts = ["a\x00b\r\n", "ζ 漢字 🜁 e\u0301", "\ufeff\u202e", " "]
    found = Population([])
    found.load_state_dict(load(save(Population(texts).state_dict())))
    assert found.texts == texts


@pytest.mark.parametrize(
    ("utf8", "lengths"), [([65, 66], [1]), ([65], [1, 1]), ([0xC3, 0xA9], [1, 1]), ([0xFF], [1])]
)
def test_a_damaged_population_is_refused(utf8: list[int], lengths: list[int]) -> None:
    population = Population(["kept"])
    with pytest.raises(RunError, match="damaged"):
        population.load_state_dict(
            {"utf8": torch.tensor(utf8, dtype=torch.uint8), "lengths": torch.tensor(lengths)}
        )
    assert population.texts == ["kept"]


def test_copies_are_left_out() -> None:
    texts = ["One text", "another", "one  TEXT\n", "another", "third"]
    assert deduplicate(texts) == [0, 1, 4]
    assert deduplicate([]) == []


def test_near_copies_are_left_out() -> None:
    cosines = np.eye(4)
    cosines[0, 1] = cosines[1, 0] = 0.995  # 1 is like 0
    cosines[1, 2] = cosines[2, 1] = 0.995  # and 2 is like 1 alone, which is gone
    cosines[0, 3] = cosines[3, 0] = np.nan
    texts = list("abcd")
    assert deduplicate(texts, similarity=cosines) == [0, 2, 3]
    assert deduplicate(texts, similarity=cosines, limit=0.999) == [0, 1, 2, 3]
    seen: list[list[str]] = []

    def measured(left: list[str]) -> np.ndarray:
        seen.append(left)
        return np.ones((len(left), len(left)))

    assert deduplicate(["a", "A", "b"], similarity=measured) == [0]
    assert seen == [["a", "b"]]
    assert deduplicate(["a", "A", "b"], similarity=np.eye(3)) == [0, 2]
    with pytest.raises(ConfigError, match="shape"):
        deduplicate(texts, similarity=np.eye(3))
