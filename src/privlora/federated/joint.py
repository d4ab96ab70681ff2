"""One step of central training, spread over clients: each sums up its share of the batch at a common public point.

A client draws its Poisson share, clips, sums and adds its share of the noise; the server sees the secure sum alone, and
moves as a central run would. Accounting, noise and accuracy are the central ones; only the sum is taken elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from privlora.accounting import Plan
from privlora.config import Settings
from privlora.federated.local import (
    TOGETHER,
    Job,
    dtype_beside,
    end_to_end,
    members_of,
    owners_of,
    rates,
    scale_of,
)
from privlora.federated.messages import SUM
from privlora.federated.payload import lattice_of
from privlora.federated.plans import federation_of, plan_in, resolved, round_settings
from privlora.federated.rules import Tensors
from privlora.federated.rules.checks import refuse_foreign
from privlora.federated.server import Server
from privlora.federated.workplace import Workplace
from privlora.mechanisms import Layout, PlainSums, ShareMechanism, SumMechanism
from privlora.mechanisms.charges import ChargeAll
from privlora.methods import SPACES, find_method, optimizer_of
from privlora.stacked import JointAdapter, Member
from privlora.stacked.parts import StackedNoise
from privlora.training.assembly import Parts
from privlora.training.models import adapter_for, unchanged_afterwards
from privlora.training.state import States
from privlora.training.step import Step


def vectors(jobs: Sequence[Job], workplace: Workplace) -> list[np.ndarray]:
    """Each client's share of one step, in the order of ``jobs``: (entries,) ring integers, or float64 without noise."""
    found: list[np.ndarray] = []
    for first in range(0, len(jobs), TOGETHER):
        found += _vectors(jobs[first : first + TOGETHER], workplace)
    return found


def _vectors(jobs: Sequence[Job], workplace: Workplace) -> list[np.ndarray]:
    model, _, run = workplace.loaded
    settings = round_settings(run, jobs[0].number)
    with unchanged_afterwards(model):
        parts = _parts(settings, model, jobs)
        members = members_of(jobs, settings, {})  # the mechanism charges for them
        step = Step(
            state=parts,
            mechanism=_mechanism(parts, jobs, members, run),
            examples=end_to_end([job.data.examples for job in jobs]),
            learning_rate=0.0,  # nothing moves here
            max_tokens=settings.run.max_tokens,
            dropout=settings.model.dropout,
        )
        with parts.adapter:
            step.accumulate([unit for member in members for unit in member.draw()])
        mechanism = step.mechanism
        if isinstance(mechanism, ShareMechanism):
            return mechanism.shares(len(jobs))
        assert isinstance(mechanism, PlainSums)
        return mechanism.sums(len(jobs))


def _parts(settings: Settings, model: torch.nn.Module, jobs: Sequence[Job]) -> Parts:
    """The method at the point that was sent, with whose each record is."""
    method, hyper = find_method(settings.method.name), resolved(settings)
    adapter = adapter_for(settings, model, dropout=settings.adapter.lora_dropout)
    space = SPACES[method.space]
    of_space = {name: hyper.settings[name] for name in space.optimizers[hyper.optimizer].space_settings}
    dtype = dtype_beside(model)
    # Where it starts makes no difference: the point follows.
    start = space.start(
        adapter, "random", seed=0, scale=scale_of(settings), dtype=dtype, subspaces=None, **of_space
    )
    joint = JointAdapter.like(adapter, len(jobs), owners_of([job.data for job in jobs]))
    coordinates = start.stacked(joint, 1)
    refuse_foreign(jobs[0].sent, {n: tuple(t.shape) for n, t in coordinates.state_dict().items()})
    coordinates.load_state_dict({name: t.to(dtype) for name, t in jobs[0].sent.items()})
    return Parts(
        method=method,
        coordinates=coordinates,
        optimizer=optimizer_of(method.space, hyper, coordinates),
        settings=settings,
        hyper=hyper,
    )


def _mechanism(
    parts: Parts, jobs: Sequence[Job], members: Sequence[Member], run: Settings
) -> ShareMechanism | PlainSums:
    """parts: with the settings of the round. run: settings of all rounds."""
    settings = parts.settings
    privacy, ledgers = settings.privacy, [job.ledger for job in jobs if job.ledger is not None]
    if not ledgers:
        return PlainSums(
            parts.coordinates, expected_batch_size=privacy.b, steps=privacy.steps, needs_examples=True
        )
    plan = plan_in(run, ledgers[0].plan, jobs[0].number)
    entries = {SUM: (Layout.of(parts.coordinates).entries,)}
    lattice = lattice_of(federation_of(settings), plan, entries)
    assert lattice is not None
    return ShareMechanism(
        parts.coordinates,
        clip_norm=privacy.clip_norm,
        # What is charged is what is sampled; a ledger refuses it if it is not what was planned next.
        event=replace(plan.event, sampling=members[0].sampler.sampling),
        expected_batch_size=privacy.b,
        ledger=ChargeAll(ledgers),
        lattice=lattice,
        noise=StackedNoise([member.noise for member in members]),
        clipping=parts.hyper.clipping,
    )


class JointServer(Server):
    """A central run's state, which moves along secure sums."""

    def __init__(self, parts: Parts, plan: Plan | None) -> None:
        """plan: of each client's ledger; None in the non-private mode."""
        self.parts, self._plan = parts, plan
        self._layout = Layout.of(parts.coordinates)
        for number in federation_of(parts.settings).first_rounds:
            self._mechanism(number)  # refuses sums that no lattice is fine enough for
        self._total: np.ndarray | None = None

    def tensors(self, stage: str) -> Tensors:
        return {name: t.detach().cpu().clone() for name, t in self.parts.coordinates.state_dict().items()}

    def expected(self, stage: str, number: int) -> dict[str, tuple[int, ...]]:
        return {SUM: (self._layout.entries,)}

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        vector = message[SUM].numpy()
        self._total = vector.copy() if self._total is None else self._total + vector

    def close(self, stage: str, number: int, present: int) -> None:
        assert self._total is not None
        total, self._total = self._total, None
        release = self._mechanism(number).release(total, number, shares=present)
        # Schedules run over all rounds, and a client is not in each of them.
        self.parts.move(release, rates(self.parts.settings, number)(1))

    def _mechanism(self, number: int) -> SumMechanism:
        """Of round ``number``: its lattice, its divisor."""
        run, plan = self.parts.settings, self._plan
        privacy = round_settings(run, number).privacy
        return SumMechanism(
            self.parts.coordinates,
            lattice=lattice_of(
                federation_of(run),
                None if plan is None else plan_in(run, plan, number),
                {SUM: (self._layout.entries,)},
            ),
            expected_batch_size=privacy.b,
            clip_norm=privacy.clip_norm,
        )

    def states(self) -> States:
        return self.parts.states()

    def take_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._total = None
        self.parts.take_states(states)
