"""The training steps that the benchmarks of speed compare, on one random Llama or one pretrained model.

Every variant has a ``step(drawn)``: one whole logical step, from the numbers of the drawn records to the moved weights.
All of them have the same adapter, no dropout and no checkpointing, and may share the frozen weights.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.accountants import PRVAccountant
from opacus.optimizers import DPOptimizer
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from privlora.accounting.events import StepEvent
from privlora.accounting.ledger import Ledger, Plan
from privlora.adapters import LowRankAdapter
from privlora.data.examples import IGNORED, Example, Examples
from privlora.data.sampling import PoissonSampler
from privlora.losses import label_logits, weighted_cross_entropy
from privlora.mechanisms import GaussianMechanism, MeanMechanism, Mechanism
from privlora.methods import build, find_method
from privlora.optimizers import IterateAverage
from privlora.training.models import set_checkpointing
from privlora.training.state import TrainState
from privlora.training.step import Step

TARGETS = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj")
SIGMA, CLIP = 1.0, 1.0
UNITS = 10_000  # privacy units of the pretended data set
LEARNING_RATE = 1e-3
PAD = 0


class Variant(Protocol):
    """One way to train. model: the Llama, under whatever wraps it."""

    model: Any

    def step(self, drawn: Sequence[int]) -> None:
        """One whole logical step on these records."""


@dataclass(frozen=True)
class Shape:
    """Of a random Llama and its adapter."""

    layers: int = 8
    vocabulary: int = 8000
    hidden: int = 512
    intermediate: int = 1376
    heads: int = 8
    kv_heads: int | None = None
    positions: int = 128
    rank: int = 16
    targets: tuple[str, ...] = TARGETS
    tied: bool = False
    dtype: str = "float32"
    folder: str | None = None  # a pretrained model, of which the rest but rank and targets says nothing

    def __str__(self) -> str:
        if self.folder is not None:
            return f"{Path(self.folder).name}, {self.dtype}, rank {self.rank} on {', '.join(self.targets)}"
        return (
            f"random Llama: hidden {self.hidden}, {self.layers} layers, {self.heads} heads, intermediate "
            f"{self.intermediate}, vocabulary {self.vocabulary}, {self.dtype}"
        )


@dataclass(frozen=True)
class Setting:
    """What a variant is built from.

    lengths: of each record its tokens, and how many of them, the last ones, are labels. batch: expected number of
    records in a step. rows: of a micro-batch of the peers; None: all together. grouped: whether the peers sort a batch
    by length before they cut it. max_tokens: of a micro-batch of privlora; None: all together. weights: a state_dict
    that all variants share, or None for fresh ones. device: where all of it is. checkpointing: whether blocks are
    computed a second time, for the backward pass.
    """

    lengths: tuple[tuple[int, int], ...]
    batch: int
    shape: Shape = Shape()
    rows: int | None = None
    grouped: bool = False
    max_tokens: int | None = None
    weights: dict[str, Tensor] | None = field(default=None, compare=False)
    reference: Path | None = None
    device: str = "cpu"
    checkpointing: bool = False


def build_model(setting: Setting) -> Any:
    shape = setting.shape
    if shape.folder is not None:
        model = AutoModelForCausalLM.from_pretrained(shape.folder, dtype=getattr(torch, shape.dtype))
        set_checkpointing(model, "non-reentrant" if setting.checkpointing else "none")
        return model.to(setting.device)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(0)
    with torch.device("meta" if setting.weights is not None else setting.device), _dtype(shape.dtype):
        model = LlamaForCausalLM(config)
    if setting.weights is not None:
        model.load_state_dict(setting.weights, assign=True)
        model.tie_weights()
        # Buffers that no state_dict holds (the rotary frequencies) are still on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(setting.device)
    set_checkpointing(model, "non-reentrant" if setting.checkpointing else "none")
    return model


@contextmanager
def _dtype(name: str) -> Iterator[None]:
    """New weights are of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_records(setting: Setting) -> Examples:
    """Random records of the setting's lengths."""
    rng = np.random.default_rng(0)

    def record(tokens: int, labelled: int) -> Example:
        ids = rng.integers(0, setting.shape.vocabulary, tokens, dtype=np.int32)
        labels = ids.copy()
        labels[: tokens - labelled] = IGNORED
        return Example(ids, labels)

    return Examples((record(*each) for each in setting.lengths), pad_token_id=PAD)


# --- privlora ---


class Privlora:
    """privlora's loop: draw, collate, gradients, clip, charge the ledger on disk, noise, update, average."""

    def __init__(
        self, setting: Setting, method: str, averaging: float | None = None, clipping: str | None = None
    ) -> None:
        row = find_method(method)
        self.setting = setting
        self.records = build_records(setting)
        self.model = build_model(setting).train()
        self.adapter = LowRankAdapter(
            self.model, rank=setting.shape.rank, target_modules=setting.shape.targets
        ).attach()
        self.coordinates, self.optimizer = build(row, self.adapter)
        decay = row.averaging if averaging is None else averaging
        self.average = IterateAverage(self.coordinates, decay) if decay else None
        self.sampler = PoissonSampler(UNITS, setting.batch / UNITS)
        self.mechanism = self._mechanism(row.private, method, clipping or row.clipping)
        longest = max(tokens for tokens, _ in setting.lengths)
        self.private_step = Step(
            state=TrainState(coordinates=self.coordinates, optimizer=self.optimizer, average=self.average),
            mechanism=self.mechanism,
            examples=self.records,
            learning_rate=lambda _: LEARNING_RATE,
            max_tokens=setting.max_tokens or setting.batch * longest,
        )

    def step(self, drawn: Sequence[int]) -> None:
        self.sampler.draw()  # its cost counts; the batch itself is the same for every variant
        self.private_step.take(drawn)

    def _mechanism(self, private: bool, method: str, clipping: str) -> Mechanism:
        steps, batch = 1_000_000, float(self.setting.batch)
        if not private:
            return MeanMechanism(self.coordinates, expected_batch_size=batch, steps=steps)
        event = StepEvent(self.sampler.sampling, SIGMA, self.coordinates.event_layers)
        plan = Plan(
            phases=((event, steps),),
            delta=1e-6,
            target_epsilon=None,
            adjacency="add-or-remove-one",
            unit="record",
            records_per_user=None,
            clip_norm=CLIP,
            expected_batch_size=batch,
            method=method,
            dataset="benchmark",
        )
        self.folder = tempfile.TemporaryDirectory()
        self.ledger = Ledger.create(Path(self.folder.name) / "ledger.jsonl", plan)
        return GaussianMechanism(
            self.coordinates,
            clip_norm=CLIP,
            event=event,
            expected_batch_size=batch,
            ledger=self.ledger,
            clipping=clipping,
        )


# --- peers ---


@dataclass(frozen=True)
class Padded:
    """Records padded at the right to the longest of them, as transformers' collators do; (rows, tokens) int64."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @staticmethod
    def of(records: Examples, chosen: Sequence[int], device: str) -> Padded:
        shape = (len(chosen), max(len(records[i].input_ids) for i in chosen))
        ids, mask, labels = np.full(shape, PAD), np.zeros(shape, np.int64), np.full(shape, IGNORED)
        for row, record in enumerate(chosen):
            length = len(records[record].input_ids)
            ids[row, :length] = records[record].input_ids
            labels[row, :length] = records[record].labels
            mask[row, :length] = 1
        return Padded(*(torch.from_numpy(each).to(device) for each in (ids, mask, labels)))


class Plain:
    """peft and AdamW, not private. ``our_loss``: the same with privlora's loss instead of transformers'."""

    def __init__(self, setting: Setting, our_loss: bool = False, foreach: bool | None = None) -> None:
        self.setting = setting
        self.records = build_records(setting)
        self.model: Any = peft_model(setting)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(self.trained, lr=LEARNING_RATE, foreach=foreach)
        self.our_loss = our_loss

    def step(self, drawn: Sequence[int]) -> None:
        parts = self._parts(drawn)
        for part in parts:
            loss = self._loss(Padded.of(self.records, part, self.setting.device))
            (loss if len(parts) == 1 else loss / len(parts)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _parts(self, drawn: Sequence[int]) -> list[Sequence[int]]:
        rows = self.setting.rows or len(drawn)
        if self.setting.grouped:
            drawn = sorted(drawn, key=lambda record: -len(self.records[record].input_ids))
        return [drawn[start : start + rows] for start in range(0, len(drawn), rows)]

    def _loss(self, batch: Padded) -> Tensor:
        if not self.our_loss:
            return self.model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
            ).loss
        predicted = (batch.labels != IGNORED).float()
        weights = predicted / predicted.sum(dim=1, keepdim=True).clamp_min(1) / len(batch.labels)
        found = label_logits(self.model, batch.input_ids, batch.attention_mask, batch.labels)
        return weighted_cross_entropy(found, weights)[0]


class Opacus(Plain):
    """Opacus: per-sample gradients by hooks, DPOptimizer around AdamW, its accountant told of every step.

    Where a batch is cut, the optimizer is told after which parts not to step, as its BatchMemoryManager does.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.model = GradSampleModule(self.model, loss_reduction="mean")
        self.optimizer = DPOptimizer(
            self.optimizer,
            noise_multiplier=SIGMA,
            max_grad_norm=CLIP,
            expected_batch_size=setting.batch,
        )
        hook = PRVAccountant().get_optimizer_hook_fn(sample_rate=setting.batch / UNITS)
        self.optimizer.attach_step_hook(hook)

    def step(self, drawn: Sequence[int]) -> None:
        parts = self._parts(drawn)
        for k, part in enumerate(parts):
            self.optimizer.signal_skip_step(do_skip=k < len(parts) - 1)
            self._loss(Padded.of(self.records, part, self.setting.device)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Reference(Plain):
    """The PRISM authors' optimizer in their default settings, on Opacus' per-sample gradients; batches whole."""

    def __init__(self, setting: Setting, mode: str) -> None:
        super().__init__(setting)
        assert setting.reference is not None
        authors = load_reference(setting.reference)
        authors.spectral_init_peft_model(self.model, verbose=False)
        self.optimizer = authors.PRISM(
            authors.get_paired_lora_parameters(self.model),
            lr=LEARNING_RATE,
            dp_precond_floor_factor=0.5,
            dp_floor_mode="scalar",
            lift_gauge_fix="both",
            dp_debias_second_moment=False,
        )
        if mode == "functorch":
            self.model = GradSampleModule(self.model, loss_reduction="mean", force_functorch=True)
        else:
            self.model = GradSampleModule(self.model, loss_reduction="mean")
        self.accountant = PRVAccountant()

    def step(self, drawn: Sequence[int]) -> None:
        batch = Padded.of(self.records, drawn, self.setting.device)
        self.optimizer.dp_begin(max_grad_norm=CLIP)
        self.optimizer.zero_grad(set_to_none=True)
        (self._loss(batch) * self.setting.batch).backward()
        self.optimizer.dp_accumulate()
        self.optimizer.dp_finalize(noise_multiplier=SIGMA)
        self.accountant.step(noise_multiplier=SIGMA, sample_rate=self.setting.batch / UNITS)


def peft_model(setting: Setting) -> Any:
    rank, targets = setting.shape.rank, list(setting.shape.targets)
    lora = LoraConfig(
        r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    return get_peft_model(build_model(setting), lora).train()


def load_reference(checkout: Path) -> ModuleType:
    """The optimizer module of a checkout of the PRISM authors' repository."""
    path = checkout / "src" / "prism_cli" / "optim" / "prism.py"
    spec = importlib.util.spec_from_file_location("prism_reference", path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"--prism-reference: {path} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


VARIANTS: dict[str, Callable[[Setting], Variant]] = {
    "plain": Plain,
    "plain, privlora's loss": lambda s: Plain(s, our_loss=True),
    "privlora adamw (not private)": lambda s: Privlora(s, "adamw"),
    "privlora dp-adamw": lambda s: Privlora(s, "dp-adamw"),
    "privlora prism": lambda s: Privlora(s, "prism"),
    "privlora prism, no averaging": lambda s: Privlora(s, "prism", averaging=0.0),
    "privlora prism, flat clipping, no averaging": lambda s: Privlora(
        s, "prism", averaging=0.0, clipping="flat"
    ),
    "privlora projected": lambda s: Privlora(s, "projected"),
    "privlora wishart-m2": lambda s: Privlora(s, "wishart-m2"),
    "Opacus DP-AdamW, hooks": Opacus,
    "PRISM authors, functorch": lambda s: Reference(s, "functorch"),
    "PRISM authors, hooks": lambda s: Reference(s, "hooks"),
}
