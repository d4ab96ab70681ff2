"""What is said of settings of federations that are wrong: which one, why, and how to mend it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from privlora.config import PrivacySettings, Settings, load_settings, settings_from
from privlora.config.federation import JOINT, RULE_NAMES, FederationSettings
from privlora.config.one_place import misplaced, of_mapping
from privlora.errors import ConfigError, named
from privlora.federated.plans import timetable
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


A, B = {"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl"}
CASES: list[tuple[str, dict[str, Groups]]] = [
    ("proximal belongs to rule=fedprox", of(proximal=0.01)),  # as it is by default
    ("warm_sketch belongs to rule=fedask", of(warm_sketch=True)),
    ("unknown rule", of(rule="fedaks", survivors=2)),
    ("federation.local_steps", of(local_epochs=2)),
    ("federation.clients_per_round", of(fraction_fit=0.5)),
    (
        "federation.clients: it is a mapping",
        own() | {"federation": {"clients": {"north": "a.jsonl"}, "rounds": 2}},
    ),
    ("neither a number of clients nor a list", of(clients="three")),
    ("at least 2 clients", of(clients=1)),
    ("- {name: north, path: north.jsonl}", own("a", "b")),
    ("federation.clients[0].id", own({"id": "north", "path": "a.jsonl"}, B)),
    ("federation.clients[1].pth", own(A, {"name": "b", "pth": "x"})),
    ("federation.clients[0].name is missing", own({"path": "a.jsonl"}, B)),
    ("twice", own(A, {"name": "b", "path": "./a.jsonl"})),
    ("the same name", owners("a", "a")),
    ("but for capital letters", owners("north", "North")),
    ("federation.clients[0].name=1", owners(1, "b")),
    ("letters a to z and A to Z", owners("Köln", "b")),
    ("federation.clients is missing", of(clients=None, rounds=None)),
    ("federation.rounds is missing", of(clients=None, rounds=None)),
    ("data is missing", settings(data=None, federation=None, privacy={"steps": 3})),
    ("Fix: add privacy: ", settings(privacy=None)),
    ("clients_per_round=7 exceeds the 5 clients", of(clients=5, clients_per_round=7)),
    ("secure sums", of(survivors=2)),
    ("remove privacy.steps", settings(privacy={"steps": 9})),
    ("public_dataset_size is missing", settings(privacy={"public_dataset_size": None})),
    ("3 numbers above 0", of(weights=[1, 2])),
    ("3 positive numbers", of(weights=[1, 0, 2])),
    ("federation.weights[1]=(text, not shown", of(weights=[1, "two", 3])),
    ("100000000 steps are more", of(rounds=10**8)),
    ("10000000 steps are more", of(rounds=10**5, local_steps=100)),
    ("Fix: set privacy.unit: user", of(privacy_model="user")),
    ("max_batch_size does not go with a federation", settings(privacy={"max_batch_size": 10})),
    ("clip_quantile does not go with a federation", settings(privacy={"clip_quantile": 0.5})),
    ("tokens_per_micro_batch=auto does not go", settings(run={"tokens_per_micro_batch": "auto"})),
    ("alpha draws shares of a column", of(alpha=0.5)),
    ("unknown group 'limits'", {**settings(), "limits": {"max_epsilon": 1}}),
]


@pytest.mark.parametrize(("words", "content"), CASES)
def test_what_is_said(words: str, content: dict[str, Groups]) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        settings_from(content, source="clinics.yaml")
    said = str(caught.value)
    assert said.startswith("clinics.yaml: ")
    assert said.count("Fix: ") == len(caught.value.parts or (caught.value,))


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


@pytest.mark.parametrize("clients", [2, 3, 5, 7])
def test_no_client_is_in_more_rounds_than_its_plan_counts(clients: int) -> None:
    """Its ledger would refuse the last one, for which all others were charged."""
    for per_round in range(1, clients + 1):
        for rounds in (1, 2, 3, 4, 7, 10):
            chosen = FederationSettings(
                clients=clients, clients_per_round=per_round, rounds=rounds, rule="fedavg"
            )
            counts = Counter(chain.from_iterable(timetable(tuple(chosen.names), per_round, rounds, seed=3)))
            assert chosen.participations == max(counts.values())
            assert chosen.steps_of_a_client == max(counts.values())
