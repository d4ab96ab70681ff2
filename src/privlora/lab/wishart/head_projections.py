"""Random projections of the rows of a small matrix, with the law that they have and without forming them.

A release of M1 or M2 is V M with V of c rows and d columns (c classes, d features) and M of rank r drawn afresh. Only
what M does to the c rows matters, so with V = R U, the rows of U orthonormal, it is enough to draw (U M):

    wishart   M = A^T A, A (r x d) of N(0, 1/r) entries:
              U M = T^T (T U + N) / r,   T^T T ~ W_c(I, r),   N normal entries, its rows made orthogonal to U
    haar      M = (d / r) P, P projecting on a uniform subspace of rank r:
              U P = B U + (B - B^2)^(1/2) F,   B = U P U^T ~ matrix Beta_c(r/2, (d-r)/2),   F a uniform frame beside U

Both follow from M's invariance under the rotations that leave U fixed. The cost is O(c d), whatever the rank; drawing
an orthonormal basis of the subspace would cost O(r^2 d). M itself is not known afterwards, not even to the curator:
whoever has to publish it must draw it. The privacy of M2 is proved for a published M, so hiding it takes nothing away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def project_afresh(
    values: Tensor, rank: int, projection: str, generators: Sequence[np.random.Generator]
) -> Tensor:
    """``values`` (N, c, d) times N independent fresh projections of ``rank`` whose mean is the identity.

    projection: "wishart", or "haar" with rank <= d. generators: one for each of the N matrices. d >= 2 c.
    """
    _, rows, columns = values.shape
    frame, triangle = torch.linalg.qr(values.mT)  # V^T = U^T R^T; orthonormal also where V has lower rank
    if projection == "wishart":
        root = _wishart_roots(generators, rank, rows, values.dtype)
        beside = _normals(generators, (root.shape[1], columns), values.dtype)
        beside -= (beside @ frame) @ frame.mT
        images = root.mT @ (root @ frame.mT + beside) / rank
    else:
        beside = _normals(generators, (rows, columns), values.dtype)
        both, signs = torch.linalg.qr(torch.cat([frame, beside.mT], dim=-1))
        # Householder reflections choose signs by the data; the diagonal of R undoes it, which makes the frame uniform.
        frame_beside = both[..., rows:] * signs.diagonal(dim1=-2, dim2=-1)[..., None, rows:].sign()
        inside = _wishart(generators, rank, rows)
        whole = torch.linalg.cholesky(inside + _wishart(generators, columns - rank, rows))
        half = torch.linalg.solve_triangular(whole, inside, upper=False)
        beta = torch.linalg.solve_triangular(whole, half.mT, upper=False)
        kept, axes = torch.linalg.eigh((beta + beta.mT) / 2)
        kept = kept.clamp(0, 1)
        along = (axes * kept[:, None, :]) @ axes.mT
        across = axes * (kept * (1 - kept)).sqrt()[:, None, :]
        images = along.to(values.dtype) @ frame.mT + across.to(values.dtype) @ frame_beside.mT
        images *= columns / rank
    return triangle.mT @ images


def orthonormal_bases(
    rank: int, columns: int, dtype: torch.dtype, generators: Sequence[np.random.Generator]
) -> Tensor:
    """Bases (N, d, r) of uniform subspaces: the r columns are orthonormal. Any basis of the subspace will do."""
    return torch.linalg.qr(_normals(generators, (columns, rank), dtype))[0]


def gaussian_factors(
    rank: int, columns: int, dtype: torch.dtype, generators: Sequence[np.random.Generator]
) -> Tensor:
    """LoRA-FA's A: (N, r, d) with N(0, 1/r) entries."""
    return _normals(generators, (rank, columns), dtype) / rank**0.5


def _wishart(generators: Sequence[np.random.Generator], freedom: int, size: int) -> Tensor:
    """W_size(I, freedom), float64 (N, size, size), of lower rank if ``freedom`` < ``size``."""
    root = _wishart_roots(generators, freedom, size, torch.float64)
    return root.mT @ root


def _wishart_roots(
    generators: Sequence[np.random.Generator], freedom: int, size: int, dtype: torch.dtype
) -> Tensor:
    """T (N, min(freedom, size), size) with T^T T ~ W_size(I, freedom): normal entries, or Bartlett's triangle."""
    if freedom <= size:
        return _normals(generators, (freedom, size), dtype)
    degrees = freedom - np.arange(size)
    roots = np.zeros((len(generators), size, size))
    above = np.triu_indices(size, 1)
    for root, generator in zip(roots, generators, strict=True):
        root[above] = generator.standard_normal(len(above[0]))
        np.fill_diagonal(root, np.sqrt(generator.chisquare(degrees)))
    return torch.from_numpy(roots).to(dtype)


def _normals(generators: Sequence[np.random.Generator], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """(N, *shape) standard normal entries; matrix n comes from generator n, drawn in float64."""
    drawn = torch.empty((len(generators), *shape), dtype=dtype)
    for out, generator in zip(drawn, generators, strict=True):
        out.copy_(torch.from_numpy(generator.standard_normal(shape)))
    return drawn
