"""Other places for clipping and noise than the span of public gradients: before the projection, and on both parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Coordinates, Sums, Vector
from privlora.coordinates.evened import Evened
from privlora.coordinates.public_span import Rows
from privlora.coordinates.span import EncodedSpace, SpanSpace, flattened
from privlora.coordinates.tangent import TangentCoordinates

_ROOT_2 = 2**0.5


class ProjectedSpanCoordinates(SpanSpace):
    """Units are clipped and noised in inner's coordinates; what is released is then drawn towards the span.

    A released vector v becomes P v + beside (v - P v) with P = G^T U (L + eta)^-1 U^T G, which without a ridge is the
    projection on the leading directions of the public gradients. beside = 0 throws away what the span does not see
    (PDP-SGD, Zhou et al. 2021); 1 leaves v as it is. Noise reaches all of inner's coordinates, so a unit that the span
    hardly sees is drowned, while one that it sees loses nothing. All of it is post-processing.
    """

    def __init__(
        self, inner: Coordinates, *, ridge: float = 0.0, top_k: float = 50, beside: float = 0.0
    ) -> None:
        super().__init__(inner, ridge=ridge, top_k=top_k)
        self.beside = beside

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        return cls.inner_kind.dimension_of(adapter)

    def norm_floor(self) -> float:
        return self.span.least_length()

    def norms_squared(self, captured: Captured) -> Tensor:
        return self.inner.norms_squared(captured)

    def module_norms_squared(self, captured: Captured) -> Tensor:
        return self.inner.module_norms_squared(captured)

    def evened(self, captured: Captured) -> Evened:
        return self.inner.evened(captured)

    def to_vector(self, sums: Sums) -> Vector:
        return self.inner.to_vector(sums)

    def nearest(self, vector: Vector) -> Vector:
        return self.inner.nearest(vector)

    def frame(self) -> dict[str, Tensor]:
        return self.inner.frame()

    def followed(self, vector: Vector, frame: Mapping[str, Tensor]) -> Vector:
        return self.inner.followed(vector, frame)

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return self.inner.standard_normal(draw)

    def decode(self, vector: Vector) -> Vector:
        along = self.span.back(self._products(vector), -1.0)
        if not self.beside:
            return self._decoded(along)
        return self._decoded(along.mul_(1 - self.beside).add_(flattened(vector).to(along), alpha=self.beside))

    def scores(self, vector: Vector) -> Tensor:
        return self.span.of_texts(self._products(vector), -1.0).abs()

    def decoded_std(self, noise_std: float) -> float:
        seen = self.span.values * self.span.power(-1.0)
        kept = self.beside + (1 - self.beside) * seen
        others = self.inner.dimension - len(seen)
        return (
            noise_std * ((float(kept.square().sum()) + others * self.beside**2) / self.inner.dimension) ** 0.5
        )

    def _products(self, vector: Vector) -> Tensor:
        return self.span.along(flattened(vector)[None], 0.0)[0]


class TangentProjectedSpanCoordinates(ProjectedSpanCoordinates):
    """The same on what PRISM releases: tangent coordinates, which do not depend on factors."""

    inner_kind = TangentCoordinates

    def __init__(
        self, inner: Coordinates, *, ridge: float = 0.0, top_k: float = 0, beside: float = 0.3
    ) -> None:
        super().__init__(inner, ridge=ridge, top_k=top_k, beside=beside)


class ResidualSpanCoordinates(EncodedSpace):
    """Gradient embedding perturbation (Yu et al. 2021): what the span sees of a unit, and what it does not.

    With V (p, k) the leading directions of the public gradients a unit's gradient h becomes
    (cl(V^T h; C0) / C0, cl(h - V V^T h; C1) / C1) / sqrt(2) with cl(v; c) = v min(1, c / |v|): one vector of norm 1 at
    most, in k + p numbers, and one Gaussian mechanism. Both parts are of one batch, so accounting them as two
    subsampled mechanisms would claim too little.

    Normalised clipping scales that vector by C and by nothing else: what is decoded is C times the estimate of GEP.
    """

    embedding_clip = 1.0
    """C0, in units of gradients."""
    residual_clip = 0.2
    """C1."""

    def __init__(self, inner: Coordinates, *, top_k: float = 50) -> None:
        super().__init__(inner, ridge=0.0, top_k=top_k)

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        """p: without the k numbers of the embedding, which an adapter does not know."""
        return cls.inner_kind.dimension_of(adapter)

    @property
    def dimension(self) -> int:
        return self.span.size + self.inner.dimension

    def norm_floor(self) -> float:
        """1, which no unit's norm exceeds: all are scaled alike."""
        return 1.0

    def encode(self, captured: Captured) -> Captured:
        columns = self._columns(captured)
        parts = [
            part / (_ROOT_2 * part.norm(dim=1, keepdim=True)).clamp_min(1.0)
            for part in columns.split([self.span.size, columns.shape[1] - self.span.size], dim=1)
        ]
        return replace(captured, columns=torch.cat(parts, dim=1))

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return [(draw((self.span.size,)),), *self.inner.standard_normal(draw)]

    def decode(self, vector: Vector) -> Vector:
        along = self.span.back(self._embedding(vector), -0.5)
        beside = _ROOT_2 * self.residual_clip * flattened(vector[1:]).to(along)
        return self._decoded(along + beside)

    def scores(self, vector: Vector) -> Tensor:
        return self.span.of_texts(self._embedding(vector), -0.5).abs()

    def decoded_std(self, noise_std: float) -> float:
        share = float(self.span.power(0.0).sum()) / self.inner.dimension
        return noise_std * _ROOT_2 * (self.embedding_clip**2 * share + self.residual_clip**2) ** 0.5

    def _embedding(self, vector: Vector) -> Tensor:
        return _ROOT_2 * self.embedding_clip * vector[0][0].double()

    @property
    def _copies(self) -> int:
        """As captured; in float64, which is twice as much, as it is, without what the span sees, and as a column."""
        return 7

    def _columns_of(self, rows: Rows) -> Tensor:
        seen = self.span.along(rows, -0.5)
        vectors = rows.joined()
        rest = torch.stack([h - self.span.back(e, -0.5).to(h) for h, e in zip(vectors, seen, strict=True)])
        return torch.cat([seen.to(rest) / self.embedding_clip, rest / self.residual_clip], dim=1) / _ROOT_2

    def _shaped(self, column: Tensor) -> Vector:
        size = self.span.size
        return [(column[:size],), *self._unflattened(column[size:])]
