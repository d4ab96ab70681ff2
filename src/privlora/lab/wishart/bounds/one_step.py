"""One step of DP-LoRA-FA next to one of M2 (Appendix E.1 of Hu et al. 2026): two noises with one mean, G A^T A.

A (r, d) has N(0, 1/r) entries. Where nothing is clipped, a row of the update has the covariance

    DP-LoRA-FA, noise on the gradient of B          sigma^2 C_B^2 A^T A,
    M2 at sigma sqrt(r/d), noise before A^T A       sigma^2 C^2 (r/d) (A^T A)^2.

Their quotient on A's row space is (r/d) A^T A, of mean eigenvalue about 1: noise of the same order, and not one law.
The whole noise has d and d + r + 1 times sigma^2 C^2 on average; C_B = C sqrt(1 + gamma) bounds what A does to norms.
sigma sqrt(r/d) is the limit of what M2 needs, not enough by itself: `accounting.projection.composition` has the noise.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtri

from privlora.accounting.projection.gaussian import Floats
from privlora.lab.wishart.bounds.gaussian import in_range


def wishart_spectrum(rank: int, dimension: int, failure: float) -> tuple[float, float]:
    """Lemma 6: what holds all r nonzero eigenvalues of A^T A, with probability 1 - `failure` over A.

    (sqrt d -+ (sqrt r + t))^2 / r, t = sqrt(2 ln(2/failure)); 0 below where sqrt r + t exceeds sqrt d.

    Raises:
        PrivacyError: not 1 <= rank <= dimension, or failure is not in (0, 1).
    """
    in_range(1 <= rank <= dimension and 0 < failure < 1, rank=rank, dimension=dimension, failure=failure)
    off = math.sqrt(rank) + math.sqrt(2 * math.log(2 / failure))
    return max(0.0, math.sqrt(dimension) - off) ** 2 / rank, (math.sqrt(dimension) + off) ** 2 / rank


def length_distortion(rank: int, vectors: int, failure: float, *, printed: bool = False) -> float:
    """Lemma 18: gamma with ||A x||^2 <= (1 + gamma) ||x||^2 for `vectors` fixed x, with probability 1 - `failure`.

    By the quantile of chi^2_r, for vectors; or as `printed`, by exp(-r (gamma^2/2 - gamma^3/3) / 2) with gamma < 1.
    That is a Chernoff bound, so a whole matrix counts as one vector there; the paper counts its rows.

    Raises:
        PrivacyError: a size is below 1, failure is not in (0, 1), or no gamma below 1 is enough for the printed form.
    """
    in_range(rank >= 1 and vectors >= 1 and 0 < failure < 1, rank=rank, vectors=vectors, failure=failure)
    if not printed:
        return float(chdtri(rank, failure / vectors)) / rank - 1
    wanted = 2 * math.log(vectors / failure) / rank
    in_range(wanted < 1 / 6, rank=rank, vectors=vectors, failure=failure)
    roots = np.roots([-1 / 3, 1 / 2, 0.0, -wanted])
    return float(min(x.real for x in roots if 0 < x.real < 1))


def update_covariances(factor: ArrayLike, noise_std: float) -> tuple[Floats, Floats]:
    """Covariances (d, d) of a row of the update: DP-LoRA-FA's, and M2's at sigma sqrt(r/d), given A (r, d).

    noise_std: sigma C, with C_B = C.

    Raises:
        PrivacyError: A is no matrix, or noise_std is out of range.
    """
    a = np.asarray(factor, np.float64)
    in_range(a.ndim == 2 and 0 < noise_std < math.inf, factor=a.shape, noise_std=noise_std)
    whole = a.T @ a
    return noise_std**2 * whole, noise_std**2 * len(a) / a.shape[1] * whole @ whole


def rdp_factor(rank: int, dimension: int, failure: float) -> tuple[float, float]:
    """Bounds on the RDP of DP-LoRA-FA over that of M2 at sigma sqrt(r/d), of one step at any order, given A (E.1).

    The quotient is ||A Delta||^2 / ((d/r) ||P Delta||^2), a mean of eigenvalues of (r/d) A^T A. Arguments and errors
    as in `wishart_spectrum`.
    """
    low, high = wishart_spectrum(rank, dimension, failure)
    return low * rank / dimension, high * rank / dimension
