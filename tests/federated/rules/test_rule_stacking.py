"""Rules that keep all factors of a round: exact against the dense mean, also where offsets have reached full rank."""

from __future__ import annotations

import pytest
import torch
from rule_cases import (
    GROUPS,
    RANK,
    a_federation,
    a_start,
    best,
    distance,
    mean_update,
    play,
    products,
    settings_of,
)

from privlora.federated.rules import RULES, Asked
from privlora.federated.rules.factors import Flora

WEIGHTS = (1.0, 2.5, 0.5)


@pytest.mark.parametrize("left", [0.0, 0.4])
@pytest.mark.parametrize("name", ["flora", "fedex"])
def test_offsets_are_exact_round_after_round(name: str, left: float) -> None:
    rule, clients = RULES[name](a_start(left=left), settings_of()), a_federation(weights=WEIGHTS)
    start = products(a_start(left=left))
    assert distance(products(rule.factors()), start) <= 1e-12 or left == 0
    for number in range(1, 7):
        play(rule, clients, [number])
        assert distance(products(rule.factors()), mean_update(clients)) <= 1e-10
    widths = [rule.state_dict()[f"{g}.offset_left"].shape[-1] for g in range(2)]
    assert widths == [min(m, n) for _, m, n in GROUPS]


def test_fedex_moves_its_factors_as_fedavg_does() -> None:
    averaged, extended = (RULES[name](a_start(), settings_of()) for name in ("fedavg", "fedex"))
    for rule in (averaged, extended):
        play(rule, a_federation(weights=WEIGHTS), [1])
    pairs = zip(averaged.factors(), extended.factors(), strict=True)
    for (left, right), (more_left, more_right) in pairs:
        assert float((more_left[..., :RANK] - left).abs().max()) <= 1e-14
        assert float((more_right[..., :RANK] - right).abs().max()) <= 1e-14
        # A residual of rank (K - 1) r beside them.
        assert more_left.shape[-1] == RANK + 2 * RANK


def test_flexlora_is_the_best_rank_and_splits_it_evenly() -> None:
    rule, clients = RULES["flexlora"](a_start(left=0.4), settings_of()), a_federation(weights=WEIGHTS)
    for number in (1, 2, 3):
        play(rule, clients, [number])
        assert distance(products(rule.factors()), [best(mean) for mean in mean_update(clients)]) <= 1e-12
    for left, right in rule.factors():
        assert float((left.mT @ left - right.mT @ right).abs().max()) <= 1e-12


def test_flora_starts_afresh_in_every_round() -> None:
    rule, clients = RULES["flora"](a_start(), settings_of()), a_federation()
    starts = []
    for number in (1, 2):
        begin = Flora.begin(Asked(number, rule.broadcast("train"), {}, rule.settings))
        assert (begin.offset is None) == (number == 1)
        assert not begin.state["0.left"].any()
        assert begin.state["0.left"].shape == (2, 12, RANK)
        starts.append(begin.state["0.right"])
        assert 0.5 / 10**0.5 < float(starts[-1].abs().max()) <= 1 / 10**0.5
        assert min(float(starts[-1].min()), float(-starts[-1].max())) < -0.1
        play(rule, clients, [number])
    assert float((starts[0] - starts[1]).abs().max()) > 0.1
    again = Flora.begin(Asked(2, rule.broadcast("train"), {}, rule.settings))
    assert torch.equal(again.state["0.right"], starts[1])


@pytest.mark.parametrize("name", ["flora", "fedex", "flexlora"])
def test_a_rounds_answers_are_forgotten(name: str) -> None:
    """The next round's mean is that of its own answers."""
    rule, clients = RULES[name](a_start(), settings_of()), a_federation(4)
    play(rule, clients[:3], [1])
    play(rule, clients[3:], [2])
    wanted = [update if name != "flexlora" else best(update) for update in clients[3].updates]
    assert distance(products(rule.factors()), wanted) <= 1e-10
