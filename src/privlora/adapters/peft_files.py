"""Adapters as peft stores them: adapter_config.json and adapter_model.safetensors.

peft computes W = W0 + s * lora_B.weight @ lora_A.weight with s = lora_alpha / r (or lora_alpha / sqrt(r) for
rsLoRA), lora_B.weight (m, r) and lora_A.weight (r, n). Here the scale is shared out evenly between both factors.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
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
from privlora.errors import ModelError, PrivloraError, named, reason_of
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
    # What differs from peft's defaults alone, as versions of peft refuse keys that later ones have added.
    writes = hasattr(adapter.model, "prepare_inputs_for_generation")  # as peft's class for such models asks
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if whole else "CAUSAL_LM" if writes else None,
        "base_model_name_or_path": base_to_load(published_name(base_model), local=is_local(base_model)),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(lora_alpha) if lora_alpha == int(lora_alpha) else lora_alpha,
        "target_modules": sorted(_short_names(adapter, whole)),
    }
    transposed = any(is_conv1d(site.module) for site in adapter.sites)
    own = {"use_rslora": use_rslora, "fan_in_fan_out": transposed, "modules_to_save": whole}
    config |= {name: value for name, value in own.items() if value}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def refuse_unloadable(adapter: LowRankAdapter) -> None:
    """Raise ModelError for an adapter that peft would not load beside the base model, or not onto its layers.

    What a run would release is written with empty factors of rank 1, and loaded beside the model's modules without
    their weights. The model may be without weights too; it is not changed.
    """
    from peft import PeftModel  # takes a second

    empty = {
        site.name: (torch.zeros(site.m, 1), torch.zeros(site.n, 1))
        for part in adapter.parts
        for site in part.sites
    }
    whole = _whole_modules(adapter)
    names = {name for name in empty if not _is_within(name, whole)}
    reason, missed = "", sorted(names)
    with tempfile.TemporaryDirectory(prefix="privlora-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_adapter(Path(folder), adapter, empty, base_model="base", lora_alpha=1.0)
        try:
            model = _without_weights(adapter.model)
            loaded = PeftModel.from_pretrained(model, folder, low_cpu_mem_usage=True, torch_device="cpu")
            missed = sorted(names ^ _adapted(loaded))
        except Exception as error:  # noqa: BLE001 - peft raises anything
            reason = f": {reason_of(error)}"
    if missed:
        refused = peft_refuses(adapter.model, names) if reason else missed
        kinds = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in refused}))
        raise ModelError(
            f"peft does not load an adapter of these layers beside this model{reason}",
            why="the budget would be spent on an adapter that nothing loads",
            fix=f"leave out {kinds or 'layers'} with adapter.exclude_modules, or set adapter.target_modules=all-linear",
        )


def peft_refuses(model: torch.nn.Module, names: Collection[str]) -> list[str]:
    """Those of the linear layers ``names`` that peft attaches nothing to in this model, as of state-space models."""
    kinds: dict[tuple[str, type], list[str]] = {}
    for name in names:
        kinds.setdefault((name.rsplit(".", 1)[-1], type(model.get_submodule(name))), []).append(name)
    if not kinds or _attaches(model, names):
        return []
    return [name for alike in kinds.values() if not _attaches(model, alike[:1]) for name in alike]


def _attaches(model: torch.nn.Module, names: Collection[str]) -> bool:
    from peft import LoraConfig, LoraModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig(r=1, target_modules=list(names))
            loaded = LoraModel(_without_weights(model), config, "default", low_cpu_mem_usage=True)
    except Exception:  # noqa: BLE001 - as above
        return False
    return _adapted(loaded) == set(names)


def _adapted(loaded: torch.nn.Module) -> set[str]:
    """Names of the layers that peft has put LoRA beside."""
    found = (name for name, module in loaded.named_modules() if hasattr(module, "lora_A"))
    return {name.removeprefix("base_model.").removeprefix("model.") for name in found}


def _without_weights(model: Any) -> Any:
    """Modules of the same classes and names, whose weights are on no device unless they are packed. What is done to
    them leaves the model alone."""
    seen: dict[int, Any] = {}

    def copied(module: Any) -> Any:
        if id(module) not in seen:
            new = seen[id(module)] = object.__new__(type(module))
            new.__dict__ = {
                key: copy.copy(v) if isinstance(v, dict) else v for key, v in vars(module).items()
            }
            new._parameters = {name: p if bits(module) else bare(p) for name, p in module._parameters.items()}
            new._modules = {name: each and copied(each) for name, each in module._modules.items()}
        return seen[id(module)]

    def bare(parameter: Any) -> Any:
        if parameter is None:
            return None
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return torch.nn.Parameter(empty, requires_grad=False)

    root = copied(model)
    root.__dict__.pop("hf_device_map", None)  # of what was loaded over several devices
    root.__dict__ |= {"config": copy.deepcopy(model.config)} if hasattr(model, "config") else {}
    return root


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
            empty = parameter.is_meta  # of a model without weights
            value = torch.zeros(parameter.shape) if empty else parameter.detach().float().cpu().clone()
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
