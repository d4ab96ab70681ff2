"""Noise of one step that takes back a part of the noise of the steps before it: DP-BandMF (arXiv:2306.08153).

Sums g_1, …, g_T are released as y = g + C^-1 z, with z white and C lower-triangular, of b bands: row t of C y is
c_0 y_t + … + c_{b-1} y_{t-b+1}. So C y = C g + z, and y is post-processing of a Gaussian mechanism on C g.

Why n steps cost a unit ceil(n / b) releases of a Poisson-sampled Gaussian mechanism with noise multiplier sigma:

1. A unit is of one class of b, and step t draws from class t mod b. Its steps lie b apart, so no two of its columns of
   C share a row: its part of C g in the rows s to s + b - 1 is that of step s alone, c times its clipped gradient u_s.
   With |c| <= 1 that is no longer than the clipping norm, and those rows are one Gaussian mechanism on a coin of the
   unit's own, thrown at step s. What u_s is follows from rows before s, and what else is in a row from earlier rows
   and others' coins: cycles compose adaptively.
2. Classes are dealt once, each by itself, whatever other units there are. Neighbouring data sets therefore have the
   same law of classes of the units that they share. Step 1 holds for each way to deal them, and so for their mixture;
   that classes are kept private is no part of it.
3. A step's coordinates may be another step's turned. Where y_{t-k} is brought from its own coordinates to those of
   step t by a linear map F of norm 1 at most that is known before step t (`Coordinates.followed`), the entries of C are
   c_k F, and a column's norm is still |c| at most.
4. The noise may begin anew at any step, also after a crash that lost it: C is then block-diagonal, still of b bands and
   with columns of norm |c| at most. Nothing has to be charged for it, as long as the class of a step follows from what
   is charged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from privlora.accounting.bands import row_norms
from privlora.coordinates.base import Vector
from privlora.errors import PrivacyError


class Frames(Protocol):
    """What correlated noise asks of coordinates."""

    def frame(self) -> dict[str, Tensor]: ...

    def followed(self, vector: Vector, frame: Mapping[str, Tensor]) -> Vector: ...


class CorrelatedNoise:
    """C^-1 z row by row: n_t = (z_t - c_1 n_{t-1} - … - c_{b-1} n_{t-b+1}) / c_0, with each n in present coordinates.

    Each n is brought there from where it was drawn: step by step, spaces that turn would lose it bit by bit.

    PRIVATE: whoever knows the noise of a step subtracts it from the step's release. It is not rounded, and that of the
    last b - 1 steps is kept.

    coefficients: c, of norm 1 at most. frames: whose coordinates releases have.

    The noise of step t follows that of step t - 1 and no other. After a draw that failed nothing can be drawn any more:
    resume the run, and the noise begins anew. Raises PrivacyError.
    """

    def __init__(self, coefficients: Sequence[float], frames: Frames) -> None:
        norm = math.fsum(c * c for c in coefficients)
        if not (coefficients and coefficients[0] > 0 and norm <= 1):
            raise PrivacyError(
                f"coefficients of noise have the norm {math.sqrt(norm):.9g}, or a first one that is not above 0",
                why="one unit would move the released sums by more than is accounted for",
                fix="take those of band_coefficients",
            )
        self.coefficients = tuple(coefficients)
        self._frames = frames
        self._past: list[
            tuple[Vector, Mapping[str, Tensor]]
        ] = []  # each with its frame, the last step's first
        self._norms: list[float] = []  # of the rows of C^-1 so far, and of as many again
        self._rows = 0
        self._step: int | None = None
        self._broken = False

    @property
    def bands(self) -> int:
        return len(self.coefficients)

    @property
    def row_norm(self) -> float:
        """The norm of the row of C^-1 that was drawn last, or that is drawn first."""
        row = max(self._rows, 1)
        if len(self._norms) < row:
            self._norms = row_norms(self.coefficients, 2 * row).tolist()
        return self._norms[row - 1]

    def next(self, step: int, white: Callable[[], Vector]) -> Vector:
        """The noise of ``step``, as the ledger numbers it. white: draws z of that step, float64."""
        if self._broken or (self._step is not None and step != self._step + 1):
            raise PrivacyError(
                f"the noise of step {step} is asked for, and "
                + (
                    "that of an earlier one failed"
                    if self._broken
                    else f"the last one drawn is of step {self._step}"
                ),
                why="what it has to take back is not known",
                fix="resume the run: its noise begins anew",
            )
        self._broken = True
        drawn = white()
        if any(_shapes(past) != _shapes(drawn) for past, _ in self._past):
            self._past = []  # of a space of another size: the noise begins anew
        made: Vector = [tuple(part.clone() for part in parts) for parts in drawn]
        for c, (past, frame) in zip(self.coefficients[1:], self._past, strict=False):
            for parts, followed in zip(made, self._frames.followed(past, frame), strict=True):
                for part, before in zip(parts, followed, strict=True):
                    part.sub_(before.to(part), alpha=c)
        for parts in made:
            for part in parts:
                part.div_(self.coefficients[0])
        self._rows, self._step, self._broken = self._rows + 1 if self._past else 1, step, False
        frame = {name: tensor.clone() for name, tensor in self._frames.frame().items()}
        self._past = [(made, frame), *self._past][: self.bands - 1]
        return made

    def state_dict(self) -> dict[str, Tensor]:
        """PRIVATE, for a checkpoint in private/."""
        if self._step is None or self._broken:
            return {}
        tensors = {"at": torch.tensor([self._rows, self._step])}
        for k, (past, frame) in enumerate(self._past):
            tensors |= {f"{k}.frame.{name}": tensor for name, tensor in frame.items()}
            tensors |= {f"{k}.{g}.{i}": t for g, parts in enumerate(past) for i, t in enumerate(parts)}
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on after the step of a checkpoint, the last that was charged; of an empty one begin anew."""
        if not tensors:
            return
        self._rows, self._step = (int(value) for value in tensors["at"])
        self._past = []
        while f"{len(self._past)}.0.0" in tensors:
            k, past, g = len(self._past), list[tuple[Tensor, ...]](), 0
            while f"{k}.{g}.0" in tensors:
                parts, i = list[Tensor](), 0
                while f"{k}.{g}.{i}" in tensors:
                    parts, i = [*parts, tensors[f"{k}.{g}.{i}"]], i + 1
                past, g = [*past, tuple(parts)], g + 1
            # Older checkpoints have one frame for all.
            self._past.append((past, _under(tensors, f"{k}.frame.") or _under(tensors, "frame.")))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError(
            "a source of correlated noise cannot be copied",
            why="the releases of both copies would share noise",
            fix="make a new one",
        )


def _shapes(vector: Vector) -> list[Any]:
    return [[tuple(t.shape) for t in parts] for parts in vector]


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
