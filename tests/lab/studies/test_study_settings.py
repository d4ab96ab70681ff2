"""What a study's file may say, and the runs that follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from study_cases import content, paper

from privlora.errors import ConfigError
from privlora.lab.studies.settings import Cell, slug, study_from
from privlora.methods import METHODS


def without(key: str) -> dict[str, Any]:
    found = content()
    del found[key]
    return found


def base(**groups: Any) -> dict[str, Any]:
    found = content()
    for group, values in groups.items():
        found["base"][group] = {**found["base"].get(group, {}), **values}
    return found


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": (content(sedes=[0]), ["unknown setting sedes", "did you mean 'seeds'?"]),
    "unknown key of selection": (
        content(selection={"seed": [9]}),
        ["unknown setting seed", "did you mean 'seeds'?"],
    ),
    "unknown setting": (
        content(tasks={"one": {"data.pth": "x"}}),
        ["data.pth", "did you mean 'path'?", "'one'"],
    ),
    "unknown setting of a method": (
        content(methods=[{"name": "prism", "optimiser": "sgd"}]),
        ["method.optimiser", "did you mean 'optimizer'?"],
    ),
    "unknown group": (content(tasks={"one": {"dta": {"path": "x"}}}), ["unknown group 'dta'"]),
    "unknown method": (content(methods=["prysm"]), ["unknown method 'prysm'"]),
    "unknown optimizer": (content(methods=[{"name": "prism", "optimizer": "adam"}]), ["has no optimizer"]),
    "a setting that the method does not have": (
        content(methods=[{"name": "prism", "learning_rate_ratio": 6}]),
        ["learning_rate_ratio"],
    ),
    "no method": (content(methods=[]), ["methods"]),
    "no task": (without("tasks"), ["tasks is"]),
    "no seed": (content(seeds=[]), ["seeds"]),
    "no rate": (content(learning_rate=[]), ["learning_rate"]),
    "no epsilon": (content(epsilon=[]), ["epsilon is missing or empty"]),
    "no rank": (content(rank=[]), ["rank"]),
    "one rate, no list": (content(learning_rate=0.1), ["learning_rate", "list"]),
    "a rate twice": (content(learning_rate=[0.1, 0.1]), ["learning_rate", "a value is named twice"]),
    "a rate of nothing": (content(learning_rate=[0.0]), ["greater than 0"]),
    "a seed twice": (content(seeds=[1, 1]), ["seeds", "a value is named twice"]),
    "a seed in both": (content(selection={"seeds": [1]}), ["seed 1 is in seeds and in selection.seeds"]),
    "nothing to choose on": (content(selection={}), ["selection.seeds is missing"]),
    "unknown rule": (content(selection={"seeds": [9], "by": "best"}), ["selection.by"]),
    "epsilon in base": (base(privacy={"target_epsilon": 3}), ["privacy.target_epsilon", "use epsilon"]),
    "rank in base": (base(adapter={"r": 4}), ["adapter.r", "use rank"]),
    "both in base": (
        base(privacy={"target_epsilon": 3}, adapter={"r": 4}),
        ["privacy.target_epsilon", "adapter.r", "epsilon, rank instead"],
    ),
    "seed in base": (base(run={"seed": 4}), ["run.seed", "use seeds"]),
    "rate in a task": (content(tasks={"one": {"method.learning_rate": 1}}), ["use learning_rate"]),
    "a method in a task": (content(tasks={"one": {"method.optimizer": "sgd"}}), ["sets method.optimizer"]),
    "a method with other data": (
        content(methods=[{"name": "prism", "data.max_length": 9}]),
        ["sets data.max_length", "same data"],
    ),
    "a method with more steps": (
        content(methods=[{"name": "prism", "privacy.steps": 9}]),
        ["sets privacy.steps", "same number of steps"],
    ),
    "a method with an own rate": (
        content(methods=[{"name": "prism", "learning_rate": 0.1}]),
        ["learning_rate=0.1", "list"],
    ),
    "bands of a method that has none": (
        content(methods=["dp-sgd", {"name": "dp-zo", "privacy.bands": 2}]),
        ["study.yaml: task 'one', method 'dp-zo (privacy.bands 2)'", "privacy.bands=2 does not go with"],
    ),
    "dropout of a method that has none": (
        content(methods=["dp-sgd", {"name": "dp-zo", "adapter.lora_dropout": 0.1}]),
        ["method 'dp-zo (adapter.lora_dropout 0.1)'", "lora_dropout does not go with method 'dp-zo'"],
    ),
    "a clip norm that a study does not choose": (
        content(methods=["prism", {"name": "prism", "label": "own", "privacy.clip_norm": "auto"}]),
        ["method 'own'", "privacy.clip_norm is auto, and nothing chooses it here"],
    ),
    "a right weight that a study does not choose": (
        content(methods=["dp-sgd", {"name": "prism", "method.right_weight": "auto"}]),
        ["method.right_weight is auto, and nothing chooses it here"],
    ),
    "steps next to a federation's": (
        base(federation={"clients": 3, "rule": "tan", "rounds": 2, "local_steps": 2}),
        ["privacy.steps=3, and a client of this federation takes 4"],
    ),
    "a nameless method": (content(methods=[{"optimizer": "sgd"}]), ["methods", "name is"]),
    "equal methods": (content(methods=["prism", "prism"]), ["share a name", "label"]),
    "names of one folder": (content(tasks={"a b": None, "a-b": None}), ["share a name"]),
    "no held-out records": (base(data={"evaluation": None}), ["has no data.evaluation"]),
    "no delta": (base(privacy={"delta": None}), ["delta is missing"]),
    "a task that is no mapping": (content(tasks={"one": ["x"]}), ["must be a mapping"]),
    "a setting without a group": (content(tasks={"one": {"path": "x"}}), ["'path' is not a group"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str) -> None:
    given, words = BAD[name]
    with pytest.raises(ConfigError) as caught:
        study_from(given, "study.yaml")
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_file_in_the_place_of_base() -> None:
    with pytest.raises(ConfigError, match=r"base=.*valid dictionary"):
        study_from({**content(), "base": "chats.yaml"}, "study.yaml")


def test_settings_of_a_run() -> None:
    study = paper(
        methods=[{"name": "prism", "optimizer": "sgd", "adapter.init": "random", "privacy.clip_norm": 0.5}],
        tasks={"one": {"data": {"max_length": 20}, "privacy.steps": 5}},
    )
    label = "prism (optimizer sgd, adapter.init random, privacy.clip_norm 0.5)"
    assert [arm.label for arm in study.arms] == [label]
    found = study.run_settings(Cell("one", label, 3.0, 2, 0.02, 7))
    assert (found.data.max_length, found.privacy.steps, found.privacy.clip_norm) == (20, 5, 0.5)
    assert (found.method.optimizer, found.method.learning_rate, found.adapter.init) == ("sgd", 0.02, "random")
    assert (found.privacy.target_epsilon, found.adapter.r, found.run.seed, found.run.label) == (
        3.0,
        2,
        7,
        "one",
    )
    assert found.privacy.insecure_noise_seed is None


def test_the_grid() -> None:
    study = paper(
        methods=["prism", {"name": "dp-adamw", "learning_rate": [1.0, 0.5]}, "adamw"], epsilon=[3, 1]
    )
    cells = list(study.grid([100]))
    assert len(cells) == len(set(cells)) == 2 * (2 * 3 + 2 * 2 + 3)
    assert {cell.learning_rate for cell in cells if cell.method == "dp-adamw"} == {0.5, 1.0}
    assert {cell.epsilon for cell in cells if cell.method == "adamw"} == {0.0}
    assert [task for i, task in enumerate(c.task for c in cells) if i == 0 or cells[i - 1].task != task] == [
        "one",
        "two",
    ]


def test_a_method_without_noise() -> None:
    study = paper(methods=["prism", {"name": "prism", "privacy.private": False}, "adamw"])
    assert [(c.label, c.private) for c in study.arms] == [
        ("prism", True),
        ("prism (non-private)", False),
        ("adamw", False),
    ]
    for label in ("prism (non-private)", "adamw"):
        assert not study.run_settings(Cell("one", label, 0.0, 2, 0.02, 0)).privacy.private


def test_one_rate_needs_no_selection() -> None:
    study = paper(learning_rate=[0.02], selection={})
    assert not study.selects


def test_paired_noise_depends_on_task_and_seed_only() -> None:
    study = paper(insecure_noise_seed="paired")

    def key(task: str, method: str, rate: float, seed: int) -> int | None:
        epsilon = study.epsilons(method)[0]
        return study.run_settings(Cell(task, method, epsilon, 2, rate, seed)).privacy.insecure_noise_seed

    assert key("one", "prism", 0.02, 0) == key("one", "dp-adamw", 0.2, 0) == key("one", "adamw", 0.2, 0)
    assert len({key(task, "prism", 0.02, seed) for task in ("one", "two") for seed in (0, 1)}) == 4


def test_a_fingerprint_tells_runs_apart() -> None:
    study = paper()
    cell = Cell("one", "prism", 3.0, 2, 0.02, 0)
    prints = {
        study.fingerprint(cell, "report"),
        study.fingerprint(cell, "selection"),
        study.fingerprint(Cell("one", "prism", 3.0, 2, 0.2, 0), "report"),
        study.fingerprint(Cell("one", "prism", 3.0, 2, 0.02, 1), "report"),
        study.fingerprint(Cell("two", "prism", 3.0, 2, 0.02, 0), "report"),
        paper(learning_rate=[0.02], selection={}).fingerprint(cell, "report"),
        study_from(base(privacy={"steps": 4})).fingerprint(cell, "report"),
    }
    assert len(prints) == 7
    extended = paper(seeds=[0, 1, 2], epsilon=[1, 3], methods=["prism", "dp-sgd"], learning_rate=[0.02, 0.3])
    assert extended.fingerprint(cell, "report") == study.fingerprint(cell, "report")


def test_runs_with_a_rows_old_defaults_are_not_those_with_the_new(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("one", name, 3.0, 2, 0.02, 0) for name in ("prism", "dp-adamw")]
    before = [paper().fingerprint(cell, "report") for cell in cells]
    monkeypatch.setitem(METHODS, "prism", replace(METHODS["prism"], revision=99))
    after = [paper().fingerprint(cell, "report") for cell in cells]
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_fingerprint_knows_the_unit_of_the_rate_only_where_it_is_another_than_that_of_old_runs() -> None:
    cell = Cell("one", "in", 3.0, 2, 0.02, 0)

    def found(name: str, **given: Any) -> str:
        return paper(methods=[{"name": name, "label": "in", **given}]).fingerprint(cell, "report")

    plain = found("dp-adamw")
    assert plain == found("dp-adamw", relative_rate=False) != found("dp-adamw", relative_rate=True)
    # Of a version before there was the setting.
    assert found("dp-sgd", relative_rate=False) == "6ee2d2577f317280"


def test_slugs() -> None:
    assert slug("prism (optimizer scalar)") == "prism-optimizer-scalar"
    assert slug("lora+") == "lora+"
    assert slug("../..") == "unnamed"
