"""Whether a client has what its terms need, before it joins: records that can be read, and a base model that is there.

Looked up on the local disk, in the first record alone, and without loading a model. The server gets fixed words; what
exactly is missing stays in the client's own log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from privlora.config import Settings
from privlora.data.examples import Template
from privlora.data.records import HUB, load_records, missing_column
from privlora.data.tasks import find_task, task_records
from privlora.errors import DataError, ModelError, PrivloraError
from privlora.federated.messages import NO_MODEL, NO_RECORDS
from privlora.training.model_names import refuse_unknown_model

_TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken")
"""What some file of every tokenizer is called."""


class NotReadyError(PrivloraError):
    """A client cannot join. told: what the server gets of it, in fixed words."""

    def __init__(self, problem: PrivloraError, told: str) -> None:
        super().__init__(problem.what, why=problem.why, fix=problem.fix)
        self.told = told


def refuse_unreadable(
    path: str | list[str] | None, records: Sequence[Mapping[str, Any]] | None, settings: Settings
) -> None:
    """Raise NotReadyError unless there is a first record, with the columns that the terms name.

    path: of files; of a hub's data set nothing is asked. records: in memory, in the place of the files.
    """
    data, privacy = settings.data, settings.privacy
    sources = [path] if isinstance(path, str) else path or []
    if records is None and any(source.startswith(HUB) for source in sources):
        return
    try:
        given = records if records is not None else load_records(sources, format=data.format, limit=1)
        if not given:
            raise DataError("there are no records", fix="give this client its records")
        first = [given[0]]
        shown = first if data.task is None else task_records(find_task(data.task), first)
        needed = [(shown[0], column) for column in sorted(Template(**data.columns).used)]
        if privacy.user_column is not None:
            needed.append((first[0], privacy.user_column))
        for record, column in needed:
            if column not in record:
                raise missing_column(column, record, 1)
    except PrivloraError as problem:
        raise NotReadyError(problem, NO_RECORDS) from None


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
