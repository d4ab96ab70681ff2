"""Steps on paper: tensors that have shapes, dtypes and a device, and no values or memory; and what they would take.

They are torch's fake tensors. What is made of real ones alone stays real while it is small, so that a batch's labels
and masks decide as they always do; what else is read back gets an answer, since there is no value to read.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

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
# They give memory, and write nothing to it.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# What an allocator gives at least, and in multiples of.
_GRAIN = {"cpu": 64, "cuda": 512}
_DEVICE = torch.ops.prim.device.default
# Phases of a step whose largest totals are noted apart.
FORWARD, BACKWARD, GATHERING = "forward", "backward", "gathering"


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


class Paper(TorchDispatchMode):
    """What is done inside with tensors on paper, and the bytes that ``device`` would hold at once, at the most.

    peaks: phase -> the largest total of all that was made inside and lives, views counted once. now: that total at
    present. phase: where operations belong that are no part of a backward pass. gathering: whether a backward pass has
    come to where gradients are gathered, from which on it is a phase of its own.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.phase = device, FORWARD
        self.gathering: Callable[[], bool] = lambda: False
        self.peaks: Counter[str] = Counter()
        self.now = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._held: dict[int, tuple[weakref.ref[Any], int]] = {}
        # On a CPU: of memory that nobody has written to yet, which parts were.
        self._written: dict[int, set[tuple[int, int]]] = {}
        self._grain = _GRAIN.get(device.type, 512)

    def copy(self, model: torch.nn.Module) -> Any:
        """A model as it is, but on paper, on the device. What it takes is not counted."""
        placed: dict[int, Any] = {}
        for t in [*model.parameters(), *model.buffers()]:
            on_paper = self._on_paper(t.detach())
            placed[id(t)] = (
                torch.nn.Parameter(on_paper, requires_grad=False)
                if isinstance(t, torch.nn.Parameter)
                else on_paper
            )
            self._hold(on_paper.untyped_storage(), 0)
        return copy.deepcopy(model, placed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked as often as all else together, by operations themselves
        kwargs = kwargs or {}
        for t in tensors_in([*args, *kwargs.values()]):
            self._note(t)
        if self._written:
            self._touch(func, args, kwargs)
        found = self._done(func, args, kwargs)
        empty = func._schema.name.partition("::")[2] in _EMPTY and self.device.type == "cpu"
        for t in tensors_in(found if isinstance(found, list | tuple) else [found]):
            self._note(t, empty=empty)
        return found

    def _done(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result, on paper if anything that it is given is."""
        name = func._schema.name.partition("::")[2]
        given = list(tensors_in([*args, *kwargs.values()]))
        if not any(isinstance(t, FakeTensor) for t in given):
            return self._made(func, args, kwargs, alone=not given)
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

    def _made(self, func: Any, args: Any, kwargs: Any, *, alone: bool) -> Any:
        """Of real tensors, or of none: on paper where that is on another device than the CPU, or large."""
        to = kwargs.get("device")
        if alone or (to is not None and torch.device(to).type != "cpu"):
            found = func(*args, **kwargs)
            small = isinstance(found, Tensor) and found.device.type == "cpu" and found.numel() <= _SMALL
            if not small:
                return found
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _on_paper(self, t: Tensor) -> FakeTensor:
        # Without storages that the model shares: what it takes is not counted.
        shape = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        return FakeTensor(self._fake, shape, self.device)

    def _note(self, t: Tensor, *, empty: bool = False) -> None:
        device = t.fake_device if isinstance(t, FakeTensor) else t.device
        if device.type != self.device.type:
            return
        storage = t.untyped_storage()
        if storage._cdata not in self._held:
            # Pages that nobody has written to take no memory.
            self._hold(storage, 0 if empty else self._rounded(storage.nbytes()))
            if empty:
                self._written[storage._cdata] = set()
        phase = self.phase
        if torch._C._current_graph_task_id() != -1:
            phase = GATHERING if self.gathering() else BACKWARD
        self.peaks[phase] = max(self.peaks[phase], self.now)

    def _rounded(self, size: int) -> int:
        return -(-size // self._grain) * self._grain

    def _touch(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count what an operation writes to for the first time."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            for t in tensors_in([given]):
                key = t.untyped_storage()._cdata
                part = (int(t.storage_offset()), t.numel())
                if part in self._written.get(key, {part}):
                    continue
                self._written[key].add(part)
                storage, size = self._held[key]
                more = min(self._rounded(t.nbytes), self._rounded(t.untyped_storage().nbytes()) - size)
                self._held[key] = (storage, size + more)
                self.now += more

    def _hold(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        self._held[key] = (weakref.ref(storage, lambda _: self._let_go(key)), size)
        self.now += size

    def _let_go(self, key: int) -> None:
        self.now -= self._held.pop(key)[1]
        self._written.pop(key, None)
