"""A device on paper: its tensors have shapes and dtypes and no values, and are no more the CPU's than a GPU's are.

It is torch's "meta", watched: what meets tensors of the CPU raises, and what reads a value back, or makes float64 on
the device, is noted with the function of privlora that did it. Read-backs get an answer, since there is no value to
read: what they usually find.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from operations import READ_BACK, kind_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import privlora

DEVICE = torch.device("meta")
# Above this many rows (or columns, but of QR) CUDA takes a batch of matrices one after the other.
_BATCHED = {"linalg_qr": 256, "_linalg_eigh": 32, "_linalg_svd": 32}
_SOURCE = str(Path(privlora.__file__).parent) + "/"
# They may meet tensors of both devices.
_CARRIERS = {"_to_copy", "copy", "copy_", "index", "index_put", "index_put_", "_index_put_impl_"}


class Paper(TorchDispatchMode):
    """What is done on the device inside.

    answers: place -> what a read-back there finds, where not True, 1 or 1.0. read_backs, doubles: place -> how often.
    looped: place -> matrices that a GPU would decompose one by one.
    A place is "room/file.py:Class.function", the innermost function of privlora at work.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        super().__init__()
        self.answers = answers
        self.read_backs: Counter[str] = Counter()
        self.doubles: Counter[str] = Counter()
        self.looped: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in(args))
        if not any(map(_on_device, given)):
            return self._watched(func(*args, **kwargs), func)
        name = func._schema.name.partition("::")[2]
        if name not in _CARRIERS and not all(_on_device(t) for t in given if t.dim()):
            raise AssertionError(f"{place()}: {name} meets tensors of the device and of the CPU")
        if kind_of(func, args) == READ_BACK:
            self.read_backs[place()] += 1
            return answer(name, args, self.answers.get(place(), 1))
        if _leaves(name, args, kwargs):
            self.read_backs[place()] += 1
            return _arrived(name, args, kwargs)
        if name in _BATCHED and _too_large(args[0], name):
            self.looped[place()] += args[0].shape[:-2].numel()
        return self._watched(func(*args, **kwargs), func)

    def _watched(self, found: Any, func: Any) -> Any:
        if not func.is_view and any(_on_device(t) and t.dtype == torch.float64 for t in tensors_in([found])):
            self.doubles[place()] += 1
        return found

    def forget(self) -> None:
        """Note from here on."""
        self.read_backs.clear()
        self.doubles.clear()
        self.looped.clear()


def _too_large(matrices: Tensor, name: str) -> bool:
    rows, columns = matrices.shape[-2:]
    return (rows if name == "linalg_qr" else max(rows, columns)) > _BATCHED[name]


def _leaves(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor of the device is copied to the CPU."""
    if name == "_to_copy":
        to = kwargs.get("device")
        return to is not None and torch.device(to).type != DEVICE.type
    return name == "copy_" and not _on_device(args[0])


def _arrived(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """A copy on the CPU, with some values."""
    if name == "copy_":
        return args[0].copy_(_some(args[1], args[0].dtype))
    return _some(args[0], kwargs.get("dtype") or args[0].dtype)


def _some(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Of full rank, and orthonormal where columns are: states of the tests are."""
    if not dtype.is_floating_point:
        return torch.ones(like.shape, dtype=dtype)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def place() -> str:
    """The innermost function of privlora that is at work; "elsewhere" if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_SOURCE):
            return f"{name.removeprefix(_SOURCE)}:{_named(frame.f_code.co_qualname)}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _named(qualname: str) -> str:
    """Without what Python adds for functions within functions and for comprehensions."""
    return qualname.partition(".<locals>")[0]


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


@contextmanager
def paper_device(answers: Mapping[str, Any]) -> Iterator[Paper]:
    """Tensors that are made on DEVICE inside are on paper; those of the CPU are as ever."""
    with pytest.MonkeyPatch.context() as patch, Paper(answers) as paper:
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no such device
        yield paper


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == DEVICE.type
