"""Clients as units: whole updates are clipped, then shared or summed by a trusted server."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.errors import PrivacyError
from privlora.mechanisms import ClippedUpdate, Lattice, NoiseSource, Noising, lattice_for
from privlora.mechanisms.charges import Uncharged

C = 1.5
SHAPES = {"1.right": (4, 3), "0.left": (50, 20), "0.right": (7,)}
ALL = StepEvent(PoissonSampling(1.0), 1.0)


def update(norm: float, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    raw = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    length = math.sqrt(sum(float(t.square().sum()) for t in raw.values()))
    return {name: t * (norm / length) for name, t in raw.items()}


def noising(seed: int = 1, ledger: Any = None) -> Noising:
    return Noising(ledger or Uncharged(), NoiseSource(insecure_seed=seed))


@pytest.fixture
def clip() -> ClippedUpdate:
    return ClippedUpdate(update(1.0), C)


def lattice(
    entries: int, clients: int = 4, survivors: int = 2, sigma: float = 1.0, bits: int = 32
) -> Lattice:
    return lattice_for(
        clip_norm=C,
        noise_multiplier=sigma,
        expected_batch_size=clients,
        entries=entries,
        clients=clients,
        survivors=survivors,
        bits=bits,
    )


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (1e-9, 1e-9), (1.0, 1.0), (1.6, C), (1e8, C)])
def test_it_is_clipped_over_all_tensors_together(clip: ClippedUpdate, before: float, after: float) -> None:
    clipped = clip.clipped(update(before))
    assert clipped.dtype == torch.float64
    assert clipped.shape == (clip.entries,) == (1019,)
    assert float(clipped.norm()) == pytest.approx(after, rel=1e-6)
    assert float(clipped.norm()) <= C
    # Sorted names, each row by row; and the direction stays.
    exact = torch.cat([update(before)[name].double().flatten() for name in ("0.left", "0.right", "1.right")])
    torch.testing.assert_close(
        clipped, exact * (min(1.0, C / before) if before else 1.0), rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_counts_as_zero(clip: ClippedUpdate, entry: float) -> None:
    broken = update(1.0)
    broken["0.right"][3] = entry
    assert float(clip.clipped(broken).abs().sum()) == 0.0
    huge = {name: t.double() * 1e200 for name, t in update(1.0).items()}  # its norm overflows
    assert float(clip.clipped(huge).norm()) in (0.0, pytest.approx(C))


def test_other_tensors_are_refused(clip: ClippedUpdate) -> None:
    more = {**update(1.0), "2.left": torch.ones(3)}
    turned = {**update(1.0), "0.left": torch.ones(20, 50)}
    fewer = {"0.left": update(1.0)["0.left"]}
    for wrong in (more, turned, fewer):
        with pytest.raises(PrivacyError, match="other tensors"):
            clip.clipped(wrong)
    for norm in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(PrivacyError, match="clip_norm"):
            ClippedUpdate(update(1.0), norm)


def test_shares_sum_up_to_the_mean_of_clipped_updates(clip: ClippedUpdate) -> None:
    grid = lattice(clip.entries, sigma=1e-5, bits=64)
    event = StepEvent(PoissonSampling(1.0), 1e-5)
    updates = [update(norm, seed) for seed, norm in enumerate((0.3, 40.0, 1.0))]
    shares = [clip.share(each, noising(seed), event, grid) for seed, each in enumerate(updates)]
    assert {share.dtype for share in shares} == {np.dtype(np.uint64)}
    mean = clip.opened(np.sum(shares, axis=0, dtype=np.uint64), grid, 4.0)
    assert {name: tuple(t.shape) for name, t in mean.items()} == SHAPES
    exact = sum(clip.clipped(each) for each in updates) / 4.0
    flat = torch.cat([mean[name].double().flatten() for name in sorted(mean)])
    assert float((flat - exact).abs().max()) < 8 * grid.noise_std(3) / 4 + 1e-7
    assert float(exact.abs().max()) > 100 * grid.noise_std(3) / 4


def test_one_client_moves_its_share_by_no_more_than_its_reach(clip: ClippedUpdate) -> None:
    grid = lattice(clip.entries)
    one, none = (grid.opened(clip.share(update(norm), noising(3), ALL, grid)) for norm in (1e6, 0.0))
    assert 0.999 * C < float(np.linalg.norm(one - none)) <= C + grid.width * math.sqrt(clip.entries)
    assert (none / grid.noise_std(1)).var() == pytest.approx(1.0, abs=0.2)


def test_a_trusted_server_adds_noise_once(clip: ClippedUpdate) -> None:
    event, divisor = StepEvent(PoissonSampling(0.3), 2.0), 8.0
    total = clip.clipped(update(1.0, 1)) + clip.clipped(update(9.0, 2))
    flat = []
    for known in (total, None):
        noisy = clip.release(known, noising(5), event, divisor)
        flat.append(torch.cat([noisy[name].double().flatten() for name in sorted(noisy)]))
    torch.testing.assert_close(flat[0] - flat[1], total / divisor, rtol=0, atol=2e-3)
    tau = 2.0 * C / divisor
    assert float((flat[1] / tau).var()) == pytest.approx(1.0, abs=0.2)
    assert noisy["0.left"].dtype == torch.float32


def test_every_way_charges_first(clip: ClippedUpdate) -> None:
    class Spent:
        def charge(self, event: StepEvent) -> int:
            raise PrivacyError("spent")

    grid = lattice(clip.entries)
    with pytest.raises(PrivacyError, match="spent"):
        clip.share(update(1.0), noising(ledger=Spent()), ALL, grid)
    with pytest.raises(PrivacyError, match="spent"):
        clip.release(None, noising(ledger=Spent()), ALL, 1.0)


def test_what_the_ledger_would_misstate_is_refused(clip: ClippedUpdate) -> None:
    grid = lattice(clip.entries)
    with pytest.raises(PrivacyError, match="which clients take part"):
        clip.share(update(1.0), noising(), StepEvent(PoissonSampling(0.5), 1.0), grid)
    with pytest.raises(PrivacyError, match="noise multiplier"):
        clip.share(update(1.0), noising(), StepEvent(PoissonSampling(1.0), 1.1), grid)
    with pytest.raises(PrivacyError, match="entries"):
        clip.share(update(1.0), noising(), ALL, lattice(clip.entries - 1))
    projected = StepEvent(PoissonSampling(1.0), 1.0, ((2, 4),))
    with pytest.raises(PrivacyError, match="projected"):
        clip.share(update(1.0), noising(), projected, grid)
    with pytest.raises(PrivacyError, match="projected"):
        clip.release(None, noising(), projected, 1.0)
    with pytest.raises(PrivacyError, match="entries"):
        clip.release(torch.zeros(1, dtype=torch.float64), noising(), ALL, 1.0)
