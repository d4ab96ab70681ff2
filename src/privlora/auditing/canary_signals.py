"""What all canaries of one run show together of its noise: how far the releases went their way, against the spread.

Guesses count which canaries were in; this adds up by how much. It knows which canaries each batch drew, so it is no
attack that anybody could make, but a test of the noise (``bounds.signals_mu`` has the law and what is assumed). Whether
batches are drawn as planned is left to the guesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from privlora.accounting.events import StepEvent
from privlora.auditing.bounds import beyond_claim, signals_mu
from privlora.auditing.gradient_canaries import GradientCanaries, bounded_chunks
from privlora.auditing.whitened import times
from privlora.coordinates import Vector, add_vectors
from privlora.coordinates.span import flattened
from privlora.mechanisms import GaussianMechanism

_OUTSIDE = 64  # canaries that were not drawn, along which a release's noise is measured
_ENTRIES = 2**25  # of their contributions in memory at a time, in float64
_DEPENDENT = 1e-6  # eigenvalues of a Gram matrix below this share of its largest one count as none


@dataclass
class Signals:
    """Sums over the releases of a run, PRIVATE; with k canaries drawn into a release r, in units of C, that would be f
    without noise (an honest mechanism's part of them):

    drawn: sum k. signal: sum sqrt(k) <r, f> / ||f||. expected: sum sqrt(k) ||f||. energy: sum ||Pi (r - f)||^2, Pi onto
    the span of canaries that were not drawn; dimensions: the sum of these spans'.
    """

    drawn: float = 0.0
    signal: float = 0.0
    expected: float = 0.0
    energy: float = 0.0
    dimensions: int = 0

    def add(
        self,
        mechanism: GaussianMechanism,
        canaries: GradientCanaries,
        drawn: Tensor,
        rest: Vector,
        added: Vector,
        weight: float,
    ) -> None:
        """Another release. drawn: (k,) which canaries are in it. rest: the release without the records' part. added:
        of ``added_by``. weight: k. Of correlated noise all three are those of a row of C (``whitened``).

        At the state of the coordinates at which the batch was taken.
        """
        seen = flattened(rest).double() * (mechanism.expected_batch_size / mechanism.clip_norm)
        honest = flattened(added).to(seen)
        length = float(honest.norm())
        if length > 0:
            self.drawn += weight
            self.signal += math.sqrt(weight) * float(seen @ honest) / length
            self.expected += math.sqrt(weight) * length
            seen = seen - honest
        others = torch.ones(canaries.count, dtype=torch.bool)
        others[drawn] = False
        measured = others.nonzero()[:, 0][: max(1, min(_OUTSIDE, _ENTRIES // len(seen)))]
        if len(measured):
            self._measure(seen, _apart(mechanism, canaries, measured).to(seen))

    def _measure(self, noise: Tensor, directions: Tensor) -> None:
        values, vectors = torch.linalg.eigh(directions @ directions.mT)
        kept = values > _DEPENDENT * values.max()
        along = vectors.mT @ (directions @ noise)
        self.energy += float((along[kept].square() / values[kept]).sum())
        self.dimensions += int(kept.sum())

    def largest_mu(self, event: StepEvent, steps: int, confidence: float) -> float:
        """Largest 1 / noise_multiplier that is refuted, 0 if none is."""
        if not (self.expected > 0 and self.dimensions):
            return 0.0
        mean = 1 / math.sqrt(self.drawn)
        # Without any noise the energy is zero.
        energy = max(self.energy, 1e-200)
        found = signals_mu(self.signal * mean, self.expected * mean, energy, self.dimensions, confidence)
        return min(found, beyond_claim(event, steps, lambda mu: found > mu))


def added_by(mechanism: GaussianMechanism, canaries: GradientCanaries, which: Tensor) -> Vector:
    """What an honest mechanism adds of these canaries, in units of C. Float64, zeros for none."""
    coordinates = mechanism.coordinates
    total: Vector | None = None
    some = which if len(which) else torch.zeros(1, dtype=torch.int64)
    for captured, factors, _ in bounded_chunks(mechanism, canaries, some):
        part = coordinates.from_partial(coordinates.partial_sum(captured, factors * bool(len(which))))
        total = part if total is None else add_vectors(total, part)
    assert total is not None
    return times(total, 1 / mechanism.clip_norm)


def _apart(mechanism: GaussianMechanism, canaries: GradientCanaries, which: Tensor) -> Tensor:
    """(canaries, entries) the same of each by itself."""
    coordinates, found = mechanism.coordinates, list[Tensor]()
    for captured, factors, _ in bounded_chunks(mechanism, canaries, which):
        for at in range(len(factors)):
            one = slice(at, at + 1)
            columns = None if captured.columns is None else captured.columns[one]
            alone = replace(captured.some(one), columns=columns)
            part = coordinates.from_partial(coordinates.partial_sum(alone, factors[one]))
            found.append(flattened(part).double() / mechanism.clip_norm)
    return torch.stack(found)
