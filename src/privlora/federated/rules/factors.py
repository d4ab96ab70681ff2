"""Rules whose state is two factors a group, of which the server adds the mean of the clients' differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.rules.base import (
    Beginning,
    Mean,
    Pairs,
    Rule,
    RuleSettings,
    Shapes,
    Sizes,
    Tensors,
    Trains,
)

SIDES: dict[Trains, tuple[str, ...]] = {"both": ("left", "right"), "left": ("left",), "right": ("right",)}


class StateRule(Rule):
    """What all rules share: a state of float64 tensors with names, which is broadcast in the clients' dtype.

    Its tensors are replaced, never written to, so what was broadcast or exported stays what it was.
    """

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        self.settings = settings
        self.groups = [(len(left), left.shape[1], right.shape[1]) for left, right in start]
        self.dtype = start[0][0].dtype
        self._state = self._started([(left.double(), right.double()) for left, right in start])

    def _started(self, start: Pairs) -> Tensors:
        """The state before the first round, from float64 factors that are not to be changed."""
        return {
            f"{g}.{side}": factor.clone()
            for g, pair in enumerate(start)
            for side, factor in zip(SIDES["both"], pair, strict=True)
        }

    @classmethod
    def begin(
        cls, number: int, sent: Mapping[str, Tensor], kept: Mapping[str, Tensor], settings: RuleSettings
    ) -> Beginning:
        return Beginning(state=copied(sent))

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
    """Clients answer with how far they moved; the server adds the mean. ``_settle`` may change the gauge after."""

    _trains: ClassVar[Trains] = "both"

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        super().__init__(start, settings)
        self._mean = Mean()

    @classmethod
    def trains(cls, number: int, settings: RuleSettings) -> Trains:
        return cls._trains

    @classmethod
    def shapes(
        cls, stage: str, number: int, groups: Sequence[Sizes], settings: RuleSettings, clients: int = 1
    ) -> tuple[Shapes, Shapes]:
        return factor_shapes(groups, settings.rank), factor_shapes(
            groups, settings.rank, SIDES[cls.trains(number, settings)]
        )

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        self._mean.add(message, weight)

    def close(self, stage: str) -> None:
        mean = self._mean.take()
        for name, moved in mean.items():
            self._state[name] = self._state[name] + moved
        if mean:
            self._settle()

    def _settle(self) -> None:
        """Called when the state has moved."""

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
        return differences(sent, end, SIDES[cls.trains(number, settings)]), {}


def factor_shapes(groups: Sequence[Sizes], rank: int, sides: Sequence[str] = SIDES["both"]) -> Shapes:
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
