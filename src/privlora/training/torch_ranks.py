"""The processes of a run as torch.distributed joins them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from privlora.errors import ConfigError, PrivacyError, PrivloraError, RunError
from privlora.training.ranks import Ranks, RankStopped, several_processes

T = TypeVar("T")

# The first process evaluates and writes reports while the others wait for it; one that is gone ends a wait at once.
_PATIENCE: Final = timedelta(days=7)
_RENDEZVOUS: Final = timedelta(minutes=10)


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that this one was started with, or this one alone. May be nested, and entered again and again.

    An error inside ends it for all: whoever waits for this process gets RankStopped. Raises ConfigError where processes
    do not find each other, RunError after such an end.
    """
    global _joined
    if _joined is not None and _joined.waited_for:
        yield _joined
        return
    begun = dist.is_available() and dist.is_initialized()
    if _joined is None and not begun and not several_processes():
        yield Ranks()
        return
    if _joined is not None and not _joined.open:
        what = "an earlier run of these processes failed in one of them, and they have parted"
        raise RunError(what, fix="start the processes again; `privlora resume` goes on with the run")
    _joined = _joined or _join()
    _joined.waited_for = True
    try:
        yield _joined
    except BaseException:
        _joined.close()
        raise
    finally:
        _joined.waited_for = False


def _join() -> _TorchRanks:
    if not (dist.is_available() and dist.is_gloo_available()):
        what = "this build of torch cannot join several processes"
        raise ConfigError(what, fix="install torch with gloo, or start one process")
    try:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_RENDEZVOUS)
        return _TorchRanks(dist.new_group(backend="gloo", timeout=_PATIENCE))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the processes of this run do not find each other: {' '.join(str(error).split())[:200]}",
            fix="start them with torchrun or accelerate launch, with one address and port for all",
        ) from None


_joined: _TorchRanks | None = None


class _TorchRanks(Ranks):
    """Those of a gloo group of torch.distributed; tensors cross by way of the CPU, whatever they are computed on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.waited_for = False  # whether a run is under way

    @property
    def open(self) -> bool:
        return self._group is not None

    def close(self) -> None:
        """Let go of the others, who stop waiting."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        del group
        gc.collect()  # its connections end with the object, which errors and cycles keep alive

    def same(self, make: Callable[[], T]) -> T:
        held = [make() if self.first else None]
        with explained():
            dist.broadcast_object_list(held, src=0, group=self._group)
        return held[0]  # type: ignore[return-value]

    def each(self, make: Callable[[], T]) -> T:
        found, failed = None, ""
        try:
            found = make()
        except PrivloraError as error:
            failed = str(error)
        told: list[str] = [""] * self.size
        with explained():
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
        with explained():
            dist.scatter_object_list(held, given, src=0, group=self._group)
        return held[0]  # type: ignore[return-value]

    def gathered(self, value: T) -> list[T]:
        told: list[Any] | None = [None] * self.size if self.first else None
        with explained():
            dist.gather_object(value, told, dst=0, group=self._group)
        return [value] if told is None else told

    def add(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().to("cpu", copy=True).contiguous()
        with explained():
            dist.reduce(total, dst=0, group=self._group)
        return total.to(tensor.device)

    def any(self, flag: bool) -> bool:
        found = torch.tensor([int(flag)])
        with explained():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def copied(self, tensors: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        own = {k: t.detach().cpu().contiguous() for k, t in tensors().items()} if self.first else {}
        kinds = self.same(lambda: {k: (t.shape, t.dtype) for k, t in own.items()})
        found = own or {k: torch.empty(shape, dtype=dtype) for k, (shape, dtype) in kinds.items()}
        for tensor in found.values():
            if tensor.numel():
                with explained():
                    # As bytes: not every dtype crosses.
                    dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0, group=self._group)
        return found

    def refuse_unlike(self, what: str, value: object, *, why: str, fix: str) -> None:
        told: list[Any] = [None] * self.size
        with explained():
            dist.all_gather_object(told, value, group=self._group)
        others = [rank for rank, other in enumerate(told) if other != told[0]]
        if not others:
            return
        kind = PrivacyError if self.first else RankStopped
        raise kind(f"{what} of process {others[0]} is not that of process 0", why=why, fix=fix)


@contextmanager
def explained() -> Iterator[None]:
    """Raises RankStopped for what torch.distributed raises inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        raise RankStopped(
            "another process of this run is gone",
            why="each has a part of every batch; what the ledger shows stays charged, and no more was released",
            fix="see what that process says; then resume the run, with as many processes as you like",
        ) from None
