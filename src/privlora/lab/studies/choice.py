"""Which runs a study needs, and which learning rate each method is reported at.

A rate is chosen on selection runs alone: other seeds and, unless the study says otherwise, other evaluation records
than those reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privlora.lab.studies.results import Role, Row
from privlora.lab.studies.running import Job
from privlora.lab.studies.settings import Arm, Cell, Place, Rule, Study
from privlora.lab.studies.statistics import unit_of_gain


@dataclass(frozen=True)
class Choice:
    """The rate of a place, None if runs failed at every rate. ``at_edge``: it is the lowest or highest of several."""

    rate: float | None
    at_edge: bool


class Progress:
    """What is there of a study: its rows by cell, those of other settings left out.

    Of rows for the same cell, the last one counts, but none that failed where one ended well: they may come from
    several files.
    """

    def __init__(self, study: Study, rows: Iterable[Row]) -> None:
        self.study = study
        wanted = {study.fingerprint(cell, role) for cell, role in _all_cells(study)}
        self.rows: dict[Cell, Row] = {}
        self.outdated = 0
        """Rows that no cell of the study wants (other settings, or taken out of it)."""
        self._units: dict[tuple[str, float, int], float] = {}
        self._untouched: dict[tuple[str, Role], Mapping[str, Any]] = {}
        for row in rows:
            if row.fingerprint in wanted:
                known = self.rows.get(row.cell)
                if row.error is None or known is None or known.error is not None:
                    self.rows[row.cell] = row
                if row.before:
                    self._untouched[row.cell.task, row.role] = row.before
            else:
                self.outdated += 1

    def metric(self, task: str) -> str:
        """Key of the scores that the task is judged by: the task's own metric where data.task is set."""
        return "loss" if self.study.data_task(task) is None else "task"

    def lower_is_better(self, task: str) -> bool:
        return self.metric(task) == "loss"

    def words(self, task: str) -> str:
        """The metric for reading."""
        if self.metric(task) == "loss":
            return "held-out loss, nats per token"
        of_task = [row.scores for row in self.rows.values() if row.cell.task == task and row.error is None]
        names = {str(scores["task_metric"]) for scores in of_task}
        return ", ".join(sorted(names)) or "task metric"

    def value(self, cell: Cell) -> float | None:
        """The finished cell's score on its role's records; None if it is missing or failed."""
        row = self.rows.get(cell)
        return None if row is None or row.error is not None else float(row.scores[self.metric(cell.task)])

    def untouched(self, task: str, role: Role) -> float | None:
        """The score of the model before training, on the role's records."""
        before = self._untouched.get((task, role))
        return None if before is None else float(before[self.metric(task)])

    def values(self, place: Place, rate: float, seeds: Iterable[int] | None = None) -> dict[int, float]:
        """Of the report runs at a rate, or of those with other seeds, by seed; only those that ended well."""
        seeds = self.study.settings.seeds if seeds is None else seeds
        found = {seed: self.value(Cell(*place, rate, seed)) for seed in seeds}
        return {seed: value for seed, value in found.items() if value is not None}

    def failures(self, place: Place, rate: float) -> int:
        rows = (self.rows.get(Cell(*place, rate, seed)) for seed in self.study.settings.seeds)
        return sum(1 for row in rows if row is not None and row.error is not None)

    def chosen(self, rule: Rule) -> dict[Place, Choice]:
        """The rate of each place whose selection runs are all over."""
        found: dict[Place, Choice] = {}
        for place in self.study.places:
            _, method, epsilon, rank = place
            arm = self.study.by_label[method]
            siblings: Sequence[Place] = [place]
            if rule == "shared":
                siblings = [(other, method, epsilon, rank) for other in self.study.tasks]
            scores = [self._selection_means(sibling, arm) for sibling in siblings]
            if any(score is None for score in scores):
                continue
            known = [score for score in scores if score is not None]
            regrets = [self._regret(s, m) for s, m in zip(siblings, known, strict=True)]
            total = {rate: sum(regret[rate] for regret in regrets) for rate in arm.learning_rates}
            rate = min(total, key=lambda r: (total[r], r))
            edge = len(total) > 1 and rate in (min(total), max(total))
            found[place] = Choice(rate if math.isfinite(total[rate]) else None, edge)
        return found

    def _selection_means(self, place: Place, arm: Arm) -> dict[float, float] | None:
        """None while runs are missing; worst possible where one failed. A single rate needs no runs."""
        if len(arm.learning_rates) == 1:
            return {arm.learning_rates[0]: 0.0}
        seeds, means = self.study.settings.selection.seeds, {}
        for rate in arm.learning_rates:
            if any(Cell(*place, rate, seed) not in self.rows for seed in seeds):
                return None
            values = list(self.values(place, rate, seeds).values())
            whole = len(values) == len(seeds)
            means[rate] = statistics.fmean(values) if whole else self._sign(place[0]) * math.inf
        return means

    def _sign(self, task: str) -> float:
        return 1.0 if self.lower_is_better(task) else -1.0

    def _regret(self, place: Place, means: Mapping[float, float]) -> dict[float, float]:
        """What each rate loses against the method's best one here, in the task's unit of gain."""
        task, _, epsilon, rank = place
        sign = self._sign(task)
        best = min(sign * value for value in means.values())
        if not math.isfinite(best):
            return dict.fromkeys(means, math.inf)
        unit = self._unit(task, epsilon, rank)
        return {rate: (sign * value - best) / unit for rate, value in means.items()}

    def _unit(self, task: str, epsilon: float, rank: int) -> float:
        """Of gain on the selection records, from each method's runs at its best rate."""
        if (task, epsilon, rank) not in self._units:
            sign, before = self._sign(task), self.untouched(task, "selection")
            seeds, gains = self.study.settings.selection.seeds, []
            for arm in self.study.arms:
                if before is None or epsilon not in self.study.epsilons(arm.label):
                    continue
                place = (task, arm.label, epsilon, rank)
                runs = [self.values(place, rate, seeds).values() for rate in arm.learning_rates]
                of_rates = [[sign * (before - value) for value in values] for values in runs if values]
                if of_rates:
                    gains.append(max(of_rates, key=statistics.fmean))
            self._units[task, epsilon, rank] = unit_of_gain(gains) if gains else 1.0
        return self._units[task, epsilon, rank]


def _all_cells(study: Study) -> Iterable[tuple[Cell, Role]]:
    """Every run that the study may ask for."""
    for cell in selection_cells(study):
        yield cell, "selection"
    for cell in study.grid(study.settings.seeds):
        yield cell, "report"


def selection_cells(study: Study) -> list[Cell]:
    """The whole grid with the selection seeds, where there is anything to choose."""
    grid = study.grid(study.settings.selection.seeds)
    return [cell for cell in grid if len(study.by_label[cell.method].learning_rates) > 1]


def report_cells(study: Study, progress: Progress) -> list[Cell]:
    """Once everything is chosen: the chosen rates with the report seeds."""
    seeds = study.settings.seeds
    wanted = {
        Cell(*place, choice.rate, seed)
        for rule in study.rules
        for place, choice in progress.chosen(rule).items()
        if choice.rate is not None
        for seed in seeds
    }
    return [cell for cell in study.grid(seeds) if cell in wanted]


def job_of(study: Study, cell: Cell, role: Role, folder: Path) -> Job:
    """The run of a cell, in the study's ``folder``."""
    settings = study.run_settings(cell)
    root = folder.absolute() / "runs" / cell.folder
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"output": str(root)})})
    return Job(cell, role, study.fingerprint(cell, role), settings, study.selects, root)
