"""Rules that average factors: what is sent, what is kept, and SCAFFOLD's control variates."""

from __future__ import annotations

import pytest
import torch
from rule_cases import (
    LEARNING_RATE,
    a_federation,
    a_start,
    distance,
    largest_difference,
    normal,
    play,
    respond,
    settings_of,
)

from privlora.federated.rules import RULES, Asked, Tensors
from privlora.federated.rules.factors import FedSa, Scaffold


def factors_of(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if not name.endswith("_control")}


def test_fedavg_averages_factors_with_weights() -> None:
    rule = RULES["fedavg"](a_start(), settings_of())
    start = rule.state_dict()
    ends = [{name: t + normal(k, *t.shape) for name, t in start.items()} for k in range(2)]
    for end, weight in zip(ends, (1.0, 3.0), strict=True):
        message, kept = type(rule).answer("train", Asked(1, start, {}, rule.settings), end)
        assert kept == {}
        rule.add("train", message, weight)
    rule.close("train")
    wanted = {name: (ends[0][name] + 3 * ends[1][name]) / 4 for name in start}
    assert largest_difference(rule.state_dict(), wanted) <= 1e-14


def test_fedprox_is_fedavg_with_a_pull() -> None:
    settings = settings_of(proximal=0.25)
    for name, rule in RULES.items():
        sent = rule(a_start(), settings).broadcast("train")
        assert rule.begin(Asked(1, sent, {}, settings)).pull == (0.25 if name == "fedprox" else 0)


def test_scaffold_without_controls_is_fedavg() -> None:
    """In the first round all controls are zero."""
    averaged, scaffold = (RULES[name](a_start(left=0.3), settings_of()) for name in ("fedavg", "scaffold"))
    for rule in (averaged, scaffold):
        play(rule, a_federation(weights=(1.0, 2.0, 0.5)), [1])
    assert largest_difference(factors_of(scaffold.state_dict()), averaged.state_dict()) == 0


@pytest.mark.parametrize("participation", [1.0, 0.25])
def test_scaffolds_controls_are_mean_gradients(participation: float) -> None:
    """c_k is the client's mean gradient over its steps, free of the control that was added; c moves to their mean."""
    settings = settings_of(participation=participation)
    rule = Scaffold(a_start(left=0.3), settings)
    gradients = [{name: normal(k + 1, *t.shape) for name, t in rule.state_dict().items()} for k in range(2)]
    kept: list[Tensors] = [{}, {}]
    control = {name: torch.zeros_like(t) for name, t in factors_of(rule.state_dict()).items()}
    for number in (1, 2):
        sent = rule.broadcast("train")
        for k in range(2):
            asked = Asked(number, sent, kept[k], settings)
            begin = Scaffold.begin(asked)
            assert begin.control is not None
            own = {name: kept[k].get(f"{name}_control", torch.zeros_like(t)) for name, t in control.items()}
            wanted = {name: control[name] - own[name] for name in control}
            assert largest_difference(begin.control, wanted) <= 1e-14
            end = {
                name: t - LEARNING_RATE * 3 * (number * gradients[k][name] + begin.control[name])
                for name, t in begin.state.items()
            }
            message, kept[k] = Scaffold.answer("train", asked, end, LEARNING_RATE * 3)
            found = {name: kept[k][f"{name}_control"] for name in control}
            wanted = {name: number * gradients[k][name] for name in control}
            assert largest_difference(found, wanted) <= 1e-12
            rule.add("train", message, 1.0)
        rule.close("train")
        # Each round adds one more times the mean gradient, in the share of clients that are heard.
        for name in control:
            control[name] = control[name] + participation * (gradients[0][name] + gradients[1][name]) / 2
        state = rule.state_dict()
        found = {name: state[f"{name}_control"] for name in control}
        assert largest_difference(found, control) <= 1e-12


def test_scaffolds_controls_stay_without_a_step() -> None:
    rule = Scaffold(a_start(), settings_of())
    sent = rule.broadcast("train")
    kept = {f"{name}_control": normal(5, *t.shape) for name, t in factors_of(sent).items()}
    asked = Asked(1, sent, kept, rule.settings)
    message, after = Scaffold.answer("train", asked, Scaffold.begin(asked).state)
    assert largest_difference(after, kept) == 0
    assert all(not tensor.any() for tensor in message.values())


def test_rolora_moves_one_side_a_round() -> None:
    rule, clients = RULES["rolora"](a_start(), settings_of()), a_federation()
    for number in (1, 2, 3, 4):
        before = rule.state_dict()
        play(rule, clients, [number])
        moved = {
            name.split(".")[1] for name, t in rule.state_dict().items() if not torch.equal(t, before[name])
        }
        assert moved == {"left" if number % 2 else "right"}


def test_fedsa_keeps_left_with_the_client() -> None:
    rule, clients = FedSa(a_start(), settings_of()), a_federation(2)
    for number in (1, 2):
        sent = rule.broadcast("train")
        assert sent["0.left"].shape == (2, 12, 0)
        for client in clients:
            begin = FedSa.begin(Asked(number, sent, client.kept, rule.settings))
            assert bool(begin.state["0.left"].any()) == (number == 2)
            if number == 2:
                assert torch.equal(begin.state["0.left"], client.kept["0.left"])
            message = respond(rule, client, "train", number, sent)
            assert {name.split(".")[1] for name in message} == {"right"}
            rule.add("train", message, 1.0)
        rule.close("train")
    assert not torch.equal(clients[0].kept["0.left"], clients[1].kept["0.left"])
    assert all(not left.any() and left.shape[-1] == 3 for left, _ in rule.factors())


def test_fedsa_begins_at_a_left_that_is_not_zero() -> None:
    start = a_start(left=0.3)
    rule = FedSa(start, settings_of())
    begin = FedSa.begin(Asked(1, rule.broadcast("train"), {}, rule.settings))
    assert distance([begin.state["0.left"]], [start[0][0]]) == 0
    assert distance([left for left, _ in rule.factors()], [left for left, _ in start]) == 0
