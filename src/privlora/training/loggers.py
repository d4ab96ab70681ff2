"""What a run tells step by step, from public numbers alone (its plan, its schedule, losses on public records), and
where that goes next to its report: files of the run's folder, or a service once the run has ended.

The rows of a finished run follow from public numbers, so a crash or a resume leaves no trace in them.

A service notes when each number comes, and so how long each step took, which follows from the batch that was drawn.
So what is sent is sent at the end, all at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final, Protocol

from privlora.accounting import Plan, epsilon
from privlora.errors import ConfigError, reason_of
from privlora.pages.numbers import finite
from privlora.schedules import learning_rate_at
from privlora.training.files import RunFolder, append_line, write_atomically

_log = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]
"""Of `public_rows`."""


@lru_cache(maxsize=4096)
def spent(plan: Plan | None, step: int) -> float | None:
    """Epsilon after ``step`` steps of training; None where nothing is promised. The first of a plan takes tenths of a
    second, the next ones milliseconds."""
    if plan is None or plan.insecure_noise:
        return None
    charged = plan.before_training + step
    return epsilon(plan.events(charged), plan.delta, adjacency=plan.adjacency) if charged else 0.0


def steps_shown(steps: int, every: int, evaluated: Collection[int] = ()) -> list[int]:
    """The first and last step, every ``every``-th, and those that were evaluated (perhaps 0), in order."""
    return sorted({1, steps, *range(every, steps + 1, every), *evaluated})


def rows_of_report(
    plan: Plan | None,
    report: Mapping[str, Any],
    shown: Iterable[int],
    evaluations: Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """`public_rows` of a run that is over, by what its report says of its method."""
    method = report["method"]
    trains = method.get("releases") != "votes"

    def rate(step: int) -> float | None:
        named = method["learning_rate"], method["schedule"], method["warmup_steps"]
        return learning_rate_at(step, method["steps"], *named) if trains else None

    return public_rows(plan, shown, rate, evaluations)


def public_rows(
    plan: Plan | None,
    shown: Iterable[int],
    learning_rate: Callable[[int], float | None],
    evaluations: Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Of each step in ``shown``: step, epsilon, learning_rate, held_out_loss (nats, mean over records).

    None: no promise; before the first step, or in rounds that train nothing; not evaluated, or not finite.
    evaluations: rows with step and loss_per_example.
    """
    losses = {row["step"]: row["loss_per_example"] for row in evaluations}
    return [
        {
            "step": step,
            "epsilon": spent(plan, step),
            "learning_rate": learning_rate(step) if step else None,
            "held_out_loss": finite(losses.get(step)),
        }
        for step in shown
    ]


class Logger(Protocol):
    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Public numbers of a step, by name, while the run goes on."""

    def end(self, rows: Rows) -> None:
        """All rows of a run that is over."""


class _JsonLines:
    """metrics.jsonl in the run's release: a row as it comes, and at the end the rows that follow from what is public,
    so that the file does not show where a run broke."""

    name = "jsonl"

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics

    def log(self, step: int, values: Mapping[str, float]) -> None:
        append_line(self._path, {"step": step, **values})

    def end(self, rows: Rows) -> None:
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in rows))


class _TensorBoard:
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
        "jsonl": lambda: _JsonLines(folder),
        "tensorboard": lambda: _TensorBoard(folder),
        "wandb": lambda: Service("wandb", _to_wandb, folder, label),
        "trackio": lambda: Service("trackio", _to_trackio, folder, label),
    }
    return [made[name]() for name in report_to]
