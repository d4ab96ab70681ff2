"""What a file of private records is, in one pass: its columns, and how long texts are. Private, and shown to nobody."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from privlora.training.record_looks import refuse_unusable_files

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
    """Of all records: in how many there is a value, texts, texts that say something, lists of messages, and lists that
    are built as if of messages; lengths in characters.

    units: digests of values, where the name is one of users or asked for; None once a value is no unit.
    """

    held: int = 0
    texts: int = 0
    filled: int = 0
    chats: int = 0
    seem_chats: int = 0
    lengths: array[int] = field(default_factory=lambda: array("q"))
    units: set[int] | None = None
    kinds: set[type] = field(default_factory=set)

    def add(self, value: object) -> None:
        """The value of one more record."""
        self.held += is_there(value)
        if isinstance(value, str):
            self.texts += 1
            self.filled += bool(value.strip())
            self.lengths.append(len(value))
        else:
            self.lengths.append(_chat_length(value))
            self.chats += _is_chat(value)
            self.seem_chats += built_as_chat(value)
        if self.units is not None:
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
        return self._mostly(lambda column: column.held)

    @property
    def texts(self) -> list[str]:
        """Columns that are text, and not blank."""
        return self._mostly(lambda column: column.filled)

    @property
    def plain(self) -> list[str]:
        """Columns that are text, also where most are blank."""
        return self._mostly(lambda column: column.texts)

    @property
    def chats(self) -> list[str]:
        """Columns of messages."""
        return self._mostly(lambda column: column.chats)

    @property
    def seem_chats(self) -> list[str]:
        """Columns of what is built as if of messages."""
        return self._mostly(lambda column: column.seem_chats)

    def _mostly(self, count: Callable[[Column], int]) -> list[str]:
        return [name for name, column in self.columns.items() if 2 * count(column) > self.records]

    def lacks(self, names: Iterable[str]) -> bool:
        """Whether one of these columns is neither a text nor a chat in some record."""
        found = [self.columns[name] for name in names]
        return any(max(column.texts, column.chats) < self.records for column in found)

    def users(self, name: str) -> int | None:
        """How many units a column makes; None if a value of it names none."""
        column = self.columns.get(name)
        if (
            column is None
            or column.units is None
            or len(column.lengths) < self.records
            or len(column.kinds) > 1
        ):
            return None
        return len(column.units)

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
        raise DataError(
            f"{shown(twice)} is given twice",
            why="each record would be two units, and epsilon that of a half of it",
            fix="give each file once",
        )
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
            column = columns.get(name)
            if column is None:
                counted = name == user or _OF_USERS.fullmatch(str(name))
                column = columns[name] = Column(units=set() if counted else None)
            column.add(value)
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
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(each, Mapping)
            and (isinstance(each.get("content"), str) or speaks_by_calls(each))
            and each.get("role") in ROLES
            for each in map(with_role, value)
        )
    )


def turn_text(message: Mapping[str, Any]) -> str:
    """About what a chat template writes of a message: its content, and calls of tools and the like as JSON."""
    content = message.get("content", message.get("value"))
    rest = {
        key: value
        for key, value in message.items()
        if key not in ("role", "from", "content", "value") and value is not None
    }
    text = content if isinstance(content, str) else ""
    return text + (json.dumps(rest, ensure_ascii=False, default=str) if rest else "")


def _chat_length(value: Any) -> int:
    if not isinstance(value, list):
        return 0
    return sum(len(turn_text(each)) + _TURN for each in value if isinstance(each, Mapping))
