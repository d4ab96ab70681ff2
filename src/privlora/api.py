"""Fine-tune in one call: ``fine_tune`` in Python, ``train_run`` and ``resume_run`` behind the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from privlora.accounting import LedgerSummary, Plan, read_ledger
from privlora.config import IN_MEMORY, Settings, load_settings, settings_from
from privlora.data.batching import pad_token
from privlora.errors import ConfigError, RunError
from privlora.reporting import write_release
from privlora.training.files import RunFolder, write_atomically
from privlora.training.loop import Observer, finish_training
from privlora.training.session import (
    Parts,
    PublicStart,
    build_parts,
    given_or_loaded,
    load_data,
    plan_privacy,
    unchanged_afterwards,
)


@dataclass(frozen=True)
class Result:
    """What a finished run leaves.

    release: folder that is safe to publish: a plain peft adapter, the privacy report, the card and the ledger. In the
        non-private mode and with repeatable noise, ``not-private`` beside where it would be.
    epsilon, delta: the statement under add-or-remove-one; None in the non-private mode or with repeatable noise.
    """

    release: Path
    steps: int
    epsilon: float | None
    delta: float | None


def fine_tune(
    model: str | torch.nn.Module,
    data: str | list[str] | Sequence[Mapping[str, Any]],
    *,
    privacy: Mapping[str, Any],
    tokenizer: Any = None,
    evaluation: str | list[str] | Sequence[Mapping[str, Any]] | None = None,
    columns: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    loading: Mapping[str, Any] | None = None,
    method: str | Mapping[str, Any] = "prism",
    output: str | Path = "runs/run",
    run: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Result:
    """Fine-tune a causal LM privately; the result is a plain peft adapter in ``output/release``, or in
    ``output/not-private`` where nothing protects the records.

    model: a local folder, a hub name, or a loaded transformers model (then pass ``tokenizer``). The module is not
        wrapped; when this returns, also by an exception, it is exactly as before.
    data: what ``data.path`` takes, or records as mappings. evaluation: PUBLIC records of the same form.
    privacy: the fields of PrivacySettings, for example ``dict(target_epsilon=3, delta=1e-5, steps=200,
        expected_batch_size=64, public_dataset_size=10_000)``.
    columns: further fields of DataSettings (text, prompt, completion, messages, loss_on, max_length, …).
    adapter, run: fields of AdapterSettings and RunSettings. method: a row's name or fields of MethodSettings.
    loading: further fields of ModelSettings (dtype, device, gradient_checkpointing, revision); of a loaded model only
        gradient_checkpointing has an effect.

    Raises PrivloraError subclasses that say what to mend.
    """
    path, records = _source(data)
    evaluation_path, evaluation_records = (None, None) if evaluation is None else _source(evaluation)
    settings = settings_from(
        {
            "model": {"name": model if isinstance(model, str) else _name_of(model), **(loading or {})},
            "data": {
                "path": path,
                "evaluation": evaluation_path,
                **(columns or {}),
            },
            "privacy": dict(privacy),
            "adapter": dict(adapter or {}),
            "method": {"name": method} if isinstance(method, str) else dict(method),
            "run": {"output": str(output), **(run or {})},
        },
        source="fine_tune",
    )
    return train_run(
        settings,
        model=None if isinstance(model, str) else model,
        tokenizer=tokenizer,
        records=records,
        evaluation=evaluation_records,
        observer=observer,
    )


Records = Sequence[Mapping[str, Any]]


def _source(data: str | list[str] | Records) -> tuple[str | list[str], Records | None]:
    """Paths for the settings, or the mark that stands for records in memory and those records."""
    if isinstance(data, str):
        return data, None
    paths = [item for item in data if isinstance(item, str)]
    if len(paths) == len(data):
        return paths, None
    if paths:
        raise ConfigError("the data mix file names and records", fix="give either, not both")
    return IN_MEMORY, [item for item in data if not isinstance(item, str)]


def train_run(
    settings: Settings,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Sequence[Mapping[str, Any]] | None = None,
    evaluation: Sequence[Mapping[str, Any]] | None = None,
    observer: Observer | None = None,
) -> Result:
    """Start a run. Everything that can be refused is refused before the run folder exists."""
    RunFolder(Path(settings.run.output)).refuse_if_used()
    plan = plan_privacy(settings, model)[0] if settings.privacy.private else None
    return _run(settings, plan, model, tokenizer, records, evaluation, observer, fresh=True)


def resume_run(
    root: str | Path,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Sequence[Mapping[str, Any]] | None = None,
    evaluation: Sequence[Mapping[str, Any]] | None = None,
    observer: Observer | None = None,
) -> Result:
    """Continue a run after an interruption or a crash, with fresh noise; nothing charged is forgotten.

    Raises RunError if there is no run in ``root``. A finished run is only reported again.
    """
    folder = RunFolder(Path(root))
    if not folder.settings.exists():
        raise RunError(f"no run in {str(root)!r}", fix="give the folder that `privlora train` created")
    settings = load_settings(folder.settings)
    settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"output": str(folder.root)})}
    )
    plan = None
    if settings.privacy.private and not folder.has_plan:  # crashed before anything was released
        plan = plan_privacy(settings, model)[0]
    return _run(settings, plan, model, tokenizer, records, evaluation, observer, fresh=False)


def _run(
    settings: Settings,
    plan: Plan | None,
    model: torch.nn.Module | None,
    tokenizer: Any,
    records: Sequence[Mapping[str, Any]] | None,
    evaluation: Sequence[Mapping[str, Any]] | None,
    observer: Observer | None,
    *,
    fresh: bool,
) -> Result:
    folder = RunFolder(Path(settings.run.output))
    if settings.data.path == IN_MEMORY and records is None:
        raise RunError("this run's records were in memory", fix="call resume_run(root, records=...)")
    model, tokenizer = given_or_loaded(settings.model, model, tokenizer)
    data = load_data(settings, tokenizer, records, evaluation)
    with unchanged_afterwards(model):
        parts = build_parts(settings, model, PublicStart(tokenizer))
        with parts.adapter:
            if fresh:
                folder.create(protects=settings.privacy.protects)
                write_atomically(folder.settings, settings.to_yaml())
            finish_training(parts, data, folder, plan, pad_token_id=pad_token(tokenizer), observer=observer)
            summary = read_ledger(folder.ledger) if settings.privacy.private else None
            folder.hide_settings()
            write_release(folder, parts, summary)
    return _result(folder, summary, settings.privacy.steps)


def _result(folder: RunFolder, summary: LedgerSummary | None, steps: int) -> Result:
    if summary is None or summary.plan.insecure_noise:
        return Result(folder.release, steps, None, None)
    return Result(folder.release, steps, summary.epsilon(), summary.plan.delta)


def _name_of(model: torch.nn.Module) -> str:
    return str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or "unnamed")


__all__ = ["Parts", "Result", "fine_tune", "resume_run", "train_run"]
