"""The span of public gradients: what a few hundred public texts say of where private gradients lie. Tensors only.

G (N, p) holds the gradients of N public texts at the present state, in coordinates of p numbers. Everything that spans
need of it follows from the eigenvectors of the Gram matrix K = G G^T = U diag(l) U^T, which is N by N, so nothing of
size p by p is ever formed and G is kept once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.coordinates.base import float64_device
from privlora.errors import DataError

_COLUMNS = 65536  # of G that are in float64 at a time
# Eigenvalues below this part of the largest are rounding: public gradients do not span those directions.
_NEGLIGIBLE = 1e-12
# Of a typical public gradient: a unit whose norm is below this part of it has no direction to speak of.
_LEAST = 1e-3


@dataclass(frozen=True)
class PublicGradients:
    """G, (N, p) in any floating-point dtype: row j is the gradient of public text j. Products are float64.

    Raises DataError unless all entries are finite and one is other than zero.
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        sizes = (
            torch.linalg.vector_norm(self.matrix, float("inf"), dim=1)
            if self.matrix.numel()
            else torch.zeros(1)
        )
        if not bool(sizes.isfinite().all()) or not bool(sizes.any()):
            raise DataError(
                f"no direction is spanned by the gradients of {len(self.matrix)} public texts: they are zero, or one "
                "is not finite",
                fix="give texts like the private ones, with something to predict, and lower method.learning_rate if "
                "the loss is lost",
            )

    def gram(self) -> Tensor:
        """K = G G^T, (N, N) float64."""
        total = self._zeros(len(self.matrix), len(self.matrix))
        for _, part in self._parts():
            total.addmm_(part, part.mT)
        return total

    def cosines(self) -> Tensor:
        """Of each pair of rows, (N, N) float64; NaN where a row is zero."""
        gram = self.gram()
        lengths = gram.diagonal().sqrt()
        return gram / lengths / lengths[:, None]

    def some(self, rows: list[int]) -> PublicGradients:
        """These rows alone."""
        return PublicGradients(self.matrix[rows])

    def times(self, vectors: Tensor) -> Tensor:
        """G h for each h of (units, p): (units, N) float64. Each by itself, so no bit of it depends on the others."""
        found = [self._zeros(len(self.matrix)) for _ in vectors]
        for columns, part in self._parts():
            found = [
                total + part @ h[columns].to(part) for total, h in zip(found, vectors.unbind(), strict=True)
            ]
        return torch.stack(found) if found else self._zeros(0, len(self.matrix))

    def combined(self, coefficients: Tensor) -> Tensor:
        """G^T z for (N,) coefficients z: (p,) float64."""
        parts = [part.mT @ coefficients.to(part) for _, part in self._parts()]
        return torch.cat(parts)

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        device = float64_device(self.matrix.device)
        for start in range(0, self.matrix.shape[1], _COLUMNS):
            columns = slice(start, start + _COLUMNS)
            yield columns, self.matrix[:, columns].to(device).double()

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=float64_device(self.matrix.device))


class Span:
    """The k leading directions of public gradients, and powers of a ridge-regularised Gram matrix along them.

    ridge: eta = ridge tr(K) / N. top_k: at most so many directions; 0 for all. Eigenvalues that are rounding count as
    directions, in which no gradient is seen. gram: K, where it is at hand.
    """

    def __init__(
        self, gradients: PublicGradients, *, ridge: float, top_k: int, gram: Tensor | None = None
    ) -> None:
        self.gradients = gradients
        values, vectors = torch.linalg.eigh(gradients.gram() if gram is None else gram)
        kept = min(top_k or len(values), len(values))
        self.values = values.flip(0)[:kept].clamp_min(0)  # (k,) l, descending
        self.vectors = vectors.flip(1)[:, :kept]  # (N, k) U
        self._eta = ridge * float(values.clamp_min(0).mean())
        self._seen = self.values > _NEGLIGIBLE * self.values[0]

    @property
    def size(self) -> int:
        """k."""
        return len(self.values)

    def power(self, exponent: float) -> Tensor:
        """(l + eta)^exponent, (k,); 0 in directions that no public gradient has."""
        shifted = torch.where(self._seen, self.values + self._eta, 1.0)
        return torch.where(self._seen, shifted**exponent, 0.0)

    def along(self, vectors: Tensor, exponent: float) -> Tensor:
        """diag((l + eta)^exponent) U^T G h for each h of (units, p): (units, k) float64, each by itself."""
        weights = self.power(exponent)[:, None] * self.vectors.mT  # (k, N)
        rows = [weights @ products for products in self.gradients.times(vectors).unbind()]
        return torch.stack(rows) if rows else weights.new_zeros(0, self.size)

    def of_texts(self, y: Tensor, exponent: float) -> Tensor:
        """U diag((l + eta)^exponent) y, (N,): a coefficient for each public text."""
        return self.vectors @ (self.power(exponent) * y.to(self.vectors))

    def back(self, y: Tensor, exponent: float) -> Tensor:
        """G^T U diag((l + eta)^exponent) y, (p,) float64."""
        return self.gradients.combined(self.of_texts(y, exponent))

    def least_norm(self, exponent: float) -> float:
        """1e-3 of the median norm that the public gradients themselves have under ``along``. Public, above 0."""
        seen = self.vectors * (self.power(exponent) * self.values)  # U^T K = diag(l) U^T
        return _least_of(seen.norm(dim=1))

    def least_length(self) -> float:
        """1e-3 of the median norm of the public gradients. Public, above 0."""
        return _least_of((self.vectors.square() @ self.values).sqrt())


def _least_of(norms: Tensor) -> float:
    return _LEAST * float(norms[norms > 0].median())
