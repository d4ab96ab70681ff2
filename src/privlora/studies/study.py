"""Run a study, or take it up where it stopped, and write what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from privlora.studies.choice import (
    Progress,
    all_cells,
    job_of,
    refuse_if_all_failed,
    report_cells,
    selection_cells,
)
from privlora.studies.page import render
from privlora.studies.results import Results, Role, Row, read_results
from privlora.studies.settings import Cell, Study
from privlora.studies.summary import Summary, summarise
from privlora.studies.tables import markdown
from privlora.studies.workers import Workers
from privlora.training.files import write_atomically

RESULTS, TABLE, SUMMARY, PAGE = "results.jsonl", "table.md", "summary.json", "study.html"


class Watcher(Protocol):
    """Whoever wants to see a study go on."""

    def on_phase(self, words: str, done: int, total: int) -> None: ...

    def on_row(self, row: Row) -> None: ...


@dataclass(frozen=True)
class StudyReport:
    """What a study wrote. ``summary`` is the content of summary.json."""

    folder: Path
    summary: Summary

    @property
    def table(self) -> Path:
        return self.folder / TABLE

    @property
    def page(self) -> Path:
        return self.folder / PAGE


def run_study(
    study: Study,
    folder: str | Path | None = None,
    *,
    workers: int = 1,
    threads: int = 1,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
) -> StudyReport:
    """Run the cells that results.jsonl does not hold yet, first those that choose learning rates; then report.

    folder: None takes ``output_folder(study)``. retry_failed: run failed cells once more.

    Raises PrivloraError subclasses, and KeyboardInterrupt on ctrl-C; what is finished stays in any case.
    """
    folder = output_folder(study) if folder is None else Path(folder)
    with Results(folder / RESULTS) as results, Workers(workers, threads) as pool:
        refused = {row.cell for row in results.rows() if row.error is not None} if retry_failed else set()

        def progress() -> Progress:
            return Progress(study, results.rows())

        def run(role: Role, words: str, cells: list[Cell]) -> None:
            done = progress().rows
            missing = [cell for cell in cells if cell not in done or cell in refused]
            if watcher is not None:
                watcher.on_phase(words, len(cells) - len(missing), len(cells))
            jobs = [job_of(study, cell, role, folder) for cell in missing]
            pool.run(jobs, _recorder(results, watcher))

        if study.selects:
            run("selection", "choosing learning rates", selection_cells(study))
            refuse_if_all_failed(progress())
        run("report", "report runs", report_cells(study, progress()))
        refuse_if_all_failed(progress())
        return _write(study, progress(), folder)


def report_study(study: Study, folder: str | Path | None = None) -> StudyReport:
    """Make the tables and the page of what is finished; nothing is run."""
    folder = output_folder(study) if folder is None else Path(folder)
    return _write(study, Progress(study, read_results(folder / RESULTS)), folder)


def missing_runs(study: Study, folder: Path) -> int:
    """How many runs are still to come, as far as that is known before rates are chosen."""
    done = Progress(study, read_results(folder / RESULTS))
    if study.selects and any(cell not in done.rows for cell in selection_cells(study)):
        return sum(1 for cell, _ in all_cells(study) if cell not in done.rows)
    return sum(1 for cell in report_cells(study, done) if cell not in done.rows)


def output_folder(study: Study) -> Path:
    """What the file says, else studies/<name of the file>."""
    return Path(study.settings.output or Path("studies") / name_of(study))


def name_of(study: Study) -> str:
    return Path(study.source).stem


def _recorder(results: Results, watcher: Watcher | None) -> Callable[[Row], None]:
    def record(row: Row) -> None:
        results.append(row)
        if watcher is not None:
            watcher.on_row(row)

    return record


def _write(study: Study, progress: Progress, folder: Path) -> StudyReport:
    summary = summarise(progress, name=name_of(study))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    write_atomically(folder / TABLE, markdown(summary))
    write_atomically(folder / PAGE, render(summary))
    return StudyReport(folder, summary)
