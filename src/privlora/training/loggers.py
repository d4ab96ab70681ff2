"""Where a run's public numbers go beside its report: files of the run's folder, or a service once the run has ended.

A service notes when each number comes, and so how long each step took, which follows from the batch that was drawn.
So what is sent is sent at the end, all at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import Any, Final, Protocol

from privlora.errors import ConfigError, reason_of
from privlora.training.files import RunFolder, append_line, write_atomically

_log = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]
"""Of `privlora.training.public_rows.public_rows`."""


class Logger(Protocol):
    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Public numbers of a step, by name, while the run goes on."""

    def end(self, rows: Rows) -> None:
        """All rows of a run that is over."""


class JsonLines:
    """metrics.jsonl in the run's release: a row as it comes, and at the end the rows that follow from what is public,
    so that the file does not show where a run broke."""

    name = "jsonl"

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics

    def log(self, step: int, values: Mapping[str, float]) -> None:
        append_line(self._path, {"step": step, **values})

    def end(self, rows: Rows) -> None:
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in rows))


class TensorBoard:
    """Event files in the run's private folder: their names and heads hold a clock and the machine's name."""

    name = "tensorboard"

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.private / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = _summary_writer()(str(self._folder))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=0.0)
        self._writer.flush()

    def end(self, rows: Rows) -> None:
        if self._writer is not None:
            self._writer.close()


def _summary_writer() -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter


class Service:
    """One that gets all rows when the run has ended. A failure there is a warning: the run is complete."""

    def __init__(
        self,
        name: str,
        send: Callable[[Rows, RunFolder, str | None], None],
        folder: RunFolder,
        label: str | None,
    ) -> None:
        self.name, self._send, self._folder, self._label = name, send, folder, label

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing yet."""

    def end(self, rows: Rows) -> None:
        try:
            with redirect_stdout(sys.stderr):  # what they say is no result
                self._send(rows, self._folder, self._label)
        except Exception as error:  # noqa: BLE001 - code of others raises anything
            told = "%s did not take the run's numbers (%s: %s); they are in Result.history"
            _log.warning(told, self.name, type(error).__name__, reason_of(error))


def _to_wandb(rows: Rows, folder: RunFolder, label: str | None) -> None:
    import wandb

    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        program=PROJECT,  # else the path of the script
        save_code=False,
        silent=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    # What it writes on this machine says where and when.
    run = wandb.init(project=project, name=label, dir=str(folder.private), settings=settings)
    for row in rows:
        run.log(_numbers(row), step=row["step"])
    run.finish()


def _to_trackio(rows: Rows, folder: RunFolder, label: str | None) -> None:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    trackio.init(project=project, name=label, auto_log_gpu=False, auto_log_cpu=False, embed=False)
    for row in rows:
        trackio.log(_numbers(row), step=row["step"])
    trackio.finish()


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "step" and value is not None}


PROJECT: Final = "privlora"
"""Of a service, unless its own variable of the environment names another."""

_NEEDS: Final = ("tensorboard", "wandb", "trackio")


def refuse_missing_loggers(report_to: Sequence[str]) -> None:
    """Raise ConfigError for one whose package is not installed; nothing is imported."""
    for name in report_to:
        if name in _NEEDS and find_spec(name) is None:
            fix = f"pip install 'privlora[{name}]', or remove it"
            raise ConfigError(f"run.report_to={name} needs the package {name}", fix=fix)


def loggers(report_to: Sequence[str], folder: RunFolder, label: str | None) -> list[Logger]:
    """Of a run in ``folder``; nothing is written, imported or asked yet."""
    made: dict[str, Callable[[], Logger]] = {
        "jsonl": lambda: JsonLines(folder),
        "tensorboard": lambda: TensorBoard(folder),
        "wandb": lambda: Service("wandb", _to_wandb, folder, label),
        "trackio": lambda: Service("trackio", _to_trackio, folder, label),
    }
    return [made[name]() for name in report_to]
