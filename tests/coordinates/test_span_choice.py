"""The setting of a span that is chosen on public gradients: what is forecast happens, and it is near the best."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import PUBLIC_TEXTS, tiny_model
from torch import Tensor

from privlora.accounting import PoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.coordinates import PublicGradients, ReleaseLaw, SpanCoordinates
from privlora.coordinates.public_span import Span
from privlora.coordinates.span_choice import (
    ALPHAS,
    RIDGES,
    SpanChoice,
    choose_setting,
    expected_cosines,
    hold_out_each,
)
from privlora.coordinates.starts import factor_start
from privlora.errors import ConfigError
from privlora.mechanisms import GaussianMechanism
from privlora.mechanisms.charges import Uncharged
from privlora.training.texts.public_gradients import public_gradients

P, N, UNITS, BATCH = 600, 60, 300, 60
LAW = ReleaseLaw(noise_multiplier=2.0, clip_norm=1.0, expected_batch_size=BATCH, clipping="normalized")


def gradients(count: int, seed: int) -> Tensor:
    """Of a law whose directions matter less and less. Units agree in the mean of the second 200: in 0.03 of them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.arange(1, P + 1, dtype=torch.float64) ** -0.7
    drawn = sizes * torch.randn(count, P, generator=generator, dtype=torch.float64)
    common = sizes * torch.randn(P, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return (drawn + 0.03**0.5 * common) / 1.03**0.5


def kept(public: Tensor, private: Tensor, law: ReleaseLaw, alpha: float, ridge: float, top_k: int) -> float:
    """The mean cosine of 60 simulated releases with the mean gradients of their batches, in all P coordinates."""
    span = Span(PublicGradients(public), ridge=ridge, top_k=top_k)
    columns = span.along(private, -alpha)
    norms = columns.norm(dim=1, keepdim=True)
    bound = norms.clamp_max(law.clip_norm) if law.clipping == "flat" else law.clip_norm
    generator = torch.Generator().manual_seed(7)
    batches = (torch.rand(60, len(private), generator=generator) < BATCH / len(private)).double()
    noise = torch.randn(60, span.size, generator=generator, dtype=torch.float64)
    sums = batches @ (columns / norms * bound) + law.noise_multiplier * law.clip_norm * noise
    decoded = torch.stack([span.back(y, alpha - 1) for y in sums])
    return float(torch.cosine_similarity(decoded, batches @ private, dim=1).mean())


@pytest.fixture(scope="module")
def public() -> Tensor:
    return gradients(N, 0)


@pytest.fixture(scope="module")
def private() -> Tensor:
    return gradients(UNITS, 1)


@pytest.mark.parametrize("clipping", ["normalized", "flat"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_what_is_forecast_happens(alpha: float, clipping: str, public: Tensor, private: Tensor) -> None:
    """Units are of the same law as public gradients here; the batch is larger than what is held out at a time."""
    law = ReleaseLaw(2.0, 0.1 if clipping == "flat" else 1.0, BATCH, clipping)
    held_out = hold_out_each(PublicGradients(public).gram(), 0.25)
    for ridge in (0.01, 1.0):
        forecast = expected_cosines(held_out, law, alpha=alpha, ridge=ridge)
        assert len(forecast) == 45
        for top_k in (5, 20, 45):
            found = kept(public[torch.arange(N) % 4 > 0], private, law, alpha, ridge, top_k)
            assert float(forecast[top_k - 1]) == pytest.approx(found, rel=0.2), (ridge, top_k)


def test_the_choice_is_near_the_best_and_far_above_the_papers(public: Tensor, private: Tensor) -> None:
    chosen = choose_setting(PublicGradients(public).gram(), LAW)
    own = chosen.setting
    found = kept(public, private, LAW, own.alpha, own.ridge, own.top_k)
    every = [
        kept(public, private, LAW, a, r, k) for a in ALPHAS for r in RIDGES[::2] for k in (5, 10, 20, 40, 0)
    ]
    assert found > 0.95 * max(every)
    assert found > 1.2 * kept(public, private, LAW, 1.0, 1e-6, 0)


def test_noise_takes_directions_and_without_it_all_are_used(public: Tensor) -> None:
    gram = PublicGradients(public).gram()
    chosen = [choose_setting(gram, ReleaseLaw(s, 1.0, BATCH, "normalized")) for s in (0.0, 2.0, 8.0)]
    directions = [one.directions for one in chosen if one is not None]
    assert directions[0] == N
    assert directions[0] > directions[1] > directions[2] > 0
    assert chosen[0] is not None
    assert chosen[0].setting.top_k == 0


def test_what_is_given_is_not_chosen(public: Tensor) -> None:
    gram = PublicGradients(public).gram()
    for top_k, directions in ((7, 7), (0, N), (10 * N, N)):
        chosen = choose_setting(gram, LAW, alpha=0.5, ridge=0.2, top_k=top_k)
        assert (chosen.alpha, chosen.ridge, chosen.directions) == (0.5, 0.2, directions)
    free = choose_setting(gram, LAW)
    for name in ("alpha", "ridge", "top_k"):
        again = choose_setting(gram, LAW, **{name: getattr(free.setting, name)})
        assert again == free


def test_it_is_the_same_for_gradients_of_another_size_and_order_within_what_is_held_out(
    public: Tensor,
) -> None:
    gram = PublicGradients(public).gram()
    chosen = choose_setting(gram, LAW)
    assert chosen == choose_setting(gram.clone(), LAW)
    scaled = choose_setting(1e-6 * gram, LAW)
    assert scaled.setting == chosen.setting
    assert scaled.kappa == pytest.approx(chosen.kappa, rel=1e-6)


def test_where_nothing_can_be_forecast_nothing_is_chosen() -> None:
    assert choose_setting(torch.eye(1, dtype=torch.float64), LAW) is None
    assert choose_setting(torch.eye(8, dtype=torch.float64), LAW) is None  # no text says anything of another
    zero = torch.zeros(4, 4, dtype=torch.float64)
    zero[0, 0] = 1.0
    assert choose_setting(zero, LAW) is None


def test_kappa_compares_with_noise_on_whole_gradients(public: Tensor, private: Tensor) -> None:
    """Where noise is much: the same span, ridge and directions, bounded and noised before the projection."""
    law = ReleaseLaw(30.0, 1.0, BATCH, "normalized")
    chosen = choose_setting(PublicGradients(public).gram(), law, alpha=1.0, ridge=0.3, top_k=40)
    span = Span(PublicGradients(public), ridge=0.3, top_k=40)

    total = private.sum(dim=0)
    own = span.along(private, -1.0)
    whole = span.along(private / private.norm(dim=1, keepdim=True), 0.0)
    here = span.back((own / own.norm(dim=1, keepdim=True)).sum(dim=0), 0.0) @ total / span.values.sum().sqrt()
    there = span.back(whole.sum(dim=0), -1.0) @ total / (span.values * span.power(-1.0)).norm()
    assert chosen.kappa == pytest.approx(float(here / there), rel=0.1)


def test_what_was_taken_is_kept(public: Tensor) -> None:
    choice = SpanChoice(hold_out=0.25, alpha=None, ridge=None, top_k=None)
    gram = PublicGradients(public).gram()
    assert choice.choose(gram).top_k == 0  # without a law: the paper's
    choice.record()
    assert choice.history == []
    choice.law = LAW
    first = choice.choose(gram)
    choice.record()
    choice.law = ReleaseLaw(8.0, 1.0, BATCH, "normalized")
    last = choice.choose(gram)
    choice.record()
    assert [one.setting for one in choice.history] == [first, last]
    assert first != last

    other = SpanChoice(hold_out=0.25, alpha=None, ridge=0.7, top_k=None)
    other.load_state_dict(choice.state_dict())
    assert other.history == choice.history
    assert other.choose(gram).ridge == 0.7
    assert other.choose(gram).top_k == last.top_k


def space_of(**settings: Any) -> SpanCoordinates:
    adapter = LowRankAdapter(tiny_model(), rank=2, target_modules=["q_proj"]).attach()
    inner = factor_start(adapter, "random", seed=0, scale=1.0)
    space = SpanCoordinates(inner, **settings)
    space.refresh = lambda: public_gradients(inner, PUBLIC_TEXTS, max_tokens=10**6)
    return space


def test_the_number_of_coordinates_follows_the_step() -> None:
    space = space_of(alpha=None, ridge=None, top_k=None, hold_out=0.25)
    rows = gradients(N, 0)
    space.refresh = lambda: PublicGradients(rows)
    sizes = []
    for sigma in (0.0, 100.0):
        space.expect(ReleaseLaw(sigma, 1.0, 8.0, "normalized"))
        space.prepare()
        sizes.append(space.dimension)
        assert space.standard_normal(torch.zeros)[0][0].shape == (space.dimension,)
        assert space.entries() == space.dimension == space.span.size
    assert sizes[0] > sizes[1] >= 1


def test_sums_of_two_settings_do_not_add_up() -> None:
    """One Gram matrix, and columns that are other numbers."""
    places = set()
    for alpha, ridge in ((1.0, 0.1), (0.5, 0.1), (1.0, 0.2)):
        space = space_of(alpha=alpha, ridge=ridge, top_k=0)
        space.prepare()
        places.add(space.place())
    assert len(places) == 3


def test_holding_out_without_anything_to_choose_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hold_out=0.25 and nothing left to choose"):
        space_of(hold_out=0.25)
    with pytest.raises(ConfigError, match=r"hold_out=0 and ridge left to choose"):
        space_of(ridge=None)


def test_a_mechanism_says_the_noise_that_it_will_add() -> None:
    space = space_of(alpha=None, ridge=None, top_k=None, hold_out=0.25)
    GaussianMechanism(
        space,
        clip_norm=0.5,
        event=StepEvent(PoissonSampling(0.2), 1.25),
        expected_batch_size=8.0,
        ledger=Uncharged(),
        clipping="normalized",
    )
    assert space.memory.law == ReleaseLaw(1.25, 0.5, 8.0, "normalized")
