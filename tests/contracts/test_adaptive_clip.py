"""Sum and noisy count of an adaptive clipping norm are, together, the one Gaussian mechanism that is charged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import IN_METRIC, ONE_A_SPACE, Case, CountingLedger, flat, label, make_case
from scipy.stats import kstest
from test_sensitivity import hard_batch
from tiny_models import uneven_examples
from torch import Tensor

from privlora.data.examples import Example
from privlora.errors import ConfigError
from privlora.mechanisms import AdaptiveClipNorm, split_noise_multiplier
from privlora.mechanisms.noising import grid_width
from privlora.methods import METHODS

CLIP_NORM, RATE, BATCH = 0.05, 0.2, 100.0
PROJECTED = [v for v in ONE_A_SPACE if METHODS[v[0]].space in ("projected", "wishart")]
ADAPTABLE = [v for v in ONE_A_SPACE if v not in PROJECTED]
by_space = pytest.mark.parametrize("variant", ADAPTABLE, ids=label)
TWO_MODULES = r".*layers\.0\.(self_attn\.q_proj|mlp\.down_proj)"


def clip_norm_at(value: float, quantile: float = 0.5) -> AdaptiveClipNorm:
    adaptive = AdaptiveClipNorm(CLIP_NORM, quantile, rate=RATE)
    adaptive.value = value
    return adaptive


def share(adaptive: AdaptiveClipNorm, before: float) -> float:
    """What the last update took for the share of norms at or below ``before``."""
    return adaptive.quantile - math.log(adaptive.value / before) / RATE


def sum_and_count(
    case: Case, examples: list[Example], units: list[Any], value: float, clipping: str
) -> tuple[Tensor, float]:
    """A release's sum, in units of C, and its count of +1/2 and -1/2, without noise."""
    adaptive = clip_norm_at(value)
    mechanism = case.mechanism(
        sigma=0.0, clip_norm=CLIP_NORM, batch=BATCH, clipping=clipping, adaptive=adaptive
    )
    case.feed(mechanism, examples, units)
    release = mechanism.release()
    assert release.clip_norm == value
    return flat(release.vector) * BATCH / CLIP_NORM, (share(adaptive, value) - 0.5) * BATCH


@by_space
@pytest.mark.parametrize(
    ("clipping", "value"), [("flat", 2e-3), ("flat", 1e3), ("spectral", 2e-3), ("per-module", 2e-3)]
)
def test_nobody_moves_both_by_more_than_is_charged(
    variant: tuple[str, str], clipping: str, value: float, tmp_path: Path
) -> None:
    case = make_case(variant, tmp_path, targets=TWO_MODULES)
    if clipping not in case.row.clippings:
        pytest.skip("the row does not clip like that")
    examples = hard_batch()
    *finite, nan, infinite = range(len(examples))
    on_sum, on_count = split_noise_multiplier(1.0)
    moved, counted = [], []
    # Beside units that are not finite each is computed by itself, which takes long: so those leave a small company.
    for present, leaving in ((finite, finite), ([0, 1, nan, infinite], [nan, infinite])):
        whole_sum, whole_count = sum_and_count(case, examples, present, value, clipping)
        for left_out in leaving:
            rest = [k for k in present if k != left_out]
            rest_sum, rest_count = sum_and_count(case, examples, rest, value, clipping)
            moved.append(float((whole_sum - rest_sum).norm()))
            counted.append(abs(whole_count - rest_count))
    joint = [math.hypot(m / on_sum, c / on_count) for m, c in zip(moved, counted, strict=True)]
    assert max(joint) <= 1 + 1e-4
    assert max(moved) <= 1 + 1e-4
    if value == 2e-3:  # all ordinary records are clipped: the bound is reached
        # The one of two tokens has a gradient in one module of two.
        # Along one direction a record may have no difference that is longer than C.
        least = sorted(joint[:6])[1 if case.coordinates.forward_only else 0]
        usual = 0.98 if (variant, clipping) == (IN_METRIC, "spectral") else 0.9899
        assert least > (0.69 if clipping == "per-module" else usual)
    assert counted[:6] == pytest.approx([0.5] * 6)
    assert counted[-2:] == pytest.approx([0.0] * 2)  # NaN and infinite: not there


@by_space
def test_one_user_counts_once(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    units = [np.array(u) for u in ([0, 3, 5], [1, 2], [4])]
    assert sum_and_count(case, hard_batch(), units, 1e3, "flat")[1] == pytest.approx(1.5)
    assert sum_and_count(case, hard_batch(), units, 1e-3, "flat")[1] == pytest.approx(-1.5)


@by_space
def test_clipping_at_c_t_only_changes_the_unit_of_the_sum(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    examples = uneven_examples()
    everybody = list(range(len(examples)))
    for value in (0.02, 1.5):
        found, _ = sum_and_count(case, examples, everybody, value, "flat")
        expected = case.clipped_sum(examples, clip_norm=value) / value
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-5)


@by_space
def test_both_are_noised_once_and_independently(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path, targets=TWO_MODULES)
    sigma, ledger = 0.8, CountingLedger()
    adaptive = clip_norm_at(1.0)
    mechanism = case.mechanism(
        sigma=sigma, clip_norm=CLIP_NORM, batch=BATCH, seed=3, ledger=ledger, adaptive=adaptive
    )
    on_sum, on_count = split_noise_multiplier(sigma)
    sums, counts = [], []
    for _ in range(200):
        before = adaptive.value
        release = mechanism.release()
        assert release.noise_std == pytest.approx(on_sum * CLIP_NORM / BATCH)
        sums.append(flat(release.vector) / release.noise_std)
        counts.append((share(adaptive, before) - 0.5) * BATCH / on_count)
        adaptive.value = 1.0
    assert [event.noise_multiplier for event in ledger.events] == [sigma] * 200
    assert kstest(counts, "norm").pvalue > 0.01
    assert kstest(np.array(counts) * 1.7, "norm").pvalue < 0.01
    assert kstest(np.array(counts) / 1.7, "norm").pvalue < 0.01
    vectors, numbers = torch.stack(sums), torch.tensor(counts, dtype=torch.float64)
    few = case.coordinates.dimension == 1  # whose square is known to a tenth after 200 draws
    energy = float(vectors.square().sum(dim=1).mean())
    assert energy == pytest.approx(case.coordinates.dimension, rel=0.4 if few else 0.03)
    alike = (vectors.T @ numbers).abs() / 200**0.5
    assert float(alike.max()) < 5.0  # in standard errors


@by_space
def test_micro_batches_do_not_matter(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    ends = []
    for tokens in (10**6, 45, 1):
        adaptive = clip_norm_at(0.5)
        mechanism = case.mechanism(clip_norm=CLIP_NORM, seed=11, adaptive=adaptive)
        case.feed(mechanism, uneven_examples(), max_tokens=tokens)
        ends.append((flat(mechanism.release().vector), adaptive.value))
    for vector, value in ends[1:]:
        # Rounding may take an entry to the next point of the grid.
        torch.testing.assert_close(vector, ends[0][0], rtol=1e-6, atol=1.01 * grid_width(CLIP_NORM / 4))
        assert value == ends[0][1]


def test_a_batch_that_was_given_up_is_in_no_count(tmp_path: Path) -> None:
    case = make_case(("prism", "rank"), tmp_path)
    adaptive = clip_norm_at(1e3)
    mechanism = case.mechanism(sigma=0.0, batch=BATCH, adaptive=adaptive)
    case.feed(mechanism, uneven_examples())
    mechanism.discard()
    mechanism.release()
    assert share(adaptive, 1e3) == pytest.approx(0.5)


def test_a_release_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    class Refusing(CountingLedger):
        def charge(self, event: Any) -> int:
            raise RuntimeError("no")

    case = make_case(("prism", "rank"), tmp_path)
    adaptive = clip_norm_at(1e6)
    mechanism = case.mechanism(ledger=Refusing(), adaptive=adaptive)
    case.feed(mechanism, uneven_examples())
    with pytest.raises(RuntimeError):
        mechanism.release()
    assert adaptive.value == 1e6


@pytest.mark.parametrize("variant", [v for v in PROJECTED if METHODS[v[0]].space == "wishart"], ids=label)
def test_a_random_projection_does_not_cover_the_count(variant: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="random projection"):
        make_case(variant, tmp_path).mechanism(adaptive=clip_norm_at(1.0))


@pytest.mark.parametrize("clipping", ["automatic", "normalized"])
def test_clipping_that_scales_everybody_has_nothing_to_adapt(clipping: str, tmp_path: Path) -> None:
    case = make_case(("pe-sgd", "adamw"), tmp_path)
    with pytest.raises(ConfigError, match=rf"{clipping} clipping has no.*clip_quantile"):
        case.mechanism(clipping=clipping, adaptive=clip_norm_at(1.0))


@by_space
def test_sum_and_count_carry_exactly_the_noise_that_is_charged(
    variant: tuple[str, str], tmp_path: Path
) -> None:
    class Stub:
        """Numbers so large that the grid is out of sight; after those, for the count, one that keeps the share in
        [0, 1]."""

        secure = False

        def __init__(self, large: float = float("inf")) -> None:
            self.large = large  # entries left

        def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
            self.large -= math.prod(shape)
            return torch.full(shape, 1e9 if self.large >= 0 else 0.5, dtype=torch.float64)

    sigma, adaptive = 0.8, clip_norm_at(1.0)
    case = make_case(variant, tmp_path, targets=TWO_MODULES)
    asked = list[int]()

    def ask(shape: tuple[int, ...]) -> Tensor:
        asked.append(math.prod(shape))
        return torch.ones(shape, dtype=torch.float64)

    case.coordinates.standard_normal(ask)
    mechanism = case.mechanism(sigma=sigma, clip_norm=CLIP_NORM, batch=BATCH, adaptive=adaptive)
    mechanism.noising.noise = Stub(sum(asked))
    on_sum, on_count = split_noise_multiplier(sigma)
    assert 1 / sigma**2 == pytest.approx(1 / on_sum**2 + 1 / (2 * on_count) ** 2, rel=1e-12)
    drawn = flat(case.coordinates.standard_normal(Stub().standard_normal))
    released = flat(mechanism.release().vector)
    torch.testing.assert_close(released, drawn * (on_sum * CLIP_NORM / BATCH), rtol=1e-6, atol=1.0)
    assert float(released.norm()) > 1e5
    noise_on_share = share(adaptive, 1.0) - 0.5
    assert noise_on_share == pytest.approx(0.5 * on_count / BATCH, abs=on_count / BATCH / 4096)
