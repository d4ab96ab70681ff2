"""The cells of the study of few records: what one of them is, and how it is run on a model and texts in memory.

A cell is one training from start to end with the product's own parts on M records, beside public texts of a
neighbouring kind. Every method gets what such texts have to give for free: all start from one model, which was tuned on
them without privacy. The spans of methods that lean on public texts are made of some of the same. What a cell leaves is
what the trained model makes of held-out records.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from privlora.accounting import Plan
from privlora.config import MethodSettings, ModelSettings, Settings, settings_from
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.evaluation import evaluate_next_token
from privlora.evaluation.batches import evaluating
from privlora.evaluation.next_token import row_losses
from privlora.methods import METHODS
from privlora.rehearsals.choosing import rehearse, rows_to_advise_on, verdict
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.files import RunFolder
from privlora.training.inputs import Data, load_data, tokenise
from privlora.training.loop import finish_training
from privlora.training.models import load_model, unchanged_afterwards
from privlora.training.promise import plan_privacy

RATE, STEPS, DELTA, RANK, TOKENS = 0.2, 10, 1e-5, 8, 64
SEEDS_KEPT, VARIATIONS = 100, 1  # K and L - 1: N = 200 texts
PUBLIC_STEPS, PUBLIC_BATCH, PUBLIC_RATE, PUBLIC_RANK = 300, 64, 0.003, 32
EVALUATION = 400  # records that are reported on
PUBLIC = 2300  # texts that tune the common start, and of which spans are made
FRESH = 600  # public texts more: 200 span and 400 are rehearsed on where a rate is chosen on such texts
_LETTERS = 300  # more than TOKENS tokens are
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_IN_MEMORY = "(in memory)"


@dataclass(frozen=True)
class Source:
    """file: below data/, without .jsonl.gz. only: which of its records, by their column ``source``; None for all."""

    file: str
    only: str | None = None


@dataclass(frozen=True)
class Task:
    """model: below models/. private, held, public: files below data/, or those of a file that come from one source.
    preset: of prompts. other: a task whose rates may be taken."""

    model: str
    private: Source
    held: Source
    public: Sequence[Source]
    preset: str
    other: str
    modules: Sequence[str] = ("q_proj", "v_proj")


_REVIEWS = (
    Source("sentiment_domains/train"),
    Source("sentiment_domains/validation"),
    [Source("glue/sst2/train")],
    "product-review",
)
TASKS = {
    "abstracts": Task(
        "reviews1M",
        Source("pubmed/train"),
        Source("pubmed/validation"),
        [Source("biorxiv/train"), Source("biorxiv/validation")],
        "medical-abstract",
        other="reviews",
    ),
    "preprints": Task(
        "reviews1M",
        Source("biorxiv/train"),
        Source("biorxiv/validation"),
        [Source("pubmed/train"), Source("pubmed/validation")],
        "life-science-preprint",
        other="abstracts",
    ),
    "reviews": Task("reviews1M", *_REVIEWS, other="abstracts"),
    "reviews, stories260K": Task("stories260K", *_REVIEWS, other="abstracts"),
    "math": Task(
        "reviews1M",
        Source("math/train", "gsm8k"),
        Source("math/gsm8k_test"),
        [
            Source("math/train", "mawps"),
            Source("math/train", "aqua"),
            Source("math/mawps_validation"),
            Source("math/mawps_test"),
            Source("math/aqua_test"),
        ],
        "text",
        other="reviews",
    ),
    "speeches": Task(
        "reviews1M",
        Source("shakespeare_roles/train"),
        Source("shakespeare_roles/validation"),
        [Source("gutenberg_authors/train")],
        "text",
        other="reviews",
    ),
    "restaurants": Task(
        "reviews1M",
        Source("e2e_nlg/train"),
        Source("e2e_nlg/validation"),
        [Source("sentiment_domains/train")],
        "product-review",
        other="reviews",
    ),
}


@dataclass(frozen=True)
class Row:
    """name, method: of the table, and its settings. steps: T. first_rate: where a search begins.

    noise_alone: with a hundredth of the epsilon. generator: of public texts, where the row has any. synthesis: further
    settings of it. votes: every record takes part in every round. rehearsed: its rate is the one that an advice
    finds on public texts, beside fresh ones of which it spans.
    """

    name: str
    method: Mapping[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    init: str | None = None
    first_rate: float = 0.002
    noise_alone: bool = False
    generator: str = "file"
    synthesis: Mapping[str, Any] = field(default_factory=dict)
    votes: bool = False
    rehearsed: bool = False


ROWS: dict[str, Row] = {
    "zero training": Row("adamw", steps=0),
    "noise alone": Row("span-prism", first_rate=0.004, noise_alone=True),
    "dp-adamw": Row("dp-adamw"),
    "dp-adamw, 50 steps": Row("dp-adamw", steps=50),
    "dp-adamw, automatic": Row("dp-adamw", {"clipping": "automatic"}),
    "dp-sgd": Row("dp-sgd"),
    "dp-sgd, automatic": Row("dp-sgd", {"clipping": "automatic"}, first_rate=0.032),
    "dp-sgd, 50 steps": Row("dp-sgd", steps=50),
    "prism": Row("prism", first_rate=0.004),
    "prism, automatic": Row("prism", {"clipping": "automatic"}, first_rate=0.032),
    "prism, 50 steps": Row("prism", steps=50, first_rate=0.004),
    "prism, public start": Row("prism", init="public-gradient", first_rate=0.004),
    "prism, automatic, public start": Row(
        "prism", {"clipping": "automatic"}, init="public-gradient", first_rate=0.032
    ),
    "guided-prism": Row("guided-prism", first_rate=0.032),
    "guided-prism, public start": Row("guided-prism", init="public-gradient", first_rate=0.032),
    "pdp-sgd": Row("pdp-sgd"),
    "pdp-sgd, guided": Row(
        "pdp-sgd", {"clipping": "normalized", "top_k": 0, "beside": 0.3, "optimizer": "sgd"}, first_rate=0.032
    ),
    "gep": Row("gep"),
    "b-gep": Row("b-gep"),
    "pe-sgd-fix": Row("pe-sgd-fix"),
    "pe-sgd-fix, chosen": Row("pe-sgd-fix", {"hold_out": 0.25}),
    "pe-sgd-fix, sgd": Row("pe-sgd-fix", {"optimizer": "sgd"}),
    "pe-sgd": Row("pe-sgd"),
    "pe-sgd-fix, model writes": Row("pe-sgd-fix", generator="model"),
    "pe-sgd, model writes": Row("pe-sgd", generator="model"),
    "pe-sgd, model writes, L = 4": Row("pe-sgd", generator="model", synthesis={"seeds": 50, "variations": 3}),
    "pe-sgd, model writes, fresh": Row("pe-sgd", generator="model", synthesis={"evolution": "fresh"}),
    "noise on gradients": Row("pdp-sgd", {"clipping": "normalized", "top_k": 0, "ridge": 1e-6}),
    "noise on inner products": Row("pe-sgd-fix", {"alpha": 0.0}),
    "span-prism": Row("span-prism", first_rate=0.004),
    "span-prism, fixed": Row("span-prism", first_rate=0.004, synthesis={"evolution": "none"}),
    "span-prism, averaged": Row("span-prism", {"averaging": 0.5}, first_rate=0.004),
    "span-prism, rehearsed": Row("span-prism", synthesis={"evolution": "none"}, rehearsed=True),
    "guided-prism, rehearsed": Row("guided-prism", rehearsed=True),
    "prism, rehearsed": Row("prism", {"clipping": "automatic"}, rehearsed=True),
    "aug-pe": Row("aug-pe", votes=True),
    "aug-pe, model writes": Row("aug-pe", generator="model", votes=True),
    "popri": Row("popri", generator="model", votes=True, synthesis={"dpo_learning_rate": 1e-3}),
    "span-prism, sgd": Row("span-prism", {"optimizer": "sgd"}, first_rate=0.004),
}
UNTRAINED = "zero training"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """records: M. epsilon: None without privacy. rate: learning rate. role: selection or report."""

    task: str
    row: str
    records: int
    epsilon: float | None
    seed: int
    rate: float
    role: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def trains(self) -> bool:
        return ROWS[self.row].steps > 0


@cache
def read(assets: Path, source: Source) -> tuple[str, ...]:
    """Texts, cut short before they are tokenised."""
    with gzip.open(assets / "data" / f"{source.file}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    chosen = [row for row in rows if source.only is None or row["source"] == source.only]
    return tuple(_text(row)[:_LETTERS] for row in chosen)


def _text(row: Mapping[str, str]) -> str:
    if "instruction" in row:
        return f"{row['instruction']} {row['output']}"
    (text,) = (row[column] for column in ("text", "ref", "sentence1") if column in row)
    return text


def _records(texts: Iterable[str]) -> list[dict[str, str]]:
    """Each text once."""
    return [{"text": text} for text in dict.fromkeys(texts)]


def _every(rows: Sequence[dict[str, str]], count: int) -> list[dict[str, str]]:
    """So many, spread evenly over all."""
    step = max(1, len(rows) // count)
    return list(rows[::step][:count])


@dataclass(frozen=True)
class Texts:
    """public: of the common start and of spans. fresh: public as well, and no part of the start. private: M records.
    held: what is evaluated."""

    public: list[dict[str, str]]
    fresh: list[dict[str, str]]
    private: list[dict[str, str]]
    held: list[dict[str, str]]


def texts_of(cell: Cell, assets: Path) -> Texts:
    """Which M records are private goes by the seed. Runs that choose a rate are scored on records of their own."""
    task = TASKS[cell.task]
    private, held = _records(read(assets, task.private)), _records(read(assets, task.held))
    public = _records(text for source in task.public for text in read(assets, source))
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(cell.seed)).tolist()
    return Texts(
        public=public[:PUBLIC],
        fresh=public[PUBLIC : PUBLIC + FRESH],
        private=[private[i] for i in order[: cell.records]],
        held=_every(held[cell.role == "report" :: 2], EVALUATION),
    )


def settings_of(cell: Cell, model: Path, folder: Path, public: Path) -> Settings:
    task, row = TASKS[cell.task], ROWS[cell.row]
    private: dict[str, Any] = {"private": False}
    # Without privacy nothing is clipped.
    method = {k: v for k, v in row.method.items() if cell.epsilon is not None or k != "clipping"}
    if cell.epsilon is not None:
        private = {"target_epsilon": cell.epsilon * (0.01 if row.noise_alone else 1)}
    adapter: dict[str, Any] = {"r": RANK, "target_modules": list(task.modules)}
    if row.init:
        adapter |= {"init": row.init, "public_text": str(public)}
    content: dict[str, Any] = {
        "model": {"name": str(model)},
        "data": {"path": _IN_MEMORY, "max_length": TOKENS, "unchecked": True},
        "adapter": adapter,
        "privacy": {
            **private,
            "delta": DELTA,
            "steps": max(row.steps, 1),
            "expected_batch_size": (1.0 if row.votes else RATE) * cell.records,
            "public_dataset_size": cell.records,
        },
        "method": {
            "name": row.name,
            "learning_rate": cell.rate or 1e-3,
            "relative_rate": False,
            **method,
        },
        "run": {"output": str(folder), "seed": cell.seed},
    }
    if row.votes or METHODS[row.name].public_texts:
        writer: dict[str, Any] = {"file": str(public)}
        if row.generator == "model":
            writer = {"preset": task.preset, "chat": False, "max_new_tokens": TOKENS}
        content["synthesis"] = {
            **writer,
            "seeds": SEEDS_KEPT,
            "variations": VARIATIONS,
            **row.synthesis,
        }
        if not row.votes:
            content["synthesis"]["similarity_limit"] = None
    return settings_from(content)


def tuning_settings(model: Path, folder: Path, texts: int) -> Settings:
    """Of the common start: ordinary training on public texts."""
    return settings_from(
        {
            "model": {"name": str(model)},
            "data": {"path": _IN_MEMORY, "max_length": TOKENS, "unchecked": True},
            "adapter": {"r": PUBLIC_RANK, "target_modules": _LINEARS},
            "privacy": {
                "private": False,
                "steps": PUBLIC_STEPS,
                "expected_batch_size": PUBLIC_BATCH,
                "public_dataset_size": texts,
            },
            "method": {"name": "adamw", "learning_rate": PUBLIC_RATE, "schedule": "cosine"},
            "run": {"output": str(folder), "seed": 0},
        }
    )


class Runner:
    """Runs cells one after the other; models stay loaded. cache: for models that were tuned on public texts."""

    def __init__(self, assets: Path, cache: Path) -> None:
        self.assets, self.cache = assets, cache
        self._models: dict[str, tuple[Any, Any]] = {}
        self._before: dict[tuple[str, str], Tensor] = {}  # losses of the untouched model

    def run(self, cell: Cell) -> dict[str, Any]:
        """Losses and accuracy on held-out records."""
        texts = texts_of(cell, self.assets)
        folder = self._tuned(cell, texts)
        model, tokenizer = self._model(folder)
        row, plan = ROWS[cell.row], None
        with tempfile.TemporaryDirectory(prefix="privlora-study-") as temporary:
            public = Path(temporary) / "public.jsonl"
            spanning = texts.fresh if row.rehearsed else texts.public
            public.write_text("\n".join(map(json.dumps, spanning)), encoding="utf-8")
            settings = settings_of(cell, folder, Path(temporary) / "run", public)
            held = tokenise(texts.held, settings.data, tokenizer)
            if _place(cell) not in self._before:
                self._before[_place(cell)] = _losses(model, held)
            if not cell.trains:
                return self._scores(cell, model, held)
            if cell.epsilon is not None:
                plan = plan_privacy(settings, model)
            with unchanged_afterwards(model):
                parts = build_parts(settings, model, PublicStart(tokenizer))
                data = load_data(settings, tokenizer, texts.private, model=model, all_public=True)
                with parts.adapter:
                    _train(parts, data, plan)
                    parts.install_result()
                    found = self._scores(cell, model, held)
        return found | {"noise_multiplier": None if plan is None else plan.event.noise_multiplier}

    def advise(self, cell: Cell) -> dict[str, Any]:
        """What `privlora plan --advise` finds on public texts for this many records and this epsilon."""
        texts = texts_of(cell, self.assets)
        folder = self._tuned(cell, texts)
        model, tokenizer = self._model(folder)
        with tempfile.TemporaryDirectory(prefix="privlora-study-") as temporary:
            public = Path(temporary) / "public.jsonl"
            public.write_text("\n".join(map(json.dumps, texts.fresh)), encoding="utf-8")
            plain = replace(cell, row="span-prism, rehearsed", rate=0.0, seed=0)
            given = settings_of(plain, folder, Path(temporary) / "run", public)
            settings = given.changed(method=MethodSettings(name="dp-sgd"))
            rows, sigma = rows_to_advise_on(settings), plan_privacy(given, model).event.noise_multiplier
            (outcomes,), facts = rehearse(
                given, rows, [given.privacy.n], sigma, model, tokenizer, None, lambda *_: None
            )
            found = verdict(outcomes)
            return {"row": found["rows"][0]["name"], **facts, **found}

    def _model(self, folder: Path) -> tuple[Any, Any]:
        if str(folder) not in self._models:
            self._models[str(folder)] = load_model(ModelSettings(name=str(folder)))
        return self._models[str(folder)]

    def _tuned(self, cell: Cell, texts: Texts) -> Path:
        """The task's model, tuned on public texts and merged: made once."""
        task = TASKS[cell.task]
        folder = self.cache / cell.task
        if not folder.exists():
            base = self.assets / "models" / task.model
            model, tokenizer = load_model(ModelSettings(name=str(base)))
            with tempfile.TemporaryDirectory(prefix="privlora-study-") as temporary:
                settings = tuning_settings(base, Path(temporary) / "run", len(texts.public))
                parts = build_parts(settings, model)
                with parts.adapter:
                    _train(
                        parts,
                        load_data(settings, tokenizer, texts.public, model=model, all_public=True),
                        None,
                    )
                    parts.write_adapter(Path(temporary))
                merged = PeftModel.from_pretrained(
                    AutoModelForCausalLM.from_pretrained(base), temporary
                ).merge_and_unload()
                merged.save_pretrained(folder.with_suffix(".part"))
                tokenizer.save_pretrained(folder.with_suffix(".part"))
                folder.with_suffix(".part").rename(folder)
        return folder

    def _scores(self, cell: Cell, model: torch.nn.Module, held: Examples) -> dict[str, Any]:
        """hardest: mean change of the loss on the tenth of records that the untouched model finds hardest."""
        result, change = evaluate_next_token(model, held), _losses(model, held) - self._before[_place(cell)]
        hardest = self._before[_place(cell)].topk(max(1, len(held) // 10)).indices
        return {
            "loss": result.loss_per_example,
            "accuracy": result.accuracy,
            "hardest": float(change[hardest].mean()),
        }


def _place(cell: Cell) -> tuple[str, str]:
    """Of which the held-out records are the same."""
    return cell.task, cell.role


def _train(parts: Parts, data: Data, plan: Plan | None) -> None:
    folder = RunFolder(Path(parts.settings.run.output))
    folder.create(protects=parts.settings.privacy.protects)
    finish_training(parts, data, folder, plan)


def _losses(model: torch.nn.Module, held: Examples) -> Tensor:
    """Of each record, in order."""
    found = torch.zeros(len(held), dtype=torch.float64)
    with evaluating(model) as device:
        for batch in sequential_batches(held, max_tokens=8192):
            found[batch.record_index] = row_losses(model, batch.to(device)).cpu().double()
    return found
