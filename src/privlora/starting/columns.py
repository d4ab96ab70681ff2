"""Which columns a run is to learn, guessed by their names or told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from privlora.data.formats import separator_of
from privlora.data.records import COLUMN, missing_column
from privlora.data.templates import parse
from privlora.errors import ConfigError, DataError
from privlora.starting.survey import Survey

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
_TEXTS: Final = (
    *(
        "text",
        "content",
        "body",
        "note",
        "notes",
        "document",
        "message",
        "review",
        "abstract",
        "report",
        "comment",
    ),
    *("post", "article", "email", "transcript", "letter", "story", "description", "summary", "sentence"),
)
_TITLES: Final = ("title", "subject", "headline")
_CHATS: Final = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
_PREFERENCES: Final = (
    ("chosen", "rejected"),
    ("preferred", "rejected"),
    ("accepted", "rejected"),
    ("better", "worse"),
    ("winner", "loser"),
)
_ASKED: Final = ("prompt", "question", "instruction", "query", "input")
_LONGER = 4  # than every other column, of the one that must be the text

ASK: Final = "name them: --text COLUMN; or --prompt COLUMN --completion COLUMN; or --messages COLUMN"


@dataclass(frozen=True)
class Form:
    """settings: of the group data. used: all columns that they name. why: in a comment."""

    settings: dict[str, str]
    used: tuple[str, ...]
    why: str

    @property
    def chats(self) -> bool:
        """Whether a chat template renders them."""
        return "messages" in self.settings or ("chosen" in self.settings and "prompt" not in self.settings)


def form_of(
    found: Survey,
    text: str | None = None,
    prompt: str | None = None,
    completion: str | None = None,
    messages: str | None = None,
) -> Form:
    """What was told, or the best guess. Raises DataError where columns cannot be guessed or used, ConfigError for a
    form that is none."""
    given = [text, prompt or completion, messages]
    if sum(each is not None for each in given) > 1 or (prompt is None) != (completion is None):
        raise ConfigError(
            "the form of the records is given more than once, or by halves",
            fix="give only one of: --text; --prompt and --completion; --messages",
        )
    if text is not None:
        return _checked(found, {"text": text}, "as you said")
    if prompt is not None and completion is not None:
        return _checked(
            found, {"prompt": prompt, "completion": completion, "loss_on": "completion"}, "as you said"
        )
    if messages is not None:
        return _chat(found, messages, "as you said")
    return _guess(found)


def _checked(found: Survey, settings: dict[str, str], why: str) -> Form:
    """With columns that are text in every record."""
    used = tuple(
        dict.fromkeys(
            field
            for name, value in settings.items()
            if name != "loss_on"
            for _, field in parse(value)
            if field is not None
        )
    )
    for name in used:
        if name not in found.columns:
            raise missing_column(name, dict.fromkeys(found.common), 1)
        if name not in found.plain:
            raise DataError(
                f"column {name!r} is not a text in every record",
                fix="write every value of it as a string (an empty one if there is nothing to say), or name another",
            )
    return Form(settings, used, why)


def _chat(found: Survey, name: str, why: str) -> Form:
    if name not in found.columns:
        raise missing_column(name, dict.fromkeys(found.common), 1)
    if name not in found.chats:
        column = found.columns[name]
        if column.foreign:
            raise DataError(
                f"column {name!r} holds messages as from/value",
                fix="write them as role/content, with the role user for human and assistant for gpt",
            )
        raise DataError(
            f"column {name!r} is not a list of messages in every record",
            fix='write it as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    return Form({"messages": name, "loss_on": "completion"}, (name,), why)


def _guess(found: Survey) -> Form:
    mark = separator_of(found.columns)
    if mark is not None:
        raise DataError(
            f"the table has one column, and {mark!r} in its name: it seems to be separated by that, not by commas",
            fix="write it with commas, or as JSONL",
        )
    names = [name for name in found.columns if COLUMN.fullmatch(str(name))]
    spelt = {name.lower(): name for name in names}
    texts = {name.lower(): name for name in found.texts if name in names}
    foreign = [name for name in names if found.columns[name].foreign == found.records]
    preferences = _preferences(found, spelt)
    if preferences is not None:
        return preferences
    chats = [spelt[each] for each in _CHATS if spelt.get(each) in found.chats]
    chats += [name for name in names if name in found.chats]
    if chats:
        return _chat(found, chats[0], "messages, by their form")
    if foreign:
        return _chat(found, foreign[0], "")  # says how to write them
    for first, second in _PAIRS:
        if first in texts and second in texts:
            return _checked(
                found, _pair(found, texts, first, second), "a prompt and its answer, by their names"
            )
    for name in _TEXTS:
        if name in texts:
            title = next((texts[each] for each in _TITLES if each in texts), None)
            form = texts[name] if title is None else f"{{{title}}}\n{{{texts[name]}}}"
            return _checked(found, {"text": form}, "by the names of columns")
    # Where one column is named by a record, any may be.
    longest = _longest(found, list(texts.values())) if len(names) == len(found.columns) else None
    if longest is not None:
        return longest
    raise DataError(f"which columns hold the text cannot be guessed; {_shown(found)}", fix=ASK)


def _preferences(found: Survey, spelt: dict[str, str]) -> Form | None:
    """Two answers to a prompt, or two chats."""
    why = "a better and a worse answer, by their names: learnt by DPO"
    asked = next((spelt[each] for each in _ASKED if spelt.get(each) in found.texts), None)
    for names in _PREFERENCES:
        pair = [spelt[each] for each in names if each in spelt]
        settings = dict(zip(("chosen", "rejected"), pair, strict=False))
        if len(pair) == 2 and all(each in found.chats for each in pair):
            return Form(settings, tuple(pair), why)
        if len(pair) == 2 and asked is not None and all(each in found.texts for each in pair):
            return _checked(found, {"prompt": f"{{{asked}}}\n", **settings}, why)
    return None


def _pair(found: Survey, texts: dict[str, str], first: str, second: str) -> dict[str, str]:
    """Formats in which the answer is set off from the prompt."""
    prompt, completion = texts[first], texts[second]
    plain = {name.lower(): name for name in found.plain if COLUMN.fullmatch(name)}
    more = next((plain[each] for each in _MORE.get(first, ()) if each in plain), None)
    if first == "question" and more is None:
        form = f"Question: {{{prompt}}}\nAnswer: "
    elif more is not None:
        form = f"{{{prompt}}}\n{{{more}}}\n\n"
    else:  # whatever stands between them in these records: one of them would decide what is published
        form = f"{{{prompt}}}\n\n" if first == "instruction" else f"{{{prompt}}}\n"
    return {"prompt": form, "completion": completion, "loss_on": "completion"}


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
    if not all(COLUMN.fullmatch(str(name)) for name in found.columns):
        return "they are not shown, since they look like contents (does the file have a header line?)"
    names = found.common
    return f"most records have: {', '.join(names[:20]) or 'none'}" + (" and more" if len(names) > 20 else "")
