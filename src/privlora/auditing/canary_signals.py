"""What all canaries of one run show together of its noise: how far the releases went their way, against the spread.

Guesses count which canaries were in; this adds up by how much. It knows which canaries each batch drew, so it is no
attack that anybody could make, but a test of the noise (``bounds.signals_mu`` has the law and what is assumed). Whether
batches are drawn as planned is left to the guesses.

Correlated noise is made white first. A run of b bands releases y = g + C^-1 z (mechanisms.banded). C is public, so the
attacker has C y = C g + z: in row t the noise z_t alone, and of a canary that was drawn at step s its gradient times
c_{t-s}, in the rows s to s + b - 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privlora.accounting.events import StepEvent
from privlora.auditing.bounds import beyond_claim, signals_mu
from privlora.auditing.gradient_canaries import GradientCanaries, bounded_chunks
from privlora.coordinates import Vector, add_vectors
from privlora.coordinates.span import flattened
from privlora.mechanisms import Frames, GaussianMechanism


class Whitening:
    """Rows of C times releases, and times what canaries add to them.

    coefficients: c, of norm 1 at most (``claimed``). frames: whose coordinates releases have; earlier ones are brought
    to the present ones as the noise was. whole: the noise began with the first release that is seen here; else the
    first b - 1 rows lack what came before, and are not white.
    """

    def __init__(self, coefficients: Sequence[float], frames: Frames, *, whole: bool) -> None:
        self._coefficients, self._frames = coefficients, frames
        self._past: list[_Seen] = []  # the last step's first
        self._lacking = 0 if whole else len(coefficients) - 1

    @property
    def white(self) -> bool:
        """Whether the noise of the last row is that of its own step alone."""
        return self._lacking < 0

    def row(self, rest: Vector, added: Vector | None, drawn: float) -> tuple[Vector, Vector | None, float]:
        """c_0 v_t + c_1 v_{t-1} + … of both vectors v_t, in float64, and the same of ``drawn`` with the c_k squared.

        rest: what was released, less what is known of it. added: by canaries, if all is honest. drawn: how many.
        """
        vectors = [times(vector, 1.0) for vector in (rest, added) if vector is not None]
        if self._past and _shapes(self._past[0].vectors[0]) != _shapes(rest):
            self._past, self._lacking = [], 0  # a space of another size, in which the noise began anew
        made = [times(vector, self._coefficients[0]) for vector in vectors]
        weight = self._coefficients[0] ** 2 * drawn
        for c, past in zip(self._coefficients[1:], self._past, strict=False):
            for at, before in enumerate(past.vectors):
                made[at] = add_vectors(made[at], times(self._frames.followed(before, past.frame), c))
            weight += c**2 * past.drawn
        frame = {name: tensor.clone() for name, tensor in self._frames.frame().items()}
        self._past = [_Seen(vectors, frame, drawn), *self._past][: len(self._coefficients) - 1]
        self._lacking -= 1
        return made[0], made[1] if len(made) > 1 else None, weight


@dataclass(frozen=True)
class _Seen:
    """What there was in an earlier step, in the coordinates of ``frame``."""

    vectors: Sequence[Vector]
    frame: Mapping[str, Tensor]
    drawn: float


def claimed(coefficients: Sequence[float]) -> tuple[float, ...]:
    """c, or the part of it that the price of a cycle allows for, beside which missing noise shows."""
    norm = math.sqrt(math.fsum(c * c for c in coefficients))
    return tuple(c / max(1.0, norm) for c in coefficients)


class Cycles:
    """Scores of canaries each of which is drawn at most once in b steps, whose class is known.

    classes: (canaries,) int64. coefficients: c. scores: (canaries,) what cycles before these gave, of which the last
    may have been broken off.
    """

    def __init__(
        self, classes: NDArray[np.int64], coefficients: Sequence[float], scores: NDArray[np.float64]
    ) -> None:
        self._classes, self._coefficients = classes, np.array(coefficients)
        self._closed = scores.copy()
        self._x, self._size = np.zeros(len(classes)), np.zeros(len(classes))
        self._open = np.zeros(len(classes), dtype=bool)

    def seen(
        self, turn: int, x: NDArray[np.float64], size: NDArray[np.float64], rate: float, sigma: float
    ) -> NDArray[np.float64]:
        """(canaries,) scores after the row of step ``turn``, from 0. x, size: of ``alignments`` with that row."""
        lag = (turn - self._classes) % len(self._coefficients)
        new = lag == 0
        self._closed[new] += log_ratio(self._x[new], self._size[new], rate, sigma)
        self._x[new] = self._size[new] = 0.0
        self._open |= new
        weights = self._coefficients[lag] * self._open
        self._x += weights * x
        self._size += weights**2 * size
        return self._closed + log_ratio(self._x, self._size, rate, sigma)


def log_ratio(
    x: NDArray[np.float64], size: NDArray[np.float64], rate: float, sigma: float
) -> NDArray[np.float64]:
    """ln of the density of x with the canary over that without, for x = N(sampled size, sigma^2 size)."""
    exponent = np.log(rate) + (2 * x - size) / (2 * sigma**2)
    ratio: NDArray[np.float64] = exponent if rate == 1 else np.logaddexp(np.log1p(-rate), exponent)
    return ratio


def times(vector: Vector, factor: float) -> Vector:
    return [tuple(t.double() * factor for t in parts) for parts in vector]


def _shapes(vector: Vector) -> list[list[tuple[int, ...]]]:
    return [[tuple(t.shape) for t in parts] for parts in vector]


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
        of ``added_by``. weight: k. Of correlated noise all three are those of a row of C (``Whitening``).

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
