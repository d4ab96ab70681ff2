"""Whether a client has what its terms need, before it joins: records that can be read, and a base model that is there.

Looked up on the local disk, and without loading a model. The server gets fixed words where a file or a model is not
there, and nothing of what is in the records; that is for the client's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from privlora.config import Settings
from privlora.data.examples import Template
from privlora.data.formats import Format
from privlora.data.records import HUB, load_records, refuse_missing, value_of
from privlora.data.tasks import find_task, task_record
from privlora.errors import DataError, ModelError, PrivloraError
from privlora.federated.messages import NO_MODEL, NO_RECORDS
from privlora.training.model_names import refuse_unknown_model

_log = logging.getLogger(__name__)

_TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken")
"""What some file of every tokenizer is called."""


class NotReadyError(PrivloraError):
    """A client cannot join. told: what the server gets of it, in fixed words."""

    def __init__(self, problem: PrivloraError, told: str) -> None:
        super().__init__(problem.what, why=problem.why, fix=problem.fix)
        self.told = told


def refuse_missing_records(path: str | list[str] | None, format: Format, *, in_memory: bool) -> None:
    """Raise NotReadyError where a file that the client's owner names is not there, or nothing says what it is.

    format: of the owner; ``auto`` goes by the file's ending.

    What is in it makes no difference: the server could ask about records by the columns that it names in its terms.
    """
    if in_memory:
        return
    try:
        if path is None:
            raise DataError("there is no path of records", fix="give this client its records")
        refuse_missing(path, format=format)
    except PrivloraError as problem:
        raise NotReadyError(problem, NO_RECORDS) from None


def warn_of_unreadable(
    name: str,
    path: str | list[str] | None,
    records: Sequence[Mapping[str, Any]] | None,
    format: Format,
    settings: Settings,
) -> None:
    """Tell the log of client ``name`` if its first record lacks a column that the terms name. Nothing of it is sent."""
    data, privacy = settings.data, settings.privacy
    sources = [path] if isinstance(path, str) else path or []
    if records is None and any(source.startswith(HUB) for source in sources):
        return
    try:
        given = records if records is not None else load_records(sources, format=format, limit=1)
        first = list(given[:1])
        shown = [
            record if data.task is None else task_record(find_task(data.task), record, 1) for record in first
        ]
        needed = [(record, column) for record in shown for column in sorted(Template(**data.columns).used)]
        needed += [(record, privacy.user_column) for record in first if privacy.user_column is not None]
        for record, column in needed:
            value_of(record, column, 1)
    except Exception as problem:  # noqa: BLE001 - a record may raise anything; a refusal would tell of it
        _log.error(
            "%s joins, but its first record cannot be read as the terms say: %s. Such records count as none: %s",
            name,
            in_words(problem),
            "a refusal would tell the server of them. Stop the client if this is not what you meant",
        )


def in_words(error: Exception) -> str:
    """For a client's log. What is no error of privlora may quote a record, so that its kind alone is shown."""
    return str(error) if isinstance(error, PrivloraError) else type(error).__name__


def refuse_missing_model(name: str) -> None:
    """Raise NotReadyError for a base model that is no folder with a configuration and a tokenizer, and no name on the
    hub. The hub is not asked, and nothing is loaded."""
    try:
        refuse_unknown_model(name)
        folder = Path(name).expanduser()
        if not folder.is_dir():
            return
        lacking = [] if (folder / "config.json").is_file() else ["config.json"]
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
            lacking.append("the tokenizer's files")
        if lacking:
            raise ModelError(
                f"the model's folder {name!r} lacks {' and '.join(lacking)}",
                why="this client could not train in any round",
                fix="give a folder that save_pretrained wrote, of the model and of its tokenizer",
            )
    except PrivloraError as problem:
        raise NotReadyError(problem, NO_MODEL) from None
