"""A model's low-rank adapter tuned on public preferences by DPO (Rafailov et al. 2023), as POPri's rounds want it.

TRL trains; what is kept between two rounds are the two factors of each layer as peft stores them. They are put into
the model under peft for the time of one round, against the model of the round's start as its reference, and are taken
out again, so that the user's model is what it was and the state of many rounds is one plain adapter.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback
from transformers.pytorch_utils import Conv1D

from privlora.adapters import LowRankAdapter, write_adapter
from privlora.adapters.peft_files import lora_scaling
from privlora.errors import ConfigError, ModelError
from privlora.randomness import counter_generator
from privlora.synthesis.popri import Preference
from privlora.training.forward import training_passes

_DEFAULT = "default"  # what peft calls the adapter that is trained


@dataclass(frozen=True)
class PreferenceSettings:
    """Of one round's DPO. Defaults are those of POPri (Hou et al. 2025), whose model has 8 billion parameters.

    beta: how strongly the reference holds the model. learning_rate: of AdamW, which falls linearly to 0.
    epochs: over a round's preferences. batch_size: preferences a step.
    """

    beta: float = 0.01
    learning_rate: float = 8e-7
    epochs: int = 1
    batch_size: int = 8


class PreferenceTuner:
    """The adapter that rounds of preferences tune, beside its model; everything in it is public.

    The model computes with it whenever ``adapter`` is attached, as it is from the start. ``state_dict`` is all that a
    later round depends on: stored in one file with the state of the rounds, a round whose tuning a crash cut off is
    tuned again from the same weights, on the same preferences, in the same order.

    Args:
        adapter: whose model is tuned, and where; not attached.
        tokenizer: the model's.
        settings: of each round.
        lora_alpha, use_rslora: peft's scale of the update.
        chat: whether prompts are a user's turns; else completions go on with them.
        seed: PUBLIC; the first factors and the order of preferences follow from it.

    Raises:
        ConfigError: TRL is not installed, the tokenizer has no EOS token, or there are several GPUs.
    """

    def __init__(
        self,
        adapter: LowRankAdapter,
        tokenizer: Any,
        settings: PreferenceSettings,
        *,
        lora_alpha: float = 16.0,
        use_rslora: bool = False,
        chat: bool = False,
        seed: int = 0,
    ) -> None:
        check_installed()
        if tokenizer.eos_token is None:
            raise ConfigError(
                "the tokenizer has no EOS token",
                why="preferences would not say where a text ends",
                fix="set tokenizer.eos_token in the model's tokenizer_config.json",
            )
        if adapter.device.type == "cuda" and torch.cuda.device_count() > 1:
            raise ConfigError(
                "tuning a model by preferences uses one GPU, and this process sees several",
                fix="set CUDA_VISIBLE_DEVICES to one of them",
            )
        self.adapter, self._tokenizer, self._settings = adapter, tokenizer, settings
        self._alpha, self._rslora, self._chat, self._seed = lora_alpha, use_rslora, chat, seed
        self._scale = lora_scaling(lora_alpha, adapter.rank, use_rslora)
        self.rounds = 0
        self._factors: dict[str, Tensor] = {}
        draw = counter_generator(seed)
        for site in adapter.sites:  # as peft begins: the update is zero
            a = torch.from_numpy(draw.uniform(-1.0, 1.0, (adapter.rank, site.n))) / site.n**0.5
            self._factors[f"{site.name}.lora_A"] = a.float()
            self._factors[f"{site.name}.lora_B"] = torch.zeros(site.m, adapter.rank)
        self._install()
        adapter.attach()

    def tune(self, preferences: list[Preference]) -> None:
        """One round of DPO, against the model as it is now. Without a preference the model stays.

        Raises ModelError if the factors are no longer numbers; they are then what they were.
        """
        if preferences:
            self.adapter.detach()
            try:
                self._factors = self._trained(preferences)
            finally:
                self._install()
                self.adapter.attach()
        self.rounds += 1

    def named_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Site name -> (A (m, r), B (n, r)) with W = W0 + A B^T, as ``adapters.write_adapter`` takes them."""
        root = self._scale**0.5
        return {
            site.name: (
                self._factors[f"{site.name}.lora_B"] * root,
                self._factors[f"{site.name}.lora_A"].T * root,
            )
            for site in self.adapter.sites
        }

    def write_adapter(self, folder: Path, base_model: str) -> None:
        """A plain LoRA adapter in peft's files. base_model: see ``adapters.write_adapter``."""
        write_adapter(
            folder,
            self.adapter,
            self.named_factors(),
            base_model=base_model,
            lora_alpha=self._alpha,
            use_rslora=self._rslora,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Both factors of each site, float32, and how many rounds there were."""
        return {**self._factors, "rounds": torch.tensor(self.rounds)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._factors = {name: state[name].float() for name in self._factors}
        self.rounds = int(state["rounds"])
        self._install()

    def _install(self) -> None:
        """Let the model compute with the factors wherever the adapter is attached."""
        factors = self.named_factors()
        for group in self.adapter.groups:
            pairs = [factors[site.name] for site in group.sites]
            left, right = (torch.stack([pair[i] for pair in pairs]) for i in (0, 1))
            self.adapter.install(group, left, torch.ones(len(pairs), self.adapter.rank), right)

    def _trained(self, preferences: list[Preference]) -> dict[str, Tensor]:
        from datasets import Dataset

        model = self.adapter.model
        with ExitStack() as undo:
            undo.enter_context(_quiet())
            undo.enter_context(_restored(model))
            undo.enter_context(training_passes(model, counter_generator(self._seed, stream=self.rounds + 1)))
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="privlora-"))
            wrapped = self._under_peft(model)
            undo.callback(wrapped.unload)
            trainer = _trainer_class()(
                model=wrapped,
                args=self._arguments(folder),
                train_dataset=Dataset.from_list([self._written(each) for each in preferences]),
                processing_class=copy.deepcopy(self._tokenizer),  # it may be given a pad token
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            found = {name: tensor.detach().float().cpu().clone() for name, tensor in self._of(wrapped)}
        if not all(tensor.isfinite().all() for tensor in found.values()):
            raise ModelError(
                "tuning by preferences diverged: the adapter's entries are not numbers",
                fix="lower the learning rate of the preferences",
            )
        return found

    def _under_peft(self, model: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=self.adapter.rank,
                lora_alpha=self._alpha,
                use_rslora=self._rslora,
                lora_dropout=0.0,
                target_modules=[site.name for site in self.adapter.sites],
                fan_in_fan_out=any(isinstance(site.module, Conv1D) for site in self.adapter.sites),
            ),
        )
        with torch.no_grad():
            for name, tensor in self._of(wrapped):
                tensor.copy_(self._factors[name])
        return wrapped

    def _of(self, wrapped: Any) -> Iterator[tuple[str, Tensor]]:
        """The factors under the names of the state, as peft holds them."""
        for site in self.adapter.sites:
            layer = wrapped.base_model.model.get_submodule(site.name)
            for kind in ("lora_A", "lora_B"):
                yield f"{site.name}.{kind}", getattr(layer, kind)[_DEFAULT].weight

    def _arguments(self, folder: str) -> Any:
        from trl import DPOConfig

        chosen = self._settings
        model: Any = self.adapter.model
        return DPOConfig(
            output_dir=folder,
            beta=chosen.beta,
            learning_rate=chosen.learning_rate,
            num_train_epochs=chosen.epochs,
            per_device_train_batch_size=chosen.batch_size,
            max_length=getattr(model.config, "max_position_embeddings", None),
            seed=int(counter_generator(self._seed, stream=self.rounds + 1).integers(2**31)),
            use_cpu=self.adapter.device.type == "cpu",
            # The model's own precision, as everywhere.
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            push_to_hub=False,
            disable_tqdm=True,
        )

    def _written(self, preference: Preference) -> dict[str, Any]:
        prompt, chosen, rejected = (preference[key] for key in ("prompt", "chosen", "rejected"))
        if not self._chat:
            start = (
                self._tokenizer.bos_token or self._tokenizer.eos_token
            )  # as the model is asked without a word
            return {"prompt": prompt or start, "chosen": chosen, "rejected": rejected}
        return {
            "prompt": [{"role": "user", "content": prompt}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
            "chat_template_kwargs": {"enable_thinking": False},
        }


def check_installed() -> None:
    """Raise ConfigError if TRL is not there."""
    if find_spec("trl") is None:
        raise ConfigError(
            "tuning a model by preferences needs the package trl",
            fix="pip install 'privlora[preferences]', or choose another method",
        )


def _trainer_class() -> Any:
    from trl import DPOTrainer

    class Trainer(DPOTrainer):
        """TRL's, which tells nobody that it runs."""

        def _send_telemetry(self) -> None:
            pass

    return Trainer


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is sent to a hub whatever it is called, and libraries say nothing of what they find in public texts."""
    import datasets
    from huggingface_hub import constants
    from transformers.utils import logging

    sent, verbosity, bars = (
        constants.HF_HUB_DISABLE_TELEMETRY,
        logging.get_verbosity(),
        not datasets.are_progress_bars_disabled(),
    )
    try:
        constants.HF_HUB_DISABLE_TELEMETRY = True
        logging.set_verbosity_error()
        datasets.disable_progress_bars()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = sent
        logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Trainers replace a model's forward pass, take out its dropout and change its configs; all comes back."""
    configs = [model.config, model.config.get_text_config(), model.generation_config]
    own = [(each, dict(vars(each))) for each in [model, *configs]]
    rates = [(module, module.p) for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    trainable = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        for each, before in own:
            vars(each).clear()
            vars(each).update(before)
        for module, rate in rates:
            module.p = rate
        for p, flag in trainable:
            p.requires_grad_(flag)
            p.grad = None
