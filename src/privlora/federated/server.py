"""What moves at the server: the update of an aggregation rule here, or the run's own state (rule joint)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privlora.accounting import Plan
from privlora.coordinates.base import name_factors
from privlora.federated.local import rates
from privlora.federated.messages import SUM
from privlora.federated.plans import federation_of, lattice_of, plan_in, round_settings
from privlora.federated.rules import Pairs, Rule, Tensors
from privlora.geometry.fixed_rank import Point, Product, point_from_factors
from privlora.mechanisms import Layout, SumMechanism
from privlora.optimizers import IterateAverage
from privlora.training.assembly import Parts
from privlora.training.state import States


@dataclass(kw_only=True)
class RuleParts(Parts):
    """Parts whose update is the rule's, in the place of the coordinates that clients train in.

    scale: of the rule's factors. rule_average: of the updates after each round, where method.averaging is on.
    """

    rule: Rule
    scale: float
    rule_average: IterateAverage | None = None

    def update(self) -> Pairs:
        """What is exported: one (A (L, m, k), B (L, n, k)) a group; the update is A B^T."""
        if self.rule_average is not None:
            return self.rule_average.factors()
        pairs = self.rule.factors()
        if not pairs[0][0].shape[-1]:  # nothing was stacked yet
            pairs = [(a.new_zeros(*a.shape[:2], 1), b.new_zeros(*b.shape[:2], 1)) for a, b in pairs]
        return [(self.scale * a, b) for a, b in pairs]

    def named_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self.adapter.relative_to_w0(name_factors(self.adapter, self.update()))

    def as_points(self) -> list[Point]:
        """As an average asks coordinates."""
        return [
            point_from_factors(self.scale * a, b, torch.Generator(a.device).manual_seed(0))
            for a, b in self.rule.factors()
        ]

    def as_products(self) -> list[Product]:
        return [(self.scale * a, a.new_ones(a.shape[0], a.shape[-1]), b) for a, b in self.rule.factors()]

    def install_result(self) -> None:
        for group, (a, b) in zip(self.adapter.groups, self.update(), strict=True):
            self.adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)


class RuleServer:
    """The update of an aggregation rule. parts: what is exported and reported. stages: the messages of a round."""

    def __init__(self, parts: Parts, rule: Rule, scale: float) -> None:
        given = {name: value for name, value in vars(parts).items() if name != "average"}
        self.rule, self.stages, self.parts = rule, rule.stages, RuleParts(**given, rule=rule, scale=scale)
        if parts.hyper.averaging and rule.fixed_rank:
            iterate: Any = self.parts
            self.parts.rule_average = IterateAverage(iterate, parts.hyper.averaging)

    def tensors(self, stage: str) -> Tensors:
        """What every client is sent."""
        return self.rule.broadcast(stage)

    def expected(self, stage: str, number: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of an answer's tensors; of each client the same."""
        groups = [(len(g.sites), g.m, g.n) for g in self.parts.adapter.groups]
        return self.rule.shapes(stage, number, groups, self.rule.settings)[1]

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        """Take in an answer, on arrival, or a sum of several, of which ``weight`` is the sum of weights."""
        self.rule.add(stage, message, weight)

    def close(self, stage: str, number: int, present: int) -> None:
        """All answers of ``present`` clients are in; after the last stage the state moves."""
        self.rule.close(stage)
        if stage == self.stages[-1] and self.parts.rule_average is not None:
            self.parts.rule_average.update()

    def states(self) -> States:
        """Everything that the next round depends on."""
        states = {"rule": self.rule.state_dict()}
        if self.parts.rule_average is not None:
            states["average"] = self.parts.rule_average.state_dict()
        return states

    def take_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Inverse of ``states``; whatever came in of an unfinished round is forgotten."""
        for stage in self.stages:  # takes what came in; where that moves the state is undone
            self.rule.close(stage)
        self.rule.load_state_dict(states["rule"])
        if self.parts.rule_average is not None:
            self.parts.rule_average.load_state_dict(states["average"])


class JointServer:
    """A central run's state, which moves along secure sums as a central run would; as `RuleServer`."""

    stages = ("train",)

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


Server = RuleServer | JointServer
