"""What it costs: epsilon and delta of a sequence of step events.

The printed number is always the privacy loss distribution (PLD) of dp_accounting, discretised pessimistically
(connect the dots: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, 2022), so it is an upper bound; `loss_distributions`
computes it in arrays, equal to dp_accounting's own within rounding. RDP and PRV
are second opinions on request. The central limit theorem of Gaussian DP is not offered: for small sampling
rates it states half the true epsilon. An accountant that does not know an event or an adjacency refuses;
nothing falls back to another accountant.

Projected steps are priced by `projection.composition` for gradients of any rank, and composed with the others.

dp_accounting takes most of a second to import, so it is imported inside the functions that need it.

Edge cases of `epsilon`:

| events                                      | result |
|---------------------------------------------|--------|
| none, zero counts or sample_rate 0          | 0      |
| noise_multiplier 0 with sample_rate above 0 | inf    |
| a bound below zero (RDP, PRV at large delta)| 0      |
| PLD far above any use (about 500)           | refused|
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from time import process_time
from typing import TYPE_CHECKING, Literal, get_args

from privlora.accounting.events import (
    BallsInBinsSampling,
    PoissonSampling,
    StepEvent,
    TruncatedPoissonSampling,
)
from privlora.errors import PrivacyError
from privlora.ranges import MOST_PHASES
from privlora.version import __version__, version_of

if TYPE_CHECKING:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Accountant = Literal["pld", "rdp", "prv"]
Adjacency = Literal["add-or-remove-one", "replace-one"]
Events = Sequence[tuple[StepEvent, int]]
"""Run-length encoded: each event with how often it happened. The order does not matter."""

DEFAULT_GRID = 1e-4
# Below this epsilon the rounding of the default grid is no longer small against the result.
REFINE_BELOW_EPSILON = 0.1
FINE_GRID = 2e-5
LARGEST_EPSILON = 500.0
# Of `ranges`: of several kinds at the default grid, which take half a minute and 4 GB; of any at the fine one.
_MOST_RANGES, _MOST_FINE = 256.0, 32.0
_OF_TRUNCATED = 6.0  # times the time and memory of plain Poisson sampling
_PATIENCE: ContextVar[float] = ContextVar("patience", default=math.inf)

# Opacus' settings; Gopi, Lee, Wutschitz (2021) prove epsilon to this error.
_PRV_EPSILON_ERROR = 0.01
_PRV_DELTA_ERROR_PER_DELTA = 1e-3

_PACKAGES: dict[Accountant, str] = {"pld": "dp-accounting", "rdp": "dp-accounting", "prv": "prv-accountant"}


def epsilon(
    events: Events,
    delta: float,
    *,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add-or-remove-one",
    grid: float = DEFAULT_GRID,
) -> float:
    """The epsilon for which the composition of `events` is (epsilon, delta)-DP: an upper bound, at least 0.

    Args:
        events: pairs (event, count).
        delta: total delta of the composition, in (0, 1).
        accountant: "pld" (the one to print); "rdp" (looser; add-or-remove-one and plain Poisson only); "prv"
            (upper end of its interval, about 0.01 above PLD; same limits, and no projected steps; needs the
            package prv-accountant).
        adjacency: which data sets count as neighbours. Under "add-or-remove-one", truncated Poisson sampling
            is accounted for a unit replaced by an empty one among `dataset_size` (arXiv:2508.15089).
        grid: spacing of the discretised privacy loss, PLD only. A result below 0.1 is computed once more at
            2e-5, unless that would take gigabytes, and the lower of both upper bounds is returned.

    Returns:
        epsilon, possibly inf.

    Raises:
        PrivacyError: delta or a count is out of range, or the accountant does not support an event or the
            adjacency.
    """
    check_delta(delta)
    events = list(events)
    costly = merged(events)
    _check_supported(accountant, adjacency, events)
    if not costly:
        return 0.0
    if any(event.noise_multiplier == 0 for event in costly):
        return math.inf
    if accountant == "rdp":
        return _rdp_epsilon(costly, delta)
    if accountant == "prv":
        return _prv_epsilon(costly, delta)
    kinds = ranges(costly)
    if len(costly) > 1 and kinds > _MOST_RANGES:
        raise PrivacyError(
            f"epsilon of {len(costly)} different releases would take gigabytes to compute",
            why="each has losses of its own, over the wider a range the less noise there is",
            fix="add fewer of them up, or raise noise_multiplier",
        )
    rough = max(rough_epsilon(costly), kinds)
    if not rough <= LARGEST_EPSILON:
        raise PrivacyError(
            f"epsilon is about {rough:.3g}, above {LARGEST_EPSILON:g}",
            why="so little noise protects nobody, and the exact number would take gigabytes to compute",
            fix="raise noise_multiplier, or lower sample_rate or the number of steps",
        )
    result = pld_epsilon(costly, delta, adjacency, grid)
    if result < REFINE_BELOW_EPSILON and grid > FINE_GRID and kinds <= _MOST_FINE:
        result = min(result, pld_epsilon(costly, delta, adjacency, FINE_GRID))
    return result


def delta_of(
    events: Events,
    epsilon: float,
    *,
    adjacency: Adjacency = "add-or-remove-one",
    grid: float = DEFAULT_GRID,
) -> float:
    """The delta for which the composition of `events` is (epsilon, delta)-DP: a PLD upper bound in [0, 1].

    Raises:
        PrivacyError: epsilon is negative or NaN, a count is out of range, or the adjacency is not supported.
    """
    return delta_curve(events, [epsilon], adjacency=adjacency, grid=grid)[0]


def delta_curve(
    events: Events,
    epsilons: Sequence[float],
    *,
    adjacency: Adjacency = "add-or-remove-one",
    grid: float = DEFAULT_GRID,
) -> list[float]:
    """`delta_of` at each of `epsilons`, from one composition, with the same errors."""
    for value in epsilons:
        if not value >= 0:
            raise PrivacyError(f"epsilon={value} is not >= 0", fix="give an epsilon of 0 or more")
    events = list(events)
    costly = merged(events)
    _check_supported("pld", adjacency, events)
    if not costly:
        return [0.0 for _ in epsilons]
    if any(event.noise_multiplier == 0 for event in costly):
        return [1.0 for _ in epsilons]
    composed = _compose(costly, adjacency, grid)
    return [min(1.0, max(0.0, float(composed.get_delta_for_epsilon(value)))) for value in epsilons]


def accountant_versions(accountant: Accountant = "pld") -> dict[str, str]:
    """Names and versions of what computed an epsilon, for reports and cache keys.

    Raises:
        PrivacyError: "prv" is asked for and prv-accountant is not installed.
    """
    if accountant == "prv":
        _require_prv()
    package = _PACKAGES[accountant]
    return {"privlora": __version__, package: version_of(package)}


@contextmanager
def within(seconds: float = 120.0) -> Iterator[None]:
    """Inside, no epsilon is computed once the process has worked so long: what others wrote may ask for hours of it.

    Whoever asks later gets a PrivacyError."""
    token = _PATIENCE.set(process_time() + seconds)
    try:
        yield
    finally:
        _PATIENCE.reset(token)


def ranges(events: Iterable[StepEvent]) -> float:
    """What time and memory grow with: the ranges of one release's losses, of all kinds together."""
    return sum(
        (_OF_TRUNCATED if isinstance(event.sampling, TruncatedPoissonSampling) else 1.0)
        * rough_epsilon({event: 1})
        for event in events
        if event.noise_multiplier
    )


def rough_epsilon(events: dict[StepEvent, int]) -> float:
    """A quick estimate of epsilon from mean and spread of the privacy loss. Never to be printed.

    It keeps PLD from inputs that would need gigabytes: its memory grows with the range of losses.
    """
    import numpy as np

    z = np.linspace(-8.0, 8.0, 801)
    density = np.exp(-(z**2) / 2)
    density /= density.sum()
    mean = variance = largest = 0.0
    for event, count in events.items():
        q = event.sampling.sample_rate
        if isinstance(event.sampling, BallsInBinsSampling):  # of whose passes these are counts
            count *= event.sampling.bins
        mu = math.sqrt(typical_energy(event)) / event.noise_multiplier
        at_most = math.sqrt(_extreme_energy(event)) / event.noise_multiplier
        with np.errstate(divide="ignore"):
            outside, inside, extreme = (
                np.logaddexp(np.log1p(-q), np.log(q) + shift * (z + at) - shift**2 / 2)
                for shift, at in ((mu, 0.0), (mu, mu), (at_most, at_most))
            )
        first = float((density * ((1 - q) * outside + q * inside)).sum())
        second = float((density * ((1 - q) * outside**2 + q * inside**2)).sum())
        mean += count * first
        variance += count * (second - first**2)
        largest = max(largest, float(extreme[-1]))
    return max(mean + 5 * math.sqrt(max(variance, 0.0)), largest / 4)


def typical_energy(event: StepEvent) -> float:
    """Mean share of a unit's squared norm that survives a step's projection: 1 without projections."""
    if not event.is_cheaper_by_projection:
        return 1.0
    return max(rank / dimension for rank, dimension in event.projections)


def _extreme_energy(event: StepEvent) -> float:
    """A share that is exceeded with probability at most 1e-12 (Laurent and Massart 2000, chi-square_r over d)."""
    if not event.is_cheaper_by_projection:
        return 1.0
    tail = math.sqrt(2 * math.log(1e12))
    return min(1.0, max((math.sqrt(rank) + tail) ** 2 / dimension for rank, dimension in event.projections))


def pld_epsilon(
    events: dict[StepEvent, int], delta: float, adjacency: Adjacency, grid: float, *, theirs: bool = False
) -> float:
    """Epsilon by PLD at exactly this grid, of what `merged` gave. theirs: by dp_accounting's own losses."""
    return max(0.0, float(_compose(events, adjacency, grid, theirs).get_epsilon_for_delta(delta)))


def _check_adjacency(adjacency: str) -> None:
    """Raise PrivacyError unless `adjacency` is one of `Adjacency`."""
    if adjacency not in get_args(Adjacency):
        raise PrivacyError(
            f"adjacency={adjacency!r} is unknown", fix=f"choose one of {', '.join(get_args(Adjacency))}"
        )


def check_covered(event: StepEvent, adjacency: Adjacency) -> None:
    """Raise PrivacyError if the accountants cannot price `event` under `adjacency`."""
    _check_adjacency(adjacency)
    if isinstance(event.sampling, BallsInBinsSampling) and adjacency != "add-or-remove-one":
        raise PrivacyError(
            f"balls in bins are not accounted under adjacency={adjacency}",
            why="the pair of laws that bounds them is of a unit that is there or not",
            fix="use adjacency=add-or-remove-one",
        )
    if event.projections and adjacency != "add-or-remove-one":
        raise PrivacyError(
            f"projected steps are not accounted under adjacency={adjacency}",
            why="replacing a unit changes the clipped sum by up to 2 C, and no sampled bound for projections "
            "covers it",
            fix="use adjacency=add-or-remove-one",
        )


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(
            f"delta={delta} is not between 0 and 1",
            why="delta bounds the probability that the epsilon does not hold",
            fix="choose delta below 1 / number of privacy units, for example 1e-5",
        )


def merged(events: Events) -> dict[StepEvent, int]:
    """Total count of each distinct event that costs anything; where cycles or passes are priced, of these
    (StepEvent.releases).

    Each pair is of steps in a row: cycles of two pairs, such as two runs, are counted apart.
    """
    total: dict[StepEvent, int] = {}
    for event, count in events:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise PrivacyError(
                f"an event has the count {count!r}", fix="give the number of steps, an integer >= 0"
            )
        if count > 0 and event.sampling.sample_rate > 0:
            alone, releases = event.releases(count)
            total[alone] = total.get(alone, 0) + releases
    return total


def _check_supported(accountant: Accountant, adjacency: Adjacency, events: Events) -> None:
    _check_adjacency(adjacency)
    if accountant not in get_args(Accountant):
        raise PrivacyError(
            f"accountant={accountant!r} is unknown", fix=f"choose one of {', '.join(get_args(Accountant))}"
        )
    for event, _ in events:
        check_covered(event, adjacency)
    if accountant == "pld":
        return
    if accountant == "prv" and any(event.projections for event, _ in events):
        raise PrivacyError(
            "accountant=prv does not support projected steps",
            why="it knows the Gaussian mechanism only",
            fix="use accountant=pld, or rdp for a second opinion",
        )
    if adjacency != "add-or-remove-one":
        # dp_accounting's RDP reads a replace-one noise multiplier as std / sensitivity, not std / C.
        raise PrivacyError(
            f"accountant={accountant} does not support adjacency={adjacency}",
            why="its result would understate epsilon",
            fix="use accountant=pld",
        )
    if any(isinstance(event.sampling, TruncatedPoissonSampling | BallsInBinsSampling) for event, _ in events):
        raise PrivacyError(
            f"accountant={accountant} knows neither truncated Poisson sampling nor balls in bins",
            why="accounted as plain Poisson sampling, epsilon would be understated",
            fix="use accountant=pld",
        )


@lru_cache(maxsize=2 * MOST_PHASES)
def _step_pld(
    event: StepEvent, relation: NeighboringRelation, grid: float, theirs: bool
) -> PrivacyLossDistribution:
    """The privacy loss of one step. Kept, because building it takes longer than composing it."""
    from privlora.accounting.loss_distributions import (
        allocation_pld,
        gaussian_pld,
        truncated_pld,
        with_fast_pmfs,
    )

    if event.is_cheaper_by_projection:
        # Under Poisson sampling, replacing a unit by an empty one equals removing it: `relation` does not matter.
        from privlora.accounting.projection.composition import rank_free_pld

        rate = event.sampling.sample_rate
        projected = rank_free_pld(event.noise_multiplier, event.projections, rate, grid)
        return projected if theirs else with_fast_pmfs(projected)
    if isinstance(event.sampling, BallsInBinsSampling):
        found = allocation_pld(event.noise_multiplier, event.sampling, grid)
        return found if theirs else with_fast_pmfs(found)
    if theirs:
        return _their_step_pld(event, relation, grid)
    if isinstance(event.sampling, TruncatedPoissonSampling):
        return truncated_pld(event.noise_multiplier, event.sampling, relation, grid)
    return gaussian_pld(event.noise_multiplier, event.sampling.sample_rate, relation, grid)


def _their_step_pld(event: StepEvent, relation: NeighboringRelation, grid: float) -> PrivacyLossDistribution:
    """As dp_accounting makes it, one loss after the other."""
    from dp_accounting.pld import privacy_loss_distribution

    if isinstance(event.sampling, TruncatedPoissonSampling):
        return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=event.sampling.dataset_size,
            sampling_probability=event.sampling.sample_rate,
            truncated_batch_size=event.sampling.max_batch_size,
            noise_multiplier=event.noise_multiplier,
            value_discretization_interval=grid,
            neighboring_relation=relation,
        )
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=event.noise_multiplier,
        sampling_prob=event.sampling.sample_rate,
        value_discretization_interval=grid,
        neighboring_relation=relation,
    )


def _compose(
    events: dict[StepEvent, int], adjacency: Adjacency, grid: float, theirs: bool = False
) -> PrivacyLossDistribution:
    from dp_accounting import NeighboringRelation

    if adjacency == "replace-one":
        relation = NeighboringRelation.REPLACE_ONE
    elif any(isinstance(event.sampling, TruncatedPoissonSampling) for event in events):
        relation = NeighboringRelation.REPLACE_SPECIAL
    else:
        relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    total: PrivacyLossDistribution | None = None
    for event, count in events.items():
        if process_time() > _PATIENCE.get():
            raise PrivacyError("more epsilons are asked for than the time for them allows")
        if event.sampling == PoissonSampling(1.0) and not event.is_cheaper_by_projection:
            # Gaussian steps on the whole data compose to one Gaussian step, without any discretisation error.
            single = StepEvent(event.sampling, event.noise_multiplier / math.sqrt(count))
            part = _step_pld(single, relation, grid, theirs)
        else:
            part = _step_pld(event, relation, grid, theirs).self_compose(count)
        total = part if total is None else total.compose(part)
    assert total is not None  # there is at least one event
    return total


def _rdp_epsilon(events: dict[StepEvent, int], delta: float) -> float:
    import dp_accounting
    from dp_accounting import rdp

    if any(event.is_cheaper_by_projection for event in events):
        return _rank_free_rdp_epsilon(events, delta)
    accountant = rdp.RdpAccountant(orders=rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
    for event, count in events.items():
        gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(event.sampling.sample_rate, gaussian)
        accountant.compose(sampled, count)
    return max(0.0, float(accountant.get_epsilon(delta)))


def _rank_free_rdp_epsilon(events: dict[StepEvent, int], delta: float) -> float:
    """As `_rdp_epsilon`, by the closed form for projected steps, which has integer orders only."""
    import numpy as np
    from dp_accounting import rdp

    from privlora.accounting.projection.composition import rank_free_rdp

    every_order = rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    orders = sorted({int(order) for order in every_order if order >= 2 and float(order).is_integer()})
    total = np.zeros(len(orders))
    for event, count in events.items():
        step = rank_free_rdp(orders, event.noise_multiplier, event.projections, event.sampling.sample_rate)
        total += count * step
    return float(rdp.compute_epsilon(orders, total, delta)[0])


def _require_prv() -> None:
    if find_spec("prv_accountant") is None:
        raise PrivacyError(
            "accountant=prv needs the package prv-accountant, which is not installed",
            fix="pip install 'privlora[prv]', or use accountant=pld",
        )


def _prv_epsilon(events: dict[StepEvent, int], delta: float) -> float:
    _require_prv()
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    mechanisms = [
        PoissonSubsampledGaussianMechanism(
            sampling_probability=event.sampling.sample_rate, noise_multiplier=event.noise_multiplier
        )
        for event in events
    ]
    counts = list(events.values())
    accountant = PRVAccountant(
        prvs=mechanisms,
        max_self_compositions=counts,
        eps_error=_PRV_EPSILON_ERROR,
        delta_error=_PRV_DELTA_ERROR_PER_DELTA * delta,
    )
    _, _, upper = accountant.compute_epsilon(delta, counts)
    return max(0.0, float(upper))
