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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.coordinates.base import float64_device
from privlora.errors import DataError

_BLOCK = 2048  # columns of G that are in float64 at a time
_STRIP = 40  # rows of G that meet all later ones at a time: 0.6 of the work of a whole Gram matrix
_BITS, _UNIT_BITS = 24, 18  # of a row of G and of a unit; with the 11 of a block's columns, those of float64
# Entries above are as good as infinite; those of blocks below are rounded coarsely. No product leaves float64's range.
_LEAST_EXPONENT, _HUGE_EXPONENT = -100, 400
_HUGE = 2.0**_HUGE_EXPONENT
# Eigenvalues below this part of the largest are rounding: public gradients do not span those directions.
_NEGLIGIBLE = 1e-12
# Of a typical public gradient: a unit whose norm is below this part of it has no direction to speak of.
_LEAST = 1e-3


@dataclass(frozen=True)
class Rows:
    """Gradients of several units, end to end in ``pieces`` (units, width) that lie apart, all to be times ``scale``.

    They are read in blocks of columns where they lie: laid end to end they would take as much memory again.
    """

    pieces: Sequence[Tensor]
    scale: float = 1.0

    def __len__(self) -> int:
        return len(self.pieces[0])

    def joined(self) -> Tensor:
        """(units, p) float64."""
        return torch.cat([piece.double() for piece in self.pieces], dim=1).mul_(self.scale)

    def blocks(self, width: int) -> Iterator[list[Tensor]]:
        """Views that make up so many columns after the other, the last fewer."""
        found, room = list[Tensor](), width
        for piece in self.pieces:
            start = 0
            while start < piece.shape[1]:
                found.append(piece[:, start : start + room])
                start += found[-1].shape[1]
                room -= found[-1].shape[1]
                if not room:
                    yield found
                    found, room = [], width
        if found:
            yield found


class PublicGradients:
    """G, (N, p) in any floating-point dtype: row j is the gradient of public text j. Products are float64.

    matrix: taken over; below float64 it is rounded where it lies, by about as much as float32 rounds. device: where
    products are taken, if not where the matrix lies.

    Raises DataError unless all entries are finite and one is other than zero.
    """

    def __init__(self, matrix: Tensor, device: torch.device | None = None) -> None:
        self.matrix, self.device = matrix, device or matrix.device
        largest = self._zeros(len(matrix), 1)
        total = self._zeros(len(matrix), len(matrix))
        for sizes, part in self._rounded():
            largest = torch.maximum(largest, sizes)
            for start in range(0, len(matrix), _STRIP):  # the rest follows by symmetry
                rows = part[start:]
                total[start:, start : start + _STRIP].addmm_(rows, rows[:_STRIP].mT)
        if not bool((largest < _HUGE).all()) or not bool(largest.any()):
            raise DataError(
                f"no direction is spanned by the gradients of {len(matrix)} public texts: they are zero, or one "
                "is not finite",
                fix="give texts like the private ones, with something to predict, and lower method.learning_rate if "
                "the loss is lost",
            )
        lower = total.tril()
        self._gram = lower + lower.tril(-1).mT

    def gram(self) -> Tensor:
        """K = G G^T, (N, N) float64."""
        return self._gram

    def cosines(self) -> Tensor:
        """Of each pair of rows, (N, N) float64; NaN where a row is zero."""
        lengths = self._gram.diagonal().sqrt()
        return self._gram / lengths / lengths[:, None]

    def keep(self, rows: Sequence[int]) -> None:
        """These rows alone, in ascending order; they move up where they lie, so that nothing is held twice."""
        for place, row in enumerate(rows):
            if place != row:
                self.matrix[place] = self.matrix[row]
        kept = list(rows)
        self.matrix, self._gram = self.matrix[: len(kept)], self._gram[kept][:, kept]

    def times(self, vectors: Tensor | Rows) -> Tensor:
        """G h for each h of (units, p): (units, N) float64. No bit of one depends on the others, see above.

        NaN where h is not finite. In each block of columns h is rounded to 2^-18 of its largest entry there; with
        float64 matrices, to 2^-54 and G to 2^-48, in pieces for each of which the same holds.
        """
        given = vectors if isinstance(vectors, Rows) else Rows([vectors])
        # Kernels are nearly twice as fast on (N, few) as on (few, N).
        total = self._zeros(len(self.matrix), len(given))
        lost = torch.zeros(len(given), 1, dtype=torch.bool, device=total.device)
        double = self.matrix.dtype == torch.float64
        buffer = self._zeros(len(given), min(_BLOCK, self.matrix.shape[1]))
        for part, views in zip(self._parts(), given.blocks(_BLOCK), strict=True):
            block, start = buffer[:, : part.shape[1]], 0
            for view in views:
                block[:, start : start + view.shape[1]] = view
                start += view.shape[1]
            unseen = ~(_sizes(block) < _HUGE)
            lost |= unseen
            # NaN times 0 would reach others, should a kernel work on several at once.
            block.masked_fill_(unseen, 0.0)
            rows = _pieces(part, _BITS, 2) if double else [part]
            for piece in _pieces(block, _UNIT_BITS, 3 if double else 1):
                for row in rows:
                    total += row @ piece.mT  # never added to within the product, whose sums would then round
        return total.mT.mul(given.scale).masked_fill(lost, float("nan"))

    def combined(self, coefficients: Tensor) -> Tensor:
        """G^T z for (N,) coefficients z: (p,) float64."""
        z = coefficients.to(self._gram)
        found = self._zeros(self.matrix.shape[1])
        for part, out in zip(self._parts(), found.split(_BLOCK), strict=True):
            torch.mv(part.mT, z, out=out)
        return found

    def _blocks(self) -> Iterator[Tensor]:
        """Views of so many columns each."""
        for start in range(0, self.matrix.shape[1], _BLOCK):
            yield self.matrix[:, start : start + _BLOCK]

    def _parts(self) -> Iterator[Tensor]:
        """Blocks of columns in float64, each until the next is asked for."""
        buffer = self._zeros(len(self.matrix), min(_BLOCK, self.matrix.shape[1]))
        for block in self._blocks():
            yield buffer[:, : block.shape[1]].copy_(block)

    def _rounded(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same once they are on their grids, to which the matrix is rounded, with the ``_sizes`` of their rows."""
        if self.matrix.dtype == torch.float64:
            yield from ((_sizes(part), part) for part in self._parts())
            return
        buffer = self._zeros(len(self.matrix), min(_BLOCK, self.matrix.shape[1]))
        for block in self._blocks():
            # Rounded in float32, which holds such numbers and all steps to them; half as many bytes to move.
            short = block.to(buffer.device, torch.float32)
            sizes = _sizes(short)
            _on_grid_(short, sizes, _BITS)
            if short is not block:
                block.copy_(short)
            yield sizes.double(), buffer[:, : block.shape[1]].copy_(short)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=float64_device(self.device))


def _sizes(block: Tensor) -> Tensor:
    """The largest entry of each row, without sign: (rows, 1); NaN where one is NaN."""
    return torch.maximum(block.amax(dim=1, keepdim=True), -block.amin(dim=1, keepdim=True))


def _on_grid_(block: Tensor, sizes: Tensor, bits: int) -> Tensor:
    """Round, in place, each row of a block to whole multiples of 2^(e - bits), 2^e above its ``sizes``.

    The block is float64, or float32 and bits are 24 at most: a number near 2^e is then on the grid as it is.
    """
    exponents = torch.frexp(sizes).exponent.clamp(_LEAST_EXPONENT, _HUGE_EXPONENT) - bits
    there, back = (_power_of_two(e).to(block.dtype) for e in (-exponents, exponents))
    return block.mul_(there).round_().mul_(back)


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

    def parts(self) -> dict[str, Tensor]:
        """All that it is made of, to be taken over by ``of_parts`` to the bit."""
        eta = torch.tensor(self._eta, dtype=torch.float64)
        return {"matrix": self.gradients.matrix, "values": self.values, "vectors": self.vectors, "eta": eta}

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor], device: torch.device) -> Span:
        """The span that gave ``parts``, with products on ``device``; decomposed anew it might differ in a last bit."""
        gradients = PublicGradients(parts["matrix"], device)
        span = cls.__new__(cls)
        there = gradients.gram().device
        span.gradients, span._eta = gradients, float(parts["eta"])
        span.values, span.vectors = parts["values"].to(there), parts["vectors"].to(there)
        span._seen = span.values > _NEGLIGIBLE * span.values[0]
        return span

    @property
    def size(self) -> int:
        """k."""
        return len(self.values)

    def power(self, exponent: float) -> Tensor:
        """(l + eta)^exponent, (k,); 0 in directions that no public gradient has."""
        shifted = torch.where(self._seen, self.values + self._eta, 1.0)
        return torch.where(self._seen, shifted**exponent, 0.0)

    def along(self, vectors: Tensor | Rows, exponent: float) -> Tensor:
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
