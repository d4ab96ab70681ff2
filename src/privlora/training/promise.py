"""What a run will release and cost, from its settings: before a record is read, and mostly before a model is. And what
runs whose steps are priced together keep to their end, in private/: who is drawn when, and how noise is correlated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from privlora.accounting import Adjacency, Ledger, Plan
from privlora.accounting.calibration import Phases, calibrate_noise_multiplier
from privlora.accounting.events import (
    BallsInBinsSampling,
    CyclicPoissonSampling,
    PoissonSampling,
    Projections,
    Sampling,
    StepEvent,
)
from privlora.accounting.meaning import noise_for
from privlora.adapters import LowRankAdapter
from privlora.config import PrivacySettings, Settings
from privlora.data.sampling import PoissonSampler, classes_of
from privlora.errors import ConfigError, PrivacyError
from privlora.mechanisms import band_coefficients, noise_in_sums, prefix_error, row_norms
from privlora.methods import find_row
from privlora.randomness import private_key
from privlora.training.classifier import head_of
from privlora.training.files import RunFolder, write_atomically
from privlora.training.misfits import refuse_misfits

if TYPE_CHECKING:
    import torch

    from privlora.training.inputs import Data

ADJACENCY: Final = "add-or-remove-one"
_CANDIDATES = (2, 4, 8, 16, 32)
_WORTH = 0.95  # of the noise of independent steps: what is saved less is not worth classes, kept noise and larger steps


def plan_privacy(settings: Settings, model: torch.nn.Module | None = None, phases: Phases = ()) -> Plan:
    """What the run will release and cost, before any record is read.

    model: the base model where it is at hand; else its configuration is read if the cost depends on it. phases:
    (sampling, steps) of each phase where there are several, all with one noise multiplier; ``settings`` are then of the
    last one.
    """
    privacy = settings.privacy
    assert privacy.private
    assert privacy.delta is not None
    method = find_row(settings.method.name)
    refuse_misfits(settings, method)
    if phases or method.public_texts:
        refuse_bands(privacy, "a run of several phases")
    phases = tuple(phases) or ((planned_sampling(privacy, sampler(privacy, 0).sampling), privacy.steps),)

    def skeleton() -> LowRankAdapter:
        from privlora.training.models import adapter_for, load_skeleton  # with transformers, and for few rows

        skeleton = load_skeleton(settings.model, head=head_of(settings)) if model is None else model
        return adapter_for(settings, skeleton)

    projections = method.coordinates.event_layers_of(skeleton)
    sigma = noise_multiplier(privacy, phases, projections)
    return Plan(
        phases=tuple((StepEvent(sampling, sigma, projections), steps) for sampling, steps in phases),
        delta=privacy.delta,
        target_epsilon=privacy.target_epsilon,
        adjacency=ADJACENCY,
        unit=privacy.unit,
        records_per_user=privacy.max_records_per_user if privacy.unit == "user" else None,
        clip_norm=privacy.clip_norm,
        expected_batch_size=privacy.b,
        method=method.name,
        dataset=settings.run.label or "unnamed",
        insecure_noise=privacy.insecure_noise_seed is not None,
    )


def noise_multiplier(
    privacy: PrivacySettings, phases: tuple[tuple[Sampling, int], ...], projections: Projections = ()
) -> float:
    """sigma as it is given, or the smallest with which all phases together keep the target."""
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.target_epsilon is None:
        return noise_for(
            phases,
            right_guesses=privacy.target_right_guesses,
            found_at_1_percent=privacy.target_found,
            adjacency=ADJACENCY,
            projections=projections,
        )
    assert privacy.delta is not None
    (sampling, steps), *others = phases
    return calibrate_noise_multiplier(
        sampling,
        steps,
        privacy.target_epsilon,
        privacy.delta,
        adjacency=ADJACENCY,
        projections=projections,
        others=others,
    ).noise_multiplier


def sampler(privacy: PrivacySettings, units: int) -> PoissonSampler:
    """The sampler of a run, with operating-system randomness unless the run is a stamped test."""
    return PoissonSampler(
        units,
        privacy.q,
        max_batch_size=privacy.max_batch_size,
        dataset_size=privacy.public_dataset_size,
        insecure_seed=privacy.insecure_noise_seed,
    )


@dataclass(frozen=True)
class Cycles:
    """key: PRIVATE, by which units are dealt to classes, or to the steps of each pass. coefficients: c of the noise's
    bands, public; none where noise is independent. dealt: PRIVATE, SHA-256 of the units in their places and of their
    classes, or of the first pass, which follow from places."""

    key: int
    coefficients: Sequence[float]
    dealt: str

    @classmethod
    def drawn(cls, plan: Plan, data: Data, insecure_seed: int | None = None) -> Cycles:
        """New ones, for the plan of a run that is about to begin."""
        bands, key = bands_of(plan), private_key(insecure_seed)
        coefficients = band_coefficients(bands, plan.steps) if bands > 1 else ()
        return cls(key, coefficients, _dealt(key, cycle_of(plan), data))


def _dealt(key: int, cycle: int, data: Data) -> str:
    classes = classes_of(key, cycle, len(data.units))
    return sha256(data.places.encode() + classes.astype("<i8").tobytes()).hexdigest()


def bands_of(plan: Plan) -> int:
    """b of the plan's training; 1 where noise is independent."""
    sampling = plan.phases[-1][0].sampling
    return sampling.classes if isinstance(sampling, CyclicPoissonSampling) else 1


def cycle_of(plan: Plan) -> int:
    """How many steps of the plan's training are priced together; 1 where each is by itself."""
    return plan.phases[-1][0].sampling.cycle


def kept_cycles(
    folder: RunFolder, ledger: Ledger, data: Data, insecure_seed: int | None = None
) -> Cycles | None:
    """Those of the run, written before its first charge; None where each step is priced by itself.

    Raises PrivacyError where they are lost, damaged, of another plan or of units in other places, and steps are
    charged.
    """
    if cycle_of(ledger.plan) == 1:
        return None
    if not ledger.charges:
        cycles = Cycles.drawn(ledger.plan, data, insecure_seed)
        content = asdict(cycles) | {"key": f"{cycles.key:032x}", "run_id": ledger.run_id}
        write_atomically(folder.cycles, json.dumps(content) + "\n")
        return cycles
    try:
        content = json.loads(folder.cycles.read_text(encoding="utf-8"))
        coefficients = tuple(map(float, content["coefficients"]))
        cycles = Cycles(int(content["key"], 16), coefficients, str(content["dealt"]))
        bands = bands_of(ledger.plan)
        if len(coefficients) != (bands if bands > 1 else 0) or content["run_id"] != ledger.run_id:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrivacyError(
            f"{str(folder.cycles)!r} is gone or damaged ({type(error).__name__})",
            why="dealt anew, a unit could join twice in a cycle of steps that is paid for once",
            fix="restore it from the run's private folder, or begin a new run, at a cost of its own",
        ) from None
    if cycles.dealt != _dealt(cycles.key, cycle_of(ledger.plan), data):
        raise PrivacyError(
            "the private records are in another order than when the run began, or another version deals them otherwise",
            why="a unit's class follows from its place: in another one it could join twice in a cycle of steps that is "
            "paid for once",
            fix="resume with the records in their first order, and with the versions of numpy and randomgen of then",
        )
    return cycles


def planned_sampling(
    privacy: PrivacySettings, plain: Sampling, adjacency: Adjacency = "add-or-remove-one"
) -> Sampling:
    """How a run's batches are drawn. plain: where noise is independent.

    Of bands=auto the number with which the noise in the sums of releases is expected to be smallest, at the target
    epsilon: correlated noise is the smaller the more bands it has, and its sampling amplifies the less. 1 where the
    best would save less than a twentieth of the noise.
    """
    if privacy.sampling == "balls-in-bins":
        return BallsInBinsSampling(round(1 / privacy.q))
    if privacy.bands != "auto":
        return plain if privacy.bands == 1 else _cyclic(privacy.q, privacy.bands)
    assert privacy.target_epsilon is not None
    assert privacy.delta is not None
    best, least = plain, _WORTH**2 * _error(privacy, plain, 1, adjacency)
    for bands in _CANDIDATES:
        if bands > privacy.steps or bands * privacy.q > 1:
            break
        error = _error(privacy, _cyclic(privacy.q, bands), bands, adjacency)
        if error < least:
            best, least = _cyclic(privacy.q, bands), error
    return best


def bands_to_come(privacy: PrivacySettings) -> int:
    """b of the plan that a run on ``privacy`` will have, before there is one; 1 where noise is independent, or none."""
    if not privacy.private or privacy.bands == 1:
        return 1
    sampling = planned_sampling(privacy, PoissonSampling(privacy.q))
    return sampling.classes if isinstance(sampling, CyclicPoissonSampling) else 1


def kept_bytes(bands: int, adapter: LowRankAdapter) -> int:
    """Of the noise of bands - 1 steps in float64, and at most as much for the bases in which it is given; and of two
    more while one is brought along."""
    body, *beside = adapter.parts  # of a classifier, its last layer, which is trained as a whole
    numbers = sum(body.rank * (s.m + s.n + body.rank) for s in body.sites)
    numbers += sum(s.m * s.n for part in beside for s in part.sites)
    return 16 * (bands + 1) * numbers if bands > 1 else 0


def _cyclic(q: float, bands: int) -> CyclicPoissonSampling:
    return CyclicPoissonSampling(bands * q, bands)


def noise_of_bands(
    privacy: PrivacySettings, plain: Sampling, bands: int, adjacency: Adjacency = "add-or-remove-one"
) -> dict[str, float | None]:
    """What correlated noise is beside independent noise, in root mean squares: as a multiple of it in the step that has
    most, and in the sums of releases, both at one noise multiplier; and in the sums at the same epsilon, to which a
    smaller multiplier leads where noise is independent. The last is None where no target_epsilon is given."""
    c = band_coefficients(bands, privacy.steps)
    sampling = _cyclic(privacy.q, bands)
    equal = None
    if privacy.target_epsilon is not None:
        equal = (_error(privacy, sampling, bands, adjacency) / _error(privacy, plain, 1, adjacency)) ** 0.5
    return {
        "rate_of_a_class": sampling.sample_rate,
        "largest_row": float(row_norms(c, privacy.steps).max()),
        "noise_in_sums": noise_in_sums(bands, privacy.steps),
        "noise_in_sums_at_equal_epsilon": equal,
    }


def _error(privacy: PrivacySettings, sampling: Sampling, bands: int, adjacency: Adjacency) -> float:
    """The expected square of the noise in sums of releases, in units of C^2."""
    assert privacy.target_epsilon is not None
    assert privacy.delta is not None
    sigma = _calibrated(sampling, privacy.steps, privacy.target_epsilon, privacy.delta, adjacency)
    return sigma**2 * prefix_error(band_coefficients(bands, privacy.steps), privacy.steps)


@lru_cache(maxsize=64)
def _calibrated(sampling: Sampling, steps: int, epsilon: float, delta: float, adjacency: Adjacency) -> float:
    """Seconds each, and asked for by the plan, the learning rate and the memory of one run."""
    return calibrate_noise_multiplier(sampling, steps, epsilon, delta, adjacency=adjacency).noise_multiplier


def refuse_bands(privacy: PrivacySettings, what: str) -> None:
    """Raise ConfigError where ``what`` has independent noise, and Poisson sampling, alone."""
    if privacy.sampling != "poisson":
        raise ConfigError(
            f"privacy.sampling={privacy.sampling} does not go with {what}",
            why="passes of balls in bins are drawn and accounted in runs of one phase in one place alone",
            fix="remove it",
        )
    if privacy.bands != 1:
        raise ConfigError(
            f"privacy.bands={privacy.bands} does not go with {what}",
            why="noise that is correlated between steps is drawn and accounted in runs in one place alone",
            fix="set privacy.bands=1",
        )
