"""What a file of private records is, in one pass: its columns, and how long texts are. Private, and shown to nobody."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from privlora.config.groups import named_twice
from privlora.data.formats import Format, Record
from privlora.data.forms import built_as_chat
from privlora.data.records import (
    COLUMN,
    HUB,
    TABLES,
    is_there,
    iterate_records,
    local_file,
    refuse_missing,
    shown,
)
from privlora.data.rendering import ROLES, speaks_by_calls, with_role
from privlora.errors import DataError
from privlora.training.preflight import refuse_unusable_files

SAMPLE: Final = 200
"""Records that are kept, from the first on, to count the tokens of."""

_TURN: Final = 20  # characters that templates write around a message

_OF_USERS: Final = re.compile(
    r"(user|patient|author|customer|client|member|person|subject|speaker|student|employee|account|writer|owner|"
    r"household|respondent|participant|sender)([_.-]?(id|name|number|no|key))?|uid",
    re.IGNORECASE,
)

_LABELS: Final = ("label", "labels", "class", "category", "sentiment", "rating", "stars", "intent", "topic")


@dataclass
class Column:
    """Of all records: in how many there is a value (held), a text, one that says something (filled), a list of messages
    (chat), and a list that is built as if of messages (seems); lengths in characters.

    units: digests of values, where the name is one of users or asked for; None once a value is no unit.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    units: set[int] | None = None
    kinds: set[type] = field(default_factory=set)

    def add(self, value: object) -> None:
        """The value of one more record."""
        said = {
            "held": is_there(value),
            "text": isinstance(value, str),
            "filled": isinstance(value, str) and bool(value.strip()),
            "chat": _is_chat(value),
            "seems": built_as_chat(value),
        }
        self.counts.update(kind for kind, holds in said.items() if holds)
        self.lengths.append(len(value) if isinstance(value, str) else _chat_length(value))
        if self.units is not None:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                self.units = None
            else:
                self.kinds.add(type(value))
                self.units.add(hash(value))


@dataclass
class Survey:
    """records: how many. columns: of any record. first: some records. broken: in how many places is no record. table:
    whether columns are those of a file's first line. lines: whether each line of a file is one.

    What a column holds is what it holds in most records: one that is wrong is told as such, and decides nothing.
    """

    records: int
    columns: dict[str, Column]
    first: list[Record]
    broken: int = 0
    table: bool = False
    lines: bool = False

    @property
    def common(self) -> list[str]:
        """Columns that more than half of the records have. The others may be about few, and are shown nowhere."""
        return self.mostly("held")

    def mostly(self, kind: str) -> list[str]:
        """Columns that are of a kind (`Column.counts`) in more than half of the records."""
        return [name for name, column in self.columns.items() if 2 * column.counts[kind] > self.records]

    def lacks(self, names: Iterable[str]) -> bool:
        """Whether one of these columns is neither a text nor a chat in some record."""
        found = [self.columns[name].counts for name in names]
        return any(max(counts["text"], counts["chat"]) < self.records for counts in found)

    def users(self, name: str) -> int | None:
        """How many units a column makes; None if a value of it names none."""
        column = self.columns.get(name)
        if column is None or column.units is None or len(column.lengths) < self.records:
            return None
        return len(column.units) if len(column.kinds) < 2 else None

    @property
    def label(self) -> str | None:
        """A column that seems to hold labels, by its name: what values it has decides nothing that is published."""
        return next((name for name in self.common if name.lower() in _LABELS), None)

    @property
    def repeated(self) -> str | None:
        """A column that seems to name users with several records each."""
        for name in sorted(self.columns, key=str):  # and not as the first record has them
            users = self.users(name) if _OF_USERS.fullmatch(name) and COLUMN.fullmatch(name) else None
            if users is not None and users < self.records:
                return name
        return None


def refuse_no_files(path: Sequence[str], form: Format = "auto") -> None:
    """Raise DataError for a local file that is not there, and one whose name does not say what it is."""
    twice = named_twice(path)
    if twice is not None:
        why = "each record would be two units, and epsilon that of a half of it"
        raise DataError(f"{shown(twice)} is given twice", why=why, fix="give each file once")
    refuse_missing(list(path), format=form, look=True)


def survey(path: Sequence[str], user: str | None = None, form: Format = "auto") -> Survey:
    """Read all records once. user: a column of which units are counted whatever its name. Raises DataError where there
    is no record."""
    refuse_no_files(path, form)
    columns: dict[str, Column] = {}
    first: list[Record] = []
    broken: list[DataError] = []
    number = 0
    for number, record in enumerate(_readable(path, form, broken), start=1):
        if number <= SAMPLE:
            first.append(record)
        for name, value in _fields(record):
            if name not in columns:
                counted = name == user or _OF_USERS.fullmatch(str(name))
                columns[name] = Column(units=set() if counted else None)
            columns[name].add(value)
    kinds = {local_file(each, form, look=True)[1] for each in path if not each.startswith(HUB)}
    return Survey(number, columns, first, len(broken), bool(kinds & TABLES), "text" in kinds)


def _fields(record: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    """Columns, and what is in them, by names such as ``note.text``."""
    for name, value in record.items():
        yield f"{outer}{name}", value
        if isinstance(value, Mapping):
            yield from _fields(value, f"{outer}{name}.")


def _readable(path: Sequence[str], form: Format, broken: list[DataError]) -> Iterator[Record]:
    """All that is a record; the rest is added to ``broken``. Raises DataError where nothing is."""
    try:
        yield from iterate_records(list(path), format=form, broken=broken.append)
    except DataError:
        if not broken:
            raise
        refuse_unusable_files(path, form, None, None)
        raise


def _is_chat(value: object) -> bool:
    return built_as_chat(value) and all(
        (isinstance(each.get("content"), str) or speaks_by_calls(each)) and each.get("role") in ROLES
        for each in map(with_role, value)  # type: ignore[call-overload]
    )


def turn_text(message: Mapping[str, Any]) -> str:
    """About what a chat template writes of a message: its content, and calls of tools and the like as JSON."""
    content = message.get("content", message.get("value"))
    shown = ("role", "from", "content", "value")
    rest = {key: value for key, value in message.items() if key not in shown and value is not None}
    text = content if isinstance(content, str) else ""
    return text + (json.dumps(rest, ensure_ascii=False, default=str) if rest else "")


def _chat_length(value: Any) -> int:
    if not isinstance(value, list):
        return 0
    return sum(len(turn_text(each)) + _TURN for each in value if isinstance(each, Mapping))
