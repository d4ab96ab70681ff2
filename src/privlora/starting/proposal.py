"""A first run's settings, each with the reason in a comment.

Of the records nothing stands in them but names of columns and rounded numbers; comments say which are published, and
docs/sharp-edges.md from what each of them follows.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import yaml

from privlora.config import settings_from
from privlora.config.auto import AUTO, RANK, VERY_NOISY, run_sizes
from privlora.config.groups import RunSettings
from privlora.config.schema import FILE as SCHEMA
from privlora.data.formats import Format
from privlora.data.records import HUB, field_of, is_data_file_name
from privlora.data.units import Grouping
from privlora.errors import ConfigError, DataError, named
from privlora.rounding import to_one_digit
from privlora.starting.bases import Base, look_at
from privlora.starting.columns import Form
from privlora.starting.draft import Draft, Plain, scalar
from privlora.starting.survey import Survey, turn_text

__all__ = ["Asked", "checked_text", "look_at", "owners_of", "propose", "refuse_epsilon", "top_of"]

_MOST_FIT = 0.95  # of the records, by length
_VERY_FEW = 50
_WIDTH = 115
_CHECKPOINTS = 10  # of a short run
_WRAPPING = 8  # tokens that begin, end and set off a text
_TURNS = 48  # of turns, with a template's system prompt
_LONGEST = 63  # letters of a client's name

_WHYS: Final = {
    "model.dtype": "it is stored in float16, whose gradients overflow; float32 is exact, and twice as large",
    "data.path": "PRIVATE records: neither they nor this path are published",
    "data.format": "as you said",
    "data.loss_on": "only answers are learnt",
    "data.max_length": "{fits}. PUBLISHED, like all settings of the method",
    "data.chat_template": "plain text, since this tokenizer has none: change it; use the same one to ask the model",
    "adapter.r": "rank: more adapts more, and spreads the noise over more numbers; 4 to 8 were best",
    "adapter.target_modules": "those outside of attention did better (docs/results.md). all-linear: all layers",
    "privacy.unit": "all records of one user are protected together; numbers below count users",
    "privacy.target_epsilon": "the promise: 1 is strong, 3 usual, 8 weak; smaller means more noise",
    "privacy.delta": "adds to it as a leak of this probability would: a power of ten, at most 0.1 / number of {whose}",
    "privacy.public_dataset_size": "PUBLISHED: your number of {whose} to one digit. Write what may be published",
    "privacy.expected_batch_size": "{of_all}{batch} of {n}: large batches leave less noise than many steps",
    "privacy.steps": "{steps} noisy steps, {passes:.2g} passes over the data. `privlora plan --sizes` weighs others",
    "federation.clients": "whose records: names are PUBLISHED, paths are not",
    "federation.rounds": "how often the server asks its clients",
    "federation.local_steps": "noisy steps of a client in a round; {steps} in all are charged",
    "federation.rule": "each client adds all of its noise itself, so it has to trust nobody",
    "method.name": "`privlora methods` lists the others",
    "method.learning_rate": "found before the run, from what its noise alone does to the model: no record takes part",
    "privacy.clip_norm": "each record's gradient is cut to this: a quarter of the usual one on the model's own texts",
    "method.metric_power": "what the update has grown in moves on faster; 0: all alike",
    "method.right_weight": "0.25 to 1: less where the start knows the layers' inputs, as texts of the model's own show",
    "method.clipping": "measured better on so few records: small gradients are not lost in noise (docs/choosing.md)",
    "run.output": "release/ may be published, private/ never",
    "run.checkpoint_every": "a crash costs the steps since the last checkpoint, charged already",
    "run.tokens_per_micro_batch": "as much at once as memory has room for; results stay the same",
}

PLAIN_CHAT: Final = """\
{{- bos_token }}
{%- for message in messages %}
  {{- message.role + ': ' + message.content }}
  {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
  {%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
  {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""A chat template of plain text, where the tokenizer has none: it needs no tokens of its own."""


FEW: Final = 2000
"""Up to so many units public texts may teach more (docs/few-records.md)."""


@dataclass(frozen=True)
class Numbers:
    """n: units as they are published. delta: a power of ten, as YAML. batch: expected units in a step."""

    n: int
    delta: str
    batch: int
    steps: int

    @property
    def few(self) -> bool:
        return self.n <= FEW

    @property
    def noisy(self) -> bool:
        return self.n <= VERY_NOISY


def _numbers_for(units: int) -> Numbers:
    """units: the true number, of which only its first digit is used."""
    n = to_one_digit(units)
    steps, batch = run_sizes(n)
    return Numbers(n, _delta_for(n), round(batch), steps)


def _rounds_for(steps: int) -> tuple[int, int]:
    """Of a federation: how many rounds of how many local steps make about so many steps of each client.

    >>> _rounds_for(10), _rounds_for(67), _rounds_for(1)
    ((5, 2), (17, 4), (1, 1))
    """
    local = min(steps, 4 if steps >= 20 else 2)
    return -(-steps // local), local


def _delta_for(n: int) -> str:
    """The largest power of ten that is at most 1 / (10 N) for every N that is n in one digit.

    >>> _delta_for(10_000), _delta_for(4000), _delta_for(1)
    ('1e-6', '1e-5', '1e-1')
    """
    # N rounded up: a smaller delta promises more, and of 1,499, which are 1,000 here, 1e-4 is above a tenth of 1 / N.
    size = 10 ** (len(str(n)) - 1)
    most = n + size - 1 - size // 2
    exponent = 1
    while 10**exponent < 10 * most:
        exponent += 1
    return f"1e-{exponent}"


LONGEST: Final = 2048
"""Tokens of a record that are proposed at most."""


def _length_for(tokens: float, positions: int | None) -> int:
    """A power of two from 64 to 2048 that is at least ``tokens``, and at most what the model reads.

    >>> _length_for(100, None), _length_for(9000, None), _length_for(700, 512)
    (128, 2048, 512)
    """
    length = 64
    while length < min(tokens, LONGEST):
        length *= 2
    return length if positions is None else min(length, positions)


class _Owner(NamedTuple):
    """A client of a federation: its public name and its file."""

    name: str
    path: str


@dataclass(frozen=True)
class Asked:
    """What the command line says. user: a column, for unit: user. target: the YAML, where it is named. clients: owners
    of one path each, of a federation. form: of all files; auto: by their endings."""

    paths: tuple[str, ...]
    epsilon: float
    user: str | None = None
    target: Path | None = None
    clients: tuple[_Owner, ...] = ()
    form: Format = "auto"

    @property
    def stem(self) -> str:
        """A name for the YAML and the run, after the first file."""
        if self.clients:
            return "federation"
        first = self.paths[0]
        name = first.removeprefix(HUB).partition(":")[0] if first.startswith(HUB) else first
        name = Path(name).name
        return (name.removesuffix(".gz").rpartition(".")[0] or name).strip() or "run"


def owners_of(paths: Sequence[str]) -> tuple[_Owner, ...]:
    """The clients of a federation: each file is one owner's, and its name the client's. paths: of files, or of folders
    whose data files are meant. Raises DataError for fewer than two files."""
    files = list[str]()
    for path in paths:
        folder = Path(path).expanduser()
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        found = [str(each) for each in inside if each.is_file() and is_data_file_name(each.name)]
        files += found if folder.is_dir() else [path]
    if len(files) < 2:
        what = f"--clients, and {len(files)} file{'s' * (len(files) != 1)} of records: at least two owners take part"
        fix = "give two owners' files or a folder of them; without --clients it is a run in one place"
        raise DataError(what, fix=fix)
    stems = (Path(file).name.removesuffix(".gz").partition(".")[0] for file in files)
    names = [re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:_LONGEST] for stem in stems]
    if len({name.lower() for name in names}) < len(names) or not all(names):
        names = [f"client-{number}" for number in range(1, len(files) + 1)]
    return tuple(map(_Owner, names, files))


def propose(asked: Asked, found: Survey, form: Form, base: Base) -> tuple[Draft, list[str]]:
    """The settings, and what to say of them on the screen. Raises DataError for a column of users that is none."""
    draft, notes = Draft(_WHYS), list[str]()
    draft.put("model.name", base.name, "a local folder" if base.local else "a model of the hub")
    if base.in_float16:
        draft.put("model.dtype", "bfloat16")
    draft.remark(
        "model", "quantization: 4bit   # where memory is short (QLoRA; pip install 'privlora[quant]')"
    )
    _data(draft, asked, found, form, base, notes)
    draft.put("adapter.r", RANK)
    numbers = _numbers_for(found.records if asked.user is None else _users(found, asked.user))
    texts = draft.get("data.chosen") is None
    if base.dense and texts and not (numbers.noisy or asked.clients):
        draft.put("adapter.target_modules", "feed-forward")
    _privacy(draft, asked, found, numbers, notes)
    if numbers.n < _VERY_FEW:
        whose = "users" if asked.user else "records"
        notes.append(f"so few {whose} can hardly be learnt from with privacy: expect little")
    if asked.clients:
        _federation(draft, asked, numbers)
    else:
        _method(draft, numbers, texts=texts)
    name = asked.stem if asked.target is None else asked.target.stem
    outputs = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 10**6))
    draft.put("run.output", str(next(each for each in outputs if not each.exists())))
    if asked.clients:
        return draft, notes
    often = numbers.steps // _CHECKPOINTS
    if often < RunSettings.model_fields["checkpoint_every"].default:
        draft.put("run.checkpoint_every", max(1, often))
    draft.put("run.tokens_per_micro_batch", "auto")
    return draft, notes


def top_of(target: Path, source: str) -> list[str]:
    """The comments that the YAML begins with. source: what it is made from, in words."""
    first = f"Editors complete settings with `privlora settings --schema > {SCHEMA}` next to this file."
    if (target.parent / SCHEMA).is_file():
        first = f"yaml-language-server: $schema={SCHEMA}"
    made = f"Proposed by `privlora init` from {source}. Nothing here is final: read the comments, change what you like."
    return [
        first,
        *textwrap.wrap(made, _WIDTH, break_long_words=False, break_on_hyphens=False),
        "What a setting means: `privlora settings privacy.delta`. All of them: docs/settings.md.",
        "",
        f"  privlora plan {target}     what it costs; reads no record",
        f"  privlora train {target}",
    ]


def checked_text(draft: Draft, top: Iterable[str]) -> str:
    """The YAML. Raises ConfigError where settings that were asked for contradict each other."""
    content = draft.written(top)
    settings_from(yaml.safe_load(content), source="the proposed settings")
    return content


def _data(draft: Draft, asked: Asked, found: Survey, form: Form, base: Base, notes: list[str]) -> None:
    if not asked.clients:
        draft.put("data.path", asked.paths[0] if len(asked.paths) == 1 else list(asked.paths))
    if asked.form != "auto":
        draft.put("data.format", asked.form)
    if found.lines and asked.form == "auto":
        notes.append(
            "each line of a .txt that is not blank is one record, with a unit and an epsilon of its own: where blank "
            "lines divide records of several lines, add --format paragraphs"
        )
    for name, value in form.settings.items():
        draft.put(f"data.{name}", value)
    if form.why:
        notes.append(f"columns: {', '.join(form.used)} ({form.why})")
    if base.chats is False and form.chats:
        _chat_template(draft, asked, base)
    length, counted = _length(found, form, base)
    # By the length alone, which stands there: a word on how many are longer would tell more of the records.
    at_limit = length in (LONGEST, base.positions)
    fits = f"in tokens; most records fit, by {counted}"
    if at_limit:
        whose = f"at most {LONGEST} are proposed"
        if length == base.positions:
            whose = f"the model's limit of {length}"
        fits = f"in tokens, {whose}: longer records are cut"
    draft.put("data.max_length", length, fits=fits)
    if at_limit and "text" in form.settings and not asked.clients:
        chunk = "divides longer texts instead of cutting them; all chunks of one are one unit"
        draft.remark("data", f"chunk: true   # {chunk}")
    if base.tokenizer is None:
        notes.append(
            f"no tokenizer of {base.name} is on this disk: data.max_length is guessed from characters"
        )
    labelled = found.label is not None and found.label not in form.used and not asked.clients
    if labelled and "text" in form.settings:
        draft.remark(
            "data",
            f"To learn to predict {found.label} instead of writing texts (docs/classification.md):",
            f"label: {found.label}   # and remove what is auto in method, and privacy.clip_norm",
            "labels: 2   # all that there can be: how many, or their names, as {0: negative, 1: positive}. PUBLIC",
        )
    public = "a PUBLIC file with these columns: its loss shows what is learnt. Never private"
    draft.remark("data", f"evaluation: public.jsonl   # {public}")


def _length(found: Survey, form: Form, base: Base) -> tuple[int, str]:
    characters = sum(np.asarray(found.columns[name].lengths, np.int64) for name in form.used)
    ratio = base.tokens_per_character(_texts(form, found.first))
    tokens = float(np.quantile(characters, _MOST_FIT)) * ratio + _WRAPPING
    if base.chats and "text" not in form.settings:
        tokens += _TURNS
    counted = "characters, since no tokenizer is at hand" if base.tokenizer is None else "its tokenizer"
    return _length_for(tokens, base.positions), counted


def _texts(form: Form, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        for name in form.used:
            value = field_of(record, name)
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
        what = f"column {named(column)} does not name a user in every record"
        why = "a record that belongs to nobody cannot be protected at the level of its user"
        fix = "write every value of it as a string that is not empty, or leave out --user"
        raise DataError(what, why=why, fix=fix)
    return users


def _privacy(draft: Draft, asked: Asked, found: Survey, numbers: Numbers, notes: list[str]) -> None:
    whose = "users" if asked.user else "records"
    of_all = " of all clients together" if asked.clients else ""
    if asked.user is not None:
        draft.put("privacy.unit", "user")
        draft.put("privacy.user_column", asked.user)
    epsilon = int(asked.epsilon) if asked.epsilon == int(asked.epsilon) else asked.epsilon
    draft.put("privacy.target_epsilon", epsilon)
    draft.put("privacy.delta", Plain(numbers.delta), whose=whose)
    draft.put("privacy.public_dataset_size", numbers.n, whose=whose + of_all)
    n, steps, batch = numbers.n, numbers.steps, numbers.batch
    written, of_all = (None, f"{of_all.strip()}; ") if asked.clients else (AUTO, "")
    draft.put("privacy.expected_batch_size", batch, written=written, batch=batch, n=n, of_all=of_all)
    if not asked.clients:
        draft.put("privacy.steps", steps, written=written, steps=steps, passes=steps * batch / n)
    if asked.user is None and found.repeated is not None:
        notes.append(
            f"column {found.repeated} repeats: if it names people, --user {found.repeated} protects each person, and "
            "not each record by itself"
        )
        draft.remark(
            "privacy",
            f"WARNING: column {found.repeated} repeats. If it names people, protect each person by the next two lines",
            f"and let the sizes above count people. Or run `privlora init` with --user {found.repeated}.",
            "unit: user",
            f"user_column: {found.repeated}",
        )


def _chat_template(draft: Draft, asked: Asked, base: Base) -> None:
    """One of our own, for a tokenizer that has none. Raises DataError in a federation, which reads none."""
    if asked.clients:
        raise DataError(
            f"the tokenizer of {base.name!r} has no chat template, which messages need",
            why="a template in the settings is a program, and would run where the clients' records are",
            fix="give an instruction-tuned model, or records with --text or --prompt and --completion",
        )
    draft.put("data.chat_template", PLAIN_CHAT, written=f"|-\n{textwrap.indent(PLAIN_CHAT, '    ')}")


def _federation(draft: Draft, asked: Asked, numbers: Numbers) -> None:
    """Who takes part, and how often; instead of privacy.steps and of a local method, which is the rule's."""
    rounds, local = _rounds_for(numbers.steps)
    owners = [each._asdict() for each in asked.clients]
    lines = "".join(f"\n    - {scalar(owner)}" for owner in owners)
    draft.put("federation.clients", owners, written=lines)
    draft.put("federation.rounds", rounds)
    draft.put("federation.local_steps", local, steps=rounds * local)
    draft.put("federation.rule", "tan")
    draft.remark(
        "federation",
        "rule: joint     # less noise for the same epsilon, if clients are online together and keep their shares of",
        "                # the noise to themselves; then local_steps: 1 and more rounds (docs/federated.md)",
    )


def _method(draft: Draft, numbers: Numbers, *, texts: bool) -> None:
    """texts: whether it learns to write them, and no preferences."""
    draft.put("method.name", "prism")
    if texts:
        draft.put("method.learning_rate", AUTO)
        if not numbers.noisy:  # which are clipped to one length, whatever it is
            draft.put("privacy.clip_norm", AUTO)
            draft.put("method.metric_power", 1)
            draft.put("method.right_weight", AUTO)
    else:
        draft.remark(
            "method",
            "No learning_rate: the method's own stands for it, which follows from the number of steps. auto knows",
            "texts that a model writes, and no preferences (docs/preferences.md).",
        )
    if numbers.noisy:
        draft.put("method.clipping", "automatic")
    if not numbers.few or not texts:
        return
    draft.remark(
        "method",
        "With PUBLIC texts of a similar kind, other methods may learn more from so few (docs/few-records.md):",
        "add `synthesis: {file: public.jsonl}`, and `privlora plan --advise` rehearses which does.",
    )


def refuse_epsilon(epsilon: float) -> None:
    """Raise ConfigError for what is no epsilon that a run can have."""
    from privlora.accounting.calibration import LARGEST_EPSILON, SMALLEST_EPSILON

    if not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
        limits = f"from {SMALLEST_EPSILON:g} to {LARGEST_EPSILON:g}"
        what = f"--epsilon {epsilon:g} is no promise: it is {limits}"
        raise ConfigError(what, fix="give a number such as 3; more than 8 protects little")
