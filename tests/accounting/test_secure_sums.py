"""What sums of discrete Gaussians are, and that they cost no more than the continuous Gaussian they are priced as."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from privlora.accounting.secure_sums import (
    MIN_SHARE_STD,
    ROUNDING_STD,
    noise_multiplier,
    rounded_reach,
    share_std,
)


def pmf(std: float, reach: int, shift: int = 0) -> np.ndarray:
    """Of shift + N_Z(0, std^2) on -reach, …, reach, exact to float64."""
    integers = np.arange(-40 * math.ceil(std), 40 * math.ceil(std) + 1)
    k = np.arange(-reach, reach + 1) - shift
    return np.exp(-(k**2) / (2 * std**2)) / np.exp(-(integers**2) / (2 * std**2)).sum()


def factor(std: float) -> float:
    """How far theta of (ii) is from its mean, twice: for the law and for its normalisation."""
    return 4.3 * math.exp(-2 * math.pi**2 * std**2)


# --- (i) ---


@pytest.mark.parametrize("std", [0.8, 1.0, 1.5])
@pytest.mark.parametrize("terms", [2, 3, 7])
def test_a_sum_of_discrete_gaussians_is_one(std: float, terms: int) -> None:
    reach = 40
    one = pmf(std, reach)
    total = one
    for _ in range(terms - 1):
        total = np.convolve(total, one)
    middle = len(total) // 2
    whole = math.sqrt(terms) * std
    near = int(5 * whole)
    ratio = total[middle - near : middle + near + 1] / pmf(whole, near)
    bound = (1 + 5 * math.exp(-(math.pi**2) * std**2)) ** (terms - 1) - 1
    assert np.abs(ratio - 1).max() <= bound + 1e-12
    if std == 0.8 and terms == 2:
        assert np.abs(ratio - 1).max() > bound / 10  # it is not far from what is true


def test_from_the_smallest_share_on_nothing_is_left_to_see() -> None:
    # log10 of 5 exp(-pi^2 s^2), the factor of one sum of (i), and of the factor of (ii).
    assert math.log10(5) - (math.pi * MIN_SHARE_STD) ** 2 / math.log(10) < -106
    assert factor(ROUNDING_STD) < 1e-76


# --- (ii) ---


@pytest.mark.parametrize("rounding", [0.5, 0.7, 1.0])
@pytest.mark.parametrize(("std", "shift"), [(1.1, 0), (1.3, 2), (3.0, -5)])
def test_a_discrete_gaussian_is_a_rounded_continuous_one(rounding: float, std: float, shift: int) -> None:
    """The mixture of the rounding over the continuous law, by the trapezoidal rule, which is exact to e^-100 here."""
    reach = int(6 * std) + abs(shift)
    z = np.arange(-reach, reach + 1)
    u, step = np.linspace(-20 * std - 10, 20 * std + 10, 20_001, retstep=True)
    integers = np.arange(math.floor(u[0]) - 20, math.ceil(u[-1]) + 21)
    theta = np.exp(-((integers[:, None] - u) ** 2) / (2 * rounding**2)).sum(axis=0)
    channel = np.exp(-((z[:, None] - u) ** 2) / (2 * rounding**2)) / theta
    mixture = (channel * norm.pdf(u, shift, math.sqrt(std**2 - rounding**2))).sum(axis=1) * step
    ratio = pmf(std, reach, shift) / mixture
    assert np.abs(ratio - 1).max() <= factor(rounding) + 1e-10


def delta_continuous(epsilon: float, q: float, shift: float, std: float, *, added: bool) -> float:
    """Hockey-stick divergence of (1 - q) N(0, std^2) + q N(shift, std^2) from N(0, std^2), or the other way round."""
    level = math.exp(epsilon if added else -epsilon)
    if level <= 1 - q:  # the mixture's density is nowhere below
        return max(0.0, 1 - math.exp(epsilon)) if added else 0.0
    cut = (math.log((level - 1 + q) / q) * 2 * std**2 + shift**2) / (2 * shift)
    side = norm.sf if added else norm.cdf
    alone = float(side(cut / std))
    mixed = (1 - q) * alone + q * float(side((cut - shift) / std))
    return mixed - math.exp(epsilon) * alone if added else alone - math.exp(epsilon) * mixed


def delta_discrete(epsilon: float, mixed: np.ndarray, alone: np.ndarray, *, added: bool) -> float:
    p, q = (mixed, alone) if added else (alone, mixed)
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


EPSILONS = [0.01, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("q", [0.05, 0.3, 1.0])
@pytest.mark.parametrize(("std", "rounding"), [(1.2, 1.0), (2.0, 1.0), (5.0, 1.2)])
def test_a_sampled_release_costs_no_more(std: float, rounding: float, q: float, added: bool) -> None:
    less, slack = math.sqrt(std**2 - rounding**2), factor(rounding)
    for shift, epsilon in itertools.product((1, 2, 5), EPSILONS):
        reach = int(15 * std) + shift
        alone, moved = pmf(std, reach), pmf(std, reach, shift)
        found = delta_discrete(epsilon, (1 - q) * alone + q * moved, alone, added=added)
        nearby = epsilon - math.log((1 + slack) / (1 - slack))
        bound = delta_continuous(nearby, q, shift, less, added=added)
        assert found <= (1 + slack) * bound + 1e-12
        if q == 1 and bound > 1e-3:  # with more noise than there is, the same comparison fails
            assert found > delta_continuous(epsilon, q, shift, 1.3 * std, added=added)


@pytest.mark.parametrize("q", [0.3, 1.0])
@pytest.mark.parametrize("shift", [(1, 0), (1, 1), (2, -1), (3, 2)])
def test_it_costs_no_more_in_two_dimensions(shift: tuple[int, int], q: float) -> None:
    std, rounding, reach = 1.5, 1.0, 25
    less, slack = math.sqrt(std**2 - rounding**2), 2.1 * factor(rounding)
    alone = np.outer(pmf(std, reach), pmf(std, reach)).ravel()
    moved = np.outer(pmf(std, reach, shift[0]), pmf(std, reach, shift[1])).ravel()
    for epsilon, added in itertools.product(EPSILONS, (True, False)):
        found = delta_discrete(epsilon, (1 - q) * alone + q * moved, alone, added=added)
        nearby = epsilon - math.log((1 + slack) / (1 - slack))
        bound = delta_continuous(nearby, q, math.hypot(*shift), less, added=added)
        assert found <= (1 + slack) * bound + 1e-12


# --- (iii) ---


@pytest.mark.parametrize("entries", [1, 7, 400])
def test_rounding_moves_a_unit_no_farther_than_is_said(entries: int) -> None:
    generator = np.random.default_rng(entries)
    clip_norm, width = 3.0, 0.25
    farthest = 0.0
    for size in (0.0, 1e-6, 0.3, 1.0):
        others = generator.normal(size=(500, entries)) * 10
        others[::2] = (np.rint(others[::2] / width) + 0.5) * width - 1e-9  # just below where rounding turns
        unit = np.abs(generator.normal(size=(500, entries))) + 1e-3
        unit *= size * clip_norm / np.linalg.norm(unit, axis=1, keepdims=True)
        moved = np.rint((others + unit) / width) - np.rint(others / width)
        lengths = np.linalg.norm(moved, axis=1) * width
        assert lengths.max() <= rounded_reach(size * clip_norm, width, entries) * (1 + 1e-12)
        farthest = max(farthest, lengths.max() - size * clip_norm)
    assert farthest > 0.9 * width * math.sqrt(entries)  # and less would not do


def test_the_noise_multiplier_is_that_of_the_derivation() -> None:
    # g sqrt(t s^2 - 9) / (C + g sqrt(d)) = 0.5 sqrt(4 * 6.25 - 9) / (1.5 + 0.5 * 5) = 0.5 * 4 / 4
    found = noise_multiplier(width=0.5, share_std=2.5, survivors=4, clip_norm=1.5, entries=25)
    assert found == pytest.approx(0.5, rel=1e-15)


def test_noise_that_rounding_uses_up_is_worth_nothing() -> None:
    assert noise_multiplier(width=1.0, share_std=1.0, survivors=9, clip_norm=1.0, entries=1) == 0.0
    assert noise_multiplier(width=1.0, share_std=1.0, survivors=3, clip_norm=1.0, entries=1) == 0.0


@pytest.mark.parametrize("survivors", [1, 3, 100])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 20.0])
def test_the_share_of_one_client_gives_it_back(sigma: float, survivors: int) -> None:
    numbers = {"width": 2.0**-12, "survivors": survivors, "clip_norm": 0.7, "entries": 1000}
    std = share_std(noise_multiplier=sigma, **numbers)
    assert noise_multiplier(share_std=std, **numbers) == pytest.approx(sigma, rel=1e-12)
    assert std == pytest.approx(sigma * 0.7 * 2**12 / math.sqrt(survivors), rel=0.05)


# --- all of it ---


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("q", [0.2, 0.7])
def test_a_whole_sum_of_two_clients_costs_no_more_than_is_charged(q: float, added: bool) -> None:
    """Sampled records of two clients, each client's part rounded and noised, added modulo 64: exact, by all batches."""
    clip_norm, std, ring, rounding = 2.3, 1.4, 64, 1.0
    slack = factor(rounding) + 5 * math.exp(-(math.pi**2) * std**2)
    less, reach = math.sqrt(2 * std**2 - rounding**2), rounded_reach(clip_norm, 1.0, 1)
    others = ([1.7, -0.4], [2.1, 0.9])  # of either client

    def law(mine: float) -> np.ndarray:
        """Of the opened sum, for a first client that also has a record of this value, or none."""
        noise = pmf(std, 30)
        shares = []
        for k, records in enumerate(others):
            share = np.zeros(121)
            for chosen in itertools.product((0, 1), repeat=len(records)):
                chance = math.prod(q if taken else 1 - q for taken in chosen)
                total = sum(x for x, taken in zip(records, chosen, strict=True) if taken)
                for weight, value in ((q, total + mine), (1 - q, total)) if k == 0 else ((1.0, total),):
                    share[30 + round(value) : 91 + round(value)] += chance * weight * noise
            shares.append(share)
        whole = np.convolve(*shares)
        return np.bincount(np.arange(len(whole)) % ring, whole, ring)

    alone = law(0.0)
    for mine, epsilon in itertools.product((clip_norm, -clip_norm, 0.6, 1.1), EPSILONS):
        found = delta_discrete(epsilon, law(mine), alone, added=added)
        nearby = epsilon - math.log((1 + slack) / (1 - slack))
        assert found <= (1 + slack) * delta_continuous(nearby, q, reach, less, added=added) + 1e-12
