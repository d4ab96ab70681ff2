"""Spaces that lean on the span of public gradients: units seen through few public directions (PE-SGD).

Each wraps a space of low-rank updates, whose state it moves and in whose coordinates the public gradients are taken.
Before a batch it asks for the gradients of its public texts at the present state (``prepare``); what is released is
turned back into a gradient of the wrapped space by post-processing (``decode``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import ClassVar

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates.base import Coordinates, ReleaseLaw, Sums, Vector
from privlora.coordinates.factors import FactorCoordinates
from privlora.coordinates.public_span import PublicGradients, Rows, Span
from privlora.coordinates.span_choice import SpanChoice
from privlora.coordinates.tangent import TangentCoordinates
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point, Product

_BYTES = 2**27  # of gradients besides those of public texts, unless an eighth of theirs is more
_TILE = 8  # columns of a matrix product that kernels take at a time
_NUMBER = 4  # bytes of one of a unit's
_SPAN = "span."  # of a span's parts, among those of what processes share


def unit_vectors(space: Coordinates, captured: Captured, dtype: torch.dtype = torch.float64) -> Tensor:
    """Coordinates of each unit in ``space``, end to end: (units, p). Each by itself. Private if units are."""
    found = torch.empty(captured.units, space.entries(), dtype=dtype, device=captured.p[0].device)
    for unit, row in enumerate(found):
        lay(space, captured, unit, row)
    return found


def lay(space: Coordinates, captured: Captured, unit: int, row: Tensor) -> None:
    """Write the coordinates of one unit into ``row``, (p,) of any dtype and device."""
    laid = space.laid_out(captured)
    if laid is None:
        vector = space.to_vector(_alone(space, captured, unit))
        pieces = [t.flatten() for parts in vector for t in parts]
    else:
        pieces = [t[unit].flatten() for t in laid[0]]
    for piece, out in zip(pieces, row.split([len(piece) for piece in pieces]), strict=True):
        if laid is None or laid[1] == 1:
            out.copy_(piece)
        elif out.dtype == piece.dtype and out.device == piece.device:
            torch.mul(piece, laid[1], out=out)
        else:
            out.copy_(piece * laid[1])


def rows_of(space: Coordinates, captured: Captured) -> Rows:
    """The same of all units, where they lie if that is in order."""
    laid = space.laid_out(captured)
    if laid is None:
        return Rows([unit_vectors(space, captured, space.dtype)])
    return Rows([t.flatten(1) for t in laid[0]], laid[1])


def rows_beside(entries: int, kept: int, copies: int) -> int:
    """How many gradients of ``entries`` float32 numbers, each ``copies`` times, go next to ``kept`` bytes of them."""
    return max(1, max(_BYTES, kept // 8) // (entries * _NUMBER * copies))


def units_beside(entries: int, kept: int, copies: int) -> int:
    """The same of units, whose products are taken together: 24 cost less than 25 do."""
    rows = rows_beside(entries, kept, copies)
    return rows if rows < _TILE else rows - rows % _TILE


def copies_of(inner: type[Coordinates]) -> int:
    """How often a unit's gradient in such coordinates is held at once."""
    return 1 if inner.entrywise else 2


def _alone(space: Coordinates, captured: Captured, unit: int) -> Sums:
    sums: Sums = []
    start = 0
    for group in space.adapter.groups:
        p, q = (side[start : start + len(group.sites)] for side in (captured.p, captured.q))
        start += len(group.sites)
        pair = torch.stack([t[unit] for t in p]), torch.stack([t[unit] for t in q])
        sums.append(pair if space.entrywise else (pair[0].double(), pair[1].double()))
    return sums


def flattened(vector: Vector) -> Tensor:
    """All entries, end to end."""
    return torch.cat([t.flatten() for parts in vector for t in parts])


class SpanSpace(Coordinates):
    """A space ``inner`` together with the span of public gradients in its coordinates.

    The state is inner's. refresh: gives the gradients of the next step's public texts at that state, in inner's
    coordinates; set once, and called by ``prepare``. look_again: those of the texts as they are, none of which is
    written or chosen, for a report; None: refresh. Both may read the state, releases and public texts, and nothing
    private.

    ridge: relative, see Span. top_k: a whole number, 0 for all directions.
    Raises ConfigError for dropout in the adapter.
    """

    inner_kind: ClassVar[type[Coordinates]] = FactorCoordinates

    def __init__(self, inner: Coordinates, *, ridge: float, top_k: float) -> None:
        super().__init__(inner.adapter, inner.dtype)
        if inner.adapter.dropout:
            raise ConfigError(
                "adapter.lora_dropout does not go with the span of public gradients",
                why="public and private gradients would be thinned out by different masks, and lie in other spans",
                fix="set adapter.lora_dropout=0",
            )
        # Their gradients are taken as long rows.
        inner.adapter.in_order = inner.entrywise
        self.inner = inner
        self.ridge, self.top_k = ridge, int(top_k)
        self.refresh: Callable[[], PublicGradients] | None = None
        self.look_again: Callable[[], PublicGradients] | None = None
        self._span: Span | None = None

    @property
    def span(self) -> Span:
        """That of the last ``prepare``; if there was none, as in a run that only reports, of the texts as they are."""
        if self._span is None:
            self._span = self._spanned(self.look_again or self.refresh)
        return self._span

    def prepare(self) -> None:
        """Take the public gradients at the present state. Raises ConfigError where no texts were given."""
        self._span = None  # frees the old G first
        self._span = self._spanned(self.refresh)

    def _spanned(self, gradients: Callable[[], PublicGradients] | None) -> Span:
        if gradients is None:
            raise ConfigError(
                f"{type(self).__name__} has no public texts",
                why="private gradients are released along the gradients of public texts",
                fix="set coordinates.refresh, or give build_parts `texts`",
            )
        return self._span_of(gradients())

    def _span_of(self, gradients: PublicGradients) -> Span:
        return Span(gradients, ridge=self.ridge, top_k=self.top_k)

    def record(self) -> None:
        """The present span was released along."""

    @abstractmethod
    def decode(self, vector: Vector) -> Vector:
        """The gradient in inner's coordinates that a released vector stands for, in inner's dtype."""

    @abstractmethod
    def scores(self, vector: Vector) -> Tensor:
        """How much each public text has to do with a released vector: (N,) float64, >= 0."""

    @abstractmethod
    def decoded_std(self, noise_std: float) -> float:
        """Root mean square over inner's coordinates of what noise of ``noise_std`` becomes by ``decode``."""

    def weight_effect(self, vector: Vector) -> list[tuple[Tensor, Tensor]]:
        """How W moves along what ``vector`` stands for."""
        return self.inner.weight_effect(self.decode(vector))

    def install(self) -> None:
        self.inner.install()

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        return self.inner.factors()

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(tensors)

    def shared(self) -> dict[str, Tensor]:
        """With the span, whose gradients would have to be taken again."""
        return super().shared() | {f"{_SPAN}{name}": t for name, t in self.span.parts().items()}

    def take_shared(self, tensors: Mapping[str, Tensor]) -> None:
        own = {name: t for name, t in tensors.items() if not name.startswith(_SPAN)}
        parts = {name.removeprefix(_SPAN): t for name, t in tensors.items() if name.startswith(_SPAN)}
        super().take_shared(own)
        self._span = None  # frees the old G first
        self._span = Span.of_parts(parts, self.adapter.device)

    def as_points(self) -> list[Point]:
        return self.inner.as_points()

    def as_products(self) -> list[Product]:
        return self.inner.as_products()

    def _placed(self) -> list[Tensor]:
        return [*super()._placed(), self.span.values, self.span.vectors]

    def _decoded(self, flat: Tensor) -> Vector:
        """(p,) as inner's tensors, in their dtype."""
        return self._unflattened(flat.to(self.adapter.device, self.dtype))

    def _unflattened(self, flat: Tensor) -> Vector:
        """(p,) as inner's tensors."""
        device = self.adapter.device
        zeros = self.inner.standard_normal(lambda shape: torch.zeros(shape, dtype=self.dtype, device=device))
        pieces = iter(flat.split([t.numel() for parts in zeros for t in parts]))
        return [tuple(next(pieces).reshape(t.shape) for t in parts) for parts in zeros]


class EncodedSpace(SpanSpace):
    """A span in whose own coordinates units are clipped: they are computed for each unit by itself, once.

    What is measured is what is added up, to the bit, however much small eigenvalues enlarge: the guarantee needs no
    accuracy of the Gram matrix, only that nobody's column depends on anybody else.
    """

    def __init__(self, inner: Coordinates, *, ridge: float, top_k: float) -> None:
        super().__init__(inner, ridge=ridge, top_k=top_k)
        # Rounding in a micro-batch depends on who else is in it, and a span may enlarge it without bound.
        inner.adapter.one_by_one = True

    @property
    def _copies(self) -> int:
        """How often a unit's gradient is held at once: as captured, and end to end where that is not read in place."""
        return copies_of(type(self.inner))

    @abstractmethod
    def _columns_of(self, rows: Rows) -> Tensor:
        """Linear: (units, d) float64 of (units, p). Each by itself."""

    @abstractmethod
    def _shaped(self, column: Tensor) -> Vector:
        """(d,) as a vector of this space."""

    def rows_at_once(self) -> int:
        matrix = self.span.gradients.matrix
        return units_beside(matrix.shape[1], matrix.nbytes, self._copies)

    def encode(self, captured: Captured) -> Captured:
        return self.measured(captured)

    def measured(self, captured: Captured) -> Captured:
        return replace(captured, columns=self._columns(captured))

    def norms_squared(self, captured: Captured) -> Tensor:
        return self._columns(captured).square().sum(dim=1)

    def partial_sum(self, captured: Captured, weights: Tensor) -> Vector:
        columns = self._columns(captured)
        kept = weights != 0  # 0 times a column that is not finite is not 0
        return self._shaped(weights[kept].to(columns) @ columns[kept])

    def from_partial(self, total: Sums | Vector) -> Vector:
        return list(total)

    def to_vector(self, sums: Sums) -> Vector:
        flat = flattened(self.inner.to_vector([(p.double(), q.double()) for p, q in sums]))
        column = self._columns_of(Rows([flat[None]]))[0]
        return self._shaped(column.to(sums[0][0]))

    def _columns(self, captured: Captured) -> Tensor:
        if captured.columns is not None:
            return captured.columns
        return self._columns_of(rows_of(self.inner, captured))


class SpanCoordinates(EncodedSpace):
    """y = (L + eta)^-alpha U^T G h for a unit's gradient h: k numbers; decoded as G^T U (L + eta)^(alpha - 1) y.

    By linearity every alpha decodes the mean of unclipped units to its ridge projection on the span; it decides in
    which coordinates units are bounded and noised. alpha = 1: coefficients of the public texts, up to a rotation
    (PE-SGD, Zou et al. 2026, with all k = N directions). alpha = 1/2: orthonormal coordinates of the span (with top_k
    and no residual: GEP's embedding, Yu et al. 2021). alpha = 0: inner products with the public gradients, rotated.
    Noise is white in all rotations alike, so none is spent on turning back.

    hold_out: above 0, those of alpha, ridge and top_k that are None are chosen before each step, and so k may change
    from step to step, see span_choice. Raises ConfigError where nothing is left to choose, or nothing chooses.
    """

    def __init__(
        self,
        inner: Coordinates,
        *,
        alpha: float | None = 1.0,
        ridge: float | None = 1e-6,
        top_k: float | None = 0,
        hold_out: float = 0.0,
    ) -> None:
        free = [n for n, v in (("alpha", alpha), ("ridge", ridge), ("top_k", top_k)) if v is None]
        if bool(free) != (hold_out > 0):
            raise ConfigError(
                f"method.hold_out={hold_out:g} and {', '.join(free) or 'nothing'} left to choose",
                why="public gradients are held out to choose what alpha, ridge and top_k do not say",
                fix="leave one of them out, or set method.hold_out=0",
            )
        super().__init__(inner, ridge=ridge or 0.0, top_k=top_k or 0)
        self.alpha = alpha or 0.0
        self.memory: SpanChoice | None = None
        if free:
            whole = None if top_k is None else int(top_k)
            self.memory = SpanChoice(hold_out=hold_out, alpha=alpha, ridge=ridge, top_k=whole)

    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        """0: as many as there are public texts, or top_k, which an adapter does not know."""
        return 0

    @property
    def dimension(self) -> int:
        return self.span.size

    def expect(self, law: ReleaseLaw) -> None:
        if self.memory is not None:
            self.memory.law = law

    def record(self) -> None:
        if self.memory is not None:
            self.memory.record()

    def taken(self) -> list[dict[str, float]]:
        return [] if self.memory is None else [asdict(one) for one in self.memory.history]

    def _span_of(self, gradients: PublicGradients) -> Span:
        if self.memory is None:
            return super()._span_of(gradients)
        gram = gradients.gram()
        chosen = self.memory.choose(gram)
        self.alpha, self.ridge, self.top_k = chosen.alpha, chosen.ridge, chosen.top_k
        return Span(gradients, ridge=self.ridge, top_k=self.top_k, gram=gram)

    def _placed(self) -> list[Tensor]:
        return [*super()._placed(), self._setting()]

    def shared(self) -> dict[str, Tensor]:
        return super().shared() | {"setting": self._setting()}

    def take_shared(self, tensors: Mapping[str, Tensor]) -> None:
        self.alpha, self.ridge = tensors["setting"].tolist()
        super().take_shared({name: t for name, t in tensors.items() if name != "setting"})

    def _setting(self) -> Tensor:
        return torch.tensor([self.alpha, self.ridge], dtype=torch.float64)

    def norm_floor(self) -> float:
        return self.span.least_norm(-self.alpha)

    def standard_normal(self, draw: Callable[[tuple[int, ...]], Tensor]) -> Vector:
        return [(draw((self.span.size,)),)]

    def decode(self, vector: Vector) -> Vector:
        return self._decoded(self.span.back(vector[0][0], self.alpha - 1))

    def scores(self, vector: Vector) -> Tensor:
        return self.span.of_texts(vector[0][0], self.alpha - 1).abs()

    def decoded_std(self, noise_std: float) -> float:
        squares = self.span.values * self.span.power(2 * self.alpha - 2)
        return noise_std * (float(squares.sum()) / self.inner.dimension) ** 0.5

    def _columns_of(self, rows: Rows) -> Tensor:
        return self.span.along(rows, -self.alpha)

    def _shaped(self, column: Tensor) -> Vector:
        return [(column,)]


class TangentSpanCoordinates(SpanCoordinates):
    """The same in PRISM's tangent coordinates: Gram matrix and columns depend on Z alone, not on its factors."""

    inner_kind = TangentCoordinates

    def weight_units(self) -> list[Tensor]:
        """1 / sqrt(D) everywhere: a relative rate is the length of a step."""
        unit = self.inner.dimension**-0.5
        return [torch.full((len(g.sites),), unit, dtype=torch.float64) for g in self.adapter.groups]
