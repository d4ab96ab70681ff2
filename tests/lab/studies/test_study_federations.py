"""Studies of federations: rules at equal privacy, and runs in one place next to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from study_cases import content, on_disk

from privlora.accounting import read_ledger
from privlora.errors import ConfigError
from privlora.lab.studies import running
from privlora.lab.studies.results import Row, read_results
from privlora.lab.studies.settings import Cell, Study, study_from
from privlora.lab.studies.study import StudyReport, run_study
from privlora.training.loop import Interrupted

FEDERATION = {"clients": 3, "rounds": 2, "local_steps": 2}
CENTRAL = {"name": "dp-adamw", "federation": None}
RULES: list[Any] = [
    {"federation.rule": "fedask", "federation.oversampling": 2},
    {"name": "prism", "federation.rule": "joint"},
    CENTRAL,
]


def of_federations(given: dict[str, Any], **federation: Any) -> dict[str, Any]:
    """A study without a choice of rates, whose cells are federations."""
    given = {**given, "learning_rate": [0.02], "selection": {}}
    privacy = {**given["base"]["privacy"], "expected_batch_size": 12}
    del privacy["steps"]
    federation = {name: value for name, value in {**FEDERATION, **federation}.items() if value is not None}
    given["base"] = {**given["base"], "federation": federation, "privacy": privacy}
    return given


def on_paper(methods: list[Any], tasks: Any = None, **federation: Any) -> Study:
    changed = content(methods=methods, tasks=tasks or {"iid": None}, seeds=[0])
    return study_from(of_federations(changed, **federation), "paper.yaml")


def small(folder: Path) -> dict[str, Any]:
    """Of one cell for each split."""
    for package in ("cryptography", "Crypto"):
        pytest.importorskip(package, reason="of the extra federated")
    split = {"federation": {"alpha": 0.5, "column": "patient"}}
    changed = {"tasks": {"iid": None, "uneven": split}, "methods": [{"federation.rule": "fedavg"}]}
    return of_federations(on_disk(folder, **changed, seeds=[0]))


def test_labels_and_local_methods() -> None:
    rules = [*RULES, {"name": "dp-sgd", "federation": {"rule": "fedavg"}, "privacy.private": False}]
    study = on_paper(rules)
    methods = {arm.label: settings_of(study, arm.label).method.name for arm in study.arms}
    assert methods == {
        "fedask (oversampling 2)": "ffa",
        "joint (prism)": "prism",
        "dp-adamw (in one place)": "dp-adamw",
        "fedavg (dp-sgd, non-private)": "dp-sgd",
    }
    assert study.by_label["fedask (oversampling 2)"].private
    assert study.epsilons("fedavg (dp-sgd, non-private)") == (0.0,)


def settings_of(study: Study, label: str) -> Any:
    return study.run_settings(Cell("iid", label, study.epsilons(label)[0], 2, 0.02, 0))


def test_all_take_the_same_number_of_steps() -> None:
    study = on_paper(RULES)
    joint = settings_of(study, "joint (prism)")
    assert (joint.federation.rounds, joint.federation.local_steps) == (4, 1)
    central = settings_of(study, "dp-adamw (in one place)")
    assert central.federation is None
    assert {settings_of(study, arm.label).privacy.steps for arm in study.arms} == {4}
    assert {settings_of(study, arm.label).privacy.q for arm in study.arms} == {12 / 40}


def test_methods_of_one_rule() -> None:
    study = on_paper(["dp-adamw", "dp-sgd"], rule="fedavg")
    assert [settings_of(study, arm.label).federation.rule for arm in study.arms] == ["fedavg", "fedavg"]


UNEQUAL: dict[str, tuple[Any, dict[str, Any], str]] = {
    "other rounds": ({"federation.rule": "tan", "federation.rounds": 9}, {}, "sets federation.rounds"),
    "other clients": ({"federation": {"rule": "tan", "clients": 9}}, {}, "sets federation.clients"),
    "another split": ({"federation.rule": "tan", "federation.column": "a"}, {}, "sets federation.column"),
    "another unit": (
        {"federation.rule": "tan", "federation.privacy_model": "client"},
        {},
        "sets federation.privacy_model",
    ),
    "other sums": (
        {"federation.rule": "tan", "federation.secure_aggregation": True},
        {},
        "sets federation.secure_aggregation",
    ),
    "an option of another rule": (
        {"federation.rule": "tan", "federation.oversampling": 2},
        {},
        "oversampling belongs to rule=fedask",
    ),
    "no rule": ("prism", {}, "no rule says how clients train together"),
    "no name": ({"federation": None}, {}, "name is missing"),
    "an adapter each": ({"federation.rule": "fedsa"}, {}, "an adapter for each client"),
    "a local method that does not go": (
        {"name": "prism", "federation.rule": "fedavg"},
        {},
        "cannot train by method.name=prism",
    ),
    "records next to clients": (CENTRAL, {"privacy_model": "client"}, "does not compare"),
    "records of clients in one place": (
        CENTRAL,
        {"clients": [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl"}]},
        "does not compare",
    ),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_comparisons(name: str) -> None:
    item, federation, words = UNEQUAL[name]
    with pytest.raises(ConfigError, match=words):
        on_paper([item], **federation)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> StudyReport:
    folder = tmp_path_factory.mktemp("federations")
    given = small(folder)
    given |= {"methods": RULES, "tasks": {"iid": None}}
    return run_study(study_from(given, "rules.yaml"), folder / "found")


def test_each_client_has_a_ledger_and_nothing_else_stays(found: StudyReport) -> None:
    rows = {row.cell.method: row for row in read_results(found.folder / "results.jsonl")}
    assert [row.error for row in rows.values()] == [None] * 3
    joint = rows["joint (prism)"]
    assert joint.facts["epsilon"] <= 3.0 < joint.facts["epsilon_against_a_client"]
    ledger = found.folder / joint.facts["ledger"]
    clients = [f"ledger-client-{number}.jsonl" for number in (1, 2, 3)]
    assert sorted(path.name for path in ledger.parents[1].rglob("*")) == [*clients, "ledger.jsonl", "release"]
    for name in clients:
        written = read_ledger(ledger.parent / name)
        assert (written.closed, written.charges, written.plan.dataset) == (True, 4, "iid")
        assert written.epsilon() == pytest.approx(joint.facts["epsilon"])


def test_the_tables_say_what_differs(found: StudyReport) -> None:
    text = found.table.read_text()
    assert "| joint (prism) | prism | 4 × 1 | sums | 3.000, against a client" in text
    assert "| fedask (oversampling 2) | ffa | 2 × 2 | each client's answer | 3.000 |" in text
    assert "| dp-adamw (in one place) | dp-adamw | 4 × 1 | all records | – |" in text
    assert "What differs" in found.page.read_text()
    differences = json.loads((found.folder / "summary.json").read_text())["differences"]
    assert [line["in_one_place"] for line in differences] == [False, False, True]


def test_federations_that_failed_or_stopped_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledgers of their clients are put aside; the rest of what they left is removed."""
    study, folder = study_from(small(tmp_path), "rules.yaml"), tmp_path / "found"
    stops = iter((ValueError("broke"), Interrupted(2)))

    def stop(self: Any, done: Any, rounds: int) -> None:
        if done.step == 2:
            raise next(stops)

    with monkeypatch.context() as patch:
        patch.setattr(running._EveryRound, "on_round", stop)
        with pytest.raises(KeyboardInterrupt):
            run_study(study, folder)
    assert [row.error for row in read_results(folder / "results.jsonl")] == ["ValueError: broke"]
    runs = sorted(path.parents[2] for path in folder.rglob("clients/client-1/*"))
    assert len(runs) == 2
    for run in runs:
        kept = [path for path in run.rglob("*") if path.is_file()]
        assert [path.name for path in kept] == ["ledger.jsonl"] * 3
        assert max(read_ledger(path).charges for path in kept) == 4
    done: list[Row] = []
    run_study(study, folder, retry_failed=True, on_run=lambda row, *_: done.append(row))
    assert [row.error for row in done] == [None, None]
    for run in runs:
        assert len([*run.glob("earlier-ledger-*.jsonl")]) == 3
        assert [path.name for path in run.iterdir() if path.is_dir()] == ["release"]
    run_study(study, folder, on_run=lambda row, *_: done.append(row))
    assert len(done) == 2
