"""The manifold of rank-r matrices, batched over L modules of equal shape (m, n).

A **point** is Z = U diag(S) V^T with orthonormal U (L, m, r), V (L, n, r) and S (L, r) >= 0, descending.
A **tangent vector** at it has the coordinates M (L, r, r), Up (L, m, r), Vp (L, n, r) of

    xi = U M V^T + Up V^T + U Vp^T,    U^T Up = 0,    V^T Vp = 0.

(M, Up, Vp) -> xi is an isometry, ||xi||_F^2 = ||M||^2 + ||Up||^2 + ||Vp||^2: the coordinates are Euclidean,
and a Gaussian mechanism on them is one on tangent vectors.

Nothing inverts S, so ill-conditioned, rank-deficient and zero Z (LoRA's start) are ordinary points. Where
Z is singular, "tangent space" means that of the given U and V: all xi of the above form.

Only `embedding` and `project_dense`, meant for tests and small studies, form an m x n matrix; all else costs
O((m + n) r^2) a module. Tensors are float32 or float64, on one device. Relative errors are below 1e-5 in
float32, and orthonormality does not drift over steps, if the caller disables autocast and TF32.

Sources: Vandereycken, "Low-rank matrix completion by Riemannian optimization" (2013), section 2, for the
coordinates; PRISM, Eq. 13-22 and Theorem 3.1, for their use as a mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from privlora.errors import ModelError
from privlora.geometry.bases import alike_places, joint_bases, singular_values

# Z = A diag(s) B^T with any A (L, m, k), s (L, k), B (L, n, k).
Product = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Point:
    """Z = U diag(S) V^T, one for each of L modules.

    U (L, m, r) and V (L, n, r) have orthonormal columns; S (L, r) is non-negative and descending. In each
    column of U the entry of largest magnitude is positive, so a Z of distinct positive singular values has
    exactly one Point. The functions below establish all this; the constructor does not check it.
    """

    U: Tensor
    S: Tensor
    V: Tensor

    @property
    def rank(self) -> int:
        """r, the number of columns of U (singular values may be zero)."""
        return self.U.shape[-1]

    def embedding(self) -> Tensor:
        """The dense Z (L, m, n)."""
        return (self.U * self.S[:, None, :]) @ self.V.mT

    def to(self, like: Tensor | torch.device) -> Point:
        """In the dtype and on the device of ``like``; of a device, in its own dtype."""
        return Point(self.U.to(like), self.S.to(like), self.V.to(like))

    def split(self, k: int) -> tuple[Point, Point]:
        """The k leading triplets, and the others."""
        if k >= self.rank:  # nothing is cut off
            return self, self._part(slice(k, None))
        # Each in memory of its own: either may lie elsewhere, or be let go.
        return self._part(slice(k)), self._part(slice(k, None))

    def _part(self, columns: slice) -> Point:
        return Point(*(t[..., columns].contiguous() for t in (self.U, self.S, self.V)))

    def extended(self, rank: int) -> Point:
        """Up to ``rank`` triplets of zeros more, as many as min(m, n) allows, for `retract` to fill."""
        (L, m, r), n = self.U.shape, self.V.shape[-2]
        k = min(rank, m - r, n - r)
        pairs = ((self.U, (L, m, k)), (self.S, (L, k)), (self.V, (L, n, k)))
        return Point(*(torch.cat([t, t.new_zeros(shape)], dim=-1) for t, shape in pairs))

    def joined(self, rest: Point) -> Point:
        """Inverse of ``split``."""
        pairs = ((self.U, rest.U), (self.S, rest.S), (self.V, rest.V))
        return Point(*(torch.cat(pair, dim=-1) for pair in pairs))


@dataclass(frozen=True)
class Tangent:
    """Isometric coordinates M (L, r, r), Up (L, m, r), Vp (L, n, r) of xi = U M V^T + Up V^T + U Vp^T."""

    M: Tensor
    Up: Tensor
    Vp: Tensor

    @staticmethod
    def zero(point: Point) -> Tangent:
        """The zero tangent vector of every module."""
        r = point.rank
        return Tangent(
            point.S.new_zeros(len(point.S), r, r), torch.zeros_like(point.U), torch.zeros_like(point.V)
        )

    def to(self, device: torch.device) -> Tangent:
        """On another device."""
        return Tangent(self.M.to(device), self.Up.to(device), self.Vp.to(device))

    def scale(self, factor: float | Tensor) -> Tangent:
        """factor * xi; a tensor (L,) holds one factor a module."""
        if isinstance(factor, Tensor):
            factor = factor.reshape(-1, 1, 1)
        return Tangent(factor * self.M, factor * self.Up, factor * self.Vp)

    def add(self, other: Tangent, alpha: float = 1.0) -> Tangent:
        """xi + alpha * other, both at the same point."""
        return Tangent(
            self.M.add(other.M, alpha=alpha),
            self.Up.add(other.Up, alpha=alpha),
            self.Vp.add(other.Vp, alpha=alpha),
        )

    def inner(self, other: Tangent) -> Tensor:
        """The ambient trace product <xi, other>_F of every module, (L,)."""
        pairs = ((self.M, other.M), (self.Up, other.Up), (self.Vp, other.Vp))
        return torch.stack([(a * b).sum(dim=(-2, -1)) for a, b in pairs]).sum(dim=0)

    def norm_squared(self) -> Tensor:
        """||xi||_F^2 of every module, (L,); sum it for the global norm over modules (PRISM Eq. 16)."""
        return self.inner(self)

    def embedding(self, point: Point) -> Tensor:
        """The dense xi (L, m, n) at `point`."""
        return (point.U @ self.M + self.Up) @ point.V.mT + point.U @ self.Vp.mT


def tangent_dimension(m: int, n: int, r: int) -> int:
    """r (m + n - r): the dimension of the tangent space, and E||xi||_F^2 of its standard normal vector."""
    return r * (m + n - r)


# --- points ---


def point_from_factors(A: Tensor, B: Tensor, completion: torch.Generator | None = None) -> Point:
    """The point of Z = A B^T, for A (L, m, r) and B (L, n, r). Computed in float64, returned in A's dtype.

    Every gauge (A R, B R^-T) of a full-rank pair gives the same point, up to the rounding of the pair itself.
    U spans the columns of A, V those of B, also where Z vanishes: LoRA's A = 0 keeps B's subspace.

    completion: seeded generator on the factors' device that draws the directions A or B lacks; they must
    not depend on private data. Needed only if a factor is rank-deficient (to float64 rounding).

    Raises ModelError if r > min(m, n), or if a factor is rank-deficient and `completion` is missing.
    """
    _check_rank(A, B)
    A64, B64 = A.double(), B.double()
    QA = _completed_basis(A64, "A", completion)
    QB = _completed_basis(B64, "B", completion)
    core = (QA.mT @ A64) @ (QB.mT @ B64).mT
    point = _truncated_svd(QA, core, QB, A.shape[-1])
    return Point(point.U.to(A.dtype), point.S.to(A.dtype), point.V.to(A.dtype))


def point_at_zero(U0: Tensor, V0: Tensor) -> Point:
    """Z = 0 with the subspaces spanned by U0 (L, m, r) and V0 (L, n, r), which are orthonormalised.

    Raises ModelError if r > min(m, n) or if U0 or V0 is rank-deficient.
    """
    _check_rank(U0, V0)
    U = _completed_basis(U0.double(), "U0", None).to(U0.dtype)
    V = _completed_basis(V0.double(), "V0", None).to(V0.dtype)
    return _with_signs(U, U.new_zeros(U.shape[0], U.shape[-1]), V)


def random_point(
    modules: int, m: int, n: int, r: int, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Point:
    """Uniformly distributed subspaces and singular values |N(0, 1)|, on the generator's device."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)

    U0, V0 = normal(modules, m, r), normal(modules, n, r)
    zero = point_at_zero(U0, V0)
    return Point(zero.U, normal(modules, r).abs().sort(descending=True).values, zero.V)


def factors(point: Point, balanced: bool = True) -> tuple[Tensor, Tensor]:
    """A (L, m, r) and B (L, n, r) with Z = A B^T.

    balanced: A = U S^1/2 and B = V S^1/2. Otherwise A = U S and B = V, so B stays orthonormal where S = 0.
    """
    if not balanced:
        return point.U * point.S[:, None, :], point.V
    root = point.S.sqrt()[:, None, :]
    return point.U * root, point.V * root


# --- tangent vectors ---


def project(point: Point, P: Tensor, Q: Tensor) -> Tangent:
    """Tangent projection of an ambient G given by P = G V (L, m, r) and Q = G^T U (L, n, r). PRISM Eq. 13.

    It is linear in (P, Q), so a sum of examples may be projected after it has been clipped.
    """
    return Tangent(point.U.mT @ P, _off(point.U, P), _off(point.V, Q))


def project_dense(point: Point, G: Tensor) -> Tangent:
    """`project` of a dense G (L, m, n)."""
    return project(point, G @ point.V, G.mT @ point.U)


def standard_normal_tangent(point: Point, draw: Callable[[tuple[int, ...]], Tensor]) -> Tangent:
    """A Gaussian tangent vector whose covariance is the identity of the tangent space. PRISM Eq. 19.

    It has the law of the projection of an m x n standard normal matrix. Its squared norm in each module is
    chi-square with `tangent_dimension` degrees of freedom (PRISM Theorem 3.1). Scale by
    tau = noise_multiplier * clip_norm / expected_batch_size.

    draw: returns independent standard normal entries of a shape; its dtype and device are the result's.
    """
    (L, m, r), n = point.U.shape, point.V.shape[-2]
    M, Up, Vp = draw((L, r, r)), draw((L, m, r)), draw((L, n, r))
    return nearest_tangent(point.to(M), Tangent(M, Up, Vp))


def nearest_tangent(point: Point, entries: Tangent) -> Tangent:
    """The tangent vector whose coordinates are nearest to any M (L, r, r), Up (L, m, r), Vp (L, n, r)."""
    return Tangent(entries.M, _off(point.U, entries.Up), _off(point.V, entries.Vp))


def transport(old: Point, new: Point, tangent: Tangent) -> Tangent:
    """The tangent vector at `old`, projected onto the tangent space at `new`."""
    a, b = old.V.mT @ new.V, old.U.mT @ new.U  # (L, r, r) each
    P = old.U @ (tangent.M @ a + tangent.Vp.mT @ new.V) + tangent.Up @ a  # xi V_new
    Q = old.V @ (tangent.M.mT @ b + tangent.Up.mT @ new.U) + tangent.Vp @ b  # xi^T U_new
    return project(new, P, Q)


# --- moves ---


def retract(point: Point, tangent: Tangent, step: float) -> Point:
    """The best approximation of Z + step * xi that has the point's rank R (descent: step = -learning_rate).

    xi is tangent at the point's k leading triplets, k <= R; with k = R this is PRISM Eq. 22. Exact for every tangent
    vector, also of deficient rank, zero, or at S = 0; columns of U and V beyond k may be zero where S is. Costs
    O((m + n) (R + k)^2) a module.
    """
    return retract_all([point], [tangent], step)[0]


def retract_all(points: Sequence[Point], tangents: Sequence[Tangent], step: float) -> list[Point]:
    """``retract`` of each point along its tangent vector. On a GPU the host waits once or twice for all of them."""
    cores: dict[int, Tensor] = {}
    for alike in alike_places(
        [(point.rank, t.M.shape[-1]) for point, t in zip(points, tangents, strict=True)]
    ):
        # Z + step xi = [U Up] [[S + step M, step I], [step I, 0]] [V Vp]^T, with M and the I in the k leading places
        S, M = (
            torch.cat(parts) for parts in zip(*((points[i].S, tangents[i].M) for i in alike), strict=True)
        )
        R, k = S.shape[-1], M.shape[-1]
        core = torch.diag_embed(torch.nn.functional.pad(S, (0, k)))
        core[:, :k, :k].add_(M, alpha=step)
        core[:, :k, R:].diagonal(dim1=-2, dim2=-1).fill_(step)
        core[:, R:, :k].diagonal(dim1=-2, dim2=-1).fill_(step)
        cores |= zip(alike, core.split([len(points[i].S) for i in alike]), strict=True)
    each = enumerate(zip(points, tangents, strict=True))
    return _best([_Sum(point, tangent.Up, cores[i], tangent.Vp) for i, (point, tangent) in each])


def average(points: tuple[Point, Point], weight: float) -> Point:
    """The best rank-r approximation of (1 - weight) Z_0 + weight Z_1, at the rank of the first point."""
    first, second = points
    return average_all([first], [(second.U, second.S, second.V)], weight)[0]


def average_all(points: Sequence[Point], products: Sequence[Product], weight: float) -> list[Point]:
    """``average`` of each point and the product in its place. On a GPU the host waits once or twice for all of them."""
    sums = []
    for point, (A, s, B) in zip(points, products, strict=True):
        core = torch.diag_embed(torch.cat([(1 - weight) * point.S, weight * s], dim=-1))
        sums.append(_Sum(point, A, core, B))
    return _best(sums)


# --- helpers ---


def _off(basis: Tensor, X: Tensor) -> Tensor:
    """X projected off an orthonormal basis; twice, as once leaves rounding of X's size, not the result's."""
    X = X - basis @ (basis.mT @ X)
    return X.sub_(basis @ (basis.mT @ X))


def _with_signs(U: Tensor, S: Tensor, V: Tensor) -> Point:
    """The sign convention: the entry of largest magnitude in each column of U is positive."""
    sign = U.gather(-2, U.abs().argmax(dim=-2, keepdim=True)).sign()
    return Point(U * sign, S, V * sign)


def _truncated_svd(QL: Tensor, core: Tensor, QR: Tensor, r: int) -> Point:
    """The r leading singular triplets of QL core QR^T, for orthonormal QL and QR."""
    u, s, vh = torch.linalg.svd(core, full_matrices=False)
    return _with_signs(QL @ u[..., :r], s[..., :r], QR @ vh[..., :r, :].mT)


@dataclass(frozen=True)
class _Sum:
    """[U X] core [V Y]^T with the U and V of ``point``."""

    point: Point
    X: Tensor
    core: Tensor
    Y: Tensor


def _best(sums: Sequence[_Sum]) -> list[Point]:
    """The best approximation of each sum that has its point's rank."""
    sides = joint_bases([pair for each in sums for pair in ((each.point.U, each.X), (each.point.V, each.Y))])
    lefts, rights = sides[::2], sides[1::2]
    cores = [left.R @ each.core @ right.R.mT for left, each, right in zip(lefts, sums, rights, strict=True)]
    made = []
    for each, left, right, (u, s, vh) in zip(sums, lefts, rights, singular_values(cores), strict=True):
        r = each.point.rank
        made.append(_with_signs(left.times(u[..., :r]), s[..., :r], right.times(vh[..., :r, :].mT)))
    return made


def _completed_basis(X: Tensor, name: str, completion: torch.Generator | None) -> Tensor:
    """An orthonormal basis that spans the columns of X, both (L, m, r); missing directions are drawn."""
    left, s, _ = torch.linalg.svd(X, full_matrices=False)
    present = (s > s[:, :1] * (max(X.shape[-2:]) * torch.finfo(X.dtype).eps))[:, None, :]  # (L, 1, r)
    if bool(present.all()):
        return left
    if completion is None:
        raise ModelError(
            f"{name} {tuple(X.shape)} is rank-deficient in {int((~present).any(dim=-1).sum())} module(s)",
            why="the missing directions decide which gradients are kept, so they must be public",
            fix="give a seeded generator as `completion`, or full-rank bases",
        )
    drawn = torch.randn(X.shape, generator=completion, dtype=X.dtype, device=X.device)
    kept = torch.where(present, left, 0.0)
    return torch.linalg.qr(torch.where(present, left, _off(kept, drawn))).Q


def _check_rank(A: Tensor, B: Tensor) -> None:
    m, n, r = A.shape[-2], B.shape[-2], A.shape[-1]
    if r > min(m, n):
        raise ModelError(
            f"rank {r} exceeds min(m, n) = {min(m, n)} of a {m} x {n} weight",
            why="there are no r orthonormal columns of that length",
            fix=f"set the adapter's rank to at most {min(m, n)}",
        )
