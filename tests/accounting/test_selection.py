"""What tuning costs: against measured values, the theorems written out, and common sense."""

from __future__ import annotations

import math

import pytest

from privlora.accounting import (
    CyclicPoissonSampling,
    PoissonSampling,
    StepEvent,
    TruncatedPoissonSampling,
    epsilon,
)
from privlora.accounting.selection import repeat_and_select_epsilon, tuning_cost
from privlora.errors import PrivacyError

# 300 steps at q = 64/9919 and sigma = 0.65: RDP epsilon 3.7085 at delta = 1e-5.
EVENT, STEPS, DELTA = StepEvent(PoissonSampling(64 / 9919), 0.65), 300, 1e-5


@pytest.mark.parametrize(
    ("law", "values"),
    [
        ("poisson", (4.1992, 5.7743, 11.4345)),
        ("geometric", (4.6911, 6.2536, 7.6914)),
        ("logarithmic", (4.5107, 5.7358, 6.8100)),
    ],
)
def test_measured_values(law: str, values: tuple[float, ...]) -> None:
    for mean, value in zip((2, 10, 50), values, strict=True):
        found = repeat_and_select_epsilon(EVENT, STEPS, mean, DELTA, law=law)  # type: ignore[arg-type]
        assert found == pytest.approx(value, abs=1e-4)


ORDERS = [1 + k / 10 for k in range(1, 100)] + [float(k) for k in range(11, 64)] + [128, 256, 512, 1024]


def gaussian_rdp(order: float, sigma: float, steps: int) -> float:
    return steps * order / (2 * sigma**2)


def to_epsilon(order: float, renyi: float, delta: float) -> float:
    return renyi + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


@pytest.mark.parametrize(("law", "eta"), [("geometric", 1), ("logarithmic", 0)])
def test_theorem_2_written_out(law: str, eta: int) -> None:
    """On the whole data the Gaussian's Renyi divergence is order / (2 sigma^2), so the theorem is a formula."""
    sigma, steps, mean = 20.0, 30, 12.0
    gamma = 1 / mean  # geometric: E[K] = 1 / gamma
    if law == "logarithmic":  # E[K] = (1 / gamma - 1) / log(1 / gamma)
        low, high = 1e-9, 1.0
        for _ in range(200):
            gamma = (low + high) / 2
            low, high = (gamma, high) if (1 / gamma - 1) / math.log(1 / gamma) > mean else (low, gamma)
    inner = min((1 - 1 / o) * gaussian_rdp(o, sigma, steps) - math.log(gamma) / o for o in ORDERS)
    best = min(
        to_epsilon(o, gaussian_rdp(o, sigma, steps) + (1 + eta) * inner + math.log(mean) / (o - 1), 1e-5)
        for o in ORDERS
    )
    event = StepEvent(PoissonSampling(1.0), sigma)
    found = repeat_and_select_epsilon(event, steps, mean, 1e-5, law=law)  # type: ignore[arg-type]
    assert found == pytest.approx(best, rel=1e-6)


def test_theorem_6_written_out() -> None:
    sigma, steps, mean = 20.0, 30, 12.0

    def delta_at(eps: float) -> float:
        """The smallest delta that the Renyi divergences allow at this epsilon."""
        best = 1.0
        for o in ORDERS:
            renyi = gaussian_rdp(o, sigma, steps)
            best = min(best, math.sqrt(-math.expm1(-renyi)))
            exponent = (o - 1) * (renyi - eps + math.log1p(-1 / o)) - math.log(o)
            best = min(best, math.exp(min(exponent, 0.0)))
        return best

    best = min(
        to_epsilon(
            o,
            gaussian_rdp(o, sigma, steps)
            + mean * delta_at(math.log1p(1 / (o - 1)))
            + math.log(mean) / (o - 1),
            1e-5,
        )
        for o in ORDERS
    )
    found = repeat_and_select_epsilon(
        StepEvent(PoissonSampling(1.0), sigma), steps, mean, 1e-5, law="poisson"
    )
    assert found == pytest.approx(best, rel=1e-3)


@pytest.mark.slow
def test_tuning_takes_what_is_smaller() -> None:
    few, many = tuning_cost(EVENT, STEPS, 2, DELTA), tuning_cost(EVENT, STEPS, 50, DELTA)
    assert few.one_run == epsilon([(EVENT, STEPS)], DELTA) < few.smallest[1]  # type: ignore[index]
    assert few.composition == epsilon([(EVENT, 2 * STEPS)], DELTA)
    assert few.smallest == ("composition", few.composition)
    assert many.smallest == ("logarithmic", many.repeat_and_select["logarithmic"])
    assert many.composition is not None
    assert many.composition > many.smallest[1]
    assert many.to_dict()["smallest"] == many.smallest


@pytest.mark.slow
def test_one_run_is_not_tuning() -> None:
    found = tuning_cost(EVENT, STEPS, 1, DELTA)
    assert found.smallest == ("composition", found.one_run)


@pytest.mark.slow
def test_too_many_runs_for_the_accountant() -> None:
    cost = tuning_cost(StepEvent(PoissonSampling(0.1), 0.5), 300, 1000, DELTA)
    assert cost.composition is None
    assert set(cost.repeat_and_select) == {"geometric", "logarithmic", "poisson"}


@pytest.mark.slow
def test_truncated_sampling_is_composed_only() -> None:
    event = StepEvent(TruncatedPoissonSampling(0.1, 20, 100), 2.0)
    found = tuning_cost(event, 5, 3, DELTA)
    assert not found.repeat_and_select
    assert found.smallest == ("composition", epsilon([(event, 15)], DELTA))
    with pytest.raises(PrivacyError, match="plain Poisson sampling alone"):
        repeat_and_select_epsilon(event, 5, 3, DELTA, law="geometric")


def test_edges() -> None:
    silent, loud = StepEvent(PoissonSampling(0.0), 1.0), StepEvent(PoissonSampling(0.5), 0.0)
    assert repeat_and_select_epsilon(silent, 5, 3, DELTA, law="poisson") == 0
    assert repeat_and_select_epsilon(loud, 5, 3, DELTA, law="poisson") == math.inf
    with pytest.raises(PrivacyError, match="law"):
        repeat_and_select_epsilon(EVENT, 5, 3, DELTA, law="uniform")  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="below 1"):
        repeat_and_select_epsilon(EVENT, 5, 0.5, DELTA, law="poisson")
    with pytest.raises(PrivacyError, match="runs=0"):
        tuning_cost(EVENT, STEPS, 0, DELTA)


def test_runs_in_cycles_are_composed_run_by_run() -> None:
    """A run has classes and noise of its own: nine steps of eight bands are two cycles in each."""
    event = StepEvent(CyclicPoissonSampling(0.08, 8), 1.0)
    alone = StepEvent(PoissonSampling(0.08), 1.0)
    found = tuning_cost(event, 9, 10, 1e-5)
    assert found.composition == pytest.approx(epsilon([(alone, 20)], 1e-5))
