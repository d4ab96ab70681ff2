"""The smallest noise that meets a target epsilon: calibrated once, verified, kept on disk.

The root of PLD epsilon(sigma) = target is found by Brent's method on a coarse grid, which is cheap, then
corrected by extrapolation to the fine grid; where that is not exact enough, Brent's method runs on the fine
grid. The noise multiplier is rounded up, and what is returned has been evaluated on the fine grid: its
epsilon is never above the target.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from privlora.accounting.accountants import (
    DEFAULT_GRID,
    FINE_GRID,
    LARGEST_EPSILON,
    REFINE_BELOW_EPSILON,
    Adjacency,
    Events,
    accountant_versions,
    check_covered,
    check_delta,
    epsilon,
    merged,
    pld_epsilon,
    rough_epsilon,
    typical_energy,
)
from privlora.accounting.events import (
    BallsInBinsSampling,
    Projections,
    Sampling,
    StepEvent,
    describe_events,
    events_to_dicts,
)
from privlora.errors import PrivacyError
from privlora.rounding import rounded_up

_log = logging.getLogger(__name__)

Phases = Sequence[tuple[Sampling, int]]
"""How batches are drawn, and in how many steps, for steps of one noise multiplier."""

# Below the smallest, epsilon is in the hundreds and means nothing; above the largest, no signal would be left. The
# smallest is multiplied by the root of the share of a gradient's energy that a projection keeps.
_LOST = 2e-14  # of probability in a pass, for each of its steps: four times what was seen
_SMALLEST_SIGMA, _LARGEST_SIGMA = 0.15, 1e6
SMALLEST_EPSILON = 1e-3  # the accountant's grid resolves nothing smaller
_FAR = 30.0  # the rough figure is within a factor of three wherever an epsilon is of use
_AGREEMENT = 1e-4  # of the target, between our own sums and dp_accounting's
# In delta, for each release: by how much dp_accounting may round, and what that is nothing beside.
_THEIRS, _CLEAR, _LARGEST_CLEAR = 1e-15, 1e-11, 1e-3
_COARSE_TOLERANCE = 1e-4
_HUGE = 1e3


@dataclass(frozen=True)
class Calibration:
    """A noise multiplier and the guarantee that it gives.

    Attributes:
        event: the step to take; `event.noise_multiplier` is sigma = std / clip_norm, rounded up.
        steps: how many such steps the guarantee covers.
        others: (sampling, how many steps) of steps with the same sigma and another sampling, which it covers as well.
        beside: the other releases that it covers.
        target_epsilon: what was asked for.
        epsilon: what is given, at most `target_epsilon` (PLD).
        delta: total delta.
        adjacency: which data sets are neighbours.
        tolerance: relative accuracy asked of sigma.
        versions: what computed it.
    """

    event: StepEvent
    steps: int
    target_epsilon: float
    epsilon: float
    delta: float
    adjacency: Adjacency
    tolerance: float
    versions: dict[str, str]
    beside: Events = ()
    others: Phases = ()

    @property
    def noise_multiplier(self) -> float:
        return self.event.noise_multiplier

    @property
    def sampling(self) -> Sampling:
        return self.event.sampling

    @property
    def events(self) -> Events:
        """All that the guarantee covers."""
        alike = [(replace(self.event, sampling=sampling), steps) for sampling, steps in self.others]
        return (*self.beside, (self.event, self.steps), *alike)

    @property
    def accountant(self) -> str:
        return "pld"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        events = {"event": self.event.to_dict(), "beside": events_to_dicts(self.beside)}
        found = {**asdict(self), **events, "accountant": self.accountant}
        others = found.pop("others")
        return {**found, "others": _sampled(self.event, self.others)} if others else found

    def describe(self) -> str:
        """One line: the guarantee with everything that it depends on."""
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{describe_events(self.events)}: ({rounded_up(self.epsilon)}, {self.delta:.3g})-DP, "
            f"adjacency {self.adjacency}, accountant {self.accountant} ({packages})"
        )


def calibrate_noise_multiplier(
    sampling: Sampling,
    steps: int,
    target_epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency = "add-or-remove-one",
    tolerance: float = 1e-6,
    cache: bool = True,
    projections: Projections = (),
    beside: Events = (),
    others: Phases = (),
) -> Calibration:
    """The smallest noise multiplier with which `steps` steps are (target_epsilon, delta)-DP, with all `beside` them.

    Several kinds of steps (`others`) share the one noise multiplier: epsilon of their composition falls in it, as that
    of each does, so there is one root.

    Args:
        sampling: how each batch is drawn.
        steps: number of releases, at least 1; training refuses to make one more.
        target_epsilon: from 0.001 to 500.
        delta: total delta, in (0, 1).
        adjacency: which data sets are neighbours.
        tolerance: relative accuracy of sigma, in [1e-7, 0.1]; sigma is too large by at most twice this.
        cache: reuse and keep results under `cache_folder()`.
        projections: (rank, input dimension) of the layers that each step projects afresh after clipping the whole
            gradient; empty if it projects nothing. See `StepEvent`.
        beside: (event, count) of releases on the same data whose noise is fixed: other phases of the run's plan.
        others: (sampling, steps) of other phases whose noise is sought as well: the same multiplier, other batches.

    Raises:
        PrivacyError: an argument is out of range, the adjacency does not cover projections, `beside` alone costs the
            target or more, or no sensible noise reaches the target.
    """
    others = tuple(others)
    for count in (steps, *(count for _, count in others)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise PrivacyError(
                f"steps={count!r} is not a positive integer", fix="give the exact number of steps"
            )
    if not SMALLEST_EPSILON <= target_epsilon <= LARGEST_EPSILON:
        raise PrivacyError(
            f"target_epsilon={target_epsilon} is not between {SMALLEST_EPSILON:g} and {LARGEST_EPSILON:g}",
            fix="choose about 1 to 10",
        )
    if not 1e-7 <= tolerance <= 0.1:
        raise PrivacyError(
            f"tolerance={tolerance} is not between 1e-7 and 0.1", fix="leave the default of 1e-6"
        )
    check_delta(delta)
    step = StepEvent(sampling, 0.0, projections)
    (_, steps), *rest = _joined([(sampling, steps), *others])
    others = tuple(rest)
    check_covered(step, adjacency)
    if any(kind.sample_rate == 0 for kind in (sampling, *(other for other, _ in others))):
        raise PrivacyError(
            "sample_rate=0 uses no data, so there is no noise to calibrate", fix="raise sample_rate"
        )
    if others and any(kind.cycle > 1 for kind, _ in ((sampling, steps), *others)):
        raise PrivacyError(
            "cyclic sampling is calibrated in plans of one phase only",
            why="how cycles of several phases meet is not defined",
            fix="calibrate the phase by itself, with what else is released as `beside`",
        )
    _, releases = step.releases(steps)
    if isinstance(sampling, BallsInBinsSampling):
        if releases * sampling.bins * _LOST >= delta:
            raise PrivacyError(
                f"delta={delta} is too small for passes of {sampling.bins} steps",
                why="what rounding loses in so many sums counts as infinite loss, whatever the noise",
                fix="use Poisson sampling, larger batches or a larger delta",
            )
        releases = steps  # of which each draws one of m
    draws = ((sampling, releases), *others)
    drawn = 1 - math.prod((1 - kind.sample_rate) ** count for kind, count in draws)
    if drawn <= delta:
        raise PrivacyError(
            f"delta={delta} is not below {drawn:.4g}, the probability that a unit is drawn at all",
            why="any noise would meet the target, as a unit that is drawn may then be told as it is",
            fix="choose delta below 1 / number of privacy units, for example 1e-5",
        )
    beside = tuple(beside)
    fixed = epsilon(beside, delta, adjacency=adjacency)
    if fixed >= target_epsilon:
        raise PrivacyError(
            f"what is released beside the steps costs epsilon={fixed:.4g} alone, target_epsilon={target_epsilon}",
            why="no noise in the steps lowers what other releases cost",
            fix="raise target_epsilon, or the noise of the other releases",
        )

    request = {
        "sampling": step.to_dict()["sampling"],
        "projections": step.projections,
        "steps": steps,
        "beside": events_to_dicts(beside),
        "target_epsilon": float(target_epsilon),
        "delta": float(delta),
        "adjacency": adjacency,
        "tolerance": float(tolerance),
        "versions": accountant_versions(),
    }
    if others:  # of one phase the request is as it always was, and so is where it is kept
        request["others"] = _sampled(step, others)
    found = _read_cache(request) if cache else None
    if found is None:
        found = _solve(
            step, ((sampling, steps), *others), beside, target_epsilon, delta, adjacency, tolerance
        )
        if cache:
            _write_cache(request, *found)
    sigma, spent = found
    return Calibration(
        event=replace(step, noise_multiplier=sigma),
        steps=steps,
        target_epsilon=float(target_epsilon),
        epsilon=spent,
        delta=float(delta),
        adjacency=adjacency,
        tolerance=float(tolerance),
        versions=accountant_versions(),
        beside=tuple(beside),
        others=others,
    )


def _joined(phases: Phases) -> list[tuple[Sampling, int]]:
    """Each kind of sampling once, in the order in which it comes first."""
    total: dict[Sampling, int] = {}
    for sampling, count in phases:
        total[sampling] = total.get(sampling, 0) + count
    return list(total.items())


def _sampled(step: StepEvent, phases: Phases) -> list[dict[str, Any]]:
    """JSON-ready."""
    return [
        {"sampling": replace(step, sampling=sampling).to_dict()["sampling"], "steps": count}
        for sampling, count in phases
    ]


def _solve(
    step: StepEvent,
    phases: Phases,
    beside: Events,
    target: float,
    delta: float,
    adjacency: Adjacency,
    tolerance: float,
) -> tuple[float, float]:
    """sigma, rounded up, and epsilon on the fine grid, for events like `step` and those `beside` them."""

    def events_at(sigma: float) -> dict[StepEvent, int]:
        alike = [(replace(step, sampling=kind, noise_multiplier=sigma), count) for kind, count in phases]
        return merged([*beside, *alike])

    def pld_or_huge(sigma: float, grid: float) -> float:
        events = events_at(sigma)
        # Far from the root PLD needs gigabytes, and its inf, where delta is below the tail, stops the root finder.
        if not rough_epsilon(events) <= _FAR * max(1.0, target):
            return _HUGE * target
        return min(pld_epsilon(events, delta, adjacency, grid), _HUGE * target)

    def confirmed(sigma: float) -> tuple[float, float]:
        """sigma and its epsilon, if dp_accounting by itself finds on the coarse grid what is found there.

        At a small delta its own rounding shows, of either sign: there it is asked at a delta that is large beside it,
        and what it finds at this one may not lie above ours by more than rounding can do.
        """
        events = events_at(sigma)
        releases = sum(events.values())
        clear = max(delta, min(_CLEAR * releases, _LARGEST_CLEAR))
        ours, theirs = (
            pld_epsilon(events, clear, adjacency, ratio * grid, theirs=way) for way in (False, True)
        )
        agree = abs(theirs - ours) <= _AGREEMENT * target
        if agree and clear > delta:
            ours = pld_epsilon(events, delta, adjacency, ratio * grid)
            theirs = pld_epsilon(events, delta + _THEIRS * releases, adjacency, ratio * grid, theirs=True)
            agree = theirs <= ours + _AGREEMENT * target
        if not agree:
            raise PrivacyError(
                f"two ways of computing epsilon disagree: {ours:.7g}, and {theirs:.7g} by dp_accounting",
                why="the stated epsilon would rest on one of them",
                fix="report this with the settings and the versions of dp-accounting, numpy and SciPy",
            )
        return sigma, fine(sigma)

    def epsilon_at(grid: float) -> Callable[[float], float]:
        return lru_cache(lambda sigma: pld_or_huge(sigma, grid))

    grid = FINE_GRID if target < REFINE_BELOW_EPSILON else DEFAULT_GRID
    ratio = 10.0 if target >= 1 else 3.0
    coarse, medium, fine = epsilon_at(ratio * grid), epsilon_at(ratio**0.5 * grid), epsilon_at(grid)

    digits = math.ceil(-math.log10(tolerance)) + 1
    scale = math.sqrt(typical_energy(step))
    smallest = _SMALLEST_SIGMA * scale
    root = find_noise(coarse, target, smallest, start=scale, factor=2.0, rtol=_COARSE_TOLERANCE)
    slope = (coarse(root * (1 + _COARSE_TOLERANCE)) - coarse(root)) / _COARSE_TOLERANCE  # by log sigma
    if slope < 0:
        # The grid's error is of second order, so two coarse values foretell the fine one: mostly enough. Else the
        # fine value itself says how far to go.
        value = medium(root) - (coarse(root) - medium(root)) / ratio
        for _ in range(3):
            change = (target - value) / slope
            root = _round_up(root * math.exp(max(-0.1, min(0.1, change))), digits)
            value = fine(root)
            if target + 2 * tolerance * slope <= value <= target:
                return confirmed(root)

    root = find_noise(fine, target, smallest, start=root, factor=1.01, rtol=tolerance / 4)
    for units in range(4):
        sigma = _round_up(root * (1 + units * tolerance), digits)
        if fine(sigma) <= target:
            return confirmed(sigma)
    raise PrivacyError(
        f"no noise_multiplier found for target_epsilon={target}, delta={delta}, "
        f"{sum(count for _, count in phases)} steps",
        why="the accountant's numerical error is larger than the tolerance",
        fix="raise tolerance to 1e-4, or delta",
    )


def find_noise(
    epsilon: Callable[[float], float],
    target: float,
    smallest: float,
    *,
    start: float,
    factor: float,
    rtol: float,
) -> float:
    """The noise multiplier at which the falling `epsilon` meets the target, sought from `start`."""
    from scipy.optimize import brentq

    low = high = start
    while epsilon(high) > target:
        if high > _LARGEST_SIGMA:
            raise PrivacyError(
                f"target_epsilon={target} is out of reach even with noise_multiplier={high:g}",
                why="delta is below what the accountant resolves, or too much is released",
                fix="raise delta or target_epsilon, or lower sample_rate or the number of steps",
            )
        low, high = high, high * factor
        factor = min(2.0, factor * factor)
    while epsilon(low) <= target:
        if low < smallest:
            raise PrivacyError(
                f"target_epsilon={target} is met even with noise_multiplier={low:g}",
                why="so little noise protects nobody",
                fix="lower target_epsilon; about 1 to 10 is usual",
            )
        low, high = low / factor, low
        factor = min(2.0, factor * factor)
    return float(brentq(lambda sigma: epsilon(sigma) - target, low, high, rtol=rtol))


def _round_up(value: float, digits: int) -> float:
    """The smallest decimal of `digits` significant digits that is not below `value`."""
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    rounded = float(f"{math.ceil(value / unit) * unit:.{digits}g}")
    return rounded if rounded >= value else float(f"{rounded + unit:.{digits}g}")


def cache_folder() -> Path:
    """Where calibrations are kept, below $PRIVLORA_CACHE, $XDG_CACHE_HOME/privlora or ~/.cache/privlora."""
    root = os.environ.get("PRIVLORA_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "privlora")
    return Path(root) / "calibration"


def _canonical(data: object) -> str:
    return json.dumps(data, sort_keys=True, allow_nan=False)


def _cache_file(request: dict[str, Any]) -> Path:
    return cache_folder() / f"{hashlib.sha256(_canonical(request).encode()).hexdigest()[:32]}.json"


def _checksum(request: dict[str, Any], sigma: float, spent: float) -> str:
    return hashlib.sha256(_canonical([request, sigma, spent]).encode()).hexdigest()


def _read_cache(request: dict[str, Any]) -> tuple[float, float] | None:
    """The kept (sigma, epsilon); None if there is none or the file is not exactly what was written."""
    try:
        kept = json.loads(_cache_file(request).read_bytes())
        sigma, spent = kept["noise_multiplier"], kept["epsilon"]
        intact = kept["checksum"] == _checksum(request, sigma, spent)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("calibration cache entry ignored: %s", error)
        return None
    if not intact:
        _log.warning("calibration cache entry ignored: its checksum does not match")
        return None
    return sigma, spent


def _write_cache(request: dict[str, Any], sigma: float, spent: float) -> None:
    """Atomic: readers see the whole file or none. A cache that cannot be written costs time, not privacy."""
    path = _cache_file(request)
    content = {
        "request": request,
        "noise_multiplier": sigma,
        "epsilon": spent,
        "checksum": _checksum(request, sigma, spent),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            file = Path(folder, path.name)
            file.write_text(_canonical(content), encoding="utf-8")
            os.replace(file, path)
    except OSError as error:
        _log.warning("calibration not cached: %s", error)
