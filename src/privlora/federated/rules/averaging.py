"""Rules that average factors: both (FedAvg, FedProx, SCAFFOLD), one of them (FFA, FedSA) or by turns (RoLoRA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from privlora.federated.rules.base import Beginning, Pairs, RuleSettings, Shapes, Sizes, Tensors, Trains
from privlora.federated.rules.factors import (
    SIDES,
    FactorRule,
    copied,
    differences,
    factor_shapes,
    groups_of,
    lean,
    padded,
)


class FedAvg(FactorRule):
    """left <- mean left_k, right <- mean right_k: the product of means, which is not the mean of products."""

    name = "fedavg"
    summary = "Averages both factors. One message, cheap; the mean of factors is not the mean of updates."
    reference = "FedIT (arXiv:2305.05644); McMahan et al. 2017 (arXiv:1602.05629)"
    exact = False


class FedProx(FedAvg):
    """FedAvg whose clients are pulled back to where they began, after noise: mu (theta - theta_start)."""

    name = "fedprox"
    summary = "FedAvg with a pull of every client towards where the round began."
    reference = "FedProx (arXiv:1812.06127)"

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        super().__init__(start, settings)
        self.pull = settings.proximal

    @classmethod
    def begin(
        cls, number: int, sent: Mapping[str, Tensor], kept: Mapping[str, Tensor], settings: RuleSettings
    ) -> Beginning:
        return Beginning(state=copied(sent), pull=settings.proximal)


class Scaffold(FedAvg):
    """FedAvg with control variates c (server) and c_k (client), option II of Karimireddy et al. 2020.

    Each release is corrected by c - c_k. After the round c_k+ = c_k - c + (start - end) / travelled, and the server
    adds participation * mean(c_k+ - c_k) to c. Meant for plain gradient steps, whose rates ``travelled`` sums.
    """

    name = "scaffold"
    summary = "FedAvg with control variates against drift; twice the messages, and clients keep theirs."
    reference = "SCAFFOLD (arXiv:1910.06378)"
    memory = True

    def _started(self, start: Pairs) -> Tensors:
        state = super()._started(start)
        return state | {f"{name}_control": torch.zeros_like(tensor) for name, tensor in state.items()}

    @classmethod
    def shapes(
        cls, stage: str, number: int, groups: Sequence[Sizes], settings: RuleSettings, clients: int = 1
    ) -> tuple[Shapes, Shapes]:
        factors = factor_shapes(groups, settings.rank)
        both = factors | {f"{name}_control": shape for name, shape in factors.items()}
        return both, dict(both)

    def close(self, stage: str) -> None:
        for name, moved in self._mean.take().items():
            share = self.settings.participation if name.endswith("_control") else 1.0
            self._state[name] = self._state[name].add(moved, alpha=share)

    @classmethod
    def begin(
        cls, number: int, sent: Mapping[str, Tensor], kept: Mapping[str, Tensor], settings: RuleSettings
    ) -> Beginning:
        names = _names(sent)
        control = {
            name: sent[f"{name}_control"] - _own(name, sent, kept).to(sent[f"{name}_control"])
            for name in names
        }
        return Beginning(state=copied({name: sent[name] for name in names}), control=control)

    @classmethod
    def answer(
        cls,
        stage: str,
        number: int,
        sent: Mapping[str, Tensor],
        end: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        settings: RuleSettings,
        *,
        travelled: float = 0.0,
    ) -> tuple[Tensors, Tensors]:
        message = differences(sent, end, SIDES["both"])
        keep = {}
        for name, moved in list(message.items()):
            own = _own(name, sent, kept).to(moved)
            # A client that took no step has learnt nothing of its gradient.
            change = -sent[f"{name}_control"].to(moved) - moved / travelled if travelled > 0 else 0 * own
            message[f"{name}_control"], keep[f"{name}_control"] = change, own + change
        return message, keep


def _names(sent: Mapping[str, Tensor]) -> list[str]:
    return [f"{g}.{side}" for g in groups_of(sent) for side in SIDES["both"]]


def _own(name: str, sent: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Tensor:
    """c_k of one factor; zero before the client's first round."""
    return kept.get(f"{name}_control", torch.zeros_like(sent[name]))


class Ffa(FactorRule):
    """left <- mean left_k with right frozen for good: exact, and the rows of the update never leave span(right)."""

    name = "ffa"
    summary = "Trains left alone with right frozen for good. Exact; half the messages; one subspace is fixed."
    reference = "FFA-LoRA (arXiv:2403.12313)"
    two_sided = False
    _trains: ClassVar[Trains] = "left"


class FedSa(FactorRule):
    """right <- mean right_k; left stays with each client, which keeps it from round to round and never sends it.

    No single update exists. The server's `factors` pair the shared right with the left that clients began with (zero
    for a LoRA start), which is all that a party without a left of its own can have.
    """

    name = "fedsa"
    summary = "Shares right alone; every client keeps a left of its own, so there is no common adapter."
    reference = "FedSA-LoRA (arXiv:2410.01463)"
    exact = False
    memory = True
    common = False

    def _started(self, start: Pairs) -> Tensors:
        state = super()._started(start)
        return {name: lean(t) if name.endswith(".left") else t for name, t in state.items()}

    @classmethod
    def shapes(
        cls, stage: str, number: int, groups: Sequence[Sizes], settings: RuleSettings, clients: int = 1
    ) -> tuple[Shapes, Shapes]:
        right = factor_shapes(groups, settings.rank, ["right"])
        return factor_shapes(groups, 0, ["left"]) | right, right

    def factors(self) -> Pairs:
        return [(padded(left, right.shape[-1]), right) for left, right in super().factors()]

    @classmethod
    def begin(
        cls, number: int, sent: Mapping[str, Tensor], kept: Mapping[str, Tensor], settings: RuleSettings
    ) -> Beginning:
        state = copied(sent)
        for name in (f"{g}.left" for g in groups_of(sent)):
            own = kept[name].to(sent[name]).clone() if name in kept else padded(sent[name], settings.rank)
            state[name] = own
        return Beginning(state=state)

    @classmethod
    def answer(
        cls,
        stage: str,
        number: int,
        sent: Mapping[str, Tensor],
        end: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        settings: RuleSettings,
        *,
        travelled: float = 0.0,
    ) -> tuple[Tensors, Tensors]:
        keep = copied({f"{g}.left": end[f"{g}.left"] for g in groups_of(sent)})
        return differences(sent, end, ["right"]), keep


class RoLora(FactorRule):
    """Odd rounds average left with right frozen, even rounds right with left frozen. Exact in every round."""

    name = "rolora"
    summary = "Trains left and right by turns, a round each. Exact; half the messages; both subspaces move."
    reference = "RoLoRA (arXiv:2502.01755)"

    @classmethod
    def trains(cls, number: int, settings: RuleSettings) -> Trains:
        return "left" if number % 2 else "right"
