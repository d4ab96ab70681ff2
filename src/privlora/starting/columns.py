"""Which columns a run is to learn, guessed by their names or told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from privlora.config import DataSettings
from privlora.data import forms
from privlora.data.formats import Format, separator_of
from privlora.data.forms import are_names
from privlora.data.records import COLUMN, has_column, missing_column
from privlora.data.templates import parse
from privlora.data.units import Grouping
from privlora.errors import ConfigError, DataError, RecordError, Together, in_one
from privlora.starting.survey import Survey
from privlora.training.preflight import Check, are_read_twice, check_of, refuse_unusable_files

_LONGER = 4  # than every other column, of the one that must be the text

ASK: Final = "name them: --text COLUMN; or --prompt COLUMN --completion COLUMN; or --messages COLUMN"


@dataclass(frozen=True)
class Form:
    """settings: of the group data. used: all columns that they name. why: in a comment. chats: whether a chat template
    has to render them."""

    settings: dict[str, str]
    used: tuple[str, ...]
    why: str
    chats: bool = False


Told = str | None


def _form_of(
    found: Survey, text: Told = None, prompt: Told = None, completion: Told = None, messages: Told = None
) -> Form:
    """What was told, or the best guess by most records. Raises DataError where columns cannot be guessed or are in no
    record, ConfigError for a form that is none."""
    given = [text, prompt or completion, messages]
    if sum(each is not None for each in given) > 1 or (prompt is None) != (completion is None):
        fix = "give only one of: --text; --prompt and --completion; --messages"
        raise ConfigError("the form of the records is given more than once, or by halves", fix=fix)
    if text is not None:
        return _checked(found, {"text": text}, "as you said")
    if prompt is not None and completion is not None:
        told = {"prompt": prompt, "completion": completion, "loss_on": "completion"}
        return _checked(found, told, "as you said")
    if messages is not None:
        _refuse_missing(found, {messages: "--messages"})
        return Form({"messages": messages, "loss_on": "completion"}, (messages,), "as you said", chats=True)
    return _guess(found)


def fitting_form(
    path: Sequence[str], form: Format, found: Survey, user: str | None = None, **told: str | None
) -> Form:
    """`_form_of` what was ``told``, after a look whether all records are of it. path, form: the files and their format.
    user: column of a record's user. Raises DataError for all that is no record, or none of this form, by its lines."""
    problems = Together()
    chosen = problems.of(None, lambda: _form_of(found, **told))
    problems.of(None, _refuse_no_user, found, user)
    if found.broken or chosen is None or found.lacks(chosen.used) or are_read_twice(path):
        check = None
        if chosen is not None:
            owner = user if user in found.columns else None
            data = DataSettings(path=list(path), **chosen.settings)  # type: ignore[arg-type]
            check = _of_all(chosen.used, check_of(data, Grouping(owner)))
        problems.of(None, refuse_unusable_files, path, form, None, check)
    problems.tell()
    assert chosen is not None
    return chosen


def _refuse_no_user(found: Survey, user: str | None) -> None:
    """Raise DataError for a column of users that is in no record."""
    if user is not None and user not in found.columns:
        raise _missing(found, user, "--user")


def _of_all(columns: Iterable[str], check: Check) -> Check:
    """A check of records, all of which shall have these columns; those of one that lacks them are not shown."""

    def of(record: Mapping[str, Any], number: int) -> None:
        for name in columns:
            if not has_column(record, name):
                fix = "write a text there, or remove the record"
                raise RecordError(number, f"has no column {name!r}, which most records have", fix=fix)
        check(record, number)

    return of


def _checked(found: Survey, settings: dict[str, str], why: str) -> Form:
    """With columns that some record has. Raises DataError, for all that are in none."""
    named = {
        field: f"--{name}"
        for name, value in settings.items()
        if name != "loss_on"
        for _, field in parse(value)
        if field is not None
    }
    _refuse_missing(found, named)
    chats = not {*found.mostly("chat"), *found.mostly("seems")}.isdisjoint(named)
    return Form(settings, tuple(named), why, chats)


def _refuse_missing(found: Survey, named: Mapping[str, str]) -> None:
    """named: column -> the option that names it."""
    lacking = [_missing(found, name, option) for name, option in named.items() if name not in found.columns]
    if lacking:
        raise in_one(lacking)


def _missing(found: Survey, name: str, option: str) -> DataError:
    """The error for a column that is in no record. Columns of most records alone are shown."""
    shared = found.common if _may_be_shown(found) else ()
    columns = dict.fromkeys(found.common)
    return missing_column(name, columns, 1, shared=shared, mend=f"{option} NAME").of(option)


def _may_be_shown(found: Survey) -> bool:
    """Whether no column looks like the content of a record."""
    if found.table:
        return are_names(map(str, found.columns), found.first)
    return are_names(found.common)


def _guess(found: Survey) -> Form:
    mark = separator_of(found.columns)
    if mark is not None:
        what = f"the table has one column, and {mark!r} in its name: it seems to be separated by that, not by commas"
        raise DataError(what, fix="write it with commas, or as JSONL")
    names = [name for name in found.columns if COLUMN.fullmatch(str(name))]

    def named(kind: str) -> list[str]:
        return [name for name in found.mostly(kind) if name in names]

    texts = named("filled")
    # What is wrong with lists that seem to be messages is told, and no other column learnt instead.
    guess = (
        forms.spoken(texts, named("chat"))
        or forms.written(texts, named("text"))
        or forms.spoken((), named("seems"))
    )
    if guess is not None:
        return _checked(found, *guess)
    # Where one column is named by a record, any may be.
    longest = _longest(found, texts) if len(names) == len(found.columns) else None
    if longest is not None:
        return longest
    raise DataError(f"which columns hold the text cannot be guessed; {_shown(found)}", fix=ASK)


def _longest(found: Survey, texts: list[str]) -> Form | None:
    """The only text, or one that is far longer than the others."""
    means = sorted(((sum(found.columns[name].lengths) / found.records, name) for name in texts), reverse=True)
    if len(means) > 1 and means[0][0] < _LONGER * means[1][0]:
        return None
    if not means or (len(means) > 1 and means[0][0] < 40):
        return None
    why = "the only column of text" if len(means) == 1 else "by far the longest texts"
    return _checked(found, {"text": means[0][1]}, why)


def _shown(found: Survey) -> str:
    """Columns as an error shows them: no key of few records, and none where one looks like the content of a record."""
    if not _may_be_shown(found):
        return "they are not shown, since they look like contents (does the file have a header line?)"
    names = found.common
    if not names:
        return "no column is in most of the records, so the files seem to be of several kinds: init one of them alone"
    return f"most records have: {', '.join(names[:20])}" + (" and more" if len(names) > 20 else "")
