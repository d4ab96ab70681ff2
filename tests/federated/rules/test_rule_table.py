"""What every row of the table of aggregation rules promises, on small simulated federations."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from rule_cases import (
    ALL,
    GROUPS,
    RANK,
    a_federation,
    a_start,
    best,
    distance,
    largest_difference,
    mean_update,
    play,
    products,
    respond,
    settings_of,
    uncut,
)

from privlora.errors import RunError
from privlora.federated.rules import RULES, Asked, Rule, RuleSettings

WEIGHTS = (1.0, 2.5, 0.5)
CUTS = ("flexlora", "fedask")  # keep no more than the best rank r of the mean
FROZEN = ("ffa", "fedsvd", "fedask")


def a_rule(name: str, **changes: object) -> Rule:
    return RULES[name](a_start(), settings_of(**changes))


def outside(rule: Rule) -> float:
    """The share of the update's right factor outside the span of the right that the federation started with."""
    shares = []
    for (_, right), (_, first) in zip(rule.factors(), a_start(), strict=True):
        basis = torch.linalg.qr(first).Q
        shares.append(float((right - basis @ (basis.mT @ right)).norm() / right.norm()))
    return max(shares)


def test_the_table_is_complete() -> None:
    averages = {"fedavg", "fedprox", "scaffold", "ffa", "fedsa", "rolora"}
    assert averages | {"flora", "fedex", "flexlora", "fedsvd", "fedask", "tan", "alt"} == set(ALL)
    assert all(row.name == name and row.summary and row.reference for name, row in RULES.items())
    assert {name for name, row in RULES.items() if not row.linear} == {"flora", "fedex", "flexlora"}
    assert {name for name, row in RULES.items() if not row.two_sided} == set(FROZEN)
    assert {name for name, row in RULES.items() if row.memory} == {"scaffold", "fedsa"}
    inexact = {name for name, row in RULES.items() if not row.exact}
    assert inexact == {"fedavg", "fedprox", "scaffold", "fedsa"}


@pytest.mark.parametrize(("oversampling", "exact"), [(0, False), (2, False), (8, True)])
def test_sketches_are_exact_with_privacy_or_where_they_reach_the_rank(oversampling: int, exact: bool) -> None:
    """Three clients of rank 4: r + p = 12."""
    ask, given = RULES["fedask"], RuleSettings(rank=4, oversampling=oversampling, private=False)
    assert ask.is_exact(given, 3) == exact
    assert ask.is_exact(RuleSettings(rank=4, oversampling=oversampling, private=True), 3)
    assert RULES["tan"].is_exact(given, 3)
    assert not RULES["fedavg"].is_exact(given, 3)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_the_order_of_answers_is_nothing(name: str, private: bool) -> None:
    found = []
    for order in permutations(range(3)):
        rule = a_rule(name, private=private, oversampling=2)
        play(rule, a_federation(weights=WEIGHTS), [1, 2, 3], order)
        found.append([rule.factors()[g][1] for g in range(2)] if name == "fedsa" else uncut(rule))
    assert max(distance(other, found[0]) for other in found) <= 1e-12


@pytest.mark.parametrize("name", sorted(set(ALL) - {"fedsa"}))
def test_a_federation_of_one_is_that_client(name: str) -> None:
    rule, clients = a_rule(name, private=False), a_federation(1, weights=[2.5])
    for number in (1, 2, 3):
        before = uncut(rule)
        play(rule, clients, [number])
        # The tangent server adds what the client moved to all that it keeps, of which the client saw the best rank r.
        wanted = clients[0].updates
        if name == "tan":
            pairs = zip(before, wanted, strict=True)
            wanted = [best(old - best(old) + new, 2 * RANK) for old, new in pairs]
        assert distance(uncut(rule), wanted) <= 1e-12
        assert distance(uncut(rule), before) > 1e-3 or number == 1


@pytest.mark.parametrize("name", sorted(set(ALL) - {"fedsa"}))
def test_exact_rules_give_the_mean_of_the_updates(name: str) -> None:
    rule, clients = a_rule(name, private=True), a_federation(weights=WEIGHTS)
    for number in (1, 2, 3):
        kept_back = [whole - best(whole) if name == "tan" else 0 * whole for whole in uncut(rule)]
        play(rule, clients, [number])
        wanted = [mean + more for mean, more in zip(mean_update(clients), kept_back, strict=True)]
        if name in CUTS:
            wanted = [best(mean) for mean in wanted]
        if name == "tan":
            wanted = [best(mean, 2 * RANK) for mean in wanted]
        error = distance(uncut(rule), wanted)
        assert error <= 1e-12 if RULES[name].exact else error > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_rules_do_what_the_table_says_of_them(name: str) -> None:
    """Whether the row space moves in private runs, whether the rank grows, and whether clients keep something."""
    row, rule, clients = RULES[name], a_rule(name, private=True), a_federation()
    play(rule, clients, [1, 2, 3, 4])
    assert outside(rule) > 1e-2 if row.two_sided else outside(rule) <= 1e-12
    assert all(left.shape[-1] == right.shape[-1] == RANK for left, right in rule.factors()) == row.fixed_rank
    assert {bool(client.kept) for client in clients} == {row.memory}


def test_fedask_moves_both_sides_only_where_it_is_not_private() -> None:
    rule = a_rule("fedask", private=False, oversampling=2)
    play(rule, a_federation(), [1, 2])
    assert outside(rule) > 1e-2


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_messages_are_what_public_numbers_say(name: str, private: bool) -> None:
    """Contiguous, and views of nothing: a view would carry, or change with, what lies next to it."""
    rule, clients = a_rule(name, private=private, oversampling=4), a_federation(3)
    kind = RULES[name]
    for number in (1, 2, 3):
        down = up = 0
        for stage in kind.stages:
            wanted = kind.shapes(stage, number, GROUPS, rule.settings, clients=3)
            sent = rule.broadcast(stage)
            for client in clients:
                message = respond(rule, client, stage, number, sent)
                assert {key: tuple(t.shape) for key, t in message.items()} == wanted[1]
                rule.add(stage, message, 1.0)
            rule.close(stage)
            assert {key: tuple(t.shape) for key, t in sent.items()} == wanted[0]
            tensors = [
                t for part in (sent, message, clients[-1].kept, rule.state_dict()) for t in part.values()
            ]
            assert all(t.is_contiguous() and not t.requires_grad for t in tensors)
            down += sum(t.numel() for t in sent.values())
            up += sum(t.numel() for t in message.values())
        assert kind.message_sizes(GROUPS, rule.settings, number, clients=3) == (down, up)


@pytest.mark.parametrize("name", ALL)
def test_a_state_goes_on_as_if_nothing_had_been(name: str) -> None:
    rule, clients = a_rule(name, private=False), a_federation(weights=WEIGHTS)
    play(rule, clients, [1, 2])
    state = rule.state_dict()
    assert all(tensor.dtype == torch.float64 for tensor in state.values())
    again = a_rule(name, private=False)
    again.load_state_dict(state)
    kept = [client.kept for client in clients]
    play(rule, clients, [3])
    for client, memory in zip(clients, kept, strict=True):
        client.kept = memory
    play(again, clients, [3])
    assert largest_difference(again.state_dict(), rule.state_dict()) == 0


@pytest.mark.parametrize("name", ALL)
def test_a_state_that_does_not_fit_changes_nothing(name: str) -> None:
    rule, other = a_rule(name), a_rule(name)
    play(other, a_federation(), [1])
    state, before = other.state_dict(), rule.state_dict()
    lost = sorted(state)[-1]
    for wrong in ({k: t for k, t in state.items() if k != lost}, state | {lost: state[lost][:, 1:]}):
        with pytest.raises(RunError, match="the state of the rule"):
            rule.load_state_dict(wrong)
    assert largest_difference(rule.state_dict(), before) == 0


@pytest.mark.parametrize("name", ALL)
def test_a_round_without_answers_changes_nothing(name: str) -> None:
    rule, clients = a_rule(name), a_federation()
    play(rule, clients, [1])
    before, update = rule.state_dict(), uncut(rule)
    play(rule, [], [2])
    assert largest_difference(rule.state_dict(), before) == 0
    play(rule, clients, [3])
    assert distance(uncut(rule), update) > 1e-3 or name == "fedsa"  # which has no common update


@pytest.mark.parametrize("name", ALL)
def test_what_was_given_away_stays_as_it_was(name: str) -> None:
    start = a_start()
    rule, clients = RULES[name](start, settings_of(private=False)), a_federation()
    play(rule, clients, [1])
    given = rule.broadcast("train"), {str(g): pair[0] for g, pair in enumerate(rule.factors())}
    copies = [{k: t.clone() for k, t in part.items()} for part in given]
    play(rule, clients, [2, 3])
    assert all(largest_difference(a, b) == 0 for a, b in zip(given, copies, strict=True))
    for old, new in zip(start, a_start(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_a_client_may_train_in_place(name: str) -> None:
    rule, clients, kind = a_rule(name), a_federation(), RULES[name]
    play(rule, clients, [1, 2])
    sent, kept = rule.broadcast("train"), clients[0].kept
    copies = [{k: t.clone() for k, t in part.items()} for part in (sent, kept)]
    for tensor in kind.begin(Asked(3, sent, kept, rule.settings)).state.values():
        tensor.add_(1.0)
    assert all(largest_difference(a, b) == 0 for a, b in zip((sent, kept), copies, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_messages_have_the_clients_dtype_and_the_server_has_float64(name: str) -> None:
    start = a_start(dtype=torch.float32)
    rule, exact = RULES[name](start, settings_of()), RULES[name](a_start(), settings_of())
    clients = a_federation()
    for stage in RULES[name].stages:
        sent = rule.broadcast(stage)
        for client in clients:
            message = respond(rule, client, stage, 1, sent)
            assert {t.dtype for t in message.values()} == {torch.float32}
            rule.add(stage, message, 1.0)
        rule.close(stage)
        assert {t.dtype for t in sent.values()} == {torch.float32}
    assert {t.dtype for t in rule.state_dict().values()} == {torch.float64}
    if name != "fedsa":
        play(exact, a_federation(), [1])
        assert distance(products(rule.factors()), products(exact.factors())) <= 1e-4


@pytest.mark.parametrize(
    "name", [name for name in ALL if RULES[name].linear and len(RULES[name].stages) == 1]
)
def test_linear_rules_take_a_mean_for_its_parts(name: str) -> None:
    apart, together = a_rule(name), a_rule(name)
    sent = apart.broadcast("train")
    clients = a_federation(weights=WEIGHTS)
    messages = [respond(apart, client, "train", 1, sent) for client in clients]
    for message, client in zip(messages, clients, strict=True):
        apart.add("train", message, client.weight)
    total = sum(WEIGHTS)
    pairs = list(zip(messages, WEIGHTS, strict=True))
    mean = {key: sum(weight / total * message[key] for message, weight in pairs) for key in messages[0]}
    together.add("train", mean, total)
    for rule in (apart, together):
        rule.close("train")
    assert distance(uncut(together), uncut(apart)) <= 1e-12
