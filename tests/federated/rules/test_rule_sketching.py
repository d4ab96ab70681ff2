"""FedASK: where two sketches are exact, where a warm start helps, what becomes of clients that leave in between."""

from __future__ import annotations

import pytest
import torch
from rule_cases import (
    RANK,
    a_federation,
    a_start,
    best,
    distance,
    largest_difference,
    mean_update,
    normal,
    play,
    products,
    respond,
    settings_of,
)
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.rules import Asked, Pairs, RuleSettings, Tensors
from privlora.federated.rules.factors import FedAsk, omega


def aggregate(
    rule: FedAsk, ends: list[Tensors], number: int = 1, lost: set[int] | None = None
) -> list[Tensor]:
    """One round of given factors; ``lost`` clients leave between the stages."""
    keeping: dict[int, Tensors] = {}
    for stage in FedAsk.stages:
        sent = rule.broadcast(stage)
        for k, end in enumerate(ends):
            if stage == "sketch" and k in (lost or set()):
                continue
            asked = Asked(number, sent, keeping.get(k, {}), rule.settings)
            message, keeping[k] = FedAsk.answer(stage, asked, end if stage == "train" else {})
            rule.add(stage, message, 1.0)
        rule.close(stage)
    return products(rule.factors())


def mean_of(ends: list[Tensors]) -> Tensor:
    return torch.stack([end["0.left"] @ end["0.right"].mT for end in ends]).mean(dim=0)


def drifted(count: int, drift: float, m: int, n: int, rank: int) -> tuple[Pairs, list[Tensors]]:
    """Clients that left a common pair by ``drift`` of its size, in all directions."""
    start = [(normal(1, 1, m, rank), normal(2, 1, n, rank))]
    ends = [
        {
            f"0.{side}": factor + drift * normal(10 * k + i + 30, *factor.shape)
            for i, (side, factor) in enumerate(zip(("left", "right"), start[0], strict=True))
        }
        for k in range(count)
    ]
    return start, ends


def test_private_fedask_is_the_svd_of_the_mean_left() -> None:
    start = a_start(left=0.4)
    rule, clients = FedAsk(start, settings_of(private=True)), a_federation(weights=(1.0, 2.0, 0.5))
    play(rule, clients, [1])
    assert distance(products(rule.factors()), mean_update(clients)) <= 1e-12
    for g, (left, right) in enumerate(rule.factors()):
        u, s, vh = torch.linalg.svd(mean_update(clients)[g], full_matrices=False)
        root = s[:, None, :RANK].sqrt()
        # Signs of singular vectors are free.
        for found, wanted in ((left, u[..., :RANK] * root), (right, vh[:, :RANK].mT * root)):
            overlap = (found * wanted).sum(dim=1, keepdim=True).sign()
            assert float((found * overlap - wanted).abs().max()) <= 1e-10


def test_private_sketches_are_of_the_frozen_right() -> None:
    """Whatever a client's end says of right, which it did not train."""
    rule = FedAsk(a_start(left=0.4), settings_of(private=True))
    sent = rule.broadcast("train")
    end = {name: normal(9, *t.shape) for name, t in sent.items()}
    asked = Asked(1, sent, {}, rule.settings)
    message, kept = FedAsk.answer("train", asked, end)
    only_left = {name: t for name, t in end.items() if name.endswith("left")}
    again, also_kept = FedAsk.answer("train", asked, only_left)
    assert largest_difference(message, again) == largest_difference(kept, also_kept) == 0
    assert torch.equal(kept["0.right"], sent["0.right"])


@pytest.mark.parametrize("warm", [True, False])
def test_sketches_are_exact_from_the_rank_of_the_mean_on(warm: bool) -> None:
    """Rank 4 * 2 = 8 of the mean: exact at s = 8, and off by more than 1e-3 at s = 7."""
    _, ends = drifted(4, 1.0, 24, 20, 2)
    whole = mean_of(ends)
    errors = {}
    for width in (7, 8, 9):
        settings = settings_of(rank=2, oversampling=width - 2, private=False, warm=warm)
        rule = FedAsk([(normal(1, 1, 24, 2), normal(2, 1, 20, 2))], settings)
        asked = Asked(1, rule.broadcast("train"), {}, settings)
        kept = [FedAsk.answer("train", asked, end) for end in ends]
        for message, _ in kept:
            rule.add("train", message, 1.0)
        rule.close("train")
        sent = rule.broadcast("sketch")
        sketches = [FedAsk.answer("sketch", Asked(1, sent, own, settings), {})[0]["0.P"] for _, own in kept]
        joint = sent["0.Q"] @ torch.stack(sketches).mean(dim=0).mT
        for sketch in sketches:
            rule.add("sketch", {"0.P": sketch}, 1.0)
        rule.close("sketch")
        errors[width] = distance([joint], [whole]), distance(products(rule.factors()), [best(whole, 2)])
    assert min(errors[7]) > 1e-3
    assert max(*errors[8], *errors[9]) <= 1e-10


@pytest.mark.parametrize(("count", "drift"), [(5, 1.0), (20, 0.3), (5, 0.1)])
def test_a_warm_start_is_within_a_hundredth_of_the_best(count: int, drift: float) -> None:
    m, n, rank = 192, 160, 8
    start, ends = drifted(count, drift, m, n, rank)
    whole = mean_of(ends)
    errors = {}
    for warm in (True, False):
        rule = FedAsk(start, settings_of(rank=rank, private=False, warm=warm))
        errors[warm] = distance(aggregate(rule, ends), [whole])
    optimum = distance([best(whole, rank)], [whole])
    assert errors[True] <= 1.01 * optimum
    assert errors[False] > 1.3 * optimum


def test_clients_that_leave_between_the_stages() -> None:
    """Wide enough sketches give the survivors' mean; narrower ones are wrong by more, not by nothing."""
    start, ends = drifted(5, 1.0, 40, 36, 2)
    survivors = [ends[k] for k in (0, 2, 4)]
    whole = mean_of(survivors)
    errors = []
    for oversampling in (8, 0):
        settings = settings_of(rank=2, oversampling=oversampling, private=False, warm=False)
        found = aggregate(FedAsk(start, settings), ends, lost={1, 3})
        errors.append(distance(found, [best(whole, 2)]))
    assert errors[0] <= 1e-10
    assert errors[1] > 1e-3


def test_no_sketch_at_all_leaves_the_state() -> None:
    start, ends = drifted(3, 1.0, 12, 10, 2)
    rule = FedAsk(start, settings_of(rank=2, private=False))
    before = rule.state_dict()
    aggregate(rule, ends, lost={0, 1, 2})
    assert largest_difference(rule.state_dict(), before) == 0
    # The basis of a round is not answered in another.
    assert rule.broadcast("sketch") == {}
    with pytest.raises(RunError, match="before the first stage"):
        rule.add("sketch", {"0.P": torch.zeros(1, 10, 2)}, 1.0)


def test_a_client_refuses_a_basis_of_the_servers_choice() -> None:
    rule, client = FedAsk(a_start(), settings_of()), a_federation(1)[0]
    respond(rule, client, "train", 1, rule.broadcast("train"))
    for wrong in (0.0, 1.1, float("nan")):
        sent = {
            f"{g}.Q": wrong * torch.eye(m, RANK).expand(L, m, RANK)
            for g, (L, m) in enumerate([(2, 12), (1, 9)])
        }
        with pytest.raises(RunError, match="not orthonormal"):
            FedAsk.answer("sketch", Asked(1, sent, client.kept, rule.settings), {})


def test_a_client_that_missed_the_first_stage_says_so() -> None:
    with pytest.raises(RunError, match="no factors to sketch"):
        FedAsk.answer("sketch", Asked(1, {}, {}, settings_of()), {})


def test_omega_is_public_orthonormal_and_fresh() -> None:
    right = normal(4, 2, 10, 3)
    settings = settings_of(oversampling=2)

    def drawn(number: int = 1, g: int = 0, **changes: int | bool) -> Tensor:
        return omega(settings_of(**({"oversampling": 2} | changes)), number, g, right, 12)

    first = drawn()
    assert first.dtype == torch.float64
    assert first.shape == (2, 10, 5)
    assert float((first.mT @ first - torch.eye(5)).abs().max()) <= 1e-12
    assert torch.equal(first, omega(settings, 1, 0, right, 12))
    for other in (drawn(number=2), drawn(g=1), drawn(seed=12)):
        assert float((first - other).abs().max()) > 0.1
    # Warm: the last right is spanned; cold: it is not looked at.
    assert float((right - first @ (first.mT @ right)).norm()) <= 1e-12
    cold = drawn(warm=False)
    assert torch.equal(cold, omega(settings_of(oversampling=2, warm=False), 1, 0, 2 * right.flip(1), 12))
    assert float((right - cold @ (cold.mT @ right)).norm()) > 0.1


def test_sketches_are_no_wider_than_the_weights() -> None:
    settings: RuleSettings = settings_of(oversampling=50, private=False)
    rule, clients = FedAsk(a_start(), settings), a_federation()
    assert FedAsk.shapes("train", 1, [(2, 12, 10), (1, 9, 13)], settings)[1] == {
        "0.Y": (2, 12, 10),
        "1.Y": (1, 9, 9),
    }
    play(rule, clients, [1])
    assert distance(products(rule.factors()), [best(mean) for mean in mean_update(clients)]) <= 1e-10


def test_a_mean_of_zero_can_still_be_left() -> None:
    """Two zero factors would have no gradient ever after."""
    start = a_start()
    for private in (True, False):
        rule = FedAsk(start, settings_of(private=private))
        ends = {
            f"{g}.{side}": factor
            for g, pair in enumerate(start)
            for side, factor in zip(("left", "right"), pair, strict=True)
        }
        aggregate(rule, [ends, ends])
        for (left, right), (_, first) in zip(rule.factors(), start, strict=True):
            assert not left.any()
            assert torch.equal(right, first)
