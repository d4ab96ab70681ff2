"""``privlora lab compare``."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from privlora.cli.console import JsonOption, emit, err, loading, out, quiet_libraries
from privlora.cli.stops import Stopped
from privlora.config import read_yaml
from privlora.data.records import is_data_file_name, refuse_missing
from privlora.errors import ConfigError

if TYPE_CHECKING:
    from privlora.lab.studies.results import Row
    from privlora.lab.studies.settings import Study
    from privlora.lab.studies.study import StudyReport, Unfinished

_PLAIN_SECONDS = 30.0  # between lines where there is no terminal


def compare(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY", help="YAML file of the study.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder; studies/<name of the file> unless given.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at the same time.")] = 1,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of each run.")] = 1,
    part: Annotated[
        str, typer.Option("--part", metavar="K/N", help="Every N-th run, from the K-th on: for a job array.")
    ] = "1/1",
    ray: Annotated[bool, typer.Option("--ray", help="Make the runs as tasks of Ray.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Run nothing; report what is finished.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the runs that failed once more.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare methods at equal privacy, as STUDY says; the same command goes on after an interruption."""
    share = part_of(part)
    if study.is_dir():
        raise ConfigError(
            f"{str(study)!r} is a folder, and a study is a YAML that says what to train and compare",
            fix="write one (docs/compare.md); what a finished run is worth says `privlora evaluate RUN`",
        )
    content = read_yaml(study)
    with quiet_libraries(told=True):
        with loading():
            from privlora.lab.studies.settings import study_from

        checked = study_from(content, source=str(study))
        if not table:
            _refuse_missing_files(checked)
        with loading():
            from privlora.lab.studies.study import missing_runs, output_folder, report_study, run_study

        folder = output_folder(checked) if output is None else output
        ended: StudyReport | Unfinished
        try:
            if table:
                ended = report_study(checked, folder)
            else:
                with _Watch(err()) as watch:
                    ended = run_study(
                        checked,
                        folder,
                        part=share,
                        jobs=jobs,
                        threads=threads,
                        ray=ray,
                        retry_failed=retry_failed,
                        watcher=watch,
                    )
        except KeyboardInterrupt:
            left = missing_runs(checked, folder)
            said = f"finished runs are kept, at most {left} are left. Go on with the same command"
            raise Stopped(said) from None
    _show(ended, part, as_json)


def part_of(text: str) -> tuple[int, int]:
    """Which runs a process makes. Raises ConfigError.

    >>> part_of("2/5")
    (2, 5)
    """
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"--part {text!r} is no part", fix="write 1/N to N/N, as 2/5")
    return number, count


def _refuse_missing_files(study: Study) -> None:
    """Raise DataError for a file of records that is not there."""
    for task in study.tasks:
        data = {**study.settings.base.get("data", {}), **study.of_task(task).get("data", {})}
        for name in ("path", "evaluation"):
            path = data.get(name)
            if isinstance(path, str) and is_data_file_name(path):
                refuse_missing(path)


def _show(ended: StudyReport | Unfinished, part: str, as_json: bool) -> None:
    from privlora.lab.studies.study import StudyReport

    if not isinstance(ended, StudyReport):
        if as_json:
            emit({"part": part, "phase": ended.phase, "ran": ended.ran, "left": ended.left})
        else:
            out().print(
                f"part {part} made {ended.ran} runs; {ended.left} of other parts are left ({ended.phase})"
            )
            out().print("When they are there, the same command goes on, and the last one writes the page.")
        return
    places = {"table": str(ended.table), "page": str(ended.page)}
    if as_json:
        emit({**places, **ended.summary})
        return
    out().print(ended.table.read_text(encoding="utf-8"))
    for name, place in places.items():
        out().print(f"{name + ':':<10}{place}")


class _Watch:
    """A bar on a terminal, a line now and then elsewhere; failures are always told."""

    def __init__(self, console: Console) -> None:
        self._console = console
        counts = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
        columns = (TextColumn("{task.description}"), *counts, TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[last]}"), console=console, transient=True)
        self._task: TaskID | None = None
        self._words = ""
        self._done = self._total = 0
        self._printed_at = time.monotonic()

    def __enter__(self) -> _Watch:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_phase(self, words: str, done: int, total: int) -> None:
        """A phase begins, ``done`` of its runs being there already."""
        self._words, self._done, self._total = words, done, total
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(words, completed=done, total=total, last="")
        self._console.print(f"{words}: {total - done} of {total} runs to do")

    def on_row(self, row: Row) -> None:
        """A run is over."""
        self._done += 1
        cell = row.cell
        if row.error is not None:
            self._console.print(f"failed: {cell.folder}: {row.error}")
        assert self._task is not None
        self._bar.update(self._task, advance=1, last=f"{cell.task}, {cell.method}")
        if not self._console.is_terminal and time.monotonic() - self._printed_at >= _PLAIN_SECONDS:
            self._console.print(f"{self._words}: {self._done}/{self._total}")
            self._printed_at = time.monotonic()
