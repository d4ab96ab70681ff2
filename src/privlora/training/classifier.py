"""The head of a classifier: how many outputs, where it is, and what a base model without one begins with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from privlora.adapters import LowRankAdapter
from privlora.adapters.headed import HeadedAdapter
from privlora.config import Settings
from privlora.data.examples import pad_token
from privlora.errors import ModelError

_STD = 0.02  # of new weights, where a configuration does not say (initializer_range)


@dataclass(frozen=True)
class Head:
    """What a base model is to predict of a text. All of it is public.

    outputs: one number a class, or 1 for a score. names: of the classes. seed: of weights that the base model lacks.
    """

    outputs: int
    names: tuple[str, ...]
    seed: int

    def options(self) -> dict[str, Any]:
        """What AutoModelForSequenceClassification is told, and whoever loads the adapter has to tell it too."""
        if not self.names:
            return {"num_labels": 1}
        return {"num_labels": len(self.names), "id2label": dict(enumerate(self.names))}


def head_of(settings: Settings) -> Head | None:
    """None for a run that trains on texts as they are written."""
    classes = settings.data.classes
    return None if classes is None else Head(classes.outputs, classes.names, settings.run.seed)


def fill_new_weights(model: torch.nn.Module, missing: Iterable[str], seed: int) -> list[str]:
    """Draw the weights that no file of the base model holds anew, from the public seed: a run that is resumed, and
    every process of one, then begins alike. Returns the names of their modules.

    Matrices are normal, biases 0, and vectors that scale 1, as transformers begins.
    """
    config: Any = model.config
    std = float(getattr(config, "initializer_range", None) or _STD)
    modules = []
    for name in sorted(missing):
        module, _, kind = name.rpartition(".")
        parameter = model.get_parameter(name)
        key = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(key)) * std
        if parameter.dim() == 1:
            drawn = torch.zeros_like(drawn) if kind == "bias" else torch.ones_like(drawn)
        with torch.no_grad():
            parameter.copy_(drawn)
        modules.append(module)
    return sorted(set(modules))


def head_name(model: torch.nn.Module, outputs: int) -> str:
    """The linear layer that gives the logits of the classes. Raises ModelError where it cannot be told."""
    base = f"{getattr(model, 'base_model_prefix', '') or ' '}."
    linear = (
        (n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not n.startswith(base)
    )
    found = [name for name, module in linear if module.out_features == outputs]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no linear layer with {outputs} outputs behind its text model",
            why="the classes of data.labels have to be its outputs",
            fix="use a model of transformers' AutoModelForSequenceClassification with as many labels",
        )
    return found[-1]


def headed(body: LowRankAdapter, outputs: int) -> HeadedAdapter:
    """``body``, which leaves the last layer alone, and that layer beside it."""
    name = head_name(body.model, outputs)
    head = LowRankAdapter(body.model, rank=outputs, target_modules=[name])
    for part in (body, head):
        # Outside of the blocks that every token passes, whose names have a number.
        outside = (s.name for s in part.sites if not any(each.isdigit() for each in s.name.split(".")))
        part.pooled = frozenset(outside)
    return HeadedAdapter(body, head)


def padded_as(model: Any, tokenizer: Any) -> None:
    """Tell the model by which token texts are filled up: classifiers of decoders find a text's last token by it."""
    model.config.get_text_config().pad_token_id = pad_token(tokenizer)
