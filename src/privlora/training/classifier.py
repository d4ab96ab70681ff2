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
from privlora.errors import ConfigError, ModelError
from privlora.methods import Method

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
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module.out_features == outputs
        and not name.startswith(base)
    ]
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
        part.pooled = frozenset(site.name for site in part.sites if not _in_block(site.name))
    return HeadedAdapter(body, head)


def _in_block(name: str) -> bool:
    """Whether a module belongs to one of the blocks that every token passes."""
    return any(part.isdigit() for part in name.split("."))


def padded_as(model: Any, tokenizer: Any) -> None:
    """Tell the model by which token texts are filled up: classifiers of decoders find a text's last token by it."""
    model.config.get_text_config().pad_token_id = pad_token(tokenizer)


def refuse_other_rows(settings: Settings, method: Method) -> None:
    """Raise ConfigError for a row, or a way of training, that labels or preferences do not go with."""
    labels, chosen = settings.data.label is not None, settings.data.chosen is not None
    space, row = method.coordinates, f"method {method.name!r}"
    unfit = {
        row: method.releases == "votes"
        or method.public_texts
        or space.dense
        or (labels and space.forward_only),
        "the group synthesis": labels and settings.synthesis is not None,
        "adapter.public_text": settings.adapter.public_text is not None,
        "model.dropout": chosen
        and settings.model.dropout,  # the reference would be another one at every step
        "model.fully_shard": settings.model.fully_shard,
    }
    for what in (what for what, is_unfit in unfit.items() if is_unfit and (labels or chosen)):
        raise ConfigError(
            f"{what} does not go with data.{'label' if labels else 'chosen'}",
            fix="choose prism, dp-adamw or another method that takes gradients of two factors, or remove the setting",
        )
