"""Rounds of votes that survive a crash at any point: propose, charge, release, store, use, store.

| a crash                                   | what happens when the run goes on                                   |
|-------------------------------------------|---------------------------------------------------------------------|
| before the charge                         | the round is done again; nothing was charged                        |
| after the charge, before its release is   | the charge stays and its noise is never drawn again: the run has a  |
| stored                                    | round less                                                          |
| after the release is stored, before what  | the stored release is used again, without a charge and without a    |
| follows from it is                        | look at the records                                                 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from privlora.accounting import Ledger, StepEvent
from privlora.errors import ConfigError, PrivacyError
from privlora.mechanisms import NoiseSource, VoteMechanism
from privlora.synthesis.directions import Floats
from privlora.synthesis.population import Population
from privlora.synthesis.votes import Voters

State = dict[str, Tensor]
_TEXTS = "population."


class Proposer(Protocol):
    """The public half of a round: it sees releases and no record."""

    population: Population
    """The texts that are voted on, as they were when ``propose`` gave their directions."""

    def propose(self) -> Floats:
        """The directions (N, d) of the round's candidates, N the same in all rounds."""
        ...

    def use(self, votes: Floats, number: int) -> None:
        """Make of (N,) noisy sums of votes what the next round begins with. number: of the release, from 1; the same
        again after a crash, so whatever is drawn here has to follow from it."""
        ...


class Rounds:
    """The first phase of a ledger's plan: each of its releases is a round's votes.

    proposer: what is voted on, and what becomes of it. voters: PRIVATE. divisor: what votes are divided by, public.
    noise: for tests alone.

    Raises PrivacyError if voters are drawn otherwise than the plan says, or by a seed that it does not tell of.
    """

    def __init__(
        self,
        proposer: Proposer,
        voters: Voters,
        ledger: Ledger,
        *,
        divisor: float,
        noise: NoiseSource | None = None,
    ) -> None:
        planned, self.rounds = ledger.plan.phases[0]
        event = StepEvent(voters.sampling, planned.noise_multiplier)
        if event != planned:
            raise PrivacyError(
                f"{ledger.summary.path}: votes are [{event.describe()}], planned is [{planned.describe()}]",
                why="the stated epsilon holds for the plan only",
                fix="let voters be sampled as the plan says, in its first phase",
            )
        if not (voters.secure or ledger.plan.insecure_noise):
            raise PrivacyError(
                f"{ledger.summary.path}: who votes is drawn by a seed",
                why="whoever knows the seed knows who was drawn, and sampling no longer lowers epsilon",
                fix="make the voters without a seed",
            )
        self.proposer = proposer
        self.released: list[Floats] = []  # public: each round's noisy mean vote, (N,)
        self._steps: list[int] = []  # the ledger's number of each
        self._used = 0  # how many of them the proposer has used
        self._voters, self._ledger = voters, ledger
        self._mechanism = VoteMechanism(event=event, divisor=divisor, ledger=ledger, noise=noise)

    def run(self, save: Callable[[State], None]) -> None:
        """Take all rounds that are left.

        save: stores a state durably, in one file with whatever else the proposer changes, such as a model's weights.

        Errors of the ledger, of models and of ``save`` pass through; a new object goes on from what was stored last.
        """
        while self._used < len(self.released) or self._ledger.charges < self.rounds:
            if self._used < len(self.released):
                self.proposer.use(self.released[-1] * self._mechanism.divisor, self._used + 1)
                self._used += 1
            else:
                self._vote()
            save(self.state_dict())

    def _vote(self) -> None:
        candidates = self.proposer.propose()
        sizes = (len(candidates), len(self.proposer.population.texts), *map(len, self.released[-1:]))
        if len(set(sizes)) > 1:
            raise ConfigError(
                f"there are {sizes[0]} candidates, of {sizes[1]} texts; earlier rounds had {sizes[-1]}",
                fix="propose one candidate a text, and as many in every round",
            )
        release = self._mechanism.release(self._voters.votes(candidates), len(candidates))
        ((votes,),) = release.vector
        self.released.append(votes.numpy())
        self._steps.append(release.step)

    def state_dict(self) -> State:
        """All that a run goes on from: releases, and which rounds were lost, which is not for publication."""
        hashes = self._ledger.summary.charge_hashes
        charge = bytes.fromhex(hashes[self._steps[-1] - 1]) if self._steps else b""
        texts = self.proposer.population.state_dict()
        return {
            **{_TEXTS + name: tensor for name, tensor in texts.items()},
            "released": torch.from_numpy(np.array(self.released, dtype=np.float64)),
            "steps": torch.tensor(self._steps, dtype=torch.int64),
            "used": torch.tensor(self._used),
            "charge": torch.tensor(list(charge), dtype=torch.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a stored state. Raises PrivacyError if the ledger does not show the last release in it."""
        steps = state["steps"].tolist()
        hashes = self._ledger.summary.charge_hashes
        charge = bytes(state["charge"].tolist()).hex()
        if steps and (steps[-1] > len(hashes) or hashes[steps[-1] - 1] != charge):
            raise PrivacyError(
                f"{self._ledger.summary.path} does not show the last release of the state that is loaded",
                why="more would be released than the ledger, and so its epsilon, says",
                fix="restore the latest ledger of the run that stored the state",
            )
        texts = {name.removeprefix(_TEXTS): t for name, t in state.items() if name.startswith(_TEXTS)}
        self.proposer.population.load_state_dict(texts)
        self.released = list(state["released"].numpy())
        self._steps, self._used = steps, int(state["used"])
