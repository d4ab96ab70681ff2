"""A space as somebody outside would write it: K coefficients for all modules together, and SGD on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import Coordinates, Sums, Vector
from privlora.errors import ConfigError
from privlora.mechanisms import Release
from privlora.methods import METHODS, SPACES, Method, Space
from privlora.optimizers import Optimizer


class Span(Coordinates):
    """Coefficients (K,) of a unit's gradient in orthonormal public directions D_k over all modules.

    W = W0 + sum_k a_k D_k, where D_k is U C_k V^T in each module, with public orthonormal U (m, r) and V (n, r).
    """

    described: str = "in the span of 5 public directions over all modules"
    directions: ClassVar[int] = 5

    def __init__(self, adapter: LowRankAdapter, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(adapter, dtype)
        generator = torch.Generator().manual_seed(seed)

        def orthonormal(rows: int, columns: int) -> Tensor:
            drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            return torch.linalg.qr(drawn).Q.to(adapter.device, dtype)

        r = adapter.rank
        self.sides = [(orthonormal(site.m, r), orthonormal(site.n, r)) for site in adapter.sites]
        basis = orthonormal(len(adapter.sites) * r * r, self.directions)
        self.cores = basis.mT.reshape(self.directions, len(adapter.sites), r, r)
        self.coefficients = torch.zeros(self.directions, dtype=dtype, device=adapter.device)
        self.install()

    @classmethod
    def start(cls, adapter: LowRankAdapter, init: str, *, seed: int, dtype: torch.dtype, **_: object) -> Span:
        if init != "random":
            raise ConfigError(f"adapter.init={init!r} is not for span", fix="use random")
        return cls(adapter, seed, dtype)

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        return cls.directions

    def _coefficients(self, p: list[Tensor]) -> Tensor:
        """<D_k, G> (..., K) of G V = p (..., m, r) in each module; in float64, since most of p is left out."""
        parts = zip(p, self.sides, self.cores.unbind(1), strict=True)
        found = [
            torch.einsum("...mr,ms,ksr->...k", *(t.double() for t in (p, u, c))) for p, (u, _), c in parts
        ]
        return torch.stack(found).sum(dim=0)

    def norms_squared(self, captured: Captured) -> Tensor:
        return self._coefficients(captured.p).square().sum(dim=-1)

    def to_vector(self, sums: Sums) -> Vector:
        return [(self._coefficients([one for p, _ in sums for one in p]).to(sums[0][0].dtype),)]

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return [(draw((self.directions,)),)]

    def install(self) -> None:
        for group, (left, right) in zip(self.adapter.groups, self.factors(), strict=True):
            self.adapter.install(group, left, left.new_ones(left.shape[0], left.shape[2]), right)

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        cores = torch.einsum("k,ksij->sij", self.coefficients, self.cores)
        pairs = iter([(u @ core, v) for (u, v), core in zip(self.sides, cores, strict=True)])
        grouped = [[next(pairs) for _ in group.sites] for group in self.adapter.groups]
        return [(torch.stack([a for a, _ in own]), torch.stack([b for _, b in own])) for own in grouped]

    def state_dict(self) -> dict[str, Tensor]:
        return {"coefficients": self.coefficients}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.coefficients.copy_(tensors["coefficients"])
        self.install()


class SpanSGD(Optimizer):
    """a <- a - learning_rate * release."""

    def __init__(self, coordinates: Span) -> None:
        self.coordinates = coordinates

    def _update(self, release: Release, learning_rate: float) -> None:
        self.coordinates.coefficients.sub_(release.vector[0][0], alpha=learning_rate)
        self.coordinates.install()

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        pass


@pytest.fixture
def span(monkeypatch: pytest.MonkeyPatch) -> None:
    """The space and a method of it are in the tables."""
    monkeypatch.setitem(SPACES, "span", Space(Span, Span.start, {"sgd": SpanSGD}))
    row = Method(
        name="span",
        summary="clip and noise five coefficients",
        reference="this test",
        space="span",
        optimizers=("sgd",),
        private=True,
        learning_rate=1.0,
        clippings=("flat", "automatic"),
    )
    monkeypatch.setitem(METHODS, "span", row)
