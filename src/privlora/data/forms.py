"""Of which form records are, by the names of their columns: texts, a prompt and its answer, chats, preferences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

COLUMN: Final = re.compile(r"[^\W\d][\w.-]{0,39}")
"""What a column may be called to be shown. Of a table without a header, a record stands where the names belong."""

_LONGEST: Final = 40  # characters
_TEXT: Final = 5  # words, one more than names have
_WORDS: Final = re.compile(r"[^\W\d][\w.-]*(?: [\w.-]+){0,3}")
_USUAL_NAMES = """id uid user user_id patient patient_id author customer customer_id client_id age sex gender date year
time timestamp title label labels category input_ids"""
_USUAL: Final = frozenset(_USUAL_NAMES.split())
"""Beside its texts, what a table usually has."""

# In the order of preference.
_PAIRS: Final = (
    *(("prompt", each) for each in ("completion", "response", "answer", "output", "reply")),
    *(("instruction", each) for each in ("output", "response", "completion", "answer")),
    *(("question", each) for each in ("answer", "response", "solution", "output", "completion")),
    *(("problem", each) for each in ("solution", "answer")),
    *(("query", each) for each in ("response", "answer", "output")),
    *(("input", each) for each in ("output", "target", "response", "completion")),
    *(("source", "target"), ("request", "reply"), ("dialogue", "summary"), ("document", "summary")),
    *(("article", "highlights"), ("article", "summary"), ("context", "response")),
)
_MORE: Final = {"instruction": ("input", "context"), "question": ("context", "passage", "input")}
"""A prompt's column -> columns that belong to the prompt, too."""
_TEXTS_NAMES = """text content body note notes document message review abstract report comment post article email
transcript letter story description summary sentence"""
_TEXTS: Final = tuple(_TEXTS_NAMES.split())
_TITLES: Final = ("title", "subject", "headline")
_CHATS: Final = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
PREFERENCES: Final = (
    *(("chosen", "rejected"), ("preferred", "rejected"), ("accepted", "rejected")),
    *(("better", "worse"), ("winner", "loser")),
)
_ASKED: Final = ("prompt", "question", "instruction", "query", "input")
_KNOWN: Final = _USUAL.union(_TEXTS, _TITLES, _CHATS, _ASKED, *_PAIRS, *PREFERENCES)


Named = tuple[dict[str, str], str]
"""Settings of the group data, and why, in a comment."""


def spoken(texts: Sequence[str], chats: Sequence[str]) -> Named | None:
    """Preferences or chats. texts, chats: columns that hold them in every record, in their order."""
    of_text = {name.lower(): name for name in texts}
    of_chat = {name.lower(): name for name in chats}
    of_text["prompt"] = asked = next((of_text[each] for each in _ASKED if each in of_text), "")
    for better, worse in PREFERENCES:
        for columns in (of_chat, of_text):
            if better in columns and worse in columns and (columns is of_chat or asked):
                prompt = {"prompt": columns["prompt"]} if "prompt" in columns else {}
                pair = {"chosen": columns[better], "rejected": columns[worse]}
                return prompt | pair, "a better and a worse answer, by their names: learnt by DPO"
    if {"prompt", "completion"} <= of_chat.keys():
        parts = {each: of_chat[each] for each in ("prompt", "completion")}
        return parts | {"loss_on": "completion"}, "a prompt and its answer, as messages"
    found = [of_chat[each] for each in _CHATS if each in of_chat] or list(chats)
    return ({"messages": found[0], "loss_on": "completion"}, "messages, by their form") if found else None


def written(texts: Sequence[str], plain: Sequence[str]) -> Named | None:
    """A prompt and its answer, or a text. texts: columns that are text in every record, and not blank in most; plain:
    also where most are blank."""
    of_text = {name.lower(): name for name in texts}
    for first, second in _PAIRS:
        if first in of_text and second in of_text:
            return _pair(of_text, plain, first, second), "a prompt and its answer, by their names"
    for name in _TEXTS:
        if name in of_text:
            title = next((of_text[each] for each in _TITLES if each in of_text), None)
            form = of_text[name] if title is None else f"{{{title}}}\n{{{of_text[name]}}}"
            return {"text": form}, "by the names of columns"
    return None


def _pair(texts: Mapping[str, str], plain: Sequence[str], first: str, second: str) -> dict[str, str]:
    known = {name.lower(): name for name in plain}
    more = next((known[each] for each in _MORE.get(first, ()) if each in known), None)
    prompt = texts[first] if more is None else f"{{{texts[first]}}}\n{{{more}}}"
    return {"prompt": prompt, "completion": texts[second], "loss_on": "completion"}


def built_as_chat(value: object) -> bool:
    """Whether it is a list whose entries are built as messages are: each says who speaks."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, Mapping) and bool({"role", "from"} & each.keys()) for each in value)


def is_usual(column: str) -> bool:
    """Whether it is called as columns of tables usually are, so that its name says nothing of a record."""
    return column.lower() in _KNOWN


def are_names(columns: Iterable[str], rows: Sequence[Mapping[str, Any]] | None = None) -> bool:
    """Whether all columns may be shown that records share: as names of one word; or of several, with one that tables
    usually have. Of a table without a header, a person's name has two words, too.

    rows: records of a table whose first line the columns are. That line may be a record, and is none where a column of
    one word holds texts in nearly all rows. None: columns are keys of records.
    """
    columns = list(columns)
    if rows is not None and not any(COLUMN.fullmatch(each) and _holds_texts(each, rows) for each in columns):
        return False
    if all(map(COLUMN.fullmatch, columns)):
        return True
    beside = any(map(is_usual, columns))
    return beside and all(len(each) <= _LONGEST and _WORDS.fullmatch(each) for each in columns)


def _holds_texts(column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether hardly any row's value could be a name."""
    values = [row.get(column) for row in rows]
    texts = sum(isinstance(v, str) and len(v.split()) >= _TEXT for v in values)
    return len(values) > 1 and texts >= 0.9 * len(values)
