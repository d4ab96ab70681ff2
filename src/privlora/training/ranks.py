"""Processes that train one run together, as torchrun or `accelerate launch` starts them.

Each holds the whole frozen model and takes the gradients of its share of every batch. All else happens in the first one
alone: it reads the records and draws batches, charges the ledger, draws noise, moves the state and writes files. What
the processes tell each other (records, drawn units, clipped sums without noise) is PRIVATE: they have to trust each
other and the network between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from privlora.errors import ConfigError, RunError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class RankStopped(RunError):
    """Another process stopped, and says itself why."""


class Ranks:
    """The processes of a run; by itself, one that trains alone. Every process has to call the same methods in the same
    order."""

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that draws, charges and writes."""
        return self.rank == 0

    def same(self, make: Callable[[], T]) -> T:
        """What ``make`` gives in the first process, where alone it is called."""
        return make()

    def each(self, make: Callable[[], T]) -> T:
        """What ``make`` gives here; raised everywhere if it fails anywhere."""
        return make()

    def dealt(self, shares: Callable[[], Sequence[T]]) -> T:
        """The share of this process, of those that ``shares`` gives in the first one, one a process."""
        return shares()[0]

    def gathered(self, value: T) -> list[T]:
        """In the first process the values of all, by rank; elsewhere its own alone."""
        return [value]

    def add(self, tensor: Tensor) -> Tensor:
        """In the first process the sum of all processes' tensors of one shape; elsewhere nothing that is of use."""
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        return flag

    def copied(self, tensors: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Those of the first process, on the CPU, to the bit; of a process that trains alone where they are."""
        return tensors()

    def refuse_unlike(self, what: str, value: object, *, why: str, fix: str) -> None:
        """Raise PrivacyError unless ``value`` is equal in all processes."""


def deal(weights: Sequence[int], shares: int) -> list[list[int]]:
    """Numbers of what is dealt out, for each share: heaviest first, each to the share that has least so far.

    Every number from 0 to len(weights) - 1 is in exactly one share. A function of the weights alone.
    """
    found, loads = [list[int]() for _ in range(shares)], [0] * shares
    for number in sorted(range(len(weights)), key=lambda one: -weights[one]):
        least = loads.index(min(loads))
        found[least].append(number)
        loads[least] += weights[number]
    return found


def several_processes() -> bool:
    """Whether a launcher started this process as one of several."""
    return _number("WORLD_SIZE", 1) > 1 and {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def refuse_several(what: str) -> None:
    """Raise ConfigError where a launcher started several processes of what runs in one."""
    if several_processes():
        raise ConfigError(
            f"several processes were started, and {what} runs in one",
            why="each would do all of it, in the same places",
            fix="start it without torchrun or accelerate launch",
        )


def first_process() -> bool:
    """Whether this process is to speak for all, as far as the launcher says."""
    return not several_processes() or _number("RANK", 0) == 0


def own_device(kind: str) -> str:
    """The device of this process among those of its machine: ``kind``, or ``kind``:LOCAL_RANK."""
    return f"{kind}:{_number('LOCAL_RANK', 0)}" if several_processes() else kind


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
