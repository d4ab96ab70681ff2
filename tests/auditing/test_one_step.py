"""The audit agrees with correct mechanisms and convicts broken ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.auditing.one_step import StepAudit, Uncharged, audit_step, canary_gradient
from privlora.errors import ConfigError
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.methods import METHODS, build

SIGMA = 1.0
# A mechanism sees coordinates and a kind of clipping, never an optimizer: one method of each.
PRIVATE = list(
    {(row.space, row.clipping): name for name, row in reversed(METHODS.items()) if row.private}.values()
)


def setting(name: str, sigma: float = SIGMA) -> tuple[GaussianMechanism, Captured, Captured]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    adapter = LowRankAdapter(LlamaForCausalLM(config), rank=2)
    coordinates, _ = build(METHODS[name], adapter, init="w0-subspace")
    if name == "dp-adamw":  # at its start half of the factors' gradients vanish
        generator = torch.Generator().manual_seed(1)
        for left in coordinates.left:
            left.data.copy_(torch.randn(left.shape, generator=generator))
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=1.0,
        event=StepEvent(PoissonSampling(1.0), sigma),
        expected_batch_size=8.0,
        ledger=Uncharged(),
        noise=NoiseSource(insecure_seed=7),
        clipping=METHODS[name].clipping,
    )
    generator = torch.Generator().manual_seed(2)
    parts = [canary_gradient(adapter, 0.02, generator) for _ in range(7)]
    others = Captured(
        [torch.cat(ts) for ts in zip(*(c.p for c in parts), strict=True)],
        [torch.cat(ts) for ts in zip(*(c.q for c in parts), strict=True)],
    )
    return mechanism, others, canary_gradient(adapter, 100.0, generator)


def audited(
    mechanism: GaussianMechanism, others: Captured, canary: Captured, claimed: float = SIGMA
) -> StepAudit:
    return audit_step(mechanism, claimed, others, canary, trials=1000)


@pytest.mark.parametrize("name", PRIVATE)
def test_correct_step_is_within_its_claim_and_the_bound_is_tight(name: str) -> None:
    result = audited(*setting(name))
    assert not result.violated
    assert result.statistic == "alignment"
    assert 0.6 * result.epsilon_claimed <= result.epsilon_lower <= result.epsilon_claimed


@pytest.mark.parametrize("name", PRIVATE)
def test_quarter_of_the_noise_is_detected(name: str) -> None:
    mechanism, others, canary = setting(name, sigma=SIGMA / 4)
    assert audited(mechanism, others, canary).violated


def unclipped_module(mechanism: GaussianMechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    true_norms = mechanism.coordinates.norms_squared

    def without_last_site(captured: Captured) -> torch.Tensor:
        p, q = list(captured.p), list(captured.q)
        p[-1], q[-1] = torch.zeros_like(p[-1]), torch.zeros_like(q[-1])
        return true_norms(Captured(p, q))

    monkeypatch.setattr(mechanism.coordinates, "norms_squared", without_last_site)


def realised_divisor(mechanism: GaussianMechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate, release = mechanism.accumulate, mechanism.release
    seen: list[int] = []

    def counting(captured: Captured) -> None:
        seen.append(captured.units)
        accumulate(captured)

    def dividing() -> object:
        mechanism.expected_batch_size = float(sum(seen))
        seen.clear()
        return release()

    monkeypatch.setattr(mechanism, "accumulate", counting)
    monkeypatch.setattr(mechanism, "release", dividing)


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("mutate", [unclipped_module, realised_divisor])
def test_mutations_are_detected(
    name: str,
    mutate: Callable[[GaussianMechanism, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mechanism, others, _ = setting(name)
    mutate(mechanism, monkeypatch)
    adapter = mechanism.coordinates.adapter
    generator = torch.Generator().manual_seed(3)
    canaries = [canary_gradient(adapter, 100.0, generator, site) for site in range(len(adapter.sites))]
    results = [audit_step(mechanism, SIGMA, others, each, trials=150, confidence=0.99) for each in canaries]
    assert any(result.violated for result in results)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_canary_in_one_module_alone_does_not_break_the_claim(name: str) -> None:
    mechanism, others, _ = setting(name)
    canary = canary_gradient(mechanism.coordinates.adapter, 100.0, torch.Generator().manual_seed(3), site=0)
    assert not audited(mechanism, others, canary).violated


def test_a_tensor_without_noise_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, others, canary = setting("prism")
    noised = mechanism.coordinates.standard_normal

    def first_block_quiet(draw: Callable[[tuple[int, ...]], torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        vector = noised(draw)
        vector[0] = (torch.zeros_like(vector[0][0]), *vector[0][1:])
        return vector

    monkeypatch.setattr(mechanism.coordinates, "standard_normal", first_block_quiet)
    # An attacker who knows the gap looks there alone: a canary inside that block.
    for k, (p, q) in enumerate(zip(canary.p, canary.q, strict=True)):
        if k >= len(mechanism.coordinates.adapter.groups[0].sites):
            p.zero_()
            q.zero_()
    assert audited(mechanism, others, canary).epsilon_lower > 0.6 * 4.37


def test_too_few_trials_are_refused() -> None:
    mechanism, others, canary = setting("prism")
    with pytest.raises(ConfigError, match="trials"):
        audit_step(mechanism, SIGMA, others, canary, trials=10)
