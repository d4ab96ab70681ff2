"""The signals of all canaries of a run together: what is summed, its law in every space, and how it is judged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from audit_cases import SPACES, SPANS, setting

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.auditing import canary_scores, canary_signals
from privlora.auditing.canary_scores import CanaryMechanism, CanaryState, _Game, judge_canaries
from privlora.auditing.canary_signals import Signals, added_by
from privlora.auditing.gradient_canaries import draw_canaries
from privlora.coordinates.span import flattened
from privlora.methods import METHODS

BY_MODULE = [(name, "per-module") for name in (*SPACES, *SPANS) if "per-module" in METHODS[name].clippings]
every_space = pytest.mark.parametrize(
    ("name", "clipping"), [*((name, None) for name in (*SPACES, *SPANS)), *BY_MODULE]
)


def played(
    name: str, sigma: float, releases: int, *, noise: float = 1.0, clipping: str | None = None
) -> CanaryState:
    """A state that did not move, all canaries of which that are in are drawn. noise: times what is claimed."""
    mechanism, short, _ = setting(name, sigma, clipping=clipping)
    if noise != 1:
        draw = mechanism.noising.noise.standard_normal
        mechanism.noising.noise.standard_normal = lambda shape: draw(shape) * noise  # type: ignore[method-assign]
    canaries = draw_canaries(mechanism.coordinates.adapter, 24, torch.Generator().manual_seed(0))
    state = CanaryState(0, np.arange(24) < 3, np.zeros(24), signals=Signals())
    watched = CanaryMechanism(mechanism, canaries, state)
    for _ in range(releases):
        watched.accumulate(short.captured(mechanism.coordinates.adapter))
        watched.release()
        mechanism.coordinates.advance()
    return state


@every_space
def test_without_noise_a_signal_is_what_an_honest_mechanism_adds(name: str, clipping: str | None) -> None:
    found = played(name, 0.0, 2, clipping=clipping).signals
    assert found.drawn == 6
    assert found.signal == pytest.approx(found.expected, rel=0.02)  # less the mechanism's slack
    assert found.energy < 1e-3 * found.expected**2


@every_space
def test_noise_has_the_law_that_is_judged_by(name: str, clipping: str | None) -> None:
    sigma = 20.0  # beside which the slack is nothing
    found = played(name, sigma, 24, clipping=clipping).signals  # a quarter less noise would show
    assert found.drawn == 72
    assert abs(found.signal - found.expected) < 5 * sigma * math.sqrt(found.drawn)
    assert found.dimensions <= 24 * 21
    spread = math.sqrt(2 / found.dimensions)
    assert abs(found.energy / sigma**2 / found.dimensions - 1) < 5 * spread + 0.02


@every_space
def test_canaries_that_are_measured_together_are_those_of_each_by_itself(
    name: str, clipping: str | None
) -> None:
    mechanism, _, _ = setting(name, 20.0, clipping=clipping)
    mechanism.coordinates.prepare()
    canaries = draw_canaries(mechanism.coordinates.adapter, 5, torch.Generator().manual_seed(0))
    which = torch.tensor([0, 2, 3])
    alone = torch.stack([flattened(added_by(mechanism, canaries, one)) for one in which.split(1)])
    found = canary_signals._apart(mechanism, canaries, which)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


def test_what_was_drawn_is_not_measured_as_noise() -> None:
    """Neither the canaries of a batch nor what they add in the others' directions."""
    found = played("dp-adamw", 1e-3, 4).signals
    assert found.energy / found.dimensions < 1e-3
    assert found.dimensions == 4 * 21


@pytest.mark.long
def test_a_quarter_of_the_noise_is_convicted_and_all_of_it_is_not() -> None:
    event, steps = StepEvent(PoissonSampling(1.0), 3.0), 30
    honest = judge_canaries(played("prism", 3.0, steps), event, steps, 1e-5, confidence=0.9999)
    assert not honest.violated
    broken = judge_canaries(played("prism", 3.0, steps, noise=0.25), event, steps, 1e-5, confidence=0.9999)
    assert broken.violated
    assert broken.epsilon_signals is not None
    assert broken.epsilon_lower == broken.epsilon_signals > broken.epsilon_claimed


def test_no_noise_at_all_is_judged_quickly() -> None:
    event = StepEvent(PoissonSampling(0.5), 1.0)
    silent = Signals(drawn=100, signal=100.0, expected=100.0, energy=0.0, dimensions=500)
    assert silent.largest_mu(event, 10, 0.95) > 1
    assert silent.largest_mu(event, 10, 0.95) < 100


def test_signals_and_guesses_share_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()
    of_game, largest = _Game.bound, Signals.largest_mu

    def of_guesses(self: _Game, correct: int) -> float:
        asked.append(1 - self.confidence)
        return of_game(self, correct)

    def of_signals(self: Signals, event: StepEvent, steps: int, confidence: float) -> float:
        asked.append(1 - confidence)
        return largest(self, event, steps, confidence)

    plain, bound = list[float](), canary_scores.one_run_epsilon

    def of_plain(correct: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
        plain.append(1 - confidence)
        return bound(correct, guesses, canaries, delta, confidence)

    monkeypatch.setattr(canary_scores, "one_run_epsilon", of_plain)
    monkeypatch.setattr(_Game, "bound", of_guesses)
    monkeypatch.setattr(Signals, "largest_mu", of_signals)
    event = StepEvent(PoissonSampling(0.2), 1.0)
    state = CanaryState.draw(100)
    state.scores = np.random.default_rng(0).standard_normal(100)
    with_signals = replace(state, signals=Signals(10, 10.0, 10.0, 500.0, 500))
    assert judge_canaries(with_signals, event, 4, 1e-5, confidence=0.9).epsilon_signals is not None
    assert sum(asked) == pytest.approx(0.1)
    assert sum(plain) == pytest.approx(0.1)  # which assumes nothing, and so stands by itself
    assert judge_canaries(state, event, 4, 1e-5, confidence=0.9).epsilon_signals is None


def test_they_are_kept_with_the_canaries(tmp_path: Path) -> None:
    state = replace(CanaryState.draw(20), signals=Signals(3, 1 / 3, 2.5, 1e-7, 40))
    state.save(tmp_path / "state")
    assert CanaryState.load(tmp_path / "state").signals == state.signals
