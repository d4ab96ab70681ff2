"""``privlora demo --federated``: five clinics alone and together at one epsilon, and what the server saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from privlora.accounting import epsilon
from privlora.api import train_run
from privlora.config import ModelSettings, Settings, settings_from
from privlora.demo import model_path
from privlora.demo.clinics import CLINICS, clinic_records
from privlora.demo.run import fresh_folder
from privlora.evaluation import evaluate_next_token
from privlora.federated.history import Round, RoundObserver
from privlora.federated.messages import SUM, Reply
from privlora.federated.plans import client_plan, with_local_method
from privlora.federated.run import federate, refuse_without_flower
from privlora.federated.words import what_colluding_costs
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder
from privlora.training.inputs import tokenise
from privlora.training.models import load_model

EPSILON, DELTA = 3.0, 1e-5
_RECORDS_PER_PATIENT = 1
_NAMES = [clinic.name for clinic in CLINICS]
# Chosen on notes of another seed, for all five together; who trains alone takes the same.
_RATE = 0.012
# Of a clinic's message, how many numbers are shown.
_SHOWN = 4


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


class Progress(RoundObserver):
    """A line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_round(self, done: Round, rounds: int) -> None:
        if done.step in (1, rounds) or done.step % 10 == 0:
            came = f"{len(done.answered)} of {len(done.asked)} clinics, {(done.down + done.up) / 1e6:.1f} MB"
            self._console.print(f"round {done.step}/{rounds}: {came}")

    def on_evaluation(self, step: int, loss: float) -> None:
        self._console.print(
            f"held-out loss after round {step}: {loss:.4f} nats per token (mean over records)"
        )


def epsilons(settings: Settings) -> tuple[str, str]:
    """Of a federation of shared noise: against the server and readers, and against one of its clients; rounded up."""
    settings = with_local_method(settings)
    plan = client_plan(settings)
    assert plan is not None
    stated = epsilon(plan.phases, plan.delta, adjacency=plan.adjacency)
    return rounded_up(stated), rounded_up(what_colluding_costs(settings, plan)[0]["epsilon"])


def main(output: Path | None, console: Console, sizes: Sizes | None = None) -> dict[str, Any]:
    """Train each of five clinics alone and all together, and compare, both at epsilon 3 for every patient against
    whoever gets the adapter.

    output: where all runs go; None takes runs/demo-federated, and replaces what an earlier demo left there. Returns the
    numbers that were shown. Raises RunError if ``output`` is given and not empty.
    """
    torch.set_num_threads(1)  # on a model this small a second thread mostly waits for the first
    refuse_without_flower()  # before the clinics train alone, which takes minutes
    sizes = sizes or Sizes()
    root = fresh_folder(output, Path("runs/demo-federated"))
    notes = {name: clinic_records(i, sizes.notes, seed=1) for i, name in enumerate(_NAMES)}
    held_out = {name: clinic_records(i, sizes.held_out, seed=3) for i, name in enumerate(_NAMES)}
    _introduce(console, notes, sizes)
    alone = {}
    console.rule(
        f"each clinic alone: for every patient ε = {EPSILON:g} against everybody else (δ = {DELTA:g})"
    )
    for name in _NAMES:
        alone[name] = train_run(_alone(root / "alone" / name, sizes), records=notes[name]).release
        console.print(f"{name}: {sizes.steps} private steps")
    together = _together(root / "together", sizes, private=True)
    readers, clinic = epsilons(together)
    console.rule(
        f"all five together: for every patient ε = {readers} against the server and readers, {clinic} against another "
        f"clinic (δ = {DELTA:g})"
    )
    seen = Seen()
    federated = federate(
        together,
        records=[note for name in _NAMES for note in notes[name]],
        evaluation=[note for name in _NAMES for note in held_out[name]],
        observer=Progress(console),
        watch=seen,
    )
    plain = Seen()
    federate(
        _together(root / "plain", sizes, private=False),
        records=[note for name in _NAMES for note in notes[name]],
        watch=plain,
    )
    losses = _losses(held_out, alone, federated.release)
    console.print(_table(losses, clinic))
    server = _server_saw(seen, plain)
    console.print(_messages(server))
    _who_sees(console, readers, clinic)
    _tell_where(console, RunFolder(root / "together"))
    return {
        "losses": losses,
        "epsilon": federated.epsilon,
        "epsilon_against_another_clinic": federated.epsilon_against_a_client,
        "delta": federated.delta,
        "server": server,
        "release": str(federated.release),
    }


def _introduce(console: Console, notes: dict[str, list[dict[str, str]]], sizes: Sizes) -> None:
    console.print(
        f"[bold]privlora demo --federated[/]: {len(_NAMES)} clinics with {sizes.notes} generated notes each, in a "
        "style of their own. No clinic shows its notes to anybody.\nA note reads:"
    )
    for clinic in CLINICS:
        console.print(f"  {clinic.name} ({clinic.speciality}): [italic]{notes[clinic.name][0]['text']}[/]")
    console.print()


def _settings(output: Path, privacy: dict[str, Any], **groups: Any) -> Settings:
    return settings_from(
        {
            "model": {"name": str(model_path()), "dtype": "float32"},
            "data": {"path": "(generated)", "max_length": 96},
            "privacy": privacy,
            "method": {"name": "prism", "learning_rate": _RATE, "relative_rate": False},
            "run": {
                "output": str(output),
                "label": "generated notes of five clinics",
                "tokens_per_micro_batch": 8192,
                "evaluate_every": 0,
                **groups.pop("run", {}),
            },
            **groups,
        }
    )


def _protected(patients: int, batch: float) -> dict[str, Any]:
    """Privacy settings at the demo's epsilon; the unit is a patient, whose records in one step are capped."""
    privacy: dict[str, Any] = {"target_epsilon": EPSILON, "delta": DELTA}
    privacy |= {"unit": "user", "user_column": "patient", "max_records_per_user": _RECORDS_PER_PATIENT}
    return privacy | {"public_dataset_size": patients, "expected_batch_size": batch}


def _alone(output: Path, sizes: Sizes) -> Settings:
    """One clinic's: the same sampling rate, number of steps and epsilon as in the federation."""
    privacy = _protected(sizes.patients, sizes.batch / len(_NAMES))
    return _settings(output, {**privacy, "steps": sizes.steps})


def _together(output: Path, sizes: Sizes, *, private: bool) -> Settings:
    """The federation of all; without privacy one round of it, whose messages are open."""
    patients, notes = sizes.patients * len(_NAMES), sizes.notes * len(_NAMES)
    federation = {
        "clients": len(_NAMES),
        "split": "column",
        "column": "clinic",
        "rule": "joint",
        "rounds": sizes.steps if private else 1,
    }
    if private:
        every = {"evaluate_every": max(1, sizes.steps // 2)}
        return _settings(output, _protected(patients, sizes.batch), federation=federation, run=every)
    open_mode = {"private": False, "public_dataset_size": notes, "expected_batch_size": sizes.batch}
    return _settings(output, open_mode, federation=federation)


def _losses(
    held_out: dict[str, list[dict[str, str]]], alone: dict[str, Path], together: Path
) -> dict[str, dict[str, float]]:
    """Loss per example on each clinic's held-out notes: before, alone (own and the others' adapters), together."""
    before, shared = _losses_of(None, held_out), _losses_of(together, held_out)
    single = {name: _losses_of(release, held_out) for name, release in alone.items()}
    return {
        name: {
            "before": before[name],
            "alone": single[name][name],
            "others": fmean(single[other][name] for other in _NAMES if other != name),
            "together": shared[name],
        }
        for name in _NAMES
    }


def _losses_of(adapter: Path | None, held_out: dict[str, list[dict[str, str]]]) -> dict[str, float]:
    from peft import PeftModel

    model, tokenizer = load_model(ModelSettings(name=str(model_path()), dtype="float32"))
    tuned = model if adapter is None else PeftModel.from_pretrained(model, str(adapter))
    data = _settings(
        Path("unused"), {"private": False, "public_dataset_size": 1, "expected_batch_size": 1, "steps": 1}
    ).data
    return {
        name: evaluate_next_token(tuned, tokenise(notes, data, tokenizer)).loss_per_example
        for name, notes in held_out.items()
    }


def _table(losses: dict[str, dict[str, float]], clinic: str) -> Table:
    table = Table(title="Held-out loss on each clinic's notes (nats per token)", title_style="bold")
    columns = {"before": "before", "others": "another clinic's\nadapter", "alone": "its own adapter,\nalone"}
    columns["together"] = "adapter of all,\ntogether"
    table.add_column("notes of")
    for title in columns.values():
        table.add_column(title, justify="right")
    for name in _NAMES:
        table.add_row(name, *(f"{losses[name][column]:.3f}" for column in columns))
    table.add_section()
    table.add_row(
        "mean of five", *(f"{fmean(row[column] for row in losses.values()):.3f}" for column in columns)
    )
    table.caption = (
        f"every trained adapter at ε = {EPSILON:g} for every patient against whoever gets it (together {clinic} "
        "against another of the five), by the same steps and a rate that was chosen for training together"
    )
    return table


def _server_saw(masked: Seen, plain: Seen) -> list[dict[str, Any]]:
    """Of each clinic's first message, numbers and how even they are, beside those of the open federation."""
    rows = []
    for name, other in zip(masked.vectors, plain.vectors, strict=True):
        vector, sums = masked.vectors[name], plain.vectors[other]
        rows.append(
            {
                "masked": [int(value) for value in vector[:_SHOWN]],
                "p_uniform": uniformity(vector),
                "plain": [float(value) for value in sums[:_SHOWN]],
            }
        )
    return rows


def uniformity(vector: np.ndarray) -> float:
    """p of the chi-square test that the leading bytes of ring integers are uniform; small means that they are not.

    vector: (entries,) uint32.
    """
    from scipy.stats import chisquare

    return float(chisquare(np.bincount(vector >> np.uint32(24), minlength=256)).pvalue)


def _messages(server: list[dict[str, Any]]) -> Table:
    table = Table(
        title="What the server got from each clinic in round 1: its first numbers", title_style="bold"
    )
    table.add_column("clinic")
    table.add_column("masked, as it was sent")
    table.add_column("leading bytes uniform?", justify="right")
    table.add_column("an open federation would have sent")
    for number, row in enumerate(server, start=1):
        table.add_row(
            str(number),
            " ".join(f"{value:08x}" for value in row["masked"]),
            f"p = {row['p_uniform']:.2f}",
            " ".join(f"{value:+.4f}" for value in row["plain"]),
        )
    table.caption = (
        "masks cancel in the sum of all five, which also holds the noise; p is uniform itself if they are"
    )
    return table


def _who_sees(console: Console, readers: str, clinic: str) -> None:
    console.print(
        "\nWho saw what, and ε for every patient against it:\n"
        f"  a clinic     {clinic}  its own notes and its own fifth of the noise, and the adapter after each round\n"
        f"  the server   {readers}  masked vectors, and the noisy sum of all five in each round\n"
        f"  the public   {readers}  the adapter, the ledgers and the report\n"
    )


def _tell_where(console: Console, folder: RunFolder) -> None:
    console.print(
        f"The adapter of all five, safe to publish: [bold]{folder.release}[/]\n"
        f"  the report: {folder.release / 'report.html'}\n"
        f"  how to load it: {folder.release / 'README.md'}\n"
        "\nWrite its report again, from its own files:\n"
        f"  [green]privlora report {folder.root}[/]",
        soft_wrap=True,
    )
