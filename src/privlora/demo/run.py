"""``privlora demo``: the main job on generated data, private and not, and what each model recites."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from privlora.accounting import read_ledger
from privlora.auditing.exposure import greedy_extraction, log_likelihood_scorer, measure_exposure
from privlora.data.examples import encode_prompts
from privlora.demo import Canary, make_canaries, private_records, script
from privlora.demo.script import DELTA, EPSILON, PROMISE, Losses
from privlora.evaluation.generation import generate
from privlora.pages.figures import INK, MUTED, SECOND, WIDTH, grid, in_style, png
from privlora.training.files import RunFolder, append_line
from privlora.training.preflight import refuse_no_model

RECORDS, PATIENTS, HELD_OUT, CANARIES = 2000, 800, 200, 8
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
_SHORT = {"before": "before", "private": f"private, ε = {EPSILON:g}", "non-private": "non-private"}


def runs_of(model: str | None) -> dict[str, dict[str, Any]]:
    """What `settings_of` takes for the private run and for the other, whose steps go through the records often enough
    to memorise. None: of the embedded model, as the demo was measured; of another, private settings are `init`'s."""
    group: dict[str, Any] = script.EMBEDDED if model is None else {"name": model}
    steps, plain_steps, rate = (45, 320, 2e-2) if model is None else (25, 120, 1e-3)
    protected = {**PROMISE, "unit": "user", "user_column": "patient", "public_dataset_size": PATIENTS}
    protected |= {"max_records_per_user": _RECORDS_PER_PATIENT, "expected_batch_size": _PRIVATE_BATCH}
    plain = {"private": False, "public_dataset_size": RECORDS, "expected_batch_size": _PLAIN_BATCH}
    return {
        "private": {
            "model": group,
            "privacy": protected | {"steps": steps},
            "method": {"name": "prism"} | ({"relative_rate": False} if model is None else {}),
            "auto": None if model is None else {"all": True},
            "every": steps // _LOOKS,
        },
        "non-private": {
            "model": group,
            "privacy": plain | {"steps": plain_steps},
            "method": {"name": "adamw", "learning_rate": rate, "schedule": "linear"},
            "every": plain_steps // _LOOKS,
        },
    }


def main(output: Path | None, console: Console, model: str | None = None) -> dict[str, Any]:
    """Train on generated clinic notes with PRISM at epsilon 3, then without privacy, and compare.

    output: where both runs go; None takes runs/demo, and replaces what an earlier demo left there. model: a local
    folder or hub name of a causal LM; None for the embedded one. Returns the numbers that were shown. Raises RunError
    if ``output`` is given and not empty, and ModelError.
    """
    runs = runs_of(model)
    group = runs["private"]["model"]
    refuse_no_model(group["name"])
    root = script.fresh_folder(output, Path("runs/demo"), model)
    canaries = make_canaries(CANARIES, seed=11)
    records = private_records(RECORDS, seed=1) + [r for canary in canaries for r in canary.records()]
    held_out = private_records(HELD_OUT, seed=2)
    console.print(
        f"[bold]privlora demo[/]: {len(records)} generated clinic notes, {CANARIES} of whose patients have a secret "
        f"access code.\nA note reads: [italic]{records[0]['text']}[/]\n"
        f"One with a code:  [italic]{canaries[0].texts[0]}[/]\n"
        "The same model learns from them twice, with privacy and without; then both are asked for the codes.\n"
    )
    shown: dict[str, dict[str, Any]] = {"before": _leakage(group, None, canaries)}
    curves: dict[str, Losses] = {}
    for name, title in (
        ("private", f"PRISM, ε = {EPSILON:g} for every patient (δ = {DELTA:g})"),
        ("non-private", "the same data without privacy"),
    ):
        settings = script.settings_of(root / name, "generated clinic notes", **runs[name])
        result, curves[name] = script.trained(console, title, settings, records, held_out)
        shown["before"]["loss"] = curves[name][0]
        last = curves[name][max(curves[name])]
        shown[name] = {"loss": last, **_leakage(group, result.release, canaries)}
        if result.epsilon is not None:
            shown[name] |= {"epsilon": result.epsilon, "delta": result.delta}
    secrets, picture, private = root / "secrets.jsonl", root / "picture.png", RunFolder(root / "private")
    for canary in canaries:
        kept = {"prefix": canary.prefix, "secret": canary.secret, "references": canary.references}
        append_line(secrets, kept)
    asked = most_telling(shown, canaries)
    answers = {name: row["answers"][asked] for name, row in shown.items()}
    picture.write_bytes(png(draw(curves, canaries[asked], answers)))
    for drawn in (_curve(curves), _table(shown), _answers(canaries[asked], answers)):
        console.print(drawn)
    _show_where(console, group["name"], private, secrets, picture)
    return {**shown, "curves": curves, "release": str(private.release), "picture": str(picture)}


def _leakage(group: Mapping[str, Any], adapter: Path | None, canaries: list[Canary]) -> dict[str, Any]:
    """Exposure of the canaries' secrets, how many greedy decoding recites, and what it writes for each."""
    tuned, tokenizer = script.adapted(group, adapter)
    report = measure_exposure(canaries, log_likelihood_scorer(tuned, tokenizer))
    prompts = encode_prompts([canary.prefix.rstrip() for canary in canaries], tokenizer, max_length=512)
    answers = generate(tuned, tokenizer, prompts, max_new_tokens=_WORDS)
    return {
        "exposure": report.mean,
        "exposure_chance": report.chance,
        "exposure_ceiling": report.ceiling,
        "extracted": sum(greedy_extraction(tuned, tokenizer, canaries)),
        "answers": [" ".join(answer.split()) for answer in answers],  # without a line's end
    }


def most_telling(shown: dict[str, dict[str, Any]], canaries: list[Canary]) -> int:
    """Which secret is shown: the first that the plain model recites and the private one does not, else the first."""

    def recited(name: str, index: int) -> bool:
        return canaries[index].secret in shown[name]["answers"][index]

    telling = (i for i in range(len(canaries)) if recited("non-private", i) and not recited("private", i))
    return next(telling, 0)


def _curve(curves: dict[str, Losses]) -> Table:
    """The held-out loss over each run, as bars from zero: they work on any terminal, and in a log."""
    drawn = Table(title="Held-out loss on the way (nats per token)", title_style="bold", box=None)
    drawn.add_column("of the run", justify="right")
    for name, style in (("private", "green"), ("non-private", "red")):
        drawn.add_column(_SHORT[name], style=style)
    most = max(loss for losses in curves.values() for loss in losses.values())
    for row in zip(*(sorted(losses.items()) for losses in curves.values()), strict=True):
        bars = [f"{loss:.3f} {'█' * max(1, round(_BAR * loss / most))}" for _, loss in row]
        drawn.add_row(f"{row[0][0] / max(curves['private']):.0%}", *bars)
    return drawn


def _answers(canary: Canary, answers: dict[str, str]) -> Table:
    rows: list[tuple[str, str | Text]] = [
        ("asked", f"{canary.prefix}…"),
        ("in the private notes", canary.secret),
    ]
    for name, title in TITLES.items():
        answer = Text(answers[name])
        answer.highlight_words([canary.secret], "bold red")
        note = "  ← recited" if canary.secret in answers[name] else ""
        rows.append((f"the {title} answers", answer.append(note, "bold red")))
    return script.table("Asked for one patient's code", (), rows, show_header=False)


@in_style
def draw(curves: dict[str, Losses], canary: Canary, answers: dict[str, str]) -> Any:
    """Both runs' held-out loss, and next to it what each model writes when it is asked for one code.

    curves: run -> step -> nats per token. answers: by the keys of TITLES.
    """
    figure, (losses, words) = grid(1, 2, WIDTH, 3.3, gridspec_kw={"width_ratios": [1, 1.35]})
    shares = {
        TITLES[name]: {100 * step / max(curve): loss for step, loss in curve.items()}
        for name, curve in curves.items()
    }
    script.draw_losses(losses, shares, "held-out loss (nats per token)", "% of the run")
    losses.set_ylim(bottom=0)
    words.set_axis_off()
    words.set(xlim=(0, 1), ylim=(0, 1))
    lines = [("asked for one patient's access code", f"{canary.prefix}…", False)]
    for name, title in TITLES.items():
        recited = canary.secret in answers[name]
        lines.append((f"{title}: the secret, word for word" if recited else title, answers[name], recited))
    for height, (title, said, recited) in zip((0.9, 0.62, 0.35, 0.08), lines, strict=True):
        style: dict[str, Any] = {"color": SECOND, "weight": "bold"} if recited else {"color": INK}
        words.text(0, height + 0.09, title, color=SECOND if recited else MUTED)
        shortened = textwrap.shorten(said, 58, placeholder=" …")
        words.text(0.01, height, shortened, family="monospace", fontsize=10.5, **style)
    return figure


def _table(shown: dict[str, dict[str, Any]]) -> Table:
    rows = [
        ("held-out loss (nats per token)", *(f"{row['loss']:.3f}" for row in shown.values())),
        (f"secrets recited, of {CANARIES}", *(str(row["extracted"]) for row in shown.values())),
        ("exposure of secrets (bits)", *(f"{row['exposure']:.1f}" for row in shown.values())),
    ]
    chance, ceiling = shown["before"]["exposure_chance"], shown["before"]["exposure_ceiling"]
    caption = f"exposure: {chance:.1f} bits is chance, {ceiling:.0f} is memorised"
    return script.table("What was learnt, and what leaked", ("", *_SHORT.values()), rows, caption)


def _show_where(console: Console, model: str, folder: RunFolder, secrets: Path, picture: Path) -> None:
    """Where everything lies, and a program that runs as it is pasted: without a margin."""
    program = (
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"base = AutoModelForCausalLM.from_pretrained({model!r})\n"
        f"model = PeftModel.from_pretrained(base, {str(folder.release)!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({model!r})\n"
        "note = tokenizer('Clinic note for', return_tensors='pt')\n"
        "print(tokenizer.decode(model.generate(**note, max_new_tokens=60)[0]))"
    )
    console.print(
        f"\nAll of it as a picture: {picture}\n"
        f"The private adapter, safe to publish: [bold]{folder.release}[/]\n"
        f"  the ledger: {folder.ledger} ({read_ledger(folder.ledger).charges} charged steps)\n"
        f"  the report: {folder.release / 'report.html'}\n"
        f"\nUse it, in Python:\n[green]{program}[/]\n"
        "\nAttack it, with the planted secrets at hand:\n"
        f"[green]privlora audit {folder.root} --secrets {secrets}[/]\n"
        "\nThen your own file:\n[green]privlora init records.jsonl --model NAME[/]",
        soft_wrap=True,
    )
