"""What happened: one frozen record for each release of the Gaussian mechanism, whatever it costs.

The sampler writes these, the ledger stores them, and `accountants` prices them: what is accounted is what
was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from privlora.errors import PrivacyError


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

    def describe(self) -> str:
        return (
            f"Poisson sampling cut to {self.max_batch_size}, q={self.sample_rate:.6g}, "
            f"{self.dataset_size} privacy units"
        )


Sampling = PoissonSampling | TruncatedPoissonSampling

_SAMPLINGS: dict[str, type[PoissonSampling] | type[TruncatedPoissonSampling]] = {
    "poisson": PoissonSampling,
    "truncated_poisson": TruncatedPoissonSampling,
}


@dataclass(frozen=True)
class StepEvent:
    """One release of the Gaussian mechanism: a sum over a sampled batch, plus noise.

    Attributes:
        sampling: how the batch was drawn.
        noise_multiplier: sigma = standard deviation of the noise in one coordinate / clip_norm C, where no
            privacy unit contributes more than C in norm to the sum. Zero means that epsilon is infinite.

    Raises:
        PrivacyError: `noise_multiplier` is negative or not finite.
    """

    sampling: Sampling
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise PrivacyError(
                f"noise_multiplier={self.noise_multiplier} is not a finite number >= 0",
                fix="give the noise's standard deviation divided by clip_norm, or calibrate it",
            )

    def describe(self) -> str:
        """One line for reports."""
        return f"Gaussian mechanism, sigma={self.noise_multiplier:.6g}, {self.sampling.describe()}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` gives back an equal event."""
        kind = next(name for name, cls in _SAMPLINGS.items() if isinstance(self.sampling, cls))
        return {
            "mechanism": "gaussian",
            "noise_multiplier": self.noise_multiplier,
            "sampling": {"kind": kind, **asdict(self.sampling)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepEvent:
        """The event that `to_dict` wrote.

        Raises:
            PrivacyError: a field is missing, unknown or of the wrong type.
        """
        values = exact_fields(data, {"mechanism", "noise_multiplier", "sampling"}, "event")
        if values["mechanism"] != "gaussian":
            raise PrivacyError(f"event has unknown mechanism {values['mechanism']!r}")
        sampling = values["sampling"]
        kind = sampling.get("kind") if isinstance(sampling, Mapping) else None
        if not isinstance(kind, str) or kind not in _SAMPLINGS:
            raise PrivacyError(f"event has unknown sampling {sampling!r}")
        sampling_cls = _SAMPLINGS[kind]
        expected = {f.name for f in fields(sampling_cls)} | {"kind"}
        arguments = dict(exact_fields(sampling, expected, "sampling"))
        del arguments["kind"]
        for name, value in {**arguments, "noise_multiplier": values["noise_multiplier"]}.items():
            wants_int = name in ("max_batch_size", "dataset_size")
            if isinstance(value, bool) or not isinstance(value, int if wants_int else (int, float)):
                raise PrivacyError(
                    f"event field {name}={value!r} is not {'an integer' if wants_int else 'a number'}"
                )
        return cls(sampling_cls(**arguments), values["noise_multiplier"])


def exact_fields(data: Mapping[str, Any], expected: set[str], what: str) -> Mapping[str, Any]:
    """`data` itself, once its keys are known to be exactly `expected`; otherwise a PrivacyError."""
    if set(data) != expected:
        raise PrivacyError(
            f"{what} has the fields {sorted(data)}, expected {sorted(expected)}",
            why="a field that is not read could be one that costs privacy",
            fix="read this file with the version of privlora that wrote it",
        )
    return data
