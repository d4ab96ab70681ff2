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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from privlora.accounting import Plan
from privlora.config import ModelSettings, Settings, settings_from
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.evaluation import evaluate_next_token
from privlora.evaluation.batches import evaluating
from privlora.evaluation.next_token import row_losses
from privlora.methods import METHODS
from privlora.training.assembly import Parts, PublicStart, build_parts, plan_privacy
from privlora.training.files import RunFolder
from privlora.training.inputs import Data, load_data, tokenise
from privlora.training.loop import finish_training
from privlora.training.models import load_model, unchanged_afterwards

RATE, STEPS, DELTA, RANK, TOKENS = 0.2, 10, 1e-5, 8, 64
SEEDS_KEPT, VARIATIONS = 100, 1  # K and L - 1: N = 200 texts
PUBLIC_STEPS, PUBLIC_BATCH, PUBLIC_RATE, PUBLIC_RANK = 300, 64, 0.003, 32
EVALUATION = 400  # records that are reported on
PUBLIC = 2300  # texts that tune the common start, the first of which make spans
_LETTERS = 300  # more than TOKENS tokens are
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_IN_MEMORY = "(in memory)"


@dataclass(frozen=True)
class Task:
    """model: below models/. private, public: below data/. other: a task whose rates may be taken."""

    model: str
    private: str
    public: str
    other: str
    modules: Sequence[str] = ("q_proj", "v_proj")


TASKS = {
    "abstracts": Task("reviews1M", "pubmed", "biorxiv", other="reviews"),
    "reviews": Task("reviews1M", "sentiment_domains", "glue/sst2", other="abstracts"),
}


@dataclass(frozen=True)
class Row:
    """name, method: of the table, and its settings. steps: T. first_rate: where a search begins.

    noise_alone: with a hundredth of the epsilon.
    """

    name: str
    method: Mapping[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    init: str | None = None
    first_rate: float = 0.002
    noise_alone: bool = False


ROWS: dict[str, Row] = {
    "zero training": Row("adamw", steps=0),
    "noise alone": Row("span-prism", first_rate=0.004, noise_alone=True),
    "dp-adamw": Row("dp-adamw"),
    "dp-adamw, 50 steps": Row("dp-adamw", steps=50),
    "dp-sgd": Row("dp-sgd"),
    "prism": Row("prism", first_rate=0.004),
    "prism, 50 steps": Row("prism", steps=50, first_rate=0.004),
    "prism, public start": Row("prism", init="public-gradient", first_rate=0.004),
    "pdp-sgd": Row("pdp-sgd"),
    "gep": Row("gep"),
    "b-gep": Row("b-gep"),
    "pe-sgd-fix": Row("pe-sgd-fix"),
    "pe-sgd-fix, chosen": Row("pe-sgd-fix", {"hold_out": 0.25}),
    "pe-sgd-fix, sgd": Row("pe-sgd-fix", {"optimizer": "sgd"}),
    "pe-sgd": Row("pe-sgd"),
    "span-prism": Row("span-prism", first_rate=0.004),
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


@cache
def read(assets: Path, folder: str, part: str) -> tuple[dict[str, str], ...]:
    """Texts, each once, cut short before they are tokenised."""
    with gzip.open(assets / "data" / folder / f"{part}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    column = "text" if "text" in rows[0] else "sentence1"
    return tuple({"text": t} for t in dict.fromkeys(row[column][:_LETTERS] for row in rows))


def _every(rows: Sequence[dict[str, str]], count: int) -> list[dict[str, str]]:
    """So many, spread evenly over all."""
    step = max(1, len(rows) // count)
    return list(rows[::step][:count])


@dataclass(frozen=True)
class Texts:
    """public: of the common start and of spans. private: M records. held: what is evaluated."""

    public: list[dict[str, str]]
    private: list[dict[str, str]]
    held: list[dict[str, str]]


def texts_of(cell: Cell, assets: Path) -> Texts:
    """Which M records are private goes by the seed. Runs that choose a rate are scored on records of their own."""
    task = TASKS[cell.task]
    private, held = read(assets, task.private, "train"), read(assets, task.private, "validation")
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(cell.seed)).tolist()
    return Texts(
        public=list(read(assets, task.public, "train")[:PUBLIC]),
        private=[private[i] for i in order[: cell.records]],
        held=_every(held[cell.role == "report" :: 2], EVALUATION),
    )


def settings_of(cell: Cell, model: Path, folder: Path, public: Path) -> Settings:
    task, row = TASKS[cell.task], ROWS[cell.row]
    private: dict[str, Any] = {"private": False}
    if cell.epsilon is not None:
        private = {"target_epsilon": cell.epsilon * (0.01 if row.noise_alone else 1)}
    adapter: dict[str, Any] = {"r": RANK, "target_modules": list(task.modules)}
    if row.init:
        adapter |= {"init": row.init, "public_text": str(public), "public_texts": 200}
    content: dict[str, Any] = {
        "model": {"name": str(model)},
        "data": {"path": _IN_MEMORY, "max_length": TOKENS, "unchecked": True},
        "adapter": adapter,
        "privacy": {
            **private,
            "delta": DELTA,
            "steps": max(row.steps, 1),
            "expected_batch_size": RATE * cell.records,
            "public_dataset_size": cell.records,
        },
        "method": {"name": row.name, "learning_rate": cell.rate or 1e-3, **row.method},
        "run": {"output": str(folder), "seed": cell.seed},
    }
    if METHODS[row.name].public_texts:
        content["synthesis"] = {
            "generator": "file",
            "file": str(public),
            "seeds": SEEDS_KEPT,
            "variations": VARIATIONS,
            "similarity_limit": None,
        }
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
            public.write_text("\n".join(map(json.dumps, texts.public)), encoding="utf-8")
            settings = settings_of(cell, folder, Path(temporary) / "run", public)
            held = tokenise(texts.held, settings.data, tokenizer)
            if _place(cell) not in self._before:
                self._before[_place(cell)] = _losses(model, held)
            if not row.steps:
                return self._scores(cell, model, held)
            if cell.epsilon is not None:
                plan, _ = plan_privacy(settings, model)
            with unchanged_afterwards(model):
                parts = build_parts(settings, model, PublicStart(tokenizer))
                data = load_data(settings, tokenizer, texts.private, model=model, all_public=True)
                with parts.adapter:
                    _train(parts, data, plan)
                    parts.install_result()
                    found = self._scores(cell, model, held)
        return found | {"noise_multiplier": None if plan is None else plan.event.noise_multiplier}

    def _model(self, folder: Path) -> tuple[Any, Any]:
        if str(folder) not in self._models:
            self._models[str(folder)] = load_model(ModelSettings(name=str(folder)))
        return self._models[str(folder)]

    def _tuned(self, cell: Cell, texts: Texts) -> Path:
        """The task's model, tuned on public texts and merged: made once."""
        task = TASKS[cell.task]
        folder = self.cache / f"{task.model} {task.public}".replace("/", "-")
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
