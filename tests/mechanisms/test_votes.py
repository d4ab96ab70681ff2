"""The sum mechanism on votes: its sensitivity by brute force, its noise's law, what it refuses, and its audit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2, kstest

from privlora.accounting import Ledger, Plan, PoissonSampling, StepEvent, epsilon
from privlora.auditing.bounds import Errors, accuracy_mu, gaussian_epsilon
from privlora.errors import PrivacyError
from privlora.mechanisms import NoiseSource, VoteMechanism
from privlora.mechanisms.charges import Uncharged
from privlora.mechanisms.noising import grid_width

Votes = list[NDArray[np.float64]]
N = 12


def mechanism(
    sigma: float = 1.0, divisor: float = 1.0, ledger: Any = None, seed: int | None = 1
) -> VoteMechanism:
    return VoteMechanism(
        event=StepEvent(PoissonSampling(1.0), sigma),
        divisor=divisor,
        ledger=ledger or Uncharged(),
        noise=NoiseSource(insecure_seed=seed),
    )


def released(made: VoteMechanism, votes: Votes, entries: int = N) -> NDArray[np.float64]:
    ((mean,),) = made.release(votes, entries).vector
    found: NDArray[np.float64] = mean.numpy()
    return found


def hostile_votes() -> Votes:
    """Of all sizes, with repeats, in one direction and against each other, and with what is no number."""
    draw = np.random.default_rng(0)
    ordinary = [
        draw.standard_normal(N) * size for size in (1e-200, 1e-9, 0.01, 0.3, 1.0, 1.0, 7.0, 1e9, 1e200)
    ]
    one = np.eye(N)[0]
    odd = [np.zeros(N), np.full(N, np.nan), np.where(one > 0, np.inf, 0.1), np.where(one > 0, -np.inf, 0.0)]
    odd += [np.where(one > 0, np.nan, 1.0), np.full(N, 1e308), np.full(N, 5e-324)]
    return [*ordinary, ordinary[4], ordinary[4], *odd, one, -one, *[one] * 5]


@pytest.mark.parametrize("index", range(len(hostile_votes())))
def test_no_unit_moves_the_sum_by_more_than_one(index: int) -> None:
    """Exactly, in integers: sums are on a grid of 2^-32, so no rounding of float64 hides behind a tolerance."""
    votes = hostile_votes()
    with_it = mechanism().clipped_sum(votes, N)
    without = mechanism().clipped_sum(votes[:index] + votes[index + 1 :], N)
    moved = [int(entry) for entry in (with_it - without) * 2.0**32]
    assert [float(m) for m in moved] == list((with_it - without) * 2.0**32)
    assert math.isqrt(sum(m * m for m in moved)) < 2**32
    assert np.isfinite(with_it).all()
    # And the rest of the sum does not depend on it at all, in whatever order.
    assert np.array_equal(mechanism().clipped_sum([*votes[index + 1 :], *votes[: index + 1]], N), with_it)


@pytest.mark.parametrize("entries", [*range(70, 80), 100, 144, 200, 333, 500, 1000, 1001, 4096, 10_000])
def test_no_vote_on_many_candidates_is_rounded_beyond_one(entries: int) -> None:
    """Each entry may be half a step away from the grid: up, a thousand of them would be more than what is kept back."""
    draw, steps = np.random.default_rng(entries), 2.0**32
    for halves in (0.25, 0.5, 0.75, 0.999):
        # Just within the norm that is not scaled down, each entry the same part of a step above the grid.
        flat = np.full(entries, (math.floor(steps * (1 - 2e-9) / math.sqrt(entries)) + halves - 1) / steps)
        for vote in (flat, -flat, 2 * flat, draw.standard_normal(entries)):
            total = mechanism().clipped_sum([vote], entries)
            assert math.isqrt(sum(int(entry * steps) ** 2 for entry in total)) < 2**32


@pytest.mark.parametrize("norm", [1e-6, 0.5, 1.0, 1.5, 1e9])
def test_a_vote_is_scaled_down_to_one_and_never_up(norm: float) -> None:
    vote = np.full(N, norm / N**0.5)
    total = mechanism().clipped_sum([vote], N)
    np.testing.assert_allclose(total, vote * min(1.0, 1 / norm), rtol=1e-8, atol=2.0**-32)


@pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf])
def test_a_vote_that_is_no_number_counts_as_zero(entry: float) -> None:
    broken, good = np.full(N, 0.1), np.full(N, 0.2)
    broken[3] = entry
    assert np.array_equal(mechanism().clipped_sum([broken, good], N), mechanism().clipped_sum([good], N))


def test_without_a_unit_the_release_is_noise_of_full_size() -> None:
    """And so is what a release has beside its sum: chi-square, for any sum and divisor."""
    sigma, divisor, entries, rounds = 3.0, 40.0, 500, 20
    made = mechanism(sigma, divisor)
    votes = [np.full(entries, entries**-0.5)] * 30
    total = made.clipped_sum(votes, entries)
    for present, sum_ in (([], 0.0), (votes, total)):
        noise = np.array([released(made, present, entries) * divisor - sum_ for _ in range(rounds)])
        # Of one release, and of the difference of two, which repeated noise would leave without any.
        for standard in (noise / sigma, (noise[::2] - noise[1::2]) / (sigma * 2**0.5)):
            assert 0.001 < chi2.cdf(float((standard**2).sum()), standard.size) < 0.999
            assert kstest(standard.flatten(), "norm").pvalue > 0.001
    assert made.noise_std == sigma / divisor


def test_a_release_lies_on_a_grid_that_public_numbers_fix() -> None:
    sigma, divisor = 0.37, 7.3
    for size in (0.0, 1e-3, 1.0):
        steps = released(mechanism(sigma, divisor), [np.full(N, size)]) / grid_width(sigma / divisor)
        assert np.array_equal(steps, np.round(steps))


def test_the_divisor_is_public_and_not_how_many_vote() -> None:
    """The pair of neighbours that a realised divisor gives away: sensitivity 2, not 1."""
    one = np.eye(N)[0]
    for count in (3, 50):
        alike, other = [one] * count, [*[one] * count, -one]
        first, second = (released(mechanism(1e-6, 8.0), votes)[0] for votes in (alike, other))
        assert first == pytest.approx(count / 8.0, abs=1e-5)
        assert first - second == pytest.approx(1 / 8.0, abs=1e-5)


def test_the_charge_comes_before_the_noise() -> None:
    events: list[str] = []

    class Watched(NoiseSource):
        def standard_normal(self, shape: tuple[int, ...]) -> Any:
            events.append("noise")
            return super().standard_normal(shape)

    class Ledgers:
        def charge(self, event: StepEvent) -> int:
            events.append("charge")
            return 7

    made = VoteMechanism(
        event=StepEvent(PoissonSampling(1.0), 1.0), divisor=1.0, ledger=Ledgers(), noise=Watched()
    )
    assert made.release([], N).step == 7
    assert events == ["charge", "noise"]


def test_a_refused_charge_draws_nothing() -> None:
    class Spent:
        def charge(self, event: StepEvent) -> int:
            raise PrivacyError("spent")

    made = mechanism(ledger=Spent())
    made.noising.noise.standard_normal = None  # type: ignore[assignment, method-assign]
    with pytest.raises(PrivacyError, match="spent"):
        made.release([], N)


def test_a_vote_of_another_shape_is_refused_before_the_charge(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.jsonl", plan()) as ledger:
        for shape in ((), (1,), (N + 1,), (1, N)):
            with pytest.raises(PrivacyError, match="is cast on"):
                mechanism(ledger=ledger).release([np.ones(shape)], N)
        assert ledger.charges == 0


def plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "phases": ((StepEvent(PoissonSampling(1.0), 1.0), 3),),
        "delta": 1e-5,
        "target_epsilon": None,
        "adjacency": "add-or-remove-one",
        "unit": "record",
        "records_per_user": None,
        "clip_norm": 1.0,
        "expected_batch_size": 1.0,
        "method": "aug-pe",
        "dataset": "notes",
        "insecure_noise": True,
    }
    return Plan(**{**fields, **changes})


TRAINING = (StepEvent(PoissonSampling(0.1), 2.0), 5)


@pytest.mark.parametrize(
    ("changes", "make", "message"),
    [
        ({"clip_norm": 2.0}, mechanism, "expected_batch_size"),
        ({"expected_batch_size": 9.0}, mechanism, "expected_batch_size"),
        ({"insecure_noise": False}, mechanism, "can be replayed"),
        ({}, lambda ledger: mechanism(ledger=ledger, seed=None), "can be replayed"),
        ({}, lambda ledger: mechanism(0.9, ledger=ledger).release([], N), "planned"),
    ],
)
def test_what_the_ledger_would_misstate_is_refused(
    changes: dict[str, Any], make: Callable[..., Any], message: str, tmp_path: Path
) -> None:
    with (
        Ledger.create(tmp_path / "ledger.jsonl", plan(**changes)) as ledger,
        pytest.raises(PrivacyError, match=message),
    ):
        make(ledger=ledger)


def test_the_numbers_of_a_plan_with_training_are_those_of_its_gradients(tmp_path: Path) -> None:
    votes = (StepEvent(PoissonSampling(1.0), 1.0), 2)
    both = plan(phases=(votes, TRAINING), clip_norm=0.1, expected_batch_size=32.0)
    with Ledger.create(tmp_path / "ledger.jsonl", both) as ledger:
        made = mechanism(divisor=5.0, ledger=ledger)
        assert [made.release([], N).step for _ in range(2)] == [1, 2]
        with pytest.raises(PrivacyError, match="planned"):
            made.release([], N)
        assert ledger.charges == 2


def test_what_would_make_exact_counts_is_refused() -> None:
    for sigma in (0.0, 1e-7, 1e10):
        with pytest.raises(PrivacyError, match="noise_multiplier"):
            mechanism(sigma)
    for divisor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="expected_batch_size"):
            mechanism(divisor=divisor)
    with pytest.raises(PrivacyError, match="projected"):
        VoteMechanism(event=StepEvent(PoissonSampling(1.0), 1.0, ((2, 4),)), divisor=1.0, ledger=Uncharged())


def test_it_states_its_sensitivity() -> None:
    assert (mechanism().sensitivity(), mechanism().sensitivity("replace-one")) == (1.0, 2.0)
    with pytest.raises(PrivacyError, match="adjacency"):
        mechanism().sensitivity("swap")


# --- an audit: one canary's vote, all else known ---


def audited_epsilon(made: VoteMechanism, trials: int = 2000) -> float:
    """A lower bound on epsilon at 1e-5 with confidence 0.999, from guesses whether the canary voted."""
    canary = np.eye(N)[4]
    others = [np.eye(N)[2]] * 3
    absent, present = (
        np.array([released(made, [*others, *more])[4] for _ in range(trials)]) * made.divisor
        for more in ([], [canary])
    )
    wrong = Errors(int((absent > 0.5).sum()), trials, int((present <= 0.5).sum()), trials)
    return gaussian_epsilon(accuracy_mu(wrong, 0.999), 1e-5)


@pytest.mark.parametrize("part", [1.0, 0.25])
def test_a_quarter_of_the_noise_is_found_by_an_audit(part: float) -> None:
    class Weak(NoiseSource):
        def standard_normal(self, shape: tuple[int, ...]) -> Any:
            return part * super().standard_normal(shape)

    claimed = StepEvent(PoissonSampling(1.0), 1.0)
    weak = VoteMechanism(event=claimed, divisor=6.0, ledger=Uncharged(), noise=Weak(insecure_seed=3))
    found, stated = audited_epsilon(weak), epsilon([(claimed, 1)], 1e-5)
    assert found > 1.5 * stated if part < 1 else 0.5 * stated < found <= stated
