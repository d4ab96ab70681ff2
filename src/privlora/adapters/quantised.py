"""Frozen layers whose weights bitsandbytes has packed into 4 or 8 bits, known by their weights.

A layer of 4 bits unpacks its weight into its compute dtype and multiplies: each token by itself. A layer of 8 bits
rounds its *inputs* to integers too, and picks the columns that it does not round by looking at all tokens of a pass at
once. So one row's outliers change how every other row is computed: see ``mixes_rows``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from privlora.adapters.targets import is_conv1d
from privlora.errors import ModelError

_BITS = {"Params4bit": 4, "Int8Params": 8}
FULL = (torch.float32, torch.float64)
"""Dtypes in which company in a micro-batch hardly changes how a row is rounded."""
_PLAIN = (*FULL, torch.bfloat16, torch.float16)
# Whether a layer of 4 bits may repack its weight where the CPU has a kernel of its own for it.
_REPACKS = "support_avx512bf16_for_cpu"


def bits(module: torch.nn.Module) -> int | None:
    """4 or 8 for a layer of bitsandbytes, None for any other module. Needs no bitsandbytes."""
    kinds = type(getattr(module, "weight", None)).__mro__
    return next((_BITS[kind.__name__] for kind in kinds if kind.__name__ in _BITS), None)


def mixes_rows(model: torch.nn.Module) -> bool:
    """Whether a row's outputs depend on the rows beside it, in what a layer of 8 bits takes for outliers.

    Without outliers (llm_int8_threshold 0) too: inputs are rounded to 127 steps, so what company changes in the last
    bits of an input moves an output by whole steps, for all copies of a record alike.
    """
    return any(bits(module) == 8 for module in model.modules())


def computes_in(module: Any) -> torch.dtype:
    """The dtype in which a quantised layer multiplies; bfloat16 where it takes that of its input."""
    if bits(module) == 8:
        return torch.float16  # to which it rounds its input, whatever that is
    known = getattr(module, "compute_dtype", None)
    return known if isinstance(known, torch.dtype) else torch.bfloat16


def precisions(model: torch.nn.Module) -> Iterator[torch.dtype]:
    """In what a model computes: the dtypes of its parameters; of packed weights, what they are unpacked into."""
    for module in model.modules():
        packed = bits(module) is not None
        if packed:
            yield computes_in(module)
        for name, parameter in module.named_parameters(recurse=False):
            if not (packed and name == "weight"):
                yield parameter.dtype


def activation_dtype(model: Any) -> torch.dtype:
    """What a quantised layer most likely gets and gives: the dtype of the embeddings, which are never packed."""
    layer = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    dtype = getattr(getattr(layer, "weight", None), "dtype", None)
    return dtype if dtype in _PLAIN else torch.bfloat16


def refuse_unknown_storage(name: str, module: torch.nn.Module) -> None:
    """Raise ModelError for a layer whose weight is stored in a way that is neither plain nor bitsandbytes'."""
    weight: Any = module.weight
    if bits(module) is None and weight.dtype not in _PLAIN:
        raise ModelError(
            f"the weights of {name!r} are stored as {weight.dtype}, which privlora does not know",
            fix="quantise with bitsandbytes (model.quantization), or load the model in bfloat16",
        )


@torch.no_grad()
def dense_weight(name: str, module: Any) -> Tensor:
    """W0 (m, n) of a linear layer as it computes with it, in float32 or better. Raises ModelError if it is repacked."""
    packed = bits(module)
    if packed is None:
        # Where it is spread over processes, all of them ask for it at once.
        weight: Tensor = getattr(module.weight, "full_tensor", lambda: module.weight)().detach()
        dense = weight.T if is_conv1d(module) else weight
        return dense if dense.dtype in FULL else dense.float()
    if packed == 8:
        return module.weight.detach().float() * (scales(module).float()[:, None] / 127)
    from bitsandbytes.functional import dequantize_4bit

    _refuse_repacked(name, module)
    return dequantize_4bit(module.weight.data, _state(module)).to(torch.float32)


def scales(module: Any) -> Tensor:
    """What the packed numbers of a quantised layer are multiples of: of each row, or of each block."""
    if bits(module) == 4:
        absmax: Tensor = _state(module).absmax
        return absmax.flatten()
    # After a first pass they lie in the layer's state.
    found = (getattr(owner, "SCB", None) for owner in (module.weight, module.state))
    return next(scale for scale in found if scale is not None)


def hold(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Keep layers of 4 bits from repacking their weights; gives those that might have, for ``let_go``.

    On CPUs with AVX512-BF16 a pass without gradients repacks them in place, for a kernel that has no backward pass,
    computes in bfloat16 whatever the compute dtype, and fails on most shapes. Raises ModelError where it has happened.
    """
    held = []
    for name, module in model.named_modules():
        packed = bits(module)
        if packed == 8:  # says at every pass of every layer that it rounds its inputs
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        elif packed == 4:
            _refuse_repacked(name, module)
            if getattr(module, _REPACKS, False):
                setattr(module, _REPACKS, False)
                held.append(module)
    return held


def let_go(held: list[torch.nn.Module]) -> None:
    """Undo ``hold``."""
    for module in held:
        setattr(module, _REPACKS, True)
    held.clear()


def _state(module: Any) -> Any:
    state = getattr(module.weight, "quant_state", None)
    return getattr(module, "quant_state", None) if state is None else state


def _refuse_repacked(name: str, module: Any) -> None:
    if getattr(_state(module), "packing_format_for_cpu", False):
        raise ModelError(
            f"the weights of {name!r} were repacked for inference on the CPU",
            fix="load the model again, and run it before training only after model.train()",
        )
