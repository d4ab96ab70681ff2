"""Rules that need every client's factors at once: no sum of messages holds the mean of products.

The server keeps the answers of a round, so its memory grows with the number of clients, and each one's update is seen.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from privlora.federated.rules.algebra import balanced, check_rank, compressed, public_uniform, thin
from privlora.federated.rules.base import (
    SIDES,
    Answer,
    Asked,
    Beginning,
    Both,
    Groups,
    Pairs,
    Rule,
    RuleSettings,
    Tensors,
    copied,
    groups_of,
    lean,
    names_of,
    part_shapes,
)

_OFFSET = ("offset_left", "offset_right")


class StackingRule(Rule):
    """Keeps answers until the round is closed."""

    linear = False

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        super().__init__(start, settings)
        self._answers: list[tuple[Tensors, float]] = []

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        self._answers.append((message, weight))

    def close(self, stage: str) -> None:
        answers, self._answers = self._answers, []
        if not answers:
            return
        weights = torch.tensor([weight for _, weight in answers], dtype=torch.float64)
        weights /= weights.sum()
        for g in range(len(self.groups)):
            left, right = (
                torch.stack([message[f"{g}.{side}"].double() for message, _ in answers])
                for side in SIDES["both"]
            )
            self._merge(g, left, right, weights.to(left.device))

    @abstractmethod
    def _merge(self, g: int, left: Tensor, right: Tensor, weights: Tensor) -> None:
        """Take in the answers (K, L, m, r) and (K, L, n, r) of group g under weights (K,) that sum to 1."""


class FlexLora(StackingRule):
    """The best rank r of mean(left_k right_k^T), split evenly."""

    name = "flexlora"
    summary = "The best rank r of the mean update, from all clients' factors. The server sees each client's."
    reference = "FlexLoRA (arXiv:2402.11505)"

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        super().__init__(start, settings)
        check_rank(self.groups, settings.rank)

    def _merge(self, g: int, left: Tensor, right: Tensor, weights: Tensor) -> None:
        name = f"{g}.right"
        root = weights.sqrt()
        point = thin(
            _side_by_side(self._state[f"{g}.left"] + left, root),
            _side_by_side(self._state[name] + right, root),
        )
        self._state[f"{g}.left"], self._state[name] = balanced(point, self.settings.rank, self._state[name])


class OffsetRule(StackingRule):
    """Beside factors the state has an offset, a term of any rank up to min(m, n) that clients add and do not train."""

    fixed_rank = False

    def _started(self, start: Pairs) -> Tensors:
        state = super()._started(start)
        for g in groups_of(state):
            for side in SIDES["both"]:
                state[f"{g}.offset_{side}"] = state[f"{g}.{side}"][..., :0]
        return state

    def _loads(self, name: str, mine: Tensor, other: Tensor) -> bool:
        return mine.shape[:-1] == other.shape[:-1] if "offset" in name else super()._loads(name, mine, other)

    def _offsets(self) -> Pairs:
        groups = range(len(self.groups))
        return [(self._state[f"{g}.offset_left"], self._state[f"{g}.offset_right"]) for g in groups]

    def _extend(self, g: int, left: Tensor, right: Tensor) -> None:
        """Add left (L, m, k) right (L, n, k)^T to the offset, exactly."""
        names = f"{g}.offset_left", f"{g}.offset_right"
        pairs = zip(names, (left, right), strict=True)
        wider = compressed(*(torch.cat([self._state[name], more], dim=-1) for name, more in pairs))
        self._state.update(zip(names, wider, strict=True))

    @classmethod
    def begin(cls, asked: Asked) -> Beginning:
        sent = asked.sent
        offset = [(sent[f"{g}.offset_left"], sent[f"{g}.offset_right"]) for g in groups_of(sent)]
        state = cls._state_of(asked)
        return Beginning(state=state, offset=offset if any(left.numel() for left, _ in offset) else None)

    @classmethod
    def _state_of(cls, asked: Asked) -> Tensors:
        """The factors that a client trains."""
        return copied({name: asked.sent[name] for name in names_of(asked.sent)})


class FedEx(OffsetRule):
    """FedAvg, and what it misses: mean(left_k right_k^T) - mean(left_k) mean(right_k)^T goes to the offset.

    That residual has rank (K - 1) r at most for K clients.
    """

    name = "fedex"
    summary = (
        "FedAvg whose error is added to the frozen part. Exact; broadcasts grow, the server sees each update."
    )
    reference = "FedEx-LoRA (arXiv:2410.09432)"

    @classmethod
    def shapes(cls, stage: str, number: int, groups: Groups, chosen: RuleSettings, clients: int = 1) -> Both:
        factors = part_shapes(groups, chosen.rank)
        grown = (number - 1) * (clients - 1) * chosen.rank
        return factors | part_shapes(groups, grown, _OFFSET), factors

    def _merge(self, g: int, left: Tensor, right: Tensor, weights: Tensor) -> None:
        root = weights.sqrt()
        # Columns orthonormal to sqrt(w) turn the K answers into their mean and K - 1 others whose products sum to the
        # residual; what is common to all answers, as the state is, cancels in the others.
        turn = torch.linalg.qr(root[:, None], mode="complete").Q[:, 1:] * root[:, None]  # (K, K - 1)
        others = [torch.einsum("klmr,kj->jlmr", side, turn) for side in (left, right)]
        if len(root) > 1:
            self._extend(g, *(_side_by_side(side, torch.ones_like(root[1:])) for side in others))
        for side, moved in zip(SIDES["both"], (left, right), strict=True):
            name = f"{g}.{side}"
            self._state[name] = self._state[name] + torch.einsum("klmr,k->lmr", moved, weights)

    def factors(self) -> Pairs:
        return [
            (torch.cat([left, more_left], dim=-1), torch.cat([right, more_right], dim=-1))
            for (left, right), (more_left, more_right) in zip(super().factors(), self._offsets(), strict=True)
        ]


class Flora(OffsetRule):
    """All clients' factors side by side are the mean: mean(left_k right_k^T) goes to the offset, and new factors start.

    Each round a client begins at left = 0 and a right of entries uniform in +-1/sqrt(n), which the public seed gives.
    """

    name = "flora"
    summary = "Stacks all factors, adds them to the frozen part and starts afresh. Exact; broadcasts grow."
    reference = "FLoRA (arXiv:2409.05976)"

    def _started(self, start: Pairs) -> Tensors:
        state = {}
        for g, (left, right) in enumerate(start):
            state[f"{g}.offset_left"] = lean(left).clone()
            state[f"{g}.offset_right"] = right[..., : lean(left).shape[-1]].clone()
        return state

    @classmethod
    def shapes(cls, stage: str, number: int, groups: Groups, chosen: RuleSettings, clients: int = 1) -> Both:
        grown = (number - 1) * clients * chosen.rank
        return part_shapes(groups, grown, _OFFSET), part_shapes(groups, chosen.rank)

    def _merge(self, g: int, left: Tensor, right: Tensor, weights: Tensor) -> None:
        self._extend(g, _side_by_side(left, weights), _side_by_side(right, torch.ones_like(weights)))

    def factors(self) -> Pairs:
        """Of rank 0 until the first round has been closed, if the start's left is zero."""
        return self._offsets()

    @classmethod
    def _state_of(cls, asked: Asked) -> Tensors:
        sent, settings, state = asked.sent, asked.settings, {}
        for g in groups_of(sent):
            left, right = sent[f"{g}.offset_left"], sent[f"{g}.offset_right"]
            (L, m, _), n, r = left.shape, right.shape[1], settings.rank
            state[f"{g}.left"] = left.new_zeros(L, m, r)
            state[f"{g}.right"] = public_uniform(settings.seed, asked.number, g, (L, n, r)).to(left) / n**0.5
        return state

    @classmethod
    def answer(cls, stage: str, asked: Asked, end: Tensors, travelled: float = 0.0) -> Answer:
        """The factors themselves: their product is the client's update."""
        return copied({name: end[name] for name in names_of(asked.sent)}), {}


def _side_by_side(side: Tensor, weights: Tensor) -> Tensor:
    """(K, L, m, r) under weights (K,) to (L, m, K r)."""
    return (side * weights[:, None, None, None]).permute(1, 2, 0, 3).flatten(2)
