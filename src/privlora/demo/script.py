"""What the three demos share: one way to prepare, to train, to measure and to show."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from privlora.api import Result, train_run
from privlora.config import DataSettings, ModelSettings, Settings, settings_from
from privlora.demo import model_path
from privlora.errors import RunError
from privlora.evaluation import evaluate_next_token
from privlora.pages.figures import ACCENT, SECOND, THIRD
from privlora.training.files import RunFolder, read_lines
from privlora.training.inputs import tokenise
from privlora.training.models import load_model
from privlora.training.progress import RichObserver

PROMISE = {"target_epsilon": 3.0, "delta": 1e-5}
EPSILON, DELTA = PROMISE.values()
Notes = list[dict[str, str]]
Losses = dict[int, float]  # held-out loss in nats per token, by step
EMBEDDED: dict[str, Any] = {"name": str(model_path()), "dtype": "float32"}  # group model
_DATA: dict[str, Any] = {"path": "(generated)", "max_length": 96}


def fresh_folder(output: Path | None, usual: Path, model: str | None = None) -> Path:
    """Where a demo writes: ``output``, or the usual place, which is emptied. RunError if ``output`` is not empty."""
    if model is None:
        torch.set_num_threads(
            1
        )  # on a model as small as the embedded one a second thread mostly waits for the first
    if output is not None:
        if output.exists() and any(output.iterdir()):
            raise RunError(f"{str(output)!r} is not empty", fix="give a new folder")
        return output
    if usual.exists():
        # The demo's data are generated, so nothing is forgotten; the rename keeps a half-deleted run out of the way.
        stale = Path(tempfile.mkdtemp(prefix=".demo-", dir=usual.parent))
        usual.rename(stale / "old")
        shutil.rmtree(stale)
    return usual


def settings_of(
    output: Path, label: str, privacy: Mapping[str, Any], method: Mapping[str, Any], every: int, **groups: Any
) -> Settings:
    """every: steps from one held-out loss to the next. groups: others, such as model instead of the embedded one."""
    run = {"output": str(output), "label": label, "tokens_per_micro_batch": 8192, "evaluate_every": every}
    groups.setdefault("model", EMBEDDED)
    return settings_from({"data": _DATA, "privacy": privacy, "method": method, "run": run, **groups})


class _Shown(RichObserver):
    """A run without what was left to it, which is not a part of the story."""

    def on_choice(self, why: str) -> None:
        pass


def trained(
    console: Console, title: str, settings: Settings, notes: Notes, held_out: Notes
) -> tuple[Result, Losses]:
    """Train under a title, showing how it goes."""
    console.rule(title)
    with _Shown(console, timed=True) as observer:
        result = train_run(settings, records=notes, evaluation=held_out, observer=observer)
    rows = read_lines(RunFolder(Path(settings.run.output)).evaluations)
    return result, {row["step"]: row["loss_per_example"] for row in rows}


def adapted(model: Mapping[str, Any], adapter: Path | None) -> tuple[Any, Any]:
    """The model of group ``model`` with an adapter, or as it was, and its tokenizer."""
    from peft import PeftModel

    base, tokenizer = load_model(ModelSettings(**model))
    return base if adapter is None else PeftModel.from_pretrained(base, str(adapter)), tokenizer


def losses_of(adapter: Path | None, held_out: Mapping[str, Notes]) -> dict[str, float]:
    """Loss per example of the embedded model, in nats per token, on each set of notes."""
    model, tokenizer = adapted(EMBEDDED, adapter)
    data = DataSettings(**_DATA)
    return {
        name: evaluate_next_token(model, tokenise(notes, data, tokenizer)).loss_per_example
        for name, notes in held_out.items()
    }


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Sequence[Any]],
    caption: str | None = None,
    **options: Any,
) -> Table:
    """options: of the rich table. All columns but the first hold numbers."""
    drawn = Table(title=title, title_style="bold", caption=caption, **options)
    for place, column in enumerate(columns):
        drawn.add_column(column, justify="right" if place else "left")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def draw_losses(axes: Any, curves: Mapping[str, Mapping[float, float]], title: str, across: str) -> None:
    """One line each. across: what the horizontal axis says."""
    for (name, losses), colour in zip(curves.items(), (ACCENT, SECOND, THIRD), strict=False):
        axes.plot(list(losses), list(losses.values()), marker="o", color=colour, label=name)
    axes.set(xlabel=across, title=title)
    axes.legend()
