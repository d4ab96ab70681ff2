"""``privlora demo``: the main job on generated data, private and not, and what each model recites."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from privlora.accounting import read_ledger
from privlora.api import Result, train_run
from privlora.auditing.exposure import greedy_extraction, log_likelihood_scorer, measure_exposure
from privlora.config import ModelSettings, Settings, settings_from
from privlora.data.examples import encode_prompts
from privlora.demo import Canary, make_canaries, model_path, private_records
from privlora.errors import RunError
from privlora.evaluation.generation import generate
from privlora.pages.figures import ACCENT, INK, MUTED, SECOND, WIDTH, grid, in_style, png
from privlora.training.files import RunFolder, append_line, read_lines
from privlora.training.model_names import refuse_no_model
from privlora.training.models import load_model
from privlora.training.progress import RichObserver
from privlora.training.promise import plan_privacy

RECORDS, PATIENTS, HELD_OUT, CANARIES = 2000, 800, 200, 8
EPSILON, DELTA = 3.0, 1e-5
_PRIVATE_BATCH, _RECORDS_PER_PATIENT = 64, 2  # in patients, whose records in one step are capped
_PLAIN_BATCH = 32
_LOOKS = 5  # at the held-out loss of a run, after the one before it
_BAR = 16  # characters, of the largest loss
_WORDS = 16  # tokens of an answer
TITLES = {
    "before": "untouched model",
    "private": f"private model, ε = {EPSILON:g}",
    "non-private": "non-private model",
}


@dataclass(frozen=True)
class Story:
    """What both runs train, and how. auto: group auto of the private run. plain_rate: of AdamW, whose steps go through
    the records often enough to memorise."""

    model: dict[str, Any]
    private_steps: int
    method: dict[str, Any]
    plain_steps: int
    plain_rate: float
    auto: dict[str, Any] | None = None


def story_of(model: str | None) -> Story:
    """None: of the embedded model, with the settings that the demo was measured in; of another those of `init`."""
    if model is None:
        embedded = {"name": str(model_path()), "dtype": "float32"}
        return Story(embedded, 45, {"name": "prism", "relative_rate": False}, 320, 2e-2)
    return Story({"name": model}, 25, {"name": "prism"}, 120, 1e-3, {"all": True})


def main(output: Path | None, console: Console, model: str | None = None) -> dict[str, Any]:
    """Train on generated clinic notes with PRISM at epsilon 3, then without privacy, and compare.

    output: where both runs go; None takes runs/demo, and replaces what an earlier demo left there. model: a local
    folder or hub name of a causal LM; None for the embedded one. Returns the numbers that were shown. Raises RunError
    if ``output`` is given and not empty, and ModelError.
    """
    story = story_of(model)
    if model is None:
        torch.set_num_threads(1)  # on a model this small a second thread mostly waits for the first
    refuse_no_model(ModelSettings(**story.model))
    root = fresh_folder(output, Path("runs/demo"))
    canaries = make_canaries(CANARIES, seed=11)
    records = private_records(RECORDS, seed=1) + [r for canary in canaries for r in canary.records()]
    held_out: list[dict[str, str]] = private_records(HELD_OUT, seed=2)
    console.print(
        f"[bold]privlora demo[/]: {len(records)} generated clinic notes, {CANARIES} of whose patients have a secret "
        f"access code.\nA note reads: [italic]{records[0]['text']}[/]\n"
        f"One with a code:  [italic]{canaries[0].texts[0]}[/]\n"
        "The same model learns from them twice, with privacy and without; then both are asked for the codes.\n"
    )
    shown: dict[str, dict[str, Any]] = {"before": _leakage(story, None, canaries)}
    curves: dict[str, dict[int, float]] = {}
    runs: dict[str, Result] = {}
    for name, title in (
        ("private", f"PRISM, ε = {EPSILON:g} for every patient (δ = {DELTA:g})"),
        ("non-private", "the same data without privacy"),
    ):
        console.rule(title)
        settings = _settings(story, root / name, private=name == "private")
        plan = plan_privacy(settings)[0] if settings.privacy.private else None
        with RichObserver(console, plan, timed=True) as observer:
            runs[name] = train_run(settings, records=records, evaluation=held_out, observer=observer)
        losses = {
            row["step"]: row["loss_per_example"] for row in read_lines(RunFolder(root / name).evaluations)
        }
        curves[name] = losses
        shown["before"]["loss"] = losses[0]
        shown[name] = {"loss": losses[max(losses)], **_leakage(story, runs[name].release, canaries)}
    shown["private"] |= {"epsilon": runs["private"].epsilon, "delta": runs["private"].delta}
    secrets = root / "secrets.jsonl"
    for canary in canaries:
        kept = {"prefix": canary.prefix, "secret": canary.secret, "references": canary.references}
        append_line(secrets, kept)
    asked = most_telling(shown, canaries)
    answers = {name: row["answers"][asked] for name, row in shown.items()}
    picture = root / "picture.png"
    picture.write_bytes(png(draw(curves, canaries[asked], answers)))
    console.print(_curve(curves))
    console.print(_table(shown))
    console.print(_answers(canaries[asked], answers))
    _tell_where(console, story.model["name"], RunFolder(root / "private"), secrets, picture)
    return {**shown, "curves": curves, "release": str(runs["private"].release), "picture": str(picture)}


def _settings(story: Story, output: Path, *, private: bool) -> Settings:
    privacy: dict[str, Any]
    if private:
        privacy = {"target_epsilon": EPSILON, "delta": DELTA, "unit": "user", "user_column": "patient"}
        privacy |= {"public_dataset_size": PATIENTS, "max_records_per_user": _RECORDS_PER_PATIENT}
        privacy |= {"steps": story.private_steps, "expected_batch_size": _PRIVATE_BATCH}
    else:
        privacy = {"private": False, "public_dataset_size": RECORDS}
        privacy |= {"steps": story.plain_steps, "expected_batch_size": _PLAIN_BATCH}
    return settings_from(
        {
            "model": story.model,
            "data": {"path": "(generated)", "max_length": 96},
            "privacy": privacy,
            "method": story.method
            if private
            else {"name": "adamw", "learning_rate": story.plain_rate, "schedule": "linear"},
            "auto": story.auto if private else None,
            "run": {
                "output": str(output),
                "label": "generated clinic notes",
                "tokens_per_micro_batch": 8192,
                "evaluate_every": (story.private_steps if private else story.plain_steps) // _LOOKS,
            },
        }
    )


def _leakage(story: Story, adapter: Path | None, canaries: list[Canary]) -> dict[str, Any]:
    """Exposure of the canaries' secrets, how many greedy decoding recites, and what it writes for each."""
    from peft import PeftModel

    base, tokenizer = load_model(ModelSettings(**story.model))
    tuned = base if adapter is None else PeftModel.from_pretrained(base, str(adapter))
    report = measure_exposure(canaries, log_likelihood_scorer(tuned, tokenizer))
    extracted = sum(greedy_extraction(tuned, tokenizer, canaries))
    return {
        "exposure": report.mean,
        "exposure_chance": report.chance,
        "exposure_ceiling": report.ceiling,
        "extracted": extracted,
        "answers": [_answer(tuned, tokenizer, canary.prefix) for canary in canaries],
    }


def _answer(model: Any, tokenizer: Any, prefix: str) -> str:
    """What greedy decoding writes after the prefix: a few words, without a line's end in them."""
    asked = encode_prompts([prefix.rstrip()], tokenizer, max_length=512)
    return " ".join(generate(model, tokenizer, asked, max_new_tokens=_WORDS)[0].split())


def most_telling(shown: dict[str, dict[str, Any]], canaries: list[Canary]) -> int:
    """Which secret is shown: the first that the plain model recites and the private one does not, else the first."""

    def recited(name: str, index: int) -> bool:
        return canaries[index].secret in shown[name]["answers"][index]

    telling = (i for i in range(len(canaries)) if recited("non-private", i) and not recited("private", i))
    return next(telling, 0)


def _curve(curves: dict[str, dict[int, float]]) -> Table:
    """The held-out loss over each run, as bars from zero: they work on any terminal, and in a log."""
    table = Table(title="Held-out loss on the way (nats per token)", title_style="bold", box=None)
    table.add_column("of the run", justify="right")
    for name, style in (("private", "green"), ("non-private", "red")):
        table.add_column({"private": f"private, ε = {EPSILON:g}"}.get(name, name), style=style)
    most = max(loss for losses in curves.values() for loss in losses.values())
    for row in zip(*(sorted(losses.items()) for losses in curves.values()), strict=True):
        bars = [f"{loss:.3f} {'█' * max(1, round(_BAR * loss / most))}" for _, loss in row]
        table.add_row(f"{row[0][0] / max(curves['private']):.0%}", *bars)
    return table


def _answers(canary: Canary, answers: dict[str, str]) -> Table:
    table = Table(title="Asked for one patient's code", title_style="bold", show_header=False)
    table.add_row("asked", Text(f"{canary.prefix}…"))
    table.add_row("in the private notes", Text(canary.secret))
    for name, title in TITLES.items():
        answer = Text(answers[name])
        answer.highlight_words([canary.secret], "bold red")
        note = "  ← recited" if canary.secret in answers[name] else ""
        table.add_row(f"the {title} answers", answer.append(note, "bold red"))
    return table


@in_style
def draw(curves: dict[str, dict[int, float]], canary: Canary, answers: dict[str, str]) -> Any:
    """Both runs' held-out loss, and beside it what each model writes when it is asked for one code.

    curves: run -> step -> nats per token. answers: by the keys of TITLES.
    """
    figure, (losses, words) = grid(1, 2, WIDTH, 3.3, gridspec_kw={"width_ratios": [1, 1.35]})
    for name, colour in (("private", ACCENT), ("non-private", SECOND)):
        last = max(curves[name])
        share = [100 * step / last for step in curves[name]]
        losses.plot(share, list(curves[name].values()), marker="o", color=colour, label=TITLES[name])
    losses.set(xlabel="% of the run", title="held-out loss (nats per token)")
    losses.set_ylim(bottom=0)
    losses.legend()
    words.set_axis_off()
    words.set(xlim=(0, 1), ylim=(0, 1))
    lines = [("asked for one patient's access code", f"{canary.prefix}…", False)]
    for name, title in TITLES.items():
        recited = canary.secret in answers[name]
        lines.append((f"{title}: the secret, word for word" if recited else title, answers[name], recited))
    for height, (title, said, recited) in zip((0.9, 0.62, 0.35, 0.08), lines, strict=True):
        words.text(0, height + 0.09, title, color=SECOND if recited else MUTED)
        words.text(
            0.01,
            height,
            textwrap.shorten(said, 58, placeholder=" …"),
            family="monospace",
            fontsize=10.5,
            color=SECOND if recited else INK,
            weight="bold" if recited else "normal",
        )
    return figure


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


def _tell_where(console: Console, model: str, folder: RunFolder, secrets: Path, picture: Path) -> None:
    """Where everything lies, and a program that runs as it is pasted: without a margin."""
    summary = read_ledger(folder.ledger)
    console.print(
        f"\nAll of it as a picture: {picture}\n"
        f"The private adapter, safe to publish: [bold]{folder.release}[/]\n"
        f"  the ledger: {folder.ledger} ({summary.charges} charged steps)\n"
        f"  the report: {folder.release / 'report.html'}\n"
        "\nUse it, in Python:\n"
        "[green]from peft import PeftModel[/]\n"
        "[green]from transformers import AutoModelForCausalLM, AutoTokenizer[/]\n"
        f"[green]base = AutoModelForCausalLM.from_pretrained({model!r})[/]\n"
        f"[green]model = PeftModel.from_pretrained(base, {str(folder.release)!r})[/]\n"
        f"[green]tokenizer = AutoTokenizer.from_pretrained({model!r})[/]\n"
        "[green]note = tokenizer('Clinic note for', return_tensors='pt')[/]\n"
        "[green]print(tokenizer.decode(model.generate(**note, max_new_tokens=60)[0]))[/]\n"
        "\nAttack it, with the planted secrets at hand:\n"
        f"[green]privlora audit {folder.root} --secrets {secrets}[/]\n"
        "\nThen your own file:\n"
        "[green]privlora init records.jsonl --model NAME[/]",
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
