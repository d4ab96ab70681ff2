"""A first run's settings, each with the reason in a comment.

Of the records nothing stands in them but names of columns and rounded numbers; comments say which are published, and
docs/sharp-edges.md from what each of them follows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from privlora.config import settings_from
from privlora.config.auto import AUTO, PASSES
from privlora.config.groups import RunSettings
from privlora.config.schema import FILE as SCHEMA
from privlora.data.records import HUB
from privlora.data.units import Grouping
from privlora.errors import ConfigError, DataError, named
from privlora.starting.bases import Base, look_at
from privlora.starting.columns import Form
from privlora.starting.draft import Draft, Plain
from privlora.starting.files import free
from privlora.starting.numbers import Numbers, delta_for, length_for, numbers_for, to_one_digit
from privlora.starting.survey import Survey, turn_text

__all__ = ["Asked", "checked_text", "look_at", "propose", "refuse_epsilon", "top_of"]

_MOST_FIT = 0.95  # of the records, by length
_VERY_FEW = 50
_WIDTH = 115
_CHECKPOINTS = 10  # of a short run
_WRAPPING = 8  # tokens that begin, end and set off a text


@dataclass(frozen=True)
class Asked:
    """What the command line says. user: a column, for unit: user. target: the YAML, where it is named."""

    paths: tuple[str, ...]
    epsilon: float
    user: str | None = None
    target: Path | None = None

    @property
    def stem(self) -> str:
        """A name for the YAML and the run, after the first file."""
        first = self.paths[0]
        name = first.removeprefix(HUB).partition(":")[0] if first.startswith(HUB) else first
        name = Path(name).name
        return (name.removesuffix(".gz").rpartition(".")[0] or name).strip() or "run"


def propose(
    asked: Asked, found: Survey, form: Form, base: Base, *, long_given: bool = False
) -> tuple[Draft, list[str]]:
    """The settings, and what to say of them on the screen. long_given: whether max_length is taken from elsewhere.

    Raises DataError for a column of users that is none.
    """
    draft, notes = Draft(), list[str]()
    draft.put("model.name", base.name, "a local folder" if base.local else "a model of the hub")
    draft.remark(
        "model", "quantization: 4bit   # where memory is short (QLoRA; pip install 'privlora[quant]')"
    )
    _data(draft, asked, found, form, base, notes, long_given)
    draft.put("adapter.r", 16, "rank: more adapts more, and spreads the noise over more numbers")
    units = found.records if asked.user is None else _users(found, asked.user)
    numbers = numbers_for(units)
    _privacy(draft, asked, found, numbers, notes)
    if numbers.n < _VERY_FEW:
        notes.append(
            f"so few {'users' if asked.user else 'records'} can hardly be learnt from with privacy: expect little"
        )
    _method(draft, numbers, texts=draft.get("data.chosen") is None)
    name = asked.stem if asked.target is None else asked.target.stem
    draft.put("run.output", str(free(Path("runs") / name)), "release/ may be published, private/ never")
    often = numbers.steps // _CHECKPOINTS
    if often < RunSettings.model_fields["checkpoint_every"].default:
        draft.put(
            "run.checkpoint_every",
            max(1, often),
            "a crash costs the steps since the last checkpoint, charged already",
        )
    draft.put(
        "run.tokens_per_micro_batch", "auto", "as much at once as memory has room for; results stay the same"
    )
    if base.chats is False and form.chats:
        raise DataError(
            f"the tokenizer of {base.name!r} has no chat template, which messages need",
            fix="give an instruction-tuned model, or records with --text or --prompt and --completion; or write the "
            f"YAML for such a model, name {base.name} in it, and a template of your own as data.chat_template",
        )
    return draft, notes


def top_of(target: Path, source: str) -> list[str]:
    """The comments that the YAML begins with. source: what it is made from, in words."""
    schema = target.parent / SCHEMA
    first = (
        [f"yaml-language-server: $schema={SCHEMA}"]
        if schema.is_file()
        else [f"Editors complete settings with `privlora settings --schema > {SCHEMA}` beside this file."]
    )
    return [
        *first,
        f"Proposed by `privlora init` from {source}. Nothing here is final: read the comments, change what you like.",
        "What a setting means: `privlora settings privacy.delta`. All of them: docs/settings.md.",
        "",
        f"  privlora plan {target}     what it costs; reads no record",
        f"  privlora train {target}",
    ]


def checked_text(draft: Draft, top: Iterable[str], end: Sequence[str]) -> str:
    """The YAML. Raises ConfigError where settings that were asked for or taken over contradict each other."""
    lines = [
        part
        for line in end
        for part in textwrap.wrap(
            line, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False
        )
    ]
    heading = ["Not taken over:", *lines] if end else []
    content = draft.written(top, heading)
    settings_from(yaml.safe_load(content), source="the proposed settings")
    return content


def _data(
    draft: Draft, asked: Asked, found: Survey, form: Form, base: Base, notes: list[str], long_given: bool
) -> None:
    path = asked.paths[0] if len(asked.paths) == 1 else list(asked.paths)
    draft.put("data.path", path, "PRIVATE records; nothing of them is published")
    for name, value in form.settings.items():
        why = "only answers are learnt" if name == "loss_on" else ""
        draft.put(f"data.{name}", value, why)
    if form.why:
        notes.append(f"columns: {', '.join(form.used)} ({form.why})")
    length, counted = _length(found, form, base)
    limit = "" if base.positions is None else f", at most the model's {base.positions}"
    draft.put(
        "data.max_length",
        length,
        f"in tokens; most records fit, by {counted}{limit}. PUBLISHED, like all settings of the method",
    )
    if base.tokenizer is None and not long_given:
        notes.append(
            f"no tokenizer of {base.name} is on this disk: data.max_length is guessed from characters"
        )
    if found.label is not None and "text" in form.settings and found.label not in form.used:
        notes.append(
            f"column {found.label} seems to hold labels: data.label and data.labels, a comment in the YAML, train a "
            "classifier of them"
        )
        draft.remark(
            "data",
            f"To learn to predict {found.label} in the place of writing texts (docs/classification.md):",
            f"label: {found.label}   # and remove method.learning_rate",
            "labels: 2   # all that there can be: how many, or their names, as [no, yes]. PUBLIC",
        )
    draft.remark(
        "data",
        "evaluation: public.jsonl   # a PUBLIC file with these columns: its loss shows what is learnt. Never private",
    )


def _length(found: Survey, form: Form, base: Base) -> tuple[int, str]:
    characters = sum(np.asarray(found.columns[name].lengths, np.int64) for name in form.used)
    ratio = base.tokens_per_character(_texts(form, found.first))
    tokens = float(np.quantile(characters, _MOST_FIT)) * ratio + _WRAPPING
    counted = "characters, since no tokenizer is at hand" if base.tokenizer is None else "its tokenizer"
    return length_for(tokens, base.positions), counted


def _texts(form: Form, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        for name in form.used:
            value = record[name]
            if isinstance(value, str):
                yield value
            else:
                yield from map(turn_text, value)


def _users(found: Survey, column: str) -> int:
    """How many. Raises DataError for a column that is none of users."""
    users = found.users(column)
    if users is None:
        for number, record in enumerate(found.first, start=1):
            grouping = Grouping(column)
            grouping.add(record, number)  # says what is wrong, if it is so early
        raise DataError(
            f"column {named(column)} does not name a user in every record",
            why="a record that belongs to nobody cannot be protected at the level of its user",
            fix="write every value of it as a string that is not empty, or leave out --user",
        )
    return users


def _privacy(draft: Draft, asked: Asked, found: Survey, numbers: Numbers, notes: list[str]) -> None:
    whose = "users" if asked.user else "records"
    if asked.user is not None:
        draft.put(
            "privacy.unit",
            "user",
            "all records of one user are protected together; numbers below count users",
        )
        draft.put("privacy.user_column", asked.user)
    epsilon = int(asked.epsilon) if asked.epsilon == int(asked.epsilon) else asked.epsilon
    draft.put(
        "privacy.target_epsilon",
        epsilon,
        "the promise: 1 is strong, 3 usual, 8 weak; smaller means more noise",
    )
    draft.put(
        "privacy.delta", Plain(numbers.delta), f"a power of ten, at most a tenth of 1 / number of {whose}"
    )
    draft.put(
        "privacy.public_dataset_size",
        numbers.n,
        f"PUBLISHED: your number of {whose} to one digit. Write what you are willing to publish",
    )
    if numbers.few:
        batch, steps = (
            "a fifth: few records need large shares of them",
            "few steps, as measured best (docs/few-records.md)",
        )
    else:
        batch = f"{numbers.batch} of {numbers.n}: large batches leave less noise than many steps"
        steps = f"{numbers.steps} noisy releases, {PASSES:g} passes over the data. `privlora recommend` weighs others"
    written = None if numbers.few else AUTO
    draft.put("privacy.expected_batch_size", numbers.batch, batch, written=written)
    draft.put("privacy.steps", numbers.steps, steps, written=written)
    if asked.user is None and found.repeated is not None:
        _propose_users(draft, found, found.repeated)
        notes.append(
            f"records repeat values of column {found.repeated}: if it names people, --user {found.repeated} protects "
            "all records of one together, and not each by itself"
        )


def _propose_users(draft: Draft, found: Survey, column: str) -> None:
    users = found.users(column)
    assert users is not None
    other = numbers_for(users)
    draft.remark(
        "privacy",
        f"Values of column {column} repeat. If it names people, protect all records of one together, with",
        "numbers that count them, in the place of those above:",
        "unit: user",
        f"user_column: {column}",
        f"delta: {delta_for(to_one_digit(users))}",
        f"public_dataset_size: {other.n}",
        f"expected_batch_size: {other.batch}",
        f"steps: {other.steps}",
    )


def _method(draft: Draft, numbers: Numbers, *, texts: bool) -> None:
    """texts: whether it learns to write them, and no preferences."""
    draft.put("method.name", "prism", "`privlora methods` lists the others")
    if texts:
        draft.put(
            "method.learning_rate",
            AUTO,
            "found before the run begins, from what its noise alone does to the model: no record takes part",
        )
    draft.remark(
        "method",
        "A learning rate of your own is a share of each weight's norm; with relative_rate: false it is in entries, as",
        "AdamW's (docs/methods.md).",
    )
    if not numbers.few:
        return
    draft.put(
        "method.clipping",
        "automatic",
        "measured better on few records: small gradients are not lost in noise",
    )
    draft.remark(
        "method",
        "With PUBLIC texts of a similar kind, other rows may learn more from so few records, and auto rehearses which",
        "does (docs/few-records.md): write name: auto here, without a learning_rate, and add",
        "  synthesis: {generator: file, file: public.jsonl}",
    )


def refuse_epsilon(epsilon: float) -> None:
    """Raise ConfigError for what is no epsilon."""
    if not 0 < epsilon < float("inf"):
        raise ConfigError(f"--epsilon {epsilon:g} is no promise", fix="give a number above 0, as 3")
