"""Cuts into clients: whole, repeatable, of the stated law, and silent about what records hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from privlora.config.federation import FederationSettings
from privlora.data.partition import cut
from privlora.errors import DataError

SECRET = "a secret diagnosis"


def settings(clients: int, **more: Any) -> FederationSettings:
    return FederationSettings.model_validate({"clients": clients, "rounds": 1, **more})


def dirichlet(clients: int, alpha: float) -> FederationSettings:
    return settings(clients, column="label", alpha=alpha)


def records(count: int, labels: int = 4) -> list[dict[str, Any]]:
    return [{"id": i, "label": f"label-{i % labels}", "user": f"user-{i // 3}"} for i in range(count)]


def ids(part: list[Mapping[str, Any]]) -> list[int]:
    return [record["id"] for record in part]


CUTS = [settings(7), dirichlet(7, 0.5), settings(4, column="label")]


@pytest.mark.parametrize("federation", CUTS)
@pytest.mark.parametrize("user_column", [None, "user"])
def test_every_record_goes_to_one_client_and_keeps_its_order(
    federation: FederationSettings, user_column: str | None
) -> None:
    parts = cut(records(203), federation, seed=1, user_column=user_column)
    assert list(parts) == federation.names
    assert sorted(i for part in parts.values() for i in ids(part)) == list(range(203))
    assert all(part and ids(part) == sorted(ids(part)) for part in parts.values())


@pytest.mark.parametrize("federation", CUTS[:2])
def test_a_cut_is_a_function_of_its_seed(federation: FederationSettings) -> None:
    first, again, other = (cut(records(200), federation, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("federation", CUTS)
def test_no_user_is_with_two_clients(federation: FederationSettings) -> None:
    parts = cut(records(200), federation, seed=0, user_column="user")
    users = [{record["user"] for record in part} for part in parts.values()]
    assert sum(map(len, users)) == len(set().union(*users)) == 67


def test_iid_parts_are_of_equal_size_and_random() -> None:
    parts = cut(records(52), settings(5), seed=2)
    assert sorted(map(len, parts.values())) == [10, 10, 10, 11, 11]
    assert ids(parts["client-1"]) != list(range(len(parts["client-1"])))
    users = cut(records(53), settings(5), seed=2, user_column="user")
    assert sorted(len({r["user"] for r in part}) for part in users.values()) == [3, 3, 4, 4, 4]


def test_iid_gives_every_record_to_every_client_equally_often() -> None:
    draws, clients = 3000, 4
    counts = Counter(
        (name, i)
        for seed in range(draws)
        for name, part in cut(records(8), settings(clients), seed=seed).items()
        for i in ids(part)
    )
    spread = math.sqrt(draws / clients * (1 - 1 / clients))
    assert all(abs(counts[f"client-{c}", i] - draws / clients) < 6 * spread for c in (1, 4) for i in range(8))


def shares(clients: int, alpha: float, draws: int, size: int = 400, labels: int = 1) -> np.ndarray:
    """(draws, labels, clients): which share of each label's records each client has."""
    found = np.zeros((draws, labels, clients))
    for seed in range(draws):
        for k, part in enumerate(cut(records(size, labels), dirichlet(clients, alpha), seed=seed).values()):
            for record in part:
                found[seed, int(record["label"][6:]), k] += labels / size
    return found


@pytest.mark.parametrize("alpha", [1.0, 5.0])
def test_shares_of_a_label_have_the_moments_of_the_dirichlet_law(alpha: float) -> None:
    clients, draws = 3, 600
    found = shares(clients, alpha, draws)[:, 0]
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    # A share is Beta(alpha, (K - 1) alpha): of kurtosis below 3.
    assert abs(found.mean(axis=0) - 1 / clients).max() < 5.5 * math.sqrt(variance / draws)
    assert abs(found.var(axis=0) / variance - 1).max() < 5.5 * math.sqrt(3 / draws)
    covariance = np.cov(found.T)[0, 1]
    assert covariance == pytest.approx(-variance / (clients - 1), rel=0.4)


def test_labels_are_shared_out_independently_and_sizes_are_not_evened_out() -> None:
    found = shares(2, 2.0, draws=400, labels=2)[:, :, 0]
    # Rescaling by the clients' sizes would give the second label to whoever has little of the first.
    assert abs(np.corrcoef(found.T)[0, 1]) < 5.5 / math.sqrt(400)
    assert found.mean(axis=1).var() == pytest.approx(1 / 40, rel=0.4)  # half of a Beta(2, 2)'s 1 / 20


def test_a_small_alpha_gives_clients_few_labels_and_a_large_one_all() -> None:
    def labels(alpha: float) -> list[int]:
        parts = cut(records(4000, labels=10), dirichlet(5, alpha), seed=7)
        return [len({r["label"] for r in part}) for part in parts.values()]

    assert sum(labels(0.05)) < 25
    assert labels(1e4) == [10] * 5


def test_which_records_of_a_label_a_client_has_is_random() -> None:
    part = cut(records(300, labels=1), dirichlet(3, 1e4), seed=0)["client-1"]
    assert max(ids(part)) > 250


def test_no_client_stays_empty() -> None:
    for seed in range(50):
        assert all(cut(records(40), dirichlet(6, 0.3), seed=seed).values())


def test_a_hopeless_alpha_is_refused() -> None:
    with pytest.raises(DataError, match=r"alpha=0.0001 is too small.*Fix: set a larger alpha"):
        cut(records(100, labels=2), dirichlet(5, 1e-4), seed=0)


def test_columns_give_each_client_one_value_in_their_order() -> None:
    labels = ["rare"] + ["often"] * 5 + ["most"] * 7 + ["first of two"] * 3 + ["second of two"] * 3
    data = [{"label": label} for label in labels]
    parts = cut(data, settings(5, column="label"), seed=0)
    assert {name: {r["label"] for r in part} for name, part in parts.items()} == {
        "client-1": {"first of two"},
        "client-2": {"most"},
        "client-3": {"often"},
        "client-4": {"rare"},
        "client-5": {"second of two"},
    }
    assert sum(map(len, parts.values())) == len(data)
    for more in dict.fromkeys(labels):  # one record changes one client, and that one by itself
        again = cut([*data, {"label": more}], settings(5, column="label"), seed=0)
        assert [len(again[name]) - len(part) for name, part in parts.items()].count(0) == 4


@pytest.mark.parametrize("clients", [2, 3, 7])
def test_a_column_of_another_number_of_values_is_refused(clients: int) -> None:
    wrong = (
        rf"'label' has 5 different values, and there are {clients} clients.*Fix: set federation.clients to 5"
    )
    with pytest.raises(DataError, match=wrong) as caught:
        cut(records(50, labels=5), settings(clients, column="label"), seed=0)
    assert ("would be left out" in str(caught.value)) == (clients < 5)


def test_a_users_value_is_the_most_frequent_one_of_the_users_records() -> None:
    data = [{"label": label, "user": user} for user, label in ["ax", "ay", "ay", "by", "cx"]]
    parts = cut(data, settings(2, column="label"), seed=0, user_column="user")
    assert [[r["user"] for r in part] for part in parts.values()] == [["c"], ["a", "a", "a", "b"]]


@pytest.mark.parametrize(
    ("data", "federation", "message"),
    [
        (records(3), settings(5), "fewer records than the 5 clients"),
        (records(9, labels=3), settings(4, column="label"), "has 3 different values"),
        ([{"text": SECRET}] * 5, dirichlet(2, 1.0), "record 1: has no column 'label'"),
        ([{"label": [SECRET]}] * 5, dirichlet(2, 1.0), "record 1: column 'label' holds list"),
        ([{"label": None}] * 5, dirichlet(2, 1.0), "holds NoneType"),
        ([{"label": 1}, {"label": SECRET}] * 5, dirichlet(2, 1.0), "mixes strings, integers or booleans"),
    ],
)
def test_bad_records_are_refused_unseen(data: Any, federation: FederationSettings, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        cut(data, federation, seed=0)
    assert SECRET not in str(caught.value)


def test_fewer_users_than_clients_are_refused() -> None:
    with pytest.raises(DataError, match="fewer users than the 5 clients"):
        cut(records(12), settings(5), seed=0, user_column="user")
