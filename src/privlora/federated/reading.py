"""A client's records as the terms read them, whatever they are: a refusal would tell the server something of them.

The server chooses the terms, columns among them, and sees whether a client answers. So a client answers
with any records: those that cannot be read as the terms say count as none, each for itself, and its own log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from privlora.config import Settings
from privlora.data.examples import Examples, pad_token
from privlora.data.formats import Format
from privlora.data.records import as_records, load_records, refuse_missing
from privlora.data.units import Units, unit_value
from privlora.errors import DataError
from privlora.federated.plans import client_settings
from privlora.federated.readiness import in_words
from privlora.training.inputs import Data, load_data, tokenise

_log = logging.getLogger(__name__)

Records = Sequence[Mapping[str, Any]]


def own_data(
    settings: Settings,
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    path: str | Sequence[str] | None = None,
    records: Records | None = None,
    format: Format = "auto",
) -> Data:
    """The records of client ``name``, tokenised. settings: the terms. path: of its files; records: the same in memory.
    format: of its files, as its owner says. What the terms say of it would decide what is one record, and so one unit.

    How many they are is held against no public number: those are of all clients, or of the server's choice. Raises
    ConfigError for terms that nobody can follow, and DataError for files that are not there; for nothing in a record.
    """
    data = settings.data.model_copy(update={"path": "", "evaluation": None, "unchecked": True, "limit": None})
    nowhere = {"init": None, "public_text": None}
    mine = client_settings(settings, 1)  # of rounds: reading is the same in all
    mine = mine.model_copy(
        update={
            "data": data,
            "adapter": settings.adapter.model_copy(update=nowhere),
            # Not held against the number of records, or a server could count them by its choice of delta.
            "privacy": mine.privacy.model_copy(update={"delta": None}),
        }
    )

    tokenise([], data, tokenizer)  # refuses terms that nobody can follow, whatever the records are

    def load(some: Records) -> Data:
        return load_data(mine, tokenizer, some, model=model)

    if records is None:
        files = [path] if isinstance(path, str) else list(path or [])
        refuse_missing(files, format=format)  # whether there is a file says nothing of what is in it
        found = _in_files(name, files, format)
    else:
        found = _in_memory(name, records)
    loaded = _readable(name, _named_users(name, found, mine.privacy.user_column), load)
    if loaded is not None:
        return loaded
    nothing = Examples([], pad_token_id=pad_token(tokenizer))
    return Data(nothing, Units(np.arange(0)), nothing)


def _in_files(name: str, files: list[str], format: Format) -> Records:
    """Without what cannot be read as a record."""
    broken: list[DataError] = []
    try:
        return load_records(files, format=format, broken=broken.append, look=False)
    except Exception as error:  # noqa: BLE001 - readers raise anything; a refusal would tell of what is in a file
        _log.error("%s: its records cannot be read, so it trains on none: %s", name, in_words(error))
        return []
    finally:
        if broken:
            _log.error("%s: what cannot be read counts as none, first of all this: %s", name, broken[0])


def _in_memory(name: str, records: Records) -> Records:
    """Mappings and texts, each by itself."""
    try:
        items: Sequence[Any] = list(records) if isinstance(records, Sequence) else as_records(records)
    except Exception as error:  # noqa: BLE001 - as in _in_files
        _log.error("%s: its records cannot be read, so it trains on none: %s", name, in_words(error))
        return []
    kept = []
    for item in items:
        try:
            kept += as_records([item])
        except Exception as error:  # noqa: BLE001 - as in _in_files
            _log.error("%s: what is no record counts as none: %s", name, in_words(error))
    return kept


def _named_users(name: str, records: Records, column: str | None) -> Records:
    """With users as plain strings: a record more, whose user is a number, must not spoil all others."""
    if column is None:
        return records
    found = list[Mapping[str, Any]]()
    for record in records:
        try:
            found.append({**record, column: str(unit_value(record, column, 1))})
        except DataError:
            found.append(record)  # it counts as none where it is read
        except Exception as error:  # noqa: BLE001 - as in _readable
            _log.error("%s: a record whose user cannot be read counts as none: %s", name, in_words(error))
    return found


def _readable(name: str, records: Records, load: Callable[[Records], Data]) -> Data | None:
    """Of those that can be read alone; whole halves where they can. None where there is none.

    In a loop, because how deep a record may be nested depends on how deep this stack is.
    """
    found: list[Mapping[str, Any]] = []
    told, pending = False, [records]
    while pending:
        some = pending.pop()
        if not some:
            continue
        try:
            loaded = load(some)
        except Exception as error:  # noqa: BLE001 - tokenizers and templates raise anything; a refusal would tell of it
            if not told:
                words = in_words(error)
                _log.error("%s: records that cannot be read as the terms say count as none: %s", name, words)
            told, middle = True, len(some) // 2
            pending += [some[middle:], some[:middle]] if middle else []
        else:
            if len(some) == len(records):
                return loaded
            found += some
    return load(found) if found else None
