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

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from privlora.accounting import compose_ledgers
from privlora.config import Settings
from privlora.demo import script
from privlora.demo.corpus import CLINICS, clinic_records
from privlora.demo.script import DELTA, EPSILON, PROMISE, Notes
from privlora.pages.figures import MUTED, grid, in_style, png
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder

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
    begun, sizes = time.perf_counter(), sizes or Sizes()
    root = script.fresh_folder(output, Path("runs/demo-few"))
    notes, held_out = notes_of_patients(sizes.notes, seed=1), notes_of_patients(sizes.held_out, seed=3)
    public = public_notes(sizes)
    root.mkdir(parents=True, exist_ok=True)
    file, picture = root / "public_notes.jsonl", root / "losses.png"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in public), encoding="utf-8")
    _introduce(console, notes[0]["text"], public[0], sizes)
    untouched = script.losses_of(None, {"held-out": held_out})["held-out"]
    rows: dict[str, dict[str, Any]] = {}
    for name, title in METHODS.items():
        started = time.process_time()
        result, losses = script.trained(
            console, title, _settings(root / name, name, file, sizes), notes, held_out
        )
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
    picture.write_bytes(png(_picture(untouched, rows)))
    console.print(_table(untouched, rows))
    best = RunFolder(root / min(rows, key=lambda name: rows[name]["end"]))
    adapter = load_file(best.release / "adapter_model.safetensors")
    numbers = sum(tensor.numel() for tensor in adapter.values())
    console.print(what_came_out(rows, numbers, sizes), soft_wrap=True)
    seconds = time.perf_counter() - begun
    _show_where(console, best, picture, file, rounded_up(together), seconds)
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


def notes_of_patients(count: int, seed: int) -> Notes:
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
    synthesis = {"file": str(public), "seeds": sizes.texts // 2}
    synthesis |= {"warm_start_epochs": sizes.epochs, "warm_start_learning_rate": _WARM_RATE}
    privacy = {**PROMISE, "public_dataset_size": sizes.notes, "expected_batch_size": sizes.batch}
    return script.settings_of(
        output,
        "generated notes of one clinic",
        privacy | {"steps": sizes.steps},
        {"name": method, "learning_rate": _RATES[method], "relative_rate": False},
        every=max(1, sizes.steps // 4),
        synthesis=synthesis,
    )


def _table(untouched: float, rows: dict[str, dict[str, Any]]) -> Table:
    return script.table(
        f"Held-out loss on notes of {CLINICS[PRIVATE].name} (nats per token)",
        ("method", "untouched", "after public\nnotes", "after private\nsteps", "ε", "processor\nseconds"),
        (
            (
                name,
                *(f"{loss:.3f}" for loss in (untouched, row["start"], row["end"])),
                rounded_up(row["epsilon"]),
                f"{row['processor_seconds']:.0f}",
            )
            for name, row in rows.items()
        ),
        "the same public notes, steps, sampling and noise for all; each rate was chosen on public notes",
    )


@in_style
def _picture(untouched: float, rows: dict[str, dict[str, Any]]) -> Any:
    """The loss after each evaluated step, one line a method."""
    figure, (axes,) = grid(1, 1, 6.4, 3.6)
    axes.axhline(untouched, color=MUTED, linestyle=":", label="untouched model")
    curves = {name: row["losses"] for name, row in rows.items()}
    script.draw_losses(
        axes, curves, f"held-out loss (nats per token), ε = {EPSILON:g} at the end", "private steps"
    )
    return figure


def what_came_out(rows: dict[str, dict[str, Any]], numbers: int, sizes: Sizes) -> str:
    """In words: which method's held-out loss is lowest, what that says of the others, and what it does not say.

    rows: of `main`. numbers: of an adapter.
    """
    best, *others = sorted(rows, key=lambda name: rows[name]["end"])
    ends = " and ".join(f"{rows[name]['end']:.2f} ({name})" for name in others)
    clinic = CLINICS[PRIVATE].name
    said = [f"\n[bold]{best}[/] is ahead here, with {rows[best]['end']:.2f} against {ends}."]
    if best == "prism":
        said.append(
            f"It may move all {numbers:,} numbers of the adapter, though the noise is in all of them. The other two\n"
            f"move only where {sizes.texts} public notes point, with less noise, and the notes of other clinics say "
            f"little of what {clinic} writes."
        )
    else:
        said.append(
            f"It moves only where {sizes.texts} public notes point, and has noise in as many numbers, not in the "
            f"{numbers:,} of the\nadapter: the public notes say enough of what {clinic} writes."
        )
    worse = [name for name, row in rows.items() if row["end"] > row["start"]]
    if worse:
        said.append(f"The private steps of {' and '.join(worse)} did more harm than good.")
    said.append(
        "Another model, public texts nearer to the private ones, fewer notes or a smaller ε may turn it around:\n"
        "docs/few-records.md says what was measured. Compare on public texts before a budget is spent."
    )
    return "\n".join(said)


def _show_where(
    console: Console, best: RunFolder, picture: Path, file: Path, together: str, seconds: float
) -> None:
    ledgers = " ".join(str(RunFolder(best.root.parent / name).ledger) for name in METHODS)
    console.print(
        f"\nThe loss from step to step: [bold]{picture}[/]\n"
        f"The adapter with the lowest loss: {best.release}\n"
        f"  its report: {best.release / 'report.html'}\n"
        f"The public notes: {file}\n"
        f"\nWho publishes one of the adapters pays ε = {EPSILON:g}; all three together cost ε = {together}:\n"
        f"  [green]privlora budget {ledgers}[/]\n"
        f"\nThat took {int(seconds // 60)}:{int(seconds % 60):02d} minutes.",
        soft_wrap=True,
    )
