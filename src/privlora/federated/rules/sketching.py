"""FedASK: the mean of products from two sketches, in two stages (arXiv:2507.09990)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.rules.algebra import balanced, check_rank, orthonormal, public_normal
from privlora.federated.rules.base import (
    SIDES,
    Asked,
    Both,
    Groups,
    Pairs,
    Rule,
    RuleSettings,
    Shapes,
    Tensors,
    Trains,
    copied,
    factor_shapes,
    groups_of,
)
from privlora.geometry.fixed_rank import Point

TRAIN, SKETCH = "train", "sketch"


class FedAsk(Rule):
    """With M_k = left_k right_k^T and the public Omega (n, s), s = r + p:

    "train" sums Y = mean M_k Omega and Q = orth(Y); "sketch" sums P = mean M_k^T Q. The server's update is the best
    rank r of Q P^T, split evenly. Q P^T = mean M_k whenever s >= rank(mean M_k), and in general not below that. Private
    clients train left alone, so that the mean has rank r: it is exact with p = 0, and its rows stay in span(right).

    Omega is orthonormal and fresh in each round and group. If ``warm``, r of its columns span the last right, which is
    close to the best rank r also where s is small.
    """

    name = "fedask"
    summary = (
        "Two sketches a round give the mean of updates if r + p reaches its rank, as it does in private runs, "
        "which train left alone and keep the span of right."
    )
    reference = "FedASK (arXiv:2507.09990)"
    stages = (TRAIN, SKETCH)
    two_sided = False

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        super().__init__(start, settings)
        check_rank(self.groups, settings.rank)
        self._bases: Tensors = {}

    @classmethod
    def is_exact(cls, settings: RuleSettings, clients: int) -> bool:
        """Where the r + p columns of a sketch reach the rank of the mean: r of private clients, else up to K r."""
        return settings.private or settings.rank + settings.oversampling >= clients * settings.rank

    @classmethod
    def trains(cls, number: int, settings: RuleSettings) -> Trains:
        return "left" if settings.private else "both"

    @classmethod
    def shapes(
        cls, stage: str, number: int, groups: Groups, settings: RuleSettings, clients: int = 1
    ) -> Both:
        tall: Shapes = {}
        wide: Shapes = {}
        for g, (L, m, n) in enumerate(groups):
            s = _width(settings, m, n)
            tall |= {f"{g}.Y": (L, m, s)}
            wide |= {f"{g}.P": (L, n, s)}
        if stage == TRAIN:
            return factor_shapes(groups, settings.rank), tall
        return {name.replace("Y", "Q"): shape for name, shape in tall.items()}, wide

    # --- the server ---

    def broadcast(self, stage: str) -> Tensors:
        """In "sketch" nothing if no client answered "train"."""
        if stage == TRAIN:
            return super().broadcast(stage)
        return copied(self._bases, self.dtype)

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        """Raises RunError for a sketch without a basis, which no client can have been sent."""
        if stage == SKETCH and not self._bases:
            raise RunError(
                "a sketch came before the first stage of the round was closed",
                fix="close 'train' before 'sketch' is answered",
            )
        super().add(stage, message, weight)

    def close(self, stage: str) -> None:
        mean = self._mean.take()
        if stage == TRAIN:
            self._bases = {f"{g}.Q": torch.linalg.qr(mean[f"{g}.Y"]).Q for g in groups_of(mean)}
            return
        for g in groups_of(mean):
            self._rebuild(g, self._bases[f"{g}.Q"], mean[f"{g}.P"])
        self._bases = {}

    def _rebuild(self, g: int, Q: Tensor, P: Tensor) -> None:
        """The best rank r of Q P^T, for orthonormal Q."""
        basis, core = torch.linalg.qr(P)
        u, s, vh = torch.linalg.svd(core.mT, full_matrices=False)
        rank, right = self.settings.rank, f"{g}.right"
        point = Point(Q @ u[..., :rank], s[..., :rank], basis @ vh[..., :rank, :].mT)
        self._state[f"{g}.left"], self._state[right] = balanced(point, rank, self._state[right])

    # --- a client ---

    @classmethod
    def answer(
        cls, stage: str, asked: Asked, end: Mapping[str, Tensor], travelled: float = 0.0
    ) -> tuple[Tensors, Tensors]:
        """Between its stages a client keeps its factors. Raises RunError without them, or if Q is not orthonormal."""
        if stage == SKETCH:
            return _second(asked.sent, asked.kept), {}
        moved, sent = SIDES[cls.trains(asked.number, asked.settings)], asked.sent
        names = (f"{g}.{side}" for g in groups_of(sent) for side in SIDES["both"])
        factors = copied({n: (end if n.split(".")[1] in moved else sent)[n] for n in names})
        return _first(asked, factors), factors


def omega(settings: RuleSettings, number: int, g: int, right: Tensor, m: int) -> Tensor:
    """Omega (L, n, s) of a round and group, orthonormal, float64. right (L, n, r): as broadcast; used if ``warm``."""
    L, n, r = right.shape
    width = _width(settings, m, n) - (r if settings.warm else 0)
    drawn = public_normal(settings.seed, number, g, (L, n, width)).to(right.device)
    columns = torch.cat([right.double(), drawn], dim=-1) if settings.warm else drawn
    return torch.linalg.qr(columns).Q


def _width(settings: RuleSettings, m: int, n: int) -> int:
    return min(settings.rank + settings.oversampling, m, n)


def _first(asked: Asked, factors: Tensors) -> Tensors:
    message = {}
    for g in groups_of(factors):
        left, right = factors[f"{g}.left"], factors[f"{g}.right"]
        test = omega(asked.settings, asked.number, g, asked.sent[f"{g}.right"], left.shape[1])
        message[f"{g}.Y"] = (left.double() @ (right.double().mT @ test)).to(left.dtype).contiguous()
    return message


def _second(sent: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Tensors:
    if not kept:
        raise RunError("this client has no factors to sketch", fix="leave it out until the next round")
    message = {}
    for g in groups_of(kept):
        left, right = kept[f"{g}.left"], kept[f"{g}.right"]
        Q = sent[f"{g}.Q"].to(left.device, torch.float64)
        if not orthonormal(Q):
            raise RunError(
                "the basis that the server sent is not orthonormal",
                why="with a basis of its own choice a server can tell one client's sketch from the others' sum",
                fix="leave this federation unless the server explains it",
            )
        message[f"{g}.P"] = (right.double() @ (left.double().mT @ Q)).to(right.dtype).contiguous()
    return message
