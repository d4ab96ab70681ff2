"""What a step asks of its device: kernels, values that are read back, decompositions of matrices.

Counted from the operations that torch dispatches, so the numbers are those of any machine: on a GPU each kernel costs a
launch, each read-back waits for all that was launched before, and a decomposition is many kernels and often a wait.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KERNEL, READ_BACK, LINEAR_ALGEBRA = "kernels", "read-backs", "linear algebra"
KINDS = (KERNEL, READ_BACK, LINEAR_ALGEBRA)

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
# They make or describe memory and start nothing on a device.
_FREE = {
    "_reshape_alias",
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
}
_PLAIN_LINALG = {"linalg_cross", "linalg_diagonal", "linalg_matrix_norm", "linalg_vector_norm"}
_OLD_LINALG = {"cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "ormqr", "triangular_solve"}


def kind_of(func: Any, args: tuple[Any, ...]) -> str | None:
    """One of KINDS; None for views and metadata, which cost no device anything."""
    name = func._schema.name.partition("::")[2]
    if name in READ_BACKS or reads_mask(name, args):
        return READ_BACK
    if name in _OLD_LINALG or (name.lstrip("_").startswith("linalg_") and name not in _PLAIN_LINALG):
        return LINEAR_ALGEBRA
    return None if func.is_view or name in _FREE else KERNEL


def reads_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an index is a bool mask whose true entries have to be counted; a mask that is filled need not be."""
    if name.rstrip("_") not in ("index", "index_put", "_index_put_impl"):
        return False
    masks = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return masks and not (len(args) > 2 and args[2].numel() == 1)


def _in_torchs_optimizer() -> bool:
    """Whether one of torch.optim reads its number of steps, which it keeps on the CPU."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_get_value" and "optim" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Operations(TorchDispatchMode):
    """Counts what is dispatched inside, by phase.

    counts: phase -> Counter of KINDS. names: (phase, kind) -> Counter of the operations' own names.
    """

    def __init__(self, phase: str = "") -> None:
        super().__init__()
        self.phase_now = phase
        self.counts: dict[str, Counter[str]] = {}
        self.names: dict[tuple[str, str], Counter[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func, args)
        if kind is not None and not (kind == READ_BACK and _in_torchs_optimizer()):
            self.counts.setdefault(self.phase_now, Counter())[kind] += 1
            self.names.setdefault((self.phase_now, kind), Counter())[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is dispatched inside belongs to ``name``, and to no phase around it."""
        before, self.phase_now = self.phase_now, name
        try:
            yield
        finally:
            self.phase_now = before

    def follow(self, owner: object, method: str, phase: str) -> None:
        """Count the calls of one object's method as a phase."""
        call = getattr(owner, method)

        def counted(*args: Any, **options: Any) -> Any:
            with self.phase(phase):
                return call(*args, **options)

        setattr(owner, method, counted)

    def total(self, kind: str) -> int:
        """Over all phases."""
        return sum(found[kind] for found in self.counts.values())

    def total_names(self, kind: str) -> Counter[str]:
        """The operations of one kind, over all phases."""
        return sum((found for (_, of), found in self.names.items() if of == kind), start=Counter())
