"""The span of public gradients: what a few hundred public texts say of where private gradients lie. Tensors only.

G (N, p) holds the gradients of N public texts at the present state, in coordinates of p numbers. Everything that spans
need of it follows from the eigenvectors of the Gram matrix K = G G^T = U diag(l) U^T, which is N by N, so nothing of
size p by p is ever formed and G is kept once.

G h is taken for many units in one matrix product, and no unit's is to depend on the others. Libraries promise no order
of summation: it changes with how many units there are, where one stands and how its memory is aligned. So here no order
makes a difference. In blocks of 2048 columns, every row of G is rounded to whole multiples of 2^-24 of the power of two
above its largest entry there, and every h to 2^-18 of its own. A product of two entries is then a whole number of units
2^-42, and any partial sum of a block at most 2^(24 + 18 + 11) = 2^53 of them, all of which float64 holds: its sums are
exact in any order, on any machine. Blocks are added one after the other, each number by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from privlora.coordinates.base import float64_device
from privlora.errors import DataError

_BLOCK = 2048  # columns of G that are in float64 at a time
_BITS, _UNIT_BITS = 24, 18  # of a row of G and of a unit; with the 11 of a block's columns, those of float64
# Entries above are as good as infinite; those of blocks below are rounded coarsely. No product leaves float64's range.
_LEAST_EXPONENT, _HUGE_EXPONENT = -100, 400
_HUGE = 2.0**_HUGE_EXPONENT
# Eigenvalues below this part of the largest are rounding: public gradients do not span those directions.
_NEGLIGIBLE = 1e-12
# Of a typical public gradient: a unit whose norm is below this part of it has no direction to speak of.
_LEAST = 1e-3


@dataclass(frozen=True)
class PublicGradients:
    """G, (N, p) in any floating-point dtype: row j is the gradient of public text j. Products are float64.

    matrix: taken over; below float64 it is rounded where it lies, by about as much as float32 rounds. It may be in
    another memory than that of ``device``, where products are taken (None: where it lies).

    Raises DataError unless all entries are finite and one is other than zero.
    """

    matrix: Tensor
    device: torch.device | None = None
    _gram: list[Tensor] = field(default_factory=list, repr=False, compare=False)  # K, once it was asked for

    def __post_init__(self) -> None:
        largest = self._zeros(len(self.matrix), 1)
        for columns, part in self._parts():
            sizes = _sizes(part)
            largest = torch.maximum(largest, sizes)
            if self.matrix.dtype != torch.float64:
                self.matrix[:, columns].copy_(_on_grid_(part, sizes, _BITS))
        if not bool((largest < _HUGE).all()) or not bool(largest.any()):
            raise DataError(
                f"no direction is spanned by the gradients of {len(self.matrix)} public texts: they are zero, or one "
                "is not finite",
                fix="give texts like the private ones, with something to predict, and lower method.learning_rate if "
                "the loss is lost",
            )

    def gram(self) -> Tensor:
        """K = G G^T, (N, N) float64."""
        if not self._gram:
            total = self._zeros(len(self.matrix), len(self.matrix))
            halves = [slice(0, len(total) // 2), slice(len(total) // 2, len(total))]
            for _, part in self._parts():
                for rows in halves:  # the rest follows by symmetry
                    total[rows, : rows.stop].addmm_(part[rows], part[: rows.stop].mT)
            lower = total.tril()
            self._gram.append(lower + lower.tril(-1).mT)
        return self._gram[0]

    def cosines(self) -> Tensor:
        """Of each pair of rows, (N, N) float64; NaN where a row is zero."""
        gram = self.gram()
        lengths = gram.diagonal().sqrt()
        return gram / lengths / lengths[:, None]

    def some(self, rows: list[int]) -> PublicGradients:
        """These rows alone."""
        found = PublicGradients(self.matrix[rows], self.device)
        found._gram.extend(gram[rows][:, rows] for gram in self._gram)
        return found

    def times(self, vectors: Tensor) -> Tensor:
        """G h for each h of (units, p): (units, N) float64. No bit of one depends on the others, see above.

        NaN where h is not finite. In each block of columns h is rounded to 2^-18 of its largest entry there; beside
        float64 matrices, to 2^-54 and G to 2^-48, in pieces for each of which the same holds.
        """
        total = self._zeros(len(vectors), len(self.matrix))
        lost = torch.zeros(len(vectors), 1, dtype=torch.bool, device=total.device)
        double = self.matrix.dtype == torch.float64
        for columns, part in self._parts():
            block = vectors[:, columns].to(part, copy=True)
            unseen = ~(_sizes(block) < _HUGE)
            lost |= unseen
            block.masked_fill_(
                unseen, 0.0
            )  # NaN times 0 would reach others, should a kernel work on several at once
            rows = _pieces(part, _BITS, 2) if double else [part]
            for piece in _pieces(block, _UNIT_BITS, 3 if double else 1):
                for row in rows:
                    total += piece @ row.mT
        return total.masked_fill(lost, float("nan"))

    def combined(self, coefficients: Tensor) -> Tensor:
        """G^T z for (N,) coefficients z: (p,) float64."""
        z = coefficients.to(self._zeros(0))
        return torch.cat([z @ part for _, part in self._parts()])

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of columns in float64, each until the next is asked for."""
        width = min(_BLOCK, self.matrix.shape[1])
        buffer = self._zeros(len(self.matrix), width)
        for start in range(0, self.matrix.shape[1], _BLOCK):
            columns = slice(start, start + _BLOCK)
            block = self.matrix[:, columns]
            yield columns, buffer[:, : block.shape[1]].copy_(block)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(
            shape, dtype=torch.float64, device=float64_device(self.device or self.matrix.device)
        )


def _sizes(block: Tensor) -> Tensor:
    """The largest entry of each row, without sign: (rows, 1); NaN where one is NaN."""
    return torch.maximum(block.amax(dim=1, keepdim=True), -block.amin(dim=1, keepdim=True))


def _on_grid_(block: Tensor, sizes: Tensor, bits: int) -> Tensor:
    """Round, in place, each row of a float64 block to whole multiples of 2^(e - bits), 2^e above its ``sizes``."""
    exponents = torch.frexp(sizes).exponent.clamp(_LEAST_EXPONENT, _HUGE_EXPONENT) - bits
    return block.mul_(_power_of_two(-exponents)).round_().mul_(_power_of_two(exponents))


def _power_of_two(exponents: Tensor) -> Tensor:
    """In float64, made of its bits: torch.ldexp goes by way of pow, which need not be exact."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def _pieces(block: Tensor, bits: int, count: int) -> list[Tensor]:
    """Blocks on grids of so many bits each that add up to ``block`` but for the last one's rounding."""
    found = []
    for _ in range(count - 1):
        found.append(_on_grid_(block.clone(), _sizes(block), bits))
        block = block - found[-1]
    return [*found, _on_grid_(block, _sizes(block), bits)]


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
        # Each in memory of its own, so that all are aligned alike.
        rows = [weights @ products.clone() for products in self.gradients.times(vectors).unbind()]
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
