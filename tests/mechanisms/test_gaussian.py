"""Clipping of whole units, and the numbers that the mechanism states. Contracts of all methods: tests/contracts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import TangentCoordinates
from privlora.coordinates.starts import tangent_start
from privlora.errors import PrivacyError
from privlora.mechanisms import GaussianMechanism, Instrument, MeanMechanism, NoiseSource

RANK = 2


class Ledger:
    def charge(self, event: StepEvent) -> int:
        return 1


@pytest.fixture
def coordinates() -> TangentCoordinates:
    return tangent_start(LowRankAdapter(tiny_model(), rank=RANK), "random", seed=0)


def mechanism(coordinates: TangentCoordinates, *, sigma: float = 0.0, **options: Any) -> GaussianMechanism:
    settings = {
        "clip_norm": 2.0,
        "expected_batch_size": 1.0,
        "noise": NoiseSource(insecure_seed=1),
        **options,
    }
    event = StepEvent(PoissonSampling(0.1), sigma)
    return GaussianMechanism(coordinates, event=event, ledger=Ledger(), **settings)


def units_of_norm(coordinates: TangentCoordinates, norms: list[float]) -> Captured:
    sites = coordinates.adapter.sites
    raw = Captured(
        [torch.randn(len(norms), s.m, RANK) for s in sites],
        [torch.randn(len(norms), s.n, RANK) for s in sites],
    )
    scale = torch.tensor(norms) / coordinates.norms_squared(raw).sqrt().float()
    for t in (*raw.p, *raw.q):
        t.mul_(scale[:, None, None])
    return raw


def norm(vector: list[tuple[torch.Tensor, ...]]) -> float:
    return float(sum(t.double().square().sum() for parts in vector for t in parts) ** 0.5)


@pytest.mark.parametrize(
    ("before", "after"), [(0.0, 0.0), (1e-20, 1e-20), (1.0, 1.0), (2.5, 2.0), (1e6, 2.0), (1e15, 2.0)]
)
def test_one_unit_is_scaled_to_at_most_c(
    coordinates: TangentCoordinates, before: float, after: float
) -> None:
    m = mechanism(coordinates)
    m.accumulate(units_of_norm(coordinates, [before]))
    released = norm(m.release().vector)
    assert released == pytest.approx(after, rel=4e-4)
    assert released <= 2.0


@pytest.mark.parametrize("square", [0.0, -1.0, float("nan"), float("inf")])
def test_a_unit_whose_norm_bounds_nothing_is_dropped(
    coordinates: TangentCoordinates, square: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = units_of_norm(coordinates, [3.0, 3.0])
    alone = coordinates.to_vector(
        coordinates.weighted_sum(units, torch.tensor([2.0 / 3.0, 0.0], dtype=torch.float64))
    )
    norms = coordinates.norms_squared(units)
    monkeypatch.setattr(
        coordinates, "norms_squared", lambda _: torch.stack([norms[0], norms.new_tensor(square)])
    )
    m = mechanism(coordinates)
    m.accumulate(units)
    for got, want in zip(m.clipped_sum() or [], alone, strict=True):
        torch.testing.assert_close(got, want, rtol=4e-4, atol=1e-6)


ONE_BY_ONE = pytest.param(1, marks=pytest.mark.long)


@pytest.mark.parametrize("at_a_time", [ONE_BY_ONE, 512])
def test_thousands_of_units_that_pull_alike_stay_within_c(
    coordinates: TangentCoordinates, at_a_time: int
) -> None:
    one = units_of_norm(coordinates, [30.0])
    some = Captured(*([t.expand(at_a_time, -1, -1) for t in ts] for ts in (one.p, one.q)))
    m = mechanism(coordinates)
    m.accumulate(one)
    before = flattened(m.clipped_sum())
    for _ in range(4096 // at_a_time - 1):
        m.accumulate(some)
    whole = flattened(m.clipped_sum())
    m.accumulate(one)
    moved = flattened(m.clipped_sum()) - whole
    assert whole.dtype == torch.float64
    assert float(moved.norm()) == pytest.approx(float(before.norm()), rel=1e-9)
    assert float(moved.norm()) <= 2.0


@pytest.mark.parametrize("adapters", [None, 2])
def test_units_of_one_micro_batch_are_summed_in_double_precision(
    coordinates: TangentCoordinates, adapters: int | None
) -> None:
    """One that leaves thousands which pull alike moves the sum by its own part, also among several adapters."""
    unit, weight = units_of_norm(coordinates, [30.0]), 2.0 / 30.0

    def total(units: int) -> torch.Tensor:
        p, q = ([t.expand(units, -1, -1) for t in ts] for ts in (unit.p, unit.q))
        owners = None if adapters is None else torch.ones(adapters, units, dtype=torch.bool)
        weights = torch.full((units,), weight, dtype=torch.float64)
        return flattened(coordinates.weighted_sum(Captured(p, q, owners=owners), weights))

    own = total(1)
    assert own.dtype == torch.float64
    torch.testing.assert_close(total(4000) - total(3999), own, rtol=1e-8, atol=1e-10)


def flattened(vector: Any) -> torch.Tensor:
    return torch.cat([t.flatten() for parts in vector for t in parts])


def test_models_below_float32_have_a_slack_of_their_own(coordinates: TangentCoordinates) -> None:
    reached = []
    for dtype in (torch.float32, torch.bfloat16):
        coordinates.adapter.model.to(dtype)
        m = mechanism(coordinates)
        m.accumulate(units_of_norm(coordinates, [3.0]))
        reached.append(norm(m.release().vector) / 2.0)
    assert reached == pytest.approx([1.0, 0.98], rel=4e-4)


def test_clipping_keeps_the_direction(coordinates: TangentCoordinates) -> None:
    raw = units_of_norm(coordinates, [30.0])
    expected = coordinates.to_vector(coordinates.weighted_sum(raw, torch.tensor([2.0 / 30.0])))
    m = mechanism(coordinates)
    m.accumulate(raw)
    for got, want in zip(m.release().vector, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=4e-4, atol=1e-6)


def test_the_norm_is_over_all_modules_together(coordinates: TangentCoordinates) -> None:
    raw = units_of_norm(coordinates, [1.9])
    m = mechanism(coordinates)
    m.accumulate(raw)
    assert norm(m.release().vector) == pytest.approx(1.9, rel=1e-5)  # 14 modules, none of them cut


def test_stated_numbers(coordinates: TangentCoordinates) -> None:
    m = mechanism(coordinates, sigma=1.5, clip_norm=0.5, expected_batch_size=8.0)
    assert m.noise_std == pytest.approx(1.5 * 0.5 / 8.0)
    assert m.sensitivity() == 0.5
    assert m.sensitivity("replace-one") == 1.0
    assert m.release().noise_std == m.noise_std
    with pytest.raises(PrivacyError, match="unknown adjacency"):
        m.sensitivity("replace-two")


@pytest.mark.parametrize("name", ["clip_norm", "expected_batch_size"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_unusable_settings_are_refused(coordinates: TangentCoordinates, name: str, value: float) -> None:
    with pytest.raises(PrivacyError, match=name):
        mechanism(coordinates, **{name: value})


def test_noise_by_itself_is_not_of_half_precision(coordinates: TangentCoordinates) -> None:
    m = mechanism(coordinates, sigma=1.0, clip_norm=1.0)  # so that the noise is released as it is
    cores = torch.cat(
        [parts[0].flatten() for parts in m.release().vector]
    )  # as drawn; Up and Vp were projected
    cores = cores[cores.abs() > 2**-4]
    assert float((cores == cores.bfloat16()).double().mean()) < 0.5


def test_the_default_noise_is_secure(coordinates: TangentCoordinates) -> None:
    assert mechanism(coordinates, noise=None).noising.noise.secure


def test_a_second_release_holds_nothing_of_the_first(coordinates: TangentCoordinates) -> None:
    m = mechanism(coordinates)
    m.accumulate(units_of_norm(coordinates, [1.0]))
    assert norm(m.release().vector) > 0.9
    assert norm(m.release().vector) == 0.0


def test_the_non_private_mean_promises_nothing(coordinates: TangentCoordinates) -> None:
    m = MeanMechanism(coordinates, expected_batch_size=4.0, steps=2)
    assert m.sensitivity() == float("inf")
    m.accumulate(units_of_norm(coordinates, [8.0]))
    release = m.release()
    assert release.noise_std == 0.0
    assert norm(release.vector) == pytest.approx(2.0, rel=1e-5)
    assert norm(m.release().vector) == 0.0


@pytest.mark.parametrize("observed", [False, True])
def test_a_discarded_batch_is_in_no_sum(coordinates: TangentCoordinates, observed: bool) -> None:
    m = Instrument(mechanism(coordinates)) if observed else mechanism(coordinates)
    m.accumulate(units_of_norm(coordinates, [2.0]))
    m.discard()
    assert norm(m.release().vector) == 0.0


def test_a_batch_whose_sum_fails_is_in_no_other_sum(
    coordinates: TangentCoordinates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MemoryError("full")

    m = mechanism(coordinates)
    m.accumulate(units_of_norm(coordinates, [2.0]))
    with monkeypatch.context() as patch:
        patch.setattr(coordinates, "to_vector", fail)
        with pytest.raises(MemoryError, match="full"):
            m.release()
    assert norm(m.release().vector) == 0.0


def test_the_clipped_sum_is_what_noise_is_added_to(coordinates: TangentCoordinates) -> None:
    m = mechanism(coordinates, expected_batch_size=4.0)
    assert m.clipped_sum() is None
    for norms in ([0.5, 3.0], [1e6]):
        m.accumulate(units_of_norm(coordinates, norms))
    known = m.clipped_sum()
    assert known is not None
    for total, released in zip(known, m.release().vector, strict=True):
        for t, r in zip(total, released, strict=True):
            torch.testing.assert_close((t / 4.0).to(r.dtype), r)
    assert m.clipped_sum() is None
