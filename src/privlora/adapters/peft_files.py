"""Adapters as peft stores them: adapter_config.json and adapter_model.safetensors.

peft computes W = W0 + s * lora_B.weight @ lora_A.weight with s = lora_alpha / r (or lora_alpha / sqrt(r) for
rsLoRA), lora_B.weight (m, r) and lora_A.weight (r, n). Here the scale is shared out evenly between both factors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from privlora.adapters.headed import NEW_MODULES, HeadedAdapter
from privlora.adapters.lowrank import LowRankAdapter
from privlora.adapters.quantised import bits
from privlora.adapters.targets import find_targets, is_conv1d
from privlora.errors import ModelError, PrivloraError, named
from privlora.names import ADAPTER_FILES, base_to_load, is_local, published_name

_PREFIX = "base_model.model."
_LONGEST_PATH = 200  # of a folder that is not there, in an error
CONFIG_NAME, WEIGHTS_NAME = ADAPTER_FILES


def lora_scaling(lora_alpha: float, rank: int, use_rslora: bool) -> float:
    """peft's scale s between lora_B @ lora_A and the weight update."""
    return lora_alpha / rank**0.5 if use_rslora else lora_alpha / rank


def write_adapter(
    folder: Path,
    adapter: LowRankAdapter,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    *,
    base_model: str,
    lora_alpha: float,
    use_rslora: bool = False,
) -> None:
    """Write a plain LoRA adapter. factors: site name -> (A (m, k), B (n, k)) with W = W0 + A B^T.

    base_model: a hub name, or a local folder, of which the adapter's note keeps a path to fill in.
    """
    from peft import LoraConfig  # takes seconds, which commands that write no adapter should not wait for

    rank = next(iter(factors.values()))[0].shape[-1]
    scale = lora_scaling(lora_alpha, rank, use_rslora)
    whole = _whole_modules(adapter)
    tensors = _whole_weights(adapter.model, whole, factors)
    for name, (a, b) in factors.items():
        if _is_within(name, whole):
            continue
        root = scale**0.5
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = (a / root).float().contiguous().cpu()
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = (b.T / root).float().contiguous().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    config = LoraConfig(
        task_type="SEQ_CLS" if whole else "CAUSAL_LM",
        modules_to_save=whole or None,
        base_model_name_or_path=base_to_load(published_name(base_model), local=is_local(base_model)),
        r=rank,
        lora_alpha=lora_alpha,
        use_rslora=use_rslora,
        lora_dropout=0.0,
        fan_in_fan_out=any(is_conv1d(site.module) for site in adapter.sites),
        inference_mode=True,
    )
    # peft makes a set of it, whose order would be another one in every process.
    config.target_modules = sorted(_short_names(adapter, whole))
    config.save_pretrained(str(folder))


def read_adapter(folder: str | Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Site name -> (A (m, r), B (n, r)) float32 of a plain LoRA adapter, its scale folded into both factors.

    Raises ModelError if the files are missing, damaged or hold more than plain LoRA factors.
    """
    from peft import PeftConfig

    path = Path(folder)
    # A text that is no folder may be a record in the place of adapter.init.
    place = repr(str(path)) if os.path.isdir(path) else named(str(path), longest=_LONGEST_PATH)
    try:
        tensors = load_file(path / WEIGHTS_NAME)
        # peft would look for a file that is missing on the hub
        json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
        config = PeftConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"no readable LoRA adapter in {place} ({type(error).__name__})",
            fix=f"point to a folder with {CONFIG_NAME} and {WEIGHTS_NAME}",
        ) from None
    if getattr(config, "use_dora", False) or not hasattr(config, "lora_alpha"):
        raise ModelError(
            f"{str(path)!r} is not a plain LoRA adapter", fix="merge it into the base model first"
        )
    scale = lora_scaling(config.lora_alpha, config.r, config.use_rslora)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for key, lora_b in tensors.items():
        name, _, kind = key.removeprefix(_PREFIX).partition(".lora_")
        if kind == "B.weight":
            lora_a = tensors.get(f"{_PREFIX}{name}.lora_A.weight")
            if lora_a is None:
                raise ModelError(f"adapter in {str(path)!r} lacks lora_A of {name!r}", fix="save it again")
            root = scale**0.5
            factors[name] = (lora_b.float() * root, lora_a.float().T * root)
        elif kind != "A.weight":
            raise ModelError(
                f"adapter in {str(path)!r} holds {key!r}, which is no LoRA factor",
                why="it would be trained or published without noise",
                fix="use an adapter of linear layers only, without modules_to_save",
            )
    return factors


def merge(model: torch.nn.Module, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Add A B^T to the weight of each named layer, in place, computed in float32 or the weight's own dtype."""
    with torch.no_grad():
        for name, (a, b) in factors.items():
            module = model.get_submodule(name)
            weight: Any = module.weight
            if bits(module) is not None:
                raise ModelError(
                    f"the weights of {name!r} are quantised, so nothing can be merged into them",
                    fix="merge into the model that they were packed from, or use the adapter beside them (--as-lora)",
                )
            update = a.float() @ b.float().T
            if is_conv1d(module):
                update = update.T
            weight.copy_((weight.float() + update.to(weight.device)).to(weight.dtype))


def _whole_modules(adapter: LowRankAdapter) -> list[str]:
    """Of a classifier: the modules that are written whole, since the base model's files do not hold them: all that its
    last layer is a part of outside the text model, and what was new when it was loaded. Else []."""
    if not isinstance(adapter, HeadedAdapter):
        return []
    base = f"{getattr(adapter.model, 'base_model_prefix', '') or ' '}."
    new = [adapter.head.sites[0].name, *getattr(adapter.model, NEW_MODULES, ())]
    return sorted({name if name.startswith(base) else name.split(".")[0] for name in new})


def _is_within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _whole_weights(
    model: torch.nn.Module, modules: Sequence[str], factors: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Every parameter of the modules, with what was learned of it, float32 on the CPU."""
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, parameter in model.get_submodule(module).named_parameters(prefix=module):
            value = parameter.detach().float().cpu().clone()
            learned = factors.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            if learned is not None:
                a, b = (t.float().cpu() for t in learned)
                value = value + a @ b.T
            found[f"{_PREFIX}{name}"] = value
    return found


def _short_names(adapter: LowRankAdapter, whole: Sequence[str] = ()) -> list[str]:
    """Last name components where they select the very same sites, else whole names. whole: modules left out."""
    names = sorted(site.name for site in adapter.sites if not _is_within(site.name, whole))
    short = sorted({name.rsplit(".", 1)[-1] for name in names})
    try:
        same = sorted(find_targets(adapter.model, short)) == names
    except PrivloraError:  # a short name also selects a layer that cannot be adapted
        same = False
    return short if same else names
