"""Adapters that train side by side, each on its own records, draws, noise and ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from privlora.accounting.events import CyclicPoissonSampling, StepEvent
from privlora.config import PrivacySettings
from privlora.data.examples import Examples
from privlora.data.sampling import CyclicPoissonSampler, PoissonSampler
from privlora.data.units import Units
from privlora.errors import PrivacyError
from privlora.mechanisms import (
    CorrelatedNoise,
    GaussianMechanism,
    MeanMechanism,
    Mechanism,
    NoiseSource,
    band_coefficients,
)
from privlora.mechanisms.charges import ChargeAll, Charges, Uncharged
from privlora.randomness import private_generator
from privlora.stacked.parts import StackedNoise, slices
from privlora.training.assembly import Parts
from privlora.training.step import Step


@dataclass(frozen=True, kw_only=True)
class Member:
    """What one adapter of a team has of its own.

    units: of its records, which are the team's examples number ``first`` and those that follow. own: (k,) int64, the
    units that it may see; None for all. sampler: over the own units; what it states is what is charged. ledger: charged
    before the noise of each step.
    """

    units: Units
    sampler: PoissonSampler | CyclicPoissonSampler
    first: int = 0
    own: np.ndarray | None = None
    noise: NoiseSource = field(default_factory=NoiseSource)
    ledger: Charges = field(default_factory=Uncharged)

    def draw(self) -> list[np.ndarray]:
        """A Poisson batch: numbers of records among the team's examples, one array a drawn unit."""
        drawn = self.sampler.draw()
        units = drawn if self.own is None else self.own[drawn]
        return [self.first + records for records in self.units.draw_records(units, self.sampler.generator)]

    def charge(self, event: StepEvent) -> int:
        """Charge the ledger for this member's part of a stacked release: its own sampling, the noise of all."""
        return self.ledger.charge(replace(event, sampling=self.sampler.sampling))


class Team:
    """Trains what ``stack_parts`` made: after ``take``, each adapter is what it would be in a run of its own.

    Coordinates, clipping, divisor, noise multiplier, optimizer and schedule are those of ``parts`` for all members;
    draws, noise and ledgers are each one's own. Members may sample at different rates: each ledger is charged for its
    own. Nothing that happens to one depends on another. Where members draw in cycles, noise is correlated between the
    steps of a team, in as many bands as there are classes, the same number for all.

    parts: stacked, one copy for each member; their coordinates may have been given different states (parts.joined).
    examples: the records of all members, each with its owner in the stacked adapter's ``owner_of``.
    noise_multiplier: None in the non-private mode. learning_rate: of the team's step 1, 2, …; None: that of ``parts``.
    masks: keys all that is random in forward passes; private.
    Raises PrivacyError for a ledger whose plan is not what the team does.
    """

    def __init__(
        self,
        parts: Parts,
        examples: Examples,
        members: Sequence[Member],
        *,
        noise_multiplier: float | None,
        learning_rate: Callable[[int], float] | None = None,
        masks: np.random.Generator | None = None,
    ) -> None:
        self.parts = parts
        self.members = members
        settings = parts.settings
        for member in members:
            _check(member, settings.privacy)
        self._step = Step(
            state=parts,
            mechanism=self._mechanism(noise_multiplier),
            examples=examples,
            learning_rate=parts.learning_rate if learning_rate is None else learning_rate,
            draw=lambda: [unit for member in members for unit in member.draw()],
            max_tokens=settings.run.max_tokens,
            dropout=settings.model.dropout,
            masks=private_generator() if masks is None else masks,
        )

    def take(self, count: int, progress: Callable[[int], None] | None = None) -> None:
        """So many steps of every member. progress: called after each with the number taken in this call."""
        with self.parts.adapter:
            for number in range(1, count + 1):
                self._step.take()
                if progress is not None:
                    progress(number)

    def states(self) -> list[dict[str, Tensor]]:
        """Where each member stands: ``coordinates.state_dict()`` of a run of its own. Copies."""
        found = slices(self.parts.coordinates.state_dict(), len(self.members))
        return [{name: t.clone() for name, t in own.items()} for own in found]

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """What would be exported: one (A (K, L, m, r), B (K, L, n, r)) a group."""
        trained, count = self.parts.average or self.parts.coordinates, len(self.members)
        return [(a.unflatten(0, (count, -1)), b.unflatten(0, (count, -1))) for a, b in trained.factors()]

    def _mechanism(self, noise_multiplier: float | None) -> Mechanism:
        parts, privacy = self.parts, self.parts.settings.privacy
        if noise_multiplier is None:
            # Sums are each adapter's own, so gradients are each record's own here as well.
            return MeanMechanism(
                parts.coordinates, expected_batch_size=privacy.b, steps=privacy.steps, needs_examples=True
            )
        sampling = self.members[0].sampler.sampling  # a ledger is charged for its own member's
        correlated = None
        if isinstance(sampling, CyclicPoissonSampling):
            # Coefficients are the same for all; each part of the stack has noise of its own and is never mixed.
            correlated = CorrelatedNoise(
                band_coefficients(sampling.classes, privacy.steps), parts.coordinates
            )
        return GaussianMechanism(
            parts.coordinates,
            clip_norm=privacy.clip_norm,
            event=StepEvent(sampling, noise_multiplier, parts.coordinates.event_layers),
            expected_batch_size=privacy.b,
            ledger=ChargeAll(self.members),
            noise=StackedNoise([member.noise for member in self.members]),
            clipping=parts.hyper.clipping,
            correlated=correlated,
        )


def _check(member: Member, privacy: PrivacySettings) -> None:
    plan = getattr(member.ledger, "plan", None)
    secure = member.noise.secure and not member.sampler.insecure
    if plan is not None and (plan.clip_norm, plan.expected_batch_size, plan.insecure_noise) != (
        privacy.clip_norm,
        privacy.b,
        not secure,
    ):
        raise PrivacyError(
            "a member's ledger plans another clipping norm, batch size or kind of noise than its team has",
            why="the ledger would state what was not done",
            fix="make the ledger's plan from the team's settings, and give no seeds in a private run",
        )
