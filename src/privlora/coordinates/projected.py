"""Projected coordinates: whole weight gradients, seen through random projections that change with every step.

A layer W (m, n) trains densely, W = W0 + Z with Z (m, n), but a step sees its gradient G through Q (n, r) alone, whose
orthonormal columns span a uniformly random subspace: P = G Q, at the cost of one LoRA factor's gradient. The unbiased
estimate (n / r) P Q^T moves Z, whose rank grows by r with each step (Hu et al. 2026, Algorithm 3, with the orthonormal
basis of the Wishart matrix's range instead of the matrix: the same privacy, less spread in the update).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Coordinates, Sums, Vector, name_factors, squared_norms
from privlora.coordinates.evened import Evened, even
from privlora.errors import ConfigError, PrivacyError
from privlora.randomness import counter_generator

# A key is kept as two non-negative int64 halves.
_HALF = 63
# Singular values below this fraction of the largest are not exported.
_NEGLIGIBLE = 1e-6


class ProjectedCoordinates(Coordinates):
    """Project, then clip: c = sqrt(n / r) G Q, whose mean square over Q is that of G.

    The clip comes after the projection, so sensitivity is C whatever Q is, and the accounting is the ordinary one. C is
    in the units of the whole gradient, as for dense DP-SGD.

    updates: Z, one (L, m, n) a group. key: of the projections; public here. The projection of release t is a function
    of key and t alone.
    """

    dense: ClassVar[bool] = True

    def __init__(
        self,
        adapter: LowRankAdapter,
        updates: list[Tensor],
        *,
        key: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(adapter, dtype)
        if adapter.dropout:
            raise ConfigError(
                "adapter.lora_dropout does not go with projected gradients",
                why="dropout would thin out the gradient of the whole layer, not that of an adapter alone",
                fix="set adapter.lora_dropout=0",
            )
        # Own copies. Update them in place, never rebind them: optimizers hold views.
        self.updates = [z.detach().to(adapter.device, dtype, copy=True) for z in updates]
        self.projections: list[Tensor] = []  # Q (L, n, r) a group
        self._key, self._count = key, 0
        self._draw_projections()
        self.install()

    @property
    def trained(self) -> Vector:
        """The tensors that training moves, one tuple a group."""
        return [(z,) for z in self.updates]

    def scale(self, group: int) -> float:
        """Coordinates over G Q; sqrt(n / r)."""
        return self._widening(group) ** 0.5

    def estimate_factor(self, group: int) -> float:
        """The unbiased estimate of a dense gradient is this times c Q^T; (n / r) over ``scale``."""
        return self._widening(group) / self.scale(group)

    def gradients(self, vector: Vector) -> list[Tensor]:
        """The unbiased estimate (n / r) G Q Q^T of dense gradients, (L, m, n) a group, from coordinates."""
        estimates = [torch.zeros_like(z) for z in self.updates]
        self.add_estimate(estimates, vector, 1.0)
        return estimates

    def add_estimate(self, to: list[Tensor], vector: Vector, factor: float) -> None:
        """Add ``factor`` times the estimate of ``gradients`` to dense tensors, in place."""
        for g, (total, (c,), q) in enumerate(zip(to, vector, self.projections, strict=True)):
            total.baddbmm_(c * (factor * self.estimate_factor(g)), q.mT)

    def gradient_std(self, noise_std: float) -> float:
        """Root mean square of an entry of ``gradients`` that is noise of ``noise_std`` alone, in the noisiest group."""
        groups = range(len(self.updates))
        return noise_std * max(self.estimate_factor(g) / self._widening(g) ** 0.5 for g in groups)

    def advance(self) -> bool:
        """Draw the projection of the next release."""
        self._count += 1
        self._draw_projections()
        return True

    def norms_squared(self, captured: Captured) -> Tensor:
        return self._squares(captured).sum(dim=0)

    def module_norms_squared(self, captured: Captured) -> Tensor:
        return self._squares(captured)

    def _squares(self, captured: Captured) -> Tensor:
        pairs = zip(captured.p, self._site_scales(), strict=True)
        return torch.stack([squared_norms(p).double() * scale**2 for p, scale in pairs])

    def evened(self, captured: Captured) -> Evened:
        return even(captured, self.adapter.sizes, scales=self._site_scales(), sides=(0,))

    def to_vector(self, sums: Sums) -> Vector:
        return [(p * self.scale(g),) for g, (p, _) in enumerate(sums)]

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return [(draw((len(g.sites), g.m, self.adapter.rank)),) for g in self.adapter.groups]

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        return sum(adapter.rank * site.m for site in adapter.sites)

    def moved_numbers(self) -> list[int]:
        """m n: rules move each entry of Z by about the rate, though a release has r numbers a row."""
        return [group.m * group.n for group in self.adapter.groups]

    def weight_effect(self, vector: Vector) -> list[tuple[Tensor, Tensor]]:
        """The estimates of ``gradients``, as they would move W at rate 1."""
        pairs = zip(vector, self.projections, strict=True)
        return [(c, self.estimate_factor(g) * q) for g, ((c,), q) in enumerate(pairs)]

    def expected_squares(self) -> list[float]:
        """m r (n / r / scale)^2."""
        sites = zip(self.adapter.sites, self._site_scales(), strict=True)
        return [site.m / self.adapter.rank * (site.n / scale) ** 2 for site, scale in sites]

    def install(self) -> None:
        for group, z in zip(self.adapter.groups, self.updates, strict=True):
            self.adapter.install_update(group, z)
        self._install_projections()

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """The updates as A B^T of full rank; A or B is the identity."""
        return [
            (z, _eye(z, z.shape[2])) if z.shape[2] <= z.shape[1] else (_eye(z, z.shape[1]), z.mT.contiguous())
            for z in self.updates
        ]

    def named_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Site name -> (A (m, R), B (n, R)) with the largest rank R of all updates, by singular values."""
        names = name_factors(self.adapter, [(z, z) for z in self.updates])
        found = {name: torch.linalg.svd(z.double(), full_matrices=False) for name, (z, _) in names.items()}
        rank = max(1, *(int((s > _NEGLIGIBLE * s[0]).sum()) for _, s, _ in found.values()))
        pairs = {name: (u * s.sqrt(), vh.mT * s.sqrt()) for name, (u, s, vh) in found.items()}
        return {name: (self._columns(a, rank), self._columns(b, rank)) for name, (a, b) in pairs.items()}

    def state_dict(self) -> dict[str, Tensor]:
        halves = [self._key >> _HALF, self._key & (2**_HALF - 1)]
        state = {"key": torch.tensor(halves), "count": torch.tensor(self._count)}
        return state | {f"{g}.update": z for g, z in enumerate(self.updates)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        if "key" in self.state_dict():
            self._take_key(tensors)
        for g, z in enumerate(self.updates):
            z.copy_(tensors[f"{g}.update"])
        self._draw_projections()
        self.install()

    def _take_key(self, tensors: Mapping[str, Tensor]) -> None:
        high, low = tensors["key"].tolist()
        self._key, self._count = (high << _HALF) | low, int(tensors["count"])

    def _draw_projections(self) -> None:
        generator = counter_generator(self._key, stream=self._count)
        drawn = []
        for group in self.adapter.groups:
            normal = generator.standard_normal((len(group.sites), group.n, self.adapter.rank))
            columns = torch.from_numpy(normal).to(self.adapter.device, self.dtype)
            drawn.append(torch.linalg.qr(columns).Q)  # a uniform subspace, whatever the signs
        self.projections = drawn
        self._install_projections()

    def _install_projections(self) -> None:
        """Let the adapter gather G Q; its own term stays zero."""
        for group, q in zip(self.adapter.groups, self.projections, strict=True):
            zero = q.new_zeros(len(group.sites), group.m, q.shape[-1])
            self.adapter.install(group, zero, zero[:, 0], q)

    def _columns(self, factor: Tensor, rank: int) -> Tensor:
        """The first ``rank`` columns, or all and zeros up to that many: an adapter has one rank."""
        kept = factor[:, :rank]
        return torch.nn.functional.pad(kept, (0, rank - kept.shape[1])).to(self.dtype)

    def _widening(self, group: int) -> float:
        return self.adapter.groups[group].n / self.adapter.rank

    def _site_scales(self) -> list[float]:
        return [self.scale(g) for g, group in enumerate(self.adapter.groups) for _ in group.sites]


class WishartCoordinates(ProjectedCoordinates):
    """Clip, then project (M2 of Hu et al. 2026): whole gradients are clipped to C, and c = G Q is noised.

    A unit moves c by C ||u Q|| with a direction u that was fixed before Q was drawn, and E ||u Q||^2 = r / n: noise of
    about sqrt(r / n) sigma C does what sigma C does without projection. That is what accounting with ``event_layers``
    proves, on two conditions: each Q is independent of data and history, and serves for one release. So the key is the
    operating system's from ``begin`` on, and a mechanism refuses a second release on the same Q.
    """

    def __init__(
        self,
        adapter: LowRankAdapter,
        updates: list[Tensor],
        *,
        key: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for site in adapter.sites:
            if site.weight.dtype not in (torch.float32, torch.float64):
                raise ConfigError(
                    f"clipping before projecting needs float32 layers, and {site.name!r} is {site.weight.dtype}",
                    why="a rounded projection is not orthonormal, so records would move the release by more than "
                    "the accounting says",
                    fix="set model.dtype=float32, or method.name=projected, which clips after projecting",
                )
        super().__init__(adapter, updates, key=key, dtype=dtype)
        adapter.dense_norms = True

    @classmethod
    def event_layers_of(cls, adapter: Callable[[], LowRankAdapter]) -> tuple[tuple[int, int], ...]:
        """The distinct (r, n) of the adapter's sites."""
        shape = adapter()
        return tuple(sorted({(shape.rank, site.n) for site in shape.sites}))

    @property
    def draws(self) -> int:
        return self._count

    def state_dict(self) -> dict[str, Tensor]:
        """Without key and count: projections stay secret until they are used, and none comes again from a state."""
        return {name: t for name, t in super().state_dict().items() if name not in ("key", "count")}

    def _placed(self) -> list[Tensor]:
        return [*super()._placed(), *self.projections]

    def shared(self) -> dict[str, Tensor]:
        """With key and count: all processes project one batch alike."""
        return super().state_dict() | self.state_dict()

    def take_shared(self, tensors: Mapping[str, Tensor]) -> None:
        self._take_key(tensors)
        self.load_state_dict(tensors)

    def begin(self) -> None:
        """A fresh key: whoever foresees projections could write a record that lies in them.

        It is not restored from a checkpoint either: a step that was charged and lost has shown its projection.
        """
        self._key, self.released_on = secrets.randbits(2 * _HALF), None
        self._draw_projections()

    def scale(self, group: int) -> float:
        """1: the basis is orthonormal, and the same noise goes on every coordinate."""
        return 1.0

    def norms_squared(self, captured: Captured) -> Tensor:
        """max of ||G_i||_F^2 and ||G_i Q||_F^2, each over all modules: rounding can make the second larger."""
        if captured.dense_squares is None:
            raise PrivacyError(
                "the norms of whole gradients are missing",
                why="clipping what is left after the projection has another sensitivity than what is accounted for",
                fix="gather gradients with adapter.capture, which keeps them",
            )
        return torch.maximum(captured.dense_squares, super().norms_squared(captured))

    def module_norms_squared(self, captured: Captured) -> Tensor:
        raise ConfigError(
            "clipping module by module does not go with clipping before projecting",
            why="the norms of whole gradients are known over all modules together, and no module's own",
            fix="method.clipping=flat, or method.name=projected",
        )

    def released_share(self, captured: Captured) -> Tensor:
        """||G_i Q||^2 / ||G_i||^2; 0 for a gradient of zero."""
        return super().norms_squared(captured) / self.norms_squared(captured).clamp_min(1e-300)

    def evened(self, captured: Captured) -> Evened:
        raise ConfigError(
            "spectral clipping does not go with clipping before projecting",
            why="it needs the singular values of whole gradients, which are never formed",
            fix="method.clipping=flat, or method.name=projected",
        )


def _eye(z: Tensor, size: int) -> Tensor:
    return torch.eye(size, dtype=z.dtype, device=z.device).expand(z.shape[0], size, size)
