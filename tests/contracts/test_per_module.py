"""Clipping module by module: each part to C / sqrt(modules), so that whole units stay within C."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from counting_ledger import CountingLedger
from method_cases import Case, flat, make_case, poisoned_model
from tiny_models import random_example, tiny_model
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.auditing.gradient_canaries import alignments, draw_canaries
from privlora.coordinates import FactorCoordinates
from privlora.errors import PrivacyError
from privlora.geometry.fixed_rank import point_from_factors
from privlora.lab.audits.spaces import check_space
from privlora.mechanisms import AdaptiveClipNorm, GaussianMechanism
from privlora.methods import METHODS, build
from privlora.stacked.adapter import JointAdapter

ROWS = ["prism", "dp-adamw", "ffa", "projected"]
by_row = pytest.mark.parametrize("name", ROWS)
C = 0.5
KEPT = 1 - 0.01  # less the slack


def case_of(name: str, folder: Path) -> Case:
    return make_case((name, METHODS[name].optimizer), folder)


def gradients(case: Case, sizes: Tensor, seed: int = 0) -> Captured:
    """Random gradients whose modules have these norms in coordinates, (modules, units)."""
    generator = torch.Generator().manual_seed(seed)
    units, rank = sizes.shape[1], case.adapter.rank
    p = [torch.randn(units, s.m, rank, generator=generator) for s in case.adapter.sites]
    q = [torch.randn(units, s.n, rank, generator=generator) for s in case.adapter.sites]
    raw = case.gradients(p, q)
    scale = (sizes / case.coordinates.module_norms_squared(raw).sqrt())[:, :, None, None].float()
    return Captured(
        [t * s for t, s in zip(p, scale, strict=True)], [t * s for t, s in zip(q, scale, strict=True)]
    )


def parts_of(case: Case, captured: Captured, **options: float) -> list[Tensor]:
    """The clipped sum, one flat tensor a module."""
    mechanism = case.mechanism(clip_norm=C, clipping="per-module", **options)  # type: ignore[arg-type]
    mechanism.accumulate(captured)
    return by_module(mechanism.clipped_sum())


def by_module(vector: list[tuple[Tensor, ...]] | None) -> list[Tensor]:
    assert vector is not None
    return [torch.cat([t[k].flatten() for t in parts]) for parts in vector for k in range(len(parts[0]))]


@by_row
def test_modules_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    case = case_of(name, tmp_path)
    raw = gradients(case, torch.rand(len(case.adapter.sites), 3))
    squares = case.coordinates.module_norms_squared(raw)
    assert squares.shape == (len(case.adapter.sites), 3)
    torch.testing.assert_close(squares.sum(dim=0), case.coordinates.norms_squared(raw))
    for unit in range(3):
        own = raw.some(slice(unit, unit + 1))
        vector = case.coordinates.to_vector(case.coordinates.weighted_sum(own, torch.ones(1)))
        norms = torch.stack([part.square().sum() for part in by_module(vector)])
        torch.testing.assert_close(norms, squares[:, unit], rtol=1e-5, atol=0)


@by_row
def test_each_part_is_scaled_down_to_its_bound_and_keeps_its_direction(name: str, tmp_path: Path) -> None:
    case = case_of(name, tmp_path)
    modules = len(case.adapter.sites)
    bound = C / modules**0.5
    sizes = bound * torch.logspace(-0.5, 3, modules, dtype=torch.float64)[:, None]
    raw = gradients(case, sizes)
    before = by_module(case.coordinates.to_vector(case.coordinates.weighted_sum(raw, torch.ones(1))))
    whole = float(sizes.norm())
    for size, part, old in zip(sizes[:, 0].tolist(), parts_of(case, raw), before, strict=True):
        # He et al. (2023), but for parts that are far below the rest.
        expected = min(1.0, bound / size, 30 * C / whole)
        torch.testing.assert_close(part, expected * old, rtol=2 * (1 - KEPT), atol=0)
        assert float(part.norm()) <= bound


@by_row
def test_nobody_exceeds_c_whatever_the_parts(name: str, tmp_path: Path) -> None:
    """Alone and among others: all modules long, one long, one there, some zero, from 1e-12 to 1e12."""
    case = case_of(name, tmp_path)
    modules = len(case.adapter.sites)
    generator = torch.Generator().manual_seed(4)
    exponents = 24 * torch.rand(modules, 40, generator=generator, dtype=torch.float64) - 12
    hard = [
        torch.full((modules, 1), 1e6),
        torch.zeros(modules, 1),
        torch.full((modules, 1), C / modules**0.5),
    ]
    one = torch.eye(modules, dtype=torch.float64)
    sizes = torch.cat([*hard, 1e6 * one, 1e-9 + 1e6 * one, 10**exponents], dim=1).double()
    raw = gradients(case, sizes)
    total = 0.0
    for unit in range(sizes.shape[1]):
        parts = parts_of(case, raw.some(slice(unit, unit + 1)))
        norms = torch.stack([part.norm() for part in parts])
        assert float(norms.norm()) <= C
        assert float(norms.max()) <= C / modules**0.5
        total = torch.cat(parts) + total
    assert float(torch.cat(parts_of(case, raw.some(slice(0, 1)))).norm()) == pytest.approx(C * KEPT, rel=1e-5)
    assert float(torch.cat(parts_of(case, raw.some(slice(1, 2)))).norm()) == 0
    # One module that is there takes its own share of C and no other's.
    alone = torch.cat(parts_of(case, raw.some(slice(3, 4))))
    assert float(alone.norm()) == pytest.approx(C * KEPT / modules**0.5, rel=1e-5)
    together = torch.cat(parts_of(case, raw))
    torch.testing.assert_close(together, total, rtol=1e-5, atol=1e-7)  # norms are rounded in company


@by_row
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_entry_of_one_module_removes_the_unit_and_nobody_else(
    name: str, value: float, tmp_path: Path
) -> None:
    case = case_of(name, tmp_path)
    raw = gradients(case, torch.full((len(case.adapter.sites), 3), 7.0))
    others = (raw.some(slice(0, 1)), raw.some(slice(2, 3)))
    expected = torch.stack([torch.cat(parts_of(case, other)) for other in others]).sum(dim=0)
    bad = Captured([t.clone() for t in raw.p], [t.clone() for t in raw.q])
    bad.p[-1][1, 0, 0] = value
    torch.testing.assert_close(torch.cat(parts_of(case, bad)), expected, rtol=1e-5, atol=1e-7)


@by_row
def test_the_noise_is_that_of_flat_clipping(name: str, tmp_path: Path) -> None:
    """One draw of standard deviation sigma C / b everywhere, bit by bit: no module's bound scales it."""
    case = case_of(name, tmp_path)
    released = []
    for clipping in ("flat", "per-module"):
        mechanism = case.mechanism(clip_norm=C, sigma=1.3, batch=4.0, seed=9, clipping=clipping)
        release = mechanism.release()
        assert release.noise_std == 1.3 * C / 4.0
        assert mechanism.sensitivity() == C
        assert mechanism.sensitivity("replace-one") == 2 * C
        released.append(flat(release.vector))
    assert torch.equal(*released)


@by_row
def test_parts_of_a_batch_add_up(name: str, tmp_path: Path) -> None:
    case = case_of(name, tmp_path)
    raw = gradients(case, 10 ** (3 * torch.randn(len(case.adapter.sites), 7).double()))
    whole = torch.cat(parts_of(case, raw))
    mechanism = case.mechanism(clip_norm=C, clipping="per-module")
    for first, last in pairwise((0, 1, 4, 7)):
        mechanism.accumulate(raw.some(slice(first, last)))
    torch.testing.assert_close(torch.cat(by_module(mechanism.clipped_sum())), whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [C / 1000, C, 1000 * C])
def test_an_adapted_norm_moves_all_bounds_alike(value: float, tmp_path: Path) -> None:
    """At C_t, times C / C_t: the norm stays within C, and the count is that of whole norms."""
    case = case_of("prism", tmp_path)
    modules = len(case.adapter.sites)
    raw = gradients(case, torch.tensor([0.1, 1.0, 30.0, 1e7], dtype=torch.float64) * torch.ones(modules, 1))
    adaptive = AdaptiveClipNorm(C, 0.5)
    adaptive.value = value
    sums = []
    for unit in range(4):
        own = raw.some(slice(unit, unit + 1))
        mechanism = case.mechanism(clip_norm=C, clipping="per-module", adaptive=adaptive)
        mechanism.accumulate(own)
        total = mechanism.take()
        norm = float(case.coordinates.norms_squared(own).sqrt())
        assert total.count == (0.5 if norm <= value else -0.5)
        assert total.vector is not None
        sums.append(flat(total.vector))
        assert float(sums[-1].norm()) <= C
        assert float(sums[-1].norm()) == pytest.approx(min(C * KEPT, norm * C / value), rel=2e-2)


def test_it_does_not_depend_on_the_factors(tmp_path: Path) -> None:
    model = poisoned_model(torch.float64)
    case = make_case(("prism", "rank"), tmp_path, model=model, dtype=torch.float64)
    pairs = case.coordinates.factors()
    examples = [random_example(np.random.default_rng(n), n) for n in (5, 9, 14)]
    sums = []
    for c in (1.0, 1e-3, 30.0):
        case.coordinates.points = [point_from_factors(c * a, b / c) for a, b in pairs]
        case.coordinates.install()
        sums.append(case.clipped_sum(examples, clip_norm=0.1, clipping="per-module"))
    for other in sums[1:]:
        torch.testing.assert_close(other, sums[0], rtol=1e-7, atol=1e-8)


def test_parties_at_one_point_are_each_bounded_by_themselves(tmp_path: Path) -> None:
    case = case_of("prism", tmp_path)
    modules = len(case.adapter.sites)
    raw = gradients(case, 10 ** (2 * torch.randn(modules, 5).double()))
    owners = torch.tensor([0, 1, 1, 2, 0])
    joint = case.coordinates.stacked(JointAdapter.like(case.adapter, 3, owners), 1)
    mechanism = GaussianMechanism(
        joint,
        clip_norm=C,
        event=StepEvent(PoissonSampling(0.1), 1.0),
        expected_batch_size=1.0,
        ledger=CountingLedger(),
        clipping="per-module",
    )
    mechanism.accumulate(Captured(raw.p, raw.q, owners=owners == torch.arange(3)[:, None]))
    vector = mechanism.clipped_sum()
    assert vector is not None
    for party in range(3):
        own = [k for k in range(5) if owners[k] == party]
        alone = torch.cat(parts_of(case, Captured([t[own] for t in raw.p], [t[own] for t in raw.q])))
        found = torch.cat(
            by_module([tuple(t.unflatten(0, (3, -1))[party] for t in parts) for parts in vector])
        )
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_what_copies_round_in_weak_modules_is_not_blown_up(family: str) -> None:
    # Of two tokens, some modules' gradients cancel but for rounding: at their bounds, the sum moved by up to 1.5 C.
    rng = np.random.default_rng(0)
    adapter = LowRankAdapter(tiny_model(family), rank=4).attach()
    case = Case(METHODS["prism"], adapter, *build(METHODS["prism"], adapter, init="random"))
    examples = [random_example(rng, 60), *[random_example(rng, 2)] * 64]
    whole, copies, own = (
        case.clipped_sum(e, clip_norm=1e-3, clipping="per-module") / 1e-3
        for e in (examples, examples[1:], examples[:1])
    )
    assert float((whole - copies).norm()) <= 1
    assert float((whole - copies - own).norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_unit_is_computed_by_itself(dtype: torch.dtype) -> None:
    """Company rounds weak parts, which are enlarged: copies moved by 0.06 C when another record left them."""
    adapter = LowRankAdapter(tiny_model(dtype=dtype), rank=3).attach()
    case = Case(METHODS["prism"], adapter, *build(METHODS["prism"], adapter, init="random"))
    case.mechanism(clipping="per-module")
    assert adapter.one_by_one


@pytest.mark.parametrize("spread", [True, False])
def test_audits_know_what_a_canary_adds(spread: bool, tmp_path: Path) -> None:
    """Their numbers are those of the mechanism's own sum, without noise and with the canary alone in it."""
    case = case_of("prism", tmp_path)
    canaries = draw_canaries(case.adapter, 7, torch.Generator().manual_seed(0), spread=spread)
    for number in range(7):
        mechanism = case.mechanism(sigma=0.0, clip_norm=C, batch=4.0, clipping="per-module")
        assert isinstance(mechanism, GaussianMechanism)
        mechanism.accumulate(canaries.captured(case.adapter, torch.tensor([number])))
        products, energies = alignments(mechanism, canaries, mechanism.release().vector)
        assert float(products[number]) == pytest.approx(float(energies[number]), rel=0.02)
        share = 1.0 if spread else 1 / len(case.adapter.sites)
        assert float(energies[number]) == pytest.approx(share)


def test_audits_know_what_weak_parts_add(tmp_path: Path) -> None:
    case = case_of("dp-adamw", tmp_path)
    canaries = draw_canaries(case.adapter, 1, torch.Generator().manual_seed(0))
    sizes = [s * 10 ** -(k % 4) for k, s in enumerate(canaries.sizes)]
    weak = replace(canaries, sizes=sizes)
    mechanism = case.mechanism(sigma=0.0, clip_norm=C, batch=4.0, clipping="per-module")
    assert isinstance(mechanism, GaussianMechanism)
    mechanism.accumulate(weak.captured(case.adapter))
    products, energies = alignments(mechanism, weak, mechanism.release().vector)
    assert float(products) == pytest.approx(float(energies), rel=0.02)
    assert 0.5 < float(energies) < 0.95


class _LeavesOneOut(FactorCoordinates):
    def module_norms_squared(self, captured: Captured) -> Tensor:
        squares = super().module_norms_squared(captured)
        squares[0] = squares[1]
        return squares

    def norms_squared(self, captured: Captured) -> Tensor:
        return super().module_norms_squared(captured).sum(dim=0)


def test_a_space_that_measures_a_module_wrongly_is_found() -> None:
    adapter = LowRankAdapter(tiny_model(), rank=1, target_modules=["q_proj", "k_proj"])
    coordinates, _ = build(METHODS["dp-adamw"], adapter)
    assert isinstance(coordinates, FactorCoordinates)
    check_space(coordinates)
    wrong = _LeavesOneOut(
        adapter, list(zip(coordinates.left, coordinates.right, strict=True)), coordinates.scale
    )
    with pytest.raises(PrivacyError, match="module_norms_squared is"):
        check_space(wrong)


def test_a_unit_of_several_records_is_bounded_as_one(tmp_path: Path) -> None:
    case = case_of("dp-adamw", tmp_path)
    examples = [random_example(np.random.default_rng(n), n) for n in (5, 9, 14, 6)]
    units = [np.array([0, 1, 2]), np.array([3])]
    whole = case.clipped_sum(examples, units, clip_norm=1e-3, clipping="per-module")
    for k in range(2):
        moved = whole - case.clipped_sum(examples, [units[1 - k]], clip_norm=1e-3, clipping="per-module")
        assert 0.9 * 1e-3 < float(moved.norm()) <= 1e-3


def test_groups_that_are_summed_in_pieces_keep_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("dp-adamw", tmp_path)
    raw = gradients(case, 10 ** (2 * torch.randn(len(case.adapter.sites), 3).double()))
    whole = torch.cat(parts_of(case, raw))
    monkeypatch.setattr("privlora.adapters.captured._PIECE", 1)  # one module at a time
    torch.testing.assert_close(torch.cat(parts_of(case, raw)), whole, rtol=1e-6, atol=1e-9)
