"""The groups of a run's settings, each field documented below it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from privlora.config.auto import REHEARSED, AutoSettings, OrAuto, OrTrue, without_auto
from privlora.config.base import Countable, Group, Wrong, all_of
from privlora.config.chat_template import read_template
from privlora.config.federation import FederationSettings
from privlora.config.one_place import MICRO_BATCH, misplaced, of_mapping
from privlora.config.synthesis import SynthesisSettings
from privlora.data.formats import Format
from privlora.data.labels import Classes, Labels, classes_of
from privlora.data.records import shown
from privlora.data.tasks import TASKS
from privlora.data.templates import TAKEN, parse
from privlora.errors import ConfigError, PrivloraError, echoed, nearest
from privlora.names import EITHER, KEYWORD, KINDS, in_full
from privlora.ranges import BATCHES, CLIP_NORMS, MOST_BANDS, NOISE_MULTIPLIERS

_MOST_CHUNKS: Final = 8  # of a record in a step
_ONE_LINE = 10_000  # a path is found whole in the file
PUBLIC_TEXTS: Final = 384  # of adapter.public_text
_SHARES: Final = ("target_right_guesses", "target_found")  # one or both
_TARGETS: Final = ("target_epsilon", "noise_multiplier", *_SHARES)
_OFF_PASS = 0.05  # by how much a batch may differ from what a whole number of them in a pass has

IN_MEMORY = "(in memory)"
"""Stands for a path when a Python caller passes the records themselves."""

AT_CLIENTS = "(at the clients)"
"""Stands for data.path in a federation whose clients have records of their own."""


PACKINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "4bit": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_use_double_quant": True,
    },
    "8bit": {"load_in_8bit": True},
}
"""How frozen weights are packed, in the names of transformers' BitsAndBytesConfig."""


Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
Spread = Literal["auto", "balanced", "balanced_low_0", "sequential"]


class ModelSettings(Group):
    """The base model; it is never changed."""

    name: str
    """Local folder or hub name of a causal language model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the frozen weights. Clipping, sums and noise are float32 or better in any case."""
    gradient_checkpointing: Literal["none", "reentrant", "non-reentrant"] = "none"
    """Recompute activations in the backward pass to save memory; per-example gradients stay exact."""
    dropout: bool = False
    """Run the base model with its own dropout, whose masks stay secret. adapter.lora_dropout works either way."""
    device: str = "auto"
    """A torch device, such as cpu or cuda:0; auto takes a GPU if there is one."""
    fully_shard: bool = False
    """Spread the frozen weights over all processes of the run (torch's FSDP2), for a base that no device holds
    alone."""
    revision: str | None = None
    """Hub revision, so that a run can be repeated."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Pack the frozen weights with bitsandbytes; the adapter stays as it is. 4bit: as QLoRA, nf4 computed in bfloat16.
    8bit: units go through the model one by one, since such layers mix rows. For another packing give a packed folder or
    a loaded model."""
    attn_implementation: Attention | None = None
    """Which code computes attention, as transformers calls it; null takes what transformers does."""
    device_map: Spread | dict[str, int | str] | None = None
    """Spread the base over several devices, as transformers does, or by a mapping from names of modules to devices. All
    of it has to fit: nothing may lie on a disk meanwhile."""

    @property
    def packing(self) -> Mapping[str, Any] | None:
        """``quantization`` in the names of BitsAndBytesConfig."""
        return None if self.quantization is None else PACKINGS[self.quantization]

    @model_validator(mode="after")
    def _one_place(self) -> ModelSettings:
        if self.device_map is not None and self.device != "auto":
            raise Wrong("device and device_map both say where the model lies", "remove one of them", "device")
        return self


class AdapterSettings(Group):
    """The low-rank adapter, in the names of peft's LoraConfig."""

    r: int = Field(default=16, ge=1)
    """Rank of the update of each layer."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """The update is scaled by lora_alpha / r. Of no effect on training by prism, which does not depend on factors."""
    target_modules: str | list[str] = "all-linear"
    """Which layers are adapted: all-linear; feed-forward, those outside of attention by their names; auto, feed-forward
    where names show it and there are no experts; a list of name endings; or a regular expression over whole names. The
    words leave out layers that cannot be adapted or are narrower than r, which a plan and the report name."""
    exclude_modules: list[str] = Field(default=[])
    """Name endings of layers that are left out of target_modules."""
    layers_to_transform: list[int] | None = None
    """Numbers of the model's blocks that are adapted, from 0 on; null: all."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's inputs. Its masks are drawn from secret randomness."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead of lora_alpha / r."""
    init: str | None = None
    """Start of the adapter; null takes the method's own. random: as in LoRA. w0-subspace: inside the top singular
    vectors of the frozen weights. public-gradient: inside those of the mean gradient on public_text. These three begin
    at a zero update. spectral-split: the top part of the frozen weights; the exported rank is 2r. Or the folder of an
    adapter that was trained on other data."""
    public_text: str | list[str] | None = None
    """PUBLIC records for init=public-gradient, of the form that the group data describes. The first 384 are read. Never
    private ones."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _a_word_alone(cls, given: Any) -> Any:
        """In a list of its own it means the same."""
        alone = isinstance(given, list) and len(given) == 1 and given[0] in (*KINDS, EITHER)
        return given[0] if alone else given

    @model_validator(mode="after")
    def _text_for_the_start(self) -> AdapterSettings:
        public = self.init == "public-gradient"
        if public and self.public_text is None:
            fix = "give a file of public records in the columns of the private ones, or another init"
            raise Wrong("init=public-gradient needs public_text", fix, "init")
        if not public and self.public_text is not None:
            fix = "set adapter.init to it, or remove public_text"
            raise Wrong("public_text is read for init=public-gradient only", fix, "public_text")
        return self


_OF_TEMPLATES: Final = ("split_special_tokens", "chat_template", "chat_template_kwargs")


class DataSettings(Group):
    """The private records."""

    path: str | list[str]
    """JSONL, JSON, CSV, Parquet, Arrow or text files (also .gz), a folder that datasets saved, or hf://name:split."""
    format: Format = "auto"
    """Of the files, also of clients in one place; auto: by their endings. text: one record a line; paragraphs: one
    between blank lines."""
    task: str | None = None
    """A benchmark (sst2, cola, mrpc, stsb, qqp, mnli, qnli, rte, glue8, math10k, gsm8k, aqua, mawps, svamp). It brings
    prompt and completion, loss_on=completion unless that is given, and its metric in `privlora evaluate`."""
    text: str | None = None
    """Column that holds the whole text, or a format such as "{title}\\n{body}"."""
    prompt: str | None = None
    """Column or format of the prompt, or column of a list of messages; goes with completion."""
    completion: str | None = None
    """Column or format of the answer, or column of a list of messages; the assistant's are learnt."""
    template: Literal["auto", "chat", "none"] = "auto"
    """How prompt and completion meet. auto: as turns of a user and an assistant where there is a chat template, also of
    formats, unless they write control tokens. chat: the same, and a tokenizer without a template is refused. none, and
    auto without a template: as they stand, with a newline between if neither has white space there. Tasks: as none."""
    messages: str | None = None
    """Column of chat messages, rendered by the tokenizer's chat template. A record's column "tools" holds those that
    the chat may call."""
    chosen: str | None = None
    """Column or format of the better one of two answers to prompt; rejected names the other. The run learns the
    preference (DPO). Without prompt both are columns of chat messages. Both answers are of one unit."""
    rejected: str | None = None
    """Column or format of the answer that was not chosen."""
    dpo_beta: float | None = Field(default=None, gt=0, le=10)
    """With chosen: how fast the loss of a preference falls as the model leaves the base model. Null is 0.1."""
    label: str | None = None
    """Column of a label: the run trains a classifier (AutoModelForSequenceClassification) of text, or of text and
    text_pair. Its last layer learns with the adapter, under the same clipping and noise. With task, write label."""
    labels: Labels | None = None
    """PUBLIC: all labels that there can be. Names, as ["no", "yes"]; a name for each number, as {0: negative, 1:
    positive}; how many, if records hold the numbers from 0 on; or score, of a number."""
    text_pair: str | None = None
    """Column or format of the second text of a pair, with label."""
    chat_template: str | None = None
    """A PUBLIC chat template instead of the tokenizer's: a file, the template itself, or the name of one of the
    tokenizer's. Reports give its SHA-256."""
    chat_template_kwargs: dict[str, bool | int | float | str | None] = Field(default={})
    """What the template is given besides messages, as {enable_thinking: false}."""
    split_special_tokens: bool = True
    """Read control tokens that a record spells, as "<|im_end|>", as text, so that none forges a turn. Set it to false
    for texts that a chat template has already rendered."""
    loss_on: Literal["all", "completion"] = "all"
    """Which tokens are learnt: all, or those of the completion (with messages: of the assistant's turns), which is the
    default where settings name them."""
    max_length: int = Field(default=512, ge=2)
    """Longest text in tokens. The default gives way to a model's smaller limit."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """What stays of a longer text: its first tokens, or its last ones."""
    chunk: bool = False
    """Divide texts that are longer than max_length into chunks of like length; else they are cut. All chunks of a text
    are one unit, with one clip and one charge, and at most 8 of them, drawn again each time, take part in a step. With
    unit=user they are the user's, and privacy.max_records_per_user holds."""
    evaluation: str | list[str] | None = None
    """PUBLIC records of the same form, for the held-out loss and answers in the report. Never private ones."""
    unchecked: bool = False
    """Train even if the records do not fit: more than twice or fewer than half as many units as the public number, most
    without a token to train on, or most cut to less than half. It is published like every other setting."""

    @property
    def columns(self) -> dict[str, Any]:
        """The arguments of data.examples.Template; the column "text" where none is named."""
        if self.task is not None and self.label is not None:  # what data.tasks.labelled_record makes
            return {"text": "text", "prompt": None, "completion": None, "messages": None}
        if self.task is not None:  # what data.tasks.task_record makes
            names = {"text": None, "prompt": "prompt", "completion": "completion", "messages": None}
            return names | self._said(template="none")
        if self.chosen is not None:
            return self._answers_in(self.chosen)
        named = {k: getattr(self, k) for k in ("text", "prompt", "completion", "messages")}
        return (named if any(named.values()) else {**named, "text": "text"}) | self._said(
            template=self.template
        )

    def _said(self, template: str) -> dict[str, Any]:
        """Further arguments of the template that are not at their defaults."""
        told = {"template": template, **{name: getattr(self, name) for name in _OF_TEMPLATES}}
        fields = {**type(self).model_fields}
        return {name: value for name, value in told.items() if value != fields[name].default}

    @property
    def beta(self) -> float:
        """dpo_beta, or what it is where none is set."""
        return 0.1 if self.dpo_beta is None else self.dpo_beta

    @property
    def rejected_columns(self) -> dict[str, Any] | None:
        """The same of the answers that were not chosen, where records are preferences."""
        return None if self.rejected is None else self._answers_in(self.rejected)

    def _answers_in(self, column: str) -> dict[str, Any]:
        alone = self.prompt is None
        names = {"text": None, "prompt": self.prompt, "completion": None if alone else column}
        return names | {"messages": column if alone else None} | self._said(template=self.template)

    @property
    def pair(self) -> str | None:
        """Column or format of the second text, where labels are of pairs."""
        if self.task is None or self.label is None:
            return self.text_pair
        return "text_pair" if len(TASKS[self.task].columns[0]) > 1 else None

    @property
    def classes(self) -> Classes | None:
        """What is to be predicted of each record, where that is a label."""
        if self.label is None:
            return None
        if self.task is None:
            assert self.labels is not None
            return classes_of(self.label, self.labels)
        return Classes("label", TASKS[self.task].names, tuple(range(len(TASKS[self.task].names))))

    @model_validator(mode="before")
    @classmethod
    def _answers(cls, values: Any) -> Any:
        """Where something is asked, what answers it is learnt, unless the settings say otherwise."""
        if not isinstance(values, Mapping) or values.get("label") is not None:
            return values
        asks = any(values.get(name) is not None for name in ("task", "chosen", "completion", "messages"))
        return {"loss_on": "completion", **values} if asks else values

    @field_validator("path")
    @classmethod
    def _some_file(cls, given: str | list[str]) -> str | list[str]:
        if not given:
            raise Wrong("path names no file", "give at least one", "path")
        twice = named_twice([] if isinstance(given, str) else given)
        if twice is not None:
            what = f"path names {shown(twice)!r} twice: each record would be two units, and epsilon that of half of it"
            raise Wrong(what, "name it once", "path")
        return given

    @field_validator("labels")
    @classmethod
    def _two_classes(cls, given: Labels | None) -> Any:
        if given is not None:
            try:
                classes_of("label", given)
            except ConfigError as error:
                raise Wrong(error.what, error.fix or "") from None
        return given

    @field_validator("chat_template")
    @classmethod
    def _template_itself(cls, given: str | None) -> str | None:
        return None if given is None else read_template(given)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_what_is_set_here(cls, given: dict[str, Any]) -> dict[str, Any]:
        taken = next((name for name in given if name in TAKEN), None)
        if taken is not None:
            fix = "leave in it what the template asks for, as {enable_thinking: false}"
            raise Wrong(f"chat_template_kwargs holds {taken}, which is decided here", fix)
        if not all(map(KEYWORD.fullmatch, given)):
            fix = "write it with letters, digits and underscores, as {enable_thinking: false}"
            raise Wrong("a name in chat_template_kwargs is none that a template can read", fix)
        return given

    @field_validator("text", "prompt", "completion", "chosen", "rejected", "text_pair")
    @classmethod
    def _names_a_column(cls, given: str | None) -> str | None:
        try:
            parse(given or "")
        except ConfigError as error:
            raise Wrong(error.what, error.fix or "") from None
        return given

    @field_validator("task")
    @classmethod
    def _known_task(cls, task: str | None) -> str | None:
        if task is not None and task not in TASKS:
            raise Wrong(f"unknown task {echoed(task, TASKS)}", nearest(task, TASKS), "task")
        return task

    @model_validator(mode="after")
    def _one_form(self) -> DataSettings:
        all_of(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Wrong]:
        own = [k for k in ("text", "prompt", "completion", "messages") if getattr(self, k) is not None]
        if self.task is not None and own:
            what = f"task={self.task} brings its own prompt and completion"
            yield Wrong(what, f"remove {', '.join(own)}, or task", "task")
        yield from self._other_than_preferences()
        yield from self._other_than_labels()
        forms = [self.text is not None, self.prompt is not None or self.completion is not None]
        forms += [self.messages is not None, self.chosen is not None and self.prompt is None]
        if sum(forms) > 1:
            fix = "give only one of: text, or prompt and completion, or messages"
            yield Wrong("there are several forms of records", fix, *own)
        whole = self.text is not None or not any(forms)
        if self.chunk and (self.label is not None or self.task is not None or not whole):
            what = (
                "chunk divides whole texts, and prompts, chats and labelled texts lose their sense in parts"
            )
            yield Wrong(what, "remove chunk, or name the text's column with text", "chunk")
        if self.chosen is None and (self.prompt is None) != (self.completion is None):
            fix = f"name the column {'prompt' if self.prompt is None else 'completion'}, or use text"
            yield Wrong("prompt and completion go together", fix, "prompt")
        chat = [k for k in ("chat_template", "chat_template_kwargs") if getattr(self, k)]
        if chat and (whole or self.template == "none"):
            fix = "name a column of messages, or prompt and completion without template=none, or remove it"
            yield Wrong(f"{chat[0]} is read for chats alone, and these records are none", fix, chat[0])
        if self.template != "auto" and self.prompt is None:
            what = "template says how prompt and completion meet"
            yield Wrong(what, "name their columns, or remove it", "template")
        if whole and self.task is None and self.label is None and self.loss_on == "completion":
            what = "loss_on=completion needs prompt and completion, or messages"
            yield Wrong(what, "name their columns, or remove loss_on", "loss_on")
        shared = _shared(self.path, self.evaluation)
        if shared is not None:
            what = f"evaluation names {shared!r}, which is private: its held-out loss would be published"
            yield Wrong(what, "give public records, or none", "evaluation")

    def _other_than_preferences(self) -> Iterator[Wrong]:
        if (self.chosen is None) != (self.rejected is None):
            lacking = "chosen" if self.chosen is None else "rejected"
            yield Wrong("chosen and rejected go together", f"name the column {lacking}", "chosen")
        if self.chosen is None:
            if self.dpo_beta is not None:
                what = "dpo_beta is read with chosen and rejected only"
                yield Wrong(what, "name their columns, or remove it", "dpo_beta")
            return
        if self.chosen == self.rejected:
            fix = "name that of the other answer as rejected"
            yield Wrong("chosen and rejected are the same column", fix, "chosen")
        others = ("text", "completion", "messages", "task", "label")
        given = [name for name in others if getattr(self, name) is not None]
        if given:
            what = f"chosen and rejected are two answers, and {given[0]} names another form of records"
            yield Wrong(what, f"remove {given[0]}; the prompt's column is prompt", "chosen")
        if self.loss_on != "completion":
            yield Wrong("a preference is about answers alone", "remove loss_on", "loss_on")

    def _other_than_labels(self) -> Iterator[Wrong]:
        if self.label is None:
            given = [name for name in ("labels", "text_pair") if getattr(self, name) is not None]
            if given:
                fix = f"name the column of the label, or remove {given[0]}"
                yield Wrong(f"{given[0]} is read with label only", fix, given[0])
            return
        if self.prompt is not None or self.completion is not None or self.messages is not None:
            what = "label is the class of a text, and these records are prompts or chats"
            yield Wrong(what, "name the text's column with text, or remove label", "label")
        if self.loss_on != "all":
            what = "loss_on is of texts that the model learns to write"
            yield Wrong(what, "remove it, or label", "loss_on")
        if self.task is None:
            if self.labels is None:
                what = "label needs labels: a label that only private records have would show them"
                fix = "give all that there can be, as labels: [negative, positive], how many there are, or score"
                yield Wrong(what, fix, "labels", lacking=True)
            return
        if TASKS[self.task].kind not in ("label", "score"):
            what = f"task={self.task} has no labels to classify"
            yield Wrong(what, "remove label, or choose a task of GLUE", "task")
        if self.label != "label" or self.labels is not None or self.text_pair is not None:
            what = f"task={self.task} brings its own texts and labels"
            yield Wrong(what, "write label: label, and remove labels and text_pair", "task")


class PrivacySettings(Group):
    """What is promised, and what it costs."""

    private: bool = True
    """False trains without clipping and noise, promises nothing, and labels the run NOT PRIVATE."""
    target_epsilon: float | None = Field(default=None, gt=0)
    """Epsilon at the end of the run; the noise multiplier follows from it. Else target_right_guesses, target_found or
    noise_multiplier."""
    target_right_guesses: float | None = Field(default=None, gt=0.5, lt=1)
    """Target instead of epsilon: who guesses whether a unit took part is right in at most this share of cases, such as
    0.6 (a coin: 0.5)."""
    target_found: float | None = Field(default=None, gt=0.01, lt=1)
    """Target instead of epsilon: who may accuse 1 unit in 100 falsely finds at most this share of those that took part,
    such as 0.05."""
    noise_multiplier: float | None = Field(default=None, ge=NOISE_MULTIPLIERS[0], le=NOISE_MULTIPLIERS[1])
    """sigma: the noise's standard deviation, as a multiple of clip_norm."""
    delta: float | None = Field(default=None, gt=0, lt=1)
    """Below 1 / public_dataset_size, better at most a tenth of it."""
    clip_norm: Annotated[float, OrAuto] = Field(default=1.0, ge=CLIP_NORMS[0], le=CLIP_NORMS[1])
    """C: bound on the norm of one unit's gradient over all modules. auto: a quarter of the median norm of the public
    records auto.file, or without a file of texts that the model writes, which suits whole texts and not labels."""
    clip_quantile: float | None = Field(default=None, gt=0, lt=1)
    """Clip at this quantile of the units' gradient norms (0.5: the median), learnt privately from clip_norm on. Epsilon
    stays the same: 0.5 % more noise pays for it. Null clips at clip_norm."""
    steps: Annotated[Countable, OrAuto] = Field(ge=1)
    """T: number of optimizer steps, each of them one noisy release. There are no epochs in private training. auto: few
    large steps, as public_dataset_size and auto.passes leave room for."""
    expected_batch_size: Annotated[float | None, OrAuto] = Field(default=None, ge=BATCHES[0], le=BATCHES[1])
    """b = q N: mean number of units in a step. Give it with public_dataset_size, or with sample_rate. auto: see
    steps."""
    sample_rate: float | None = Field(default=None, gt=0, le=1)
    """q: probability with which each unit joins a step."""
    public_dataset_size: int | None = Field(default=None, ge=1, le=int(BATCHES[1]))
    """N as you are willing to publish it, for example rounded. Training never counts it; `privlora init` proposes one
    digit of the count."""
    unit: Literal["record", "user"] = "record"
    """Whose presence is hidden: one record, or all records of one user."""
    user_column: str | None = None
    """With unit=user: the column that names the user. Values are compared exactly."""
    max_records_per_user: int = Field(default=16, ge=1)
    """Largest number of a user's records in one step; with more, a random part of them is used."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Public cap on the units of a batch (truncated Poisson sampling, accounted as such)."""
    sampling: Literal["poisson", "balls-in-bins"] = "poisson"
    """How batches are drawn. poisson: each unit by a coin of its own, in each step. balls-in-bins: each unit in exactly
    one step of each pass of 1/q steps; less noise at the same epsilon, best with whole passes."""
    bands: Annotated[int, Field(ge=1, le=MOST_BANDS)] | Literal["auto"] = 1
    """Above 1: a step's noise takes back a part of that of the bands - 1 steps before it (DP-BandMF), which is kept in
    float64. Batches are drawn from as many classes of units in turn. auto: what leaves least noise in sums of steps."""
    insecure_noise_seed: int | None = None
    """For tests: repeatable noise. The run is stamped NOT PRIVATE."""

    @staticmethod
    def lacks(given: Mapping[str, Any]) -> list[str]:
        """Of the settings that a group must have in one form or another, those of which ``given`` has none."""
        has = {name for name, value in given.items() if value is not None}
        found = []
        if given.get("private", True):
            found += [] if has & {*_TARGETS} else ["target_epsilon"]
            found += [] if "delta" in has else ["delta"]
        sizes = has & {"expected_batch_size", "sample_rate"}
        found += [] if sizes else ["expected_batch_size"]
        found += [] if "public_dataset_size" in has or len(sizes) == 2 else ["public_dataset_size"]
        return found

    @model_validator(mode="after")
    def _consistent(self) -> PrivacySettings:
        all_of(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Wrong]:
        lacking, n = self.lacks(vars(self)), self.public_dataset_size
        if (self.unit == "user") != (self.user_column is not None):
            other = "user_column: the column that names the user" if self.unit == "user" else "unit: user"
            yield Wrong("unit=user and user_column go together", f"add {other}", "unit")
        if n is not None and self.delta is not None and self.delta >= 1 / n:
            what = f"delta={self.delta:g} is not below 1/N = {1 / n:g}: publishing a whole {self.unit} would satisfy it"
            yield Wrong(what, "set delta to a tenth of 1/N or less", "delta", "public_dataset_size")
        given = [k for k in _TARGETS if getattr(self, k) is not None]
        if not self.private:
            if given:
                what = f"private=false contradicts {given[0]}"
                yield Wrong(what, "remove one of them", "private", given[0])
            if self.clip_quantile is not None:
                yield Wrong("private=false clips nothing", "remove clip_quantile", "private")
        elif len({k if k not in _SHARES else _SHARES for k in given}) != 1:
            what = "the noise follows from target_epsilon, noise_multiplier, or target shares (target_right_guesses)"
            fix = "give exactly one of them, for example target_epsilon: 3"
            yield Wrong(what, fix, "target_epsilon", lacking="target_epsilon" in lacking)
        elif "delta" in lacking:
            fix = "set it well below 1 / number of records, for example 1e-5"
            yield Wrong("delta is missing", fix, "delta", lacking=True)
        if "public_dataset_size" in lacking:
            why = "how often a record is drawn follows from it, also without privacy"
            if self.private:
                why = "dividing by the private number of records would reveal it"
            fix = "give expected_batch_size and public_dataset_size (it may be rounded), or sample_rate with either"
            what = f"public_dataset_size is missing: {why}"
            yield Wrong(what, fix, "public_dataset_size", lacking=True)
        if "expected_batch_size" in lacking:
            what = "how many units a step takes is missing"
            fix = "give expected_batch_size or sample_rate"
            yield Wrong(what, fix, "expected_batch_size", lacking=True)
        if {"public_dataset_size", "expected_batch_size"} & set(lacking):  # the rest follows from them
            return
        if None not in (n, self.expected_batch_size, self.sample_rate):
            what = "sample_rate follows from expected_batch_size and public_dataset_size"
            yield Wrong(what, "give two of the three", "sample_rate")
        if self.q > 1:
            what = f"expected_batch_size={self.b:g} exceeds public_dataset_size={n}"
            fix = f"at most {n}, better half of it or less; with steps and batch auto both follow from it"
            yield Wrong(what, fix, "expected_batch_size", "public_dataset_size")
        if self.max_batch_size is not None and n is None:
            fix = "give public_dataset_size instead of sample_rate or expected_batch_size"
            what = "max_batch_size needs public_dataset_size: its cost depends on both"
            yield Wrong(what, fix, "max_batch_size")
        elif self.max_batch_size is not None and self.max_batch_size < self.b:
            what = f"max_batch_size={self.max_batch_size} is below the expected batch size {self.b:g}"
            fix = "about 1.75 times the expected batch size costs no epsilon"
            yield Wrong(f"{what}, so most batches would be cut", fix, "max_batch_size")
        yield from self._wrong_passes()
        yield from self._wrong_bands()

    def _wrong_passes(self) -> Iterator[Wrong]:
        """What is wrong with balls in bins that no price covers, or that nothing would read."""
        if self.sampling == "poisson":
            return
        others = {"bands": self.bands != 1, "max_batch_size": self.max_batch_size is not None}
        for name in (name for name, is_given in others.items() if is_given):
            what = (
                f"sampling={self.sampling} does not go with {name}, which is accounted with Poisson sampling"
            )
            yield Wrong(what, f"remove {name}", "sampling")
        if not self.private:
            yield Wrong("private=false accounts for nothing", f"remove sampling={self.sampling}", "private")
        bins = max(2, round(1 / self.q))
        if abs(self.q * bins - 1) > _OFF_PASS:
            what = (
                f"passes have whole numbers of steps, and batches of {self.b:g} make 1/q = {1 / self.q:.3g}"
            )
            yield Wrong(what, f"expected_batch_size={self.n / bins:.4g}, which makes {bins}", "steps")

    def _wrong_bands(self) -> Iterator[Wrong]:
        """What is wrong with bands that no price covers, or that nothing would read."""
        if self.bands == 1:
            return
        for name, why in (
            ("clip_quantile", "its counts of norms have noise of their own, which no cycle of steps covers"),
            ("max_batch_size", "what a cap costs is not known for batches of one class"),
        ):
            if getattr(self, name) is not None:
                yield Wrong(f"bands={self.bands} does not go with {name}: {why}", f"remove {name}", "bands")
        if not self.private:
            yield Wrong("private=false adds no noise", f"remove bands={self.bands}", "private")
        elif self.bands == "auto":
            if self.target_epsilon is None:
                what = (
                    "bands=auto weighs noise against what sampling saves at target_epsilon, which is missing"
                )
                yield Wrong(what, "give a number of bands, or target_epsilon", "bands")
        else:
            if self.bands > self.steps:
                what = f"bands={self.bands} is above steps={self.steps}"
                yield Wrong(what, f"at most {self.steps}", "bands")
            if self.bands * self.q > 1:
                what = f"a class has 1/{self.bands} of all units, and a batch needs {self.q:g} of them"
                yield Wrong(what, f"bands of at most {int(1 / self.q)}, or a smaller expected_batch_size")

    @property
    def protects(self) -> bool:
        """Whether noise is added that nobody can repeat; without it, nothing may be published."""
        return self.private and self.insecure_noise_seed is None

    @property
    def q(self) -> float:
        """Sampling rate."""
        if self.sample_rate is not None:
            return self.sample_rate
        assert self.expected_batch_size is not None
        assert self.public_dataset_size is not None
        return self.expected_batch_size / self.public_dataset_size

    @property
    def n(self) -> float:
        """Number of units, as it follows from the public numbers."""
        return float(self.public_dataset_size) if self.public_dataset_size is not None else self.b / self.q

    @property
    def b(self) -> float:
        """Expected batch size, the public divisor of every sum."""
        if self.expected_batch_size is not None:
            return self.expected_batch_size
        assert self.sample_rate is not None
        assert self.public_dataset_size is not None
        return self.sample_rate * self.public_dataset_size

    @property
    def mostly_empty(self) -> str | None:
        """In a sentence that steps draw less than one unit on average; None where they draw more."""
        if self.b >= 1:
            return None
        then = "are noise alone, and charged like the others" if self.private else "learn nothing"
        named = "expected_batch_size" if self.expected_batch_size is not None else "sample_rate"
        return (
            f"with privacy.{named} a step draws {self.b:.3g} {self.unit}s on average: {exp(-self.b):.0%} of steps draw "
            f"none and {then}. A usual expected_batch_size is 64 {self.unit}s; sample_rate is their share of all"
        )


class MethodSettings(Group):
    """A method of the table (``privlora methods``) and its settings; null takes the method's default."""

    name: str = "prism"
    """A method, or auto, which chooses one on public texts."""
    optimizer: str | None = None
    """One of the method's optimizers; null: its first."""
    learning_rate: Annotated[float | None, OrAuto] = Field(default=None, gt=0)
    """Of the optimizer, at its height. Null: the method's own, which falls with the root of the noisy steps. auto: the
    best in rehearsals on the public records auto.file; without a file the rate at which noise alone moves the model's
    predictions of its own texts by 0.1 nats a token."""
    relative_rate: bool | None = None
    """Whether learning_rate is relative: the share of the frozen weights' norms by which one step's noise moves them
    (with span-prism, the length of a step), so that one rate serves models of other sizes. Else it is in entries: about
    how far noise moves each number. Null: the method's own, true for prism and span-prism."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """How the learning rate goes on after the warm-up; linear and cosine fall towards 0."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps in which the learning rate rises from 0; null: the method's share of all steps."""
    averaging: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the moving average of Z that is exported; 0 exports the last iterate."""
    clipping: Literal["flat", "automatic", "spectral", "normalized", "per-module"] | None = None
    """How a unit's gradient is brought to clip_norm, at the same epsilon. flat: longer ones are scaled down. automatic:
    all are scaled to about it. spectral: weak modules and directions are brought up first. normalized: all are scaled
    to it but those far below public gradients. per-module: each module's part is scaled down to clip_norm /
    sqrt(modules)."""

    # With a title, which reports use: arguments of optimizers, whose constructors hold the defaults. An optimizer that
    # has no such argument refuses the setting.
    beta1: float | None = Field(default=None, title="β₁", ge=0, lt=1)
    """Decay of the mean of releases (momentum)."""
    beta2: float | None = Field(default=None, title="β₂", ge=0, lt=1)
    """Decay of the mean of their squares."""
    weight_decay: float | None = Field(default=None, title="weight decay", ge=0)
    """Decoupled weight decay, as in AdamW."""
    learning_rate_ratio: float | None = Field(default=None, title="learning-rate ratio", gt=0)
    """lora+: learning rate of the left factor (lora_B), as a multiple of the right factor's (lora_A)."""
    floor: float | None = Field(default=None, title="floor", gt=0)
    """dp-adambc: lower bound on the second moment under the root, in units of the noise's variance."""
    error_feedback: float | None = Field(default=None, title="error feedback", ge=0)
    """prism: rank of the memory of what truncating to rank r cuts off, as a multiple of adapter.r; 0 keeps nothing."""
    right_weight: Annotated[float | None, OrAuto] = Field(default=None, title="right weight", gt=0, le=10)
    """prism: weight, before clipping, of the part of a gradient that rotates the input subspace V; 1: none. auto, 0.25
    to 1: how long gradients are at the start in that direction, compared with one within the subspaces. It looks at
    the public records auto.file, or without a file at texts that the model writes."""
    metric_power: float | None = Field(default=None, title="metric power", ge=0, le=2)
    """prism: directions count in proportion to this power of the update's singular values, in clipping and in steps, so
    that what has grown moves faster; 0 counts all alike."""
    perturbation: float | None = Field(default=None, title="λ", gt=0, le=1)
    """dp-zo: how far from the adapter, to both sides along the step's direction, losses are compared."""
    alpha: float | None = Field(default=None, title="α", ge=0, le=1)
    """pe-sgd: where units are bounded and noised. 1: coefficients of public gradients; 0: inner products with them."""
    ridge: float | None = Field(default=None, title="ridge", ge=0)
    """pe-sgd: ridge of the least squares on public gradients, relative to their mean square norm."""
    top_k: int | None = Field(default=None, title="directions", ge=0)
    """pe-sgd: how many leading directions of the public gradients' span are used; 0: all, one a public text."""
    hold_out: float | None = Field(default=None, title="held out to choose", ge=0, le=0.5)
    """pe-sgd: part of the public gradients that is held out at a time, as if it were private, to choose before each
    step those of alpha, ridge and top_k that are not given. Costs no epsilon. 0 chooses nothing."""
    beside: float | None = Field(default=None, title="kept beside the span", ge=0, le=1)
    """guided-prism, pdp-sgd: how much counts what is released outside of the span of public gradients; 1: as much as
    what lies along it."""


OPTIMIZER_SETTINGS = {name: field.title for name, field in MethodSettings.model_fields.items() if field.title}
"""Fields of MethodSettings that belong to optimizers, some to a few of them only: name -> what reports call it."""


_LOOKS, _LOOKS_FROM = 10, 20  # at held-out losses, in runs of so many steps


class RunSettings(Group):
    """Where the run lives and how it proceeds; nothing here changes the guarantee."""

    output: str = "runs/run"
    """Folder of the run: release/ may be published, private/ never."""
    seed: int = 0
    """PUBLIC seed of the adapter's start. Noise and sampling never use it."""
    label: str | None = None
    """Name of the data set for the ledger and the report. It is published."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = MICRO_BATCH
    """Bound on rows x padded length of one pass through the model, at least what a row's gradients take. Memory and
    speed; results but for rounding. auto: as many as fit in the memory that is free when a run starts, by public
    settings alone; workers of a study share it. Federations need a number. Diagnoses, shadow adapters and audits by
    gradients take the default."""
    checkpoint_every: int = Field(default=20, ge=1)
    """Steps from one checkpoint to the next, ten minutes at most; what a crash loses of them stays charged."""
    evaluate_every: int | None = Field(default=None, ge=0)
    """Steps between evaluations on the public evaluation records. Null: about ten times in runs of 20 steps and more.
    0, and null in shorter runs: before and after training only."""
    report_to: list[Literal["jsonl", "tensorboard", "wandb", "trackio"]] = Field(default=[])
    """Where else public numbers go: steps, epsilon, learning rate, held-out loss. jsonl writes release/metrics.jsonl
    and tensorboard private/tensorboard, while a run goes on. wandb and trackio get all of it when the run has ended,
    since the time of each number would show how long a step took."""
    log_every: int = Field(default=10, ge=1)
    """Steps from one line of report_to and of `Result.history` to the next."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_none(cls, given: Any) -> Any:
        """A word for a list of one, and transformers' word for none."""
        if given is None or given == "none" or given == ["none"]:
            return []
        return [given] if isinstance(given, str) else given

    def evaluation_interval(self, steps: int) -> int:
        """Steps, or rounds, from one held-out loss to the next in a run of so many; 0: none between first and last."""
        if self.evaluate_every is not None:
            return self.evaluate_every
        return 0 if steps < _LOOKS_FROM else -(-steps // _LOOKS)

    @property
    def max_tokens(self) -> int:
        """tokens_per_micro_batch; the default instead of ``auto`` where nobody has chosen."""
        return MICRO_BATCH if self.tokens_per_micro_batch == "auto" else self.tokens_per_micro_batch


_Error = TypeVar("_Error", bound=PrivloraError)
Where = Callable[[tuple[str, ...]], str]
"""Of (group, name): " (line 3)", " (on the command line)", or "" where nothing is known."""


class Places:
    """Where a run's settings were given. All are equal, since settings are the same wherever they stood."""

    def __init__(self, where: Where = lambda place: "") -> None:
        self.where = where

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places)

    def __hash__(self) -> int:
        return 0


class Settings(Group):
    """One run."""

    model: ModelSettings
    data: DataSettings
    privacy: PrivacySettings
    adapter: AdapterSettings = AdapterSettings()
    method: MethodSettings = MethodSettings()
    run: RunSettings = RunSettings()
    federation: FederationSettings | None = None
    """For a federation alone."""
    synthesis: SynthesisSettings | None = None
    """For methods that work in the span of public texts' gradients."""
    auto: Annotated[AutoSettings | None, OrTrue] = None
    """For settings that are auto."""
    _places: Places = PrivateAttr(default_factory=Places)

    @model_validator(mode="before")
    @classmethod
    def _follow_from_public_numbers(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if isinstance(
            values.get("federation"), FederationSettings
        ):  # of a mapping it is done below, before this
            all_of(_what_federations_have_not(of_mapping(values)))
        return without_auto(values)

    @model_validator(mode="before")
    @classmethod
    def _follow_from_the_federation(cls, values: Any) -> Any:
        """privacy.steps, and data.path where clients have their own."""
        given = values.get("federation") if isinstance(values, Mapping) else None
        if not isinstance(given, Mapping):
            return values
        # Clients of any form but a number have paths of their own, or are an error that is raised where they are
        # checked.
        steps, own = None, not isinstance(given.get("clients"), int)
        try:
            federation = FederationSettings(**given)
        except (ValidationError, TypeError):
            pass  # found again, and reported, where the group is checked
        else:
            steps = federation.steps_of_a_client
        # Before the groups themselves, whose checks would advise other values.
        all_of(_what_federations_have_not(of_mapping(values), steps))
        filled = {
            group: dict(inner) if isinstance(inner, Mapping) else inner for group, inner in values.items()
        }
        privacy, data = filled.get("privacy"), filled.setdefault("data", {})
        if isinstance(privacy, dict):
            privacy.setdefault("steps", steps or 1)
        if own and isinstance(data, dict):
            data.setdefault("path", AT_CLIENTS)
        return filled

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        all_of(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Wrong]:
        yield from self._other_than_the_federation()
        method, privacy = self.method, self.privacy
        warmup = method.warmup_steps
        if warmup is not None and self.federation is None and warmup > privacy.steps:
            what = f"method.warmup_steps={warmup} exceeds privacy.steps={privacy.steps}"
            yield Wrong(what, "fewer warmup_steps", "method.warmup_steps", "privacy.steps")
        if method.clipping is not None and not privacy.private:
            what = "method.clipping contradicts privacy.private=false, which clips nothing"
            yield Wrong(what, "remove method.clipping", "method.clipping", "privacy.private")
        if method.clipping == "automatic" and privacy.clip_quantile is not None:
            what = "method.clipping=automatic scales every gradient to one norm, so there is none to adapt"
            yield Wrong(what, "use flat or spectral, or remove privacy.clip_quantile", "method.clipping")
        yield from self._other_than_public_texts()
        yield from self._other_than_rehearsals()
        yield from self._not_public()

    def _other_than_the_federation(self) -> Iterator[Wrong]:
        federation, privacy = self.federation, self.privacy
        if federation is None:
            return
        yield from _what_federations_have_not(
            lambda group, name: getattr(getattr(self, group), name, None), federation.steps_of_a_client
        )
        if (self.data.path == AT_CLIENTS) == isinstance(federation.clients, int):
            fix = "give data.path with the number of clients to cut it into, or each client a path of its own"
            yield Wrong("records are either cut into clients or are their own", fix)
        if federation.secure and privacy.private and federation.per_round < 2:
            yield Wrong("a secure sum over one client is its update", "clients_per_round of 2 or more")
        if self.privacy.private and federation.distributed and federation.secure_aggregation is False:
            what = "federation.secure_aggregation=false, and each client's share of the noise alone protects nobody"
            fix = "remove it, or choose a rule whose clients add all of it (rule: tan)"
            yield Wrong(what, fix, "federation.secure_aggregation")
        twice = named_twice(self._paths_of_clients())
        if twice is not None:
            what = (
                f"federation.clients name {shown(twice)!r} twice: so each of its records would be released by two "
                "ledgers that do not know of each other"
            )
            yield Wrong(what, "give each client records of its own", "federation.clients")

    @property
    def rows_of_a_unit(self) -> int:
        """PUBLIC. How many rows a drawn unit brings at most."""
        answers = 1 if self.data.chosen is None else 2
        if self.privacy.unit == "user":
            return answers * self.privacy.max_records_per_user
        return _MOST_CHUNKS if self.data.chunk else answers

    def _other_than_public_texts(self) -> Iterator[Wrong]:
        if self.synthesis is None:
            return
        if self.data.chosen is not None:
            what = "data.chosen does not go with the group synthesis, whose texts nobody prefers"
            yield Wrong(what, "remove either", "data.chosen")
        if self.data.chunk:
            what = (
                "data.chunk does not go with the group synthesis, whose texts are as long as they are written"
            )
            yield Wrong(what, "remove either", "data.chunk")
        if self.federation is not None:
            what = "synthesis does not go with a federation, whose methods use no public texts"
            yield Wrong(what, "remove either group")

    def _other_than_rehearsals(self) -> Iterator[Wrong]:
        auto, privacy, method = self.auto, self.privacy, self.method
        if auto is None:
            return
        if auto.all and self.federation is None:  # of a file or a call it has become what it stands for
            what = "auto.all is of what a file or a call leaves out, which groups that are made already do not show"
            yield Wrong(what, "give plain mappings, or what is to be auto in auto.choose", "auto.all")
        if not auto.choose:
            if auto.file is not None:
                fix = "write method.learning_rate: auto, or remove file"
                what = "auto.file is read to choose settings, and none is auto"
                yield Wrong(what, fix, "auto.file", "method.learning_rate")
            return
        fixed = {
            "privacy.clip_norm": "clip_norm" in privacy.model_fields_set,
            "method.learning_rate": method.learning_rate is not None,
            "method.right_weight": method.right_weight is not None,
        }
        for name, is_given in fixed.items():
            if is_given and name.partition(".")[2] in auto.choose:
                what = f"{name} is a number, and auto.choose leaves it to rehearsals"
                yield Wrong(what, "remove one of them", "auto.choose")
        by_quantile = "clip_norm" in auto.choose and privacy.clip_quantile is not None
        for wrong, meant in (
            (not privacy.private, "privacy.private=false, which adds no noise that would be weighed"),
            (self.data.label is not None, "data.label: rehearsals know texts that a model writes"),
            (self.data.chosen is not None, "data.chosen: rehearsals know texts that a model writes"),
            (self.synthesis is not None, "the group synthesis, whose texts are not rehearsed with here"),
            (self.federation is not None, "a federation, whose clients have no public records"),
            (by_quantile, "privacy.clip_quantile, which learns the clip norm from the records"),
        ):
            if wrong:
                places = [f"{REHEARSED[name]}.{name}" for name in auto.choose]
                fix = "leave out what is auto, or give numbers"
                yield Wrong(f"{auto.places}=auto does not go with {meant}", fix, *places)

    def _not_public(self) -> Iterator[Wrong]:
        """Files that stand for public records and are private, or that the held-out loss is measured on."""
        clients = self._paths_of_clients()
        private, held_out = [*_paths(self.data.path), *clients], self.data.evaluation
        texts, auto = None if self.synthesis is None else self.synthesis.file, self.auto
        for name, paths, reveals, did in (
            ("data.evaluation", held_out, "its held-out loss would be published", None),
            (
                "adapter.public_text",
                self.adapter.public_text,
                "the start would reveal it",
                "shaped the start",
            ),
            ("synthesis.file", texts, "what counts as public would reveal it", "shaped the training"),
            (
                "auto.file",
                None if auto is None else auto.file,
                "what is chosen on it would reveal it",
                "chose the settings",
            ),
        ):
            shared = _shared(paths, private if did else clients)  # the group data looks at its own
            if shared is not None:
                what = f"{name} names {shared!r}, which is private: {reveals}"
                yield Wrong(what, "give public records", name)
            seen = _shared(paths, held_out) if did else None
            if seen is not None:
                what = f"{name} names {seen!r}, which is also data.evaluation: its texts {did}"
                yield Wrong(what, "divide the file", name, "data.evaluation")

    def _paths_of_clients(self) -> list[str]:
        clients = [] if self.federation is None else self.federation.clients
        return [path for one in clients for path in _paths(one.path)] if isinstance(clients, list) else []

    def given_at(self, where: Where) -> None:
        """From now on errors that are `placed` say where settings were given."""
        self._places = Places(where)

    def where(self, about: str) -> str:
        """In brackets, where a setting, group.name, was given; "" where that is not known."""
        return self._places.where(tuple(about.split(".")))

    def placed(self, error: _Error, about: str) -> _Error:
        """The error with the setting that it is about, and its line, where that is known."""
        where = self.where(about)
        return error.of(f"{about}{where}") if where else error

    def refuse_a_federation(self) -> None:
        """Raise ConfigError for settings of several owners, where a run in one place is meant."""
        if self.federation is not None:
            raise ConfigError(
                "these settings have a group federation, so their records stay with several owners",
                fix="use `privlora train` (`privlora.federate`), or remove the group to train in one place",
            )

    def refuse_labels(self, what: str) -> None:
        """Raise ConfigError for a classifier or preferences, where they do not go. what: does not know them."""
        for name, asked, others in (
            ("chosen", "preferences", "`plan` or `evaluate`"),
            ("label", "a classifier", "`plan`, `evaluate` or `lab compare`"),
        ):
            if getattr(self.data, name) is not None:
                what = f"{what} knows texts that a model writes, and data.{name} asks for {asked}"
                raise ConfigError(what, fix=f"remove data.{name}, or use `privlora train`, {others}")

    def changed(self, **groups: Any) -> Settings:
        """The same settings with other values in some groups, or with another group; nothing is checked anew."""
        updates = {
            name: getattr(self, name).model_copy(update=dict(new)) if isinstance(new, Mapping) else new
            for name, new in groups.items()
        }
        return self.model_copy(update=updates)

    def located(self) -> Settings:
        """The same settings, in which local folders of models and adapters are named from the root on."""
        init = self.adapter.init
        if init is not None and os.path.isdir(os.path.expanduser(init)):
            init = in_full(init)
        return self.changed(model={"name": in_full(self.model.name)}, adapter={"init": init})

    def to_yaml(self) -> str:
        """As a file; without groups that there are not, nor what the federation's rule has not, so that it can be read
        again."""
        without: dict[str, Any] = {"synthesis": True} if self.synthesis is None else {}
        if self.auto is None or not self.auto.choose:
            without["auto"] = True  # what was auto is a number by now
        elif "clip_norm" in self.auto.choose:
            without["privacy"] = {"clip_norm"}
        without["federation"] = True if self.federation is None else set(self.federation.of_other_rules)
        groups = self.model_dump(mode="json", exclude=without)
        return yaml.safe_dump(groups, sort_keys=False, allow_unicode=True, width=_ONE_LINE)


def _what_federations_have_not(
    value_of: Callable[[str, str], Any], steps: int | None = None
) -> Iterator[Wrong]:
    """Of settings of runs in one place; for the arguments see `misplaced`."""
    for each in misplaced(value_of, steps):
        yield Wrong(each.what, each.fix, each.place)


def _shared(first: str | list[str] | None, second: str | list[str] | None) -> str | None:
    """A path in ``first`` that leads to the same file as one in ``second``, however it is spelt; None if none does."""
    others = {key for path in _paths(second) for key in _identities(path)}
    return next((shown(path) for path in _paths(first) if others & _identities(path)), None)


def named_twice(paths: Sequence[str]) -> str | None:
    """The first path that leads to a file which one before it leads to, however it is spelt; None if none does."""
    return next((path for at, path in enumerate(paths) if _shared(path, list(paths[:at])) is not None), None)


def _paths(value: str | list[str] | None) -> list[str]:
    return [path for path in _strings(value) if path not in (IN_MEMORY, AT_CLIENTS)]


def _strings(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _identities(path: str) -> set[Any]:
    """A file's path, what links lead to, and its number on its device, by which hard links are known."""
    place = os.path.expanduser(path)
    try:
        status = os.stat(place)
        return {os.path.abspath(place), os.path.realpath(place), (status.st_dev, status.st_ino)}
    except (OSError, ValueError):  # not there, or no name of a file
        return {os.path.abspath(place)}
