"""What a study found, as one JSON-ready object: the page and the tables are functions of it.

Cells and standings are made of report runs only.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from privlora.accounting.events import StepEvent
from privlora.accounting.selection import tuning_cost
from privlora.lab.studies.choice import Choice, Progress, selection_cells
from privlora.lab.studies.settings import Cell, Place, Rule
from privlora.lab.studies.statistics import Spread, Standing, spread, standardise, standings
from privlora.pages.numbers import finite

SCHEMA_VERSION = 1

Summary = dict[str, Any]


def summarise(progress: Progress, *, name: str) -> Summary:
    """Everything that table.md and the page show; numbers that do not exist are None."""
    study = progress.study
    rules = [_rule(progress, rule) for rule in study.rules]
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "insecure_noise": study.settings.insecure_noise_seed is not None,
        "selects": study.selects,
        "selection": study.settings.selection.model_dump(),
        **study.settings.model_dump(include={"report", "seeds", "epsilon", "rank"}),
        "tasks": [_task(progress, task) for task in study.tasks],
        "methods": [{**asdict(arm), "learning_rates": list(arm.learning_rates)} for arm in study.arms],
        "differences": _differences(progress),
        "rules": rules,
        "tuning_cost": _tuning(progress),
        "failures": [
            {**asdict(row.cell), "role": row.role, "error": row.error}
            for row in sorted(progress.rows.values(), key=lambda row: row.cell)
            if row.error is not None
        ],
        "runs": _runs(progress),
    }


def _task(progress: Progress, task: str) -> dict[str, Any]:
    return {
        "name": task,
        "metric": progress.metric(task),
        "words": progress.words(task),
        "lower_is_better": progress.lower_is_better(task),
        "untouched": progress.untouched(task, "report"),
    }


def _rule(progress: Progress, rule: Rule) -> dict[str, Any]:
    chosen = progress.chosen(rule)
    cells = [_cell(progress, place, chosen.get(place)) for place in progress.study.places]
    settings = progress.study.settings
    overall = [
        line
        for rank in settings.rank
        for epsilon in settings.epsilon
        for line in _overall(progress, chosen, epsilon, rank)
    ]
    return {"rule": rule, "cells": cells, "overall": overall}


def _cell(progress: Progress, place: Place, choice: Choice | None) -> dict[str, Any]:
    task, method, epsilon, rank = place
    rate = None if choice is None else choice.rate
    state = "not chosen yet" if choice is None else "failed at every rate"
    values: dict[int, float] = {}
    failed = missing = 0
    if rate is not None:
        values, failed = progress.values(place, rate), progress.failures(place, rate)
        missing = len(progress.study.settings.seeds) - len(values) - failed
        state = "incomplete" if missing else "complete"
    found = spread(list(values.values())) if values else Spread(math.nan, math.nan, math.nan, 0)
    return {
        **{"task": task, "method": method, "epsilon": epsilon or None, "rank": rank},
        **{"learning_rate": rate, "at_edge": rate is not None and choice is not None and choice.at_edge},
        **{"values": values, "failed": failed, "missing": missing, **finite(asdict(found)), "state": state},
    }


def _overall(
    progress: Progress, chosen: dict[Place, Choice], epsilon: float, rank: int
) -> list[dict[str, Any]]:
    """Private methods with all their runs, over all tasks, best first."""
    study = progress.study
    methods = [arm.label for arm in study.arms if arm.private]
    values: dict[str, dict[str, dict[int, float]]] = {}
    for method in methods:
        of_method = {}
        for task in study.tasks:
            place = (task, method, epsilon, rank)
            choice = chosen.get(place)
            if choice is not None and choice.rate is not None:
                of_method[task] = progress.values(place, choice.rate)
        whole = len(of_method) == len(study.tasks)
        if whole and all(len(runs) == len(study.settings.seeds) for runs in of_method.values()):
            for task, runs in of_method.items():
                values.setdefault(task, {})[method] = runs
    if not values:
        return []
    scores = {}
    for task, of_task in values.items():
        before = progress.untouched(task, "report")
        assert before is not None  # there are report runs
        scores[task] = standardise(of_task, before, lower_is_better=progress.lower_is_better(task))
    at = {"epsilon": epsilon, "rank": rank}
    return [
        {**_standing(each), **at, "place": place} for place, each in enumerate(standings(scores), start=1)
    ]


def _differences(progress: Progress) -> list[dict[str, Any]]:
    """Of a study of federations: in what else than their rule methods differ. Methods of one task differ from those of
    another in what the tasks set.

    epsilons: by target, the largest that was reported and the largest against another client; of finished runs.
    """
    study, lines = progress.study, dict[tuple[Any, ...], dict[str, Any]]()
    federations = {place: study.run_settings(Cell(*place, 1.0, 0)) for place in study.places}
    if all(settings.federation is None for settings in federations.values()):
        return []
    for place, settings in federations.items():
        task, method, epsilon, _ = place
        federation = settings.federation
        local, sees, rounds = settings.method.name, "all records", (settings.privacy.steps, 1)
        if federation is not None:
            sees = "sums" if federation.secure else "each client's answer"
            if federation.trusted_server:
                sees = "each client's update"
            rounds = federation.rounds, federation.local_steps
        key = (method, local, sees, rounds)
        facts = {"method": method, "local_method": local, "in_one_place": federation is None, "sees": sees}
        line = lines.setdefault(key, {**facts, "rounds": rounds, "tasks": {}, "epsilons": {}})
        line["tasks"][task] = None
        for cell, row in progress.rows.items():
            if (cell.task, cell.method, cell.epsilon) == (task, method, epsilon) and row.facts.get("epsilon"):
                known = line["epsilons"].get(epsilon, (0.0, 0.0))
                found = row.facts["epsilon"], row.facts["epsilon_against_a_client"]
                line["epsilons"][epsilon] = tuple(map(max, known, found))
    return [{**line, "tasks": [*line["tasks"]]} for line in lines.values()]


def _standing(standing: Standing) -> dict[str, Any]:
    found: dict[str, Any] = finite(asdict(standing))
    if standing.lead is not None:
        found["lead"]["in_errors"] = finite(standing.lead.in_errors)
    return found


def _tuning(progress: Progress) -> list[dict[str, Any]]:
    """For each way of sampling and each epsilon: what choosing a rate would cost if the records were private."""
    study, found = progress.study, dict[tuple[StepEvent, int, int, float], dict[str, Any]]()
    for cell in selection_cells(study):
        row = progress.rows.get(cell)
        if row is not None and "event" in row.facts:
            runs = len(study.by_label[cell.method].learning_rates) * len(study.settings.selection.seeds)
            of = StepEvent.from_dict(row.facts["event"]), row.facts["steps"], runs, row.facts["delta"]
            found.setdefault(of, {"epsilon": cell.epsilon, "tasks": {}})["tasks"][cell.task] = None
    lines = [{**line, "tasks": [*line["tasks"]], **tuning_cost(*of).to_dict()} for of, line in found.items()]
    return sorted(lines, key=lambda line: (line["epsilon"], line["runs"], line["tasks"]))


def _runs(progress: Progress) -> dict[str, Any]:
    """How much was run, and with what."""
    rows = progress.rows.values()
    versions = {tuple(sorted(row.facts["versions"].items())) for row in rows if "versions" in row.facts}
    return {
        "finished": len(rows),
        "failed": sum(1 for row in rows if row.error is not None),
        "outdated": progress.outdated,
        "cpu_seconds": round(sum(row.facts.get("cpu_seconds", 0.0) for row in rows), 1),
        "versions": [dict(one) for one in sorted(versions)],
    }
