"""table.md: the study's tables in Markdown. The same results give the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from privlora.lab.studies import wording
from privlora.lab.studies.summary import Summary
from privlora.pages.numbers import number


def markdown(summary: Summary) -> str:
    """All tables of a study."""
    lines = [f"# {summary['name']}", ""]
    if summary["insecure_noise"]:
        lines += [f"**NOT PRIVATE: {wording.REPEATABLE}.**", ""]
    lines += [wording.how_chosen(summary), wording.grids(summary), ""]
    lines += ["A cell is the mean ± standard deviation over seeds, and the learning rate.", wording.EDGE, ""]
    if summary["failures"]:
        lines += [f"**{wording.failed(summary)}**, listed at the end and left out of all means.", ""]
    for rule in summary["rules"]:
        lines += [f"## {wording.title(rule, summary)}", ""]
        for rank in summary["rank"]:
            lines += _overall(rule, summary, rank)
            for task in summary["tasks"]:
                lines += _task(rule, summary, task, rank)
    lines += _tuning(summary)
    if summary["failures"]:
        lines += ["## Failed runs", ""]
        lines += [f"- {_cell(failure)}: {failure['error']}" for failure in summary["failures"]]
        lines.append("")
    return "\n".join(lines)


def _overall(rule: dict[str, Any], summary: Summary, rank: int) -> list[str]:
    lines = [f"### Mean over tasks, rank {rank}", ""]
    table = [line for line in rule["overall"] if line["rank"] == rank]
    if not table:
        return [*lines, "No private method has all its runs yet.", ""]
    epsilons = summary["epsilon"]
    rows = []
    for method in (method["label"] for method in summary["methods"] if method["private"]):
        cells = {line["epsilon"]: wording.standing(line) for line in table if line["method"] == method}
        rows.append([method, *(cells.get(epsilon, "–") for epsilon in epsilons)])
    lines += [*_table(["method", *(f"ε = {number(e)}" for e in epsilons)], rows), ""]
    lines += [f"- {text}" for text in wording.verdicts({"overall": table})]
    note = wording.left_out(rule, {**summary, "rank": [rank]})
    return [*lines, *([f"- {note}"] if note else []), "", wording.STANDARDISED, ""]


def _task(rule: dict[str, Any], summary: Summary, task: dict[str, Any], rank: int) -> list[str]:
    before = "" if task["untouched"] is None else f"; {task['untouched']:.3f} before training"
    better = "lower" if task["lower_is_better"] else "higher"
    lines = [f"### {task['name']}, rank {rank}", "", f"{task['words']}, {better} is better{before}", ""]
    columns: list[float | None] = [*summary["epsilon"]]
    if any(not method["private"] for method in summary["methods"]):
        columns.append(None)
    cells = {
        (cell["method"], cell["epsilon"]): wording.score(cell)
        for cell in rule["cells"]
        if cell["task"] == task["name"] and cell["rank"] == rank
    }
    rows = [
        [method["label"], *(cells.get((method["label"], epsilon), "–") for epsilon in columns)]
        for method in summary["methods"]
    ]
    heads = ["no noise" if epsilon is None else f"ε = {number(epsilon)}" for epsilon in columns]
    return [*lines, *_table(["method", *heads], rows), ""]


def _tuning(summary: Summary) -> list[str]:
    if not summary["tuning_cost"]:
        return []
    heads = ["tasks", "target ε", *wording.tuning_columns()]
    rows = [
        [", ".join(line["tasks"]), number(line["epsilon"]), *wording.tuning_cells(line)]
        for line in summary["tuning_cost"]
    ]
    return ["## What tuning would cost", "", wording.TUNING, "", *_table(heads, rows), ""]


def _cell(failure: dict[str, Any]) -> str:
    epsilon = f"ε {number(failure['epsilon'])}" if failure["epsilon"] else "no noise"
    return (
        f"{failure['task']}, {failure['method']}, {epsilon}, rank {failure['rank']}, rate "
        f"{number(failure['learning_rate'])}, seed {failure['seed']}"
    )


def _table(heads: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
