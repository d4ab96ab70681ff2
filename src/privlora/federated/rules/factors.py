"""The rules, each a class: first those of which the server needs the sum of answers alone (averages of factors, of one
or by turns, of coordinates at the canonical point U S V^T of each group, and of sketches), then those that stack.

Where one factor of a point is frozen it is orthonormal, so clip norms and noise of a client that trains against it do
not depend on the size of the update.

Rules that stack need every client's factors at once: no sum of messages holds the mean of products. The server keeps
the answers of a round, so its memory grows with the number of clients, and each one's update is seen.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.rules.algebra import (
    balanced,
    canonical,
    check_rank,
    compressed,
    orthonormal,
    public_normal,
    public_uniform,
    thin,
)
from privlora.federated.rules.base import (
    OFFSET,
    POINT,
    SIDES,
    TANGENT,
    Answer,
    Asked,
    Beginning,
    Both,
    Groups,
    Pairs,
    Rule,
    RuleSettings,
    Tensors,
    Trains,
    copied,
    differences,
    groups_of,
    lean,
    names_of,
    padded,
    part_shapes,
)
from privlora.geometry.fixed_rank import Point, Tangent, retract

TRAIN, SKETCH = "train", "sketch"


class FactorRule(Rule):
    """The state is the factors, to which the server adds the mean. ``_settle`` may change the gauge after."""

    def close(self, stage: str) -> None:
        mean = self._mean.take()
        for name, moved in mean.items():
            self._state[name] = self._state[name] + moved
        if mean:
            self._settle()

    def _settle(self) -> None:
        """Called when the state has moved."""


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
    def shapes(cls, stage: str, number: int, groups: Groups, chosen: RuleSettings, clients: int = 1) -> Both:
        factors = part_shapes(groups, chosen.rank)
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
    def answer(cls, stage: str, asked: Asked, end: Tensors, travelled: float = 0.0) -> Answer:
        message, keep, controls = differences(asked.sent, end, SIDES["both"]), {}, _own_controls(asked)
        for name, moved in list(message.items()):
            own = controls[name].to(moved)
            # A client that took no step has learnt nothing of its gradient.
            common = asked.sent[f"{name}_control"].to(moved)
            change = -common - moved / travelled if travelled > 0 else 0 * own
            message[f"{name}_control"], keep[f"{name}_control"] = change, own + change
        return message, keep


def _own_controls(asked: Asked) -> Tensors:
    """c_k of each factor; zero before the client's first round."""
    sent, kept = asked.sent, asked.kept
    return {name: kept.get(f"{name}_control", torch.zeros_like(sent[name])) for name in names_of(sent)}


class Ffa(FactorRule):
    """left <- mean left_k with right frozen for good: exact, and the rows of the update never leave span(right)."""

    name = "ffa"
    summary = "Trains left alone with right frozen for good. Exact; half the messages; one subspace is fixed."
    reference = "FFA-LoRA (arXiv:2403.12313)"
    two_sided = False
    _trains = "left"


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
    def shapes(cls, stage: str, number: int, groups: Groups, chosen: RuleSettings, clients: int = 1) -> Both:
        right = part_shapes(groups, chosen.rank, ["right"])
        return part_shapes(groups, 0, ["left"]) | right, right

    def factors(self) -> Pairs:
        return [(padded(left, right.shape[-1]), right) for left, right in super().factors()]

    @classmethod
    def begin(cls, asked: Asked) -> Beginning:
        state, kept = copied(asked.sent), asked.kept
        for name, sent in asked.sent.items():
            if name.endswith(".left"):
                own = kept.get(name, padded(sent, asked.settings.rank))
                state[name] = own.to(sent, copy=True)
        return Beginning(state=state)

    @classmethod
    def answer(cls, stage: str, asked: Asked, end: Tensors, travelled: float = 0.0) -> Answer:
        keep = copied({name: end[name] for name in names_of(asked.sent, ["left"])})
        return differences(asked.sent, end, ["right"]), keep


class RoLora(FactorRule):
    """Odd rounds average left with right frozen, even rounds right with left frozen. Exact in every round."""

    name = "rolora"
    summary = "Trains left and right by turns, a round each. Exact; half the messages; both subspaces move."
    reference = "RoLoRA (arXiv:2502.01755)"
    _trains = "turns"


class FedSvd(FactorRule):
    """left <- U S, right <- V of mean(left_k) right^T: FFA in a gauge that is renewed each round.

    The mean has rank r and loses nothing. right turns within the span that it began with and never leaves it.
    """

    name = "fedsvd"
    summary = "FFA with right made orthonormal anew each round. Exact; the span of right stays as it began."
    reference = "FedSVD (arXiv:2505.12805)"
    two_sided = False
    _trains = "left"

    def __init__(self, start: Pairs, settings: RuleSettings) -> None:
        super().__init__(start, settings)
        check_rank(self.groups, settings.rank)
        self._settle()

    def _settle(self) -> None:
        for g, (left, right) in enumerate(self.factors()):
            point = thin(left, right)
            # Where S is zero, V of `thin` still lies in the span of right, which has full rank.
            self._state[f"{g}.left"] = point.U * point.S[:, None, :]
            self._state[f"{g}.right"] = point.V


class _PointRule(Rule):
    """The state is U (L, m, R), S (L, R), V (L, n, R) of each group; clients see the r leading triplets."""

    _sent = POINT

    def _started(self, start: Pairs) -> Tensors:
        points = [canonical(left, right, self.settings.seed) for left, right in start]
        return _named([self._kept(point) for point in points])

    def start_at(self, points: Sequence[Point]) -> None:
        """Go on from points with subspaces of one's own choice, as a start whose update is zero has them."""
        self._state = _named([self._kept(point) for point in points])

    def _kept(self, point: Point) -> Point:
        """A point with room for what the server keeps beside it."""
        return point

    def close(self, stage: str) -> None:
        mean = self._mean.take()
        if mean:
            moved = [self._moved(g, point, mean) for g, point in enumerate(_points(self._state))]
            self._state = _named(moved)

    @abstractmethod
    def _moved(self, g: int, point: Point, mean: Tensors) -> Point:
        """The state of group g with the mean answer added."""

    def broadcast(self, stage: str) -> Tensors:
        rank = self.settings.rank
        return copied({name: tensor[..., :rank] for name, tensor in self._state.items()}, self.dtype)

    def factors(self) -> Pairs:
        firsts = [point.split(self.settings.rank)[0] for point in _points(self._state)]
        return [(point.U * point.S[:, None, :], point.V) for point in firsts]


class Alt(_PointRule):
    """One factor by turns against an orthonormal other one. Odd rounds train left = U S against right = V; even rounds
    right = V S against left = U. The mean is exact in every round, and the server makes the moved factor canonical.
    """

    name = "alt"
    summary = "Trains left and right by turns against an orthonormal other one. Exact; both subspaces move."
    reference = "RoLoRA (arXiv:2502.01755) in the canonical gauge"
    _trains = "turns"

    def _moved(self, g: int, point: Point, mean: Tensors) -> Point:
        left, right = f"{g}.left", f"{g}.right"
        if left in mean:
            pair = point.U * point.S[:, None, :] + mean[left], point.V
        else:
            pair = point.U, point.V * point.S[:, None, :] + mean[right]
        return canonical(*pair, self.settings.seed)

    @classmethod
    def begin(cls, asked: Asked) -> Beginning:
        sent, state = asked.sent, {}
        scaled = "U" if cls.trains(asked.number, asked.settings) == "left" else "V"
        for g in groups_of(sent):
            for side, part in zip(SIDES["both"], "UV", strict=True):
                basis = sent[f"{g}.{part}"]
                state[f"{g}.{side}"] = basis * sent[f"{g}.S"][:, None, :] if part == scaled else basis.clone()
        return Beginning(state=state)


class Tan(_PointRule):
    """The mean of tangent vectors at one fixed point, then the best approximation of rank r.

    Clients train (M, Up, Vp) of xi = U M V^T + Up V^T + U Vp^T at the broadcast point; these coordinates are linear and
    isometric, so their mean is that of the updates, and noise in them has one size whatever the factors are. The server
    keeps up to r triplets more than it broadcasts: what one round cuts off counts in the next (error feedback).
    """

    name = "tan"
    summary = "Averages tangent vectors at one point, cuts to rank r, keeps what was cut. Exact; two-sided."
    reference = "PRISM's tangent space with its base fixed for a round; Vandereycken 2013 for the coordinates"

    _trains = "tangent"

    def _kept(self, point: Point) -> Point:
        return point.extended(self.settings.rank)

    def _moved(self, g: int, point: Point, mean: Tensors) -> Point:
        return retract(point, Tangent(*(mean[f"{g}.{part}"] for part in TANGENT)), 1.0)

    @classmethod
    def answer(cls, stage: str, asked: Asked, end: Tensors, travelled: float = 0.0) -> Answer:
        return copied({name: end[name] for name in names_of(asked.sent, TANGENT)}), {}


def _named(points: Sequence[Point]) -> Tensors:
    return {f"{g}.{part}": getattr(point, part) for g, point in enumerate(points) for part in POINT}


def _points(state: Mapping[str, Tensor]) -> list[Point]:
    return [Point(*(state[f"{g}.{part}"] for part in POINT)) for g in groups_of(state)]


class FedAsk(Rule):
    """The mean of products from two sketches. With M_k = left_k right_k^T and the public Omega (n, s), s = r + p:

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
    def shapes(cls, stage: str, number: int, groups: Groups, chosen: RuleSettings, clients: int = 1) -> Both:
        width = chosen.rank + chosen.oversampling
        if stage == TRAIN:
            return part_shapes(groups, chosen.rank), part_shapes(groups, width, "Y")
        return part_shapes(groups, width, "Q"), part_shapes(groups, width, "P")

    # --- the server ---

    def broadcast(self, stage: str) -> Tensors:
        """In "sketch" nothing if no client answered "train"."""
        if stage == TRAIN:
            return super().broadcast(stage)
        return copied(self._bases, self.dtype)

    def add(self, stage: str, message: Tensors, weight: float) -> None:
        """Raises RunError for a sketch without a basis, which no client can have been sent."""
        if stage == SKETCH and not self._bases:
            fix = "close 'train' before 'sketch' is answered"
            raise RunError("a sketch came before the first stage of the round was closed", fix=fix)
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
    def answer(cls, stage: str, asked: Asked, end: Tensors, travelled: float = 0.0) -> Answer:
        """Between its stages a client keeps its factors. Raises RunError without them, or if Q is not orthonormal."""
        if stage == SKETCH:
            return _second(asked.sent, asked.kept), {}
        moved, sent = SIDES[cls.trains(asked.number, asked.settings)], asked.sent
        factors = copied({n: (end if n.split(".")[1] in moved else sent)[n] for n in names_of(sent)})
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
            why = "with a basis of its own choice a server can tell one client's sketch from the others' sum"
            fix = "leave this federation unless the server explains it"
            raise RunError("the basis that the server sent is not orthonormal", why=why, fix=fix)
        message[f"{g}.P"] = (right.double() @ (left.double().mT @ Q)).to(right.dtype).contiguous()
    return message


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
            names = (f"{g}.{side}" for side in SIDES["both"])
            left, right = (torch.stack([message[name].double() for message, _ in answers]) for name in names)
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
        root, (old, name) = weights.sqrt(), (f"{g}.{side}" for side in SIDES["both"])
        moved = self._state[old] + left, self._state[name] + right
        point = thin(*(_side_by_side(side, root) for side in moved))
        self._state[old], self._state[name] = balanced(point, self.settings.rank, self._state[name])


class _OffsetRule(StackingRule):
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


class FedEx(_OffsetRule):
    """FedAvg, and what it misses: mean(left_k right_k^T) - mean(left_k) mean(right_k)^T goes to the offset.

    That residual has rank (K - 1) r at most for K clients.
    """

    name = "fedex"
    summary = "FedAvg, its error added to the frozen part. Exact; broadcasts grow; each update is seen."
    reference = "FedEx-LoRA (arXiv:2410.09432)"

    @classmethod
    def shapes(cls, stage: str, number: int, groups: Groups, chosen: RuleSettings, clients: int = 1) -> Both:
        factors = part_shapes(groups, chosen.rank)
        grown = (number - 1) * (clients - 1) * chosen.rank
        return factors | part_shapes(groups, grown, OFFSET), factors

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
        pairs = zip(super().factors(), self._offsets(), strict=True)
        wider = (zip(own, more, strict=True) for own, more in pairs)
        return [(torch.cat(left, dim=-1), torch.cat(right, dim=-1)) for left, right in wider]


class Flora(_OffsetRule):
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
        return part_shapes(groups, grown, OFFSET), part_shapes(groups, chosen.rank)

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
