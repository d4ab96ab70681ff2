"""PRISM's optimizers: momentum and preconditioning of tangent vectors, along which the coordinates then move.

All are functions of the canonical point (U, S, V) and of isometric tangent coordinates, so no choice of factors
can change what they do. Each knows the noise: its covariance in these coordinates is exactly tau^2 I.

One released tangent xi = U M V^T + Up V^T + U Vp^T has the two sides

    P = xi V   = U M + Up     (m, r)      Q = xi^T U = V M^T + Vp     (n, r)

whose rank-space second moments P^T P / m and Q^T Q / n have the expectation tau^2 I under noise alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from privlora.coordinates import TangentCoordinates
from privlora.coordinates.tangent import points_from_tensors
from privlora.geometry.bases import decomposed
from privlora.geometry.fixed_rank import Point, Tangent, tangent_dimension
from privlora.mechanisms import Release
from privlora.optimizers.base import Optimizer

# Keeps noiseless (non-private) preconditioners finite.
_TINY = 1e-12
# Lower bound on second moments, relative to the largest of their module.
_LEAST = 1e-6


class TangentOptimizer(Optimizer):
    """Keeps moving averages of releases. beta1, beta2: decay of the first and of the second moment."""

    takes_weight_units: ClassVar[bool] = True

    def __init__(self, coordinates: TangentCoordinates, beta1: float, beta2: float) -> None:
        self.coordinates = coordinates
        self.beta1, self.beta2 = beta1, beta2
        self._count = 0

    def _corrected(self, moment: Tensor) -> Tensor:
        """A second moment, freed from the bias of an average that started at zero."""
        return moment / (1 - self.beta2**self._count)

    def state_dict(self) -> dict[str, Tensor]:
        moments = self._moments().items()
        return {"count": torch.tensor(self._count)} | {
            f"{g}.{name}": t for name, of_groups in moments for g, t in enumerate(of_groups)
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self._count = int(tensors["count"])
        for name, moments in self._moments().items():
            for g, moment in enumerate(moments):
                moment.copy_(tensors[f"{g}.{name}"])

    def _moments(self) -> dict[str, Sequence[Tensor]]:
        """Name -> the optimizer's own tensors, one a group."""
        return {}

    def _in_units(self, directions: list[Tangent]) -> list[Tangent]:
        """In the units of the modules. They change how far a step leads, and nothing that is remembered."""
        if self.weight_units is None:
            return directions
        return [each.scale(unit) for each, unit in zip(directions, self.weight_units, strict=True)]


class TangentMomentum(TangentOptimizer):
    """Transported momentum, a direction, a move with error feedback: Z + E <- Z + E - learning_rate * D.

    Second moments are floored at the noise variance tau^2, so that preconditioning does not amplify noise (PRISM
    section 3.3).

    error_feedback: rank of the residual E, as a multiple of r; 0 for none. Z is the top r singular triplets of all that
    was summed, and E those that follow, so that a weak direction which many steps agree on is not lost to the noise of
    each (error feedback of compressed SGD, Karimireddy et al. 2019, with the retraction as the compression). The
    adapter stays Z. E is a function of releases alone. At a fixed base nothing is cut off, and there is no E.
    """

    space_settings: ClassVar[Mapping[str, float]] = {"right_weight": 1.0, "metric_power": 0.0}

    def __init__(
        self,
        coordinates: TangentCoordinates,
        *,
        beta1: float = 0.9,
        beta2: float = 0.99,
        error_feedback: float = 0.0,
    ) -> None:
        super().__init__(coordinates, beta1, beta2)
        self._residuals = coordinates.residuals(error_feedback)
        # Of beta1 = 0 the last release is all, and nothing is kept.
        self._momentum = [Tangent.zero(point) for point in coordinates.points] if beta1 else []
        self._start(coordinates.points)

    def _update(self, release: Release, learning_rate: float) -> None:
        self._count += 1
        space, old = self.coordinates, self.coordinates.points
        tangents = [Tangent(*parts) for parts in release.vector]
        self._observe(tangents)
        means = [self._mean(g, tangent) for g, tangent in enumerate(tangents)]
        directions = space.gradients(self._directions(means, release.noise_std))
        self._residuals = space.move(self._in_units(directions), -learning_rate, self._residuals)
        self._carry(old, release.noise_std)

    def _mean(self, g: int, tangent: Tangent) -> Tangent:
        """The momentum of group g with this release, freed from the bias of an average that started at zero."""
        if not self.beta1:
            return tangent
        self._momentum[g] = self._momentum[g].scale(self.beta1).add(tangent, alpha=1 - self.beta1)
        return self._momentum[g].scale(1 / (1 - self.beta1**self._count))

    def transport(self, before: Mapping[str, Tensor], noise_std: float) -> None:
        self._carry(points_from_tensors(before, self.coordinates.points), noise_std)

    def _carry(self, old: list[Point], noise_std: float) -> None:
        """Bring moments from these points to the present ones."""
        space = self.coordinates
        if all(there is here for there, here in zip(old, space.points, strict=True)):
            return  # a base that has not moved: rounding is all that transport would add
        for g, momentum in enumerate(self._momentum):
            self._momentum[g] = space.transport(old[g], space.points[g], momentum)
        self._follow(old, space.points, noise_std)

    def _start(self, points: list[Point]) -> None:
        """Make the second moments, all zero."""

    def _observe(self, tangents: list[Tangent]) -> None:
        """Update second moments with the released tangent of each group."""

    @abstractmethod
    def _directions(self, means: list[Tangent], noise_std: float) -> list[Tangent]:
        """The preconditioned tangent D of each group."""

    def _follow(self, old: list[Point], new: list[Point], noise_std: float) -> None:
        """Bring second moments into the frames of the new points."""

    def state_dict(self) -> dict[str, Tensor]:
        tensors = super().state_dict()
        for g, momentum in enumerate(self._momentum):
            tensors |= {f"{g}.{name}": getattr(momentum, name) for name in ("M", "Up", "Vp")}
        for g, residual in enumerate(self._residuals):
            if residual.rank:
                tensors |= {f"{g}.residual.{name}": getattr(residual, name) for name in "USV"}
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(tensors)
        for g, old in enumerate(self._momentum):
            self._momentum[g] = Tangent(*(tensors[f"{g}.{name}"].to(old.M) for name in ("M", "Up", "Vp")))
        for g, residual in enumerate(self._residuals):
            if residual.rank:
                self._residuals[g] = Point(*(tensors[f"{g}.residual.{n}"].to(residual.S) for n in "USV"))


class TangentSGD(TangentMomentum):
    """Transported momentum alone, in units of the noise: D = m / tau (D = m where there is no noise)."""

    def _directions(self, means: list[Tangent], noise_std: float) -> list[Tangent]:
        return [mean.scale(1 / noise_std) for mean in means] if noise_std else means


class TangentScalar(TangentMomentum):
    """One number a module: momentum over the debiased root mean square of the module's released tangents."""

    def _start(self, points: list[Point]) -> None:
        self._v = [torch.zeros_like(point.S[:, 0]) for point in points]  # (L,) each

    def _observe(self, tangents: list[Tangent]) -> None:
        for g, tangent in enumerate(tangents):
            d = tangent_dimension(tangent.Up.shape[1], tangent.Vp.shape[1], tangent.M.shape[1])
            self._v[g] = torch.lerp(tangent.norm_squared() / d, self._v[g], self.beta2)

    def _directions(self, means: list[Tangent], noise_std: float) -> list[Tangent]:
        signals = (self._corrected(v) - noise_std**2 for v in self._v)
        roots = (signal.clamp_min(noise_std**2 + _TINY**2).rsqrt() for signal in signals)
        return [mean.scale(root) for mean, root in zip(means, roots, strict=True)]

    def _moments(self) -> dict[str, Sequence[Tensor]]:
        return {"v": self._v}


class TangentRank(TangentMomentum):
    """r x r second moments of both sides, debiased by tau^2 I, floored, and carried along as the frames turn.

    D has P-side Up V_R^-1/2, Q-side Vp V_L^-1/2 and core V_L^-1/4 M V_R^-1/4.
    """

    def _start(self, points: list[Point]) -> None:
        self._sizes = [len(point.S) for point in points]
        # (2 L, r, r) of all modules, so that one decomposition does for all: in the frames U, then in the frames V.
        self._v = torch.cat([torch.zeros_like(torch.diag_embed(point.S)) for point in [*points, *points]])
        self._rows = torch.cat(  # n for the frames U, m for the frames V
            [p.S.new_full((len(p.S), 1, 1), len(basis[0])) for basis, p in _sides(points, "VU")]
        )

    def _observe(self, tangents: list[Tangent]) -> None:
        M = torch.cat([tangent.M for tangent in tangents])
        cores = torch.cat([M @ M.mT, M.mT @ M])
        grams = torch.cat([X.mT @ X for name in ("Vp", "Up") for X in (getattr(t, name) for t in tangents)])
        self._v = torch.lerp((cores + grams) / self._rows, self._v, self.beta2)

    def _directions(self, means: list[Tangent], noise_std: float) -> list[Tangent]:
        halves, fourths = self._inverse_roots(noise_std)
        (left, right), (left_root, right_root) = (self._by_side(t) for t in (halves, fourths))
        return [
            Tangent(left_root[g] @ mean.M @ right_root[g], mean.Up @ right[g], mean.Vp @ left[g])
            for g, mean in enumerate(means)
        ]

    def _inverse_roots(self, noise_std: float) -> tuple[Tensor, Tensor]:
        """The powers -1/2 and -1/4 of the debiased, floored second moments."""
        w, e = decomposed(torch.linalg.eigh, self._corrected(self._v))
        w = w - noise_std**2
        # Without noise, gradients of deficient rank leave eigenvalues of rounding only, which must not be inverted.
        least = (_LEAST * w[:, -1:]).clamp_min(noise_std**2 + _TINY**2)
        w = torch.maximum(w, least)[:, None, :]
        return (e * w**-0.5) @ e.mT, (e * w**-0.25) @ e.mT

    def _follow(self, old: list[Point], new: list[Point], noise_std: float) -> None:
        pairs = zip(_sides(old, "UV"), _sides(new, "UV"), strict=True)
        overlap = torch.cat([before.mT @ after for (before, _), (after, _) in pairs])
        # What the new frame has outside the old one has only been seen as noise.
        prior = (1 - self.beta2**self._count) * noise_std**2
        self._v = _turn(self._v, overlap, prior)

    def _by_side(self, t: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """Views of what is in one for all modules: of the frames U and V, for each group."""
        return tuple(side.split(self._sizes) for side in t.chunk(2))

    def _moments(self) -> dict[str, Sequence[Tensor]]:
        return dict(zip(("vl", "vr"), self._by_side(self._v), strict=True))


TANGENT_OPTIMIZERS: dict[str, type[TangentOptimizer]] = {
    "sgd": TangentSGD,
    "scalar": TangentScalar,
    "rank": TangentRank,
}


def _sides(points: list[Point], names: str) -> list[tuple[Tensor, Point]]:
    """Each group's first basis of the two, then each group's second."""
    return [(getattr(point, name), point) for name in names for point in points]


def _turn(moment: Tensor, overlap: Tensor, prior: float) -> Tensor:
    """The second moment in the new frame; overlap = old^T new, (L, r, r)."""
    eye = torch.eye(overlap.shape[-1], dtype=overlap.dtype, device=overlap.device)
    return overlap.mT @ moment @ overlap + prior * (eye - overlap.mT @ overlap)
