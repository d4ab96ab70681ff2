"""A run's LoRA factors tuned on public preferences by DPO (Rafailov et al. 2023), as POPri's rounds want it.

TRL trains; what is kept between two rounds is the run's state and nothing else. Its factors are put into the model
under peft for the time of one round, against the model of the round's start as its reference, and are taken out again,
so that the user's model is what it was, and many rounds end in one plain adapter.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from privlora.adapters.lowrank import Site
from privlora.adapters.targets import is_conv1d
from privlora.errors import ConfigError, ModelError
from privlora.randomness import counter_generator
from privlora.synthesis.popri import Preference
from privlora.synthesis.writers import asked_tokens
from privlora.training.forward import training_passes
from privlora.training.state import TrainState


class PreferenceTuner:
    """Tunes a state's factors on the preferences of a round. All of it is public.

    A round follows from the state, the preferences and the public seed alone: where the state is stored with that of
    the rounds, in one file, a round whose tuning a crash cut off comes out as it would have.
    Defaults are those of POPri (Hou et al. 2025), whose model has 8 billion parameters.

    Args:
        state: in coordinates of both factors; its adapter is attached.
        tokenizer: the model's.
        learning_rate: of AdamW, which falls linearly to 0.
        beta: how strongly the reference holds the model.
        epochs: over a round's preferences.
        batch_size: preferences a step.
        chat: whether prompts are a user's turns; else completions go on with them.
        seed: PUBLIC; the order of preferences follows from it.

    Raises:
        ConfigError: TRL is not installed, the factors are not those of LoRA, the tokenizer has no EOS token, or there
            are several GPUs.
    """

    def __init__(
        self,
        state: TrainState,
        tokenizer: Any,
        *,
        learning_rate: float,
        beta: float = 0.01,
        epochs: int = 1,
        batch_size: int = 8,
        chat: bool = False,
        seed: int = 0,
    ) -> None:
        refuse_without_trl()
        scale = state.coordinates.lora_scale
        if scale is None:
            what = "preferences tune both factors of LoRA, and the state has other coordinates"
            raise ConfigError(what, fix="choose a method of the space factors")
        if tokenizer.eos_token is None:
            what = "the tokenizer has no EOS token, so preferences would not say where a text ends"
            raise ConfigError(what, fix="set eos_token in the model's tokenizer_config.json")
        if state.adapter.device.type == "cuda" and torch.cuda.device_count() > 1:
            what = "tuning a model by preferences uses one GPU, and this process sees several"
            raise ConfigError(what, fix="set CUDA_VISIBLE_DEVICES to one of them")
        self._state, self._adapter, self._scale = state, state.adapter, scale
        self._tokenizer, self._chat, self._seed = tokenizer, chat, seed
        self._dpo = {"beta": beta, "learning_rate": learning_rate, "num_train_epochs": epochs}
        self._dpo["per_device_train_batch_size"] = batch_size

    def tune(self, preferences: list[Preference]) -> None:
        """One round of DPO, against the model as it is now. Without a preference the model stays.

        Afterwards the state's optimizer and average begin anew. Raises ModelError if the factors are no longer numbers;
        the state is then what it was.
        """
        if not preferences:
            return
        self._adapter.detach()
        try:
            found = self._trained(preferences)
        finally:
            self._adapter.attach()
        if not all(bool(tensor.isfinite().all()) for tensor in found.values()):
            what = "tuning by preferences diverged: the adapter's entries are not numbers"
            raise ModelError(what, fix="lower synthesis.dpo_learning_rate")
        self._state.move_to(found, memory="reset")

    def refuse_long(self, requests: Iterable[str], max_new_tokens: int) -> None:
        """Raise ConfigError for a request of which writers would cut off a part, so that it could not be tuned on."""
        model: Any = self._adapter.model
        context = getattr(model.config, "max_position_embeddings", None)
        if context is None:
            return
        longest = max(context - max_new_tokens, context // 2)
        asked = asked_tokens(list(set(requests)), self._tokenizer, chat=self._chat, longest=2**31)
        if (tokens := max(map(len, asked), default=0)) > longest:
            raise ConfigError(
                f"a request for texts has {tokens} tokens; the model's context of {context} leaves it {longest}",
                why="preferences between answers to half a request would tune the model on something else",
                fix="write a shorter synthesis.random_prompt, lower max_new_tokens, or set synthesis.chat to false",
            )

    def _trained(self, preferences: list[Preference]) -> dict[str, Tensor]:
        """The point after the round, as the coordinates' state_dict has it."""
        from datasets import Dataset
        from transformers import PrinterCallback  # brings peft, which takes seconds
        from trl import DPOTrainer

        model = self._adapter.model
        # The order is another in every round, without a count that would have to be stored.
        words = json.dumps([self._seed, preferences], sort_keys=True)
        draws = counter_generator(int.from_bytes(sha256(words.encode()).digest()[:16], "little"))
        with ExitStack() as undo:
            undo.enter_context(_quiet())
            undo.enter_context(_restored(model))
            undo.enter_context(training_passes(model, draws))
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="privlora-"))
            wrapped = self._under_peft(model)
            undo.callback(wrapped.unload)
            trainer = DPOTrainer(
                model=wrapped,
                args=self._arguments(folder, int(draws.integers(2**31))),
                train_dataset=Dataset.from_list([self._written(each) for each in preferences]),
                processing_class=copy.deepcopy(self._tokenizer),  # it may be given a pad token
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            return self._point(wrapped)

    def _under_peft(self, model: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        rank, sites = self._adapter.rank, self._adapter.sites
        wrapped = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=rank,
                lora_alpha=self._scale * rank,
                lora_dropout=0.0,
                target_modules=[site.name for site in sites],
                fan_in_fan_out=any(is_conv1d(site.module) for site in sites),
            ),
        )
        point = self._state.coordinates.state_dict()
        for g, group in enumerate(self._adapter.groups):
            for k, site in enumerate(group.sites):
                a, b = _factors(wrapped, site)
                a.data.copy_(point[f"{g}.right"][k].T)
                b.data.copy_(point[f"{g}.left"][k])
        return wrapped

    def _point(self, wrapped: Any) -> dict[str, Tensor]:
        found = {}
        for g, group in enumerate(self._adapter.groups):
            a, b = zip(*(_factors(wrapped, site) for site in group.sites), strict=True)
            found[f"{g}.left"] = torch.stack(b).detach().clone()
            found[f"{g}.right"] = torch.stack(a).mT.detach().clone()
        return found

    def _arguments(self, folder: str, seed: int) -> Any:
        from trl import DPOConfig

        model: Any = self._adapter.model
        return DPOConfig(
            **self._dpo,
            output_dir=folder,
            max_length=getattr(model.config, "max_position_embeddings", None),
            seed=seed,
            use_cpu=self._adapter.device.type == "cpu",
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
            # As the model is asked without a word.
            start = self._tokenizer.bos_token or self._tokenizer.eos_token
            return {"prompt": prompt or start, "chosen": chosen, "rejected": rejected}
        return {
            "prompt": [{"role": "user", "content": prompt}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
            "chat_template_kwargs": {"enable_thinking": False},
        }


def refuse_without_trl() -> None:
    """Raise ConfigError if TRL is not installed."""
    if find_spec("trl") is None:
        what = "tuning a model by preferences needs the package trl"
        raise ConfigError(what, fix="pip install 'privlora[trl]', or choose another method")


def _factors(wrapped: Any, site: Site) -> tuple[Tensor, Tensor]:
    """lora_A (r, n) and lora_B (m, r) of a site, as peft holds them."""
    layer = wrapped.base_model.model.get_submodule(site.name)
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


@contextmanager
def _quiet() -> Iterator[None]:
    """No hub is told that TRL runs, and libraries do not speak of the texts."""
    import datasets
    from huggingface_hub import constants
    from transformers.utils import logging

    sent, verbosity = constants.HF_HUB_DISABLE_TELEMETRY, logging.get_verbosity()
    bars = not datasets.are_progress_bars_disabled()
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
