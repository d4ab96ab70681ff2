"""A client's records as the terms read them, whatever they are: a refusal would tell the server something of them.

The server chooses the terms, columns among them, and sees whether a client answers. So a client answers
with any records: those that cannot be read as the terms say count as none, each for itself, and its own log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from privlora.config import Settings
from privlora.data.examples import Examples, pad_token
from privlora.data.formats import Format
from privlora.data.records import as_records, load_records, refuse_missing
from privlora.data.units import Units
from privlora.errors import ConfigError, DataError, PrivloraError
from privlora.federated.plans import client_settings
from privlora.training.inputs import Data, load_data

_log = logging.getLogger(__name__)

Records = Sequence[Mapping[str, Any]]


def own_data(
    settings: Settings,
    name: str,
    source: str | Sequence[str] | Records | None,
    format: Format,
    model: Any,
    tokenizer: Any,
) -> Data:
    """The records of client ``name``, tokenised. settings: the terms. source: its path, or its records in memory.
    format: of its files, as its owner says. What the terms say of it would decide what is one record, and so one unit.

    How many they are is held against no public number: those are of all clients, or of the server's choice.
    """
    data = settings.data.model_copy(update={"path": "", "evaluation": None, "unchecked": True, "limit": None})
    nowhere = {"init": None, "public_text": None, "public_text_limit": None}
    mine = client_settings(settings, 1)  # of rounds: reading is the same in all
    mine = mine.model_copy(
        update={
            "data": data,
            "adapter": settings.adapter.model_copy(update=nowhere),
            # Not held against the number of records, or a server could count them by its choice of delta.
            "privacy": mine.privacy.model_copy(update={"delta": None}),
        }
    )

    def load(some: Records) -> Data:
        return load_data(mine, tokenizer, some, model=model)

    if _is_path(source):
        refuse_missing(source, format=format)  # whether there is a file says nothing of what is in it
    try:
        records = _own_records(name, source, format)
    except ConfigError:
        raise  # of terms that nobody can follow, whatever the records are
    except PrivloraError as error:
        _log.error("%s: its records cannot be read, so it trains on none: %s", name, error)
        records = []
    records = [_with_named_user(record, mine.privacy.user_column) for record in records]
    try:
        return load(records)
    except ConfigError:
        raise
    except PrivloraError as error:
        _log.error("%s: records that cannot be read as the terms say count as none: %s", name, error)
    readable = _readable(records, load)
    if readable:
        return load(readable)
    nothing = Examples([], pad_token_id=pad_token(tokenizer))
    return Data(nothing, Units(np.arange(0)), nothing)


def _own_records(name: str, source: str | Sequence[str] | Records | None, format: Format) -> Records:
    """Without what cannot be read as a record. Raises DataError where nothing can."""
    if not _is_path(source):
        return as_records(source or [])
    broken: list[DataError] = []
    try:
        return load_records(source, format=format, broken=broken.append)
    finally:
        if broken:
            _log.error("%s: what cannot be read counts as none, first of all this: %s", name, broken[0])


def _with_named_user(record: Mapping[str, Any], column: str | None) -> Mapping[str, Any]:
    """The record with its user as a string. One record more, whose user is a number, must not spoil all others."""
    user = None if column is None else record.get(column)
    if column is None or isinstance(user, bool) or not isinstance(user, int):
        return record
    return {**record, column: str(user)}


def _is_path(source: Any) -> TypeGuard[str | list[str]]:
    return isinstance(source, str) or (
        isinstance(source, list) and any(isinstance(each, str) for each in source)
    )


def _readable(records: Records, load: Callable[[Records], Data]) -> Records:
    """Those that can be read alone; whole halves where they can."""
    try:
        load(records)
    except PrivloraError:
        middle = len(records) // 2
        return [*_readable(records[:middle], load), *_readable(records[middle:], load)] if middle else []
    return list(records)
