"""Audits of runs whose noise takes back earlier noise: it is made white again, and a canary's cycle is one game."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_cases import built, read_state
from run_cases import StopAt
from test_canary_run import audited, settings

from privlora.accounting.events import CyclicPoissonSampling, PoissonSampling, StepEvent
from privlora.auditing.bounds import Floats
from privlora.auditing.canary_scores import CanaryMechanism, CanaryState, judge_canaries
from privlora.auditing.canary_signals import Cycles, Signals, Whitening, claimed, log_ratio
from privlora.auditing.gradient_canaries import draw_canaries
from privlora.auditing.shadows import _judge_shadows
from privlora.coordinates import Coordinates, TangentCoordinates
from privlora.coordinates.base import Vector
from privlora.coordinates.span import flattened
from privlora.data.sampling import classes_of
from privlora.errors import ConfigError
from privlora.lab.audits.many_runs import audit_runs
from privlora.mechanisms import CorrelatedNoise, GaussianMechanism, NoiseSource, band_coefficients
from privlora.mechanisms.charges import Uncharged
from privlora.training.loop import Interrupted
from privlora.training.state import TrainState

BANDS, STEPS = 3, 10
C = band_coefficients(BANDS, STEPS)
SURE = 1 - 1e-7  # so that an honest run is convicted by chance in no test


def moved(coordinates: Coordinates, generator: torch.Generator) -> None:
    """To another place, as a step would: spaces that turn are turned a little."""
    if not isinstance(coordinates, TangentCoordinates):
        return
    state = {name: t.clone() for name, t in coordinates.state_dict().items()}
    for name, t in state.items():
        if name[-1] in "UV":
            state[name] = torch.linalg.qr(t + 0.1 * torch.randn(t.shape, generator=generator).to(t)).Q
    coordinates.load_state_dict(state)


def banded(name: str, sigma: float, coordinates: Coordinates | None = None) -> GaussianMechanism:
    coordinates = coordinates or built(name, ["q_proj", "up_proj", "v_proj"])[0]
    return GaussianMechanism(
        coordinates,
        clip_norm=1.0,
        event=StepEvent(CyclicPoissonSampling(1.0, BANDS), sigma),
        expected_batch_size=8.0,
        ledger=Uncharged(),
        noise=NoiseSource(None),
        correlated=CorrelatedNoise(C, coordinates),
    )


def played(
    name: str, sigma: float, *, noise: float = 1.0, steps: int = STEPS, included: int = 6
) -> tuple[CanaryState, list[Any]]:
    """A run of nothing but canaries, whose spaces turn. noise: times what is claimed. Also what each step drew."""
    mechanism, generator, drawn = banded(name, sigma), torch.Generator().manual_seed(1), list[Any]()
    if noise != 1:
        draw = mechanism.noising.noise.standard_normal
        mechanism.noising.noise.standard_normal = lambda shape: draw(shape) * noise  # type: ignore[method-assign]
    canaries = draw_canaries(mechanism.coordinates.adapter, 24, torch.Generator().manual_seed(0))
    state = CanaryState(5, np.arange(24) < included, np.zeros(24), signals=Signals())
    watched = CanaryMechanism(mechanism, canaries, state)
    for _ in range(steps):
        watched.release()
        drawn.append(watched._drawn.tolist())
        moved(mechanism.coordinates, generator)
    return state, drawn


@pytest.mark.parametrize("seen_from", [0, 4])
@pytest.mark.parametrize("name", ["prism", "dp-adamw"])
def test_rows_of_c_are_the_white_noise_that_was_drawn(name: str, seen_from: int) -> None:
    """Also where spaces turn. An attacker who comes late has no row of it before the b-th that it sees."""
    coordinates, _ = built(name, ["q_proj", "up_proj"])
    stream, generator = CorrelatedNoise(C, coordinates), torch.Generator().manual_seed(0)
    whitening = Whitening(C, coordinates, whole=not seen_from)
    for step in range(1, STEPS + 1):
        white: Vector = coordinates.standard_normal(
            lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
        )
        noise = stream.next(step, lambda white=white: white)
        if step > seen_from:
            row, twice, weight = whitening.row(noise, [tuple(2 * t for t in parts) for parts in noise], 1.0)
            known = step - seen_from >= BANDS or not seen_from
            assert whitening.white is known
            assert torch.allclose(flattened(row), flattened(white), atol=1e-9) is known
            assert twice is not None
            torch.testing.assert_close(flattened(twice), 2 * flattened(row))
            assert weight == pytest.approx(sum(c**2 for c in C[: step - seen_from]))
        moved(coordinates, generator)


def test_a_cycle_is_one_game_of_all_its_rows() -> None:
    """Against a plain loop over canaries, cycles and rows, of a run that was broken off once."""
    generator = np.random.default_rng(0)
    classes = generator.integers(BANDS, size=12)
    x, size = generator.standard_normal((STEPS, 12)), generator.random((STEPS, 12))
    expected = np.zeros(12)
    first, found = Cycles(classes, C, np.zeros(12)), np.zeros(12)
    for part in (range(4), range(4, STEPS)):
        game = first if part.start == 0 else Cycles(classes, C, found)
        for turn in part:
            found = game.seen(turn, x[turn], size[turn], 0.3, 1.7)
        for k in range(12):
            for start in part:
                if start % BANDS == classes[k]:
                    rows = [t for t in range(start, start + BANDS) if t in part]
                    signal = sum(C[t - start] * x[t, k] for t in rows)
                    energy = sum(C[t - start] ** 2 * size[t, k] for t in rows)
                    expected[k] += log_ratio(np.array([signal]), np.array([energy]), 0.3, 1.7)[0]
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("name", ["prism", "dp-adamw"])
def test_canaries_are_drawn_in_their_own_turn_alone(name: str) -> None:
    state, drawn = played(name, 1.0)
    classes = classes_of(state.seed, BANDS, 24)
    for turn, found in enumerate(drawn):
        assert found == [k for k in range(6) if classes[k] == turn % BANDS]
    assert sum(map(len, drawn)) > STEPS


@pytest.mark.parametrize("name", ["prism", "dp-adamw"])
def test_signals_of_rows_are_what_an_honest_mechanism_adds(name: str) -> None:
    state, drawn = played(name, 1e-5)
    found = state.signals
    weights = [
        sum(C[t - s] ** 2 * len(drawn[s]) for s in range(max(0, t - BANDS + 1), t + 1)) for t in range(STEPS)
    ]
    assert found.drawn == pytest.approx(sum(weights))
    assert found.signal == pytest.approx(found.expected, rel=0.02)  # less the mechanism's slack
    assert found.energy < 1e-3 * found.expected**2
    assert state.scores[:6].min() > state.scores[6:].max()


def test_a_quarter_of_the_noise_is_convicted_and_all_of_it_is_not() -> None:
    event, steps = StepEvent(CyclicPoissonSampling(1.0, BANDS), 3.0), 72
    for noise in (1.0, 0.25):
        state, _ = played("prism", 3.0, noise=noise, steps=steps, included=12)
        found = judge_canaries(state, event, steps, 1e-5, confidence=SURE)
        assert found.violated is (noise < 1)
        assert (found.epsilon_lower > found.epsilon_claimed) is (noise < 1)


def test_the_noise_of_rows_has_the_law_that_is_judged_by() -> None:
    sigma = 20.0
    state, _ = played("prism", sigma)
    found = state.signals
    assert abs(found.signal - found.expected) < 5 * sigma * found.drawn**0.5
    assert abs(found.energy / sigma**2 / found.dimensions - 1) < 6 * (2 / found.dimensions) ** 0.5 + 0.02


def test_what_is_claimed_of_a_run_is_judged_by_its_cycles() -> None:
    """ceil(10 / 3) independent releases, as they are priced."""
    event, alone = StepEvent(CyclicPoissonSampling(0.6, 3), 1.2), StepEvent(PoissonSampling(0.6), 1.2)
    scores = np.where(np.arange(200) % 2 == 0, 1.0, -1.0) * (np.arange(200) % 10 != 3)
    state = CanaryState(0, np.arange(200) % 2 == 0, scores + np.arange(200) * 1e-9)
    assert judge_canaries(state, event, 10, 1e-3) == judge_canaries(state, alone, 4, 1e-3)

    def judged(each: StepEvent, steps: int) -> dict[str, Any]:
        privacy = settings(Path("a"), steps=steps)
        some: Floats = np.random.default_rng(0).standard_normal(50)
        found = _judge_shadows(privacy, "codes", each, some + 2, some)
        assert (found.events, found.steps) == ([(each, steps)], steps)
        return {name: value for name, value in found.to_dict().items() if name not in ("mechanism", "steps")}

    assert judged(event, 10) == judged(alone, 4)


@pytest.mark.parametrize("name", ["prism", "dp-adamw"])
@pytest.mark.parametrize("quarter", [False, True])
def test_a_whole_run_is_audited_with_its_bands(
    name: str, quarter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quarter:
        draw = NoiseSource.standard_normal
        monkeypatch.setattr(NoiseSource, "standard_normal", lambda self, shape: draw(self, shape) * 0.25)
    found = audited(tmp_path / "a", name=name, steps=16, bands=4, confidence=SURE)
    assert found.violated is quarter
    assert (tmp_path / "a/private/cycles.json").exists()


def test_an_interrupted_audit_takes_no_row_for_white_that_lacks_earlier_noise(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        audited(tmp_path / "a", steps=6, bands=3, observer=StopAt(2))
    before = read_state(tmp_path / "a")
    assert before.signals is not None
    with pytest.raises(Interrupted):
        audited(tmp_path / "a", steps=6, bands=3, observer=StopAt(4))
    between = read_state(tmp_path / "a")
    assert between.releases == 4
    assert between.signals == before.signals  # two rows that still hold noise of the first two steps
    audited(tmp_path / "a", steps=6, bands=3)
    after = read_state(tmp_path / "a")
    assert after.releases == 6
    assert after.signals == before.signals


def test_a_resumed_audit_keeps_its_scores_and_whose_turn_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after step 2 of cycles of 3: class 2 is next, and what classes 0 and 1 showed stays."""
    drawn, release = list[list[int]](), CanaryMechanism.release

    def noted(self: CanaryMechanism, *given: Any) -> Any:
        released = release(self, *given)
        drawn.append(self._drawn.tolist())
        return released

    monkeypatch.setattr(CanaryMechanism, "release", noted)
    monkeypatch.setattr(CanaryState, "draw", lambda k: CanaryState(7, np.arange(k) % 2 == 0, np.zeros(k)))
    given = {"steps": 6, "bands": 3, "expected_batch_size": 6.6}
    with pytest.raises(Interrupted):
        audited(tmp_path / "a", **given, observer=StopAt(2))
    before = read_state(tmp_path / "a")
    with pytest.raises(Interrupted):
        audited(tmp_path / "a", **given, observer=StopAt(3))
    after = read_state(tmp_path / "a")
    classes = classes_of(before.seed, 3, 40)
    assert drawn[2]
    assert all(set(classes[found]) <= {turn} for turn, found in enumerate(drawn))
    assert np.abs(before.scores[classes == 0]).min() > 0
    np.testing.assert_allclose(after.scores[classes != 2], before.scores[classes != 2], atol=1e-12)
    assert np.abs(after.scores[classes == 2]).min() > 0


def test_coefficients_that_are_too_long_show_as_missing_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of norm 4, which the constructor refuses: z is then a quarter of what the gradients would need."""
    assert claimed((0.6, 0.8)) == (0.6, 0.8)
    assert claimed((3.0, 4.0)) == (0.6, 0.8)
    made = CorrelatedNoise.__init__

    def longer(self: CorrelatedNoise, coefficients: Any, frames: Any) -> None:
        made(self, coefficients, frames)
        self.coefficients = tuple(4 * c for c in coefficients)

    monkeypatch.setattr(CorrelatedNoise, "__init__", longer)
    state, _ = played("prism", 3.0, steps=72, included=12)
    event = StepEvent(CyclicPoissonSampling(1.0, BANDS), 3.0)
    assert judge_canaries(state, event, 72, 1e-5, confidence=SURE).violated


def test_where_a_space_changes_its_size_whitening_begins_anew_with_the_noise() -> None:
    class Flat:
        def frame(self) -> dict[str, torch.Tensor]:
            return {}

        def followed(self, vector: Vector, frame: Any) -> Vector:
            return vector

    stream, whitening = CorrelatedNoise(C, Flat()), Whitening(C, Flat(), whole=False)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 7):
        size = 4 if step < 3 else 5
        white: Vector = [(torch.randn(size, generator=generator, dtype=torch.float64),)]
        row, _, _ = whitening.row(stream.next(step, lambda white=white: white), None, 0.0)
        assert whitening.white is (step >= 3)
        if step >= 3:
            torch.testing.assert_close(row[0][0], white[0][0])


def test_what_is_refuted_is_told_with_a_bound_above_it() -> None:
    """The search is coarse where the claimed noise_multiplier is far above those that it goes down to."""
    event, steps = StepEvent(PoissonSampling(0.01), 30.0), 4
    ideal = CanaryState(0, np.arange(400) % 2 == 0, np.where(np.arange(400) % 2 == 0, 1.0, -1.0))
    found = judge_canaries(ideal, event, steps, 1e-5)
    assert found.violated
    assert found.epsilon_lower >= found.epsilon_claimed


def test_texts_are_planted_in_runs_with_bands(tmp_path: Path) -> None:
    found = audited(tmp_path / "a", kind="codes", steps=4, bands=2)
    assert not found.violated
    assert np.abs(read_state(tmp_path / "a").scores).max() > 0


def test_runs_played_one_after_another_have_independent_noise_alone() -> None:
    coordinates, optimizer = built("dp-adamw", ["q_proj"])
    mechanism = banded("dp-adamw", 1.0, coordinates)
    canary = draw_canaries(coordinates.adapter, 1, torch.Generator().manual_seed(0))
    state = TrainState(coordinates=coordinates, optimizer=optimizer)
    with pytest.raises(ConfigError, match="share one source of correlated noise"):
        audit_runs(state, mechanism, [(mechanism.event, 2)], canary, steps=2, learning_rate=0.1, trials=100)
