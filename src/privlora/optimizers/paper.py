"""PRISM's own algorithm: Eq. 24-26 in balanced factors, with the safeguards that its sections 3.2, 3.3 and A.27 name.

The point is the canonical Z = U S V^T, its factors are A = U S^1/2 and B = V S^1/2, so A^T A = B^T B = diag(S). The
paper turns the retracted factors towards the old ones by an orthogonal Q and leaves the moments as they are. Here the
moments are turned, and the factors stay: the same by Lemma A.30.

The bound of the condition number, which the paper leaves open, is 1e4 as in its authors' code. The noise goes through
the lift, as the gradient does. In Eq. 19 it does not, and A^T dA of Eq. 17 would carry data without noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from privlora.coordinates import TangentCoordinates
from privlora.errors import ConfigError
from privlora.geometry.bases import decomposed
from privlora.geometry.fixed_rank import Point, Tangent, factors
from privlora.mechanisms import Release
from privlora.optimizers.tangent import TangentOptimizer

# Singular values below this part of their module's largest are dropped, as by the pseudo-inverse of Eq. 12.
_LEAST = 1e-6
_TINY = 1e-24

Pair = tuple[Tensor, Tensor]
"""Of the left factors (L, m or r, r) and of the right ones (L, n or r, r)."""


def no_start_at_zero() -> ConfigError:
    """The error for PRISM's algorithm and an adapter of zeros."""
    return ConfigError(
        "method 'prism-paper' cannot leave an adapter of zeros",
        why="Eq. 24-26 divide by the adapter's singular values, so every step would be spent on not moving",
        fix="set adapter.init to spectral-split or to a trained adapter's folder, or method.name to prism",
    )


class PrismPaper(TangentOptimizer):
    """PRISM Algorithm 1 after its release. beta1, beta2: decay of the first and of the second moment.

    A subclass changes one ingredient. bias_correction: Adam's, which Eq. 24 does not have. minimum_norm: the lift of
    Proposition A.11 instead of Eq. 14. alignment: of the retracted factors (A.24). debiasing: of second moments by the
    noise's covariance (A.26). floor: Eq. 26. condition_bound: of second moments with their floor (A.27). cap: of a
    whole step at the clipping norm, in the norm of Eq. 16 (3.3).
    Raises ConfigError at Z = 0, where no direction would be left.
    """

    takes_weight_units: ClassVar[bool] = False
    leaves_zero: ClassVar[bool] = False
    bias_correction: ClassVar[bool] = False
    minimum_norm: ClassVar[bool] = False
    alignment: ClassVar[bool] = True
    debiasing: ClassVar[bool] = True
    floor: ClassVar[bool] = True
    condition_bound: ClassVar[float] = 1e4
    cap: ClassVar[bool] = True

    def __init__(self, coordinates: TangentCoordinates, *, beta1: float = 0.9, beta2: float = 0.999) -> None:
        super().__init__(coordinates, beta1, beta2)
        points = coordinates.points
        if not all((point.S != 0).any(dim=-1).all() for point in points):
            raise no_start_at_zero()
        self._means: list[Pair] = [(torch.zeros_like(p.U), torch.zeros_like(p.V)) for p in points]
        self._seconds: list[Pair] = [(Tangent.zero(p).M, Tangent.zero(p).M) for p in points]

    def _update(self, release: Release, learning_rate: float) -> None:
        self._count += 1
        old = self.coordinates.points
        released = [Tangent(*parts) for parts in release.vector]
        lifted = [self.lift(point, tangent) for point, tangent in zip(old, released, strict=True)]
        for g, (point, pair) in enumerate(zip(old, lifted, strict=True)):
            seen = [d.mT @ d / d.shape[1] for d in pair]  # Eq. 24
            if self.debiasing:
                seen = [
                    v - noise for v, noise in zip(seen, self._noise(point, release.noise_std), strict=True)
                ]
            self._means[g] = _lerp(pair, self._means[g], self.beta1)
            self._seconds[g] = _lerp(seen, self._seconds[g], self.beta2)
        steps = [_scaled(pair, learning_rate) for pair in self._directions(old, release.noise_std)]
        effects = [self.effect(point, pair) for point, pair in zip(old, steps, strict=True)]
        if self.cap:
            size = torch.cat([effect.norm_squared() for effect in effects]).sum().sqrt()
            factor = (release.clip_norm / size.clamp_min(_TINY)).clamp_max(1.0)
            effects = [effect.scale(factor) for effect in effects]
        self.coordinates.move(effects, -1.0)  # Eq. 22
        self._align(old)

    def lift(self, point: Point, xi: Tangent) -> Pair:
        """Factor directions (dA, dB) with dA B^T + A dB^T = xi, of full-rank factors (Eq. 14, Prop. A.11)."""
        weights = self._core_weights(point.S)
        root = _inverse(point.S).sqrt()[:, None, :]
        return xi.Up * root + point.U @ (weights * xi.M), xi.Vp * root + point.V @ (weights * xi.M.mT)

    def effect(self, point: Point, pair: Pair) -> Tangent:
        """The tangent vector dA B^T + A dB^T."""
        root = point.S.sqrt()[:, None, :]
        a, b = (d * root for d in pair)
        core = point.U.mT @ a, point.V.mT @ b
        return Tangent(core[0] + core[1].mT, a - point.U @ core[0], b - point.V @ core[1])

    def inverse_roots(self, g: int, point: Point, noise_std: float) -> Pair:
        """(V + lambda I)^-1/2 of both sides of group g (Eq. 25), its eigenvalues within the bound of A.27."""
        roots = []
        floor = noise_std**2 * _inverse(point.S).mean(dim=-1, keepdim=True) if self.floor else 0.0  # Eq. 26
        for second in self._seconds[g]:
            w, e = decomposed(torch.linalg.eigh, self._corrected(second) if self.bias_correction else second)
            w = w.clamp_min(0) + floor
            w = torch.maximum(w, w[:, -1:] / self.condition_bound) + _TINY
            roots.append((e * w[:, None, :].rsqrt()) @ e.mT)
        return roots[0], roots[1]

    def _directions(self, points: list[Point], noise_std: float) -> list[Pair]:
        """U_A and U_B of each group (Eq. 25)."""
        correction = 1 - self.beta1**self._count if self.bias_correction else 1.0
        found = []
        for g, (point, means) in enumerate(zip(points, self._means, strict=True)):
            left, right = self.inverse_roots(g, point, noise_std)
            found.append((means[0] @ left / correction, means[1] @ right / correction))
        return found

    def _noise(self, point: Point, noise_std: float) -> Pair:
        """E[dA^T dA] / m and E[dB^T dB] / n of the lifted noise (Eq. 49 for this lift), (L, r, r)."""
        inverse, core = _inverse(point.S), self._core_weights(point.S).square().sum(dim=-2)
        covariances = []
        for rows in (point.U.shape[1], point.V.shape[1]):
            diagonal = ((rows - point.rank) * inverse + core) / rows
            covariances.append(torch.diag_embed(noise_std**2 * diagonal))
        return covariances[0], covariances[1]

    def _core_weights(self, s: Tensor) -> Tensor:
        """W (L, r, r) of the lift U (W * M) of a core M: 1 / 2 sqrt(s_j), or sqrt(s_j) / (s_i + s_j).

        The second is the Sylvester equation (39), which is diagonal in these factors.
        """
        if not self.minimum_norm:
            return (0.5 * _inverse(s).sqrt()[:, None, :]).expand(*s.shape, s.shape[-1])
        kept = _inverse(s) > 0
        sums = (s[:, :, None] + s[:, None, :]).clamp_min(_TINY)
        return torch.where(kept[:, None, :], s.sqrt()[:, None, :] / sums, 0.0)

    def _align(self, old: list[Point]) -> None:
        """Turn the moments by Q, the rotation that brings the new factors nearest to the old ones (Lemma A.28)."""
        if not self.alignment:
            return
        for g, (before, after) in enumerate(zip(old, self.coordinates.points, strict=True)):
            (a, b), (old_a, old_b) = factors(after), factors(before)
            u, _, vh = decomposed(torch.linalg.svd, a.mT @ old_a + b.mT @ old_b)
            turn = (u @ vh).mT
            self._means[g] = self._means[g][0] @ turn, self._means[g][1] @ turn
            self._seconds[g] = turn.mT @ self._seconds[g][0] @ turn, turn.mT @ self._seconds[g][1] @ turn

    def _moments(self) -> dict[str, Sequence[Tensor]]:
        kept = zip(("ma", "mb"), zip(*self._means, strict=True), strict=True)
        return dict(kept) | dict(zip(("va", "vb"), zip(*self._seconds, strict=True), strict=True))


def _but(**ingredients: object) -> type[PrismPaper]:
    return type("PrismPaper", (PrismPaper,), ingredients)


PAPER_OPTIMIZERS: dict[str, type[TangentOptimizer]] = {
    "paper": PrismPaper,
    "bias-correction": _but(bias_correction=True),
    "minimum-norm": _but(minimum_norm=True),
    "no-alignment": _but(alignment=False),
    "no-debiasing": _but(debiasing=False),
    "no-floor": _but(floor=False),
    "no-condition-bound": _but(condition_bound=float("inf")),
    "no-cap": _but(cap=False),
}
"""The algorithm, and it with one ingredient changed, for ablations."""


def _lerp(new: Sequence[Tensor], old: Pair, decay: float) -> Pair:
    return torch.lerp(new[0], old[0], decay), torch.lerp(new[1], old[1], decay)


def _scaled(pair: Pair, factor: float | Tensor) -> Pair:
    return pair[0] * factor, pair[1] * factor


def _inverse(s: Tensor) -> Tensor:
    """1 / s, and 0 where s is below 1e-6 of the largest, (L, r)."""
    kept = s > _LEAST * s[:, :1].clamp_min(_LEAST)
    return torch.where(kept, 1 / torch.where(kept, s, 1.0), 0.0)
