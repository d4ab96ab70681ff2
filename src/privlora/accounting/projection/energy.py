"""The energy that a random subspace captures of a fixed direction, and finite laws that bound it from above.

A Haar subspace of rank r in d dimensions captures X = |P u|^2 ~ Beta(r/2, (d - r)/2) of a unit vector u (Lemma 17
of Hu et al. 2026). Of a matrix of unit Frobenius norm it captures a weighted mean of such variables, whatever
the rank of the matrix and however they depend on each other; of several layers, a weighted mean again. Such a
mean is below X in increasing convex order, and so is a privacy bound that is a convex increasing function of
the energy: only the stop-loss function E(X - a)_+ matters. A piecewise linear function above it, on a grid of
a, is the stop-loss function of a finite law that bounds them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincc, betainccinv, betaincinv, ndtr, xlogy

from privlora.accounting.events import Projections
from privlora.accounting.projection.gaussian import Floats

_CELLS = 1024
# Cells are evenly spaced in normal scores up to this one: beyond it lie 1e-17 of the probability.
_LAST_SCORE = 8.5
_SMALLEST_CELL = 1e-4  # of min(mean, 1 - mean): narrower cells would drown in rounding
_SERIES_TERMS = 8192


@dataclass(frozen=True)
class EnergyLaw:
    """A finite law on [0, 1]: points (n,) in increasing order, with positive weights (n,) that sum to 1."""

    points: Floats
    weights: Floats

    @cached_property
    def upper_means(self) -> Floats:
        """E(X | X >= x) for each point x, (n,)."""
        mass = np.cumsum(self.weights[::-1])[::-1]
        return np.clip(np.cumsum((self.weights * self.points)[::-1])[::-1] / mass, self.points, 1.0)


def stop_loss(threshold: ArrayLike, rank: int, dimension: int) -> Floats:
    """E(X - a)_+ for X ~ Beta(r/2, (d-r)/2), r < d; elementwise over thresholds a in [0, 1]."""
    a = np.asarray(threshold, np.float64)
    shape, rest = rank / 2, (dimension - rank) / 2
    value = rank / dimension * betaincc(shape + 1, rest, a) - a * betaincc(shape, rest, a)
    return np.maximum(value, 0.0)


@lru_cache(maxsize=16)
def dominating_energy(projections: Projections) -> EnergyLaw:
    """A finite law above the captured energy in increasing convex order: any rank, any layers under one clip.

    Args:
        projections: (rank, dimension) of each layer. The gradient's squared norm, at most C^2, may be spread
            over the layers in any way, and the layers' subspaces may depend on each other.
    """
    if any(rank == dimension for rank, dimension in projections):
        return EnergyLaw(np.ones(1), np.ones(1))
    edges = energy_edges(projections)
    excess = np.max([stop_loss(edges, rank, dimension) for rank, dimension in projections], axis=0)
    survival = np.clip(-np.diff(excess) / np.diff(edges), 0.0, 1.0)
    survival = np.maximum.accumulate(survival[::-1])[::-1]  # convex up to rounding; rounded upwards
    weights = -np.diff(survival, prepend=1.0, append=0.0)
    return EnergyLaw(edges[weights > 0], weights[weights > 0])


def log_moment(exponent: ArrayLike, rank: int, dimension: int) -> Floats:
    """ln E exp(z X) = ln 1F1(r/2; d/2; z) for z >= 0, elementwise: an upper bound, exact to rounding up to z = 4096.

    Sums Kummer's series, whose terms are positive. At term n >= 2 z each is at most half of the one before,
    so the last one bounds the rest. Above z = 4096 the bound is z itself, as X <= 1.
    """
    z = np.asarray(exponent, np.float64)[..., None]
    n = np.arange(_SERIES_TERMS)
    log_ratios = np.log((rank / 2 + n[:-1]) / ((dimension / 2 + n[:-1]) * (n[:-1] + 1.0)))
    log_terms = np.concatenate([[0.0], np.cumsum(log_ratios)]) + xlogy(n, z)
    top = log_terms.max(axis=-1, keepdims=True)
    terms = np.exp(log_terms - top)
    total = top[..., 0] + np.log(terms.sum(axis=-1) + terms[..., -1])
    exact = z[..., 0] <= _SERIES_TERMS / 2
    return np.where(exact, np.minimum(total, z[..., 0]), z[..., 0])


def energy_edges(projections: Projections) -> Floats:
    """Increasing points from 0 to 1, dense where any layer's energy is likely."""
    score = np.linspace(0.0, _LAST_SCORE, _CELLS // 2 + 1)
    tail = ndtr(-score)
    points = [np.array([1.0])]
    for rank, dimension in projections:
        shape, rest = rank / 2, (dimension - rank) / 2
        points += [betaincinv(shape, rest, tail), betainccinv(shape, rest, tail)]
    gap = _SMALLEST_CELL * min(min(rank, dim - rank) / dim for rank, dim in projections)
    edges = [0.0]
    for point in np.unique(np.concatenate(points)):
        if point - edges[-1] > gap:
            edges.append(float(point))
    edges[-1] = 1.0
    return np.array(edges)
