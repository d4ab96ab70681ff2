"""Small federations in float64 whose clients take plain gradient steps towards a dense update of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from privlora.federated.rules import RULES, Asked, Pairs, Rule, RuleSettings, Tensors
from privlora.geometry.fixed_rank import Point, project_dense

GROUPS = [(2, 12, 10), (1, 9, 13)]
RANK = 3
LEARNING_RATE, STEPS = 0.3, 3
SIZE = 0.2  # of the entries of targets, so that these steps converge
ALL = sorted(RULES)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def a_start(seed: int = 0, left: float = 0.0, dtype: torch.dtype = torch.float64) -> Pairs:
    """LoRA's start; ``left`` scales a left that is not zero."""
    return [
        (
            (left * normal(seed + g, L, m, RANK)).to(dtype),
            (normal(seed + 50 + g, L, n, RANK) / n**0.5).to(dtype),
        )
        for g, (L, m, n) in enumerate(GROUPS)
    ]


def settings_of(**changes: Any) -> RuleSettings:
    return replace(RuleSettings(rank=RANK, seed=11), **changes)


@dataclass
class Client:
    """Steps towards ``targets``, one dense (L, m, n) a group."""

    targets: list[Tensor]
    weight: float = 1.0
    kept: Tensors = field(default_factory=dict)
    updates: list[Tensor] = field(default_factory=list)
    """The dense update of each group at the end of the last training."""

    def train(
        self, rule: type[Rule], number: int, sent: Tensors, settings: RuleSettings
    ) -> tuple[Tensors, float]:
        begin = rule.begin(Asked(number, sent, self.kept, settings))
        trains = rule.trains(number, settings)
        end: Tensors = {}
        self.updates = []
        for g, target in enumerate(self.targets):
            offset = torch.zeros_like(target)
            if begin.offset is not None:
                left, right = begin.offset[g]
                offset = left.to(target) @ right.to(target).mT
            mine = {name.split(".")[1]: t for name, t in begin.state.items() if name.startswith(f"{g}.")}
            extra = begin.control or {}
            control = {side: extra.get(f"{g}.{side}", torch.zeros(())) for side in ("left", "right")}
            if trains == "tangent":
                moved, update = step_in_tangent_space(mine, target)
            else:
                moved, update = steps(mine, target - offset, trains, control)
            self.updates.append(update + offset)
            end |= {f"{g}.{name}": t for name, t in moved.items()}
        return end, LEARNING_RATE * STEPS


def steps(state: Tensors, target: Tensor, trains: str, control: Tensors) -> tuple[Tensors, Tensor]:
    left, right = state["left"].clone(), state["right"].clone()
    for _ in range(STEPS):
        error = (left @ right.mT).to(target) - target
        down = error.to(left) @ right, error.mT.to(left) @ left
        if trains in ("both", "left"):
            left = left - LEARNING_RATE * (down[0] + control["left"].to(left))
        if trains in ("both", "right"):
            right = right - LEARNING_RATE * (down[1] + control["right"].to(right))
    return {"left": left, "right": right}, (left @ right.mT).to(target)


def step_in_tangent_space(state: Tensors, target: Tensor) -> tuple[Tensors, Tensor]:
    point = Point(state["U"], state["S"], state["V"])
    xi = project_dense(point, (target - point.embedding().to(target)).to(point.S)).scale(0.7)
    update = point.embedding() + xi.embedding(point)
    return {"M": xi.M, "Up": xi.Up, "Vp": xi.Vp}, update.to(target)


def a_federation(count: int = 3, seed: int = 0, weights: Sequence[float] | None = None) -> list[Client]:
    """Clients whose targets share a part."""
    common = [SIZE * normal(seed + 900 + g, *sizes) for g, sizes in enumerate(GROUPS)]
    return [
        Client(
            [common[g] + SIZE * normal(seed + 100 * k + g + 7, *sizes) for g, sizes in enumerate(GROUPS)],
            1.0 if weights is None else weights[k],
        )
        for k in range(count)
    ]


def play(
    rule: Rule, clients: Sequence[Client], numbers: Sequence[int], order: Sequence[int] | None = None
) -> None:
    """Whole rounds with these numbers; order: of the clients' answers."""
    kind = type(rule)
    for number in numbers:
        for stage in kind.stages:
            sent = rule.broadcast(stage)
            for k in order or range(len(clients)):
                rule.add(stage, respond(rule, clients[k], stage, number, sent), clients[k].weight)
            rule.close(stage)


def respond(rule: Rule, client: Client, stage: str, number: int, sent: Tensors) -> Tensors:
    kind = type(rule)
    end, travelled = client.train(kind, number, sent, rule.settings) if stage == "train" else ({}, 0.0)
    asked = Asked(number, sent, client.kept, rule.settings)
    message, client.kept = kind.answer(stage, asked, end, travelled)
    return message


def products(pairs: Pairs) -> list[Tensor]:
    return [left @ right.mT for left, right in pairs]


def uncut(rule: Rule) -> list[Tensor]:
    """The server's dense update with all that it keeps."""
    if rule.name != "tan":
        return products(rule.factors())
    state = rule.state_dict()
    points = (Point(*(state[f"{g}.{part}"] for part in "USV")) for g in range(len(GROUPS)))
    return [point.embedding() for point in points]


def mean_update(clients: Sequence[Client]) -> list[Tensor]:
    """The weighted mean of what clients ended with."""
    total = sum(client.weight for client in clients)
    return [
        sum((client.weight / total * client.updates[g] for client in clients), torch.zeros(()))
        for g in range(len(GROUPS))
    ]


def best(update: Tensor, rank: int = RANK) -> Tensor:
    """The best approximation of that rank."""
    u, s, vh = torch.linalg.svd(update, full_matrices=False)
    return (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative Frobenius error of a group."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in zip(found, wanted, strict=True))


def largest_difference(found: Tensors, wanted: Tensors) -> float:
    """Of equal names and shapes."""
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in wanted.items()}
    filled = (name for name in found if found[name].numel())
    return max((float((found[name] - wanted[name]).abs().max()) for name in filled), default=0.0)
