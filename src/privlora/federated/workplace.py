"""What a client has: a base model, which those of one process share, and records as the terms read them.

The server gets fixed words where a file or a model is not there, and nothing of what is in the records; that is for the
client's own log. The server chooses the terms, columns among them, and sees whether a client answers: a refusal would
tell it something. So a client answers with any records: those that cannot be read as the terms say count as none, each
for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from privlora.config import Settings
from privlora.data.examples import Examples, Template, pad_token
from privlora.data.formats import Format
from privlora.data.records import HUB, as_records, load_records, refuse_missing, value_of
from privlora.data.tasks import find_task, task_record
from privlora.data.units import Units, unit_value
from privlora.errors import DataError, ModelError, PrivloraError
from privlora.federated.messages import NO_MODEL, NO_RECORDS
from privlora.federated.plans import client_settings
from privlora.federated.rules.base import Sizes
from privlora.training.inputs import Data, fitted, load_data, tokenise
from privlora.training.models import adapter_for, check_model, given_or_loaded
from privlora.training.preflight import refuse_unknown_model

_log = logging.getLogger(__name__)

Records = Sequence[Mapping[str, Any]]


@dataclass
class Workplace:
    """settings: of the run, with its local method. model, tokenizer: where the caller has them. told: is shown the
    local steps of its clients, as (done, of how many)."""

    settings: Settings
    model: torch.nn.Module | None = None
    tokenizer: Any = field(default=None, repr=False)
    told: Callable[[int, int], None] | None = field(default=None, repr=False)

    @cached_property
    def groups(self) -> list[Sizes]:
        """(L, m, n) of each group of the adapter: L modules whose weights are m x n."""
        model, _, settings = self.loaded
        return [(len(group.sites), group.m, group.n) for group in adapter_for(settings, model).groups]

    @cached_property
    def loaded(self) -> tuple[torch.nn.Module, Any, Settings]:
        """The model, its tokenizer, and the settings fitted to it. Raises ModelError, ConfigError or PrivacyError."""
        model, tokenizer = given_or_loaded(self.settings.model, self.model, self.tokenizer)
        settings = fitted(self.settings, model)
        check_model(settings, model, tokenizer)
        return model, tokenizer, settings


_TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken")
"""What some file of every tokenizer is called."""


class NotReadyError(PrivloraError):
    """A client cannot join. told: what the server gets of it, in fixed words."""

    def __init__(self, problem: PrivloraError, told: str) -> None:
        super().__init__(problem.what, why=problem.why, fix=problem.fix)
        self.told = told


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
        wanted = {"config.json": ("config.json",), "the tokenizer's files": _TOKENIZERS}
        there = {what: any(any(folder.glob(each)) for each in names) for what, names in wanted.items()}
        lacking = [what for what, found in there.items() if not found]
        if lacking:
            fix = "give a folder that save_pretrained wrote, of the model and of its tokenizer"
            raise ModelError(f"the model's folder {name!r} lacks {' and '.join(lacking)}", fix=fix)
    except PrivloraError as problem:
        raise NotReadyError(problem, NO_MODEL) from None


@dataclass(frozen=True)
class Own:
    """A client's records. name: the client's. path: of their files; records: the same in memory. format: of the files,
    as their owner says: what the terms say of it would decide what is one record, and so one unit."""

    name: str
    path: str | list[str] | None = None
    records: Records | None = None
    format: Format = "auto"

    @property
    def files(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path or [])

    def refuse_missing(self) -> None:
        """Raise NotReadyError where a file that the client's owner names is not there, or nothing says what it is.

        What is in it makes no difference: the server could ask about records by the columns that it names in its terms.
        """
        if self.records is not None:
            return
        try:
            if self.path is None:
                raise DataError("there is no path of records", fix="give this client its records")
            refuse_missing(self.files, format=self.format)
        except PrivloraError as problem:
            raise NotReadyError(problem, NO_RECORDS) from None

    def warn_of_unreadable(self, settings: Settings) -> None:
        """Tell the log if the first record lacks a column that the terms name. Nothing of it is sent."""
        data, privacy = settings.data, settings.privacy
        if self.records is None and any(source.startswith(HUB) for source in self.files):
            return
        try:
            given = self.records
            read = load_records(self.files, format=self.format, limit=1) if given is None else given
            first = list(read[:1])
            task = None if data.task is None else find_task(data.task)
            shown = [record if task is None else task_record(task, record, 1) for record in first]
            columns = sorted(Template(**data.columns).used)
            needed = [(record, column) for record in shown for column in columns]
            needed += [(record, privacy.user_column) for record in first if privacy.user_column is not None]
            for record, column in needed:
                value_of(record, column, 1)
        except Exception as problem:  # noqa: BLE001 - a record may raise anything; a refusal would tell of it
            said = "%s joins, but its first record cannot be read as the terms say: %s. Such records count as none: a "
            said += "refusal would tell the server of them. Stop the client if this is not what you meant"
            _log.error(said, self.name, in_words(problem))

    def data(self, settings: Settings, model: Any, tokenizer: Any) -> Data:
        """Tokenised. settings: the terms.

        How many they are is held against no public number: those are of all clients, or of the server's choice. Raises
        ConfigError for terms that nobody can follow, and DataError for files that are not there; for nothing in a
        record.
        """
        mine = client_settings(settings).changed(
            data={"path": "", "evaluation": None, "unchecked": True},
            adapter={"init": None, "public_text": None},
            # Not held against the number of records, or a server could count them by its choice of delta.
            privacy={"delta": None},
        )
        tokenise([], mine.data, tokenizer)  # refuses terms that nobody can follow, whatever the records are

        def load(some: Records) -> Data:
            return load_data(mine, tokenizer, some, model=model)

        if self.records is None:
            # A file that is there says nothing of what is in it.
            refuse_missing(self.files, format=self.format)
            found = _in_files(self.name, self.files, self.format)
        else:
            found = _in_memory(self.name, self.records)
        loaded = _readable(self.name, _named_users(self.name, found, mine.privacy.user_column), load)
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
    return _each(name, items, lambda item: as_records([item]))


def _named_users(name: str, records: Records, column: str | None) -> Records:
    """With users as plain strings: a record more, whose user is a number, must not spoil all others."""

    def named(record: Mapping[str, Any]) -> Records:
        assert column is not None
        try:
            return [{**record, column: str(unit_value(record, column, 1))}]
        except DataError:
            return [record]  # it counts as none where it is read

    return records if column is None else _each(name, records, named)


def _each(name: str, items: Sequence[Any], read: Callable[[Any], Records]) -> Records:
    found = list[Mapping[str, Any]]()
    for item in items:
        try:
            found += read(item)
        except Exception as error:  # noqa: BLE001 - as in _in_files
            _log.error("%s: a record that cannot be read counts as none: %s", name, in_words(error))
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
