"""SGD of N heads at once: each has its own records, Poisson batches, noise and projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import StepEvent
from privlora.data.sampling import PoissonSampler
from privlora.errors import ConfigError, DataError, PrivacyError
from privlora.heads.releases import RELEASES, Batch
from privlora.heads.settings import HeadSettings
from privlora.mechanisms.charges import Charges
from privlora.randomness import private_generator

# Above this sampling rate it is faster to compute every row for every head than to gather the rows of each batch.
_GATHER_BELOW = 0.25
_MEMORY = 1 << 30  # bytes for the heads that are under way together


@dataclass(frozen=True)
class TrainedHeads:
    """N heads and what was done to get them.

    weights: (N, c, d). sample_rate: q of each step's Poisson batch. insecure: seeds were given, so that batches, noise
    and projections can be replayed and nothing here is private.
    """

    weights: Tensor
    settings: HeadSettings
    sample_rate: float
    insecure: bool

    @property
    def event(self) -> StepEvent:
        """One step of one head. PrivacyError where the method states no epsilon."""
        return self.settings.step_event(self.sample_rate, self.weights.shape[2])

    def epsilon(self, delta: float) -> float:
        """Of publishing one head (PLD, add or remove one record); heads that share records add up. PrivacyError."""
        return epsilon([(self.event, self.settings.steps)], delta)

    def logits(self, features: Tensor) -> Tensor:
        """(N, rows, c) for features (rows, d)."""
        return torch.einsum("ncd,bd->nbc", self.weights, features.to(self.weights.dtype))

    def losses(self, features: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy in nats of every head on every row, (N, rows)."""
        return cross_entropy(
            self.logits(features).transpose(1, 2), labels.expand(len(self.weights), -1), reduction="none"
        )

    def accuracy(self, features: Tensor, labels: Tensor) -> Tensor:
        """Share of rows whose label has the highest logit, (N,)."""
        return (self.logits(features).argmax(-1) == labels).double().mean(1)


def train_heads(
    features: Tensor,
    labels: Tensor,
    settings: HeadSettings,
    *,
    classes: int,
    members: Tensor,
    expected_batch_size: float,
    sample_rate: float,
    seeds: Sequence[int] | None = None,
    projection_seed: int = 0,
    initial: Tensor | None = None,
    ledgers: Sequence[Charges] | None = None,
    memory: int = _MEMORY,
    progress: Callable[[int], None] | None = None,
) -> TrainedHeads:
    """Train one head for each row of ``members``, from W = 0 or ``initial``, by SGD on the cross-entropy.

    A head's result depends on its row of members, its seed and its place (which chooses its public projection), not on
    the heads beside it. There is no bias: append a constant feature for one.

    Args:
        features: (n, d) float32 or float64; fixed, and computed without looking at these records' labels. A row that
            is not finite counts as all zeros.
        labels: (n,) int64, each in [0, classes).
        settings: the same for all heads.
        classes: c, public.
        members: (N, n) bool: which records each head may see (the IN and OUT sets of an attack).
        expected_batch_size: public, what sums are divided by.
        sample_rate: q in (0, 1]: each of a head's records joins each of its batches with this probability. Public too:
            do not derive it from a private number of records.
        seeds: for studies and tests only, N different integers >= 0; batches, noise and hidden projections then can be
            replayed, and the result says so. None: keys of the operating system.
        projection_seed: public; of the frozen A (lora-fa) and the subspaces (project-then-clip).
        initial: (c, d), public starting weights.
        ledgers: one for each head; charged before the noise of each of its steps.
        memory: bytes that heads trained together may take; more heads are trained in turns.
        progress: called with the number of finished heads after each turn.

    Returns:
        the trained heads, in the features' dtype.

    Raises:
        ConfigError: a setting is out of range or the shapes do not fit.
        DataError: a label is out of range.
        PrivacyError: a ledger refuses; or ledgers are given with seeds, or for a method that states no epsilon.
    """
    _check(features, labels, settings, classes, members, expected_batch_size, seeds, initial, ledgers)
    event = None if ledgers is None else settings.step_event(sample_rate, features.shape[1])
    features = torch.where(features.isfinite().all(1, keepdim=True), features, 0.0)
    everything = sample_rate >= _GATHER_BELOW or not len(features)
    turn = _heads_per_turn(
        features, classes, settings, expected_batch_size, everything=everything, memory=memory
    )
    start = features.new_zeros(classes, features.shape[1]) if initial is None else initial.to(features.dtype)

    trained = features.new_empty(len(members), classes, features.shape[1])
    for first in range(0, len(members), turn):
        chosen = range(first, min(first + turn, len(members)))
        keys: list[int | None] = [None if seeds is None else seeds[n] for n in chosen]
        rows = [np.flatnonzero(members[n].numpy()) for n in chosen]
        samplers = [
            PoissonSampler(len(own), sample_rate, insecure_seed=None if key is None else 2 * key)
            for own, key in zip(rows, keys, strict=True)
        ]
        noise = [private_generator(None if key is None else 2 * key + 1) for key in keys]
        public = [np.random.default_rng([projection_seed, n]) for n in chosen]
        release = RELEASES[settings.method](settings, features.shape[1], features.dtype, noise, public)
        values = features.new_zeros(len(chosen), classes, release.width)
        velocity = torch.zeros_like(values)
        for step in range(settings.steps):
            drawn = [own[sampler.draw()] for own, sampler in zip(rows, samplers, strict=True)]
            batch = _batch(features, labels, drawn, everything)
            if ledgers is not None and event is not None:
                for n in chosen:
                    ledgers[n].charge(event)
            residuals = batch.residuals(start + release.weights(values))
            gradient = release.noisy_sum(batch, residuals) / expected_batch_size
            velocity = settings.momentum * velocity + gradient
            values -= settings.rate(step) * velocity
        trained[first : first + len(chosen)] = start + release.weights(values)
        if progress is not None:
            progress(chosen.stop)
    return TrainedHeads(trained, settings, sample_rate, insecure=seeds is not None)


def _batch(features: Tensor, labels: Tensor, drawn: list[np.ndarray], everything: bool) -> Batch:
    """The batch of each head: all rows with weights, or each head's own rows padded to the longest batch."""
    if everything:
        weights = features.new_zeros(len(drawn), len(features))
        for own, taken in zip(weights, drawn, strict=True):
            own[torch.from_numpy(taken)] = 1.0
        return Batch(features, labels, weights)
    places = max(1, max(len(taken) for taken in drawn))
    index = np.zeros((len(drawn), places), dtype=np.int64)
    weights = features.new_zeros(len(drawn), places)
    for n, taken in enumerate(drawn):
        index[n, : len(taken)] = taken
        weights[n, : len(taken)] = 1.0
    at = torch.from_numpy(index)
    return Batch(features[at], labels[at], weights)


def _heads_per_turn(
    features: Tensor,
    classes: int,
    settings: HeadSettings,
    expected_batch_size: float,
    *,
    everything: bool,
    memory: int,
) -> int:
    """How many heads fit in ``memory`` at once: weights and noise, residuals, gathered rows, projections."""
    records, columns = features.shape
    places = records if everything else expected_batch_size + 6 * math.sqrt(expected_batch_size) + 1
    numbers = 10 * classes * columns + 4 * classes * places
    if not everything:
        numbers += places * columns
    if settings.method in ("lora-fa", "project-then-clip") and settings.rank is not None:
        numbers += 2 * settings.rank * columns + places * settings.rank
    return max(1, int(memory / (numbers * features.element_size())))


def _check(
    features: Tensor,
    labels: Tensor,
    settings: HeadSettings,
    classes: int,
    members: Tensor,
    expected_batch_size: float,
    seeds: Sequence[int] | None,
    initial: Tensor | None,
    ledgers: Sequence[Charges] | None,
) -> None:
    if features.dim() != 2 or not features.is_floating_point() or features.element_size() < 4:
        raise ConfigError(
            f"features are {tuple(features.shape)} {features.dtype}",
            why="norms in half precision do not bound a record's contribution",
            fix="give a float32 or float64 matrix, one row per record",
        )
    records, columns = features.shape
    if members.dtype != torch.bool or members.dim() != 2 or members.shape[1] != records or not len(members):
        raise ConfigError(
            f"members are {tuple(members.shape)} {members.dtype}", fix=f"give bool (heads, {records})"
        )
    if labels.shape != (records,) or labels.dtype != torch.int64:
        raise ConfigError(f"labels are {tuple(labels.shape)} {labels.dtype}", fix=f"give int64 ({records},)")
    if records and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"a label is not in [0, {classes})", fix="number the classes from 0, and give their public count"
        )
    if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
        raise ConfigError(
            f"expected_batch_size={expected_batch_size} must be positive", fix="give q times the public size"
        )
    if settings.method in ("m1", "m2") and columns < 2 * classes:
        raise ConfigError(
            f"{settings.method} with {columns} features and {classes} classes",
            why="projections are drawn by a law that needs two features for each class",
            fix="use dp-sgd: so few features leave nothing to project",
        )
    haar = settings.method == "project-then-clip" or (
        settings.method in ("m1", "m2") and settings.projection == "haar"
    )
    if haar and settings.rank is not None and settings.rank > columns:
        raise ConfigError(
            f"rank={settings.rank} is above the {columns} features", fix="choose a lower rank, or dp-sgd"
        )
    if initial is not None and initial.shape != (classes, columns):
        raise ConfigError(f"initial is {tuple(initial.shape)}", fix=f"give ({classes}, {columns})")
    for name, given in (("seeds", seeds), ("ledgers", ledgers)):
        if given is not None and len(given) != len(members):
            raise ConfigError(f"{len(given)} {name} for {len(members)} heads", fix="give one for each head")
    if seeds is not None and ledgers is not None:
        raise PrivacyError(
            "heads with seeds cannot be charged to ledgers",
            why="whoever knows a seed can subtract the noise",
            fix="leave seeds out, or ledgers if this is a study",
        )
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise ConfigError("two heads have the same seed", fix="give each head its own")
