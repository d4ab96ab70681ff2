"""``privlora demo``: the main job on the embedded model and data, private and not, with what each run memorised."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from privlora.accounting import read_ledger
from privlora.api import Result, train_run
from privlora.auditing.exposure import greedy_extraction, log_likelihood_scorer, measure_exposure
from privlora.config import Settings, settings_from
from privlora.demo import Canary, make_canaries, model_path, private_records
from privlora.errors import RunError
from privlora.training.assembly import plan_privacy
from privlora.training.files import RunFolder, append_line, read_lines
from privlora.training.progress import RichObserver

RECORDS, PATIENTS, HELD_OUT, CANARIES = 2000, 800, 200, 8
EPSILON, DELTA = 3.0, 1e-5
# In patients, whose records in one step are capped; the plain run goes through the records often enough to memorise.
_PRIVATE_STEPS, _PRIVATE_BATCH, _RECORDS_PER_PATIENT = 45, 64, 2
_PLAIN_STEPS, _PLAIN_BATCH = 450, 32


def main(output: Path | None, console: Console) -> dict[str, Any]:
    """Train on generated clinic notes with PRISM at epsilon 3, then without privacy, and compare.

    output: where both runs go; None takes runs/demo, and replaces what an earlier demo left there. Returns the numbers
    that were shown. Raises RunError if ``output`` is given and not empty.
    """
    torch.set_num_threads(1)  # on a model this small a second thread mostly waits for the first
    root = fresh_folder(output, Path("runs/demo"))
    canaries = make_canaries(CANARIES, seed=11)
    records = private_records(RECORDS, seed=1) + [r for canary in canaries for r in canary.records()]
    held_out: list[dict[str, str]] = private_records(HELD_OUT, seed=2)
    console.print(
        f"[bold]privlora demo[/]: {len(records)} generated clinic notes, {CANARIES} of whose patients have a secret "
        f"access code.\nA note reads: [italic]{records[0]['text']}[/]\n"
        f"A canary reads: [italic]{canaries[0].texts[0]}[/]\n"
    )
    shown = {"before": {"loss": None, **_leakage(str(model_path()), None, canaries)}}
    runs: dict[str, Result] = {}
    for name, title in (
        ("private", f"PRISM, ε = {EPSILON:g} for every patient (δ = {DELTA:g})"),
        ("non-private", "the same data without privacy"),
    ):
        console.rule(title)
        settings = _settings(root / name, private=name == "private")
        plan = plan_privacy(settings)[0] if settings.privacy.private else None
        with RichObserver(console, plan) as observer:
            runs[name] = train_run(settings, records=records, evaluation=held_out, observer=observer)
        losses = {
            row["step"]: row["loss_per_example"] for row in read_lines(RunFolder(root / name).evaluations)
        }
        shown["before"]["loss"] = losses[0]
        shown[name] = {
            "loss": losses[max(losses)],
            **_leakage(str(model_path()), runs[name].release, canaries),
        }
    shown["private"] |= {"epsilon": runs["private"].epsilon, "delta": runs["private"].delta}
    secrets = root / "secrets.jsonl"
    for canary in canaries:
        kept = {"prefix": canary.prefix, "secret": canary.secret, "references": canary.references}
        append_line(secrets, kept)
    console.print(_table(shown))
    _tell_where(console, RunFolder(root / "private"), secrets)
    return {**shown, "release": str(runs["private"].release)}


def _settings(output: Path, *, private: bool) -> Settings:
    privacy: dict[str, Any]
    if private:
        privacy = {"target_epsilon": EPSILON, "delta": DELTA, "unit": "user", "user_column": "patient"}
        privacy |= {"public_dataset_size": PATIENTS, "max_records_per_user": _RECORDS_PER_PATIENT}
        privacy |= {"steps": _PRIVATE_STEPS, "expected_batch_size": _PRIVATE_BATCH}
    else:
        privacy = {"private": False, "public_dataset_size": RECORDS}
        privacy |= {"steps": _PLAIN_STEPS, "expected_batch_size": _PLAIN_BATCH}
    return settings_from(
        {
            "model": {"name": str(model_path()), "dtype": "float32"},
            "data": {"path": "(generated)", "max_length": 96},
            "privacy": privacy,
            "method": {"name": "prism"}
            if private
            else {"name": "adamw", "learning_rate": 1e-2, "schedule": "linear"},
            "run": {"output": str(output), "label": "generated clinic notes", "tokens_per_micro_batch": 8192},
        }
    )


def _leakage(model: str, adapter: Path | None, canaries: list[Canary]) -> dict[str, Any]:
    """Exposure of the canaries' secrets and how many greedy decoding recites."""
    from peft import PeftModel

    tokenizer = AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    tuned = base if adapter is None else PeftModel.from_pretrained(base, str(adapter))
    report = measure_exposure(canaries, log_likelihood_scorer(tuned, tokenizer))
    extracted = sum(greedy_extraction(tuned, tokenizer, canaries))
    return {
        "exposure": report.mean,
        "exposure_chance": report.chance,
        "exposure_ceiling": report.ceiling,
        "extracted": extracted,
    }


def _table(shown: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="What was learnt, and what leaked", title_style="bold")
    table.add_column("")
    for name in ("before", "private", "non-private"):
        table.add_column({"private": f"private, ε = {EPSILON:g}"}.get(name, name), justify="right")
    rows = [
        ("held-out loss (nats per token)", lambda r: f"{r['loss']:.3f}"),
        (f"secrets recited, of {CANARIES}", lambda r: str(r["extracted"])),
        ("exposure of secrets (bits)", lambda r: f"{r['exposure']:.1f}"),
    ]
    for label, cell in rows:
        table.add_row(label, *(cell(shown[name]) for name in ("before", "private", "non-private")))
    first = shown["before"]
    chance, ceiling = first["exposure_chance"], first["exposure_ceiling"]
    table.caption = f"exposure: {chance:.1f} bits is chance, {ceiling:.0f} is memorised"
    return table


def _tell_where(console: Console, folder: RunFolder, secrets: Path) -> None:
    summary = read_ledger(folder.ledger)
    console.print(
        f"\nThe private adapter, safe to publish: [bold]{folder.release}[/]\n"
        f"  the ledger: {folder.ledger} ({summary.charges} charged steps)\n"
        f"  the report: {folder.release / 'report.html'}\n"
        "\nUse it:\n"
        "  [green]from peft import PeftModel[/]\n"
        "  [green]from transformers import AutoModelForCausalLM, AutoTokenizer[/]\n"
        f'  [green]base = AutoModelForCausalLM.from_pretrained("{model_path()}")[/]\n'
        f'  [green]model = PeftModel.from_pretrained(base, "{folder.release}")[/]\n'
        f'  [green]tokenizer = AutoTokenizer.from_pretrained("{model_path()}")[/]\n'
        "\nAttack it, with the planted secrets at hand:\n"
        f"  [green]privlora audit {folder.root} --secrets {secrets}[/]",
        soft_wrap=True,
    )


def fresh_folder(output: Path | None, usual: Path) -> Path:
    """Where a demo writes: ``output``, or the usual place, which is emptied. RunError if ``output`` is not empty."""
    if output is not None:
        if output.exists() and any(output.iterdir()):
            raise RunError(f"{str(output)!r} is not empty", fix="give a new folder")
        return output
    root = usual
    if root.exists():
        # The demo's data are generated, so nothing is forgotten; the rename keeps a half-deleted run out of the way.
        stale = Path(tempfile.mkdtemp(prefix=".demo-", dir=root.parent))
        root.rename(stale / "old")
        shutil.rmtree(stale)
    return root
