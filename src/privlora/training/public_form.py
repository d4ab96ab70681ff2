"""How a public text stands where a private record would: in the same columns, under the same template.

Of records with one text it stands in that column. Of records with prompts and answers, or with messages, there are two
ways. A writer answers one fixed prompt, ``synthesis.random_prompt``, so its texts are answers under that prompt, as in
PE-SGD. The records of ``synthesis.file`` have the columns of the private ones; as text each is its own JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from privlora.config import Settings, SynthesisSettings
from privlora.data.examples import Template
from privlora.data.records import field_of, load_records, text_of
from privlora.data.rendering import TOOLS, messages_of, told_by, tools_of
from privlora.data.templates import parse
from privlora.errors import ConfigError, DataError
from privlora.methods import VOTE_METHODS


@dataclass(frozen=True)
class PublicForm:
    """Of a run with a group ``synthesis``; `text_column` and `template` also of one without."""

    settings: Settings

    @property
    def _chosen(self) -> SynthesisSettings:
        assert self.settings.synthesis is not None
        return self.settings.synthesis

    @property
    def _asks(self) -> bool:
        """Whether records have a prompt or messages, and nothing else is made of them."""
        data = self.settings.data
        return data.task is None and data.chosen is None and (data.prompt or data.messages) is not None

    @property
    def template(self) -> Template | None:
        """Of records with prompts, which a writer is asked by too; None of whole texts."""
        return Template(**self.settings.data.columns) if self._asks else None

    @property
    def text_column(self) -> str:
        """The column in whose place a generated text stands. Raises ConfigError for records of several parts."""
        template = Template(**self.settings.data.columns)
        if self.settings.data.task is None and template.text is not None and len(template.used) == 1:
            return next(iter(template.used))
        raise ConfigError(
            "synthesis writes whole texts, and data describes records of several parts",
            why="a generated text has to be read as the private records are",
            fix='set data.text to one column, or to a format with one, as "Review: {text}"; methods that train along '
            "gradients of public texts also take data.prompt with data.completion, or data.messages",
        )

    def refuse_none(self) -> None:
        """Raise ConfigError where no public text can be read as the private records are."""
        chosen = self._chosen
        if not self._asks or chosen.publish or self.settings.method.name in VOTE_METHODS:
            _ = self.text_column
        elif chosen.generator == "file":
            return
        elif chosen.random_prompt is None:
            raise ConfigError(
                "records have prompts, and synthesis.random_prompt is not set",
                why="the public answers need the user turn that the private ones have",
                fix="set it to that prompt, in words that are public; or give PUBLIC records with the same columns, as "
                "`synthesis: {file: PUBLIC.jsonl}`",
            )
        elif self.settings.data.messages is None and len(set(self._answer_columns())) < 2:
            raise ConfigError(
                "the writer answers one fixed prompt, and data describes prompts or answers of several columns",
                fix="set data.prompt to one column, and data.completion to another one or a format with it; or give "
                "PUBLIC records with the same columns, as `synthesis: {file: PUBLIC.jsonl}`",
            )

    def records(self, texts: Sequence[str]) -> list[Mapping[str, Any]]:
        """The records that public texts stand for, where `refuse_none` lets the settings pass."""
        messages, prompt = self.settings.data.messages, self._chosen.random_prompt
        if not self._asks:
            column = self.text_column
            return [{column: text} for text in texts]
        if self._chosen.generator == "file":
            return [json.loads(text) for text in texts]
        if messages is not None:
            asked = {"role": "user", "content": prompt}
            return [{messages: [asked, {"role": "assistant", "content": text}]} for text in texts]
        asks, answers = self._answer_columns()
        return [{asks: prompt, answers: text} for text in texts]

    def file_texts(self) -> list[str]:
        """The texts of synthesis.file, each of which `records` reads; none where another writer is asked. Raises
        DataError, which says of which record."""
        if self._chosen.file is None:
            return []
        column = None if self._asks else self.text_column
        try:
            return [
                self._written(record, number) if column is None else text_of(record, column, number)
                for number, record in enumerate(load_records(self._chosen.file), 1)
            ]
        except DataError as error:
            raise error.of("synthesis.file, read by the columns of data") from None

    def file_records(self) -> Sequence[Mapping[str, Any]]:
        """Those of synthesis.file as they stand there, so that a copy of a private one is found in whatever form."""
        assert self._chosen.file is not None
        return load_records(self._chosen.file) if self._asks else self.records(self.file_texts())

    def _answer_columns(self) -> list[str]:
        """The prompt's column and the answer's; fewer where one of them is made of several, or a format asks."""
        data, found = self.settings.data, list[str]()
        assert data.prompt is not None
        assert data.completion is not None
        for form in (data.prompt, data.completion):
            fields = {field for _, field in parse(form) if field is not None}
            if len(fields) == 1 and (form is data.completion or form in fields):
                found.append(fields.pop())
        return found

    def _written(self, record: Mapping[str, Any], number: int) -> str:
        """What the template reads of a record, as JSON."""
        found: dict[str, Any] = {}
        for name in sorted(Template(**self.settings.data.columns).used):
            if name == self.settings.data.messages or isinstance(field_of(record, name), list):
                found[name] = messages_of(record, number, name)
            else:
                found[name] = text_of(record, name, number)
        if tools := tools_of(record, number):
            found[TOOLS] = tools
        if told := told_by(record, number):
            found["chat_template_kwargs"] = told
        return json.dumps(found)
