"""``privlora demo --federated``: five clinics alone and together at one epsilon, and what the server saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import chisquare

from privlora.accounting import epsilon
from privlora.api import train_run
from privlora.config import Settings
from privlora.demo import script
from privlora.demo.corpus import CLINICS, clinic_records
from privlora.demo.script import DELTA, EPSILON, PROMISE, Notes
from privlora.federated.messages import SUM, Reply
from privlora.federated.plans import client_plan, with_local_method
from privlora.federated.progress import RoundProgress
from privlora.federated.run import federate
from privlora.federated.words import InWords
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder

_NAMES = [clinic.name for clinic in CLINICS]
# Chosen on notes of another seed, for all five together; who trains alone takes the same.
_RATE = 0.012
# Of a clinic's message, how many numbers are shown.
_SHOWN = 4
_COLUMNS = {
    "before": "before",
    "others": "another clinic's\nadapter",
    "alone": "its own adapter,\nalone",
    "together": "adapter of all,\ntogether",
}


@dataclass(frozen=True)
class Sizes:
    """notes, patients, held_out: of one clinic. steps: private ones. batch: patients of all in one, expected."""

    notes: int = 400
    patients: int = 160
    held_out: int = 30
    steps: int = 40
    batch: int = 60


@dataclass
class Seen:
    """The first vector of each clinic that reached the server, by the clinic's name."""

    vectors: dict[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if SUM in reply.tensors and reply.client not in self.vectors:
                self.vectors[reply.client] = reply.tensors[SUM].numpy().copy()


def main(output: Path | None, console: Console, sizes: Sizes | None = None) -> dict[str, Any]:
    """Train each of five clinics alone and all together, and compare, both at epsilon 3 for every patient against
    whoever gets the adapter.

    output: where all runs go; None takes runs/demo-federated, and replaces what an earlier demo left there. Returns the
    numbers that were shown. Raises RunError if ``output`` is given and not empty.
    """
    sizes = sizes or Sizes()
    root = script.fresh_folder(output, Path("runs/demo-federated"))
    notes = {name: clinic_records(i, sizes.notes, seed=1) for i, name in enumerate(_NAMES)}
    held_out = {name: clinic_records(i, sizes.held_out, seed=3) for i, name in enumerate(_NAMES)}
    everyones = [note for own in notes.values() for note in own]
    _introduce(console, notes, sizes)
    alone = {}
    console.rule(
        f"each clinic alone: for every patient ε = {EPSILON:g} against everybody else (δ = {DELTA:g})"
    )
    for name in _NAMES:
        alone[name] = train_run(_alone(root / "alone" / name, sizes), records=notes[name]).release
        console.print(f"{name}: {sizes.steps} private steps")
    together = _together(root / "together", sizes, private=True)
    readers, clinic = _epsilons(together)
    console.rule(
        f"all five together: for every patient ε = {readers} against the server and readers, {clinic} against another "
        f"clinic (δ = {DELTA:g})"
    )
    seen, plain = Seen(), Seen()
    with RoundProgress(console, private=True) as progress:
        federated = federate(
            together,
            records=everyones,
            evaluation=[note for own in held_out.values() for note in own],
            observer=progress,
            watch=seen,
        )
    federate(_together(root / "plain", sizes, private=False), records=everyones, watch=plain)
    losses = _losses(held_out, alone, federated.release)
    server = _server_saw(seen, plain)
    console.print(_table(losses, clinic), _messages(server))
    _who_sees(console, readers, clinic, RunFolder(root / "together"))
    return {
        "losses": losses,
        "epsilon": federated.epsilon,
        "epsilon_against_another_clinic": federated.epsilon_against_a_client,
        "delta": federated.delta,
        "server": server,
        "release": str(federated.release),
    }


def _epsilons(settings: Settings) -> tuple[str, str]:
    """Of a federation of shared noise: against the server and readers, and against one of its clients; rounded up."""
    settings = with_local_method(settings)
    plan = client_plan(settings)
    assert plan is not None
    stated = epsilon(plan.phases, plan.delta, adjacency=plan.adjacency)
    return rounded_up(stated), rounded_up(InWords(settings, plan).colluding[0]["epsilon"])


def _introduce(console: Console, notes: dict[str, Notes], sizes: Sizes) -> None:
    console.print(
        f"[bold]privlora demo --federated[/]: {len(_NAMES)} clinics with {sizes.notes} generated notes each, in a "
        "style of their own. No clinic shows its notes to anybody.\nA note reads:"
    )
    for clinic in CLINICS:
        console.print(f"  {clinic.name} ({clinic.speciality}): [italic]{notes[clinic.name][0]['text']}[/]")
    console.print()


def _settings(output: Path, privacy: dict[str, Any], *, every: int = 0, **groups: Any) -> Settings:
    method = {"name": "prism", "learning_rate": _RATE, "relative_rate": False}
    return script.settings_of(output, "generated notes of five clinics", privacy, method, every, **groups)


def _protected(patients: int, batch: float) -> dict[str, Any]:
    """Privacy settings at the demo's epsilon; the unit is a patient, of whose records a step takes one."""
    privacy = {**PROMISE, "unit": "user", "user_column": "patient", "max_records_per_user": 1}
    return privacy | {"public_dataset_size": patients, "expected_batch_size": batch}


def _alone(output: Path, sizes: Sizes) -> Settings:
    """One clinic's: the same sampling rate, number of steps and epsilon as in the federation."""
    privacy = _protected(sizes.patients, sizes.batch / len(_NAMES))
    return _settings(output, privacy | {"steps": sizes.steps})


def _together(output: Path, sizes: Sizes, *, private: bool) -> Settings:
    """The federation of all; without privacy one round of it, whose messages are open."""
    federation = {"clients": len(_NAMES), "column": "clinic", "rule": "joint"}
    if private:
        privacy = _protected(sizes.patients * len(_NAMES), sizes.batch)
        rounds, every = sizes.steps, max(1, sizes.steps // 2)
    else:
        privacy = {"private": False, "public_dataset_size": sizes.notes * len(_NAMES)}
        privacy["expected_batch_size"] = sizes.batch
        rounds, every = 1, 0
    return _settings(output, privacy, every=every, federation=federation | {"rounds": rounds})


def _losses(
    held_out: dict[str, Notes], alone: dict[str, Path], together: Path
) -> dict[str, dict[str, float]]:
    """Loss per example on each clinic's held-out notes: before, alone (own and the others' adapters), together."""
    before, shared = script.losses_of(None, held_out), script.losses_of(together, held_out)
    single = {name: script.losses_of(release, held_out) for name, release in alone.items()}
    return {
        name: {
            "before": before[name],
            "alone": single[name][name],
            "others": fmean(single[other][name] for other in _NAMES if other != name),
            "together": shared[name],
        }
        for name in _NAMES
    }


def _table(losses: dict[str, dict[str, float]], clinic: str) -> Table:
    mean = {column: fmean(row[column] for row in losses.values()) for column in _COLUMNS}
    return script.table(
        "Held-out loss on each clinic's notes (nats per token)",
        ("notes of", *_COLUMNS.values()),
        (
            (name, *(f"{row[column]:.3f}" for column in _COLUMNS))
            for name, row in {**losses, "mean of five": mean}.items()
        ),
        f"every trained adapter at ε = {EPSILON:g} for every patient against whoever gets it (together {clinic} "
        "against another of the five), by the same steps and a rate that was chosen for training together",
    )


def _server_saw(masked: Seen, plain: Seen) -> list[dict[str, Any]]:
    """Of each clinic's first message, numbers and how even they are, next to those of the open federation."""
    return [
        {
            "masked": [int(value) for value in vector[:_SHOWN]],
            "p_uniform": uniformity(vector),
            "plain": [float(value) for value in sums[:_SHOWN]],
        }
        for vector, sums in zip(masked.vectors.values(), plain.vectors.values(), strict=True)
    ]


def uniformity(vector: np.ndarray) -> float:
    """p of the chi-square test that the leading bytes of ring integers are uniform; small means that they are not.

    vector: (entries,) uint32.
    """
    return float(chisquare(np.bincount(vector >> np.uint32(24), minlength=256)).pvalue)


def _messages(server: list[dict[str, Any]]) -> Table:
    return script.table(
        "What the server got from each clinic in round 1: its first numbers",
        ("clinic", "masked, as it was sent", "leading bytes uniform?", "an open federation would have sent"),
        (
            (
                str(number),
                " ".join(f"{value:08x}" for value in row["masked"]),
                f"p = {row['p_uniform']:.2f}",
                " ".join(f"{value:+.4f}" for value in row["plain"]),
            )
            for number, row in enumerate(server, start=1)
        ),
        "masks cancel in the sum of all five, which also holds the noise; p is uniform itself if they are",
    )


def _who_sees(console: Console, readers: str, clinic: str, folder: RunFolder) -> None:
    console.print(
        "\nWho saw what, and ε for every patient against it:\n"
        f"  a clinic     {clinic}  its own notes and its own fifth of the noise, and the adapter after each round\n"
        f"  the server   {readers}  masked vectors, and the noisy sum of all five in each round\n"
        f"  the public   {readers}  the adapter, the ledgers and the report\n"
        f"\nThe adapter of all five, safe to publish: [bold]{folder.release}[/]\n"
        f"  the report: {folder.release / 'report.html'}\n"
        f"  how to load it: {folder.release / 'README.md'}\n"
        "\nWrite its report again, from its own files:\n"
        f"  [green]privlora report {folder.root}[/]",
        soft_wrap=True,
    )
