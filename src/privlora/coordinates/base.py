"""What every space of gradients offers to a mechanism."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.adapters.captured import pieces
from privlora.coordinates.evened import Evened, Sums
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point, Product, point_from_factors

Vector = list[tuple[Tensor, ...]]
"""Coordinates. All that is promised: ``to_vector`` and ``standard_normal`` of one space give the same shapes.

The spaces of the table have one tuple a group and one tensor a kind, each with a leading dimension L. Others may hold
what belongs to no single module, such as one coefficient vector for all. Code outside the space may only add, scale and
multiply entry by entry.
"""

_Either = TypeVar("_Either", Sums, Vector)


def add_vectors(a: _Either, b: _Either) -> _Either:
    """a + b, both raw sums or both coordinates."""
    total: Any = [tuple(x + y for x, y in zip(xs, ys, strict=True)) for xs, ys in zip(a, b, strict=True)]
    return total


def float64_device(device: torch.device) -> torch.device:
    """``device``, or the CPU where it has no float64 (Apple's GPUs)."""
    return torch.device("cpu") if device.type == "mps" else device


@dataclass(frozen=True)
class ReleaseLaw:
    """What is public of the releases to come: sigma, C, b, and how units are brought to C (mechanisms.CLIPPING)."""

    noise_multiplier: float
    clip_norm: float
    expected_batch_size: float
    clipping: str

    @property
    def noise_std(self) -> float:
        """tau = sigma C / b."""
        return self.noise_multiplier * self.clip_norm / self.expected_batch_size


class Coordinates(ABC):
    """A state of the adapter (the point where gradients are taken) and Euclidean coordinates of gradients there.

    A mechanism sums P and Q of clipped units first and asks for coordinates once (``to_vector`` is linear), so the
    norm of what is released is the norm that was clipped. The state may change only between two releases.

    The defaults hold where units are clipped in the coordinates that are released, and nothing is drawn for a step.
    """

    # Whether the update is a whole matrix (m, n) a module, which layers compute with and nothing averages.
    dense: ClassVar[bool] = False
    # In what gradients are clipped and noised, and what the noise of one step does to W, in the report's words: of a
    # space that the table of methods does not describe.
    described: str = "in coordinates of their own"
    noise_law: str = "No closed form is known."
    # Whether of units the losses are taken and no gradients, by passes without a graph.
    forward_only: ClassVar[bool] = False
    # Whether the coordinates are isometric for weight updates, so that each draw's noise on W has a known law.
    intrinsic: bool = False
    # Whether ``to_vector`` scales entries and does nothing else to them, so that float32 serves as well as float64.
    entrywise: ClassVar[bool] = False
    # Names of a group's tensors in state_dict, where servers of federations may send them.
    state_parts: ClassVar[tuple[str, ...]] = ()
    # peft's scale s, where the state is left = lora_B and right = lora_A^T and trainers of LoRA may move both.
    lora_scale: float | None = None

    def __init__(self, adapter: LowRankAdapter, dtype: torch.dtype = torch.float32) -> None:
        self.adapter = adapter
        self.dtype = dtype

    @classmethod
    @abstractmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        """Number of coordinates = E||standard_normal||^2."""

    @classmethod
    def event_layers_of(cls, adapter: Callable[[], LowRankAdapter]) -> tuple[tuple[int, int], ...]:
        """StepEvent.projections of a release; () if the accounting is that of the plain Gaussian mechanism.

        adapter: makes the one that will be trained, or one of its shape; called only if the cost depends on its layers.
        """
        return ()

    @property
    def dimension(self) -> int:
        return self.dimension_of(self.adapter)

    @property
    def event_layers(self) -> tuple[tuple[int, int], ...]:
        return self.event_layers_of(lambda: self.adapter)

    # What is remembered of releases besides the state: something with state_dict and load_state_dict, for checkpoints.
    memory: Any = None

    def expect(self, law: ReleaseLaw) -> None:  # noqa: B027 - most coordinates are the same under any
        """Called by a mechanism with noise when it is made."""

    def taken(self) -> list[dict[str, float]]:
        """Of releases so far, what each was made along, where that is chosen from step to step; else []. Steps that a
        crash lost are missing, so only what is the same without them may be published."""
        return []

    def prepare(self) -> None:  # noqa: B027 - most coordinates have nothing to do
        """Called once before the gradients of a batch are taken: PUBLIC work at the present state."""

    def rows_at_once(self) -> int | None:
        """PUBLIC: a bound on the rows of a micro-batch, besides that on its tokens; None: there is no need of one."""
        return None

    def encode(self, captured: Captured) -> Captured:
        """A micro-batch as it will be measured and summed; what is done to a unit is a function of it alone."""
        return captured

    def measured(self, captured: Captured) -> Captured:
        """The same units, of which sums are those of ``captured``; what they need is computed here, for all of them."""
        return captured

    @abstractmethod
    def norms_squared(self, captured: Captured) -> Tensor:
        """||coordinates of unit i||^2 over all modules, (units,) float64. Private."""

    def module_norms_squared(self, captured: Captured) -> Tensor:
        """The same of each module by itself, (modules, units) float64, in the order of ``captured``. Private.

        Only for coordinates whose entries each belong to one module: ||unit||^2 is then the sum over modules.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot clip module by module",
            why="no part of what is released there belongs to one module, so bounds of modules would bound nothing",
            fix="set method.clipping=flat",
        )

    def parts_squared(self, captured: Captured) -> Tensor:
        """||M||^2, ||Up||^2 and ||Vp||^2 of each unit over all modules, (3, units) float64. Private."""
        raise ConfigError(
            f"{type(self).__name__} has no right weight",
            why="what it measures is not split into what turns the input subspaces and what does not",
            fix="remove method.right_weight, or use method prism",
        )

    def evened(self, captured: Captured) -> Evened:
        """Each unit's gradient after step one of spectral clipping (coordinates.evened); not finite ones become 0."""
        raise ConfigError(
            f"{type(self).__name__} cannot clip spectrally",
            why="how a unit's gradient is evened out there is not defined",
            fix="set method.clipping=flat",
        )

    def norm_floor(self) -> float:
        """PUBLIC. The norm below which a unit is not brought up to the clipping norm by normalising."""
        raise ConfigError(
            f"{type(self).__name__} cannot normalise units",
            why="no public gradient shows which norms are only rounding, and those must not be brought up",
            fix="set method.clipping=flat or automatic",
        )

    @abstractmethod
    def to_vector(self, sums: Sums) -> Vector:
        """Coordinates of a (weighted sum of) raw gradients, linear in them. In their dtype."""

    @abstractmethod
    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        """A Gaussian vector with identity covariance on every coordinate that a gradient can reach.

        draw: standard normal entries of a shape; the vector is computed in their dtype and on their device.
        """

    def frame(self) -> dict[str, Tensor]:
        """PUBLIC: what of the present state its vectors are given in, for ``followed``; {} where that never changes."""
        return {}

    def followed(self, vector: Vector, frame: Mapping[str, Tensor]) -> Vector:
        """The vector here that does most like what ``vector`` did at another, earlier state, of this ``frame``.

        Linear, and never longer than ``vector``; correlated noise rests on both (mechanisms.banded).
        """
        return vector

    def laid_out(self, captured: Captured) -> tuple[list[Tensor], float] | None:
        """All units' P and Q in the order of a vector's entries, and what ``to_vector`` multiplies them by; None where
        it does more than that."""
        return None

    def weight_units(self) -> list[Tensor]:
        """What a relative rate is multiplied by, (L,) float64 a group: ||W||_F / sqrt(d M) (optimizers.rate_units)."""
        modules, norms = len(self.adapter.sites), self.adapter.weight_norms
        return [norm / (d * modules) ** 0.5 for d, norm in zip(self.moved_numbers(), norms(), strict=True)]

    def moved_numbers(self) -> list[int]:
        """In how many directions the noise of one step moves a module, one number a group: what a rate in the size of
        the frozen weights is spread over (optimizers.rate_units)."""
        raise ConfigError(
            f"{type(self).__name__} cannot take its rate in the size of the frozen weights",
            why="what is released there belongs to no single module, so no module's weight says how far to move it",
            fix="set method.relative_rate=false",
        )

    def entries(self) -> int:
        """How many numbers a vector holds; at least ``dimension``, more where some follow from others."""
        zeros = self.standard_normal(
            lambda shape: torch.zeros(shape, dtype=self.dtype, device=self.adapter.device)
        )
        return sum(t.numel() for parts in zeros for t in parts)

    @classmethod
    def entries_of(cls, adapter: LowRankAdapter) -> int:
        """The same before there is a space; of those in which public gradients are taken."""
        return cls.dimension_of(adapter)

    def nearest(self, vector: Vector) -> Vector:
        """The element of the space nearest to any entries of a vector's shapes, of which a secure sum has noise on all.

        An orthogonal projection: of independent standard normal entries it has the law of ``standard_normal``, and it
        leaves what ``to_vector`` gave as it is, but for rounding. Post-processing of what is public.
        """
        return vector

    def weighted_sum(self, captured: Captured, weights: Tensor) -> Sums:
        """sum_i weights_i (P_i, Q_i), stacked by group, float64. Private until noised.

        weights: (units,), or (modules, units) where each module of a unit has its own.

        Of K stacked adapters, over each one's own units: K L modules a group, adapters outermost.

        In float32 the sum of thousands of aligned units would round by more than C / 1e5.
        """
        factors = _in_float64(weights)[..., None, :]
        if captured.owners is not None:
            factors = factors * captured.owners.to(factors.device)
        factors = factors.expand(len(captured.p), -1, -1)  # (modules, K, units)
        sums: Sums = []
        module = 0
        for pair in captured.stacked(self.adapter.sizes):
            here = factors[module : module + len(pair[0])]
            module += len(pair[0])
            p, q = (torch.cat([_summed(some, here[at]) for at, some in pieces(t)], dim=1) for t in pair)
            sums.append((p.flatten(0, 1), q.flatten(0, 1)))
        return sums

    def evened_sum(self, evened: Evened, weights: Tensor) -> Sums:
        """``weighted_sum`` of evened gradients. Private until noised."""
        if evened.owners is not None:
            return self.weighted_sum(evened.formed(), weights)
        return evened.weighted_sum(weights)

    def partial_sum(self, captured: Captured, weights: Tensor) -> Sums | Vector:
        """sum_i weights_i of what ``encode`` gave, in the form in which it is added up. Private until noised."""
        return self.weighted_sum(captured, weights)

    def from_partial(self, total: Any) -> Vector:
        """The coordinates of a total of partial sums, float64."""
        return self.to_vector(total)

    def pull_back(self, vector: Vector) -> Sums:
        """X, Y with <to_vector(P, Q), vector> = <P, X> + <Q, Y> over all modules: the adjoint of ``to_vector``."""
        like = vector[0][0]
        ranks = [len(range(self.adapter.rank)[kept]) for kept in self.adapter.columns]
        sizes = [(g, *pair) for g in self.adapter.groups for pair in zip((g.m, g.n), ranks, strict=True)]
        shapes = [(len(g.sites), rows, rank) for g, rows, rank in sizes]
        with torch.enable_grad():
            leaves = [like.new_zeros(shape).requires_grad_(True) for shape in shapes]
            there = self.to_vector(list(zip(leaves[::2], leaves[1::2], strict=True)))
            pairs = [pair for both in zip(there, vector, strict=True) for pair in zip(*both, strict=True)]
            value = torch.stack([(a * b).sum() for a, b in pairs]).sum()
            # Coordinates that see one side alone do not depend on the other.
            grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return list(zip(grads[::2], grads[1::2], strict=True))

    def released_share(self, captured: Captured) -> Tensor:
        """Which part of ||unit||^2, as it was clipped, reaches a release: (units,) float64. Private."""
        return torch.ones(captured.units, dtype=torch.float64)

    def weight_effect(self, vector: Vector) -> list[tuple[Tensor, Tensor]]:
        """How W moves along ``vector``, to first order at the installed state, as left right^T for each group.

        <coordinates of G, vector> = <G, X right^T + left Y^T> by P = G right and Q = G^T left. Where coordinates are
        the gradient in parameters of W, that is the derivative of W along them.
        """
        effect = []
        for group, (x, y) in zip(self.adapter.groups, self.pull_back(vector), strict=True):
            left, right = (side.to(x) for side in self.adapter.met(group))
            effect.append((torch.cat([x, left], dim=-1), torch.cat([right, y], dim=-1)))
        return effect

    def expected_squares(self) -> list[float] | None:
        """E||weight_effect of standard_normal||_F^2 of each of the adapter's sites; None: no closed form."""
        return None

    @abstractmethod
    def install(self) -> None:
        """Write the state into the adapter, for the next forward pass."""

    @abstractmethod
    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """The weight update as A B^T: one (A (L, m, r), B (L, n, r)) a group."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The state as named tensors."""

    @abstractmethod
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the state and install it."""

    def as_points(self) -> list[Point]:
        """The update as canonical points, with which averages begin: one stack a group."""
        # Factors may start at zero: missing directions carry no weight, so any public ones will do.
        return [point_from_factors(a, b, torch.Generator(a.device).manual_seed(0)) for a, b in self.factors()]

    def as_products(self) -> list[Product]:
        """The same update, as averages take it in: nothing is decomposed."""
        return [(a, a.new_ones(a.shape[0], a.shape[-1]), b) for a, b in self.factors()]

    @property
    def draws(self) -> int | None:
        """Number of the current projection where each release needs a new one; else None."""
        return None

    # The projection that was last released upon.
    released_on: int | None = None

    def place(self) -> str:
        """A hash of all that coordinates of a gradient depend on: sums of two places do not add up."""
        found = hashlib.blake2b(digest_size=16)
        for tensor in self._placed():
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def _placed(self) -> list[Tensor]:
        return list(self.state_dict().values())

    def shared(self) -> dict[str, Tensor]:
        """What processes that take gradients of one batch together must have alike; SECRET where projections are, so
        never stored."""
        return self.state_dict()

    def take_shared(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``shared`` gave in another process, and install it."""
        self.load_state_dict(tensors)

    def begin(self) -> None:  # noqa: B027 - most coordinates have nothing to do
        """Called by a mechanism whose noise is secure, when it is made."""

    def advance(self) -> bool:
        """Called once after each step: draw what the next release needs.

        Returns whether gradients are seen otherwise from now on.
        """
        return False

    def stacked(self, adapter: LowRankAdapter, count: int) -> Coordinates:
        """``count`` copies of this state on an ``adapter`` of so many; parts have count L modules, adapters outermost.

        Norms are then those of each unit at its own adapter's state (Captured.owners). Raises ConfigError where there
        are no copies.
        """
        own = "each would need a copy of the weights of its own, since updates are dense"
        raise ConfigError(
            f"adapters in {type(self).__name__} cannot be trained side by side",
            why=own if self.dense else "the space does not say how states of several adapters make one",
            fix="choose another method, or train one adapter after the other",
        )

    def named_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Site name -> (A (m, r), B (n, r))."""
        return name_factors(self.adapter, self.factors())


def squared_norms(t: Tensor) -> Tensor:
    """||matrix||_F^2 of a stack (..., k, r), (...)."""
    return t.square().sum(dim=(-2, -1))


def _summed(t: Tensor, factors: Tensor) -> Tensor:
    """sum_i factors_i P_i of (L, units, r, m) with factors (L, K, units): (K, L, m, r) float64."""
    rows = t if t.is_contiguous() else t.mT  # as they lie in memory
    found = factors @ _in_float64(rows).flatten(2)  # (L, K, r m)
    whole = found.unflatten(-1, rows.shape[2:]).transpose(0, 1)
    return whole.mT if rows is t else whole


def _in_float64(t: Tensor) -> Tensor:
    return t.to(float64_device(t.device)).double()


def squares_of_sides(captured: Captured, sizes: Sequence[int], sides: tuple[int, ...] = (0, 1)) -> Tensor:
    """||P||^2 and ||Q||^2, of the ``sides`` (0, 1) that count, added up: (modules, units) float64. Private."""
    total = torch.zeros(len(captured.p), captured.units, dtype=torch.float64, device=captured.p[0].device)
    for squares, pair in zip(total.split(list(sizes)), captured.stacked(sizes), strict=True):
        for side in sides:
            for here, some in pieces(pair[side]):
                squares[here] += squared_norms(some).double()
    return total


def name_factors(
    adapter: LowRankAdapter, factors: list[tuple[Tensor, Tensor]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Site name -> (A, B), from one stacked pair a group."""
    return {
        site.name: (a[k], b[k])
        for group, (a, b) in zip(adapter.groups, factors, strict=True)
        for k, site in enumerate(group.sites)
    }
