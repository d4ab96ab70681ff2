"""A synthetic data set as a release: one text a line, the report, the card, the page.

The figures are functions of the texts that are released, of the public base model and of public texts, so they cost
nothing. None compares with a private record: what it said would be released without noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from privlora.accounting import LedgerSummary
from privlora.config import IN_MEMORY, Settings
from privlora.data.records import load_records, text_of
from privlora.evaluation.texts import text_figures
from privlora.pages.numbers import finite
from privlora.reporting.limits import limits_of
from privlora.reporting.publication import write_report
from privlora.reporting.seals import with_files
from privlora.training.files import RunFolder, set_times, write_atomically
from privlora.training.inputs import tokenise
from privlora.training.misfits import texts_evolve
from privlora.training.public_form import PublicForm


def publish_texts(
    folder: RunFolder,
    report: Mapping[str, Any],
    texts: Sequence[str],
    settings: Settings,
    base: torch.nn.Module,
    tokenizer: Any,
    summary: LedgerSummary | None,
) -> None:
    """Write synthetic.jsonl, privacy_report.json, README.md and report.html of a run whose release is texts.

    report: of the run that was paid for, as of an adapter. base: the base model, without an adapter. summary: of its
    ledger, None in the non-private mode; the folder looks as if written on its day.

    Raises RunError if a file cannot be written.
    """
    chosen, column = settings.synthesis, PublicForm(settings).text_column
    assert chosen is not None
    figures = text_figures(
        base,
        tokenise([{column: text} for text in texts], settings.data, tokenizer),
        texts,
        _public_sets(settings, column),
        max_tokens=settings.run.max_tokens,
    )
    facts = {
        "column": column,
        "count": len(texts),
        "asked_for": chosen.samples or chosen.count,
        "from": "adapter" if chosen.source is not None or not texts_evolve(settings) else "population",
        "generator": chosen.generator,
        "words": chosen.random_prompt or chosen.preset or "text",
        "temperature": chosen.temperature,
        "of_a_finished_run": chosen.source is not None,
    }
    lines = (json.dumps({column: text}, ensure_ascii=False) + "\n" for text in texts)
    write_atomically(folder.texts, "".join(lines))
    found = {**report, "texts": facts, "quality": finite(figures.to_dict())}
    found["not_protected"] = limits_of(found)
    write_report(folder, with_files(found, folder.release))
    if summary is not None:
        set_times(folder.release, summary.created)


def _public_sets(settings: Settings, column: str) -> dict[str, list[str]]:
    """Texts that count as public, by the setting that names them."""
    chosen, data, lora = settings.synthesis, settings.data, settings.adapter
    assert chosen is not None
    found: dict[str, list[str]] = {}
    if chosen.source is not None:  # no private record is at hand to be told from what is said to be public
        return found
    if chosen.file is not None:
        found["synthesis.file"] = _texts(load_records(chosen.file), column)
    if lora.public_text is not None:
        found["adapter.public_text"] = _texts(load_records(lora.public_text, format=data.format), column)
    if data.evaluation is not None and data.evaluation != IN_MEMORY:
        found["data.evaluation"] = _texts(load_records(data.evaluation, format=data.format), column)
    return found


def _texts(records: Sequence[Mapping[str, Any]], column: str) -> list[str]:
    return [text_of(record, column, number) for number, record in enumerate(records, 1)]
