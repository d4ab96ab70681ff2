"""Both ends of a secure sum: what clients send, what it sums up to, and that nothing is sent that was not paid for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_gaussian import units_of_norm
from tiny_models import tiny_model

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.coordinates import TangentCoordinates, Vector
from privlora.coordinates.starts import tangent_start
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.mechanisms import (
    GaussianMechanism,
    Lattice,
    Layout,
    MeanMechanism,
    NoiseSource,
    Noising,
    PlainSums,
    ShareMechanism,
    SumMechanism,
    lattice_for,
)
from privlora.mechanisms.charges import ChargeAll, Uncharged
from privlora.stacked.parts import StackedNoise

RANK, CLIENTS, SURVIVORS, BATCH = 2, 5, 3, 16.0


class Ledger:
    """Notes what was charged, in a list that others may write to as well."""

    def __init__(self, story: list[Any] | None = None) -> None:
        self.story: list[Any] = [] if story is None else story

    def charge(self, event: StepEvent) -> int:
        self.story.append(event)
        return len(self.story)


class Noted(NoiseSource):
    def __init__(self, story: list[Any]) -> None:
        super().__init__(insecure_seed=1)
        self.story = story

    def discrete_gaussian(self, shape: tuple[int, ...], std: float) -> np.ndarray:
        self.story.append("noise")
        return super().discrete_gaussian(shape, std)


@pytest.fixture(scope="module")
def coordinates() -> TangentCoordinates:
    return tangent_start(LowRankAdapter(tiny_model(), rank=RANK), "random", seed=0)


def lattice_of(coordinates: TangentCoordinates, *, sigma: float = 1.0, bits: int = 32) -> Lattice:
    return lattice_for(
        clip_norm=2.0,
        noise_multiplier=sigma,
        expected_batch_size=BATCH,
        entries=Layout.of(coordinates).entries,
        clients=CLIENTS,
        survivors=SURVIVORS,
        bits=bits,
    )


def client(
    coordinates: TangentCoordinates, lattice: Lattice, *, seed: int = 1, sigma: float = 1.0, **options: Any
) -> ShareMechanism:
    settings = {"ledger": Uncharged(), "noise": NoiseSource(insecure_seed=seed), **options}
    event = StepEvent(PoissonSampling(0.1), sigma)
    return ShareMechanism(
        coordinates, clip_norm=2.0, event=event, expected_batch_size=BATCH, lattice=lattice, **settings
    )


def summed(shares: list[np.ndarray]) -> np.ndarray:
    total: np.ndarray = np.sum(shares, axis=0, dtype=shares[0].dtype)
    return total


def project(coordinates: TangentCoordinates, vector: Vector) -> Vector:
    """The nearest tangent vector, written out."""
    found: Vector = []
    for point, (m, up, vp) in zip(coordinates.points, vector, strict=True):
        U, V = point.U.double(), point.V.double()
        found.append((m, up - U @ (U.mT @ up), vp - V @ (V.mT @ vp)))
    return found


@pytest.fixture
def nearest(coordinates: TangentCoordinates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinates, "nearest", lambda vector: project(coordinates, vector), raising=False)


def flattened(vector: Vector) -> torch.Tensor:
    return torch.cat([t.double().flatten() for parts in vector for t in parts])


# --- the law of what is released ---


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_has_the_noise_of_its_shares(coordinates: TangentCoordinates, bits: int) -> None:
    lattice = lattice_of(coordinates, bits=bits)
    clients = [client(coordinates, lattice, seed=k) for k in range(CLIENTS)]
    for present in (CLIENTS, SURVIVORS):
        sums = [summed([c.shares()[0] for c in clients[:present]]) for _ in range(60)]
        noise = np.array([lattice.opened(total) for total in sums])
        std = lattice.noise_std(present)
        assert std == pytest.approx(lattice.width * lattice.share_std * math.sqrt(present))
        assert (noise / std).var() == pytest.approx(1.0, rel=0.02)
        assert abs((noise / std).mean()) < 0.02
        # Each entry has its own, in each sum: a quarter without noise would show here.
        each = (noise / std).var(axis=0)
        assert each.min() > 0.25
        assert each.max() < 2.5
        assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 0.02
        assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 0.02
    # The fewest survivors have what the event charges for, but for rounding.
    reach = 2.0 + lattice.width * math.sqrt(lattice.entries)
    assert lattice.noise_std(SURVIVORS) == pytest.approx(reach, rel=1e-3)


def test_shares_of_clients_have_noise_of_their_own(coordinates: TangentCoordinates) -> None:
    lattice = lattice_of(coordinates)
    one, two = (client(coordinates, lattice, seed=k).shares()[0].view(np.int32) for k in (1, 2))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.1
    assert not np.array_equal(one, two)


@pytest.mark.usefixtures("nearest")
def test_a_release_is_a_tangent_vector_with_white_noise(coordinates: TangentCoordinates) -> None:
    lattice = lattice_of(coordinates)
    clients = [client(coordinates, lattice, seed=k) for k in range(CLIENTS)]
    server = SumMechanism(coordinates, lattice=lattice, expected_batch_size=BATCH, clip_norm=2.0)
    energy, times = 0.0, 60
    for step in range(1, times + 1):
        release = server.release(summed([c.shares()[0] for c in clients]), step, shares=CLIENTS)
        energy += float(flattened(release.vector).square().sum())
    assert release.step == times
    assert release.clip_norm == 2.0
    assert release.noise_std == pytest.approx(lattice.noise_std(CLIENTS) / BATCH)
    assert energy / times / release.noise_std**2 == pytest.approx(coordinates.dimension, rel=0.02)
    for point, (_, up, vp) in zip(coordinates.points, release.vector, strict=True):
        assert up.dtype == coordinates.dtype
        assert float((point.U.mT @ up).abs().max()) < 1e-6 * float(up.abs().max()) * up.shape[-2]
        assert float((point.V.mT @ vp).abs().max()) < 1e-6 * float(vp.abs().max()) * vp.shape[-2]


def test_all_that_is_rounded_has_noise(coordinates: TangentCoordinates) -> None:
    """Rounding leaves the tangent space, so noise has to be there as well."""
    lattice = lattice_of(coordinates)
    share = client(coordinates, lattice).shares()[0]
    vector = Layout.of(coordinates).vector(torch.from_numpy(lattice.opened(share)))
    outside = flattened(vector) - flattened(project(coordinates, vector))
    dimensions = lattice.entries - coordinates.dimension
    assert float(outside.square().sum()) / lattice.noise_std(1) ** 2 == pytest.approx(dimensions, rel=0.3)


# --- what is summed ---


@pytest.mark.usefixtures("nearest")
def test_with_next_to_no_noise_it_is_central_training(coordinates: TangentCoordinates) -> None:
    sigma = 1e-5
    lattice = lattice_of(coordinates, sigma=sigma, bits=64)
    parts = [units_of_norm(coordinates, norms) for norms in ([0.5, 30.0], [1.0], [1e5, 3.0], [2.0])]
    central = GaussianMechanism(
        coordinates,
        clip_norm=2.0,
        event=StepEvent(PoissonSampling(0.1), sigma),
        expected_batch_size=BATCH,
        ledger=Uncharged(),
        noise=NoiseSource(insecure_seed=9),
    )
    shares = []
    for k, part in enumerate(parts):
        own = client(coordinates, lattice, seed=k, sigma=sigma)
        own.accumulate(part)
        central.accumulate(part)
        shares += own.shares()
        assert not own.pending
    shares += client(coordinates, lattice, seed=77, sigma=sigma).shares()  # of an empty batch
    server = SumMechanism(coordinates, lattice=lattice, expected_batch_size=BATCH, clip_norm=2.0)
    found = server.release(summed(shares), 1, shares=CLIENTS)
    want = flattened(central.release().vector)
    assert float((flattened(found.vector) - want).abs().max()) < 12 * found.noise_std + 1e-6
    assert float(want.abs().max()) > 1000 * found.noise_std


@pytest.mark.parametrize("entry", [float("nan"), float("inf")])
def test_a_unit_that_is_not_finite_counts_as_zero(coordinates: TangentCoordinates, entry: float) -> None:
    lattice = lattice_of(coordinates)
    unit = units_of_norm(coordinates, [1.0])
    unit.p[0][0, 0, 0] = entry
    with_it = client(coordinates, lattice)
    with_it.accumulate(unit)
    assert np.array_equal(with_it.shares()[0], client(coordinates, lattice).shares()[0])


def test_one_unit_moves_a_share_by_no_more_than_its_reach(coordinates: TangentCoordinates) -> None:
    """With the same noise, which only a seed that is known can give twice."""
    lattice = lattice_of(coordinates)
    others = units_of_norm(coordinates, [0.5, 3.0, 1e4])
    unit = units_of_norm(coordinates, [1e3])
    opened = []
    for units in ([others], [others, unit]):
        own = client(coordinates, lattice)
        for each in units:
            own.accumulate(each)
        opened.append(lattice.opened(own.shares()[0]))
    moved = float(np.linalg.norm(opened[1] - opened[0]))
    assert 1.99 < moved <= 2.0 + lattice.width * math.sqrt(lattice.entries)


# --- clients at one point ---


def test_clients_at_one_point_send_what_each_would_alone(coordinates: TangentCoordinates) -> None:
    lattice = lattice_of(coordinates)
    story: list[Any] = []
    together = client(
        coordinates,
        lattice,
        ledger=ChargeAll([Ledger(story), Ledger(story), Ledger(story)]),
        noise=StackedNoise([NoiseSource(insecure_seed=k) for k in range(3)]),
    )
    alone, sums = [], []
    for k, norms in enumerate(([0.5, 9.0], [1.5], [3.0, 1.0])):
        own = client(coordinates, lattice, seed=k)
        units = units_of_norm(coordinates, norms)
        own.accumulate(units)
        sums.append(coordinates.weighted_sum(units, own._clip_weights(own._norms(units), own._norms(units))))
        alone += own.shares()
    together._sum = [
        (torch.cat([p for p, _ in groups]), torch.cat([q for _, q in groups]))
        for groups in zip(*sums, strict=True)
    ]
    shares = together.shares(3)
    assert len(shares) == 3
    assert story == [together.event] * 3
    for share, own_share in zip(shares, alone, strict=True):
        steps = (share - own_share).view(np.int32)
        assert np.abs(steps).max() <= 1  # sums of equal numbers in another order


def test_a_wrong_number_of_clients_is_refused(coordinates: TangentCoordinates) -> None:
    story: list[Any] = []
    own = client(coordinates, lattice_of(coordinates), ledger=Ledger(story))
    own.accumulate(units_of_norm(coordinates, [1.0]))
    with pytest.raises(PrivacyError, match="for 2 clients"):
        own.shares(2)
    assert story == []


# --- what is refused ---


def test_the_ledger_is_charged_before_noise_is_drawn(coordinates: TangentCoordinates) -> None:
    lattice, story = lattice_of(coordinates), []  # type: tuple[Lattice, list[Any]]
    own = client(coordinates, lattice, ledger=Ledger(story), noise=Noted(story))
    own.shares()
    own.shares()
    assert story == [own.event, "noise", own.event, "noise"]


def test_when_the_ledger_refuses_nothing_is_drawn(coordinates: TangentCoordinates) -> None:
    class Spent:
        def charge(self, event: StepEvent) -> int:
            raise PrivacyError("spent")

    story: list[Any] = []
    own = client(coordinates, lattice_of(coordinates), ledger=Spent(), noise=Noted(story))
    own.accumulate(units_of_norm(coordinates, [1.0]))
    with pytest.raises(PrivacyError, match="spent"):
        own.shares()
    assert story == []
    assert not own.pending


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 0)])
def test_a_charge_gives_one_share_and_nothing_beside_it(first: int, second: int) -> None:
    lattice = Lattice(0.5, 8.0, 3, 1)
    charged = Noising(Ledger(), NoiseSource(insecure_seed=1)).charge(StepEvent(PoissonSampling(1.0), 1.0))
    known = torch.zeros(3, dtype=torch.float64)
    ways = [
        lambda: charged.integers(None, clients=1, lattice=lattice),
        lambda: charged.tensor(known, scale=1.0, divisor=1.0, dtype=torch.float64),
    ]
    ways[first]()
    with pytest.raises(PrivacyError, match="charged once"):
        ways[second]()


@pytest.mark.parametrize("shape", [(3,), (1, 4), (2, 3), (1, 1)])
def test_a_sum_of_another_shape_meets_no_noise(shape: tuple[int, ...]) -> None:
    charged = Noising(Ledger(), NoiseSource(insecure_seed=1)).charge(StepEvent(PoissonSampling(1.0), 1.0))
    with pytest.raises(PrivacyError, match="shape"):
        charged.integers(torch.zeros(shape), clients=1, lattice=Lattice(0.5, 8.0, 3, 1))


def test_a_share_is_no_release(coordinates: TangentCoordinates) -> None:
    story: list[Any] = []
    own = client(coordinates, lattice_of(coordinates), ledger=Ledger(story))
    with pytest.raises(PrivacyError, match="releases nothing by itself"):
        own.release()
    assert story == []


def test_a_lattice_with_less_noise_than_is_charged_is_refused(coordinates: TangentCoordinates) -> None:
    with pytest.raises(PrivacyError, match=r"noise multiplier is 0\.99"):
        client(coordinates, lattice_of(coordinates, sigma=0.99), sigma=1.0)
    client(coordinates, lattice_of(coordinates, sigma=1.01), sigma=1.0)


def test_the_server_refuses_what_is_no_sum_of_shares(coordinates: TangentCoordinates) -> None:
    lattice = lattice_of(coordinates)
    server = SumMechanism(coordinates, lattice=lattice, expected_batch_size=BATCH)
    good = client(coordinates, lattice).shares()[0]
    for wrong in (good[:-1], good[None], good.astype(np.uint64), good.astype(np.float64)):
        with pytest.raises(RunError, match="shape"):
            server.release(wrong, 1, shares=CLIENTS)
    with pytest.raises(PrivacyError, match="sum of 2 shares"):
        server.release(good, 1, shares=SURVIVORS - 1)
    with pytest.raises(ConfigError, match="expected_batch_size"):
        SumMechanism(coordinates, lattice=lattice, expected_batch_size=0.0)
    with pytest.raises(ConfigError, match="entries"):
        SumMechanism(coordinates, lattice=Lattice(0.5, 8.0, 3, 1), expected_batch_size=1.0)


# --- without privacy ---


@pytest.mark.usefixtures("nearest")
def test_plain_sums_are_central_training(coordinates: TangentCoordinates) -> None:
    parts = [units_of_norm(coordinates, norms) for norms in ([0.5, 30.0], [1e3])]
    central = MeanMechanism(coordinates, expected_batch_size=BATCH, steps=1, needs_examples=True)
    sums = []
    for part in parts:
        own = PlainSums(coordinates, expected_batch_size=BATCH, steps=1, needs_examples=True)
        own.accumulate(part)
        central.accumulate(part)
        sums += own.sums()
        with pytest.raises(RunError, match="step 2"):
            own.sums()
    sums += PlainSums(coordinates, expected_batch_size=BATCH, steps=1).sums()
    assert {s.dtype for s in sums} == {np.dtype(np.float64)}
    server = SumMechanism(coordinates, lattice=None, expected_batch_size=BATCH)
    found = server.release(np.sum(sums, axis=0), 1, shares=3)
    assert found.noise_std == 0.0
    assert found.clip_norm == float("inf")
    torch.testing.assert_close(
        flattened(found.vector), flattened(central.release().vector), rtol=1e-5, atol=1e-6
    )
