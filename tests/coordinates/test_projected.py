"""Projected coordinates: unbiased, fresh at every step, and the user's weights come back."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import beta, kstest
from tiny_models import loaded_by_peft, tiny_model

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter, write_adapter
from privlora.coordinates import ProjectedCoordinates, WishartCoordinates
from privlora.coordinates.starts import projected_start
from privlora.errors import ConfigError, ModelError, PrivacyError
from privlora.mechanisms import GaussianMechanism, NoiseSource

RANK = 3
KINDS = [ProjectedCoordinates, WishartCoordinates]
by_kind = pytest.mark.parametrize("kind", KINDS)


class Charges:
    def charge(self, event: StepEvent) -> int:
        return 1


def make(
    kind: type[ProjectedCoordinates], *, key: int = 0, model: torch.nn.Module | None = None, **options: object
):
    adapter = LowRankAdapter(model or tiny_model(dtype=torch.float64), rank=RANK, **options)
    updates = [torch.zeros(len(g.sites), g.m, g.n) for g in adapter.groups]
    return kind(adapter, updates, key=key, dtype=torch.float64)


def mechanism(c: ProjectedCoordinates, seed: int | None = None, **options: object) -> GaussianMechanism:
    event = StepEvent(PoissonSampling(0.01), 1.0, c.event_layers)
    return GaussianMechanism(
        c,
        **{
            "clip_norm": 1.0,
            "event": event,
            "expected_batch_size": 4.0,
            "ledger": Charges(),
            "noise": NoiseSource(seed),
        }
        | options,
    )


def dense(c: ProjectedCoordinates) -> list[torch.Tensor]:
    return [torch.randn(len(g.sites), g.m, g.n, dtype=torch.float64) for g in c.adapter.groups]


def through(c: ProjectedCoordinates, gradients: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    raw = [(g @ q, q[:, :0]) for g, q in zip(gradients, c.projections, strict=True)]
    return c.to_vector(raw)


@pytest.mark.slow
@by_kind
def test_the_estimate_is_unbiased(kind: type[ProjectedCoordinates]) -> None:
    c = make(kind, target_modules=["q_proj", "down_proj"])
    gradients = dense(c)
    means = [torch.zeros_like(g) for g in gradients]
    squares = 0.0
    draws = 3000
    for _ in range(draws):
        c.advance()
        for mean, estimate in zip(means, c.gradients(through(c, gradients)), strict=True):
            mean += estimate / draws
        squares += float(sum(t[0].square().sum() for t in through(c, gradients))) / draws
    for mean, g, group in zip(means, gradients, c.adapter.groups, strict=True):
        # An entry of the estimate spreads like sqrt(n / r) times the gradient's.
        assert float((mean - g).std()) < 1.3 * (group.n / RANK / draws) ** 0.5 * float(g.std())
    kept = sum(float(g.square().sum()) * c.scale(k) ** 2 * RANK / g.shape[2] for k, g in enumerate(gradients))
    assert squares == pytest.approx(kept, rel=0.02)


@by_kind
def test_the_captured_energy_of_a_direction_is_beta(kind: type[ProjectedCoordinates]) -> None:
    c = make(kind, target_modules=["q_proj"])
    n = c.adapter.groups[0].n
    u = torch.nn.functional.normalize(torch.randn(n, dtype=torch.float64), dim=0)
    shares = []
    for _ in range(400):
        c.advance()
        q = c.projections[0]
        torch.testing.assert_close(q.mT @ q, torch.eye(RANK, dtype=torch.float64).expand(len(q), RANK, RANK))
        shares += (u @ q).square().sum(dim=-1).tolist()
    assert kstest(shares, beta(RANK / 2, (n - RANK) / 2).cdf).pvalue > 1e-3


def test_clip_after_projecting_has_the_plain_event_and_before_it_that_of_its_layers() -> None:
    after, before = (make(kind, target_modules=["q_proj", "down_proj"]) for kind in KINDS)
    assert after.event_layers == ()
    sizes = {(RANK, site.n) for site in before.adapter.sites}
    assert before.event_layers == tuple(sorted(sizes))
    assert len(sizes) == 2
    for c in (after, before):
        wrong = () if c.event_layers else ((RANK, 16),)
        with pytest.raises(PrivacyError, match="calibrated for another mechanism"):
            mechanism(c, event=StepEvent(PoissonSampling(0.01), 1.0, wrong))


def test_clip_before_projecting_looks_at_whole_gradients() -> None:
    c = make(WishartCoordinates, target_modules=["q_proj"])
    group = c.adapter.groups[0]
    g = torch.randn(2, len(group.sites), group.m, group.n, dtype=torch.float64)
    g *= 10 / g.flatten(1).norm(dim=1)[:, None, None, None]
    p = [g[:, k] @ c.projections[0][k] for k in range(len(group.sites))]
    captured = Captured(p, [t[:, :0] for t in p], torch.full((2,), 100.0, dtype=torch.float64))
    m = mechanism(c, seed=1, clip_norm=0.5, event=StepEvent(PoissonSampling(0.01), 0.0, c.event_layers))
    m.accumulate(captured)
    (released,) = m.release().vector[0]
    torch.testing.assert_close(released * 4, torch.stack(p, dim=1).sum(dim=0) * 0.05, rtol=4e-4, atol=0)


def test_without_the_norms_of_whole_gradients_it_refuses() -> None:
    c = make(WishartCoordinates)
    with pytest.raises(PrivacyError, match="norms of whole gradients are missing"):
        c.norms_squared(Captured([torch.ones(1, s.m, RANK) for s in c.adapter.sites], []))


def test_one_projection_is_released_upon_once() -> None:
    c = make(WishartCoordinates)
    m = mechanism(c, seed=1)
    m.release()
    with pytest.raises(PrivacyError, match="served for a release before"):
        m.release()
    c.advance()
    m.release()
    free = mechanism(make(ProjectedCoordinates))
    assert [free.release().step for _ in range(2)] == [1, 1]


def test_projections_cannot_be_foreseen_nor_taken_from_a_checkpoint() -> None:
    c = make(WishartCoordinates)
    public, saved = [q.clone() for q in c.projections], c.state_dict()
    assert not {"key", "count"} & set(saved)
    mechanism(c)
    assert not torch.allclose(c.projections[0], public[0])
    own = [q.clone() for q in c.projections]
    c.load_state_dict(saved)
    assert torch.equal(c.projections[0], own[0])  # not those of the state
    mechanism(c)
    assert not torch.allclose(c.projections[0], public[0])
    assert not torch.allclose(c.projections[0], own[0])


def test_every_bit_of_the_key_is_drawn() -> None:
    c = make(WishartCoordinates, target_modules=["q_proj"])
    ever, always = 0, 2**126 - 1
    for _ in range(64):
        c.begin()
        ever, always = ever | c._key, always & c._key
    assert ever == 2**126 - 1
    assert always == 0


def test_a_resumed_run_does_not_go_on_with_its_projections() -> None:
    """A step that was charged and lost may have shown its projection, so the next one may not be used again."""
    before = make(WishartCoordinates)
    mechanism(before)
    for _ in range(2):
        before.advance()
    resumed = make(WishartCoordinates)
    resumed.load_state_dict(before.state_dict())
    mechanism(resumed)
    for _ in range(2):
        assert not torch.allclose(resumed.projections[0], before.projections[0])
        resumed.advance()
        before.advance()


def test_no_projection_comes_again_whatever_state_is_taken_up() -> None:
    c = make(WishartCoordinates)
    m, seen = mechanism(c), []
    old = {name: t.clone() for name, t in c.state_dict().items()}
    for _ in range(3):
        for _ in range(2):
            seen.append(c.projections[0].clone())
            m.release()
            c.advance()
        c.load_state_dict(old)
    for k, q in enumerate(seen):
        assert not any(torch.allclose(q, other) for other in seen[:k])


def test_two_mechanisms_do_not_release_upon_one_projection() -> None:
    c = make(WishartCoordinates)
    first, second = (mechanism(c, noise=NoiseSource(k)) for k in range(2))
    first.release()
    with pytest.raises(PrivacyError, match="served for a release before"):
        second.release()


@by_kind
def test_each_step_draws_the_next_projection(kind: type[ProjectedCoordinates]) -> None:
    c, other = make(kind, key=5), make(kind, key=5)
    seen = [c.projections[0].clone()]
    for _ in range(2):
        c.advance()
        other.advance()
        assert torch.equal(c.projections[0], other.projections[0])
        seen.append(c.projections[0].clone())
    assert not any(torch.allclose(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert not torch.allclose(make(kind, key=6).projections[0], seen[0])


@by_kind
def test_the_model_computes_with_the_update_and_is_given_back(kind: type[ProjectedCoordinates]) -> None:
    model = tiny_model(dtype=torch.float64)
    model.tie_weights()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    owners = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    c = make(kind, model=model, target_modules="all-linear")
    for z in c.updates:
        z.copy_(0.1 * torch.randn_like(z))
    ids = torch.arange(8)[None]
    plain = model(input_ids=ids).logits
    with c.adapter:
        c.install()
        moved = model(input_ids=ids).logits
        for name, p in model.named_parameters(remove_duplicate=False):
            assert (id(p) == owners[name]) is (
                name.removesuffix(".weight") not in {s.name for s in c.adapter.sites}
            )
    assert not torch.allclose(moved, plain)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == owners
    assert torch.equal(model(input_ids=ids).logits, plain)


def test_the_export_has_the_rank_of_the_updates(tmp_path) -> None:
    model = tiny_model(dtype=torch.float64)
    c = make(ProjectedCoordinates, model=model)
    for step in range(1, 3):
        noise = c.standard_normal(lambda shape: torch.randn(shape, dtype=torch.float64))
        for z, g in zip(c.updates, c.gradients(noise), strict=True):
            z += 0.1 * g
        c.advance()
        named = c.named_factors()
        assert {a.shape[1] for a, _ in named.values()} == {RANK * step}
    c.install()
    ids = torch.arange(8)[None]
    with c.adapter:
        expected = model(input_ids=ids).logits
    write_adapter(tmp_path, c.adapter, named, base_model="tiny", lora_alpha=16.0)
    with torch.no_grad():
        found = loaded_by_peft(model, tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@by_kind
def test_what_it_cannot_do_is_refused(kind: type[ProjectedCoordinates]) -> None:
    with pytest.raises(ConfigError, match="lora_dropout"):
        make(kind, dropout=0.1)
    adapter = LowRankAdapter(tiny_model(), rank=RANK)
    for init in ("w0-subspace", "public-gradient", "spectral-split"):
        with pytest.raises(ConfigError, match="draws new ones at every step"):
            projected_start(adapter, init, seed=0, kind=kind)
    adapter.sites[0].module.weight = torch.nn.Parameter(
        torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises((ModelError, ConfigError), match=r"quantised|needs float32"):
        projected_start(adapter, "random", seed=0, kind=kind)


def test_repeatable_noise_keeps_the_key_for_tests() -> None:
    c = make(WishartCoordinates, key=3)
    before = c.projections[0].clone()
    mechanism(c, seed=1)
    assert torch.equal(c.projections[0], before)


@by_kind
def test_installing_brings_the_projection_back(kind: type[ProjectedCoordinates]) -> None:
    c = make(kind)
    site = c.adapter.sites[0]
    own = site.right.clone()
    site.right = torch.zeros_like(own)  # as an evaluation of something else would leave it
    c.install()
    assert torch.equal(site.right, own)
