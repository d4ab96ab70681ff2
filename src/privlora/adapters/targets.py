"""Which modules of a model get a low-rank term."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from privlora.errors import ModelError, PrivacyError, no_feed_forward, no_pattern, unknown_layers
from privlora.names import (
    ALL_LINEAR,
    EITHER,
    FEED_FORWARD,
    KINDS,
    is_of,
    is_pattern,
    kind_for,
    layer_index,
    selects,
)

# Layers that mix the rows of a batch, so that no per-example gradient exists (Yousefpour et al. 2021, section 3).
_MIXES_EXAMPLES = (torch.nn.modules.batchnorm._BatchNorm,)


def is_conv1d(module: torch.nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a linear layer whose weight is stored transposed."""
    # Where the package has not been imported there is no such layer, and importing it takes half a second.
    known: Any = sys.modules.get("transformers.pytorch_utils")
    return known is not None and isinstance(module, known.Conv1D)


def feature_sizes(module: torch.nn.Module) -> tuple[int, int] | None:
    """(out_features, in_features) of a linear layer, or None for any other module."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features, module.in_features
    if is_conv1d(module):
        weight: Any = module.weight
        n, m = weight.shape
        return m, n
    return None


def find_targets(
    model: torch.nn.Module,
    target_modules: str | Sequence[str] = ALL_LINEAR,
    *,
    exclude_modules: Sequence[str] = (),
    layers_to_transform: Sequence[int] | None = None,
) -> list[str]:
    """Names of the linear layers that ``target_modules`` selects, in the model's own order.

    A name selects every module that ends with it ("q_proj", "self_attn.q_proj"). "feed-forward" selects the linear
    layers that lie in no module called attention; any other single string than that and "all-linear" is a regular
    expression over whole names, as in peft. The output layer is never selected: its low-rank term would see only label
    positions.

    Raises ModelError when nothing matches, a matched module is not linear, or names tell no attention from the rest;
    PrivacyError when the model mixes examples (batch normalisation).
    """
    mixing = [name for name, module in model.named_modules() if isinstance(module, _MIXES_EXAMPLES)]
    if mixing:
        raise PrivacyError(
            f"module {mixing[0]!r} normalises over the batch",
            why="one record then changes the gradients of the others and no clipping bounds it",
            fix="use a model with layer normalisation",
        )
    linear = {name for name, module in model.named_modules() if feature_sizes(module) is not None}
    output = output_layer_name(model)
    names = [name for name, _ in model.named_modules()]
    if isinstance(target_modules, str) and not is_pattern(target_modules):
        raise no_pattern(target_modules)
    if target_modules in KINDS:
        inner = linear_layers(model)
        chosen = [name for name in inner if is_of(str(target_modules), name)]
        if target_modules == FEED_FORWARD and len(chosen) in (0, len(inner)):
            raise no_feed_forward(inner)
    else:
        chosen = [name for name in names if selects(target_modules, name)]
        _check_named(chosen, names, linear, output, target_modules)
    chosen = [name for name in chosen if not selects(list(exclude_modules), name)]
    if layers_to_transform is not None:
        chosen = [name for name in chosen if layer_index(name) in set(layers_to_transform)]
    if not chosen:
        raise ModelError(
            "no module is left to adapt",
            fix="relax adapter.target_modules, exclude_modules or layers_to_transform",
        )
    return chosen


def settled_targets(
    model: torch.nn.Module, target_modules: str | Sequence[str], without: Collection[str] = ()
) -> str | Sequence[str]:
    """What `find_targets` takes: for "auto" the word that it stands for with this model, else as given. without: layers
    that cannot be adapted."""
    if target_modules != EITHER:
        return target_modules
    linear = [name for name in linear_layers(model) if name not in without]
    return kind_for(linear, (name for name, _ in model.named_modules()))


def linear_layers(model: torch.nn.Module) -> list[str]:
    """Names of all linear layers but the output, in the model's own order."""
    output = output_layer_name(model)
    return [
        name for name, module in model.named_modules() if feature_sizes(module) is not None and name != output
    ]


def output_layer(model: Any) -> torch.nn.Module | None:
    """The layer that makes the logits, if the model tells."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def output_layer_name(model: torch.nn.Module) -> str | None:
    """Name of the layer that makes the logits, if the model tells."""
    head = output_layer(model)
    return next((name for name, module in model.named_modules() if module is head), None)


def _check_named(
    chosen: list[str], names: list[str], linear: set[str], output: str | None, patterns: str | Sequence[str]
) -> None:
    known = sorted({name.rsplit(".", 1)[-1] for name in linear})
    if isinstance(patterns, str):
        missing = [] if chosen else [patterns]
    else:
        missing = [p for p in patterns if not any(selects([p], name) for name in names)]
    if missing:
        raise unknown_layers(missing, known)
    for name in (name for name in chosen if name == output or name not in linear):
        raise ModelError(
            f"the output layer {name!r} cannot be adapted, as it is applied to label positions only"
            if name == output
            else f"module {name!r} is not a linear layer",
            fix=f"choose among {', '.join(known)}",
        )
