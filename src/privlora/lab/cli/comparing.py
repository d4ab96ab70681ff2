"""``privlora lab compare``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

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
from privlora.errors import ConfigError, DataError, Together
from privlora.lab.studies.shares import part_from

if TYPE_CHECKING:
    from privlora.lab.studies.results import Row
    from privlora.lab.studies.shares import Part
    from privlora.lab.studies.study import PartReport, StudyReport

_PLAIN_SECONDS = 30.0  # between lines where there is no terminal


def compare(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY", help="YAML file of the study.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder; studies/<name of the file> unless given.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Runs at the same time.")] = 1,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of each worker.")] = 1,
    table: Annotated[bool, typer.Option("--table", help="Run nothing; report what is finished.")] = False,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="K/N",
            help="Run the K-th of N shares of the runs; other machines run the others in the same folder.",
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the runs that failed once more.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare methods at equal privacy, as STUDY says; the same command goes on after an interruption."""
    share = None if part is None else part_from(part)
    if table and share is not None:
        raise ConfigError("--table runs nothing, and --part says what to run", fix="leave one of them out")
    _refuse_folder(study)
    content = read_yaml(study)
    if not table:
        _refuse_missing_files(content, str(study))
    with quiet_libraries(told=True):
        with loading():  # of torch alone, so that what is wrong is told at once
            from privlora.lab.studies.settings import study_from
        checked = study_from(content, source=str(study))
        with loading():
            from privlora.lab.studies.study import (
                StudyReport,
                missing_runs,
                output_folder,
                report_study,
                run_part,
                run_study,
            )

        ended: StudyReport | PartReport
        folder = output_folder(checked) if output is None else output
        if table:
            ended = report_study(checked, folder)
        else:
            start = run_study if share is None else partial(run_part, part=share)
            try:
                with _Watch(err()) as watch:
                    ended = start(
                        checked,
                        folder=folder,
                        workers=workers,
                        threads=threads,
                        retry_failed=retry_failed,
                        watcher=watch,
                    )
            except KeyboardInterrupt:
                left = missing_runs(checked, folder)
                raise Stopped(
                    f"finished runs are kept, at most {left} are left. Go on with the same command"
                ) from None
    if isinstance(ended, StudyReport):
        _show(ended, as_json)
    else:
        _show_part(
            ended,
            f"privlora lab compare {study}" + ("" if output is None else f" --output {output}"),
            as_json,
        )


def _refuse_folder(study: Path) -> None:
    """Raise ConfigError for a folder, as that of a run: what is compared is trained anew, as a YAML says."""
    if study.is_dir():
        raise ConfigError(
            f"{str(study)!r} is a folder, and a study is a YAML that says what to train and compare",
            fix="write one, with the settings that all runs share below base: (docs/compare.md); what a finished run "
            "is worth says `privlora evaluate RUN`",
        )


def _refuse_missing_files(content: Mapping[str, Any], source: str) -> None:
    """Raise for all files of records that a study names and that are not there, and for all else that is wrong with it
    beside them."""
    problems = Together()
    tasks = content.get("tasks")
    layers = [content.get("base"), *(tasks.values() if isinstance(tasks, Mapping) else ())]
    for layer in layers:
        given = layer if isinstance(layer, Mapping) else {}
        data = given.get("data")
        found = {f"data.{name}": path for name, path in data.items()} if isinstance(data, Mapping) else {}
        for place in ("data.path", "data.evaluation"):
            path = given.get(place, found.get(place))
            if isinstance(path, str) and is_data_file_name(path):
                try:
                    refuse_missing(path)
                except DataError as error:
                    problems.found.append(error.of(f"{source}: {place}"))
    if problems.found:
        with loading():  # of torch alone
            from privlora.lab.studies.settings import study_from

        problems.of(None, study_from, content, source)
    problems.tell()


def _show_part(ended: PartReport, command: str, as_json: bool) -> None:
    """What a part has run, and which command is next."""
    again = f"{command} --part {ended.part}"
    waits_for = [str(part) for part in ended.waits_for]
    following = again if waits_for else command
    if as_json:
        emit(
            {
                "part": str(ended.part),
                "ran": ended.ran,
                "left": ended.left,
                "waits_for": waits_for,
                "next": following,
            }
        )
        return
    out().print(f"part {ended.part} is through with what it can run now: {ended.ran} runs")
    if waits_for:
        out().print(
            f"learning rates are chosen once the runs of {_parts(ended.waits_for)} are there, and nobody works "
            f"at them now. Start those, then give the same command again: {again}"
        )
    elif ended.left:
        out().print(
            f"{ended.left} runs of other parts are left. When they are there, this writes the table: {command}"
        )
    else:
        out().print(f"every run is there. This writes the table: {command}")


def _parts(parts: Sequence[Part]) -> str:
    shown = ", ".join(map(str, parts[:8]))
    more = f" and {len(parts) - 8} more" if len(parts) > 8 else ""
    return f"part{'s' if len(parts) > 1 else ''} {shown}{more}"


def _show(found: StudyReport, as_json: bool) -> None:
    places = {"table": str(found.table), "page": str(found.page)}
    if as_json:
        emit({**places, **found.summary})
        return
    out().print(found.table.read_text(encoding="utf-8"))
    for name, place in places.items():
        out().print(f"{name + ':':<10}{place}")


class _Watch:
    """A bar on a terminal, a line now and then elsewhere; failures are always told."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=console,
            transient=True,
        )
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

    def on_waiting(self, parts: tuple[Part, ...], runs: int) -> None:
        """Others choose, too."""
        self._console.print(
            f"waiting for {_parts(parts)}: {runs} of their runs choose learning rates, and they run"
        )
