"""Spaces that keep their word pass the check, and each way of breaking it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from method_cases import by_space_and_state, flat, make_case
from span_space import Span
from tiny_models import tiny_model
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.auditing.gradient_canaries import draw_canaries
from privlora.coordinates import (
    FactorCoordinates,
    OneFactorCoordinates,
    ProjectedCoordinates,
    Sums,
    Vector,
    WishartCoordinates,
)
from privlora.coordinates.evened import Evened
from privlora.errors import ConfigError, PrivacyError
from privlora.lab.audits.spaces import check_space
from privlora.methods import METHODS

TWO = r".*layers\.0\.(self_attn\.q_proj|mlp\.down_proj)"
Draw = Callable[[tuple[int, ...]], Tensor]


@by_space_and_state
def test_every_space_of_the_table_keeps_its_word(
    variant: tuple[str, str], state: str, tmp_path: Path
) -> None:
    check_space(make_case(variant, tmp_path, state, targets=TWO).coordinates)


class Big(Span):
    directions = 100


class Silent(Big):
    """One coefficient has no noise."""

    def standard_normal(self, draw: Draw) -> Vector:
        x = draw((100,)).clone()
        x[7] = 0
        return [(x,)]


class Shared(Big):
    """Pairs of coefficients share their noise, so that their differences have none."""

    def standard_normal(self, draw: Draw) -> Vector:
        return [(draw((50,)).repeat(2),)]


class Lengthened(Big):
    """The noise has a constant length."""

    def standard_normal(self, draw: Draw) -> Vector:
        x = draw((100,))
        return [(10 * torch.nn.functional.normalize(x, dim=0),)]


class Half(Big):
    def norms_squared(self, captured: Captured) -> Tensor:
        return super().norms_squared(captured) / 4


class Some(Big):
    """The norm leaves 20 of 100 coefficients out."""

    def norms_squared(self, captured: Captured) -> Tensor:
        return self._coefficients(captured.p)[..., :80].square().sum(-1)


class NotTheLast(Big):
    """The norm leaves the last module out."""

    def norms_squared(self, captured: Captured) -> Tensor:
        return self._coefficients([*captured.p[:-1], torch.zeros_like(captured.p[-1])]).square().sum(-1)


class Bounded(Big):
    """to_vector brings every sum to one length."""

    def to_vector(self, sums: Sums) -> Vector:
        ((v,),) = super().to_vector(sums)
        return [(v / (v.norm() + 1e-9),)]


class Peak(Big):
    """to_vector triples long sums."""

    def to_vector(self, sums: Sums) -> Vector:
        ((v,),) = super().to_vector(sums)
        return [(v * (1 + 2 * (v.norm() > 1.5)),)]


class Miscounted(Big):
    @classmethod
    def dimension_of(cls, adapter: LowRankAdapter) -> int:
        return 99


class Rounded(Span):
    """Coefficients that nearly vanish are measured in float32, in which they are rounding."""

    def norms_squared(self, captured: Captured) -> Tensor:
        pairs = zip(self.sides, captured.p, self.cores.unbind(1), strict=True)
        found = [torch.einsum("imr,ms,ksr->ik", p, u, c) for (u, _), p, c in pairs]
        return torch.stack(found).sum(dim=0).square().sum(dim=-1).double()


class Longest(OneFactorCoordinates):
    """The norm is that of the largest singular value."""

    def norms_squared(self, captured: Captured) -> Tensor:
        squares = [torch.linalg.matrix_norm(p.double(), ord=2) ** 2 for p in captured.p]
        return torch.stack(squares).sum(dim=0) * self.scale**2


class OneSide(FactorCoordinates):
    """The norm leaves Q out."""

    def norms_squared(self, captured: Captured) -> Tensor:
        return super().norms_squared(Captured(captured.p, [torch.zeros_like(q) for q in captured.q]))


class OneSideNoised(FactorCoordinates):
    def standard_normal(self, draw: Draw) -> Vector:
        return [(draw(tuple(a.shape)), torch.zeros_like(b).double()) for a, b in self.trained]


class AfterTheProjection(WishartCoordinates):
    """The norm is that of the projected gradient, and the accounting that of whole ones."""

    def norms_squared(self, captured: Captured) -> Tensor:
        return ProjectedCoordinates.norms_squared(self, captured)


def test_norms_of_what_is_summed_are_checked_and_not_of_what_is_clipped_before(tmp_path: Path) -> None:
    """Parts that encode bounds by itself would hide norms that are too small for long gradients."""
    space = make_case(("gep", "sgd"), tmp_path, "moved", targets=TWO).coordinates
    norms = space.norms_squared
    space.norms_squared = lambda captured: norms(captured).clamp(max=1.0)  # type: ignore[method-assign]
    with pytest.raises(PrivacyError, match="norms_squared is"):
        check_space(space)


def test_sums_of_units_that_were_measured_once_are_the_same(tmp_path: Path) -> None:
    for row in ("gep", "b-gep", "pe-sgd", "prism"):
        (tmp_path / row).mkdir()
        case = make_case((row, METHODS[row].optimizers[0]), tmp_path / row, targets=TWO)
        units = draw_canaries(case.adapter, 4, torch.Generator().manual_seed(0), norm=30.0).captured(
            case.adapter
        )
        weights = torch.tensor([1.0, -2.0, 0.0, 3.0])
        once, anew = (
            flat(case.coordinates.from_partial(case.coordinates.partial_sum(some, weights)))
            for some in (case.coordinates.measured(units), units)
        )
        assert float(once.norm()) > 1
        assert torch.equal(once, anew)


def adapter() -> LowRankAdapter:
    return LowRankAdapter(tiny_model(layers=1), rank=3, target_modules=TWO)


@pytest.mark.parametrize("space", [Span, Big])
def test_a_space_from_outside_keeps_its_word(space: type[Span]) -> None:
    check_space(space(LowRankAdapter(tiny_model(layers=1), rank=6), seed=0))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Silent, "standard_normal has the variance 0.000 in"),
        (Shared, "standard_normal has the variance 0.000 in"),
        (Lengthened, "standard_normal is not linear"),
        (Half, r"norms_squared is .* of full rank"),
        (Some, r"norms_squared is .* of full rank"),
        (NotTheLast, r"norms_squared is .* of full rank"),
        (Rounded, r"norms_squared is .* hardly seen"),
        (Bounded, "to_vector is not linear"),
        (Peak, "to_vector is not linear"),
        (Miscounted, "the mean square of standard_normal is 100, dimension is 99"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_space_that_breaks_its_word_is_told_which(space: type[Span], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        check_space(space(LowRankAdapter(tiny_model(layers=1), rank=6), seed=0))


def small_factors(of: LowRankAdapter) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, rows: int) -> Tensor:
        return torch.randn(count, rows, of.rank, generator=generator)

    return [(1e-5 * draw(len(g.sites), g.m), draw(len(g.sites), g.n)) for g in of.groups]


def test_norms_of_one_side_or_one_direction_are_too_small() -> None:
    for space in (Longest, OneSide):
        on = adapter()
        with pytest.raises(PrivacyError, match="norms_squared is"):
            check_space(space(on, small_factors(on), 2.0))


class EvenedByHalf(FactorCoordinates):
    """What spectral clipping measures is half of what it adds."""

    def evened(self, captured: Captured) -> Evened:
        found = super().evened(captured)
        return replace(found, norms_squared=found.norms_squared / 4)


def test_norms_after_step_one_of_spectral_clipping_are_checked_too() -> None:
    on = adapter()
    with pytest.raises(PrivacyError, match=r"evened.norms_squared is .* of full rank"):
        check_space(EvenedByHalf(on, small_factors(on), 2.0))


def test_noise_on_one_side_is_too_little_however_small_the_other_factor() -> None:
    on = adapter()
    with pytest.raises(PrivacyError, match=r"the variance 0\.000"):
        check_space(OneSideNoised(on, small_factors(on), 2.0))


def test_norms_after_a_projection_that_is_accounted_for_are_too_small() -> None:
    on = adapter()
    updates = [torch.zeros(len(g.sites), g.m, g.n) for g in on.groups]
    check_space(WishartCoordinates(on, updates))
    with pytest.raises(PrivacyError, match="norms_squared is"):
        check_space(AfterTheProjection(on, updates))


def test_what_is_too_large_to_check_is_refused() -> None:
    large = LowRankAdapter(tiny_model(), rank=8)
    with pytest.raises(ConfigError, match="check fewer modules"):
        check_space(OneFactorCoordinates(large, small_factors(large), 1.0))
