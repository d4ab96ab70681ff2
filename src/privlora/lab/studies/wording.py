"""Sentences and cells that the Markdown table and the page share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from privlora.lab.studies.summary import Summary
from privlora.pages.numbers import number
from privlora.rounding import rounded_up

RULE_WORDS = {
    "own-best": "each method at its own best learning rate for each task",
    "shared": "each method at one learning rate for all tasks",
}
REPEATABLE = "the noise of every run is repeatable, and the same for all methods of a (task, seed)"
STANDARDISED = (
    "A run's score is its gain over the untouched model as a share of the best private method's mean gain on that task "
    "at this ε and rank (or of the spread over seeds, where that is larger): 1 is the best method's mean, 0 no better "
    "than no training. Scores are averaged over tasks; the place is the mean over tasks, 1 is best. The lead is over "
    "the best other private method, and others stand behind the best; standard errors and 95 % intervals are paired "
    "over seeds within tasks (the interval by bootstrap), so they speak of other seeds on these tasks, not of other "
    "tasks."
)
EDGE = "* the rate is at an edge of the method's grid, so a better one may lie beyond."


def how_chosen(summary: Summary) -> str:
    """How learning rates were chosen, and on what is reported."""
    if not summary["selects"]:
        return (
            f"Each method has one learning rate, so nothing was chosen. Reported: {_seeds(summary['seeds'])}."
        )
    selection = summary["selection"]
    records = {
        "first half of evaluation": "the first half of the evaluation records; the second half is reported",
        "every second of evaluation": "every second evaluation record; the others are reported",
        "all of evaluation": "all evaluation records, which are also those reported",
    }[selection["records"]]
    return (
        f"Learning rates were chosen by runs with {_seeds(selection['seeds'])} on {records}, from runs with "
        f"{_seeds(summary['seeds'])}."
    )


def grids(summary: Summary) -> str:
    """Which learning rates every method could choose from."""
    common = next((m["learning_rates"] for m in summary["methods"] if not m["own_grid"]), None)
    texts = [] if common is None else [f"Learning rates: {', '.join(map(number, common))}."]
    texts += [
        f"{m['label']} has a grid of its own: {', '.join(map(number, m['learning_rates']))}."
        for m in summary["methods"]
        if m["own_grid"]
    ]
    return " ".join(texts)


def failed(summary: Summary) -> str:
    """``1 run failed``."""
    count = len(summary["failures"])
    return f"{count} run{'' if count == 1 else 's'} failed"


def title(rule: Mapping[str, Any], summary: Summary) -> str:
    """Of a rule's section."""
    text = RULE_WORDS[rule["rule"]]
    return text[0].upper() + text[1:] if summary["selects"] else "Results"


def score(cell: Mapping[str, Any]) -> str:
    """``2.882 ± 0.016`` and the rate, or why there is none."""
    if cell["mean"] is None:
        return "failed" if cell["failed"] or "failed" in cell["state"] else "…"
    deviation = cell["standard_deviation"]
    text = f"{cell['mean']:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")
    text += f" ({number(cell['learning_rate'])}{'*' if cell['at_edge'] else ''})"
    if cell["failed"]:
        text += f", {cell['failed']} of {cell['failed'] + cell['count'] + cell['missing']} runs failed"
    return text + (f", {cell['missing']} missing" if cell["missing"] else "")


def standing(line: Mapping[str, Any]) -> str:
    """``0.953 (place 1.3)``, and how far behind the best: ``0.930 (place 2.1; behind by 0.023, 4.1 SE)``."""
    lead = line["lead"]
    behind = ""
    if line["place"] > 1 and lead is not None and lead["lead"] is not None:
        errors = "" if lead["in_errors"] is None else f", {-lead['in_errors']:.1f} SE"
        behind = f"; behind by {-lead['lead']:.3f}{errors}"
    return f"{line['mean_score']:.3f} (place {line['mean_place']:.1f}{behind})"


def verdicts(rule: Mapping[str, Any]) -> list[str]:
    """For each epsilon and rank, which method is best in the mean, and how sure that is."""
    found = []
    for line in rule["overall"]:
        if line["place"] != 1:
            continue
        where = f"ε = {number(line['epsilon'])}, rank {line['rank']}"
        lead = line["lead"]
        if lead is None:
            found.append(f"{where}: {line['method']} is the only private method with all its runs.")
            continue
        text = f"{where}: {line['method']} is best in the mean, {lead['lead']:.3f} ahead of {lead['against']}"
        if lead["low"] is not None:
            text += f" [{lead['low']:.3f}, {lead['high']:.3f}]"
        if lead["in_errors"] is not None:
            text += f", {lead['in_errors']:.1f} standard errors"
        sure = (
            lead["low"] is not None
            and lead["low"] > 0
            and (lead["in_errors"] is None or lead["in_errors"] > 2)
        )
        if not sure:
            text += ": no more than a tie"
        found.append(text + ".")
    return found


def left_out(rule: Mapping[str, Any], summary: Summary) -> str | None:
    """Private methods that are missing from a mean over tasks."""
    private = [method["label"] for method in summary["methods"] if method["private"]]
    missing = []
    for rank in summary["rank"]:
        for epsilon in summary["epsilon"]:
            present = {
                line["method"]
                for line in rule["overall"]
                if (line["epsilon"], line["rank"]) == (epsilon, rank)
            }
            names = [name for name in private if name not in present]
            if names:
                missing.append(f"{', '.join(names)} at ε = {number(epsilon)}, rank {rank}")
    if not missing:
        return None
    return f"Not in the means, because runs failed or are missing: {'; '.join(missing)}."


def tuning_columns() -> list[str]:
    return ["ε of one run", "runs", "all composed", "geometric", "logarithmic", "Poisson", "smallest"]


def tuning_cells(line: Mapping[str, Any]) -> list[str]:
    """Of one line of the tuning cost; upper bounds are rounded up."""
    laws = line["repeat_and_select"]
    smallest = line["smallest"]
    return [
        rounded_up(line["one_run"], 2),
        str(line["runs"]),
        "above 500" if line["composition"] is None else rounded_up(line["composition"], 2),
        *(
            rounded_up(laws[law], 2) if law in laws else "–"
            for law in ("geometric", "logarithmic", "poisson")
        ),
        "–" if smallest is None else f"{rounded_up(smallest[1], 2)} ({smallest[0]})",
    ]


TUNING = (
    "Had the records been private, choosing the learning rate of one method on one task by looking at its runs would "
    "have cost this much. All composed: every run is charged and may be looked at (PLD). The others: the number of "
    "runs is random with this mean, each run draws its rate at random, and only the best run's adapter is shown "
    "(Papernot and Steinke 2022, Theorems 2 and 6, by RDP). The choice must use a score that is public given the "
    "adapter, as here. The report runs come on top."
)


def _seeds(seeds: list[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
