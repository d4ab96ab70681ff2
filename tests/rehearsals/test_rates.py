"""The choice between learning rates in trials that differ by chance, on tables of losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from privlora.rehearsals.rates import (
    MOST_TRIALS,
    _paired_lead,
    equal_rates,
    paired_error,
    settle_rate,
    steady,
)

UNTRAINED = 3.0
HELD = 40
TEXTS = torch.linspace(
    -0.5, 0.5, HELD, dtype=torch.float64
)  # how hard each held-out text is, about a mean of 0
DRAWS = (0.0, 0.06, -0.04)  # what each draw adds at every rate


def losses(loss: float, draw: int = 0) -> Tensor:
    return loss + DRAWS[draw] + TEXTS


class Table:
    """Attempts at rates 2^(k/2), whose mean losses are ``of(k, draw)``, and what was asked for."""

    def __init__(self, of: Callable[[int, int], float]) -> None:
        self.of = of
        self.asked: list[tuple[int, int]] = []

    def __call__(self, rate: float, draw: int) -> Tensor:
        power = round(2 * math.log2(rate))
        self.asked.append((power, draw))
        return losses(self.of(power, draw), draw)

    def settle(self) -> tuple[int, Mapping[float, Tensor]]:
        rate, tried = settle_rate(1.0, self, UNTRAINED)
        assert len(self.asked) == len(set(self.asked)) == sum(len(found) for found in tried.values())
        assert len(self.asked) <= MOST_TRIALS
        return round(2 * math.log2(rate)), tried


def bowl(best: float, width: float = 0.05) -> Callable[[int, int], float]:
    return lambda power, _: 2.0 + width * (power - best) ** 2


@pytest.mark.parametrize("best", range(-7, 8))
def test_the_best_rate_of_a_bowl_is_found(best: int) -> None:
    table = Table(bowl(best))
    assert table.settle()[0] == best
    assert len(table.asked) <= 10


def test_a_chance_minimum_does_not_win() -> None:
    """Above 1 the model breaks in most draws, and the first draw at 2 is the best of all by chance."""

    def of(power: int, draw: int) -> float:
        if power == 2 and draw == 0:
            return 1.9
        return bowl(-2)(power, draw) if power <= 1 else 2.8 + 0.3 * draw

    table = Table(of)
    assert table.settle()[0] == -2


def test_a_chance_minimum_beside_the_start_does_not_win() -> None:
    """The double of the start does best in the first draw, and is worse than no training in the second."""
    table = Table(lambda power, draw: (1.5, 3.2, 3.2)[draw] if power == 2 else bowl(0)(power, draw))
    assert table.settle()[0] == 0
    assert (2, 1) in table.asked


def test_smaller_rates_are_tried_where_larger_ones_are_better_than_the_start() -> None:
    """The start lies on a plateau of broken models, where the double is a little better, and the half far better."""
    table = Table(lambda power, draw: 2.6 - 0.01 * power if power >= 0 else bowl(-3)(power, draw))
    assert table.settle()[0] == -3


def test_below_a_plateau_of_broken_models_rates_are_tried_until_one_is_steady() -> None:
    """From -2 up gains are 0.5 in the first draw, most at the start, and 0.1 in the next."""

    def of(power: int, draw: int) -> float:
        if power < -2:
            return bowl(-4)(power, draw)
        return (2.5 if draw == 0 else 2.9) + 0.01 * abs(power)

    assert Table(of).settle()[0] == -4


def test_rates_whose_draws_differ_erratically_are_left_downwards() -> None:
    """The start leads the next by 0.6 in one draw and by 0.1 in the other, and is steady in both."""
    of = {(0, 0): 2.0, (0, 1): 2.35, (-2, 0): 2.6, (-2, 1): 2.45, (2, 0): 2.5, (1, 0): 2.9}
    table = Table(lambda power, draw: of[power, draw])
    assert table.settle()[0] == -2
    assert set(table.asked) == set(of)


@pytest.mark.parametrize("broken", [math.inf, math.nan, UNTRAINED, 2.7])
def test_a_rate_that_broke_in_one_draw_loses(broken: float) -> None:
    """Also where its mean is far better, and 2.7 keeps less than half of the gain of the other draw."""
    table = Table(lambda power, draw: broken if (power, draw) == (0, 1) else 1.0 + 0.5 * abs(power))
    assert table.settle()[0] == -1


def test_of_rates_that_draws_do_not_tell_apart_the_smaller_is_taken() -> None:
    """0 leads -1 in the first draw, and -1 leads it in the others, but by as much."""
    ahead = (0.02, -0.015, 0.0)
    table = Table(
        lambda power, draw: 2.0 - (ahead[draw] if power == 0 else 0) + (0.3 if power not in (0, -1) else 0)
    )
    chosen, tried = table.settle()
    assert chosen == -1
    assert [len(tried[rate]) for rate in (0.707, 1.0)] == [3, 3]  # a third draw where two do not tell


def test_a_lead_that_draws_agree_on_is_taken() -> None:
    table = Table(lambda power, draw: 2.0 if power == 0 else 2.03 + 0.01 * abs(power))
    chosen, tried = table.settle()
    assert chosen == 0
    assert [len(tried[rate]) for rate in (0.707, 1.0)] == [2, 2]


def test_records_that_teach_nothing_end_it() -> None:
    table = Table(lambda power, draw: 3.0 + 0.01 * 2.0**power)
    assert table.settle()[0] <= -8


def test_everything_astray_ends_it() -> None:
    assert Table(lambda power, draw: math.nan).settle()[0] <= -8


def test_draws_in_common_cancel() -> None:
    """Draws differ by 0.06, and rates by 0.01 in each of them."""
    first, second = (torch.stack([losses(loss, draw) for draw in range(3)]) for loss in (2.0, 2.01))
    lead, error = _paired_lead(first, second)
    assert lead == pytest.approx(0.01)
    assert error < 1e-6
    assert _paired_lead(first[:1], second)[1] == math.inf


def test_the_error_is_over_draws_and_texts() -> None:
    generator = torch.Generator().manual_seed(1)
    over_draws = torch.randn(4000, 3, 1, generator=generator, dtype=torch.float64)
    over_texts = torch.randn(4000, 1, 20, generator=generator, dtype=torch.float64)
    found = over_draws + over_texts
    true = float(found.mean((1, 2)).std())
    squares = torch.tensor([paired_error(one) ** 2 for one in found])
    assert float(squares.mean().sqrt()) == pytest.approx(true, rel=0.05)


def test_steady_means_every_draw() -> None:
    def of(*means: float) -> bool:
        return steady(torch.tensor(means).unsqueeze(1), UNTRAINED)

    assert of(2.0)
    assert of(2.0, 2.4)
    assert not of(2.0, 2.6)
    assert not of(3.0)
    assert not of(math.nan, 2.0)
    assert not of(2.0, math.inf)


def test_rates_that_draws_do_not_tell_apart_are_those_around_the_chosen_one() -> None:
    wide = torch.tensor([-0.02, 0.02]).unsqueeze(1)

    def of(loss: float, draws: int, more: float = 0.0) -> Tensor:
        return torch.stack([losses(loss + more * (1, -1)[draw], draw) for draw in range(draws)])

    tried = {
        0.5: of(2.02, 1),  # as the chosen one, but beyond one that is not
        1.0: of(2.3, 1),
        2.0: of(2.01, 2, 0.02),
        4.0: of(2.0, 2),
        8.0: of(2.025, 1),  # within one draw's difference of 0.028
        16.0: of(2.1, 1),
    }
    assert wide.std() == pytest.approx(0.0283, rel=1e-2)
    assert equal_rates(4.0, tried, UNTRAINED) == (2.0, 8.0)
    assert equal_rates(4.0, {**tried, 8.0: of(2.06, 1)}, UNTRAINED) == (2.0, 4.0)
    assert equal_rates(4.0, {**tried, 2.0: of(2.1, 2, 0.01)}, UNTRAINED) == (4.0, 4.0)
    assert equal_rates(4.0, {rate: found[:1] for rate, found in tried.items()}, UNTRAINED) is None


def test_a_rate_that_broke_is_no_equal() -> None:
    """Its spread is large enough for any lead."""
    tried = {1.0: torch.stack([losses(2.0), losses(2.0)]), 2.0: torch.stack([losses(1.9), losses(2.9)])}
    assert equal_rates(1.0, tried, UNTRAINED) == (1.0, 1.0)
