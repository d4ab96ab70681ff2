"""Coordinates of a classifier: those of its adapter in any space, and the entries of its last layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.adapters.headed import HeadedAdapter
from privlora.coordinates.base import Coordinates, ReleaseLaw, Sums, Vector
from privlora.coordinates.evened import Evened
from privlora.coordinates.factors import OneFactorCoordinates

# A body whose norm is below this part of the head's is brought up less by roots: it may be the head's rounding.
_LEAST = 1e-4


@dataclass(frozen=True)
class _BothEvened:
    """`Evened` of both parts. weights: (units,), what the body's is multiplied by. PRIVATE."""

    body: Evened
    head: Evened
    weights: Tensor
    norms_squared: Tensor
    raw_squared: Tensor


class HeadedCoordinates(Coordinates):
    """``body`` in the space of a method, and the last layer W_h = W_h0 + B^T in B (features, outputs), end to end.

    One norm is that of both: ||unit||^2 = ||body||^2 + ||B||^2, where B is the whole gradient of W_h, since the frozen
    factor is the identity. So a unit's whole contribution is clipped to C, and noise of the same size lies on both.
    """

    def __init__(self, adapter: HeadedAdapter, body: Coordinates) -> None:
        super().__init__(adapter, body.dtype)
        self.headed, self.body = adapter, body
        site = adapter.head.sites[0]
        identity = torch.eye(site.m, dtype=body.dtype, device=adapter.device)[None]
        zero = torch.zeros(1, site.n, site.m, dtype=body.dtype, device=adapter.device)
        self.head = OneFactorCoordinates(adapter.head, [(identity, zero)], 1.0, body.dtype, side="right")
        self.intrinsic = body.intrinsic
        self.memory = body.memory

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        raise NotImplementedError("it depends on the body's space: ask an object")

    @property
    def dimension(self) -> int:
        return self.body.dimension + self.head.dimension

    @property
    def event_layers(self) -> tuple[tuple[int, int], ...]:
        return self.body.event_layers

    def expect(self, law: ReleaseLaw) -> None:
        self.body.expect(law)

    def taken(self) -> list[dict[str, float]]:
        return self.body.taken()

    def prepare(self) -> None:
        self.body.prepare()

    def rows_at_once(self) -> int | None:
        return self.body.rows_at_once()

    def norms_squared(self, captured: Captured) -> Tensor:
        body, head = self.headed.split(captured)
        return self.body.norms_squared(body) + self.head.norms_squared(head)

    def module_norms_squared(self, captured: Captured) -> Tensor:
        body, head = self.headed.split(captured)
        return torch.cat([self.body.module_norms_squared(body), self.head.module_norms_squared(head)])

    def evened(self, captured: Captured) -> Any:
        """Both parts after step one of spectral clipping; where one is not finite, neither counts."""
        one, other = self.headed.split(captured)
        body, head = self.body.evened(one), self.head.evened(other)
        weights = (body.raw_squared / (_LEAST**2 * head.raw_squared)).clamp(max=1.0)
        weights = torch.where(head.raw_squared > 0, weights, 1.0)
        return _BothEvened(
            body,
            head,
            weights,
            weights.square() * body.norms_squared + head.norms_squared,
            body.raw_squared + head.raw_squared,
        )

    def evened_sum(self, evened: Any, weights: Tensor) -> Sums:
        # A unit that spoils one part has the weight 0, and 0 times what is not finite is not 0.
        of_body = torch.where(weights > 0, weights * evened.weights, 0.0)
        return [
            *self.body.evened_sum(evened.body, of_body),
            *self.head.evened_sum(evened.head, weights),
        ]

    def norm_floor(self) -> float:
        return self.body.norm_floor()

    def to_vector(self, sums: Sums) -> Vector:
        body, head = self._parted(sums)
        return [*self.body.to_vector(body), *self.head.to_vector(head)]

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return [*self.body.standard_normal(draw), *self.head.standard_normal(draw)]

    def frame(self) -> dict[str, Tensor]:
        both = {"body": self.body.frame(), "head": self.head.frame()}
        return {f"{part}/{name}": tensor for part, frame in both.items() for name, tensor in frame.items()}

    def followed(self, vector: Vector, frame: Mapping[str, Tensor]) -> Vector:
        body, head = self._parted(vector)
        own = [
            {name.removeprefix(part): t for name, t in frame.items() if name.startswith(part)}
            for part in ("body/", "head/")
        ]
        return [*self.body.followed(body, own[0]), *self.head.followed(head, own[1])]

    def nearest(self, vector: Vector) -> Vector:
        body, head = self._parted(vector)
        return [*self.body.nearest(body), *self.head.nearest(head)]

    def weighted_sum(self, captured: Captured, weights: Tensor) -> Sums:
        body, head = self.headed.split(captured)
        whole = weights.dim() == 1
        own, other = (weights, weights) if whole else (weights[: len(body.p)], weights[len(body.p) :])
        return [*self.body.weighted_sum(body, own), *self.head.weighted_sum(head, other)]

    def pull_back(self, vector: Vector) -> Sums:
        body, head = self._parted(vector)
        return [*self.body.pull_back(body), *self.head.pull_back(head)]

    def released_share(self, captured: Captured) -> Tensor:
        body, head = self.headed.split(captured)
        own, other = self.body.norms_squared(body).cpu(), self.head.norms_squared(head).cpu()
        whole = (own + other).clamp_min(torch.finfo(torch.float64).tiny)
        return (self.body.released_share(body) * own + other) / whole

    def weight_effect(self, vector: Vector) -> list[tuple[Tensor, Tensor]]:
        body, head = self._parted(vector)
        return [*self.body.weight_effect(body), *self.head.weight_effect(head)]

    def expected_squares(self) -> list[float] | None:
        body = self.body.expected_squares()
        return None if body is None else [*body, *self.head.expected_squares()]

    def install(self) -> None:
        self.body.install()
        self.head.install()

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        return [*self.body.factors(), *self.head.factors()]

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.body.state_dict(), **_in_head(self.head.state_dict())}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.body.load_state_dict({k: t for k, t in tensors.items() if not k.startswith(_HEAD)})
        self.head.load_state_dict(of_head(tensors))

    def shared(self) -> dict[str, Tensor]:
        return {**self.body.shared(), **_in_head(self.head.shared())}

    def take_shared(self, tensors: Mapping[str, Tensor]) -> None:
        self.body.take_shared({k: t for k, t in tensors.items() if not k.startswith(_HEAD)})
        self.head.take_shared(of_head(tensors))

    @property
    def draws(self) -> int | None:
        return self.body.draws

    def begin(self) -> None:
        self.body.begin()

    def advance(self) -> bool:
        return self.body.advance()

    def parted(self, groups: list[Any]) -> tuple[list[Any], list[Any]]:
        """What is given by group, as of the body and of the head."""
        return self._parted(groups)

    def _parted(self, groups: list[Any]) -> tuple[list[Any], list[Any]]:
        at = len(self.headed.body.groups)
        return groups[:at], groups[at:]


_HEAD = "head."


def _in_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{_HEAD}{name}": t for name, t in tensors.items()}


def of_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's own of what ``state_dict`` of both gave."""
    return {name.removeprefix(_HEAD): t for name, t in tensors.items() if name.startswith(_HEAD)}
