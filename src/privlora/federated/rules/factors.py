"""What all rules share, and those that average factors: both, one of them, or by turns.

The state is two factors a group, to which the server adds the mean of the clients' differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.rules.base import (
    Asked,
    Beginning,
    Both,
    Groups,
    Mean,
    Pairs,
    Rule,
    RuleSettings,
    Shapes,
    Tensors,
    Trains,
)

SIDES: dict[Trains, tuple[str, ...]] = {"both": ("left", "right"), "left": ("left",), "right": ("right",)}


class StateRule(Rule):
    """What all rules share: a state of float64 tensors with names, which is broadcast in the clients' dtype.

    Its tensors are replaced, never written to, so what was broadcast or exported stays what it was. Unless a rule says
    otherwise, clients answer with how far they moved, of which the server takes the mean.
    """

    _trains: ClassVar[Trains] = "both"

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        self.settings = settings
        self.groups = [(len(left), left.shape[1], right.shape[1]) for left, right in start]
        self.dtype = start[0][0].dtype
        self._mean = Mean()
        self._state = self._started([(left.double(), right.double()) for left, right in start])

    def _started(self, start: Pairs) -> Tensors:
        """The state before the first round, from float64 factors that are not to be changed."""
        return {
            f"{g}.{side}": factor.clone()
            for g, pair in enumerate(start)
            for side, factor in zip(SIDES["both"], pair, strict=True)
        }

    @classmethod
    def trains(cls, number: int, settings: RuleSettings) -> Trains:
        return cls._trains

    @classmethod
    def shapes(
        cls, stage: str, number: int, groups: Groups, settings: RuleSettings, clients: int = 1
    ) -> Both:
        sides = SIDES[cls.trains(number, settings)]
        return factor_shapes(groups, settings.rank), factor_shapes(groups, settings.rank, sides)

    @classmethod
    def begin(cls, asked: Asked) -> Beginning:
        return Beginning(state=copied(asked.sent))

    @classmethod
    def answer(
        cls, stage: str, asked: Asked, end: Mapping[str, Tensor], travelled: float = 0.0
    ) -> tuple[Tensors, Tensors]:
        return differences(cls.begin(asked).state, end, SIDES[cls.trains(asked.number, asked.settings)]), {}

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        self._mean.add(message, weight)

    def broadcast(self, stage: str) -> Tensors:
        return copied(self._state, self.dtype)

    def factors(self) -> Pairs:
        return [(self._state[f"{g}.left"], self._state[f"{g}.right"]) for g in range(len(self.groups))]

    def state_dict(self) -> Tensors:
        return copied(self._state)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises RunError, and changes nothing, unless the names and all but the last dimension are this state's."""
        for name, mine in self._state.items():
            if name not in tensors or not self._loads(name, mine, tensors[name]):
                raise RunError(
                    f"the state of the rule {self.name!r} has no {name!r} of a shape like {tuple(mine.shape)}",
                    why="the federation cannot go on from a state of another adapter or rule",
                    fix="resume with the settings that the state was written with",
                )
        self._state = {name: tensors[name].to(mine).clone() for name, mine in self._state.items()}

    def _loads(self, name: str, mine: Tensor, other: Tensor) -> bool:
        return mine.shape == other.shape


class FactorRule(StateRule):
    """The state is the factors, to which the server adds the mean. ``_settle`` may change the gauge after."""

    def close(self, stage: str) -> None:
        mean = self._mean.take()
        for name, moved in mean.items():
            self._state[name] = self._state[name] + moved
        if mean:
            self._settle()

    def _settle(self) -> None:
        """Called when the state has moved."""


def factor_shapes(groups: Groups, rank: int, sides: Sequence[str] = SIDES["both"]) -> Shapes:
    """Of "<g>.left" (L, m, rank) and "<g>.right" (L, n, rank)."""
    rows = {"left": 1, "right": 2}
    return {
        f"{g}.{side}": (sizes[0], sizes[rows[side]], rank) for g, sizes in enumerate(groups) for side in sides
    }


def copied(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensors:
    """Contiguous, as files and messages want them, and shared with nobody, so that a client may train them in place."""
    return {
        name: t.detach().to(dtype or t.dtype, copy=True, memory_format=torch.contiguous_format)
        for name, t in tensors.items()
    }


def differences(start: Mapping[str, Tensor], end: Mapping[str, Tensor], sides: Sequence[str]) -> Tensors:
    """end - start of these sides of each group, in the dtype of ``end``."""
    return {
        name: (end[name] - start[name].to(end[name])).contiguous()
        for g in groups_of(start)
        for name in (f"{g}.{side}" for side in sides)
    }


def groups_of(tensors: Mapping[str, Tensor]) -> list[int]:
    """The groups' numbers, in order."""
    return sorted({int(name.partition(".")[0]) for name in tensors})


def padded(left: Tensor, rank: int) -> Tensor:
    """left with columns of zeros up to ``rank``; inverse of `lean`."""
    return torch.nn.functional.pad(left, (0, rank - left.shape[-1]))


def lean(left: Tensor) -> Tensor:
    """left, or no column of it where all are zero: then only its shape has to be sent."""
    return left if bool(left.any()) else left[..., :0]


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
    def begin(cls, asked: Asked) -> Beginning:
        return Beginning(state=copied(asked.sent), pull=asked.settings.proximal)


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
        cls, stage: str, number: int, groups: Groups, settings: RuleSettings, clients: int = 1
    ) -> Both:
        factors = factor_shapes(groups, settings.rank)
        both = factors | {f"{name}_control": shape for name, shape in factors.items()}
        return both, dict(both)

    def close(self, stage: str) -> None:
        for name, moved in self._mean.take().items():
            share = self.settings.participation if name.endswith("_control") else 1.0
            self._state[name] = self._state[name].add(moved, alpha=share)

    @classmethod
    def begin(cls, asked: Asked) -> Beginning:
        own, control = _own_controls(asked), {}
        for name, mine in own.items():
            common = asked.sent[f"{name}_control"]
            control[name] = common - mine.to(common)
        return Beginning(state=copied({name: asked.sent[name] for name in own}), control=control)

    @classmethod
    def answer(
        cls, stage: str, asked: Asked, end: Mapping[str, Tensor], travelled: float = 0.0
    ) -> tuple[Tensors, Tensors]:
        message, keep, controls = differences(asked.sent, end, SIDES["both"]), {}, _own_controls(asked)
        for name, moved in list(message.items()):
            own = controls[name].to(moved)
            # A client that took no step has learnt nothing of its gradient.
            change = (
                -asked.sent[f"{name}_control"].to(moved) - moved / travelled if travelled > 0 else 0 * own
            )
            message[f"{name}_control"], keep[f"{name}_control"] = change, own + change
        return message, keep


def _own_controls(asked: Asked) -> Tensors:
    """c_k of each factor; zero before the client's first round."""
    names = [f"{g}.{side}" for g in groups_of(asked.sent) for side in SIDES["both"]]
    return {name: asked.kept.get(f"{name}_control", torch.zeros_like(asked.sent[name])) for name in names}


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
        cls, stage: str, number: int, groups: Groups, settings: RuleSettings, clients: int = 1
    ) -> Both:
        right = factor_shapes(groups, settings.rank, ["right"])
        return factor_shapes(groups, 0, ["left"]) | right, right

    def factors(self) -> Pairs:
        return [(padded(left, right.shape[-1]), right) for left, right in super().factors()]

    @classmethod
    def begin(cls, asked: Asked) -> Beginning:
        state, kept = copied(asked.sent), asked.kept
        for name, sent in asked.sent.items():
            if name.endswith(".left"):
                state[name] = (
                    kept[name].to(sent).clone() if name in kept else padded(sent, asked.settings.rank)
                )
        return Beginning(state=state)

    @classmethod
    def answer(
        cls, stage: str, asked: Asked, end: Mapping[str, Tensor], travelled: float = 0.0
    ) -> tuple[Tensors, Tensors]:
        keep = copied({f"{g}.left": end[f"{g}.left"] for g in groups_of(asked.sent)})
        return differences(asked.sent, end, ["right"]), keep


class RoLora(FactorRule):
    """Odd rounds average left with right frozen, even rounds right with left frozen. Exact in every round."""

    name = "rolora"
    summary = "Trains left and right by turns, a round each. Exact; half the messages; both subspaces move."
    reference = "RoLoRA (arXiv:2502.01755)"

    @classmethod
    def trains(cls, number: int, settings: RuleSettings) -> Trains:
        return "left" if number % 2 else "right"
