"""Processes that train together: forked here, joined as torchrun joins its own; and a mechanism for each."""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import tqdm
from tiny_models import tiny_model

from privlora.accounting import PoissonSampling
from privlora.accounting.events import StepEvent
from privlora.adapters import LowRankAdapter
from privlora.coordinates import Coordinates
from privlora.mechanisms import AdaptiveClipNorm, GaussianMechanism
from privlora.mechanisms.charges import Uncharged
from privlora.methods import METHODS, build
from privlora.training.torch_ranks import joined

# Its thread holds a lock that a forked process would wait for.
tqdm.tqdm.monitor_interval = 0


def coordinates_of(name: str = "dp-sgd") -> Coordinates:
    adapter = LowRankAdapter(tiny_model(), rank=4, target_modules="all-linear")
    return build(METHODS[name], adapter, optimizer=METHODS[name].optimizer, init=None, seed=0, settings={})[0]


def mechanism_of(coordinates: Coordinates | None = None, *, adaptive: bool = False) -> GaussianMechanism:
    coordinates = coordinates_of() if coordinates is None else coordinates
    return GaussianMechanism(
        coordinates,
        clip_norm=2.0,
        event=StepEvent(PoissonSampling(0.1), 1.5, coordinates.event_layers),
        expected_batch_size=10,
        ledger=Uncharged(),
        adaptive=AdaptiveClipNorm(2.0, 0.5) if adaptive else None,
    )


def start_together(size: int, work: Callable[[int], object]) -> list[int]:
    """Process ids of ``size`` forked processes, of which number k runs ``work(k)``; each ends with 0 if that does."""
    port = _free_port()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank}
            os.environ.update({k: str(v) for k, v in {"RANK": rank, "WORLD_SIZE": size, **place}.items()})
            try:
                work(rank)
                os._exit(0)
            except BaseException:  # noqa: BLE001 - the child may not return into pytest
                traceback.print_exc(file=sys.__stderr__)
                os._exit(1)
        children.append(child)
    return children


def _free_port() -> int:
    """Nobody listens there, and below 32768 no system gives it to a connection that another test opens meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def ended(children: list[int]) -> list[int]:
    """How each ended: 0 if well."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def together(size: int, work: Callable[[int], object]) -> list[int]:
    return ended(start_together(size, work))


def found_together(size: int, folder: Path, work: Callable[..., object]) -> list[object]:
    """What ``work(ranks)`` gives in each process."""

    def keep(rank: int) -> None:
        with joined() as ranks:
            torch.save(work(ranks), folder / f"{rank}.pt")

    assert together(size, keep) == [0] * size
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
