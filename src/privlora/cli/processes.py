"""Commands that several processes run together, as torchrun starts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from privlora.training.ranks import OneProcess, Ranks, refuse_several, several_processes

_TOGETHER = ("train", "resume")


def refuse_alone(command: str) -> None:
    """Raise ConfigError where a launcher started several processes of a command that runs in one."""
    if command not in _TOGETHER:
        refuse_several(f"`privlora {command}`")


@contextmanager
def processes() -> Iterator[Ranks]:
    """Those that this one was started with; torch is imported only where there are several."""
    if not several_processes():
        yield OneProcess()
        return
    from privlora.training.torch_ranks import joined

    with joined() as ranks:
        yield ranks
