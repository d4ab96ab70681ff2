"""LoRA-RITE: an adaptive rule for two factors whose effect on W does not depend on how they are factored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from privlora.coordinates import FactorCoordinates
from privlora.mechanisms import Release
from privlora.optimizers.base import Optimizer
from privlora.optimizers.rate_units import scaled

# Keeps inverse roots finite where no gradient has been.
_TINY = 1e-12
# Smallest second moment that is divided by, relative to the largest of its module: without noise, directions in which
# there was no gradient hold rounding only. (The authors add 1e-6 to the root, which depends on the gradient's unit.)
_LEAST = 1e-4


@dataclass
class _Side:
    """Moments of one factor (rows, r), kept in the orthonormal basis of the other factor (others, r)."""

    m: Tensor  # (L, rows, r): mean of preconditioned gradients
    v: Tensor  # (L, r, r): second moment of unmagnified gradients
    escaped: Tensor  # (L,): bound on the second moment that turning bases have lost
    basis: Tensor  # (L, others, r): the other factor's basis at the last step


class FactorRite(Optimizer):
    """LoRA-RITE (Yen et al. 2025, Algorithm 1), with second moments that decay and are means over rows (authors' code).

    With right = U R (thin QR), a left gradient becomes unmagnified, g = grad_left R^-1; its moments are carried from
    basis to basis by P = U^T U_old, and left moves by learning_rate * m R^-T with m the mean of
    g (v + escaped I)^-1/2; right likewise. So (left T, right T^-T) gives the same trajectory of W for every invertible
    T. This holds for the rule alone: under privacy, clipping and noise are done on the factors and see T.

    A factor that is zero, or has directions that vanished (below the root of the dtype's precision of its largest
    singular value), gives the other one no gradient there.
    """

    takes_weight_units: ClassVar[bool] = True

    def __init__(self, coordinates: FactorCoordinates, *, beta1: float = 0.9, beta2: float = 0.999) -> None:
        self.coordinates = coordinates
        self.beta1, self.beta2 = beta1, beta2
        self._count = 0
        self._sides = [
            (_fresh(left, right), _fresh(right, left))
            for left, right in zip(coordinates.left, coordinates.right, strict=True)
        ]

    def _update(self, release: Release, learning_rate: float) -> None:
        self._count += 1
        of_groups = zip(self._sides, self.coordinates.trained, release.vector, strict=True)
        for g, (sides, factors, gradients) in enumerate(of_groups):
            bases = [torch.linalg.qr(factor) for factor in factors]
            for k, side in enumerate(sides):
                basis, magnitude = bases[1 - k]
                step = self._step(side, gradients[k], basis, _inverse(magnitude))
                factors[k].sub_(scaled(step, self.weight_units, g), alpha=learning_rate)
        self.coordinates.install()

    def _step(self, side: _Side, gradient: Tensor, basis: Tensor, inverse: Tensor) -> Tensor:
        """The change of a factor; basis (L, others, r) and inverse (L, r, r) = R^-1 are those of the other one."""
        mean_decay, square_decay = (self._decay(beta) for beta in (self.beta1, self.beta2))
        g = gradient @ inverse
        turn = basis.mT @ side.basis
        carried = turn @ side.v @ turn.mT
        lost = (torch.linalg.eigvalsh(side.v) - torch.linalg.eigvalsh(carried)).amax(dim=-1)
        side.escaped = square_decay * (side.escaped + lost.clamp_min(0))
        side.v = torch.lerp(g.mT @ g / g.shape[-2], carried, square_decay)
        preconditioned = g @ _inverse_root(side.v, side.escaped)
        side.m = torch.lerp(preconditioned, side.m @ turn.mT, mean_decay)
        side.basis = basis
        return side.m @ inverse.mT

    def _decay(self, beta: float) -> float:
        """The decay with which a moving average that started at zero is unbiased."""
        return beta * (1 - beta ** (self._count - 1)) / (1 - beta**self._count)

    def state_dict(self) -> dict[str, Tensor]:
        tensors = {"count": torch.tensor(self._count)}
        for name, side in self._named_sides():
            tensors |= {f"{name}.{field.name}": getattr(side, field.name) for field in fields(side)}
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self._count = int(tensors["count"])
        for name, side in self._named_sides():
            for field in fields(side):
                setattr(side, field.name, tensors[f"{name}.{field.name}"].to(side.v))

    def _named_sides(self) -> list[tuple[str, _Side]]:
        return [
            (f"{g}.{name}", side)
            for g, sides in enumerate(self._sides)
            for name, side in zip(("left", "right"), sides, strict=True)
        ]


def _fresh(factor: Tensor, other: Tensor) -> _Side:
    count, _, rank = factor.shape
    return _Side(
        torch.zeros_like(factor),
        factor.new_zeros(count, rank, rank),
        factor.new_zeros(count),
        torch.zeros_like(other),
    )


def _inverse(magnitude: Tensor) -> Tensor:
    return torch.linalg.pinv(magnitude, rtol=torch.finfo(magnitude.dtype).eps ** 0.5)


def _inverse_root(moment: Tensor, escaped: Tensor) -> Tensor:
    """(moment + escaped I)^-1/2, (L, r, r)."""
    w, e = torch.linalg.eigh(moment)
    w = w + escaped[:, None]
    w = torch.maximum(w, (_LEAST * w[:, -1:]).clamp_min(_TINY**2))
    return (e * w.rsqrt()[:, None, :]) @ e.mT
