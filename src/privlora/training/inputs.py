"""A run's records: read, checked, tokenised, grouped into units; none of the public ones among the private."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Final

import numpy as np
import torch

from privlora.config import AT_CLIENTS, IN_MEMORY, ClientSettings, DataSettings, PrivacySettings, Settings
from privlora.config.auto import MOST_TEXTS
from privlora.config.groups import PUBLIC_TEXTS
from privlora.data.examples import OWN_WORDS, Examples, Template, build_examples, have_shared_tokens
from privlora.data.labelled import build_labelled
from privlora.data.preferences import build_preferences
from privlora.data.records import as_records, content_hash, iterate_records, load_records, text_of
from privlora.data.summary import DataSummary, refuse_implausible, summarise
from privlora.data.tasks import find_task, labelled_record, task_record
from privlora.data.units import Grouping, Units, group_units
from privlora.errors import DataError, PrivacyError, Together
from privlora.methods import VOTE_METHODS
from privlora.training.model_checks import positions_of, refuse_unknown_tokens
from privlora.training.preflight import (
    are_read_twice,
    check_of,
    read_files,
    refuse_unusable,
    refuse_unusable_files,
)
from privlora.training.preflight import check_sources as check_sources
from privlora.training.promise import sampler
from privlora.training.public_form import PublicForm


@dataclass
class Data:
    """Tokenised private records, their units, and the public evaluation records (empty if none).

    texts: PRIVATE, what each record says, for rows that release votes; else none. public: evaluation records as they
    were given.
    """

    examples: Examples
    units: Units
    evaluation: Examples
    texts: Sequence[str] = ()
    public: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def summary(self) -> DataSummary:
        """Of the private records; private itself."""
        return summarise(self.examples, len(self.units))

    @cached_property
    def proof(self) -> str:
        """SHA-256 of the private records and their units, in whatever order both are; private itself."""
        return sha256(np.sort(self._each_unit()).view(np.uint8).data).hexdigest()

    @property
    def places(self) -> str:
        """SHA-256 of the units in their order, which ``proof`` leaves out; private itself."""
        return sha256(self._each_unit().view(np.uint8).data).hexdigest()

    def _each_unit(self) -> np.ndarray:
        units = np.empty(len(self.units), "S32")
        for number, unit in enumerate(self.units):
            units[number] = sha256(b"".join(sorted(self.examples[i].digest for i in unit))).digest()
        return units


def fitted(settings: Settings, model: torch.nn.Module) -> Settings:
    """The settings with data.max_length lowered to what the model reads, unless it was set."""
    data, positions = settings.data, positions_of(model)
    if positions is None or positions >= data.max_length or "max_length" in data.model_fields_set:
        return settings
    return settings.model_copy(update={"data": data.model_copy(update={"max_length": positions})})


def load_data(
    settings: Settings,
    tokenizer: Any,
    records: Any = None,
    evaluation: Any = None,
    *,
    model: torch.nn.Module | None = None,
    all_public: bool = False,
    whose: Callable[[Data], None] | None = None,
) -> Data:
    """Read, check, tokenise and group the records.

    records, evaluation: what stands for data.path and data.evaluation (Python callers), see ``as_records``. model: the
    one that is to read them, so that tokens that it does not know are refused. all_public: of studies, whose records
    are public all, so that any of them may be evaluated on. whose: refuses other records than a run's, before anything
    is said of how many they are.

    Raises DataError for records that cannot be used or cannot be what was said of them (data.unchecked), PrivacyError
    for public ones among the private, and for another number of units than was accounted for.
    """
    data, privacy = settings.data, settings.privacy
    if records is not None:
        records = as_records(records)
    if evaluation is None and data.evaluation is not None:
        evaluation = load_records(data.evaluation, format=data.format)
    evaluation = [] if evaluation is None else as_records(evaluation)
    public = _public(settings, evaluation) if privacy.private and not all_public else {}
    reading = _Reading(data)
    hashes: dict[str, Set[bytes]] = {
        name: {found for record in reading.shown(given) if (found := content_hash(record, reading.columns))}
        for name, given in public.items()
    }
    held_out = tokenise(evaluation, data, tokenizer)
    tokens = {
        name: held_out if given is evaluation else tokenise(given, data, tokenizer)
        for name, given in public.items()
    }
    _refuse_chosen_on(hashes, tokens)
    if records is None:
        records = iterate_records(data.path, format=data.format)
    loaded = _read(settings, tokenizer, hashes, records, held_out)
    loaded.public = evaluation
    if whose is not None:
        whose(loaded)
    _refuse_unaccounted(privacy, len(loaded.units))
    # What is written otherwise may be the same to the model: other keys, another boundary, an end that is cut off.
    for name, given in tokens.items():
        if have_shared_tokens(loaded.examples, given):
            raise _shared(
                name,
                f"to the model, once texts are cut at max_length={data.max_length}: all of their tokens, or all that "
                f"are trained on where these are {OWN_WORDS} or more, as an answer under another prompt",
                "; or raise data.max_length, where what differs is cut off",
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


def load_all(
    settings: Settings, tokenizer: Any, records: Any = None, evaluation: Any = None, **more: Any
) -> Data:
    """`load_data`, which ends at the first record that cannot be used; here all of them are told, by their lines. For
    that lists and local files that are not large are gone through again, to their end. more: as there."""
    try:
        return load_data(settings, tokenizer, records, evaluation, **more)
    except DataError:
        refuse_all_unusable(settings, tokenizer, records, evaluation)
        raise


def refuse_all_unusable(
    settings: Settings, tokenizer: Any, records: Any = None, evaluation: Any = None
) -> None:
    """Raise DataError for all records that cannot be used, in whatever file or list they are."""
    problems, data, public_form = Together(), settings.data, PublicForm(settings)
    public, owner = check_of(data, None, tokenizer), settings.privacy.user_column
    private = check_of(data, Grouping(owner), tokenizer)

    def written(record: Mapping[str, Any], number: int) -> None:
        if public_form.template is None:
            text_of(record, public_form.text_column, number)
        else:
            public(record, number)

    for setting, paths, form, limit in read_files(settings, records, evaluation):
        check = private if setting == "data.path" else written if setting == "synthesis.file" else public
        if not {IN_MEMORY, AT_CLIENTS}.intersection(paths) and are_read_twice(paths):
            problems.of(None, refuse_unusable_files, paths, form, limit, check)
    if isinstance(records, list):
        problems.of(None, refuse_unusable, records, private)
    if isinstance(evaluation, list):
        try:
            refuse_unusable(evaluation, public)
        except DataError as error:
            problems.found.append(error.of("evaluation"))
    problems.tell()


def _refuse_chosen_on(hashes: Mapping[str, Set[bytes]], tokens: Mapping[str, Examples]) -> None:
    """Raise DataError where evaluation records are among those that choose settings. All of them are public."""
    chosen, held_out = "auto.file", "data.evaluation"
    if chosen not in hashes or held_out not in hashes:
        return
    if hashes[chosen] & hashes[held_out] or have_shared_tokens(tokens[held_out], tokens[chosen]):
        raise DataError(
            f"{chosen} holds records of {held_out}",
            why="the held-out loss would be that of texts that chose the settings",
            fix="divide the public records between the two",
        )


def _refuse_unaccounted(privacy: PrivacySettings, units: int) -> None:
    """Raise PrivacyError for another number of units than the statement can be about."""
    if privacy.private and privacy.delta is not None and privacy.delta >= 1 / max(1, units):
        raise PrivacyError(
            f"privacy.delta={privacy.delta:g} is not below 1 / number of units",
            why="publishing one whole unit would satisfy it",
            fix="set it to a tenth of 1 / number of units, or less",
        )
    sampler(privacy, units)  # refuses more units than the cap was accounted for, before the run exists


def _read(
    settings: Settings,
    tokenizer: Any,
    hashes: Mapping[str, Set[bytes]],
    records: Iterable[Mapping[str, Any]],
    held_out: Examples,
) -> Data:
    """Private records on their way from where they lie to tokens. They pass by one after the other; what else is asked
    of them is asked then: whose they are, whether they are public, what votes.

    hashes: of the contents of public records, by the setting that names them. Raises DataError, and PrivacyError for
    what is public.
    """
    data, grouping, texts = settings.data, Grouping(settings.privacy.user_column), list[str]()
    reading = _Reading(data)
    columns = reading.columns
    votes = PublicForm(settings).text_column if settings.method.name in VOTE_METHODS else None

    def passing() -> Iterator[Mapping[str, Any]]:
        for number, record in enumerate(records, start=1):
            grouping.add(record, number)
            shown = reading.of_task(record, number)
            content = content_hash(shown, columns) if hashes else None
            for name, public in hashes.items():
                if content in public:
                    raise _shared(name, f"in {', '.join(sorted(columns))}")
            if votes is not None:
                texts.append(text_of(shown, votes, number))
            yield shown

    examples = reading.built(passing(), tokenizer)
    unit_of_record = grouping.unit_of_record()
    if examples.chunks is not None:
        unit_of_record = np.repeat(unit_of_record, examples.chunks)
    bounded = settings.privacy.unit == "user" or data.chunk
    units = Units(unit_of_record, settings.rows_of_a_unit if bounded else None)
    return Data(examples, units, held_out, texts)


def load_clients(
    settings: Settings,
    tokenizer: Any,
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    evaluation: Any = None,
    *,
    whose: Callable[[Data], None] | None = None,
) -> Data:
    """`load_data` of all clients of a federation together, in their order. records: of each client, by its name. whose:
    as there.

    Raises what `load_data` does; a DataError that is true of one owner's records alone names the client, and counts its
    records from its own first.
    """
    union = [record for own in records.values() for record in own]
    try:
        return load_all(settings, tokenizer, union, evaluation, whose=whose)
    except DataError:
        clients = None if settings.federation is None else settings.federation.clients
        if clients is None or isinstance(clients, int):  # parts of one owner's records
            raise
        for client in clients:
            try:
                _load_alone(settings, tokenizer, client, records[client.name])
            except DataError as error:
                raise error.of(f"client {client.name}") from None
        raise


def _load_alone(
    settings: Settings, tokenizer: Any, client: ClientSettings, records: Sequence[Mapping[str, Any]]
) -> None:
    """Raise DataError for what is wrong with these records by themselves; public numbers are of all clients."""
    data, privacy = settings.data, settings.privacy
    if client.path is not None and are_read_twice(
        paths := [client.path] if isinstance(client.path, str) else client.path
    ):
        check = check_of(data, Grouping(privacy.user_column), tokenizer)
        refuse_unusable_files(paths, data.format, None, check)
    refuse_unusable(records, check_of(data, Grouping(privacy.user_column), tokenizer))
    units = group_units(records, privacy.user_column)
    found = summarise(tokenise(records, data, tokenizer), len(units))
    if not data.unchecked:
        refuse_implausible(found, public_units=found.units, unit=privacy.unit, max_length=data.max_length)


_REVEALED: Final = {
    "data.evaluation": "their held-out loss would be published",
    "adapter.public_text": "the start of the training would reveal them",
    "synthesis.file": "private gradients would be released along their own",
    "auto.file": "what is chosen on them, and their losses, would be published without noise",
}


def _public(
    settings: Settings, evaluation: Sequence[Mapping[str, Any]]
) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The records that count as public, by the setting that names them."""
    lora, auto, form = settings.adapter, settings.auto, settings.data.format
    public: dict[str, Sequence[Mapping[str, Any]]] = {"data.evaluation": evaluation} if evaluation else {}
    if lora.public_text is not None:
        public["adapter.public_text"] = load_records(lora.public_text, format=form, limit=PUBLIC_TEXTS)
    if auto is not None and auto.file is not None:
        public["auto.file"] = load_records(auto.file, format=form, limit=MOST_TEXTS)
    if settings.synthesis is not None and settings.synthesis.file is not None:
        public["synthesis.file"] = PublicForm(settings).file_records()
    return public


class SharedRecordsError(PrivacyError):
    """Public records, of the setting ``named``, are private ones."""

    named: str


def _shared(name: str, how: str, else_: str = "") -> SharedRecordsError:
    """The error for public records that are private ones; which and how many is not told. else_: another way out."""
    error = SharedRecordsError(
        f"{name} holds records that are the same as private ones {how}",
        why=f"{_REVEALED[name]}. Which ones and how many is not told, being a fact about the private ones",
        fix=f"remove them from the public records; give others, or none{else_}",
    )
    error.named = name
    return error


def tokenise(records: Sequence[Mapping[str, Any]], data: DataSettings, tokenizer: Any) -> Examples:
    """The records as examples; ``data`` says which columns and how long."""
    reading = _Reading(data)
    return reading.built(reading.shown(records), tokenizer)


@dataclass(frozen=True)
class _Reading:
    """How records are read, by the columns, the task and the lengths of group data."""

    data: DataSettings

    @property
    def columns(self) -> frozenset[str]:
        """Those that say what a record is; its label does not."""
        data = self.data
        forms = [data.columns, *([] if data.rejected_columns is None else [data.rejected_columns])]
        pair = frozenset[str]() if data.pair is None else Template(text=data.pair).used
        return pair.union(*(Template(**each).used for each in forms))

    def of_task(self, record: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        if self.data.task is None:
            return record
        shown = task_record if self.data.label is None else labelled_record
        return shown(find_task(self.data.task), record, number)

    def shown(self, records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        return (self.of_task(record, number) for number, record in enumerate(records, start=1))

    def built(self, records: Iterable[Mapping[str, Any]], tokenizer: Any) -> Examples:
        data = self.data
        template, length, cut = Template(**data.columns), data.max_length, data.truncation_mode
        if data.classes is not None:
            pair = None if data.pair is None else Template(text=data.pair)
            return build_labelled(records, template, pair, data.classes, tokenizer, max_length=length)
        options: dict[str, Any] = {"max_length": length, "truncation_mode": cut}
        if data.rejected_columns is not None:
            rejected = Template(**data.rejected_columns)
            return build_preferences(records, template, rejected, tokenizer, beta=data.beta, **options)
        options |= {"loss_on": data.loss_on, "chunk": data.chunk}
        return build_examples(records, template, tokenizer, **options)
