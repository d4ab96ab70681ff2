"""Step one of spectral clipping from r x r statistics, against the same with every gradient formed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_tangent_coordinates import RANK, coordinates
from tiny_models import tiny_llama, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from privlora.adapters import Captured, LowRankAdapter
from privlora.adapters.captured import pieces
from privlora.coordinates import Coordinates, FactorCoordinates, ProjectedCoordinates, TangentCoordinates
from privlora.coordinates.evened import root_norms
from privlora.coordinates.factors import OneFactorCoordinates
from privlora.coordinates.starts import tangent_start
from privlora.geometry.fixed_rank import Tangent, project


def random_units(adapter: LowRankAdapter, units: int, dtype: torch.dtype, seed: int = 1) -> Captured:
    """P and Q of no common gradient, in modules of very different sizes; in one piece of memory a group."""
    generator = torch.Generator().manual_seed(seed)

    def some(sites: int, size: int) -> Tensor:
        t = torch.randn(sites, units, RANK, size, generator=generator, dtype=torch.float64)
        sizes = torch.logspace(-2, 1, sites, dtype=torch.float64)[:, None, None, None]
        return (t * sizes * torch.tensor([1.0, 0.1, 0.003])[:, None]).to(dtype)

    return Captured.of_stacks([(some(len(g.sites), g.m), some(len(g.sites), g.n)) for g in adapter.groups])


def rooted(t: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(t.double(), full_matrices=False)
    least = 1e-2 * s[..., :1]
    return (u * (s / torch.maximum(s, least).clamp_min(1e-300).sqrt()).unsqueeze(-2)) @ vh


def by_hand(c: TangentCoordinates, units: Captured) -> list[list[Tangent]]:
    """For each unit the evened tangent vectors of all groups, by singular values and dense projections."""
    found = []
    for unit in range(units.units):
        tangents, start = [], 0
        for point, group in zip(c.points, c.adapter.groups, strict=True):
            stop = start + len(group.sites)
            p, q = (torch.stack([rooted(t[unit]) for t in ts[start:stop]]) for ts in (units.p, units.q))
            start, point = stop, point.to(p)
            tangent = project(point, p, q)
            tangents.append(replace(tangent, M=(point.U.mT @ p + (point.V.mT @ q).mT) / 2))
        squares = torch.cat([t.norm_squared() for t in tangents])[:, None]
        factors = iter(root_norms(squares)[:, 0].split([len(g.sites) for g in c.adapter.groups]))
        found.append([t.scale(next(factors)) for t in tangents])
    return found


def vector_of(c: Coordinates, units: Captured, weights: Tensor) -> Tensor:
    return flat(c.to_vector(c.evened_sum(c.evened(units), weights)))


def flat(vector: list[tuple[Tensor, ...]]) -> Tensor:
    return torch.cat([t.flatten().double() for parts in vector for t in parts])


@pytest.mark.parametrize("right_weight", [1.0, 0.3])
@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_sums_and_norms_are_those_of_tangent_vectors_with_rooted_values(
    dtype: torch.dtype, accuracy: float, right_weight: float
) -> None:
    c = coordinates(dtype, right_weight=right_weight)
    units = random_units(c.adapter, 20, dtype)
    expected = [flat([(t.M, t.Up, right_weight * t.Vp) for t in each]) for each in by_hand(c, units)]
    evened = c.evened(units)
    squares = torch.stack([each.square().sum() for each in expected])
    torch.testing.assert_close(evened.norms_squared, squares, rtol=accuracy, atol=0)
    torch.testing.assert_close(evened.raw_squared, c.norms_squared(units), rtol=accuracy, atol=0)
    weights = torch.linspace(0.1, 2, 20, dtype=torch.float64)
    total = vector_of(c, units, weights)
    whole = torch.stack(expected).mT @ weights
    assert total.dtype == torch.float64
    assert float((total - whole).norm() / whole.norm()) < accuracy
    formed = flat(c.to_vector(c.weighted_sum(evened.formed(), weights)))
    assert float((formed - whole).norm() / whole.norm()) < accuracy


def spaces() -> list[Coordinates]:
    adapters = [LowRankAdapter(tiny_model(dtype=torch.float64), rank=RANK) for _ in range(3)]
    pairs = [
        (
            torch.randn(len(g.sites), g.m, RANK, dtype=torch.float64),
            torch.randn(len(g.sites), g.n, RANK).double(),
        )
        for g in adapters[0].groups
    ]
    dense = [torch.zeros(len(g.sites), g.m, g.n, dtype=torch.float64) for g in adapters[2].groups]
    return [
        FactorCoordinates(adapters[0], pairs, 2.0, torch.float64),
        OneFactorCoordinates(adapters[1], pairs, 2.0, torch.float64, side="right"),
        ProjectedCoordinates(adapters[2], dense, key=3, dtype=torch.float64),
    ]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_other_spaces_root_the_sides_that_they_have(kind: int) -> None:
    c = spaces()[kind]
    units = random_units(c.adapter, 3, torch.float64)
    sums = [flat(c.to_vector(c.weighted_sum(units.some(slice(u, u + 1)), torch.ones(1)))) for u in range(3)]
    raw = torch.stack([each.square().sum() for each in sums])
    evened = c.evened(units)
    torch.testing.assert_close(evened.raw_squared, raw, rtol=1e-9, atol=0)
    for unit in range(3):
        alone = torch.zeros(3, dtype=torch.float64)
        alone[unit] = 1.0
        vector = vector_of(c, units, alone)
        torch.testing.assert_close(vector.square().sum(), evened.norms_squared[unit], rtol=1e-9, atol=0)
        other = random_units(c.adapter, 3, torch.float64)
        # Each module's matrices are rooted and scaled as a whole.
        other = Captured([rooted(t) for t in other.p], [rooted(t) for t in other.q])
        mine = c.to_vector(c.weighted_sum(evened.formed(), alone))
        theirs = c.to_vector(c.weighted_sum(other, alone))
        for parts, found in zip(theirs, mine, strict=True):
            for a, b in zip(parts, found, strict=True):
                ratio = b / a
                torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio), rtol=1e-6, atol=0)
        assert torch.allclose(flat(mine), vector)


def inside(c: TangentCoordinates, units: int, sign: float) -> Captured:
    """P in span(U) and Q in span(V), whose estimates of M are equal, or opposite: then nearly nothing is left."""
    generator = torch.Generator().manual_seed(3)
    p, q = [], []
    for point in c.points:
        for U, V in zip(point.U, point.V, strict=True):
            M = torch.randn(units, RANK, RANK, generator=generator, dtype=torch.float64).to(U)
            p.append(U @ M)
            q.append(sign * V @ M.mT)
    return Captured(p, q)


@pytest.mark.parametrize("right_weight", [1.0, 10.0])
@pytest.mark.parametrize("kind", ["random", "inside", "opposite", "one side"])
def test_the_norm_bounds_what_a_unit_adds(kind: str, right_weight: float) -> None:
    """Also where it is the small difference of two large numbers, in float32."""
    c = coordinates(torch.float32, right_weight=right_weight)
    units = random_units(c.adapter, 6, torch.float32)
    if kind in ("inside", "opposite"):
        units = inside(c, 6, 1.0 if kind == "inside" else -1.0)
    if kind == "one side":
        for t in units.q:
            t.zero_()
    norms = c.evened(units).norms_squared.sqrt()
    assert bool((norms > 0).all())
    for unit in range(6):
        alone = torch.zeros(6, dtype=torch.float64)
        alone[unit] = 1.0 / norms[unit]
        # Far below the slack of spectral clipping, 0.01.
        assert float(vector_of(c, units, alone).norm()) <= 1 + 1e-3


def test_a_norm_that_cancels_is_never_nothing() -> None:
    """Differences of squares that rounding makes zero or less: what is left of the unit is no zero."""
    c = coordinates(torch.float32)
    units = inside(c, 60, -1.0)
    for t in (*units.p[1:], *units.q[1:]):
        t.zero_()
    assert bool((c.evened(units).norms_squared > 1e-8).all())


def test_a_unit_that_is_not_finite_has_no_norm_and_leaves_the_others_as_they_are() -> None:
    c = coordinates(torch.float32)
    units = random_units(c.adapter, 5, torch.float32)
    others = torch.tensor([0, 1, 3])
    clean = Captured([t[others].clone() for t in units.p], [t[others].clone() for t in units.q])
    units.p[0][2, 0, 0] = float("nan")
    units.q[-1][4, 0, 0] = 1e30
    evened = c.evened(units)
    assert evened.norms_squared.isnan().tolist() == [False, False, True, False, True]
    assert evened.raw_squared.isnan().tolist() == [False, False, True, False, True]
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    total = flat(c.to_vector(c.evened_sum(evened, weights)))
    torch.testing.assert_close(total, vector_of(c, clean, torch.ones(3).double()), rtol=1e-4, atol=1e-6)


def test_thousands_of_units_that_pull_alike_stay_within_the_slack() -> None:
    """The sum of 4,096 moves by one's own part when one leaves, although each stands elsewhere in a product then."""
    c = coordinates(torch.float32)
    one = random_units(c.adapter, 1, torch.float32)

    def total(units: int) -> Tensor:
        stacks = [tuple(t.expand(-1, units, -1, -1).contiguous() for t in pair) for pair in one.stacks or []]
        found = c.evened(Captured.of_stacks(stacks))  # type: ignore[arg-type]
        return flat(c.to_vector(c.evened_sum(found, 1 / found.norms_squared.sqrt())))

    own = total(1)
    # 6e-7 in products of 16 units, 1.5e-4 in one of all.
    assert float((total(4096) - total(4095) - own).norm() / own.norm()) < 2e-5


def test_sums_of_several_owners_are_each_ones_own() -> None:
    c = coordinates(torch.float64)
    units = random_units(c.adapter, 4, torch.float64)
    owners = torch.tensor([[True, False, True, False], [False, True, False, True]])
    weights = torch.rand(4, dtype=torch.float64)
    both = c.evened_sum(c.evened(replace(units, owners=owners)), weights)
    alone = [c.evened_sum(c.evened(units), weights * own) for own in owners]
    for (p, q), *each in zip(both, *alone, strict=True):
        for side, t in ((0, p), (1, q)):
            expected = torch.cat([pair[side] for pair in each])
            assert t.shape == expected.shape
    joint = torch.stack([flat(c.to_vector(each)) for each in alone]).flatten()
    parts = c.to_vector(both)
    split = [[tuple(t.unflatten(0, (2, -1))[k] for t in ts) for ts in parts] for k in range(2)]
    torch.testing.assert_close(torch.cat([flat(each) for each in split]), joint, rtol=1e-9, atol=1e-12)


class _Largest(TorchDispatchMode):
    """The most entries of any new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, tuple | list) else [found]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.entries = max(self.entries, t.numel())
        return found


def test_no_gradient_is_copied() -> None:
    adapter = LowRankAdapter(
        tiny_llama(hidden_size=256, intermediate_size=512, num_attention_heads=4), rank=RANK
    )
    c = tangent_start(adapter, "random", seed=0)
    units = random_units(c.adapter, 64, torch.float32)
    stacks = units.stacks or []
    watch = _Largest()
    watch.known = {t.untyped_storage().data_ptr() for pair in stacks for t in pair}
    with watch:
        evened = c.evened(units)
        c.evened_sum(evened, torch.ones(64, dtype=torch.float64))
    assert watch.entries < min(t.numel() for pair in stacks for t in pair)


def test_captured_stacks_are_the_memory_of_its_lists() -> None:
    c = coordinates(torch.float32)
    units = random_units(c.adapter, 4, torch.float32)
    units.zero(torch.tensor([False, True, False, False]))
    for pair in units.stacks or []:
        for t in pair:
            assert bool((t[:, 1] == 0).all())
            assert bool((t[:, 0] != 0).any())
    for side in (0, 1):
        broken = random_units(c.adapter, 4, torch.float32)
        (broken.p, broken.q)[side][-1][2, 0, 0] = float("nan")
        assert broken.finite().tolist() == [True, True, False, True]
    lists = Captured([t.clone() for t in units.p], [t.clone() for t in units.q])
    for mine, own in zip(lists.stacked(c.adapter.sizes), units.stacks or [], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, own, strict=True))
    assert torch.equal(lists.finite(), units.finite())


def test_stacks_in_pieces_are_measured_and_summed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where modules of one shape do not fit in one piece."""
    c = coordinates(torch.float64)
    units = random_units(c.adapter, 4, torch.float64)
    weights = torch.rand(4, dtype=torch.float64)
    found = []
    for size in (2**19, 1):
        monkeypatch.setattr("privlora.adapters.captured._PIECE", size)
        found.append((c.norms_squared(units), flat(c.to_vector(c.weighted_sum(units, weights)))))
    assert max(len(list(pieces(p))) for p, _ in units.stacks or []) > 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
