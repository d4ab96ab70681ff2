"""Rules on canonical points: what is orthonormal, what a gauge changes (nothing), and what a cut keeps for later."""

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
    largest_difference,
    normal,
    play,
    products,
    settings_of,
    uncut,
)
from torch import Tensor

from privlora.errors import ModelError
from privlora.federated.rules import RULES, Asked, Pairs
from privlora.geometry.fixed_rank import point_at_zero


def skewness(basis: Tensor) -> float:
    return float((basis.mT @ basis - torch.eye(basis.shape[-1])).abs().max())


def turned(start: Pairs) -> Pairs:
    """The same products in other factors."""
    pairs = []
    for g, (left, right) in enumerate(start):
        turn = normal(70 + g, RANK, RANK) + 2 * torch.eye(RANK)
        pairs.append((left @ turn, right @ torch.linalg.inv(turn).mT))
    return pairs


@pytest.mark.parametrize("name", ["tan", "alt", "fedsvd"])
def test_the_gauge_of_the_start_is_nothing(name: str) -> None:
    start = a_start(left=0.4)
    rules = [RULES[name](pairs, settings_of()) for pairs in (start, turned(start))]
    for rule in rules:
        play(rule, a_federation(), [1, 2, 3])
    assert distance(uncut(rules[0]), uncut(rules[1])) <= 1e-10


@pytest.mark.parametrize("name", ["tan", "alt"])
def test_a_start_of_zero_keeps_right_and_draws_left_from_the_seed(name: str) -> None:
    states = [RULES[name](a_start(), settings_of(seed=seed)).broadcast("train") for seed in (1, 1, 2)]
    assert largest_difference(states[0], states[1]) == 0
    assert largest_difference(states[0], states[2]) > 0.1
    for g, (_, right) in enumerate(a_start()):
        U, S, V = (states[0][f"{g}.{part}"] for part in "USV")
        basis = torch.linalg.qr(right).Q
        assert not S.any()
        assert max(skewness(U), skewness(V), float((V - basis @ (basis.mT @ V)).abs().max())) <= 1e-12
        assert float(U.abs().max()) < 0.99  # no column of the identity


@pytest.mark.parametrize("name", ["tan", "alt"])
def test_the_subspaces_of_a_start_can_be_chosen(name: str) -> None:
    rule = RULES[name](a_start(), settings_of())
    points = [point_at_zero(normal(5, L, m, RANK), normal(6, L, n, RANK)) for L, m, n in GROUPS]
    rule.start_at(points)
    sent = rule.broadcast("train")
    wanted = {f"{g}.{part}": getattr(point, part) for g, point in enumerate(points) for part in "USV"}
    assert largest_difference(sent, wanted) == 0
    assert rule.state_dict()["0.S"].shape[-1] == (2 * RANK if name == "tan" else RANK)


@pytest.mark.parametrize("name", ["tan", "alt"])
def test_the_seed_draws_directions_that_left_lacks(name: str) -> None:
    """Left of rank 2: what it spans stays, and the third direction is no accident of the decomposition."""
    start = [
        (torch.cat([left[..., :2], 0 * left[..., :1]], dim=-1), right) for left, right in a_start(left=0.4)
    ]
    bases = [RULES[name](start, settings_of(seed=seed)).broadcast("train")["0.U"] for seed in (1, 2)]
    left = start[0][0]
    for basis in bases:
        assert skewness(basis) <= 1e-12
        assert float((left - basis @ (basis.mT @ left)).abs().max()) <= 1e-12
    shared = torch.linalg.svdvals(bases[0].mT @ bases[1])
    assert float((shared[:, :2] - 1).abs().max()) <= 1e-12
    assert float(shared[:, 2].max()) < 0.99


def test_alt_completes_a_left_that_has_become_zero() -> None:
    rule = RULES["alt"](a_start(left=0.4), settings_of())
    start = RULES["alt"].begin(Asked(1, rule.broadcast("train"), {}, rule.settings)).state
    rule.add("train", {name: -t for name, t in start.items() if name.endswith("left")}, 1.0)
    rule.close("train")
    left = RULES["alt"].begin(Asked(2, rule.broadcast("train"), {}, rule.settings)).state["0.left"]
    assert max(float(update.abs().max()) for update in uncut(rule)) <= 1e-12
    assert skewness(left) <= 1e-12
    assert float(left.abs().max()) < 0.99


@pytest.mark.parametrize("name", ["alt", "fedsvd"])
def test_the_frozen_factor_is_orthonormal_in_every_round(name: str) -> None:
    rule, clients, kind = RULES[name](a_start(), settings_of()), a_federation(), RULES[name]
    for number in (1, 2, 3, 4):
        begin = kind.begin(Asked(number, rule.broadcast("train"), {}, rule.settings))
        frozen = "right" if kind.trains(number, rule.settings) == "left" else "left"
        state = begin.state
        assert max(skewness(state[f"{g}.{frozen}"]) for g in range(2)) <= 1e-12
        found = [state[f"{g}.left"] @ state[f"{g}.right"].mT for g in range(2)]
        before = products(rule.factors())
        assert max(float((a - b).abs().max()) for a, b in zip(found, before, strict=True)) <= 1e-12
        play(rule, clients, [number])


def test_what_tan_cuts_off_counts_in_the_next_round() -> None:
    """Z is the best rank r of all that is kept; the rest stays with the server, and the next mean is added to it."""
    rule, clients = RULES["tan"](a_start(), settings_of()), a_federation()
    for number in (1, 2, 3):
        play(rule, clients, [number])
        assert distance(products(rule.factors()), [best(whole) for whole in uncut(rule)]) <= 1e-12
        assert distance(products(rule.factors()), uncut(rule)) > 1e-2
        sent = rule.broadcast("train")
        assert all(t.shape[-1] == RANK for t in sent.values())
    # A vanishing mean moves nothing, and nothing that was kept is lost.
    before = uncut(rule)
    shapes = RULES["tan"].shapes("train", 4, GROUPS, rule.settings)[1]
    rule.add("train", {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}, 1.0)
    rule.close("train")
    assert distance(uncut(rule), before) <= 1e-12


@pytest.mark.parametrize("name", ["tan", "alt", "fedsvd", "fedask", "flexlora"])
def test_a_rank_beyond_the_weights_is_refused(name: str) -> None:
    start = [(torch.zeros(1, 4, 5), torch.zeros(1, 6, 5))]
    with pytest.raises(ModelError, match="rank 5 exceeds"):
        RULES[name](start, settings_of(rank=5))


@pytest.mark.parametrize("name", ["tan", "alt", "fedsvd", "fedask", "flexlora"])
def test_the_full_rank_of_a_weight_is_a_rank(name: str) -> None:
    start = [(torch.zeros(1, 4, 4).double(), normal(3, 1, 6, 4))]
    rule, clients = RULES[name](start, settings_of(rank=4)), a_federation(2)
    for client in clients:
        client.targets = [0.2 * normal(8, 1, 4, 6)]
    play(rule, clients, [1])
    assert distance(products(rule.factors())[:1], [clients[0].updates[0]]) <= 1e-10
