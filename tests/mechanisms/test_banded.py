"""Correlated noise: what one unit can move by brute force, the law of what is drawn, and when nothing is drawn."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import combinations

import numpy as np
import pytest
import torch
from counting_ledger import CountingLedger
from tiny_models import tiny_model
from torch import Tensor

from privlora.accounting.events import CyclicPoissonSampling, PoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.coordinates.base import Vector
from privlora.coordinates.starts import tangent_start
from privlora.errors import PrivacyError
from privlora.mechanisms import (
    AdaptiveClipNorm,
    CorrelatedNoise,
    GaussianMechanism,
    NoiseSource,
    band_coefficients,
    prefix_error,
    row_norms,
)
from privlora.mechanisms.noising import Noising

Matrix = np.ndarray


class Flat:
    """Coordinates that never change."""

    def frame(self) -> dict[str, Tensor]:
        return {}

    def followed(self, vector: Vector, frame: Mapping[str, Tensor]) -> Vector:
        return vector


def rows_of(steps: int, bands: int, begins: int = 0) -> Matrix:
    """(T, T): what the stream makes of white noise, row by row; anew at step ``begins``."""
    stream = CorrelatedNoise(band_coefficients(bands, steps), Flat())
    made = []
    for t in range(steps):
        if begins and t == begins:
            stream = CorrelatedNoise(band_coefficients(bands, steps), Flat())
        white = torch.zeros(steps, dtype=torch.float64)
        white[t] = 1.0
        (row,), *_ = stream.next(t + 1, lambda white=white: [(white,)])
        made.append(row.numpy())
    return np.array(made)


@pytest.mark.parametrize(
    ("steps", "bands", "begins"), [(7, 2, 0), (8, 3, 0), (9, 4, 5), (6, 6, 0), (8, 3, 1)]
)
def test_no_pattern_of_participation_moves_the_sums_by_more_than_is_paid_for(
    steps: int, bands: int, begins: int
) -> None:
    """Every class, every set of its steps, gradients of norm 1 in any direction: each step by itself moves C g by 1 at
    most, in rows that no other step of the unit moves. Also where the noise begins anew on the way."""
    c = np.linalg.inv(rows_of(steps, bands, begins))
    assert np.abs(np.triu(c, 1)).max() < 1e-12
    assert np.abs(np.tril(c, -bands)).max() < 1e-12
    generator = np.random.default_rng(0)
    for first in range(bands):
        own = range(first, steps, bands)
        for count in range(1, len(own) + 1):
            for chosen in combinations(own, count):
                g = np.zeros((steps, 3))
                for s in chosen:
                    direction = generator.normal(size=3)
                    g[s] = direction / np.linalg.norm(direction)
                moved = c @ g
                parts = [np.linalg.norm(moved[s : s + bands]) for s in chosen]
                assert max(parts) <= 1 + 1e-9
                assert np.isclose(np.linalg.norm(moved) ** 2, np.sum(np.square(parts)))


class Turning:
    """Planes in five dimensions, another one at every step; what comes from an earlier one is projected."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randn(steps + 1, 5, 2, generator=generator, dtype=torch.float64)
        self.planes, self.step = torch.linalg.qr(drawn).Q, 1

    def frame(self) -> dict[str, Tensor]:
        return {"plane": self.planes[self.step]}

    def followed(self, vector: Vector, frame: Mapping[str, Tensor]) -> Vector:
        return [(self.planes[self.step].mT @ frame["plane"] @ vector[0][0],)]


@pytest.mark.parametrize("resumed", [0, 5])
def test_each_noise_follows_from_where_it_was_drawn(resumed: int) -> None:
    """Block by block C has c_k P_t^T P_s, not the product of all projections between, which lose more at each step; and
    no gradient of norm 1 moves C g by more than 1, whatever its direction."""
    steps, bands = 6, 4
    c = band_coefficients(bands, steps)
    inverse = np.zeros((2 * steps, 2 * steps))
    for column in range(2 * steps):
        space = Turning(steps)
        stream = CorrelatedNoise(c, space)
        for space.step in range(1, steps + 1):
            if space.step == resumed:
                kept, stream = stream.state_dict(), CorrelatedNoise(c, space)
                stream.load_state_dict(kept)
            white = torch.zeros(steps, 2, dtype=torch.float64)
            white.view(-1)[column] = 1.0
            made = stream.next(space.step, lambda white=white, t=space.step: [(white[t - 1],)])
            inverse[2 * space.step - 2 : 2 * space.step, column] = made[0][0].numpy()
    found = np.linalg.inv(inverse)
    planes = Turning(steps).planes[1:]
    for t in range(steps):
        for s in range(steps):
            block = found[2 * t : 2 * t + 2, 2 * s : 2 * s + 2]
            expected = (
                c[t - s] * (planes[t].mT @ planes[s]).numpy() if 0 <= t - s < bands else np.zeros((2, 2))
            )
            np.testing.assert_allclose(block, expected, atol=1e-12)
    for s in range(steps):
        assert np.linalg.norm(found[:, 2 * s : 2 * s + 2], 2) <= 1 + 1e-9


def test_a_unit_that_comes_again_too_early_would_move_more() -> None:
    """What the test above rests on: it would see it."""
    c = np.linalg.inv(rows_of(8, 3))
    assert np.linalg.norm(c[:, 2] + c[:, 3]) ** 2 > 2.5


@pytest.mark.parametrize("bands", [2, 3, 5])
def test_the_law_of_what_is_released(bands: int) -> None:
    """Entries are independent, and of each the noise of T steps has the covariance C^-1 C^-T (sigma C / b)^2."""
    steps, entries, scale, divisor = 7, 40_000, 1.5, 3.0
    coefficients = band_coefficients(bands, steps)
    noising = Noising(CountingLedger(), NoiseSource(5), CorrelatedNoise(coefficients, Flat()))
    event = StepEvent(CyclicPoissonSampling(0.1, bands), 1.0)
    found = []
    for _ in range(steps):
        made = noising.charge(event).vector(
            None,
            lambda draw: [(draw((entries,)),)],
            scale=scale,
            divisor=divisor,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        found.append(made[0][0].numpy())
    inverse = np.linalg.inv(
        sum(np.diag([value] * (steps - k), -k) for k, value in enumerate(coefficients) if k < steps)
    )
    expected = (scale / divisor) ** 2 * inverse @ inverse.T
    covariance = np.cov(np.array(found))
    spread = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / entries)
    assert np.abs((covariance - expected) / spread).max() < 5
    assert np.allclose(np.sqrt(np.diag(expected)), scale / divisor * row_norms(coefficients, steps))


def mechanism(bands: int = 3, *, noise_bands: int | None = None, seed: int = 0) -> GaussianMechanism:
    adapter = LowRankAdapter(tiny_model(), rank=2, target_modules=["q_proj"])
    coordinates = tangent_start(adapter, "w0-subspace", seed=0, scale=1.0, dtype=torch.float64)
    return GaussianMechanism(
        coordinates,
        clip_norm=2.0,
        event=StepEvent(CyclicPoissonSampling(0.1, bands), 1.5),
        expected_batch_size=4.0,
        ledger=CountingLedger(),
        noise=NoiseSource(seed),
        correlated=CorrelatedNoise(band_coefficients(noise_bands or bands, 12), coordinates),
    )


def test_a_release_says_how_large_its_own_noise_is() -> None:
    made = mechanism()
    releases = [made.release() for _ in range(4)]
    expected = 1.5 * 2.0 / 4.0 * row_norms(band_coefficients(3, 12), 4)
    assert np.allclose([release.noise_std for release in releases], expected)
    for release, std in zip(releases, expected, strict=True):
        square = sum(float(t.square().sum()) for parts in release.vector for t in parts)
        assert abs(square / (std**2 * made.coordinates.dimension) - 1) < 0.25


@pytest.mark.parametrize(
    ("event", "bands"),
    [
        (StepEvent(PoissonSampling(0.1), 1.0), 3),
        (StepEvent(CyclicPoissonSampling(0.1, 3), 1.0), 2),
        (StepEvent(CyclicPoissonSampling(0.1, 3), 1.0), None),
        (StepEvent(CyclicPoissonSampling(0.1, 2), 1.0), 3),
    ],
)
def test_bands_and_classes_are_as_many(event: StepEvent, bands: int | None) -> None:
    coordinates = mechanism().coordinates
    noise = None if bands is None else CorrelatedNoise(band_coefficients(bands, 12), coordinates)
    with pytest.raises(PrivacyError, match="bands"):
        GaussianMechanism(
            coordinates,
            clip_norm=1.0,
            event=event,
            expected_batch_size=4.0,
            ledger=CountingLedger(),
            correlated=noise,
        )


def test_no_count_of_norms_beside_it() -> None:
    coordinates = mechanism().coordinates
    with pytest.raises(PrivacyError, match="counts of norms"):
        GaussianMechanism(
            coordinates,
            clip_norm=1.0,
            event=StepEvent(CyclicPoissonSampling(0.1, 3), 1.0),
            expected_batch_size=4.0,
            ledger=CountingLedger(),
            correlated=CorrelatedNoise(band_coefficients(3, 12), coordinates),
            adaptive=AdaptiveClipNorm(1.0, 0.5),
        )


def test_nothing_but_a_vector_a_step() -> None:
    charged = mechanism().noising.charge(StepEvent(CyclicPoissonSampling(0.1, 3), 1.0))
    with pytest.raises(PrivacyError, match="a tensor by itself"):
        charged.tensor(torch.zeros(3), scale=1.0, divisor=1.0, dtype=torch.float64)


def test_after_a_draw_that_failed_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of that step's noise may be out, and what the next step should take back is not known."""
    made, drawn = mechanism(), NoiseSource.standard_normal
    made.release()

    def fails(self: NoiseSource, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 3 and shape[-1] == shape[-2]:
            return drawn(self, shape)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "standard_normal", fails)
        with pytest.raises(MemoryError):
            made.release()
    with pytest.raises(PrivacyError, match="failed"):
        made.release()
    assert made.noising.correlated is not None
    assert made.noising.correlated.state_dict() == {}


def test_a_charge_without_a_draw_ends_it() -> None:
    made = mechanism()
    made.release()
    made.noising.charge(made.event)
    with pytest.raises(PrivacyError, match="the last one drawn is of step 1"):
        made.release()


def test_its_state_goes_on_with_the_same_noise() -> None:
    """To the bit, whichever step it was kept after; the noise that is kept is not rounded."""
    steps, bands = 8, 3
    coefficients = band_coefficients(bands, steps)
    whites = torch.randn(steps, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = CorrelatedNoise(coefficients, Flat())
    expected, kept = [], []
    for t in range(steps):
        expected.append(whole.next(t + 1, lambda t=t: [(whites[t, :2], whites[t, 2:])]))
        kept.append({name: tensor.clone() for name, tensor in whole.state_dict().items()})
    assert sum(name[0].isdigit() for name in kept[-1]) == 2 * (bands - 1)
    for after in range(1, steps):
        taken_up = CorrelatedNoise(coefficients, Flat())
        taken_up.load_state_dict(kept[after - 1])
        for t in range(after, steps):
            ((a, b),) = taken_up.next(t + 1, lambda t=t: [(whites[t, :2], whites[t, 2:])])
            assert torch.equal(a, expected[t][0][0])
            assert torch.equal(b, expected[t][0][1])
        assert taken_up.row_norm == whole.row_norm


def test_an_older_checkpoint_has_one_frame_for_all() -> None:
    space, steps = Turning(3), 3
    stream = CorrelatedNoise(band_coefficients(3, steps), space)
    white = torch.ones(2, dtype=torch.float64)
    stream.next(1, lambda: [(white,)])
    older = {name.replace("0.frame", "frame"): tensor for name, tensor in stream.state_dict().items()}
    resumed = CorrelatedNoise(band_coefficients(3, steps), space)
    resumed.load_state_dict(older)
    space.step = 2
    ((one,),), ((two,),) = (each.next(2, lambda: [(white,)]) for each in (stream, resumed))
    assert torch.equal(one, two)


def test_a_state_is_of_its_step_alone() -> None:
    stream = CorrelatedNoise(band_coefficients(2, 6), Flat())
    stream.next(1, lambda: [(torch.ones(2, dtype=torch.float64),)])
    other = CorrelatedNoise(band_coefficients(2, 6), Flat())
    other.load_state_dict(stream.state_dict())
    with pytest.raises(PrivacyError, match="of step 3 is asked for"):
        other.next(3, lambda: [(torch.ones(2, dtype=torch.float64),)])


def test_it_is_never_copied() -> None:
    with pytest.raises(PrivacyError, match="cannot be copied"):
        copy.deepcopy(CorrelatedNoise((1.0,), Flat()))


@pytest.mark.parametrize("sizes", [(2, 3), (1, 3), (3, 1), (1, 3, 1), (2, 2, 1, 3)])
def test_where_shapes_change_it_begins_anew(sizes: tuple[int, ...]) -> None:
    """Also where one direction could be taken for each of many, so that one noise would be taken from all of them."""
    stream = CorrelatedNoise(band_coefficients(3, 6), Flat())
    for step, size in enumerate(sizes, start=1):
        ((row,),) = stream.next(step, lambda size=size: [(torch.ones(size, dtype=torch.float64),)])
    assert torch.allclose(row, torch.ones(sizes[-1], dtype=torch.float64) / stream.coefficients[0])
    assert stream.row_norm == pytest.approx(1 / stream.coefficients[0])


def test_no_part_of_what_is_taken_up_is_copied_into_another_shape() -> None:
    """One noise of the past has the shape that is drawn now, an older one has a single entry."""
    white, bands = torch.ones(3, dtype=torch.float64), band_coefficients(3, 6)
    stream, resumed = CorrelatedNoise(bands, Flat()), CorrelatedNoise(bands, Flat())
    for step in (1, 2):
        stream.next(step, lambda: [(white,)])
    resumed.load_state_dict({**stream.state_dict(), "1.0.0": white[:1]})
    ((row,),) = resumed.next(3, lambda: [(white,)])
    assert torch.equal(row, white / resumed.coefficients[0])
    assert resumed.row_norm == pytest.approx(1 / resumed.coefficients[0])


@pytest.mark.parametrize("coefficients", [(), (0.0, 0.5), (-0.5, 0.5), (1.0, 0.01), (0.8, 0.61)])
def test_coefficients_that_no_price_covers_are_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(PrivacyError, match="coefficients"):
        CorrelatedNoise(coefficients, Flat())


@pytest.mark.parametrize(("bands", "steps"), [(2, 24), (8, 24), (2, 2000), (32, 500), (64, 64), (4, 3)])
def test_coefficients_are_the_best_that_small_moves_find(bands: int, steps: int) -> None:
    c = np.array(band_coefficients(bands, steps))
    assert len(c) == bands
    assert 1 - 1e-9 < np.linalg.norm(c) <= 1
    best = prefix_error(c, steps)
    assert best < prefix_error([1.0], steps)
    generator = np.random.default_rng(0)
    for size in (1e-2, 1e-3):
        for _ in range(20):
            moved = c + size * generator.normal(size=bands) * (np.arange(bands) < steps)
            assert prefix_error(moved, steps) >= best * (1 - 1e-6)


def test_one_band_is_independent_noise() -> None:
    assert band_coefficients(1, 50) == (1.0,)
    assert prefix_error((1.0,), 9) == 5.0


@pytest.mark.parametrize(("bands", "steps"), [(2, 9), (5, 12)])
def test_the_error_is_that_of_sums_of_releases(bands: int, steps: int) -> None:
    noise = rows_of(steps, bands)
    sums = np.tril(np.ones((steps, steps))) @ noise
    found = prefix_error(band_coefficients(bands, steps), steps)
    assert found == pytest.approx(float(np.square(sums).sum() / steps), rel=1e-9)
