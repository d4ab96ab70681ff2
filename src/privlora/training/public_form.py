"""How a public text stands where a private record would: in the same columns, under the same template.

Of records with one text it stands in that column. Of records with prompts and answers, or with messages, there are two
ways. A writer answers one fixed prompt, ``synthesis.random_prompt``, so its texts are answers under that prompt, as in
PE-SGD. The records of ``synthesis.file`` have the columns of the private ones; as text each is its own JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from privlora.config import DataSettings, Settings
from privlora.data.examples import Template
from privlora.data.records import field_of, load_records, text_of
from privlora.data.rendering import TOOLS, messages_of, told_by, tools_of
from privlora.data.templates import parse
from privlora.errors import ConfigError, DataError
from privlora.methods import VOTE_METHODS


def text_column(data: DataSettings) -> str:
    """The column in whose place a generated text stands. Raises ConfigError for records of several parts."""
    template = Template(**data.columns)
    if data.task is None and template.text is not None and len(template.used) == 1:
        return next(iter(template.used))
    raise ConfigError(
        "synthesis writes whole texts, and data describes records of several parts",
        why="a generated text has to be read as the private records are",
        fix='set data.text to one column, or to a format with one, as "Review: {text}"; methods that train along '
        "gradients of public texts also take data.prompt with data.completion, or data.messages",
    )


def refuse_formless(settings: Settings) -> None:
    """Raise ConfigError where no public text can be read as the private records are."""
    data, chosen = settings.data, settings.synthesis
    assert chosen is not None
    if not _asks(data) or chosen.publish or settings.method.name in VOTE_METHODS:
        text_column(data)
    elif chosen.generator == "file":
        return
    elif chosen.random_prompt is None:
        raise ConfigError(
            "records have prompts, and synthesis.random_prompt is not set",
            why="the public answers need the user turn that the private ones have",
            fix="set it to that prompt, in words that are public; or give PUBLIC records with the same columns, as "
            "`synthesis: {file: PUBLIC.jsonl}`",
        )
    elif data.messages is None and len(set(_answer_columns(data))) < 2:
        raise ConfigError(
            "the writer answers one fixed prompt, and data describes prompts or answers of several columns",
            fix="set data.prompt to one column, and data.completion to another one or a format with it; or give PUBLIC "
            "records with the same columns, as `synthesis: {file: PUBLIC.jsonl}`",
        )


def as_records(texts: Sequence[str], settings: Settings) -> list[Mapping[str, Any]]:
    """The records that public texts stand for; settings are those that `refuse_formless` lets pass."""
    data, chosen = settings.data, settings.synthesis
    assert chosen is not None
    if not _asks(data):
        column = text_column(data)
        return [{column: text} for text in texts]
    if chosen.generator == "file":
        return [json.loads(text) for text in texts]
    prompt = chosen.random_prompt
    if data.messages is not None:
        asked = {"role": "user", "content": prompt}
        return [{data.messages: [asked, {"role": "assistant", "content": text}]} for text in texts]
    asks, answers = _answer_columns(data)
    return [{asks: prompt, answers: text} for text in texts]


def file_texts(settings: Settings) -> list[str]:
    """The texts of synthesis.file, each of which `as_records` reads. Raises DataError, which says of which record."""
    data, chosen = settings.data, settings.synthesis
    assert chosen is not None
    assert chosen.file is not None
    column = None if _asks(data) else text_column(data)
    try:
        return [
            _written(record, number, data) if column is None else text_of(record, column, number)
            for number, record in enumerate(load_records(chosen.file), 1)
        ]
    except DataError as error:
        raise error.of("synthesis.file, read by the columns of data") from None


def public_records(settings: Settings) -> Sequence[Mapping[str, Any]]:
    """Those of synthesis.file as they stand there, so that a copy of a private one is found in whatever form it is."""
    assert settings.synthesis is not None
    assert settings.synthesis.file is not None
    if _asks(settings.data):
        return load_records(settings.synthesis.file)
    return as_records(file_texts(settings), settings)


def record_template(data: DataSettings) -> Template | None:
    """Of records with prompts, which a writer is asked by too; None of whole texts."""
    return Template(**data.columns) if _asks(data) else None


def _asks(data: DataSettings) -> bool:
    """Whether records have a prompt or messages, and nothing else is made of them."""
    return data.task is None and data.chosen is None and (data.prompt or data.messages) is not None


def _answer_columns(data: DataSettings) -> Iterator[str]:
    """The prompt's column and the answer's; fewer where one of them is made of several, or a format asks."""
    assert data.prompt is not None
    assert data.completion is not None
    for form in (data.prompt, data.completion):
        fields = {field for _, field in parse(form) if field is not None}
        if len(fields) == 1 and (form is data.completion or form in fields):
            yield fields.pop()


def _written(record: Mapping[str, Any], number: int, data: DataSettings) -> str:
    """What the template reads of a record, as JSON."""
    found: dict[str, Any] = {}
    for name in sorted(Template(**data.columns).used):
        if name == data.messages or isinstance(field_of(record, name), list):
            found[name] = messages_of(record, number, name)
        else:
            found[name] = text_of(record, name, number)
    if tools := tools_of(record, number):
        found[TOOLS] = tools
    if told := told_by(record, number):
        found["chat_template_kwargs"] = told
    return json.dumps(found)
