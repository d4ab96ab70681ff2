"""Where training starts for adapter.init=public-gradient: the directions in which public texts would move the weights.

Each text's gradient G_i (m, n) of every module is divided by its norm over all modules, so that no text dominates, and
U and V of a module are the top singular vectors of the sum G. G itself is never formed: randomised subspace iteration
(Halko, Martinsson and Tropp 2011, algorithms 4.4 and 5.1) asks for products G R and G^T L with thin matrices only, and
these are what the hooks of an adapter with a zero update capture as P and Q. Private records are not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.starts import Subspaces
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.errors import DataError
from privlora.geometry.fixed_rank import point_from_factors
from privlora.randomness import counter_generator
from privlora.training.footprint import row_tokens
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients

_OVERSAMPLING = 8
_POWER_ITERATIONS = 1
_TINY = 1e-30  # a norm whose inverse float32 can hold


def mean_gradient_subspaces(
    adapter: LowRankAdapter, texts: Examples, *, seed: int, max_tokens: int
) -> Subspaces:
    """Site name -> orthonormal U (m, r), V (n, r): top singular vectors of the mean normalised gradient; float64, CPU.

    The texts go through the model four times, in micro-batches of at most ``max_tokens`` and without dropout. A text's
    norm is estimated in the first pass: for R (n, k) standard normal, ||G_i R||^2 / k has mean ||G_i||^2 and a relative
    standard deviation of at most sqrt(2 / k), where k is r + 8 or the module's smaller side; summed over modules it is
    less. A text whose gradient is zero or not finite counts nothing. A module that no text moves gets a random start.

    adapter: detached, and left so; its operands are overwritten. seed: public.

    Raises DataError if no text has a gradient that is finite and not zero.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = []  # (L, n, k) of each group
    for g in adapter.groups:
        k = min(adapter.rank + _OVERSAMPLING, g.m, g.n)
        normal.append(torch.randn(len(g.sites), g.n, k, generator=generator, dtype=torch.float64))
    with training_passes(adapter.model, counter_generator(seed)), adapter:
        gradient = _SumOfGradients(adapter, texts, max_tokens)
        left = _bases(gradient.times(normal))
        for _ in range(_POWER_ITERATIONS):
            left = _bases(gradient.times(_bases(gradient.transposed_times(left))))
        products = gradient.transposed_times(left)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for group, basis, product in zip(adapter.groups, left, products, strict=True):
        v, s, wh = torch.linalg.svd(product, full_matrices=False)  # G is about basis product^T
        u, s, v = (basis @ wh.mT)[..., : adapter.rank], s[:, None, : adapter.rank], v[..., : adapter.rank]
        point = point_from_factors(u * s, v * s, generator)  # draws what a zero gradient lacks
        found |= {site.name: (point.U[i], point.V[i]) for i, site in enumerate(group.sites)}
    return found


def _bases(products: list[Tensor]) -> list[Tensor]:
    return [torch.linalg.qr(product).Q for product in products]


@dataclass
class _SumOfGradients:
    """G = sum_i G_i / ||G_i|| of every module, as products with thin matrices, one of each group: (L, n or m, k)."""

    adapter: LowRankAdapter
    texts: Examples
    max_tokens: int
    weights: Tensor | None = field(default=None, init=False)  # (texts,) 1 / ||G_i||, from the first product

    def times(self, right: list[Tensor]) -> list[Tensor]:
        """G right, (L, m, k). The first time, right must be standard normal: it gives the norms."""
        pairs = zip(self.adapter.groups, right, strict=True)
        left = [t.new_zeros(t.shape[0], g.m, t.shape[-1]) for g, t in pairs]
        return self._product(left, right, transposed=False)

    def transposed_times(self, left: list[Tensor]) -> list[Tensor]:
        """G^T left, (L, n, k)."""
        pairs = zip(self.adapter.groups, left, strict=True)
        right = [t.new_zeros(t.shape[0], g.n, t.shape[-1]) for g, t in pairs]
        return self._product(left, right, transposed=True)

    def _product(self, left: list[Tensor], right: list[Tensor], *, transposed: bool) -> list[Tensor]:
        for group, a, b in zip(self.adapter.groups, left, right, strict=True):
            self.adapter.install(group, a, a.new_zeros(a.shape[0], a.shape[-1]), b)
        weights = torch.zeros(len(self.texts), dtype=torch.float64) if self.weights is None else self.weights
        sums = [torch.zeros((), dtype=torch.float64) for _ in self.adapter.sites]
        tokens, device = row_tokens(self.adapter), self.adapter.device
        for batch in sequential_batches(
            self.texts, max_tokens=self.max_tokens, row_tokens=tokens, device=device
        ):
            captured, _ = micro_batch_gradients(self.adapter, batch)
            captured.zero(~captured.finite())
            if self.weights is None:
                weights[batch.record_index] = _inverse_norms(captured)
            mine = weights[batch.record_index]
            for site, t in enumerate(captured.q if transposed else captured.p):
                sums[site] = sums[site] + torch.tensordot(mine.to(t), t, dims=1).cpu().double()
        if not bool(weights.any()):
            raise DataError(
                f"no gradient of the {len(self.texts)} texts of adapter.public_text is finite and other than zero",
                fix="give records like the private ones, with something to predict",
            )
        self.weights = weights
        rest = iter(sums)  # sites are groups laid end to end
        return [torch.stack([next(rest) for _ in group.sites]) for group in self.adapter.groups]


def _inverse_norms(captured: Captured) -> Tensor:
    """1 / ||G_i|| over all modules from P_i = G_i R with standard normal R, (units,); 0 for a zero gradient."""
    squares = [p.double().square().sum(dim=(-2, -1)) / p.shape[-1] for p in captured.p]
    norms = torch.stack(squares).sum(dim=0).sqrt().cpu()
    return torch.where(norms > _TINY, 1 / norms, 0.0)
