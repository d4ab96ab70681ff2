"""Preferences from noisy scores, and a model that is tuned by them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vote_cases import TINY, count_letters, ledger_of, voters

from privlora.errors import ConfigError
from privlora.mechanisms import NoiseSource
from privlora.synthesis.popri import POPri, Preference
from privlora.synthesis.rounds import Rounds, State
from privlora.synthesis.votes import similarity_scores

PROMPTS = ["one", "two"]
SAMPLES = [["ab", "a", "cd"], ["gh", "b", "b"]]


def popri(drawn: Any = SAMPLES, rank: int = 2, samples: int = 3, tuned: Any = None) -> POPri:
    seen: list[list[Preference]] = [] if tuned is None else tuned
    return POPri(PROMPTS, samples, lambda prompts, count: drawn, seen.append, count_letters, rank=rank)


def test_the_best_score_is_chosen_over_that_of_the_rank() -> None:
    votes = np.array([0.1, -0.4, 0.3, 5.0, 7.0, -1.0])
    for rank, rejected in ((2, ["ab", "gh"]), (3, ["a", "b"])):
        made = popri([SAMPLES[0], ["gh", "b", "bb"]] if rank == 2 else [SAMPLES[0], ["b", "gh", "b"]], rank)
        made.propose()
        found = made.preferences(votes)
        assert [p["prompt"] for p in found] == PROMPTS
        assert [p["rejected"] for p in found] == rejected
        assert [p["chosen"] for p in found] == ["cd", "b" if rank == 2 else "gh"]
        assert all(set(p) == {"prompt", "chosen", "rejected"} for p in found)


def test_a_text_is_not_preferred_to_itself() -> None:
    made = popri()
    made.propose()
    assert made.preferences(np.array([0.0, 2.0, 1.0, 0.0, 2.0, 1.0])) == [
        {"prompt": "one", "chosen": "a", "rejected": "cd"}
    ]


def test_settings_and_samples_that_do_not_fit_are_refused() -> None:
    for rank in (1, 4):
        with pytest.raises(ConfigError, match="no preference"):
            popri(rank=rank)
    with pytest.raises(ConfigError, match="no preference"):
        POPri([], 3, lambda prompts, count: [], print, count_letters, rank=2)
    for drawn in (SAMPLES[:1], [SAMPLES[0], SAMPLES[1][:2]], []):
        with pytest.raises(ConfigError, match="3 samples for each of 2 prompts"):
            popri(drawn).propose()


class Model:
    """Writes "a" and "c"; each preference moves its share of "c". A state is stored with its weight."""

    def __init__(self) -> None:
        self.weight = 0.5
        self.steps: list[list[Preference]] = []
        self.draw = np.random.default_rng(3)

    def sample(self, prompts: Sequence[str], count: int) -> list[list[str]]:
        letters = np.where(self.draw.random((len(prompts), count, 8)) < self.weight, "c", "a")
        return [["".join(text) for text in texts] for texts in letters]

    def tune(self, preferences: list[Preference]) -> None:
        self.steps.append(preferences)
        for each in preferences:
            self.weight += 0.02 * np.sign(each["chosen"].count("c") - each["rejected"].count("c"))
        self.weight = float(np.clip(self.weight, 0.05, 0.95))


def rounds_of(model: Model, folder: Path, ledger: Any, sigma: float = TINY) -> Rounds:
    prompts = [f"prompt {i}" for i in range(6)]
    proposer = POPri(prompts, 5, model.sample, model.tune, count_letters, rank=3)
    voting = voters(["cccccccc"] * 30 + ["cccccca"] * 10, similarity_scores)
    return Rounds(proposer, voting, ledger, divisor=40.0, noise=NoiseSource(insecure_seed=2))


def test_the_model_learns_what_the_records_are_like(tmp_path: Path) -> None:
    model = Model()
    with ledger_of(tmp_path, 8, expected_batch_size=40.0) as ledger:
        rounds_of(model, tmp_path, ledger).run(lambda state: None)
    assert len(model.steps) == 8
    assert model.weight > 0.9


def test_before_the_first_round_there_is_a_state(tmp_path: Path) -> None:
    with ledger_of(tmp_path, 2, expected_batch_size=40.0) as ledger:
        first = rounds_of(Model(), tmp_path, ledger).state_dict()
        rounds = rounds_of(Model(), tmp_path, ledger)
        rounds.load_state_dict(first)
        rounds.run(lambda state: None)
        assert len(rounds.released) == 2


def test_after_a_crash_in_tuning_the_same_preferences_come_again(tmp_path: Path) -> None:
    """Without a charge, from the samples that were scored, whatever the model would say now."""
    stored: list[tuple[State, float]] = []
    model = Model()

    def crash(preferences: list[Preference]) -> None:
        model.steps.append(preferences)
        raise KeyboardInterrupt

    with ledger_of(tmp_path, 2, expected_batch_size=40.0) as ledger:
        rounds = rounds_of(model, tmp_path, ledger)
        rounds.proposer._tune = crash  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            rounds.run(lambda state: stored.append((state, model.weight)))
    assert len(stored) == 1

    again = Model()
    state, again.weight = stored[-1]
    with ledger_of(tmp_path, 2) as ledger:
        rounds = rounds_of(again, tmp_path, ledger)
        rounds.load_state_dict(state)
        assert ledger.charges == 1
        rounds.run(lambda state: None)
        assert ledger.charges == 2
    assert again.steps[0] == model.steps[0]
    assert len(again.steps) == 2
