"""The release of one step for N heads at once: bound each record, sum, charge, add noise, project.

Where a method projects before it adds noise, or before it bounds records, its class says so.

Shapes: N heads, c classes, d features, b places of a batch (the longest of the N batches; shorter ones are padded with
places of weight zero), r the rank. Residuals are softmax - one-hot; a record's gradient is residual x^T.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from privlora.accounting.events import StepEvent
from privlora.lab.wishart.head_settings import HeadSettings
from privlora.mechanisms.noising import Noising


def project_afresh(
    values: Tensor, rank: int, projection: str, generators: Sequence[np.random.Generator]
) -> Tensor:
    """``values`` (N, c, d) times N independent fresh projections of ``rank`` whose mean is the identity.

    projection: "wishart", or "haar" with rank <= d. generators: one for each of the N matrices. d >= 2 c.

    No projection is formed. Only what M does to the c rows of V matters, so with V = R U, the rows of U orthonormal, it
    is enough to draw (U M):

        wishart   M = A^T A, A (r x d) of N(0, 1/r) entries:
                  U M = T^T (T U + N) / r,   T^T T ~ W_c(I, r),   N normal entries, its rows made orthogonal to U
        haar      M = (d / r) P, P projecting on a uniform subspace of rank r:
                  U P = B U + (B - B^2)^(1/2) F,   B = U P U^T ~ matrix Beta_c(r/2, (d-r)/2),   F a uniform frame
                  beside U

    Both follow from M's invariance under the rotations that leave U fixed. The cost is O(c d), whatever the rank. M
    itself is not known afterwards, not even to the curator: whoever has to publish it must draw it. The privacy of M2
    is proved for a published M, so hiding it takes nothing away.
    """
    _, rows, columns = values.shape
    frame, triangle = torch.linalg.qr(values.mT)  # V^T = U^T R^T; orthonormal also where V has lower rank
    if projection == "wishart":
        root = _wishart_roots(generators, rank, rows, values.dtype)
        beside = _normals(generators, (root.shape[1], columns), values.dtype)
        beside -= (beside @ frame) @ frame.mT
        images = root.mT @ (root @ frame.mT + beside) / rank
    else:
        beside = _normals(generators, (rows, columns), values.dtype)
        both, signs = torch.linalg.qr(torch.cat([frame, beside.mT], dim=-1))
        # Householder reflections choose signs by the data; the diagonal of R undoes it, which makes the frame uniform.
        frame_beside = both[..., rows:] * signs.diagonal(dim1=-2, dim2=-1)[..., None, rows:].sign()
        inside = _wishart(generators, rank, rows)
        whole = torch.linalg.cholesky(inside + _wishart(generators, columns - rank, rows))
        half = torch.linalg.solve_triangular(whole, inside, upper=False)
        beta = torch.linalg.solve_triangular(whole, half.mT, upper=False)
        kept, axes = torch.linalg.eigh((beta + beta.mT) / 2)
        kept = kept.clamp(0, 1)
        along = (axes * kept[:, None, :]) @ axes.mT
        across = axes * (kept * (1 - kept)).sqrt()[:, None, :]
        images = along.to(values.dtype) @ frame.mT + across.to(values.dtype) @ frame_beside.mT
        images *= columns / rank
    return triangle.mT @ images


def orthonormal_bases(
    rank: int, columns: int, dtype: torch.dtype, generators: Sequence[np.random.Generator]
) -> Tensor:
    """Bases (N, d, r) of uniform subspaces: the r columns are orthonormal. Any basis of the subspace will do."""
    return torch.linalg.qr(_normals(generators, (columns, rank), dtype))[0]


def gaussian_factors(
    rank: int, columns: int, dtype: torch.dtype, generators: Sequence[np.random.Generator]
) -> Tensor:
    """LoRA-FA's A: (N, r, d) with N(0, 1/r) entries."""
    return _normals(generators, (rank, columns), dtype) / rank**0.5


def _wishart(generators: Sequence[np.random.Generator], freedom: int, size: int) -> Tensor:
    """W_size(I, freedom), float64 (N, size, size), of lower rank if ``freedom`` < ``size``."""
    root = _wishart_roots(generators, freedom, size, torch.float64)
    return root.mT @ root


def _wishart_roots(
    generators: Sequence[np.random.Generator], freedom: int, size: int, dtype: torch.dtype
) -> Tensor:
    """T (N, min(freedom, size), size) with T^T T ~ W_size(I, freedom): normal entries, or Bartlett's triangle."""
    if freedom <= size:
        return _normals(generators, (freedom, size), dtype)
    degrees = freedom - np.arange(size)
    roots = np.zeros((len(generators), size, size))
    above = np.triu_indices(size, 1)
    for root, generator in zip(roots, generators, strict=True):
        root[above] = generator.standard_normal(len(above[0]))
        np.fill_diagonal(root, np.sqrt(generator.chisquare(degrees)))
    return torch.from_numpy(roots).to(dtype)


def _normals(generators: Sequence[np.random.Generator], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """(N, *shape) standard normal entries; matrix n comes from generator n, drawn in float64."""
    drawn = torch.empty((len(generators), *shape), dtype=dtype)
    for out, generator in zip(drawn, generators, strict=True):
        out.copy_(torch.from_numpy(generator.standard_normal(shape)))
    return drawn


# What a record contributes is rounded in the features' precision; shrinking by more than that keeps it within C.
SLACK = 1e-5


def _summed(residuals: Tensor, inputs: Tensor) -> Tensor:
    """residuals (..., c, b) @ inputs (..., b, k) in float64.

    In float32, how records that pull alike are rounded depends on who else is there, and adds up.
    """
    if residuals.dim() == 2:
        return residuals.double() @ inputs.double()
    pairs = zip(residuals, inputs, strict=True)  # one by one: a copy of all inputs in float64 could be large
    return torch.stack([r.double() @ x.double() for r, x in pairs])


def _lengths(t: Tensor, dim: int) -> Tensor:
    """Norms in float64, whose squares neither vanish nor overflow."""
    return torch.linalg.vector_norm(t, dim=dim, dtype=torch.float64)


@dataclass(frozen=True)
class Batch:
    """What N heads see in one step. features: (b, d) where all see the same rows, else (N, b, d).

    labels: (b,) or (N, b), int64. weights: (N, b), 1 for a record that is in a head's batch, 0 for one that is not.
    """

    features: Tensor
    labels: Tensor
    weights: Tensor

    def logits(self, heads: Tensor) -> Tensor:
        """(N, c, b) from heads (N, c, d)."""
        if self.features.dim() == 2:
            return (heads.flatten(0, 1) @ self.features.T).unflatten(0, heads.shape[:2])
        return heads @ self.features.mT

    def residuals(self, heads: Tensor) -> Tensor:
        """softmax - one-hot (N, c, b); zero where a record is absent or the loss is not finite."""
        found = torch.softmax(self.logits(heads), dim=1)
        at = torch.atleast_2d(self.labels)[:, None, :].expand(len(heads), 1, -1)
        found.scatter_add_(1, at, torch.full_like(found[:, :1], -1.0))
        return torch.where((self.weights > 0)[:, None, :] & found.isfinite(), found, 0.0)

    def gradient(self, residuals: Tensor) -> Tensor:
        """Sum over the batch of residual x^T, (N, c, d) float64."""
        if self.features.dim() == 2:
            return _summed(residuals.flatten(0, 1), self.features).unflatten(0, residuals.shape[:2])
        return _summed(residuals, self.features)


class HeadMechanism(ABC):
    """One method for one head per pen. ``width``: columns of what is trained.

    pens: each head's ledger and noise. event: what one release of one head costs. hidden: generators of projections
    that stay secret. public: of frozen or published ones.
    """

    def __init__(
        self,
        settings: HeadSettings,
        columns: int,
        dtype: torch.dtype,
        pens: Sequence[Noising],
        event: StepEvent,
        hidden: Sequence[np.random.Generator],
        public: Sequence[np.random.Generator],
    ) -> None:
        self.settings, self.columns, self.dtype = settings, columns, dtype
        self.pens, self.event, self.hidden, self.public = pens, event, hidden, public
        self._begin()

    def _begin(self) -> None:
        """Set the width, and draw what stays for all steps."""
        self.width = self.columns

    @abstractmethod
    def noisy_sum(self, batch: Batch, residuals: Tensor) -> Tensor:
        """(N, c, width): the released sum, before the division by the expected batch size."""

    def weights(self, trained: Tensor) -> Tensor:
        """The heads (N, c, d) of the trained values (N, c, width)."""
        return trained

    @property
    def rank(self) -> int:
        assert self.settings.rank is not None  # HeadSettings
        return self.settings.rank

    @property
    def bound(self) -> float:
        """What one record contributes to the sum at most."""
        return float("inf") if self.settings.clip_norm is None else self.settings.clip_norm

    def _clipped(self, residuals: Tensor, lengths: Tensor) -> Tensor:
        """``residuals`` scaled so that residual times a vector of ``lengths`` ((b,) or (N, b)) is within the bound."""
        if self.settings.clip_norm is None:
            return residuals
        norms = _lengths(residuals, 1) * lengths
        factors = (self.bound * (1 - SLACK) / norms).clamp(max=1.0)
        # A norm of zero may have underflowed, and bounds nothing; nor does one that is not finite.
        return residuals * torch.where((norms > 0) & norms.isfinite(), factors, 0.0)[:, None, :]

    def _noised(self, total: Tensor) -> Tensor:
        """``total`` (N, c, k) float64 with noise where there is any, in the features' precision.

        Every ledger is charged before any noise is drawn.
        """
        charged = [pen.charge(self.event) for pen in self.pens]
        if self.settings.noise_multiplier > 0:
            scale = self.settings.noise_multiplier * self.bound
            for values, each in zip(total, charged, strict=True):
                values.copy_(each.tensor(values, scale=scale, divisor=1.0, dtype=self.dtype))
        return total.to(self.dtype)


class DenseMechanism(HeadMechanism):
    """dp-sgd."""

    def noisy_sum(self, batch: Batch, residuals: Tensor) -> Tensor:
        return self._noised(self._clipped_sum(batch, residuals))

    def _clipped_sum(self, batch: Batch, residuals: Tensor) -> Tensor:
        return batch.gradient(self._clipped(residuals, _lengths(batch.features, -1)))

    def _projected(self, values: Tensor) -> Tensor:
        return project_afresh(values, self.rank, self.settings.projection, self.hidden)


class NoiseThenProject(DenseMechanism):
    """m2: (sum + noise) M with M fresh. Algorithm 3 of Hu et al. 2026."""

    def noisy_sum(self, batch: Batch, residuals: Tensor) -> Tensor:
        return self._projected(super().noisy_sum(batch, residuals))


class ProjectThenNoise(DenseMechanism):
    """m1: (sum) M + noise with M fresh."""

    def noisy_sum(self, batch: Batch, residuals: Tensor) -> Tensor:
        return self._noised(self._projected(self._clipped_sum(batch, residuals)))


class FrozenFactor(HeadMechanism):
    """lora-fa: B (c x r) is trained and A (r x d) frozen and public. Algorithm 2 of Hu et al. 2026."""

    def _begin(self) -> None:
        self.width = self.rank
        self.factors = gaussian_factors(self.rank, self.columns, self.dtype, self.public)

    def noisy_sum(self, batch: Batch, residuals: Tensor) -> Tensor:
        if self.settings.clip_norm is None:
            return self._noised(batch.gradient(residuals) @ self.factors.mT.double())
        inputs = batch.features @ self.factors.mT  # (N, b, r)
        return self._noised(_summed(self._clipped(residuals, _lengths(inputs, -1)), inputs))

    def weights(self, trained: Tensor) -> Tensor:
        return trained @ self.factors


class UnclippedFactor(HeadMechanism):
    """m2-unclipped: (gradient of B + E A^T) A, A fresh. Algorithm 4 of Hu et al. 2026 (E.2).

    The law of m2 with Wishart projections, from the gradient of B = 0 alone. Nothing is clipped: that one record
    contributes clip_norm at most must hold by itself (`train_heads` checks it). With A^T = Q R, E A^T is (E Q) R, and
    E Q has independent entries.
    """

    def noisy_sum(self, batch: Batch, residuals: Tensor) -> Tensor:
        factors = gaussian_factors(self.rank, self.columns, self.dtype, self.hidden)
        bases, roots = torch.linalg.qr(factors.mT)
        total = self._noised(_summed(residuals, batch.features @ bases))
        return total @ roots @ factors


class ClipInSubspace(HeadMechanism):
    """project-then-clip: the projected gradient is bounded by C sqrt(r / d), surely; any subspace, also a frozen one.

    The update is (d / r) (noisy sum) Q^T, so it has the scale of the full gradient.
    """

    def _begin(self) -> None:
        super()._begin()
        self.bases = self._draw_bases()

    def _draw_bases(self) -> Tensor:
        return orthonormal_bases(self.rank, self.columns, self.dtype, self.public)

    @property
    def bound(self) -> float:
        return float(super().bound * (self.rank / self.columns) ** 0.5)

    def noisy_sum(self, batch: Batch, residuals: Tensor) -> Tensor:
        if self.settings.fresh:
            self.bases = self._draw_bases()
        inputs = batch.features @ self.bases  # (N, b, r)
        total = self._noised(_summed(self._clipped(residuals, _lengths(inputs, -1)), inputs))
        return (total @ self.bases.mT) * (self.columns / self.rank)


MECHANISMS: dict[str, type[HeadMechanism]] = {
    "dp-sgd": DenseMechanism,
    "lora-fa": FrozenFactor,
    "m2": NoiseThenProject,
    "m2-unclipped": UnclippedFactor,
    "m1": ProjectThenNoise,
    "project-then-clip": ClipInSubspace,
}
