"""Texts that the adapter of a finished run writes: post-processing of its releases, at no further cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from privlora.accounting import LedgerSummary, read_ledger
from privlora.adapters.peft_files import CONFIG_NAME, WEIGHTS_NAME
from privlora.config import Settings, SynthesisSettings
from privlora.errors import ConfigError, RunError
from privlora.names import published_name
from privlora.reporting.publication import check_statement, read_report
from privlora.reporting.seals import ADAPTER, digests, refuse_altered
from privlora.reporting.texts import publish_texts
from privlora.synthesis.embeddings import base_alone
from privlora.synthesis.generators import build_generator
from privlora.synthesis.population import Population
from privlora.training.base_weights import with_adapter
from privlora.training.checkpoint import NO_RUN
from privlora.training.files import RunFolder, no_run, write_atomically
from privlora.training.identity import refuse_another_model
from privlora.training.models import given_or_loaded, unchanged_afterwards
from privlora.training.observer import Observer
from privlora.training.public_form import PublicForm
from privlora.training.takeover import make_room, refuse_if_spent
from privlora.training.texts.final_texts import gather_texts


def texts_of_finished_run(
    settings: Settings,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    observer: Observer | None = None,
    fresh: bool = True,
) -> tuple[RunFolder, LedgerSummary | None]:
    """Ask the adapter of the run in synthesis.source for texts, and release them in run.output with that run's ledger.

    Of ``settings`` the model, the text's column and length, ``synthesis`` and ``run`` are read; no private record is.
    fresh: whether the folder is new. Gives the folder, and what its ledger says (None: not private).

    Raises RunError for a run that is not finished or has no adapter of its own, PrivacyError for an adapter that is not
    as the run wrote it, ConfigError for another generator, ModelError or RunError for another base model.
    """
    chosen = settings.synthesis
    assert chosen is not None
    assert chosen.source is not None
    source, folder = RunFolder(Path(chosen.source).expanduser()), RunFolder(Path(settings.run.output))
    if not fresh and (folder.identity.exists() or folder.checkpoint.exists()):
        raise RunError(
            f"{str(folder.root)!r} trained on records of its own, and its settings name a finished run as source",
            why="that run's ledger would take the place of its own, and what it cost would be forgotten",
            fix="restore the settings that it was started with",
        )
    refuse_another_writer(chosen)
    _ = PublicForm(settings).text_column
    if not source.settings.exists():
        raise no_run(source.root)
    report = read_report(source.report)
    _refuse_without_adapter(source, report)
    base_name = report["adapter"]["base_model"]
    if base_name != published_name(settings.model.name):
        raise ConfigError(
            f"{str(source.root)!r} trained an adapter of {base_name!r}, and model.name is another",
            fix="give the settings of that run",
        )
    summary = None
    if report["statement"] is not None:
        summary = read_ledger(source.ledger)
        check_statement(report, summary)
        refuse_altered(source, report, digests(source.release, ADAPTER))
    if fresh:
        refuse_if_spent(folder)
    model, tokenizer = given_or_loaded(settings.model, model, tokenizer)
    refuse_another_model(source, model)
    with unchanged_afterwards(model):
        adapted = with_adapter(model, source.release)
        try:
            if fresh:
                make_room(folder)
                folder.create(protects=report["stamp"]["reason"] is None)
                write_atomically(folder.settings, settings.to_yaml())
            texts = gather_texts(
                build_generator(
                    chosen,
                    seed=settings.run.seed,
                    model=adapted,
                    tokenizer=tokenizer,
                    max_tokens=settings.run.max_tokens,
                ),
                lambda: Population([]),
                chosen.samples or chosen.count,
                folder,
                NO_RUN if summary is None else summary.run_id,
                None if observer is None else observer.on_texts,
            )
            if summary is not None:
                write_atomically(folder.ledger, source.ledger.read_bytes())
            with base_alone(adapted, None) as base:
                publish_texts(folder, report, texts, settings, base, tokenizer, summary)
        finally:
            adapted.unload()
    return folder, summary


def refuse_another_writer(chosen: SynthesisSettings) -> None:
    """Raise ConfigError where it is not the model, with the adapter, that writes."""
    if chosen.generator != "model":
        raise ConfigError(
            f"the adapter of a finished run is asked, and synthesis.{chosen.generator} asks another writer",
            why="such texts would say nothing of the records",
            fix=f"remove synthesis.{chosen.generator}",
        )


def _refuse_without_adapter(source: RunFolder, report: dict[str, Any]) -> None:
    if "federation" in report:
        raise RunError(
            f"{str(source.root)!r} holds a federation, whose clients have ledgers of their own",
            fix="give a run of `privlora train`",
        )
    if "texts" in report or not all((source.release / name).exists() for name in (CONFIG_NAME, WEIGHTS_NAME)):
        raise RunError(
            f"the run in {str(source.root)!r} has no adapter that could be asked",
            fix="give a run of `privlora train`, and finish it with `privlora resume` if it is not",
        )
