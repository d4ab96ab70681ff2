"""Passes on paper: tensors that have shapes, dtypes and a device, and no values or memory.

They are torch's fake tensors. What is made of real ones alone stays real while it is small, so that a batch's labels
and masks decide as they always do; what else is read back gets an answer, since there is no value to read.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from privlora.adapters.quantised import bits

# Their result, or its shape, depends on values: the host waits for the device.
READ_BACKS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
# Numbers of a tensor that is made of nothing, up to which it is real.
_SMALL = 2**14
_DEVICE = torch.ops.prim.device.default


@contextmanager
def on_paper(model: Any) -> Iterator[Any]:
    """A copy of the model on paper, in evaluation mode, and what is done inside is done there. The model, with weights
    or without, is not changed. Raises whatever its code does where it needs values."""
    quiet = logging.getLogger(fake_tensor.__name__)  # it writes down what goes wrong, before it raises
    before, quiet.disabled = quiet.disabled, True
    try:
        if any(bits(module) for module in model.modules()) or hasattr(model, "hf_device_map"):
            with torch.device("meta"):
                model = type(model)._from_config(model.config)
        paper = _Paper()
        copied = paper.copy(model).eval()
        config = copied.config.get_text_config()
        config.pad_token_id = config.pad_token_id or 0
        with suppress(Exception):  # one way to compute experts does not ask how many tokens each of them has
            copied.set_experts_implementation("batched_mm")
        with warnings.catch_warnings(), paper, torch.no_grad():
            warnings.simplefilter("ignore")
            yield copied
    finally:
        quiet.disabled = before


def reads_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an index is a bool mask whose true entries have to be counted; a mask that is filled need not be."""
    if name.rstrip("_") not in ("index", "index_put", "_index_put_impl"):
        return False
    masks = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return masks and not (len(args) > 2 and args[2].numel() == 1)


def answer(name: str, args: tuple[Any, ...], value: Any = 1) -> Any:
    """What an operation that reads values back finds on paper: ``value``, and masks that are true everywhere."""
    given: Tensor = args[0]
    if name == "nonzero":
        return given.new_empty((given.numel(), given.dim()), dtype=torch.int64)
    if name == "index":
        (mask,) = args[1]
        return given.new_empty((mask.numel(), *given.shape[mask.dim() :]))
    if name.startswith(("index_put", "_index_put")):
        return given if name.endswith("_") else torch.empty_like(given)
    if name == "equal":
        return True
    assert name in ("_local_scalar_dense", "is_nonzero"), name
    kind = bool if given.dtype == torch.bool else float if given.dtype.is_floating_point else int
    return kind(value)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Those among an operation's arguments or results, also in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class _Paper(TorchDispatchMode):
    """What is done inside with tensors on paper."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def copy(self, model: torch.nn.Module) -> Any:
        """A model as it is, but on paper, as on a CPU."""
        placed: dict[int, Any] = {}
        for t in [*model.parameters(), *model.buffers()]:
            # Without storages that the model shares.
            shape = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            on_paper = FakeTensor(self._fake, shape, torch.device("cpu"))
            frozen = isinstance(t, torch.nn.Parameter)
            placed[id(t)] = torch.nn.Parameter(on_paper, requires_grad=False) if frozen else on_paper
        return copy.deepcopy(model, placed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked as often as all else together, by operations themselves
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        given = list(tensors_in([*args, *kwargs.values()]))
        if not any(isinstance(t, FakeTensor) for t in given):
            return _made(func, args, kwargs, alone=not given)
        if name in READ_BACKS or reads_mask(name, args):
            return answer(name, args, 0 if given[0].dtype.is_floating_point else 1)
        return func(*args, **kwargs)

    def __enter__(self) -> Self:
        # Below this one, so that what is made of real tensors alone can be real.
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)


def _made(func: Any, args: Any, kwargs: Any, *, alone: bool) -> Any:
    """Of real tensors, or of none: on paper where that is on another device than the CPU, or large."""
    to = kwargs.get("device")
    if alone or (to is not None and torch.device(to).type != "cpu"):
        found = func(*args, **kwargs)
        if not (isinstance(found, Tensor) and found.device.type == "cpu" and found.numel() <= _SMALL):
            return found
    with unset_fake_temporarily():
        return func(*args, **kwargs)
