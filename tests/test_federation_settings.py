"""What is said of settings of federations that are wrong: which one, why, and how to mend it."""

from __future__ import annotations

import ast
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from privlora.config import (
    PrivacySettings,
    Settings,
    load_settings,
    settings_from,
)
from privlora.config.federation import JOINT, RULE_NAMES, FederationSettings
from privlora.config.one_place import misplaced, of_mapping
from privlora.errors import ConfigError, DataError, named
from privlora.federated.plans import participants
from privlora.federated.rules import RULES

ROOT = Path(__file__).parent.parent
SECRET = "the code is 481502"
Groups = dict[str, Any]


def settings(**groups: Groups | None) -> dict[str, Groups]:
    """Of three clients; ``groups`` are laid over it, None removes."""
    found: dict[str, Groups] = {
        "model": {"name": "model"},
        "data": {"path": "records.jsonl"},
        "privacy": {
            "target_epsilon": 3,
            "delta": 1e-5,
            "expected_batch_size": 12,
            "public_dataset_size": 1000,
        },
        "federation": {"clients": 3, "rounds": 2, "rule": "tan"},
    }
    for group, values in groups.items():
        merged = {} if values is None else {**found.get(group, {}), **values}
        found[group] = {name: value for name, value in merged.items() if value is not None}
    return {group: values for group, values in found.items() if values}


def of(**values: Any) -> dict[str, Groups]:
    return settings(federation=values)


@pytest.mark.parametrize("rule", ["joint", None])
def test_a_metric_goes_with_the_rule_that_nobody_has_to_name(rule: str | None) -> None:
    found = settings_from({**of(rule=rule), "method": {"name": "prism", "metric_power": 1}})
    assert found.federation is not None
    assert found.federation.joint
    made = {"method": {"metric_power": 1}, "federation": found.federation}
    assert not misplaced(of_mapping(made))
    with pytest.raises(ConfigError, match=r"metric_power goes with federation\.rule=joint alone"):
        settings_from({**of(rule="tan"), "method": {"name": "prism", "metric_power": 1}})


def own(*clients: Any) -> dict[str, Groups]:
    """Clients with records of their own."""
    return settings(data=None, federation={"clients": list(clients)})


def owners(*names: Any) -> dict[str, Groups]:
    return own(*({"name": name, "path": f"{at}.jsonl"} for at, name in enumerate(names)))


CASES: dict[str, tuple[dict[str, Groups], list[str]]] = {
    "proximal of another rule": (
        of(proximal=0.1),
        ["proximal belongs to rule=fedprox, and rule=tan would ignore it", "Fix: remove it, or set rule"],
    ),
    "proximal as it is by default": (of(proximal=0.01), ["belongs to rule=fedprox"]),
    "oversampling of another rule": (of(oversampling=4), ["oversampling belongs to rule=fedask"]),
    "warm_sketch of another rule": (of(warm_sketch=True), ["warm_sketch belongs to rule=fedask"]),
    "an unknown rule and survivors": (of(rule="fedaks", survivors=2), ["unknown rule", "'fedask'?"]),
    "epochs": (
        of(local_epochs=2),
        ["federation.local_steps", "optimizer steps"],
    ),
    "a share of clients": (of(fraction_fit=0.5), ["federation.clients_per_round", "not a share"]),
    "a mapping of clients": (
        settings(data=None, federation={"clients": {"north": "books.jsonl"}}),
        ["federation.clients: it is a mapping", "“- {name: north, path: north.jsonl}”"],
    ),
    "another name of a client's name": (
        own({"id": "north", "path": "a.jsonl"}, {"name": "south", "path": "b.jsonl"}),
        ["unknown setting 'federation.clients[0].id'", "Fix: known: name, path"],
    ),
    "no name of a client": (
        own({"path": "a.jsonl"}, {"name": "south", "path": "b.jsonl"}),
        ["federation.clients[0].name is missing"],
    ),
    "neither clients nor rounds": (
        of(clients=None, rounds=None),
        [
            "federation.clients is missing. Fix: add clients: 3",
            "federation.rounds is missing. Fix: add rounds: 20",
        ],
    ),
    "neither federation nor path": (
        settings(data={"path": None, "text": "note"}, federation=None, privacy={"steps": 3}),
        ["data.path is missing", "path: records.jsonl", "the group federation"],
    ),
    "neither federation nor data": (
        settings(data=None, federation=None, privacy={"steps": 3}),
        ["data is missing", "path: records.jsonl", "the group federation"],
    ),
    "too many a round": (
        of(clients=5, clients_per_round=7),
        ["clients_per_round=7 exceeds the 5 clients", "Fix: at most 5"],
    ),
    "too few weights": (of(weights=[1, 2]), ["Fix: write 3 numbers above 0 in the order of clients"]),
    "a weight of nothing": (of(weights=[1, 0, 2]), ["3 positive numbers"]),
    "weights by name": (
        of(weights={"north": 1}),
        ["federation.weights", "valid list"],
    ),
    "a weight in words": (
        of(weights=[1, "two", 3]),
        ["federation.weights[1]=(text, not shown", "valid number"],
    ),
    "no epsilon": (settings(privacy={"target_epsilon": 0}), ["target_epsilon=0", "greater than 0"]),
    "rounds backwards": (of(rounds=-1), ["federation.rounds=-1", "Fix: as rounds: 20"]),
    "half a round": (of(rounds=2.5), ["federation.rounds=2.5", "Fix: as rounds: 20"]),
    "no truth": (of(trusted_server="maybe"), ["trusted_server=(text, not shown", "valid boolean"]),
    "private and not": (
        settings(privacy={"private": False}),
        ["private=false contradicts target_epsilon", "Fix: remove one of them"],
    ),
    "users as a privacy model": (
        of(privacy_model="user"),
        ["privacy_model='user'", "Fix: set privacy.unit: user"],
    ),
    "a misspelt privacy model": (of(privacy_model="clent"), ["Fix: did you mean 'client'?"]),
    "users without a column": (
        settings(privacy={"unit": "user"}),
        ["unit=user and user_column go together", "Fix: add user_column"],
    ),
    "a column without users": (settings(privacy={"user_column": "patient"}), ["Fix: add unit: user"]),
    "a cap": (
        settings(privacy={"max_batch_size": 10}),
        ["privacy.max_batch_size does not go with a federation", "number of records", "Fix: remove it"],
    ),
    "tokens that are to be chosen": (
        settings(run={"tokens_per_micro_batch": "auto"}),
        [
            "tokens_per_micro_batch=auto does not go with a federation",
            "unlike machines",
            "Fix: give one, such as 4096",
        ],
    ),
    "a quantile": (
        settings(privacy={"clip_quantile": 0.5}),
        ["privacy.clip_quantile does not go with a federation", "Fix: remove it"],
    ),
    "a number for a name": (owners(1, "b"), ["federation.clients[0].name=1", "valid string"]),
    "letters of other alphabets": (owners("Köln", "b"), ["'Köln'", "letters a to z and A to Z"]),
    "names that some disks take for one": (
        owners("north", "North"),
        ["perhaps but for capital letters", "Fix: rename one"],
    ),
    "neither clients nor data": (
        settings(data=None, federation={"clients": None}),
        ["federation.clients is missing", "Fix: add clients: 3"],
    ),
    "no privacy": (
        settings(privacy=None),
        ["Fix: add privacy: {target_epsilon: 3, delta: 1e-5, steps: 200, expected"],
    ),
    "alpha without a split": (
        of(alpha=0.5),
        ["split=dirichlet takes alpha", "or add split: dirichlet"],
    ),
    "a column without a split": (of(column="ward"), ["split=iid cuts at random", "or add split: column"]),
    "a split without a column": (
        of(split="dirichlet", alpha=0.5),
        ["split=dirichlet cuts by a column", "Fix: name it, as column: label"],
    ),
    "dirichlet without alpha": (
        of(split="dirichlet", column="ward"),
        ["split=dirichlet takes alpha", "Fix: add alpha: 0.5"],
    ),
    "no phases": (
        {**settings(federation=None), "federation": {"clients": 3, "rule": "tan", "phases": []}},
        ["federation.phases", "at least 1 item"],
    ),
    "no number": (settings(privacy={"target_epsilon": float("nan")}), ["finite number"]),
    "a rule of nothing": (
        {**settings(), "federation": {"clients": 3, "rounds": 2, "rule": None}},
        ["federation.rule=None", "valid string"],
    ),
    "a space in a name": (owners("St Mary", "b"), ["federation.clients[0].name", "digits, - and _"]),
    "limits of the server's making": (
        {**settings(), "limits": {"max_epsilon": 1}},
        ["unknown group 'limits'", "each client's owner", "node config"],
    ),
    "more rounds than can be counted": (of(rounds=10**8), ["federation.rounds: 100000000 steps are more"]),
    "more steps than can be counted": (
        of(rounds=10**5, local_steps=100),
        ["10000000 steps are more than 1000000"],
    ),
    "a truth for a number": (of(rounds=True), ["rounds=true", "Fix: as rounds: 20"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_said(name: str) -> None:
    content, words = CASES[name]
    with pytest.raises(ConfigError) as caught:
        settings_from(content, source="clinics.yaml")
    said = str(caught.value)
    assert said.startswith("clinics.yaml: ")
    assert said.count("Fix: ") == len(caught.value.parts or (caught.value,))
    assert "1.75" not in said
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize("more", [{"max_batch_size": 20}, {"clip_quantile": 0.5}])
def test_groups_that_were_checked_before(more: dict[str, float]) -> None:
    content = settings()
    privacy = PrivacySettings(**content["privacy"], steps=2, **more)
    with pytest.raises(ValueError, match="does not go with a federation"):
        Settings(
            model=content["model"],
            data=content["data"],
            privacy=privacy,
            federation=FederationSettings(**content["federation"]),
        )


def test_records_are_not_quoted() -> None:
    for clients in (
        {"text": SECRET},
        [SECRET],
        [{"name": SECRET}],
        [{SECRET: "a"}],
        [{"name": "a", SECRET: 1}],
    ):
        with pytest.raises(ConfigError) as caught:
            settings_from(settings(data=None, federation={"clients": clients}))
        assert "481502" not in str(caught.value)
    assert named(object()) == "(an object, not shown: it may be private)"
    assert named({}) == "(a dict, not shown: it may be private)"


def test_the_names_of_rules_are_those_of_the_table() -> None:
    assert list(RULE_NAMES) == [*RULES, JOINT]
    assert [rule.name for rule in RULES.values()] == list(RULES)


@pytest.mark.parametrize("rule", ["tan", "fedprox", "fedask"])
def test_what_is_written_is_read_back(rule: str, tmp_path: Path) -> None:
    more = {"fedprox": {"proximal": 0.5}, "fedask": {"oversampling": 2}}.get(rule, {})
    given = settings_from(of(rule=rule, **more))
    (tmp_path / "run.yaml").write_text(given.to_yaml())
    assert load_settings(tmp_path / "run.yaml") == given


def test_every_refusal_says_how_to_mend_it() -> None:
    """What stands in the source: an error without "Fix" is one that a user has to guess at."""
    source = ROOT / "src" / "privlora"
    without = []
    told = (
        "ValueError(what)",
        "ConfigError(f'{prefix}: {message}')",
        "ValueError(in_words(found))",
    )  # whose words were looked at where they stand
    for path in [*source.glob("config/*.py"), *source.glob("data/*.py"), source / "training" / "inputs.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kinds = ("ValueError", "ConfigError", "DataError", "PrivacyError")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                words = ast.unparse(node)
                if "fix=" not in words and "Fix: " not in words and words not in told:
                    without.append(f"{path.relative_to(source)}:{node.lineno}: {words}")
    assert without == []


def test_an_error_of_one_client() -> None:
    error = DataError("there are no records", why="none", fix="give at least one").of("client north")
    assert str(error) == "client north: there are no records. None. Fix: give at least one"


@pytest.mark.parametrize("clients", [2, 3, 5, 7])
def test_no_client_is_in_more_rounds_than_its_plan_counts(clients: int) -> None:
    """Its ledger would refuse the last one, for which all others were charged."""
    for per_round in range(1, clients + 1):
        for rounds in (1, 2, 3, 4, 7, 10):
            chosen = FederationSettings(
                clients=clients, clients_per_round=per_round, rounds=rounds, rule="fedavg"
            )
            counts = Counter(chain.from_iterable(participants(chosen.names, per_round, rounds, seed=3)))
            assert chosen.participations == max(counts.values())
            assert chosen.steps_of_a_client == [max(counts.values())]
