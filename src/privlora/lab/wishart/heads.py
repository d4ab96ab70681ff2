"""SGD of N heads at once: each has its own records, Poisson batches, noise and projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.data.members import check_members
from privlora.data.sampling import PoissonSampler
from privlora.errors import ConfigError, DataError, ModelError, PrivacyError
from privlora.lab.wishart.head_mechanisms import MECHANISMS, SLACK, Batch
from privlora.lab.wishart.head_settings import HeadSettings
from privlora.mechanisms.charges import Charges, Uncharged
from privlora.mechanisms.noise import NoiseSource
from privlora.mechanisms.noising import Noising
from privlora.randomness import private_generator

# Above this sampling rate it is faster to compute every row for every head than to gather the rows of each batch.
_GATHER_BELOW = 0.25
_HIDDEN = 1 << 100  # added to a seed: of secret projections, apart from batches and noise
_PUBLIC_SEED = 0  # of the frozen A (lora-fa) and the subspaces (project-then-clip)
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


@dataclass(frozen=True)
class HeadData:
    """Records of fixed features. A row that is not finite counts as all zeros. Append a constant feature for a bias.

    features: (n, d) float32 or float64, computed without looking at these records' labels. labels: (n,) int64, each in
    [0, classes). classes: c, public. dataset_size: public (estimated) number of records that a head may see; sums are
    divided by sample_rate * dataset_size.

    Raises:
        ConfigError: shapes, dtypes or the size do not fit.
        DataError: a label is out of range.
    """

    features: Tensor
    labels: Tensor
    classes: int
    dataset_size: int

    def __post_init__(self) -> None:
        features, labels, records = self.features, self.labels, len(self.features)
        # Norms in half precision would not bound a record's contribution.
        fit = features.dim() == 2 and features.is_floating_point() and features.element_size() >= 4
        if not fit or labels.shape != (records,) or labels.dtype != torch.int64 or self.dataset_size < 1:
            raise ConfigError(
                f"features are {tuple(features.shape)} {features.dtype}, labels {tuple(labels.shape)} {labels.dtype}, "
                f"dataset_size {self.dataset_size}",
                fix="give a float32 or float64 matrix, a row a record, as many int64 labels, and the public number",
            )
        if records and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            fix = "number the classes from 0, and give their public count"
            raise DataError(f"a label is not in [0, {self.classes})", fix=fix)
        finite = features.isfinite().all(1, keepdim=True)
        object.__setattr__(self, "features", torch.where(finite, features, 0.0))


def train_heads(
    data: HeadData,
    settings: HeadSettings,
    *,
    members: Tensor,
    sample_rate: float,
    seeds: Sequence[int] | None = None,
    ledgers: Sequence[Charges] | None = None,
) -> TrainedHeads:
    """Train one head for each row of ``members``, from W = 0, by SGD on the cross-entropy.

    A head's result depends on its row of members, its seed and its place (which chooses its public projection), not on
    the other heads.

    Args:
        data, settings: the same for all heads.
        members: (N, n) bool: which records each head may see (the IN and OUT sets of an attack).
        sample_rate: q in (0, 1]: each of a head's records joins each of its batches with this probability. Public: do
            not derive it from a private number of records.
        seeds: for studies and tests only, N different integers >= 0; batches, noise and hidden projections then can be
            replayed, and the result says so. None: keys of the operating system.
        ledgers: one for each head; charged before the noise of each of its steps.

    Returns:
        the trained heads, in the features' dtype.

    Raises:
        ConfigError: a setting is out of range or the shapes do not fit.
        PrivacyError: a ledger refuses; or ledgers are given with seeds, or for a method that states no epsilon; or
            m2-unclipped gets a record that its bound does not cover, which is itself a fact about the data.
    """
    check_members(members, len(data.features), seeds=seeds, ledgers=ledgers)
    columns = data.features.shape[1]
    settings.check_fit(data.classes, columns)
    _refuse_unbounded(data, settings)
    everything = sample_rate >= _GATHER_BELOW or not len(data.features)
    turn = _heads_per_turn(data, settings, sample_rate, everything=everything)

    event = StepEvent(PoissonSampling(sample_rate), settings.noise_multiplier)
    if ledgers is not None:
        event = settings.step_event(sample_rate, columns)
    trained = data.features.new_empty(len(members), data.classes, columns)
    for first in range(0, len(members), turn):
        chosen = range(first, min(first + turn, len(members)))
        keys: list[int | None] = [None if seeds is None else seeds[n] for n in chosen]
        rows = [np.flatnonzero(members[n].numpy()) for n in chosen]
        samplers = [
            PoissonSampler(len(own), sample_rate, insecure_seed=None if key is None else 2 * key)
            for own, key in zip(rows, keys, strict=True)
        ]
        hidden = [private_generator(None if key is None else _HIDDEN + key) for key in keys]
        public = [np.random.default_rng([_PUBLIC_SEED, n]) for n in chosen]
        pens = [
            Noising(
                Uncharged() if ledgers is None else ledgers[n],
                NoiseSource(None if key is None else 2 * key + 1),
            )
            for n, key in zip(chosen, keys, strict=True)
        ]
        mechanism = MECHANISMS[settings.method](settings, columns, trained.dtype, pens, event, hidden, public)
        values = trained.new_zeros(len(chosen), data.classes, mechanism.width)
        velocity = torch.zeros_like(values)
        for step in range(settings.steps):
            drawn = [own[sampler.draw()] for own, sampler in zip(rows, samplers, strict=True)]
            batch = _batch(data, drawn, everything)
            residuals = batch.residuals(mechanism.weights(values))
            gradient = mechanism.noisy_sum(batch, residuals) / (sample_rate * data.dataset_size)
            velocity = settings.momentum * velocity + gradient
            values -= settings.rate(step) * velocity
        trained[first : chosen.stop] = mechanism.weights(values)
    return TrainedHeads(trained, settings, sample_rate, insecure=seeds is not None)


def _refuse_unbounded(data: HeadData, settings: HeadSettings) -> None:
    """A gradient is a residual, of norm sqrt 2 at most, times its record's features."""
    if settings.method != "m2-unclipped" or settings.clip_norm is None or not len(data.features):
        return
    longest = float(torch.linalg.vector_norm(data.features, dim=1, dtype=torch.float64).max())
    if math.sqrt(2) * longest > settings.clip_norm * (1 - SLACK):
        raise PrivacyError(
            f"a record's features have norm {longest:.4g}, and clip_norm={settings.clip_norm:g} covers "
            f"{settings.clip_norm / math.sqrt(2):.4g}",
            why="Algorithm 4 clips nothing, so nothing else bounds a record's gradient: NOT PRIVATE",
            fix="shorten the features by a public rule, raise clip_norm, or use m2",
        )


def _batch(data: HeadData, drawn: list[np.ndarray], everything: bool) -> Batch:
    """The batch of each head: all rows with weights, or each head's own rows padded to the longest batch."""
    features, labels = data.features, data.labels
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


def _heads_per_turn(data: HeadData, settings: HeadSettings, sample_rate: float, *, everything: bool) -> int:
    """How many heads fit in ``_MEMORY`` at once: weights and noise, residuals, gathered rows, projections."""
    (records, columns), expected = data.features.shape, sample_rate * data.dataset_size
    places = records if everything else expected + 6 * math.sqrt(expected) + 1
    numbers = 10 * data.classes * columns + 4 * data.classes * places
    if not everything:
        numbers += places * columns
    if settings.method in ("lora-fa", "m2-unclipped", "project-then-clip") and settings.rank is not None:
        numbers += 2 * settings.rank * columns + places * settings.rank
    return max(1, int(_MEMORY / (numbers * data.features.element_size())))


class StaticPoison(NamedTuple):
    """One canary. inputs: of the given shape, float32; label: the reference model's least likely class."""

    inputs: Tensor
    label: int


def static_poison(
    reference: Callable[[Tensor], Tensor], shape: tuple[int, ...], generator: torch.Generator
) -> StaticPoison:
    """A record that only memory can explain (Nasr et al. 2021; protocol F.1 of Hu et al. 2026).

    The attacker picks the input at random, independent N(0, 1) entries, and as its label the class that a reference
    model, which did not train on it, thinks least likely. A model that trained on the canary has to bend for it.

    Args:
        reference: inputs (1, *shape) -> logits (1, classes), of the attacker's model.
        shape: of one input, without a batch dimension.
        generator: the attacker's, seeded at will.

    Raises:
        ModelError: the logits are not finite, or not of shape (1, classes).
    """
    inputs = torch.randn(shape, generator=generator)
    logits = reference(inputs[None])
    if logits.dim() != 2 or len(logits) != 1 or not logits.isfinite().all():
        what = f"the reference model gave logits {tuple(logits.shape)} that are no finite (1, classes)"
        raise ModelError(what, fix="train the reference model longer, or at a lower rate")
    return StaticPoison(inputs, int(logits.argmin()))
