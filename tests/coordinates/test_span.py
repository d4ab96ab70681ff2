"""Spans of public gradients: columns as printed, nobody's column anybody else's, and what a release decodes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from tiny_models import (
    PUBLIC_TEXTS,
    everything_in_double,
    one_batch,
    random_example,
    tiny_model,
    uneven_examples,
)
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import PublicGradients, SpanCoordinates, SpanSpace, public_span
from privlora.coordinates.span import unit_vectors
from privlora.coordinates.starts import factor_start, span_start, tangent_start
from privlora.data.batching import micro_batches, sequential_batches
from privlora.data.examples import Example, Examples
from privlora.errors import ConfigError, DataError, PrivacyError
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.mechanisms.charges import Uncharged
from privlora.training.gradients import micro_batch_gradients
from privlora.training.texts.public_gradients import public_gradients

N = len(PUBLIC_TEXTS)
TWO = r".*layers\.0\.(self_attn\.q_proj|mlp\.down_proj)"
EXPECTED = 80.0  # the public divisor


def space_of(
    kind: type[SpanSpace] = SpanCoordinates,
    *,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    targets: str = TWO,
    **settings: float,
) -> Any:
    """On a tiny model at a random start; rows: public gradients from nowhere in the place of those of PUBLIC_TEXTS."""
    adapter = LowRankAdapter(tiny_model(dtype=dtype), rank=3, target_modules=targets).attach()
    space = span_start(
        adapter, "random", seed=0, scale=2.0, dtype=dtype, kind=kind, inner=factor_start, **settings
    )
    for t in space.inner.left:  # type: ignore[attr-defined]
        t.copy_(0.1 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1)))
    space.install()
    if rows is None:
        space.refresh = lambda: public_gradients(space.inner, PUBLIC_TEXTS, max_tokens=10**6)
    else:
        space.refresh = lambda: PublicGradients(rows)
    space.prepare()
    return space


def mechanism_on(space: SpanSpace, clipping: str = "normalized", **options: Any) -> GaussianMechanism:
    given = {"clip_norm": 1.0, "expected_batch_size": EXPECTED, **options}
    sigma = given.pop("sigma", 0.0)
    return GaussianMechanism(
        space,
        event=StepEvent(PoissonSampling(0.2), sigma),
        ledger=Uncharged(),
        noise=NoiseSource(given.pop("seed", 0)),
        clipping=clipping,
        **given,
    )


def units(space: SpanSpace, count: int, seed: int = 0) -> Captured:
    """Gradients from nowhere, a half of each in the span, so that it is seen."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> Tensor:
        return torch.randn(count, rows, 3, generator=generator, dtype=space.dtype)

    sites = space.adapter.sites
    return Captured([draw(site.m) for site in sites], [draw(site.n) for site in sites])


def dense(space: SpanSpace) -> tuple[Tensor, Tensor]:
    """G (N, p) and K, in float64."""
    matrix = space.span.gradients.matrix.double()
    return matrix, matrix @ matrix.T


def decoded(space: SpanSpace, vector: Any) -> Tensor:
    return torch.cat([t.double().flatten() for parts in space.decode(vector) for t in parts])


@pytest.mark.parametrize("eta", [1e-6, 0.3])
def test_columns_are_the_ridge_coefficients_of_the_texts(eta: float) -> None:
    """Z = (K + eta)^-1 G h, with the paper's absolute 1e-6 as well as a large ridge; U turns columns back to texts."""
    space = space_of()
    g, k = dense(space)
    space = space_of(ridge=eta * N / float(k.trace()))
    captured = units(space, 4)
    h = unit_vectors(space.inner, captured)
    z = torch.linalg.solve(k + eta * torch.eye(N).double(), g @ h.T)
    y = space.encode(captured).columns
    torch.testing.assert_close(space.span.vectors @ y.T, z, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(space.scores([(y[0],)]), z[:, 0].abs(), rtol=1e-7, atol=1e-9)
    if eta == 1e-6:  # as good as none
        least = torch.linalg.lstsq(g.T, h.T).solution
        torch.testing.assert_close(space.span.vectors @ y.T, least, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_every_alpha_decodes_a_unit_to_its_ridge_projection(alpha: float) -> None:
    space = space_of(alpha=alpha, ridge=0.2)
    g, k = dense(space)
    eta = 0.2 * k.trace() / N
    captured = units(space, 1)
    h = unit_vectors(space.inner, captured)[0]
    expected = g.T @ torch.linalg.solve(k + eta * torch.eye(N).double(), g @ h)
    found = decoded(space, space.to_vector(space.weighted_sum(captured, torch.ones(1))))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    again = decoded(space, space.from_partial(space.partial_sum(space.encode(captured), torch.ones(1))))
    torch.testing.assert_close(again, expected, rtol=1e-9, atol=1e-11)


def test_alpha_0_and_1_are_noise_on_inner_products_and_on_coefficients() -> None:
    for alpha in (0.0, 1.0):
        space = space_of(alpha=alpha, ridge=0.01)
        g, k = dense(space)
        inverse = torch.linalg.inv(k + 0.01 * k.trace() / N * torch.eye(N).double())
        captured = units(space, 5)
        c = g @ unit_vectors(space.inner, captured).T
        if alpha == 0:
            expected = g.T @ inverse @ (c / c.norm(dim=0)).sum(dim=1) / EXPECTED
        else:
            z = inverse @ c
            expected = g.T @ (z / z.norm(dim=0)).sum(dim=1) / EXPECTED
        mechanism = mechanism_on(space)
        mechanism.accumulate(captured)
        found = decoded(space, mechanism.release().vector)
        torch.testing.assert_close(found, expected, rtol=4e-4, atol=1e-9)  # the slack of 3e-4


def test_without_noise_more_directions_are_never_worse() -> None:
    errors = []
    for top_k in [*range(1, N), 0]:
        space = space_of(alpha=0.5, ridge=0.0, top_k=top_k)
        captured = units(space, 3)
        # Of records of the model, which public texts say something about.
        captured, _ = micro_batch_gradients(space.adapter, one_batch(uneven_examples()[:5], double=True))
        h = unit_vectors(space.inner, captured).mean(dim=0)
        vector = space.to_vector(space.weighted_sum(captured, torch.full((5,), 0.2).double()))
        errors.append(float((decoded(space, vector) - h).norm() / h.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] < 1


def test_g_times_z_is_one_weighted_backward() -> None:
    z = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with everything_in_double():
        space = space_of(targets="all-linear")
        batch = one_batch([PUBLIC_TEXTS[i] for i in range(N)])
        weights = batch.token_weight.double() * z[batch.record_index][:, None]
        captured, _ = micro_batch_gradients(space.adapter, replace(batch, token_weight=weights), summed=True)
        expected = unit_vectors(space.inner, captured)[0]
    found = space.span.gradients.combined(z)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_at_the_rank_of_the_smaller_side_prisms_span_is_that_of_whole_weights() -> None:
    model = tiny_model(dtype=torch.float64)
    weights = [
        p
        for n, p in model.named_parameters()
        if n.endswith(("layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"))
    ]
    whole = []
    for batch in sequential_batches(PUBLIC_TEXTS, max_tokens=1):
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], batch.labels[0, 1:])
        found = torch.autograd.grad(loss, weights)
        whole.append((int(batch.record_index), torch.cat([t.flatten() for t in found])))
    rows = torch.stack([row for _, row in sorted(whole, key=lambda pair: pair[0])])
    with LowRankAdapter(model, rank=16, target_modules=TWO) as adapter:
        inner = tangent_start(adapter, "random", seed=0, dtype=torch.float64)
        gram = public_gradients(inner, PUBLIC_TEXTS, max_tokens=10**6).gram()
    assert inner.dimension == rows.shape[1]
    torch.testing.assert_close(gram, rows @ rows.mT, rtol=1e-5, atol=1e-6 * float(gram.diagonal().max()))


def test_nobodys_column_exceeds_1() -> None:
    space = space_of()
    captured = units(space, 6)
    for side in (captured.p, captured.q):
        for t in side:
            t[1], t[2], t[3] = 0.0, float("nan"), float("inf")
            t[4] *= 1e30
            t[5] *= 1e-30
    changes = []
    for i in range(6):
        mechanism = mechanism_on(space, expected_batch_size=1.0)
        mechanism.accumulate(captured.some(slice(i, i + 1)))
        changes.append(float(mechanism.release().vector[0][0].norm()))
    assert max(changes) <= 1
    assert min(changes[0], changes[4]) > 0.9996
    assert changes[1] == changes[2] == changes[3] == 0
    assert changes[5] < 1e-20  # far below the floor: not brought up


def test_the_floor_is_public_and_below_ordinary_units() -> None:
    space = space_of(ridge=1e-9)
    g, k = dense(space)
    own = torch.linalg.solve(k, g @ g.T).norm(dim=0)  # columns of the public gradients: unit vectors
    assert space.norm_floor() == pytest.approx(1e-3 * float(own.median()), rel=1e-3)
    scaled = space_of(rows=7 * space.span.gradients.matrix, ridge=1e-9)
    assert scaled.norm_floor() == pytest.approx(space.norm_floor(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_column_is_bit_by_bit_its_units_own(dtype: torch.dtype) -> None:
    """Whoever else is in the batch or micro-batch, in what order, however wide the padding."""
    space = space_of(dtype=torch.float32, targets="all-linear", ridge=0.0)
    space.adapter.model.to(dtype)
    space.install()
    rng = np.random.default_rng(3)
    records = [random_example(rng, n) for n in (5, 9, 2, 1, 40, 7, 7)]
    unit = np.array([1, 2])  # of two records
    seen = []
    for company, tokens in (([], 10**6), ([0, 3, 4], 10**6), ([6, 5, 4, 0], 10**6), ([4, 0], 1)):
        for drawn in ([unit, *company], [*company, unit]):
            for batch in micro_batches(drawn, Examples(records, pad_token_id=0), max_tokens=tokens):
                captured, _ = micro_batch_gradients(space.adapter, batch)
                columns = space.encode(captured).columns
                mine = [int(u) for u, r in zip(batch.unit_index, batch.record_index, strict=True) if r == 1]
                seen += [columns[u] for u in mine]
    assert len(seen) == 8
    assert float(seen[0].norm()) > 0
    assert all(torch.equal(column, seen[0]) for column in seen)


def test_units_go_through_the_model_one_by_one() -> None:
    """On some processors company rounds nothing, and bits show nothing."""
    space = space_of(dtype=torch.float32, targets="all-linear", ridge=0.0)
    rng = np.random.default_rng(3)
    records = [random_example(rng, n) for n in (5, 9, 2)]
    rows: list[int] = []
    handle = space.adapter.model.register_forward_pre_hook(
        lambda _, __, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    for batch in micro_batches([np.array([0, 1]), 2], Examples(records, pad_token_id=0), max_tokens=10**6):
        micro_batch_gradients(space.adapter, batch)
    handle.remove()
    assert sorted(rows[-2:]) == [1, 2]  # a unit of one record, and one of two


@pytest.mark.parametrize("alpha", [1.0, 0.0])
@pytest.mark.parametrize("copies", [1e-5, 1e-7])
def test_near_copies_among_the_texts_cost_no_sensitivity(alpha: float, copies: float) -> None:
    """Without a ridge small eigenvalues enlarge rounding; it must be everybody's own."""
    first = space_of(dtype=torch.float32, targets="all-linear").span.gradients.matrix
    near = first + copies * first.std() * torch.randn(first.shape, generator=torch.Generator().manual_seed(4))
    space = space_of(
        rows=30 * torch.cat([first, near]), dtype=torch.float32, targets="all-linear", ridge=0.0, alpha=alpha
    )
    records = Examples(uneven_examples(), pad_token_id=0)

    def total(drawn: Sequence[int], tokens: int = 10**6) -> Tensor:
        mechanism = mechanism_on(space)
        for batch in micro_batches(drawn, records, max_tokens=tokens):
            mechanism.accumulate(micro_batch_gradients(space.adapter, batch)[0])
        found = mechanism.clipped_sum()
        return found[0][0]

    whole = total(range(6))
    for k in range(6):
        for tokens in (10**6, 1):
            moved = float((whole - total([i for i in range(6) if i != k], tokens)).norm())
            assert 0.9996 < moved <= 1


def test_the_divisor_is_no_function_of_the_batch() -> None:
    """Divided by its own size, a batch of equal units would hide its size, and one opposite unit would move it by 2."""
    space = space_of()
    one = units(space, 1)
    opposite = Captured([-t for t in one.p], [-t for t in one.q])

    def released(count: int, more: Captured | None = None) -> Tensor:
        mechanism = mechanism_on(space)
        for _ in range(count):
            mechanism.accumulate(Captured(list(one.p), list(one.q)))
        if more is not None:
            mechanism.accumulate(Captured(list(more.p), list(more.q)))
        return mechanism.release().vector[0][0]

    e = released(1) * EXPECTED
    assert 0.9996 < float(e.norm()) <= 1
    for count in (40, 80, 120):
        torch.testing.assert_close(released(count), count / EXPECTED * e, rtol=1e-9, atol=0)
        torch.testing.assert_close(
            released(count) - released(count, opposite), e / EXPECTED, rtol=1e-6, atol=1e-12
        )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_decoded_noise_has_its_law(alpha: float) -> None:
    space = space_of(alpha=alpha, ridge=0.05, top_k=4)
    sigma, tau = 0.8, 0.8 / EXPECTED
    mechanism = mechanism_on(space, sigma=sigma, seed=5)
    g, k = dense(space)
    eta = 0.05 * k.trace() / N
    values, vectors = (t.flip(-1)[..., :4] for t in torch.linalg.eigh(k))
    basis = g.T @ vectors / values.sqrt()  # orthonormal, (p, 4)
    stds = tau * values.sqrt() * (values + eta) ** (alpha - 1)
    draws = torch.stack([decoded(space, mechanism.release().vector) for _ in range(800)])
    torch.testing.assert_close(draws @ basis @ basis.T, draws, rtol=1e-6, atol=1e-9)
    squares = ((draws @ basis) / stds).square().sum(dim=1)
    assert kstest(squares.numpy(), "chi2", args=(4,)).pvalue > 0.01
    for wrong in (0.8, 1.25):
        assert kstest(wrong * squares.numpy(), "chi2", args=(4,)).pvalue < 1e-3
    assert float(draws.square().mean().sqrt()) == pytest.approx(space.decoded_std(tau), rel=0.05)


def test_what_noise_does_to_w_is_what_its_gradient_does() -> None:
    space = space_of()
    vector = space.standard_normal(lambda shape: torch.randn(shape, dtype=torch.float64))
    pairs = zip(space.weight_effect(vector), space.inner.weight_effect(space.decode(vector)), strict=True)
    for one, other in pairs:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_public_gradients_are_kept_once_in_their_own_dtype() -> None:
    space = space_of(dtype=torch.float32)
    exact = space.span.gradients.matrix
    space.refresh = lambda: PublicGradients(exact.bfloat16())
    captured = units(space, 3)
    before = space.encode(captured).columns
    space.prepare()
    kept = space.span.gradients.matrix
    assert (kept.dtype, kept.shape) == (torch.bfloat16, exact.shape)
    held = [t for t in vars(space.span).values() if isinstance(t, Tensor)]
    assert all(t.numel() <= N * N for t in held)
    after = space.encode(captured).columns
    texts = [space.span.of_texts(y, 0.0) for y in after]
    assert all(bool(t.isfinite().all()) for t in texts)
    assert float(after.norm()) == pytest.approx(float(before.norm()), rel=0.2)


def test_public_gradients_are_taken_in_the_order_of_the_texts() -> None:
    space = space_of(dtype=torch.float32)
    together = space.span.gradients.matrix
    for i in range(N):
        alone = public_gradients(space.inner, Examples([PUBLIC_TEXTS[i]], pad_token_id=0), max_tokens=1)
        torch.testing.assert_close(alone.matrix[0], together[i], rtol=1e-4, atol=1e-6)


def test_public_texts_go_through_the_model_together_and_units_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In as few passes as tokens and the memory of their gradients allow."""
    space = space_of(dtype=torch.float32)
    passes: list[int] = []
    embeddings = space.adapter.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, args, __: passes.append(len(args[0])))
    space.prepare()
    assert passes == [N]
    p = space.span.gradients.matrix.shape[1]
    monkeypatch.setattr("privlora.coordinates.span._BYTES", 10 * 4 * p)  # public ones take half
    passes.clear()
    space.prepare()
    assert max(passes) <= 5
    assert (len(passes), sum(passes)) == (2, N)
    passes.clear()
    micro_batch_gradients(space.adapter, one_batch(uneven_examples()[:3]))
    assert passes == [1, 1, 1]


def test_a_text_that_is_no_number_or_says_nothing_spans_nothing() -> None:
    space = space_of(dtype=torch.float32)
    model = space.adapter.model
    model.get_input_embeddings().weight.data[60] = float("nan")
    ids = np.array([5, 60, 7], np.int32)
    short = np.array([5], np.int32)
    texts = [Example(ids, ids), PUBLIC_TEXTS[0], Example(short, short)]
    rows = public_gradients(space.inner, Examples(texts, pad_token_id=0), max_tokens=10**6).matrix
    assert [bool(row.any()) for row in rows] == [False, True, False]
    assert bool(rows.isfinite().all())
    for wrong in (texts[:1], texts[2:]):
        with pytest.raises(DataError, match="no direction is spanned"):
            public_gradients(space.inner, Examples(wrong, pad_token_id=0), max_tokens=10**6)


def test_directions_beyond_those_of_the_texts_see_nothing() -> None:
    g = torch.randn(3, 10, dtype=torch.float64)
    span = public_span.Span(PublicGradients(torch.cat([g, g[:1], torch.zeros(2, 10)])), ridge=0.0, top_k=0)
    assert span.size == 6
    assert [bool(v) for v in span.power(-1.0)] == [True] * 3 + [False] * 3
    h = torch.randn(2, 10, dtype=torch.float64)
    inside = torch.stack([span.back(y, -0.5) for y in span.along(h, -0.5)])
    expected = h @ torch.linalg.pinv(g) @ g
    torch.testing.assert_close(inside, expected, rtol=1e-8, atol=1e-10)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    adapter = LowRankAdapter(tiny_model(), rank=3, dropout=0.1)
    with pytest.raises(ConfigError, match="lora_dropout does not go with the span"):
        span_start(adapter, "random", seed=0, scale=1.0, kind=SpanCoordinates, inner=factor_start)
    adapter = LowRankAdapter(tiny_model(), rank=3)
    space = span_start(adapter, "random", seed=0, scale=1.0, kind=SpanCoordinates, inner=factor_start)
    with pytest.raises(ConfigError, match="has no public texts"):
        space.prepare()
    with pytest.raises(ConfigError, match="cannot normalise units"):
        space.inner.norm_floor()


def test_sums_of_two_spans_do_not_add_up() -> None:
    space = space_of()
    one = mechanism_on(space)
    one.accumulate(units(space, 2))
    total = one.take()
    others = torch.randn_like(space.span.gradients.matrix)
    space.refresh = lambda: PublicGradients(others)
    space.prepare()
    with pytest.raises(PrivacyError, match="made at another point"):
        one.release(total)
