"""A run's records: read, checked, tokenised, grouped into units; none of the public ones among the private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from privlora.config import AT_CLIENTS, DataSettings, PrivacySettings, Settings
from privlora.data.examples import Examples, Template, build_examples, token_hashes
from privlora.data.records import as_records, content_hashes, load_records, refuse_missing, text_of
from privlora.data.sampling import PoissonSampler
from privlora.data.summary import DataSummary, refuse_implausible, summarise
from privlora.data.tasks import find_task, task_records
from privlora.data.units import Units, group_units
from privlora.errors import ConfigError, DataError, PrivacyError
from privlora.methods import VOTE_METHODS
from privlora.training.model_checks import (
    positions_of,
    refuse_unknown_tokens,
)


@dataclass
class Data:
    """Tokenised private records, their units, and the public evaluation records (empty if none).

    texts: PRIVATE, what each record says, for rows that release votes; else none.
    """

    examples: Examples
    units: Units
    evaluation: Examples
    texts: Sequence[str] = ()

    @cached_property
    def summary(self) -> DataSummary:
        """Of the private records; private itself."""
        return summarise(self.examples, len(self.units))


def fitted(settings: Settings, model: torch.nn.Module) -> Settings:
    """The settings with data.max_length lowered to what the model reads, unless it was set."""
    data, positions = settings.data, positions_of(model)
    if positions is None or positions >= data.max_length or "max_length" in data.model_fields_set:
        return settings
    return settings.model_copy(update={"data": data.model_copy(update={"max_length": positions})})


def check_sources(settings: Settings, records: Any = None, evaluation: Any = None) -> None:
    """Refuse settings that name a file which is not there, before a model is loaded. Raises DataError.

    records, evaluation: what stands for the files, in memory.
    """
    data = settings.data
    read = {
        "adapter.public_text": (settings.adapter.public_text, data.format),
        "data.path": (data.path if records is None else None, data.format),
        "data.evaluation": (data.evaluation if evaluation is None else None, data.format),
        "synthesis.file": (None if settings.synthesis is None else settings.synthesis.file, "auto"),
    }
    for setting, (path, form) in read.items():
        if path is None:
            continue
        try:
            refuse_missing(path, format=form)
        except DataError as error:
            raise error.of(setting) from None


def load_data(
    settings: Settings,
    tokenizer: Any,
    records: Any = None,
    evaluation: Any = None,
    *,
    model: torch.nn.Module | None = None,
    all_public: bool = False,
) -> Data:
    """Read, check, tokenise and group the records.

    records, evaluation: what stands for data.path and data.evaluation (Python callers), see ``as_records``. model: the
    one that is to read them, so that tokens that it does not know are refused. all_public: of studies, whose records
    are public all, so that any of them may be evaluated on.

    Raises DataError for records that cannot be used or cannot be what was said of them (data.unchecked), PrivacyError
    for public ones among the private.
    """
    data, privacy = settings.data, settings.privacy
    if records is None:
        records = load_records(data.path, format=data.format, limit=data.limit)
    if evaluation is None and data.evaluation is not None:
        evaluation = load_records(data.evaluation, format=data.format)
    records = as_records(records)
    evaluation = [] if evaluation is None else as_records(evaluation)
    units = group_units(
        records,
        privacy.user_column,
        max_records_per_unit=privacy.max_records_per_user if privacy.unit == "user" else None,
    )
    if privacy.private and privacy.delta is not None and privacy.delta >= 1 / max(1, len(units)):
        raise PrivacyError(
            f"privacy.delta={privacy.delta:g} is not below 1 / number of units",
            why="publishing one whole unit would satisfy it",
            fix="set it to a tenth of 1 / number of units, or less",
        )
    sampler(privacy, len(units))  # refuses more units than the cap was accounted for, before the run exists
    public = _public(settings, evaluation) if privacy.private and not all_public else {}
    if public:
        columns = Template(**data.columns).used
        _refuse_shared(
            content_hashes(_of_task(records, data), columns),
            {name: content_hashes(_of_task(given, data), columns) for name, given in public.items()},
            f"in {', '.join(sorted(columns))}",
        )
    loaded = Data(
        tokenise(records, data, tokenizer),
        units,
        tokenise(evaluation, data, tokenizer),
        _voting(settings, records),
    )
    if public:
        # What is written otherwise may be the same to the model: other keys, another boundary, an end that is cut off.
        tokens = {
            name: loaded.evaluation if given is evaluation else tokenise(given, data, tokenizer)
            for name, given in public.items()
        }
        _refuse_shared(
            token_hashes(loaded.examples),
            {name: token_hashes(given) for name, given in tokens.items()},
            "once they are tokenised",
        )
    if model is not None:
        refuse_unknown_tokens(model, loaded.examples, loaded.evaluation)
    if not data.unchecked:
        refuse_implausible(
            loaded.summary,
            public_units=privacy.n,
            unit=privacy.unit,
            max_length=data.max_length,
            at_clients=data.path == AT_CLIENTS,
        )
    return loaded


def load_clients(
    settings: Settings,
    tokenizer: Any,
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    evaluation: Any = None,
    *,
    model: torch.nn.Module | None = None,
) -> Data:
    """`load_data` of all clients of a federation together, in their order. records: of each client, by its name.

    Raises what `load_data` does; a DataError that is true of one owner's records alone names the client, and counts its
    records from its own first.
    """
    union = [record for own in records.values() for record in own]
    try:
        return load_data(settings, tokenizer, union, evaluation, model=model)
    except DataError:
        if settings.federation is None or isinstance(
            settings.federation.clients, int
        ):  # parts of one owner's records
            raise
        for name, own in records.items():
            try:
                _load_alone(settings, tokenizer, own)
            except DataError as error:
                raise error.of(f"client {name}") from None
        raise


def _load_alone(settings: Settings, tokenizer: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError for what is wrong with these records by themselves; public numbers are of all clients."""
    data, privacy = settings.data, settings.privacy
    units = group_units(records, privacy.user_column)
    found = summarise(tokenise(records, data, tokenizer), len(units))
    if not data.unchecked:
        refuse_implausible(found, public_units=found.units, unit=privacy.unit, max_length=data.max_length)


_REVEALED: Final = {
    "data.evaluation": "their held-out loss would be published",
    "adapter.public_text": "the start of the training would reveal them",
    "synthesis.file": "private gradients would be released along their own",
}


def _public(
    settings: Settings, evaluation: Sequence[Mapping[str, Any]]
) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The records that count as public, by the setting that names them."""
    lora = settings.adapter
    public: dict[str, Sequence[Mapping[str, Any]]] = {}
    if evaluation:
        public["data.evaluation"] = evaluation
    if lora.public_text is not None:
        texts = load_records(lora.public_text, format=settings.data.format, limit=lora.public_texts)
        public["adapter.public_text"] = texts
    if settings.synthesis is not None and settings.synthesis.file is not None:
        column, own = text_column(settings.data), settings.synthesis.column
        written = load_records(settings.synthesis.file)
        public["synthesis.file"] = [
            {column: text_of(record, own, number)} for number, record in enumerate(written, 1)
        ]
    return public


def _voting(settings: Settings, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that vote, where the method releases votes."""
    if settings.method.name not in VOTE_METHODS:
        return []
    column = text_column(settings.data)
    return [text_of(record, column, number) for number, record in enumerate(records, 1)]


def text_column(data: DataSettings) -> str:
    """The column in whose place a generated text stands. Raises ConfigError for records of several parts."""
    template = Template(**data.columns)
    if data.task is None and template.text is not None and len(template.used) == 1:
        return next(iter(template.used))
    raise ConfigError(
        "synthesis writes whole texts, and data describes records of several parts",
        why="a generated text has to be read as the private records are",
        fix='set data.text to one column, or to a format with one, as "Review: {text}"',
    )


def _refuse_shared(private: Set[bytes], public: Mapping[str, Set[bytes]], how: str) -> None:
    """Raise PrivacyError if a public hash is that of a private record; which and how many is not told."""
    for name, hashes in public.items():
        if not private.isdisjoint(hashes):
            raise PrivacyError(
                f"some records of {name} are the same as private ones {how}",
                why=_REVEALED[name],
                fix="remove them from the public records; give others, or none",
            )


def tokenise(records: Sequence[Mapping[str, Any]], data: DataSettings, tokenizer: Any) -> Examples:
    """The records as examples; ``data`` says which columns and how long."""
    return build_examples(
        _of_task(records, data),
        Template(**data.columns),
        tokenizer,
        max_length=data.max_length,
        loss_on=data.loss_on,
        add_eos=data.add_eos,
    )


def _of_task(records: Sequence[Mapping[str, Any]], data: DataSettings) -> Sequence[Mapping[str, Any]]:
    return records if data.task is None else task_records(find_task(data.task), records)


def sampler(privacy: PrivacySettings, units: int) -> PoissonSampler:
    """The sampler of a run, with operating-system randomness unless the run is a stamped test."""
    return PoissonSampler(
        units,
        privacy.q,
        max_batch_size=privacy.max_batch_size,
        dataset_size=privacy.public_dataset_size,
        insecure_seed=privacy.insecure_noise_seed,
    )
