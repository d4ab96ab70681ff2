"""Run a study, or take it up where it stopped, and write what it found."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from privlora.lab.studies.choice import (
    Progress,
    all_cells,
    job_of,
    refuse_if_all_failed,
    report_cells,
    selection_cells,
)
from privlora.lab.studies.leases import FOLDER as PARTS
from privlora.lab.studies.leases import Claim, Lease
from privlora.lab.studies.page import render
from privlora.lab.studies.parts import Deal, content_of
from privlora.lab.studies.results import Results, Role, Row, read_results
from privlora.lab.studies.settings import Cell, Study
from privlora.lab.studies.shares import WHOLE, Part
from privlora.lab.studies.summary import Summary, summarise
from privlora.lab.studies.tables import markdown
from privlora.lab.studies.workers import Workers
from privlora.training.files import write_atomically

_LOOK_SECONDS: Final = 5.0  # between looks at what other parts have finished
RESULTS, TABLE, SUMMARY, PAGE = "results.jsonl", "table.md", "summary.json", "study.html"


class Watcher(Protocol):
    """Whoever wants to see a study go on."""

    def on_phase(self, words: str, done: int, total: int) -> None: ...

    def on_row(self, row: Row) -> None: ...

    def on_waiting(self, parts: tuple[Part, ...], runs: int) -> None:
        """Only called in parts of a study: rates are chosen once so many runs of these parts, which run, are there."""


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


@dataclass(frozen=True)
class PartReport:
    """Where a study is when a part has run what it can. left: runs of the whole study that are missing, as far as that
    is known; None before rates are chosen. waits_for: parts that owe runs on which the choice of rates depends."""

    folder: Path
    part: Part
    ran: int
    left: int | None
    waits_for: tuple[Part, ...]


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
    with Lease(folder, WHOLE, content_of(study)) as lease:
        _fold(folder)
        with Results(folder / RESULTS, lease) as results, Workers(workers, threads) as pool:
            one = _Running(study, folder, lease.claim, results, pool, retry_failed, watcher)
            if study.selects:
                one.run("selection", "choosing learning rates", selection_cells(study))
                refuse_if_all_failed(one.progress())
            one.run("report", "report runs", report_cells(study, one.progress()))
            refuse_if_all_failed(one.progress())
            return _write(study, one.progress(), folder)


def run_part(
    study: Study,
    part: Part,
    folder: str | Path | None = None,
    *,
    workers: int = 1,
    threads: int = 1,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
) -> PartReport:
    """Run the cells of ``part`` that no file of results holds yet, those that choose learning rates first; other
    processes run the other parts in the same folder, or in folders that are copied into one.

    Where the choice needs runs of other parts, it waits as long as processes work on all of these, and returns else.
    Writes no table: ``run_study`` does, and runs what is missing then. For the rest see there.
    """
    folder = output_folder(study) if folder is None else Path(folder)
    deal = Deal(study, part.count)
    own = folder / PARTS / f"{part.file}.jsonl"
    with (
        Lease(folder, part, content_of(study)) as lease,
        Results(own, lease, lambda: result_files(folder)) as results,
        Workers(workers, threads) as pool,
    ):
        one = _Running(study, folder, lease.claim, results, pool, retry_failed, watcher)

        def dealt(cells: list[Cell], role: Role) -> list[Cell]:
            return [cell for cell in cells if deal.owner(cell, role) == part]

        if study.selects:
            one.run(
                "selection",
                f"part {part}: choosing learning rates",
                dealt(selection_cells(study), "selection"),
            )
            waits_for = _wait_for_choice(one, deal, lease)
            if waits_for:
                return PartReport(folder, part, one.ran, None, waits_for)
            refuse_if_all_failed(one.progress())
        one.run("report", f"part {part}: report runs", dealt(report_cells(study, one.progress()), "report"))
        return PartReport(folder, part, one.ran, missing_runs(study, folder), ())


class _Running:
    """What phases of a study share. ran: runs that were made."""

    def __init__(
        self,
        study: Study,
        folder: Path,
        claim: Claim,
        results: Results,
        pool: Workers,
        retry_failed: bool,
        watcher: Watcher | None,
    ) -> None:
        self.study, self.ran, self.watcher = study, 0, watcher
        self._folder, self._claim, self._results, self._pool = folder, claim, results, pool
        failed = (cell for cell, row in self.progress().rows.items() if row.error is not None)
        self._refused = set(failed) if retry_failed else set()

    def progress(self) -> Progress:
        return Progress(self.study, self._results.rows())

    def run(self, role: Role, words: str, cells: list[Cell]) -> None:
        """Those of ``cells`` that are missing, or to be tried once more."""
        done = self.progress().rows
        missing = [cell for cell in cells if cell not in done or cell in self._refused]
        if self.watcher is not None:
            self.watcher.on_phase(words, len(cells) - len(missing), len(cells))
        jobs = [job_of(self.study, cell, role, self._folder, self._claim) for cell in missing]
        self._pool.run(jobs, self._record)

    def _record(self, row: Row) -> None:
        self._results.append(row)
        self.ran += 1
        if self.watcher is not None:
            self.watcher.on_row(row)


def _wait_for_choice(one: _Running, deal: Deal, lease: Lease) -> tuple[Part, ...]:
    """Until all runs that choose rates are there, () then; or the parts that owe some and at which nobody works."""
    told: tuple[Part, ...] = ()
    while True:
        running = lease.running()  # before the rows: whoever ends in between has written them
        done = one.progress().rows
        missing = [cell for cell in selection_cells(one.study) if cell not in done]
        if not missing:
            return ()
        owing = tuple(sorted({deal.owner(cell, "selection") for cell in missing}))
        if any(part not in running for part in owing):
            return owing
        if owing != told and one.watcher is not None:
            one.watcher.on_waiting(owing, len(missing))
            told = owing
        time.sleep(_LOOK_SECONDS)


def result_files(folder: Path) -> list[Path]:
    """That of the whole study first, then those of parts."""
    return [folder / RESULTS, *sorted((folder / PARTS).glob("*.jsonl"))]


def _rows(folder: Path) -> list[Row]:
    return [row for path in result_files(folder) for row in read_results(path)]


def _fold(folder: Path) -> None:
    """The rows of parts into the file of the whole study, which nobody else holds; then their files go."""
    parts = [path for path in result_files(folder)[1:] if path.exists()]
    if not parts:
        return
    rows = dict.fromkeys(row.to_line() for row in _rows(folder))
    write_atomically(folder / RESULTS, b"".join(rows))
    for path in parts:
        path.unlink()


def report_study(study: Study, folder: str | Path | None = None) -> StudyReport:
    """Make the tables and the page of what is finished; nothing is run."""
    folder = output_folder(study) if folder is None else Path(folder)
    return _write(study, Progress(study, _rows(folder)), folder)


def missing_runs(study: Study, folder: Path) -> int:
    """How many runs are still to come, as far as that is known before rates are chosen."""
    done = Progress(study, _rows(folder))
    if study.selects and any(cell not in done.rows for cell in selection_cells(study)):
        return sum(1 for cell, _ in all_cells(study) if cell not in done.rows)
    return sum(1 for cell in report_cells(study, done) if cell not in done.rows)


def output_folder(study: Study) -> Path:
    """What the file says, else studies/<name of the file>."""
    return Path(study.settings.output or Path("studies") / name_of(study))


def name_of(study: Study) -> str:
    return Path(study.source).stem


def _write(study: Study, progress: Progress, folder: Path) -> StudyReport:
    summary = summarise(progress, name=name_of(study))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    write_atomically(folder / TABLE, markdown(summary))
    write_atomically(folder / PAGE, render(summary))
    return StudyReport(folder, summary)
