"""POPri with a model: killed at every moment, its rounds go on from one stored state of texts, releases and weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from privlora.accounting import Ledger, Plan, PoissonSampling, StepEvent, read_ledger
from privlora.adapters import LowRankAdapter
from privlora.data.units import Units
from privlora.mechanisms import NoiseSource
from privlora.methods import METHODS, build
from privlora.synthesis.directions import record_directions
from privlora.synthesis.generators import PromptedGenerator
from privlora.synthesis.popri import POPri, Preference
from privlora.synthesis.prompts import PRESETS
from privlora.synthesis.rounds import Rounds
from privlora.synthesis.votes import Voters, similarity_scores
from privlora.synthesis.writers import ModelWriter
from privlora.training.checkpoint import Mark, load_checkpoint, save_checkpoint
from privlora.training.state import States, TrainState
from privlora.training.texts.preferences import PreferenceSettings, PreferenceTuner

LETTERS = "abcdefgh"
RECORDS = ["aab", "abc", "bbb", "cab"]
PLAN = Plan(
    phases=((StepEvent(PoissonSampling(1.0), 1.0), 2),),
    delta=1e-5,
    target_epsilon=None,
    adjacency="add-or-remove-one",
    unit="record",
    records_per_user=None,
    clip_norm=1.0,
    expected_batch_size=4.0,
    method="popri",
    dataset="letters",
    insecure_noise=True,
)


@pytest.fixture(autouse=True)
def _needs_trl() -> None:
    pytest.importorskip("trl", reason="without the extra preferences")


class Killed(Exception):
    """In the place of a crash of the process: nothing in memory is used afterwards."""


def embed(texts: Any) -> Any:
    return np.array([[text.count(letter) for letter in LETTERS] for text in texts], dtype=np.float64)


class Machine:
    """A folder, processes that work on it, and a crash at the n-th event."""

    def __init__(self, folder: Path, crash_at: int = -1, crash: Callable[[str], None] | None = None) -> None:
        self.folder, self.crash_at, self.crash = folder, crash_at, crash
        self.events: list[str] = []
        self.tuned: list[tuple[list[Preference], States, int]] = []

    def event(self, name: str) -> None:
        self.events.append(name)
        if len(self.events) == self.crash_at:
            if self.crash is None:
                raise Killed(name)
            self.crash(name)

    def process(self) -> None:
        """Work until the end or the crash."""
        machine, path = self, self.folder / "state.safetensors"
        ledger_path = self.folder / "ledger.jsonl"
        known = ledger_path.exists()
        model, tokenizer = tiny_model(), tiny_tokenizer()
        adapter = LowRankAdapter(model, rank=2, target_modules=["q_proj", "down_proj"])
        coordinates, optimizer = build(METHODS["dp-adamw"], adapter)
        state = TrainState(coordinates=coordinates, optimizer=optimizer)
        adapter.attach()

        class Tuner(PreferenceTuner):
            def tune(self, preferences: list[Preference]) -> None:
                machine.tuned.append((preferences, state.states(), ledger.charges))
                machine.event("tuning")
                super().tune(preferences)
                machine.event("tuned")

            def _trained(self, preferences: list[Preference]) -> dict[str, Tensor]:
                found = super()._trained(preferences)
                machine.event("trained")
                return found

        class Noise(NoiseSource):
            def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
                machine.event("charged")
                return super().standard_normal(shape)

        tuner = Tuner(state, tokenizer, PreferenceSettings(beta=0.1, learning_rate=0.02, batch_size=2))
        writer = ModelWriter(model, tokenizer, chat=False, max_new_tokens=6)
        generator = PromptedGenerator(writer, PRESETS["text"], seed=0)
        with (Ledger.open if known else lambda p: Ledger.create(p, PLAN))(ledger_path) as ledger:
            rounds = Rounds(
                POPri(["a: ", "b: ", "c: "], 3, generator.samples, tuner.tune, embed, rank=3),
                Voters(
                    record_directions(RECORDS, embed),
                    Units(np.arange(len(RECORDS))),
                    similarity_scores,
                    insecure_seed=4,
                ),
                ledger,
                divisor=4.0,
                noise=Noise(insecure_seed=len(self.events)),
            )
            if path.exists():
                _, parts = load_checkpoint(path, run_id="x")
                state.take_states(parts)
                rounds.load_state_dict(parts["rounds"])
                generator.load_state_dict(parts["generator"])

            def save(votes: dict[str, Tensor]) -> None:
                self.event("saving")
                parts = state.states() | {"rounds": votes, "generator": generator.state_dict()}
                save_checkpoint(path, parts, Mark(ledger.charges, "x", None))
                self.event("saved")

            rounds.run(save)


UNBROKEN = ["charged", "saving", "saved", "tuning", "trained", "tuned", "saving", "saved"] * 2


def test_the_events_of_a_run_that_nothing_stops(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.process()
    assert machine.events == UNBROKEN
    assert all(preferences for preferences, _, _ in machine.tuned)
    first, second = (states["coordinates"] for _, states, _ in machine.tuned)
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("crash_at", range(1, len(UNBROKEN) + 1))
def test_a_crash_at_any_point(crash_at: int, tmp_path: Path) -> None:
    """What was released is tuned on once in effect: the same preferences, on the weights that wrote the samples."""
    machine = Machine(tmp_path, crash_at)
    with pytest.raises(Killed) as crash:
        machine.process()
    before = len(machine.tuned)
    machine.process()
    at = str(crash.value)
    charged, stored = (len(UNBROKEN[:crash_at]) + 7) // 8, UNBROKEN[:crash_at].count("saved")
    lost = charged * 2 - 1 > stored  # charged, and its release was not stored
    assert read_ledger(tmp_path / "ledger.jsonl").charges == 2
    repeated = at in ("tuning", "trained", "tuned") or (at == "saving" and not lost)
    assert len(machine.tuned) == 2 - lost + repeated
    if repeated:
        (preferences, states, _), (again, states_again, shown) = machine.tuned[before - 1 : before + 1]
        assert again == preferences
        for part, tensors in states.items():
            assert all(torch.equal(states_again[part][name], tensor) for name, tensor in tensors.items())
        assert shown == charged  # no charge in between


def test_a_killed_process_leaves_a_state_that_goes_on(tmp_path: Path) -> None:
    """By SIGKILL, after the weights of the second round are trained and before they are stored."""
    machine = Machine(
        tmp_path, UNBROKEN.index("trained", 8) + 1, crash=lambda _: os.kill(os.getpid(), signal.SIGKILL)
    )
    child = os.fork()
    if child == 0:
        try:
            machine.process()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    again = Machine(tmp_path)
    again.process()
    assert len(again.tuned) == 1
    assert again.events[:2] == ["tuning", "trained"]
    assert read_ledger(tmp_path / "ledger.jsonl").charges == 2
