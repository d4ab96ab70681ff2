"""Where training starts: public, zero update unless an adapter is given, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from privlora.adapters import LowRankAdapter, write_adapter
from privlora.coordinates import Coordinates
from privlora.coordinates.starts import _randomised_svd, factor_start, tangent_start
from privlora.errors import ModelError

RANK = 3


def tangent(adapter: LowRankAdapter, init: str, seed: int = 0) -> Coordinates:
    return tangent_start(adapter, init, seed=seed)


def factor(adapter: LowRankAdapter, init: str, seed: int = 0) -> Coordinates:
    return factor_start(adapter, init, seed=seed, scale=2.0)


both = pytest.mark.parametrize("start", [tangent, factor])
Start = Callable[..., Any]


def adapter(family: str = "llama", **options: Any) -> LowRankAdapter:
    return LowRankAdapter(tiny_model(family), rank=RANK, **options)


@both
@pytest.mark.parametrize("init", ["random", "w0-subspace"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_update_is_zero_and_the_seed_decides(start: Start, init: str, family: str) -> None:
    first, again, other = (start(adapter(family), init, seed) for seed in (1, 1, 2))
    for a, b in first.factors():
        assert float((a @ b.mT).abs().max()) == 0.0
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    if init == "random":
        assert any(not torch.equal(t, other.state_dict()[n]) for n, t in first.state_dict().items())


@both
def test_it_leaves_the_global_generator_alone(start: Start) -> None:
    a = adapter()
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    start(a, "random")
    start(a, "w0-subspace")
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_w0_subspace_takes_the_top_singular_vectors(family: str) -> None:
    a = adapter(family)
    for site in a.sites:  # a spectrum with a gap, so that the top subspace is well defined
        u, s, vh = torch.linalg.svd(site.module.weight.detach(), full_matrices=False)
        s = torch.where(torch.arange(len(s)) < RANK, s + 5, 0.1 * s)
        site.module.weight.data = (u * s) @ vh
    c = tangent_start(a, "w0-subspace", seed=0)
    for group, point in zip(a.groups, c.points, strict=True):
        for k, site in enumerate(group.sites):
            weight = site.module.weight.T if family == "gpt2" else site.module.weight
            u, _, vh = torch.linalg.svd(weight.detach(), full_matrices=False)
            for got, want in ((point.U[k], u[:, :RANK]), (point.V[k], vh[:RANK].T)):
                assert float(torch.linalg.svdvals(got.T @ want).min()) > 0.999


@both
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_on_disk_is_taken_up_exactly(start: Start, rslora: bool, tmp_path: Path) -> None:
    a = adapter()
    factors = {s.name: (torch.randn(s.m, RANK), torch.randn(s.n, RANK)) for s in a.sites}
    write_adapter(tmp_path, a, factors, base_model="tiny", lora_alpha=5.0, use_rslora=rslora)
    found = start(a, str(tmp_path)).named_factors()
    assert found.keys() == factors.keys()
    for name, (left, right) in found.items():
        torch.testing.assert_close(
            left @ right.T, factors[name][0] @ factors[name][1].T, rtol=1e-4, atol=1e-5
        )


@both
def test_an_adapter_that_does_not_fit_is_refused(start: Start, tmp_path: Path) -> None:
    small = adapter(target_modules=["q_proj"])
    factors = {s.name: (torch.randn(s.m, RANK), torch.randn(s.n, RANK)) for s in small.sites}
    write_adapter(tmp_path, small, factors, base_model="tiny", lora_alpha=5.0)
    with pytest.raises(ModelError, match="has no factors of rank 3"):
        start(adapter(), str(tmp_path))
    with pytest.raises(ModelError, match="also adapts"):
        start(adapter(target_modules=["q_proj"], layers_to_transform=[0]), str(tmp_path))
    with pytest.raises(ModelError, match="no factors of rank 2"):
        start(LowRankAdapter(tiny_model(), rank=2, target_modules=["q_proj"]), str(tmp_path))
    with pytest.raises(ModelError, match="no readable LoRA adapter"):
        start(adapter(), "randm")


def test_factors_start_as_peft_starts_them() -> None:
    c = factor_start(adapter(), "random", seed=0, scale=2.0)
    for group, left, right in zip(c.adapter.groups, c.left, c.right, strict=True):
        assert float(left.abs().max()) == 0.0
        assert float(right.abs().max()) <= group.n**-0.5
        assert float(right.std()) == pytest.approx((3 * group.n) ** -0.5, rel=0.2)
    w0 = factor_start(adapter(), "w0-subspace", seed=0, scale=2.0)
    assert float(w0.right[0].square().mean()) == pytest.approx(float(c.right[0].square().mean()), rel=0.2)


def test_factors_share_out_the_top_of_the_frozen_weights() -> None:
    """As peft's pissa: what is trained at first is taken out of the frozen weights, so the model is the same."""
    c, a = adapter(), adapter()
    tangent, pairs = (
        tangent_start(c, "spectral-split", seed=0),
        factor_start(a, "spectral-split", seed=0, scale=4.0),
    )
    for point, left, right in zip(tangent.points, pairs.left, pairs.right, strict=True):
        torch.testing.assert_close(4.0 * left @ right.mT, point.embedding())
        torch.testing.assert_close(left.mT @ left, right.mT @ right)  # balanced
    for group, point in zip(c.groups, tangent.points, strict=True):
        for site, z in zip(group.sites, point.embedding(), strict=True):
            u, s, vh = torch.linalg.svd(site.module.weight.detach())
            top = (u[:, :RANK] * s[:RANK]) @ vh[:RANK]
            assert float((z - top).norm()) < 0.1 * float(top.norm())  # by randomised SVD
    for site in a.sites:
        assert site.offset is not None
    whole = a.relative_to_w0(
        {name: (2 * left, 2 * right) for name, (left, right) in pairs.named_factors().items()}
    )
    assert all(left.shape[-1] == 2 * RANK for left, _ in whole.values())


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (16, 16), (7, 3)])
def test_its_own_generator_gives_the_numbers_of_torchs_randomised_svd(shape: tuple[int, int]) -> None:
    weights = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    k = min(11, *shape)
    own = torch.Generator().manual_seed(9)
    found = [_randomised_svd(weight, k, own) for weight in weights]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        expected = [torch.svd_lowrank(weight, q=k, niter=4) for weight in weights]
    for triplet, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(triplet, wanted, strict=True))
