"""``privlora demo --few``: PRISM, PE-SGD and both together on a clinic's 120 notes, at one epsilon.

Four other clinics have published notes. Every method starts with the same ordinary epochs on the same of these notes,
and then takes as many private steps with the same sampling and noise: what differs is where the noise goes.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from privlora.accounting import compose_ledgers
from privlora.api import train_run
from privlora.config import ModelSettings, Settings, settings_from
from privlora.demo import model_path
from privlora.demo.clinics import CLINICS, clinic_records
from privlora.demo.run import fresh_folder
from privlora.evaluation import evaluate_next_token
from privlora.pages.figures import ACCENT, MUTED, SECOND, THIRD, grid, in_style, png
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder, read_lines
from privlora.training.inputs import tokenise
from privlora.training.models import load_model
from privlora.training.progress import RichObserver
from privlora.training.promise import plan_privacy

EPSILON, DELTA = 3.0, 1e-5
PRIVATE = len(CLINICS) - 1  # riverside, which shares no complaint, doctor or form of a note with the others
METHODS = {
    "prism": "PRISM: noise in all directions of the adapter",
    "pe-sgd": "PE-SGD: noise on coefficients of public gradients",
    "span-prism": "both: these coefficients in PRISM's coordinates",
}
# The best of 0.003, 0.01 and 0.03 for each on public notes alone, one seed: 120 of the market clinic stood for private
# ones, those of the other three for public. PRISM at 0.1 and PE-SGD at 0.001 were worse.
_RATES = {"prism": 3e-2, "pe-sgd": 3e-3, "span-prism": 3e-3}
_WARM_RATE = 1e-2


@dataclass(frozen=True)
class Sizes:
    """notes: private ones, each of another patient. texts: public ones at a time, half of which a step replaces.
    epochs: on the first of them. batch: notes in a step, expected."""

    notes: int = 120
    held_out: int = 60
    texts: int = 100
    epochs: int = 2
    steps: int = 12
    batch: int = 30


def main(output: Path | None, console: Console, sizes: Sizes | None = None) -> dict[str, Any]:
    """Train on one clinic's few notes by each of METHODS at epsilon 3, and compare.

    output: where all runs go; None takes runs/demo-few, and replaces what an earlier demo left there. Returns the
    numbers that were shown. Raises RunError if ``output`` is given and not empty.
    """
    torch.set_num_threads(1)  # on a model this small a second thread mostly waits for the first
    begun, sizes = time.perf_counter(), sizes or Sizes()
    root = fresh_folder(output, Path("runs/demo-few"))
    notes, held_out = notes_of_patients(sizes.notes, seed=1), notes_of_patients(sizes.held_out, seed=3)
    public = public_notes(sizes)
    root.mkdir(parents=True, exist_ok=True)
    file = root / "public_notes.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in public), encoding="utf-8")
    _introduce(console, notes[0]["text"], public[0], sizes)
    untouched = _untouched(held_out)
    rows: dict[str, dict[str, Any]] = {}
    for name, title in METHODS.items():
        console.rule(title)
        settings = _settings(root / name, name, file, sizes)
        started = time.process_time()
        with RichObserver(console, plan_privacy(settings)[0], timed=True) as observer:
            result = train_run(settings, records=notes, evaluation=held_out, observer=observer)
        losses = {
            row["step"]: row["loss_per_example"] for row in read_lines(RunFolder(root / name).evaluations)
        }
        rows[name] = {
            "losses": losses,
            "start": losses[0],
            "end": losses[max(losses)],
            "epsilon": result.epsilon,
            "delta": result.delta,
            "processor_seconds": time.process_time() - started,
            "release": str(result.release),
        }
    together = compose_ledgers([RunFolder(root / name).ledger for name in METHODS]).epsilon
    picture = root / "losses.png"
    picture.write_bytes(png(_picture(untouched, rows)))
    console.print(_table(untouched, rows))
    best = min(rows, key=lambda name: rows[name]["end"])
    numbers = _numbers(Path(rows[best]["release"]))
    console.print(what_came_out(rows, numbers, sizes), soft_wrap=True)
    seconds = time.perf_counter() - begun
    _tell_where(console, RunFolder(root / best), picture, file, rounded_up(together), seconds)
    return {
        "untouched": untouched,
        "methods": rows,
        "adapter_numbers": numbers,
        "public_texts": sizes.texts,
        "public_text": public[0],
        "epsilon_of_all": together,
        "seconds": seconds,
        "picture": str(picture),
    }


def notes_of_patients(count: int, seed: int) -> list[dict[str, str]]:
    """``count`` notes of the private clinic as {"text", "patient", "clinic"}, each of another patient."""
    first: dict[str, dict[str, str]] = {}
    for note in clinic_records(PRIVATE, 4 * count, seed):  # a patient has at most four
        first.setdefault(note["patient"], note)
    return list(first.values())[:count]


def public_notes(sizes: Sizes) -> list[str]:
    """As many different notes of the other clinics as a run may use: all of the start, then half as many a step."""
    needed = sizes.texts + sizes.texts // 2 * sizes.steps
    each = 2 * needed // PRIVATE  # some are equal
    found = [note["text"] for clinic in range(PRIVATE) for note in clinic_records(clinic, each, seed=7)]
    random.Random("public notes").shuffle(found)
    return list(dict.fromkeys(found))[: needed + sizes.texts]


def _introduce(console: Console, note: str, public: str, sizes: Sizes) -> None:
    others = ", ".join(clinic.name for clinic in CLINICS[:PRIVATE])
    console.print(
        f"[bold]privlora demo --few[/]: the {CLINICS[PRIVATE].name} clinic ({CLINICS[PRIVATE].speciality}) has "
        f"{sizes.notes} notes of as many patients. One reads:\n  [italic]{note}[/]\n"
        f"The clinics {others} have published notes, of other complaints, by other doctors, in other words:\n"
        f"  [italic]{public}[/]\n"
        f"Each method starts with {sizes.epochs} ordinary epochs on {sizes.texts} of the public notes, and takes "
        f"{sizes.steps} private steps, in each of which\na note takes part with probability "
        f"{sizes.batch / sizes.notes:g}: ε = {EPSILON:g} for every note by each method (δ = {DELTA:g}).",
        soft_wrap=True,
    )


def _settings(output: Path, method: str, public: Path, sizes: Sizes) -> Settings:
    synthesis: dict[str, Any] = {"generator": "file", "file": str(public), "seeds": sizes.texts // 2}
    synthesis |= {"warm_start_epochs": sizes.epochs, "warm_start_learning_rate": _WARM_RATE}
    return settings_from(
        {
            "model": {"name": str(model_path()), "dtype": "float32"},
            "data": {"path": "(generated)", "max_length": 96},
            "privacy": {
                "target_epsilon": EPSILON,
                "delta": DELTA,
                "public_dataset_size": sizes.notes,
                "expected_batch_size": sizes.batch,
                "steps": sizes.steps,
            },
            "method": {"name": method, "learning_rate": _RATES[method], "relative_rate": False},
            "synthesis": synthesis,
            "run": {
                "output": str(output),
                "label": "generated notes of one clinic",
                "tokens_per_micro_batch": 8192,
                "evaluate_every": max(1, sizes.steps // 4),
            },
        }
    )


def _untouched(held_out: list[dict[str, str]]) -> float:
    """Loss per example of the model before anything was learnt."""
    model, tokenizer = load_model(ModelSettings(name=str(model_path()), dtype="float32"))
    data = _settings(Path("unused"), "prism", Path("unused"), Sizes()).data
    return evaluate_next_token(model, tokenise(held_out, data, tokenizer)).loss_per_example


def _numbers(release: Path) -> int:
    """Of how many numbers an adapter consists."""
    return sum(tensor.numel() for tensor in load_file(release / "adapter_model.safetensors").values())


def _table(untouched: float, rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(
        title=f"Held-out loss on notes of {CLINICS[PRIVATE].name} (nats per token)", title_style="bold"
    )
    table.add_column("method")
    for title in ("untouched", "after public\nnotes", "after private\nsteps", "ε", "processor\nseconds"):
        table.add_column(title, justify="right")
    for name, row in rows.items():
        epsilon, spent = rounded_up(row["epsilon"]), f"{row['processor_seconds']:.0f}"
        table.add_row(name, f"{untouched:.3f}", f"{row['start']:.3f}", f"{row['end']:.3f}", epsilon, spent)
    table.caption = (
        "the same public notes, steps, sampling and noise for all; each rate was chosen on public notes"
    )
    return table


@in_style
def _picture(untouched: float, rows: dict[str, dict[str, Any]]) -> Any:
    """The loss after each evaluated step, one line a method."""
    figure, (axes,) = grid(1, 1, 6.4, 3.6)
    for (name, row), colour in zip(rows.items(), (ACCENT, SECOND, THIRD), strict=True):
        axes.plot(list(row["losses"]), list(row["losses"].values()), marker="o", color=colour, label=name)
    axes.axhline(untouched, color=MUTED, linestyle=":", label="untouched model")
    axes.set(xlabel="private steps", title=f"held-out loss (nats per token), ε = {EPSILON:g} at the end")
    axes.legend()
    return figure


def what_came_out(rows: dict[str, dict[str, Any]], numbers: int, sizes: Sizes) -> str:
    """In words: which method's held-out loss is lowest, what that says of the others, and what it does not say.

    rows: of `main`. numbers: of an adapter.
    """
    best, *others = sorted(rows, key=lambda name: rows[name]["end"])
    ends = " and ".join(f"{rows[name]['end']:.2f} ({name})" for name in others)
    said = [f"\n[bold]{best}[/] is ahead here, with {rows[best]['end']:.2f} against {ends}."]
    if best == "prism":
        said.append(
            f"It may move all {numbers:,} numbers of the adapter, though the noise is in all of them. The other two\n"
            f"move only where {sizes.texts} public notes point, with less noise, and the notes of other clinics say "
            f"little of what {CLINICS[PRIVATE].name} writes."
        )
    else:
        said.append(
            f"It moves only where {sizes.texts} public notes point, and has noise in as many numbers, not in the "
            f"{numbers:,} of the\nadapter: the public notes say enough of what {CLINICS[PRIVATE].name} writes."
        )
    worse = [name for name, row in rows.items() if row["end"] > row["start"]]
    if worse:
        said.append(f"The private steps of {' and '.join(worse)} did more harm than good.")
    said.append(
        "Another model, public texts nearer to the private ones, fewer notes or a smaller ε may turn it around:\n"
        "docs/few-records.md says what was measured. Compare on public texts before a budget is spent."
    )
    return "\n".join(said)


def _tell_where(
    console: Console, best: RunFolder, picture: Path, file: Path, together: str, seconds: float
) -> None:
    spent = f"{int(seconds // 60)}:{int(seconds % 60):02d}"
    console.print(
        f"\nThe loss from step to step: [bold]{picture}[/]\n"
        f"The adapter with the lowest loss: {best.release}\n"
        f"  its report: {best.release / 'report.html'}\n"
        f"The public notes: {file}\n"
        f"\nWho publishes one of the adapters pays ε = {EPSILON:g}; all three together cost ε = {together}:\n"
        f"  [green]privlora budget {' '.join(str(RunFolder(best.root.parent / name).ledger) for name in METHODS)}[/]\n"
        f"\nThat took {spent} minutes.",
        soft_wrap=True,
    )
