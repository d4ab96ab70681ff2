"""Which learning rate is reported, and that what chooses is never what is reported."""

from __future__ import annotations

import math

from study_cases import invented, paper

from privlora.lab.studies.choice import Progress, report_cells
from privlora.lab.studies.results import Row
from privlora.lab.studies.settings import Cell
from privlora.lab.studies.summary import summarise

BEST = {("one", "prism"): 0.02, ("two", "prism"): 0.2, ("one", "dp-adamw"): 0.002, ("two", "dp-adamw"): 0.02}


def loss(cell: Cell) -> float:
    """Lowest at BEST; the penalty of a wrong rate is larger on task one. Report seeds would choose otherwise."""
    best = BEST.get((cell.task, cell.method), 0.02)
    scale = 1.0 if cell.task == "one" else 0.1
    off = abs(math.log10(cell.learning_rate / best))
    sign = 1.0 if cell.seed >= 100 else -1.0
    return 3.0 - scale + sign * scale * 0.3 * off


def test_own_best_follows_the_selection_seeds() -> None:
    progress = invented(paper(), loss)
    chosen = progress.chosen("own-best")
    assert {(p[0], p[1]): c.rate for p, c in chosen.items() if p[1] != "adamw"} == BEST
    edges = {place[:2]: choice.at_edge for place, choice in chosen.items()}
    assert edges["one", "prism"] is False
    assert edges["two", "prism"] is True
    assert edges["one", "dp-adamw"] is True


def test_shared_weighs_what_a_rate_loses_by_what_there_is_to_gain() -> None:
    """Task two gains a tenth of task one; its losses count ten times."""
    study = paper(selection={"seeds": [100, 101], "by": "shared"}, methods=["prism", "dp-adamw"])

    def uneven(cell: Cell) -> float:
        best = {"one": 0.02, "two": 0.2}[cell.task]
        off = abs(math.log10(cell.learning_rate / best))
        return 3.0 + 0.1 * off if cell.task == "one" else 3.9 + 0.05 * off  # gains 1 and 0.1 from 4

    progress = invented(study, uneven)
    assert {choice.rate for choice in progress.chosen("shared").values()} == {0.2}
    assert {cell.learning_rate for cell in report_cells(study, progress)} == {0.2}


def test_both_rules_come_from_the_same_runs_when_the_grid_was_run() -> None:
    study = paper(selection={"seeds": [100, 101], "by": "both"})
    found = summarise(invented(study, loss), name="x")
    assert [rule["rule"] for rule in found["rules"]] == ["own-best", "shared"]
    assert all(cell["state"] == "complete" for rule in found["rules"] for cell in rule["cells"])
    only_chosen = invented(paper(), loss)
    assert len(only_chosen.rows) == 2 * 3 * 3 * 2 + 2 * 3 * 2


def test_what_chooses_is_never_reported() -> None:
    """Changing every selection score changes no reported value, but only which rate is reported."""
    study = paper(selection={"seeds": [100, 101], "by": "both"})
    found = summarise(invented(study, loss), name="x")
    for rule in found["rules"]:
        for cell in rule["cells"]:
            assert set(cell["values"]) == {0, 1}
            place = (cell["task"], cell["method"], cell["epsilon"] or 0.0, cell["rank"])
            expected = {seed: loss(Cell(*place, cell["learning_rate"], seed)) for seed in (0, 1)}
            assert cell["values"] == expected


def test_a_report_row_cannot_pose_as_a_selection_row() -> None:
    study = paper()
    cell = Cell("one", "prism", 3.0, 2, 0.02, 0)
    posing = Row(cell, "selection", study.fingerprint(cell, "selection"), None, {"loss": 1.0}, {}, {})
    progress = Progress(study, [posing])
    assert not progress.rows
    assert progress.outdated == 1


def test_a_rate_that_failed_is_not_chosen() -> None:
    progress = invented(
        paper(), loss, fails=lambda c: c.seed == 101 and c.learning_rate == BEST.get((c.task, c.method))
    )
    rates = {place[:2]: choice.rate for place, choice in progress.chosen("own-best").items()}
    assert all(rates[place] not in (None, best) for place, best in BEST.items())


def test_a_method_that_failed_at_every_rate() -> None:
    progress = invented(paper(), loss, fails=lambda cell: cell.method == "prism" and cell.task == "two")
    choice = progress.chosen("own-best")["two", "prism", 3.0, 2]
    assert choice.rate is None
    found = summarise(progress, name="x")
    cell = next(c for c in found["rules"][0]["cells"] if (c["task"], c["method"]) == ("two", "prism"))
    assert cell["state"] == "failed at every rate"
    assert [line["method"] for line in found["rules"][0]["overall"]] == ["dp-adamw"]
    assert found["runs"]["failed"] == 6
    assert progress.chosen("shared")["one", "prism", 3.0, 2].rate is None


def test_a_method_with_a_failed_report_run_is_not_in_the_means() -> None:
    progress = invented(paper(), loss, fails=lambda cell: cell.method == "prism" and cell.seed == 1)
    found = summarise(progress, name="x")
    cell = next(c for c in found["rules"][0]["cells"] if c["method"] == "prism")
    assert (cell["count"], cell["failed"], cell["missing"]) == (1, 1, 0)
    assert [line["method"] for line in found["rules"][0]["overall"]] == ["dp-adamw"]


def test_nothing_is_chosen_before_all_selection_runs_are_over() -> None:
    study = paper()
    rows = list(invented(study, loss).rows.values())
    gone = next(
        row
        for row in rows
        if row.role == "selection" and row.cell.method == "prism" and row.cell.task == "one"
    )
    progress = Progress(study, [row for row in rows if row is not gone])
    assert ("one", "prism", 3.0, 2) not in progress.chosen("own-best")
    assert ("two", "prism", 3.0, 2) in progress.chosen("own-best")
    assert ("two", "prism", 3.0, 2) not in progress.chosen("shared")


def test_the_task_metric_is_the_default_where_a_task_is_named() -> None:
    study = paper(tasks={"one": None, "two": {"data.task": "sst2"}})
    progress = Progress(study, [])
    assert (progress.metric("one"), progress.metric("two")) == ("loss", "task")
