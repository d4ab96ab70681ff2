"""What every aggregation rule offers to the rounds and to the clients.

A rule is algebra on public tensors: what reaches it are releases and what follows from them. It knows no records, no
model, no network, no privacy. One object is the server's; what a client does are class methods, so that a client needs
nothing but what it was sent and, for some rules, what it kept.

A round has one message each way for each of the rule's ``stages``. The first is "train": the client trains from
``begin``, then sends ``answer("train", ...)``. Later stages are algebra on what the client kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor

from privlora.errors import RunError
from privlora.geometry.fixed_rank import Point

Tensors = dict[str, Tensor]
"""Keys are "<group>.<name>"; each value (L, ...) stacks the L equal modules of a group of the adapter."""

Pairs = list[tuple[Tensor, Tensor]]
"""One (left (L, m, r), right (L, n, r)) a group of L modules: the update of W is scale * left right^T."""

Sizes = tuple[int, int, int]
"""(L, m, n) of a group: L modules whose weights are m x n."""

Groups = Sequence[Sizes]

Shapes = dict[str, tuple[int, ...]]
"""Names and shapes of a message's tensors."""

Both = tuple[Shapes, Shapes]
"""What a client is sent, and what it answers."""

Answer = tuple[Tensors, Tensors]
"""What a client answers, and what it keeps from now on."""

Trains = Literal["both", "left", "right", "tangent"]
"""What a client moves: both factors; one with the other frozen; or tangent coordinates (M, Up, Vp) at a fixed base."""


POINT, TANGENT, OFFSET = ("U", "S", "V"), ("M", "Up", "Vp"), ("offset_left", "offset_right")

SIDES: Final[Mapping[Trains, tuple[str, ...]]] = {
    "both": ("left", "right"),
    "left": ("left",),
    "right": ("right",),
    "tangent": TANGENT,
}
"""Names of what a client moves, in each group."""


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """Public numbers of a federation that rules depend on.

    rank: r of what is trained and exported. oversampling: p; sketches have r + p columns. warm: whether sketches start
    from the last round's subspace. proximal: FedProx's mu. private: whether clients add noise. seed: public, of
    sketches and of fresh factors. participation: the share of all clients that a round should hear, for SCAFFOLD.
    """

    rank: int
    oversampling: int = 0
    warm: bool = True
    proximal: float = 0.01
    private: bool = True
    seed: int = 0
    participation: float = 1.0


@dataclass(frozen=True)
class Asked:
    """What a client has at hand in a stage of round ``number``: what it was sent, and what it keeps of earlier rounds
    and stages (nothing in its first round)."""

    number: int
    sent: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    settings: RuleSettings


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Where a client's training begins in a round.

    state: of the coordinates that it trains in: "<g>.left" and "<g>.right"; for "tangent" "<g>.U", "<g>.S", "<g>.V".
    offset: fixed low-rank terms beside the frozen weights, added to them; one pair a group of any rank, or None.
    control: a public gradient that is added to each release, in the names of ``state`` ("<g>.left", ...); or None.
    pull: FedProx's mu; mu times what each trained tensor has moved since ``state`` is added to each release. 0 is none.
    """

    state: Tensors
    offset: Pairs | None = None
    control: Tensors | None = None
    pull: float = 0.0


class Mean:
    """A weighted mean of messages that is summed on arrival, in float64."""

    def __init__(self) -> None:
        self._total: Tensors = {}
        self._weight = 0.0

    def add(self, message: Mapping[str, Tensor], weight: float) -> None:
        for name, tensor in message.items():
            if name not in self._total:
                self._total[name] = torch.zeros_like(tensor, dtype=torch.float64)
            self._total[name].add_(tensor, alpha=weight)
        self._weight += weight

    def take(self) -> Tensors:
        """The mean, once; empty without messages."""
        total, weight = self._total, self._weight
        self._total, self._weight = {}, 0.0
        return {name: tensor.div_(weight) for name, tensor in total.items()}


class Rule(ABC):
    """One row of the table. What is a ClassVar is what the table says of it.

    The server's state is float64 tensors with names, which are broadcast in the clients' dtype. They are replaced,
    never written to, so what was broadcast or exported stays what it was. Unless a rule says otherwise, the state is
    two factors a group, and clients answer with how far they moved, of which the server takes the mean.

    linear: all that the server needs of a stage's messages is their weighted sum, so they may be summed securely.
    exact: whether the server's update is the mean of the clients' updates, before it is cut to rank r; for sketches see
    ``is_exact``. two_sided: whether both subspaces can move under differential privacy. memory: whether a client has to
    keep tensors from one round to the next. common: whether what the server exports is a whole update, and not the
    shared part of one whose rest lies with each client. fixed_rank: whether the export has the rank r. groups,
    settings: what the server's object was made with.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    stages: ClassVar[tuple[str, ...]] = ("train",)
    linear: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    two_sided: ClassVar[bool] = True
    memory: ClassVar[bool] = False
    common: ClassVar[bool] = True
    fixed_rank: ClassVar[bool] = True
    _sent: ClassVar[tuple[str, ...]] = SIDES["both"]
    _trains: ClassVar[Trains | Literal["turns"]] = "both"

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        """start: public; left (L, m, r) and right (L, n, r) of each group, as the method starts on its own."""
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
    def is_exact(cls, settings: RuleSettings, clients: int) -> bool:
        """``exact`` of these settings, where ``clients`` answer in a round."""
        return cls.exact

    def start_at(self, points: Sequence[Point]) -> None:  # noqa: B027 - most rules have no use for it
        """Start from points with subspaces of one's own choice; for rules that train in tangent spaces."""

    @classmethod
    def trains(cls, number: int, settings: RuleSettings) -> Trains:
        """What clients train in round ``number`` = 1, 2, …"""
        if cls._trains == "turns":
            return "left" if number % 2 else "right"
        return cls._trains

    @classmethod
    def shapes(cls, stage: str, number: int, groups: Groups, chosen: RuleSettings, clients: int = 1) -> Both:
        """What a client is sent in a stage of round ``number``, and what it answers, for a start whose left is zero.

        clients: how many answered in each round before; only broadcasts of rules with an offset depend on it.
        """
        moved = SIDES[cls.trains(number, chosen)]
        return part_shapes(groups, chosen.rank, cls._sent), part_shapes(groups, chosen.rank, moved)

    @classmethod
    def message_sizes(
        cls, groups: Groups, settings: RuleSettings, number: int = 1, clients: int = 1
    ) -> tuple[float, float]:
        """Numbers that one client is sent, and that it answers, in all stages of round ``number``."""
        down = up = 0
        for stage in cls.stages:
            sent, answered = cls.shapes(stage, number, groups, settings, clients)
            down += sum(map(prod, sent.values()))
            up += sum(map(prod, answered.values()))
        return float(down), float(up)

    # --- the server ---

    def broadcast(self, stage: str) -> Tensors:
        """What each client is sent at the start of a stage."""
        return copied(self._state, self.dtype)

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        """Take in one client's answer, on arrival. Linear rules also take a weighted mean, under the sum of weights."""
        self._mean.add(message, weight)

    @abstractmethod
    def close(self, stage: str) -> None:
        """All answers of the stage are in; after the last stage the server's update moves. Without any: it stays."""

    def factors(self) -> Pairs:
        """The server's update, of any rank."""
        return [(self._state[f"{g}.left"], self._state[f"{g}.right"]) for g in range(len(self.groups))]

    def state_dict(self) -> Tensors:
        """Everything that the next round depends on, between two rounds."""
        return copied(self._state)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises RunError, and changes nothing, unless the names and all but the last dimension are this state's."""
        for name, mine in self._state.items():
            if name not in tensors or not self._loads(name, mine, tensors[name]):
                what = f"the state of the rule {self.name!r} has no {name!r} like {tuple(mine.shape)}"
                raise RunError(what, fix="resume with the settings that the state was written with")
        self._state = {name: tensors[name].to(mine).clone() for name, mine in self._state.items()}

    def _loads(self, name: str, mine: Tensor, other: Tensor) -> bool:
        return mine.shape == other.shape

    # --- a client ---

    @classmethod
    def begin(cls, asked: Asked) -> Beginning:
        """Where training begins."""
        return Beginning(state=copied(asked.sent))

    @classmethod
    def answer(cls, stage: str, asked: Asked, end: Tensors, travelled: float = 0.0) -> Answer:
        """end: after training, "<g>.left" and "<g>.right"; for "tangent" "<g>.M", "<g>.Up", "<g>.Vp", how far it went;
        empty in later stages. travelled: the sum of the steps' learning rates, in units of plain gradients.
        """
        return differences(cls.begin(asked).state, end, SIDES[cls.trains(asked.number, asked.settings)]), {}


_SIZES: Final = {
    **dict.fromkeys(("left", "U", "Up"), "mr"),
    **dict.fromkeys(("right", "V", "Vp"), "nr"),
    **dict.fromkeys(("offset_left", "Y", "Q"), "mk"),
    **dict.fromkeys(("offset_right", "P"), "nk"),
    "S": "r",
    "M": "rr",
}


def part_shapes(groups: Groups, rank: int, parts: Sequence[str] = SIDES["both"]) -> Shapes:
    """Of "<g>.<part>", as (L, m, rank) of "<g>.left". k: the rank, but for columns that no product can need."""
    found: Shapes = {}
    for g, (L, m, n) in enumerate(groups):
        sizes = {"m": m, "n": n, "r": rank, "k": min(rank, m, n)}
        found |= {f"{g}.{part}": (L, *(sizes[letter] for letter in _SIZES[part])) for part in parts}
    return found


def copied(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensors:
    """Contiguous, as files and messages want them, and shared with nobody, so that a client may train them in place."""
    form = torch.contiguous_format
    return {n: t.detach().to(dtype or t.dtype, copy=True, memory_format=form) for n, t in tensors.items()}


def differences(start: Mapping[str, Tensor], end: Mapping[str, Tensor], sides: Sequence[str]) -> Tensors:
    """end - start of these sides of each group, in the dtype of ``end``."""
    return {n: (end[n] - start[n].to(end[n])).contiguous() for n in names_of(start, sides)}


def groups_of(tensors: Mapping[str, Tensor]) -> list[int]:
    """The groups' numbers, in order."""
    return sorted({int(name.partition(".")[0]) for name in tensors})


def names_of(tensors: Mapping[str, Tensor], parts: Sequence[str] = SIDES["both"]) -> list[str]:
    """Of these parts of each group that ``tensors`` has."""
    return [f"{g}.{part}" for g in groups_of(tensors) for part in parts]


def padded(left: Tensor, rank: int) -> Tensor:
    """left with columns of zeros up to ``rank``; inverse of `lean`."""
    return torch.nn.functional.pad(left, (0, rank - left.shape[-1]))


def lean(left: Tensor) -> Tensor:
    """left, or no column of it where all are zero: then only its shape has to be sent."""
    return left if bool(left.any()) else left[..., :0]
