"""What a secure sum of clients' rounded and noised integers costs: as much as a Gaussian mechanism, nearly.

K clients hold x_1, …, x_K in R^d, each the sum of what its units contribute, which one unit changes by at most C in
norm. Client k sends y_k = round(x_k / g) + Z_k, masked, with Z_k of d independent discrete Gaussians N_Z(0, s^2). The
server learns Y = sum y_k modulo 2^bits. Of the clients whose y_k are in Y, at least t are honest: their Z_k are drawn
as said and known to nobody else. Everything else in Y may be known.

(i) The sum of the t noises is N_Z(0, t s^2), to a pointwise factor. The sum of N_Z(0, a^2) and N_Z(0, b^2) has
    P(z) proportional to exp(-z^2 / 2 (a^2 + b^2)) theta(c_z), theta(c) = sum_k exp(-(k - c)^2 / 2 v^2) and
    1 / v^2 = 1 / a^2 + 1 / b^2, for some c_z. By Poisson summation theta is within a factor 1 +- 2.1 exp(-2 pi^2 v^2)
    of its mean v sqrt(2 pi). Here v^2 >= s^2 / 2, so for s >= MIN_SHARE_STD = 5 each of the t - 1 sums adds a factor
    1 +- 5 exp(-25 pi^2), below 1 +- 1e-106 (Kairouz, Liu and Steinke 2021 have the same by the same means).

(ii) N_Z(0, S^2) is, to a pointwise factor, a continuous Gaussian that was rounded at random. Draw u from
    N(x, S^2 - s0^2) for an integer x, then an integer z with probability exp(-(z - u)^2 / 2 s0^2) / theta(u). The
    product of the two densities, with theta replaced by its mean, integrates over u to the density of N(x, S^2) at z,
    and theta is within 1 +- 2.1 exp(-2 pi^2 s0^2) of its mean. So P(z) is within 1 +- 4.3 exp(-2 pi^2 s0^2) of that of
    x + N_Z(0, S^2), for S >= s0. With ROUNDING_STD s0 = 3 that is 1 +- 1e-76. Rounding u is post-processing: it knows
    nothing of x. Hence all that holds for a continuous Gaussian mechanism of standard deviation sqrt(S^2 - s0^2) holds
    for this one: for each data set the law of the release is within the factor of what one channel makes of the
    Gaussian's, so also for mixtures (Poisson sampling), products (d entries) and adaptive compositions.

(iii) Rounding widens the reach of a unit: |round(a + v) - round(a)| <= |v| + 1 in every entry, so the norm of the
    change of round(x / g) is at most C / g + sqrt(d). In units of the unrounded sum the noise multiplier is

        sigma = g sqrt(t s^2 - s0^2) / (C + g sqrt(d))                                        (``noise_multiplier``)

(iv) Reducing Y modulo 2^bits, centring, scaling and projecting are post-processing. A sum that wraps around costs
    accuracy and no privacy. More than t honest clients add independent noise, which is post-processing as well.

The factors of (i) and (ii) add less than 1e-64 to epsilon over 10^4 releases of 10^7 entries. The sampler's own factor,
1 +- h with h = 2^-47 (mechanisms.discrete), is larger. Over N = entries x clients x releases draws it adds at most
2 h N to epsilon. Nearly all outcomes have far less: the log-ratio of the two laws is a sum of N martingale differences
below h, up to a drift of h^2 each, so outside of a set of probability d' it stays below h sqrt(2 N ln(2 / d')) + h^2 N:
1e-7 for N = 10^12 and d' = 10^-20.
"""

from __future__ import annotations

import math

# s: smallest standard deviation of one client's noise, in lattice units, for which (i) holds as it is stated.
MIN_SHARE_STD = 5.0
# s0 of (ii), in lattice units.
ROUNDING_STD = 3.0


def rounded_reach(clip_norm: float, width: float, entries: int) -> float:
    """C + g sqrt(d): how far one unit can move a sum of so many entries that is rounded to multiples of ``width``."""
    return clip_norm + width * math.sqrt(entries)


def noise_multiplier(
    *, width: float, share_std: float, survivors: int, clip_norm: float, entries: int
) -> float:
    """sigma of the Gaussian mechanism that costs as much, StepEvent.noise_multiplier: (iii) above.

    width: g. share_std: s, of one client's noise in lattice units. survivors: t.
    """
    usable = max(survivors * share_std**2 - ROUNDING_STD**2, 0.0)
    return width * math.sqrt(usable) / rounded_reach(clip_norm, width, entries)


def share_std(
    *, width: float, noise_multiplier: float, survivors: int, clip_norm: float, entries: int
) -> float:
    """Inverse of ``noise_multiplier``: s, in lattice units."""
    needed = noise_multiplier * rounded_reach(clip_norm, width, entries) / width
    return math.sqrt((needed**2 + ROUNDING_STD**2) / survivors)
