"""Renyi differential privacy of M2 in closed form: looser than the PLD, and computed by nothing that it shares.

The exponential function is convex and increasing, so at every order a difference of rank one in a single layer
is the worst case, for any rank, weights and layers, and E exp(z X) = 1F1(r/2; d/2; z) prices it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp, xlog1py, xlogy

from privlora.accounting.events import Projections
from privlora.accounting.projection.energy import log_moment
from privlora.accounting.projection.gaussian import Floats


def rank_free_rdp(
    orders: Sequence[int], noise_multiplier: float, projections: Projections, sample_rate: float
) -> Floats:
    """RDP of one M2 step with Poisson sampling, add-or-remove-one, for differences of any rank: an upper bound.

        D_lambda <= ln( sum_j C(lambda, j) (1-q)^(lambda-j) q^j 1F1(r/2; d/2; j(j-1) / (2 sigma^2)) ) / (lambda - 1)

    the moments of Mironov, Talwar, Zhang (2019) with 1F1 instead of exp.

    Args:
        orders: integers lambda >= 2.
        noise_multiplier: sigma = std of the noise per projected coordinate / clip_norm of the whole gradient, > 0.
        projections: (rank, input dimension) of each layer under that clip; the largest 1F1 counts. Empty for the
            Gaussian mechanism.
        sample_rate: q, in (0, 1].

    Returns:
        D_lambda, (len(orders),), nats.
    """
    j = np.arange(max(orders) + 1)
    exponents = j * (j - 1) / (2 * noise_multiplier**2)
    moments = [log_moment(exponents, rank, dimension) for rank, dimension in projections if rank < dimension]
    everything = len(moments) < len(projections) or not projections
    log_moments = exponents if everything else np.max(moments, axis=0)
    log_factorial = gammaln(j + 1.0)
    result = []
    for order in orders:
        k = j[: order + 1]
        log_binomial = log_factorial[order] - log_factorial[k] - log_factorial[order - k]
        log_weights = log_binomial + xlogy(k, sample_rate) + xlog1py(order - k, -sample_rate)
        result.append(logsumexp(log_weights + log_moments[k]) / (order - 1))
    return np.maximum(np.array(result), 0.0)
