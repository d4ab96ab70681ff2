"""Runs without records: a few empty batches, charged and noised like any others, on a tiny random Llama."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_models import PUBLIC_TEXTS, tiny_llama

from privlora.accounting import Ledger, LedgerSummary, read_ledger
from privlora.config import settings_from
from privlora.data.examples import Examples
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.reporting import publish
from privlora.training.assembly import Parts, build_parts
from privlora.training.files import RunFolder, append_line
from privlora.training.promise import plan_privacy
from privlora.training.step import Step

STEPS = 3


@dataclass
class Run:
    folder: RunFolder
    parts: Parts
    summary: LedgerSummary | None


def base_model() -> Any:
    return tiny_llama(vocab_size=32, num_key_value_heads=1)


def make_run(
    root: Path,
    method: str = "prism",
    *,
    privacy: dict[str, Any] | None = None,
    base: str = "acme/tiny",
    averaging: float = 0.0,
    use_rslora: bool = False,
    init: str | None = None,
    settings_of_method: dict[str, float] | None = None,
) -> Run:
    """A run that has ended, with its release written; ``privacy`` None is the non-private mode."""
    folder = RunFolder(root)
    public = {"steps": STEPS + 1, "expected_batch_size": 8, "public_dataset_size": 60}
    settings = settings_from(
        {
            "model": {"name": base},
            "data": {"path": "secret-records.jsonl"},
            "privacy": {**public, **({"private": False} if privacy is None else {"delta": 1e-3, **privacy})},
            "adapter": {"r": 3, "lora_alpha": 6, "use_rslora": use_rslora, "init": init},
            "method": {
                "name": method,
                "learning_rate": 0.1 if method == "dp-zo" else 0.5,
                "averaging": averaging,
                **(settings_of_method or {}),
            },
            "run": {"output": str(root), "label": "letters"},
        }
    )
    parts = build_parts(settings, base_model(), texts=lambda _: PUBLIC_TEXTS)
    folder.create(protects=settings.privacy.protects)
    folder.settings.write_text(settings.to_yaml())
    for step, loss in ((0, 3.5), (STEPS, 3.25)):
        row = {"loss_per_token": loss + 0.1, "loss_per_example": loss, "standard_error": 0.125}
        append_line(folder.evaluations, {"step": step, **row, "accuracy": 0.5, "examples": 7, "tokens": 70})
    summary = None
    if settings.privacy.private:
        plan = plan_privacy(settings, parts.adapter.model)
        with Ledger.create(folder.ledger, plan) as ledger:
            mechanism = GaussianMechanism(
                parts.coordinates,
                clip_norm=plan.clip_norm,
                event=plan.event,
                expected_batch_size=plan.expected_batch_size,
                ledger=ledger,
                noise=NoiseSource(insecure_seed=1),
                adaptive=parts.adaptive,
            )
            step = Step(
                state=parts,
                mechanism=mechanism,
                examples=Examples([], pad_token_id=0),
                learning_rate=parts.learning_rate,
            )
            for _ in range(STEPS):
                step.take([])
        summary = read_ledger(folder.ledger)
    publish(folder, parts, summary)
    return Run(folder, parts, summary)


def leaf_paths(value: Any, path: str = "") -> Iterator[str]:
    """Names of all values of a report, list items without their index."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaf_paths(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from leaf_paths(inner, path + "[]")
    else:
        yield path
