"""The processes of a run as torch.distributed joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from privlora.errors import ConfigError, PrivacyError, PrivloraError, RunError
from privlora.training.ranks import OneProcess, Ranks, RankStopped, several_processes

T = TypeVar("T")

# The first process evaluates and writes reports while the others wait for it; one that is gone ends a wait at once.
_PATIENCE: Final = timedelta(days=7)


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that this one was started with, or this one alone. May be nested.

    Raises ConfigError where they do not find each other.
    """
    global _joined
    if _joined is not None:
        yield _joined
        return
    begun = dist.is_available() and dist.is_initialized()
    if not begun and not several_processes():
        yield OneProcess()
        return
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError(
            "this build of torch cannot join several processes",
            fix="install torch with gloo, or start one process",
        )
    try:
        if not begun:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the processes of this run do not find each other: {' '.join(str(error).split())[:200]}",
            fix="start them with torchrun or accelerate launch, with one address and port for all",
        ) from None
    _joined = TorchRanks(group)
    try:
        yield _joined
    finally:
        # Whoever waits for this process, which may have failed, must not wait longer.
        _joined = None
        dist.destroy_process_group(group if begun else None)


_joined: TorchRanks | None = None


class TorchRanks:
    """Those of a gloo group of torch.distributed; tensors cross by way of the CPU, whatever they are computed on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def same(self, make: Callable[[], T]) -> T:
        held = [make() if self.first else None]
        with _explained():
            dist.broadcast_object_list(held, src=0, group=self._group)
        return held[0]  # type: ignore[return-value]

    def each(self, make: Callable[[], T]) -> T:
        found, failed = None, ""
        try:
            found = make()
        except PrivloraError as error:
            failed = str(error)
        told: list[str] = [""] * self.size
        with _explained():
            dist.all_gather_object(told, failed, group=self._group)
        wrong = {rank: text for rank, text in enumerate(told) if text}
        if not wrong:
            return found  # type: ignore[return-value]
        if not self.first:
            raise RankStopped(next(iter(wrong.values())))
        one, text = next(iter(wrong.items()))
        raise RunError(text if one == 0 else f"process {one} of {self.size}: {text}")

    def dealt(self, shares: Callable[[], Sequence[T]]) -> T:
        held: list[T | None] = [None]
        given = list(shares()) if self.first else None
        with _explained():
            dist.scatter_object_list(held, given, src=0, group=self._group)
        return held[0]  # type: ignore[return-value]

    def gathered(self, value: T) -> list[T]:
        told: list[Any] | None = [None] * self.size if self.first else None
        with _explained():
            dist.gather_object(value, told, dst=0, group=self._group)
        return [value] if told is None else told

    def add(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().to("cpu", copy=True).contiguous()
        with _explained():
            dist.reduce(total, dst=0, group=self._group)
        return total.to(tensor.device)

    def any(self, flag: bool) -> bool:
        found = torch.tensor([int(flag)])
        with _explained():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def copied(self, tensors: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        own = {k: t.detach().cpu().contiguous() for k, t in tensors().items()} if self.first else {}
        kinds = self.same(lambda: {k: (t.shape, t.dtype) for k, t in own.items()})
        found = own or {k: torch.empty(shape, dtype=dtype) for k, (shape, dtype) in kinds.items()}
        for tensor in found.values():
            if tensor.numel():
                with _explained():
                    # As bytes: not every dtype crosses.
                    dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0, group=self._group)
        return found

    def refuse_unlike(self, what: str, value: object, *, why: str, fix: str) -> None:
        told: list[Any] = [None] * self.size
        with _explained():
            dist.all_gather_object(told, value, group=self._group)
        others = [rank for rank, other in enumerate(told) if other != told[0]]
        if not others:
            return
        kind = PrivacyError if self.first else RankStopped
        raise kind(f"{what} of process {others[0]} is not that of process 0", why=why, fix=fix)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        raise RankStopped(
            "another process of this run is gone",
            why="its part of the batch is gone with it, so of that batch nothing was released or charged",
            fix="see what that process says; then resume the run, with as many processes as you like",
        ) from None
