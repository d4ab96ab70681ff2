"""Poisson sampling of privacy units: the logical batch of one private step and its accounted event."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from privlora.accounting.events import (
    BallsInBinsSampling,
    CyclicPoissonSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
)
from privlora.errors import ConfigError, PrivacyError
from privlora.randomness import counter_generator, private_generator
from privlora.stages import DRAW, staged


class PoissonSampler:
    """Draws logical batches: every privacy unit joins independently with probability ``sample_rate``.

    Guarantee: ``draw`` follows exactly the law that ``sampling`` states, so what is sampled is accounted.
    A resumed run makes a new sampler: Poisson draws have no memory, so nothing has to be restored.

    ======================== =========================================================================
    Case                     What happens
    ======================== =========================================================================
    empty batch              an empty array; the step must still add its noise and be charged
    more than max_batch_size a uniformly random subset of that size stays; never an error
    units < dataset_size     truncated sampling draws from ``dataset_size`` places, those without a unit
                             being empty: adding a unit fills a place, as the accounting of it assumes
    units > dataset_size     refused when truncating: epsilon would be understated
    ======================== =========================================================================

    Args:
        units: number of privacy units present (private: it is never shown again).
        sample_rate: q in (0, 1], the public probability of each unit.
        max_batch_size: public bound on the units of a batch; None for plain Poisson sampling. At about
            1.75 q N and above the bound costs no measurable epsilon.
        dataset_size: public (estimated) number of units N; needed with ``max_batch_size``.
        insecure_seed: for tests only; ``insecure`` then is true and the run must be reported as not private.

    Raises:
        ConfigError: a setting is out of range or missing.
        PrivacyError: truncation is asked for and there are more units than ``dataset_size``.
    """

    def __init__(
        self,
        units: int,
        sample_rate: float,
        *,
        max_batch_size: int | None = None,
        dataset_size: int | None = None,
        insecure_seed: int | None = None,
    ) -> None:
        _check(units, sample_rate, "set sample_rate to expected_batch_size / dataset_size")
        if dataset_size is not None and dataset_size < 1:
            fix = "give the public number of units"
            raise ConfigError(f"dataset_size={dataset_size} is below 1", fix=fix)
        self._places = units
        if max_batch_size is not None:
            if max_batch_size < 1:
                fix = "leave it out, or set it to at least 1.75 times the expected batch size"
                raise ConfigError(f"max_batch_size={max_batch_size} is below 1", fix=fix)
            if dataset_size is None:
                why = "the epsilon of truncated Poisson sampling depends on a public number of units"
                fix = "set dataset_size to a public upper bound on the number of units"
                raise ConfigError("max_batch_size is set without dataset_size", why=why, fix=fix)
            if units > dataset_size:
                raise PrivacyError(
                    f"there are more privacy units than dataset_size={dataset_size}",
                    why="more batches would be truncated than are accounted, and epsilon understated",
                    fix="raise dataset_size to a public upper bound on the number of units",
                )
            self._places = dataset_size
        self._units = units
        self.sample_rate = sample_rate
        self.max_batch_size = max_batch_size
        self.dataset_size = dataset_size
        self.insecure = insecure_seed is not None
        self.generator = private_generator(insecure_seed)

    @property
    def sampling(self) -> PoissonSampling | TruncatedPoissonSampling:
        """What happened at each draw, for the ledger and the accountant."""
        if self.max_batch_size is None or self.dataset_size is None:
            return PoissonSampling(self.sample_rate)
        return TruncatedPoissonSampling(self.sample_rate, self.max_batch_size, self.dataset_size)

    @property
    def expected_batch_size(self) -> float:
        """q N with the public N: what sums are divided by. Never the realised size, which is private.

        Raises:
            ConfigError: no ``dataset_size`` was given.
        """
        if self.dataset_size is None:
            why = "deriving it from the private number of units would reveal that number"
            fix = "set dataset_size to a public estimate, or give the expected batch size yourself"
            raise ConfigError("expected_batch_size is unknown without dataset_size", why=why, fix=fix)
        return self.sample_rate * self.dataset_size

    @staged(DRAW)
    def draw(self) -> np.ndarray:
        """One logical batch: distinct unit indices, shape (realised batch size,), int64, in no fixed order.

        Independent coins give a Binomial(N, q) number of heads, and given that number every subset of that
        size is equally likely. Drawing the size first and then a uniform subset is therefore the same law, in
        time proportional to the batch rather than to N. Cutting the size at ``max_batch_size`` before the
        subset is drawn leaves a uniform subset of the larger one.
        """
        size = int(self.generator.binomial(self._places, self.sample_rate))
        if self.max_batch_size is not None:
            size = min(size, self.max_batch_size)
        drawn = self.generator.choice(self._places, size=size, replace=False, shuffle=False)
        return drawn[drawn < self._units].astype(np.int64)


def _check(units: int, sample_rate: float, fix: str) -> None:
    if units < 0:
        raise ConfigError(f"units={units} is negative", fix="pass the number of privacy units")
    if not 0.0 < sample_rate <= 1.0:
        raise ConfigError(f"sample_rate={sample_rate} is not in (0, 1]", fix=fix)


def classes_of(key: int, classes: int, units: int, turn: int = 0) -> np.ndarray:
    """(units,) int64: PRIVATE, of which of b classes each unit is, by its place alone. turn: of dealing."""
    return counter_generator(key, turn).integers(classes, size=units)


class CyclicPoissonSampler:
    """Draws logical batches from one class of units after the other, in which each joins by a coin of its own.

    Guarantee: ``draw`` follows exactly the law that ``sampling`` states. A unit's class depends on ``key`` and on the
    unit's place alone, not on who else is there, so whoever is added or removed changes nobody else's class.

    Args:
        units: number of privacy units present (private: it is never shown again).
        sample_rate: q in (0, 1], the public probability of a unit in a step of its class.
        classes: b, at least 2.
        key: PRIVATE, 128 bits of the operating system. A run keeps it to its end: other classes would let a unit join
            twice in a cycle.
        charged: how many steps the ledger shows. The class follows from it, so a step that was charged and lost shifts
            nobody's turn.
        insecure_seed: of the coins, for tests only.

    Raises:
        ConfigError: a setting is out of range.
        PrivacyError: there are fewer than two classes.
    """

    def __init__(
        self,
        units: int,
        sample_rate: float,
        classes: int,
        *,
        key: int,
        charged: Callable[[], int],
        insecure_seed: int | None = None,
    ) -> None:
        _check(
            units, sample_rate, "take fewer classes: of a class it is their number times that of all units"
        )
        self.sampling = CyclicPoissonSampling(sample_rate, classes)
        dealt = classes_of(key, classes, units)
        self._members = [np.flatnonzero(dealt == c) for c in range(classes)]
        self._charged = charged
        self.insecure = insecure_seed is not None
        self.generator = private_generator(insecure_seed)

    @staged(DRAW)
    def draw(self) -> np.ndarray:
        """One logical batch of the class whose turn it is, as of `PoissonSampler.draw`."""
        members = self._members[self._charged() % len(self._members)]
        size = int(self.generator.binomial(len(members), self.sampling.sample_rate))
        return self.generator.choice(members, size=size, replace=False, shuffle=False).astype(np.int64)


class BallsInBinsSampler:
    """Draws logical batches so that each unit is in one of every m steps, dealt by itself and uniformly.

    Guarantee: ``draw`` follows exactly the law that ``sampling`` states. Where a unit goes in a pass depends on
    ``key``, on the pass and on the unit's place alone, so whoever is added or removed moves nobody else.

    Args:
        units: number of privacy units present (private: it is never shown again).
        bins: m, at least 2.
        key: PRIVATE, 128 bits of the operating system. A run keeps it to its end: dealt anew, a unit could join twice
            in a pass.
        charged: how many steps the ledger shows. The step of a pass follows from it, so one that was charged and lost
            is never drawn again.
        insecure_seed: of which of a user's records are taken, for tests only.

    Raises:
        ConfigError: ``units`` is negative.
        PrivacyError: there are fewer than two bins.
    """

    def __init__(
        self, units: int, bins: int, *, key: int, charged: Callable[[], int], insecure_seed: int | None = None
    ) -> None:
        self.sampling = BallsInBinsSampling(bins)
        _check(units, self.sampling.sample_rate, "")
        self._units, self._key, self._charged = units, key, charged
        self._dealt: tuple[int, np.ndarray] | None = None
        self.insecure = insecure_seed is not None
        self.generator = private_generator(insecure_seed)

    @staged(DRAW)
    def draw(self) -> np.ndarray:
        """One logical batch, as of `PoissonSampler.draw`."""
        turn, step = divmod(self._charged(), self.sampling.bins)
        if self._dealt is None or self._dealt[0] != turn:
            self._dealt = turn, classes_of(self._key, self.sampling.bins, self._units, turn)
        return np.flatnonzero(self._dealt[1] == step)
