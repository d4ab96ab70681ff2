"""What happened: one frozen record for each noisy release, whatever it costs.

The sampler writes these, the ledger stores them, and `accountants` prices them: what is accounted is what
was sampled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from privlora.errors import PrivacyError
from privlora.ranges import MOST_BANDS


def _check_sample_rate(sample_rate: float) -> None:
    if not 0.0 <= sample_rate <= 1.0:
        raise PrivacyError(
            f"sample_rate={sample_rate} is not a probability",
            fix="give expected_batch_size / number of privacy units, between 0 and 1",
        )


@dataclass(frozen=True)
class PoissonSampling:
    """Each privacy unit joins the logical batch independently with probability `sample_rate` (q).

    Raises:
        PrivacyError: `sample_rate` is outside [0, 1].
    """

    sample_rate: float

    def __post_init__(self) -> None:
        _check_sample_rate(self.sample_rate)

    @property
    def cycle(self) -> int:
        """Steps that are priced together."""
        return 1

    def describe(self) -> str:
        return f"Poisson sampling, q={self.sample_rate:.6g}"


@dataclass(frozen=True)
class TruncatedPoissonSampling:
    """Poisson sampling; a batch above `max_batch_size` loses units, uniformly at random, down to that size.

    It costs more than plain Poisson sampling, because one unit can push another out of the batch. Above 1.75
    times the expected batch size the difference is negligible (arXiv:2508.15089).

    Raises:
        PrivacyError: `sample_rate` is outside [0, 1], or a size is not positive.
    """

    sample_rate: float
    max_batch_size: int
    dataset_size: int  # a public upper bound on the number of privacy units, never a private count

    def __post_init__(self) -> None:
        _check_sample_rate(self.sample_rate)
        if self.max_batch_size < 1 or self.dataset_size < 1:
            raise PrivacyError(
                f"max_batch_size={self.max_batch_size} and dataset_size={self.dataset_size} must be positive",
                fix="set max_batch_size to about 1.75 times the expected batch size",
            )

    @property
    def cycle(self) -> int:
        """As of `PoissonSampling`."""
        return 1

    def describe(self) -> str:
        return (
            f"Poisson sampling cut to {self.max_batch_size}, q={self.sample_rate:.6g}, "
            f"{self.dataset_size} privacy units"
        )


@dataclass(frozen=True)
class CyclicPoissonSampling:
    """Each privacy unit is of one of `classes` (b) classes for a whole run, dealt by itself and uniformly; the steps of
    a cycle draw from one class each, in turn, where each unit joins with probability `sample_rate` (q).

    So a unit is drawn at most once in b steps, and n steps cost ceil(n / b) compositions (arXiv:2306.08153), where the
    noise is correlated by a matrix of b bands whose columns have norm 1 at most. The proof is in mechanisms.banded.

    Raises:
        PrivacyError: `sample_rate` is outside [0, 1], or there are fewer than two classes, or more than MOST_BANDS.
    """

    sample_rate: float
    classes: int

    def __post_init__(self) -> None:
        _check_sample_rate(self.sample_rate)
        if not 2 <= self.classes <= MOST_BANDS:
            raise PrivacyError(
                f"classes={str(self.classes)[:24]} is not between 2 and {MOST_BANDS}",
                why="one class is plain Poisson sampling, and noise has no more bands",
                fix="use PoissonSampling, or fewer classes",
            )

    @property
    def cycle(self) -> int:
        """As of `PoissonSampling`."""
        return self.classes

    def describe(self) -> str:
        return f"cyclic Poisson sampling from {self.classes} classes, q={self.sample_rate:.6g} of a class"


MOST_BINS = 2**16
MOST_PROJECTIONS = 32


@dataclass(frozen=True)
class BallsInBinsSampling:
    """In each pass of `bins` (m) steps each privacy unit joins exactly one, dealt by itself and uniformly, and anew in
    every pass (random allocation). n steps cost ceil(n / m) passes, and the proof is in `accounting.allocation`.

    Raises:
        PrivacyError: there are fewer than two bins, or more than MOST_BINS.
    """

    bins: int

    def __post_init__(self) -> None:
        if not 2 <= self.bins <= MOST_BINS:
            raise PrivacyError(
                f"bins={str(self.bins)[:24]} is not between 2 and {MOST_BINS}",
                why="with one bin every unit joins every step, and of so many no price was tried",
                fix="take other batches, or Poisson sampling",
            )

    @property
    def sample_rate(self) -> float:
        """Of one step: 1 / m."""
        return 1 / self.bins

    @property
    def cycle(self) -> int:
        """As of `PoissonSampling`."""
        return self.bins

    def describe(self) -> str:
        return f"balls in bins, each privacy unit in one of {self.bins} steps"


Sampling = PoissonSampling | TruncatedPoissonSampling | CyclicPoissonSampling | BallsInBinsSampling

_SAMPLINGS: dict[str, type[Sampling]] = {
    "poisson": PoissonSampling,
    "truncated_poisson": TruncatedPoissonSampling,
    "cyclic_poisson": CyclicPoissonSampling,
    "balls_in_bins": BallsInBinsSampling,
}


Projections = tuple[tuple[int, int], ...]
"""(rank r_l, input dimension d_l) of the layers that a step projects; empty for a step that projects nothing."""


@dataclass(frozen=True)
class StepEvent:
    """One release: a sum over a sampled batch plus Gaussian noise, projected at random if `projections` says so.

    Without projections it is the Gaussian mechanism. With them it is the noisy projection mechanism M2 of
    Hu et al. (2026): each unit's whole gradient, all layers jointly, is clipped to C; then the input side of
    layer l is projected on a random subspace of r_l of its d_l dimensions, whose law is invariant under
    rotations (Haar, Wishart). The subspaces are drawn afresh in every step, independently of the data and of
    everything that happened before, and may be published. The noise is measured per coordinate of an
    orthonormal basis of the subspace.

    Attributes:
        sampling: how the batch was drawn.
        noise_multiplier: sigma = standard deviation of the noise in one coordinate / clip_norm C, where no
            privacy unit contributes more than C in norm to the sum, before any projection. Zero means that
            epsilon is infinite.
        projections: (r_l, d_l) of the projected layers, 1 <= r_l <= d_l; kept sorted and without repeats,
            because the cost depends on the distinct pairs only. A layer that is released without projection
            under the same clip counts as (d_l, d_l), and makes the whole step cost what the Gaussian
            mechanism costs.

    Raises:
        PrivacyError: `noise_multiplier` is negative or not finite; a pair of `projections` is unusable; or
            a projected step samples otherwise than by plain Poisson sampling.
    """

    sampling: Sampling
    noise_multiplier: float
    projections: Projections = ()

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier <= sys.float_info.max:
            raise PrivacyError(
                f"noise_multiplier={str(self.noise_multiplier)[:24]} is not a finite number >= 0",
                fix="give the noise's standard deviation divided by clip_norm, or calibrate it",
            )
        _check_projections(self.projections)
        if self.projections and not isinstance(self.sampling, PoissonSampling):
            raise PrivacyError(
                "a projected step uses plain Poisson sampling, neither truncated nor cyclic",
                why="no bound for projections covers a cap, correlated noise or balls in bins",
                fix="do without max_batch_size, bands and sampling, or without projections",
            )
        object.__setattr__(self, "projections", tuple(sorted(set(self.projections))))

    @property
    def is_cheaper_by_projection(self) -> bool:
        """Whether the step may cost less than the Gaussian mechanism: every layer loses some dimensions."""
        return bool(self.projections) and all(rank < dimension for rank, dimension in self.projections)

    @property
    def bounds_replacing(self) -> bool:
        """Whether a bound is known for a unit that is replaced by another."""
        return not self.projections and not isinstance(self.sampling, BallsInBinsSampling)

    def releases(self, steps: int) -> tuple[StepEvent, int]:
        """What so many steps in a row cost: a step whose releases are independent, and how many of it.

        For cyclic sampling that is each cycle once, also one that is broken off; for balls in bins each pass.
        """
        if isinstance(self.sampling, BallsInBinsSampling):
            return self, -(-steps // self.sampling.bins)
        if not isinstance(self.sampling, CyclicPoissonSampling):
            return self, steps
        alone = StepEvent(PoissonSampling(self.sampling.sample_rate), self.noise_multiplier)
        return alone, -(-steps // self.sampling.classes)

    def describe(self) -> str:
        """One line for reports."""
        mechanism = "Gaussian mechanism"
        if isinstance(self.sampling, CyclicPoissonSampling):
            mechanism = f"Gaussian mechanism with noise correlated in {self.sampling.classes} bands"
        if self.projections:
            pairs = ", ".join(f"{rank} of {dimension}" for rank, dimension in self.projections)
            mechanism = f"Gaussian mechanism on a fresh random projection of clipped gradients ({pairs})"
        return f"{mechanism}, sigma={self.noise_multiplier:.6g}, {self.sampling.describe()}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` gives back an equal event."""
        kind = next(name for name, cls in _SAMPLINGS.items() if isinstance(self.sampling, cls))
        content: dict[str, Any] = {
            "mechanism": "gaussian",
            "noise_multiplier": self.noise_multiplier,
            "sampling": {"kind": kind, **asdict(self.sampling)},
        }
        if self.projections:
            content["mechanism"] = "projected_gaussian"
            content["projections"] = [list(pair) for pair in self.projections]
        return content

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepEvent:
        """The event that `to_dict` wrote.

        Raises:
            PrivacyError: a field is missing, unknown or of the wrong type.
        """
        mechanism = data.get("mechanism")
        if mechanism not in ("gaussian", "projected_gaussian"):
            raise PrivacyError(f"event has unknown mechanism {mechanism!r}")
        projected = mechanism == "projected_gaussian"
        expected_fields = {"mechanism", "noise_multiplier", "sampling"} | (
            {"projections"} if projected else set()
        )
        values = exact_fields(data, expected_fields, "event")
        sampling = values["sampling"]
        kind = sampling.get("kind") if isinstance(sampling, Mapping) else None
        if not isinstance(kind, str) or kind not in _SAMPLINGS:
            raise PrivacyError(f"event has unknown sampling {sampling!r}")
        sampling_cls = _SAMPLINGS[kind]
        expected = {f.name for f in fields(sampling_cls)} | {"kind"}
        arguments = dict(exact_fields(sampling, expected, "sampling"))
        del arguments["kind"]
        for name, value in {**arguments, "noise_multiplier": values["noise_multiplier"]}.items():
            wants_int = name in ("max_batch_size", "dataset_size", "classes", "bins")
            if isinstance(value, bool) or not isinstance(value, int if wants_int else (int, float)):
                raise PrivacyError(
                    f"event field {name}={value!r} is not {'an integer' if wants_int else 'a number'}"
                )
        projections = _read_projections(values["projections"]) if projected else ()
        return cls(sampling_cls(**arguments), values["noise_multiplier"], projections)


def events_to_dicts(events: Iterable[tuple[StepEvent, int]]) -> list[dict[str, Any]]:
    """JSON-ready."""
    return [{"event": event.to_dict(), "steps": count} for event, count in events]


def event_or_phases(events: Iterable[tuple[StepEvent, int]]) -> dict[str, Any]:
    """JSON-ready: the `event` of one phase, or the `phases` with their counts."""
    phases = events_to_dicts(events)
    return {"event": phases[0]["event"]} if len(phases) == 1 else {"phases": phases}


def describe_events(events: Iterable[tuple[StepEvent, int]]) -> str:
    """What was released and how often, for reports."""
    return " and ".join(f"{count} step{'s' * (count != 1)} of {event.describe()}" for event, count in events)


def _check_projections(projections: object) -> None:
    if not isinstance(projections, tuple):
        raise PrivacyError(
            f"projections={projections!r} is not a tuple", fix="give ((rank, input dimension), ...)"
        )
    if len(set(map(str, projections))) > MOST_PROJECTIONS:
        raise PrivacyError(
            f"there are more than {MOST_PROJECTIONS} kinds of projections",
            why="the bound of each takes a third of a second",
            fix="give layers of alike widths the same rank",
        )
    for pair in projections:
        good = isinstance(pair, tuple) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not (good and 1 <= pair[0] <= pair[1]):
            raise PrivacyError(
                f"projection {pair!r} is not (rank, input dimension), two integers with 1 <= rank <= dimension",
                why="the share of a gradient that a random subspace captures depends on both",
                fix="give the rank of the projection and the width of the layer's input, e.g. (64, 2048)",
            )


def _read_projections(content: object) -> Projections:
    if not isinstance(content, list) or not content or not all(isinstance(pair, list) for pair in content):
        raise PrivacyError(f"event has unreadable projections {content!r}")
    return tuple(tuple(pair) for pair in content)


def exact_fields(data: Mapping[str, Any], expected: set[str], what: str) -> Mapping[str, Any]:
    """`data` itself, once its keys are known to be exactly `expected`; otherwise a PrivacyError."""
    if set(data) != expected:
        raise PrivacyError(
            f"{what} has the fields {sorted(data)}, expected {sorted(expected)}",
            why="a field that is not read could be one that costs privacy",
            fix="read this file with the version of privlora that wrote it",
        )
    return data
