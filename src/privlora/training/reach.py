"""Which linear layers adapter.target_modules leaves out, since no private gradient of them can be taken or no adapter
file can hold them, as of the part of a model that reads images. Found without weights and records: the same in a plan,
a run and an export."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from privlora.adapters import LowRankAdapter
from privlora.adapters.peft_files import peft_refuses
from privlora.adapters.quantised import bits
from privlora.adapters.targets import feature_sizes, find_targets, linear_layers, selects, settled_targets
from privlora.config import AdapterSettings
from privlora.errors import ModelError
from privlora.names import EITHER, KINDS, MIXED, NARROW, REFUSED, UNUSED

ROWS, TOKENS = 3, 8
Inputs = dict[str, list[tuple[int, ...]]]
_UNFIT: WeakKeyDictionary[torch.nn.Module, Mapping[str, str]] = WeakKeyDictionary()
_INPUTS: WeakKeyDictionary[torch.nn.Module, Inputs] = WeakKeyDictionary()


def left_out(lora: AdapterSettings, model: torch.nn.Module, without: Sequence[str] = ()) -> dict[str, str]:
    """PUBLIC. Layer -> why it is left out, of those that a word in target_modules stands for. Of names, those of a part
    that reads no text, where a layer that does has the name too. {} for regular expressions.

    model: with or without weights. without: name endings that are left alone anyway. Raises ModelError where nothing
    would be left, and as `find_targets`.
    """
    targets = lora.target_modules
    if isinstance(targets, str) and targets not in (*KINDS, EITHER):
        return {}
    unfit = _unfit(model)
    kind = settled_targets(model, targets, unfit)
    chosen = find_targets(model, kind, exclude_modules=without, layers_to_transform=lora.layers_to_transform)
    found = {name: unfit[name] for name in chosen if name in unfit}
    fit = [name for name in chosen if name not in found]
    if not isinstance(targets, str):
        unread = [name for name in found if found[name] == UNUSED]
        alone = [target for target in targets if not any(selects([target], name) for name in fit)]
        return {name: UNUSED for name in unread if not selects(alone, name)}  # else it is refused
    narrow = [name for name in fit if min(feature_sizes(model.get_submodule(name)) or ()) < lora.r]
    if len(narrow) < len(fit):  # else the rank is what is wrong
        found |= dict.fromkeys(narrow, NARROW)
    if not fit:
        raise ModelError(
            f"adapter.target_modules={kind}: no layer of this model can be adapted: {'; '.join(set(found.values()))}",
            fix="set adapter.target_modules=all-linear, or use another model",
        )
    return found


def coverage(adapter: LowRankAdapter) -> dict[str, Any]:
    """PUBLIC. share: of all weights, those of adapted layers. experts: those in stacks of experts, which are no linear
    layers. left_out: why -> last names of the layers that a word in target_modules leaves out."""
    sizes, experts = dict[int, int](), 0
    for module in adapter.model.modules():
        linear = feature_sizes(module)
        for p in module.parameters(recurse=False):
            sizes[id(p)] = linear[0] * linear[1] if linear and p is module.weight else p.numel()
            if p.dim() > 2 and "Expert" in type(module).__name__:
                experts += p.numel()
    total, reasons = max(1, sum(sizes.values())), dict[str, list[str]]()
    for name, why in adapter.parts[0].left_out.items():
        reasons.setdefault(why, []).append(name.rsplit(".", 1)[-1])
    return {
        "share": sum(site.m * site.n for part in adapter.parts for site in part.sites) / total,
        "experts": experts / total,
        "left_out": {why: sorted(set(names)) for why, names in reasons.items()},
    }


def place_of(shapes: Sequence[tuple[int, ...]], widths: Sequence[int]) -> str | None:
    """What is wrong with a layer that was given inputs of these shapes in a pass of `ROWS` rows; None: nothing."""
    if not shapes:
        return UNUSED
    return MIXED if any(len(each) < min(widths) or each[0] != ROWS for each in shapes) else None


def _unfit(model: torch.nn.Module) -> Mapping[str, str]:
    if model not in _UNFIT:
        names = linear_layers(model)
        found = dict.fromkeys(peft_refuses(model, names), REFUSED)
        for name, shapes in inputs_of_layers(model).items():
            # Of a classifier, layers behind the pooled text are given one state a row.
            pooled = bool(shapes) and len(shapes[0]) == 2 and shapes[0][0] == ROWS
            wrong = place_of(shapes, (2,) if pooled else (3,))
            if wrong is not None and name in names:
                found.setdefault(name, wrong)
        _UNFIT[model] = found
    return _UNFIT[model]


def inputs_of_layers(model: torch.nn.Module) -> Inputs:
    """Linear layer -> shapes of its inputs, in a pass of `ROWS` rows of `TOKENS` tokens without values; {} for a model
    that cannot be run so. The model is not changed."""
    if model not in _INPUTS:
        _INPUTS[model] = _inputs(model)
    return _INPUTS[model]


def _inputs(model: Any) -> Inputs:
    try:
        skeleton = _skeleton(model)
        layers = {name: skeleton.get_submodule(name) for name in linear_layers(skeleton)}
        with (
            noting_inputs(layers) as found,
            warnings.catch_warnings(),
            torch.no_grad(),
            torch.device("meta"),
            _Answers(),
        ):
            warnings.simplefilter("ignore")
            ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
            skeleton(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except Exception:  # noqa: BLE001 - models are anybody's code; a pass with their weights says what is wrong
        return {}
    return found


@contextmanager
def noting_inputs(layers: Mapping[str, torch.nn.Module]) -> Iterator[Inputs]:
    """The shapes of what these layers, by their names, are given inside."""
    found: Inputs = {name: [] for name in layers}

    def noting(name: str) -> Any:
        return lambda _, args: found[name].append(tuple(args[0].shape) if args else ())

    handles = [layer.register_forward_pre_hook(noting(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _skeleton(model: Any) -> Any:
    """A copy without weights, in evaluation mode."""
    if any(bits(module) for module in model.modules()) or hasattr(model, "hf_device_map"):
        with torch.device("meta"):
            model = type(model)._from_config(model.config)
    tensors = dict[int, Any]()
    for t in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(t, device="meta")
        frozen = isinstance(t, torch.nn.Parameter)
        tensors[id(t)] = torch.nn.Parameter(empty, requires_grad=False) if frozen else empty
    copied = copy.deepcopy(model, tensors).eval()
    config = copied.config.get_text_config()
    config.pad_token_id = getattr(config, "pad_token_id", None) or 0
    with suppress(Exception):  # one way to compute experts does not ask how many tokens each of them has
        copied.set_experts_implementation("batched_mm")
    return copied


class _Answers(TorchFunctionMode):
    """Where code asks a tensor without values, it is true, one or zero: masks hide nothing then."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__bool__, torch.equal):
            return True
        if func in (Tensor.item, Tensor.__int__, Tensor.__float__):
            return 0.0 if args[0].dtype.is_floating_point else args[0].dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))
