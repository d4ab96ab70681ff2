"""The training steps that speed.py compares, on one random Llama and one batch.

Every variant has a ``step()``: one whole logical step, from the batch to the moved weights. All of them use rank
16 on q, k, v, up and down, no dropout and no checkpointing, and may share the frozen weights in memory.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.accountants import PRVAccountant
from opacus.optimizers import DPOptimizer
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from privlora.accounting.events import StepEvent
from privlora.accounting.ledger import Ledger, Plan
from privlora.adapters import LowRankAdapter
from privlora.data.batching import MicroBatch, micro_batches
from privlora.data.examples import Example, Examples
from privlora.data.sampling import PoissonSampler
from privlora.losses import label_logits, weighted_cross_entropy
from privlora.mechanisms import GaussianMechanism, MeanMechanism, Mechanism
from privlora.methods import build, find_method
from privlora.optimizers import IterateAverage
from privlora.training.state import TrainState
from privlora.training.step import Step

TARGETS = ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]
RANK = 16
VOCABULARY = 8000
LENGTH = 128
SIGMA, CLIP = 1.0, 1.0
UNITS = 10_000  # privacy units of the pretended data set
LEARNING_RATE = 1e-3
PAD = 0


class Variant(Protocol):
    """One way to train."""

    def step(self) -> None:
        """One whole logical step."""


@dataclass(frozen=True)
class Setting:
    """What a variant is built from. weights: a state_dict that all variants share, or None for fresh ones."""

    batch: int
    weights: dict[str, torch.Tensor] | None = None
    reference: Path | None = None


def base_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1376,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )


def build_model(setting: Setting) -> LlamaForCausalLM:
    torch.manual_seed(0)
    if setting.weights is None:
        return LlamaForCausalLM(base_config())
    with torch.device("meta"):
        model = LlamaForCausalLM(base_config())
    model.load_state_dict(setting.weights, assign=True)
    # Buffers that no state_dict holds (the rotary frequencies) are still on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def build_records(count: int) -> Examples:
    """Random records of LENGTH tokens, all of which are labels."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (count, LENGTH), dtype=np.int32)
    return Examples((Example(row, row) for row in ids), pad_token_id=PAD)


def collate(setting: Setting, records: Examples) -> MicroBatch:
    """All records as one micro-batch, by the code that privlora's loop runs."""
    (batch,) = micro_batches(range(len(records)), records, max_tokens=setting.batch * LENGTH)
    return batch


# --- privlora ---


class Privlora:
    """privlora's loop: draw, collate, gradients, clip, charge the ledger on disk, noise, update, average."""

    def __init__(
        self, setting: Setting, method: str, averaging: float | None = None, clipping: str | None = None
    ) -> None:
        row = find_method(method)
        self.setting = setting
        self.records = build_records(setting.batch)
        self.model = build_model(setting).train()
        self.adapter = LowRankAdapter(self.model, rank=RANK, target_modules=TARGETS).attach()
        self.coordinates, self.optimizer = build(row, self.adapter)
        decay = row.averaging if averaging is None else averaging
        self.average = IterateAverage(self.coordinates, decay) if decay else None
        self.sampler = PoissonSampler(UNITS, setting.batch / UNITS)
        self.mechanism = self._mechanism(row.private, method, clipping or row.clipping)
        self.private_step = Step(
            state=TrainState(coordinates=self.coordinates, optimizer=self.optimizer, average=self.average),
            mechanism=self.mechanism,
            examples=self.records,
            learning_rate=lambda _: LEARNING_RATE,
            max_tokens=setting.batch * LENGTH,
        )

    def step(self) -> None:
        self.sampler.draw()  # its cost counts; the batch itself is the same for every variant
        self.private_step.take(range(len(self.records)))

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


class Plain:
    """peft and AdamW, not private. ``our_loss``: the same with privlora's loss instead of transformers'."""

    def __init__(self, setting: Setting, our_loss: bool = False) -> None:
        self.setting = setting
        self.records = build_records(setting.batch)
        self.model = peft_model(setting)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(self.trained, lr=LEARNING_RATE)
        self.our_loss = our_loss

    def step(self) -> None:
        batch = collate(self.setting, self.records)
        if self.our_loss:
            found = label_logits(self.model, batch.input_ids, batch.attention_mask, batch.labels)
            loss = weighted_cross_entropy(found, batch.token_weight / len(batch.labels))[0]
            del found
        else:
            loss = self.model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
            ).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Opacus(Plain):
    """Opacus: per-sample gradients by hooks, DPOptimizer around AdamW, its accountant told of every step."""

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


class Reference(Plain):
    """The PRISM authors' optimizer in their default settings, on Opacus' per-sample gradients."""

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

    def step(self) -> None:
        batch = collate(self.setting, self.records)
        self.optimizer.dp_begin(max_grad_norm=CLIP)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
        ).loss
        (loss * self.setting.batch).backward()
        self.optimizer.dp_accumulate()
        self.optimizer.dp_finalize(noise_multiplier=SIGMA)
        self.accountant.step(noise_multiplier=SIGMA, sample_rate=self.setting.batch / UNITS)


def peft_model(setting: Setting) -> Any:
    lora = LoraConfig(
        r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"
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
