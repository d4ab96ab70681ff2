"""A frozen base whose weights are spread over the processes of a run (FSDP2): each holds a part, and every pass gathers
one block after the other.

Gathering takes all processes: whoever goes through the model has to do it with all others at once. How many passes a
process needs for its units is private and differs, so before each pass all agree that there is one more, and whoever
has none left goes through the model with a row that is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from privlora.config import ModelSettings, Settings
from privlora.errors import ConfigError, ModelError
from privlora.methods import METHODS, VOTE_METHODS
from privlora.training.identity import remember
from privlora.training.models import given_or_loaded
from privlora.training.preflight import device_of
from privlora.training.ranks import Ranks


def load_sharded(settings: ModelSettings, ranks: Ranks) -> tuple[Any, Any]:
    """The base model, spread over all processes, and its tokenizer. One process after the other reads it whole, so that
    a machine holds one whole model at a time. Raises ModelError, everywhere if anywhere."""
    from torch.distributed.device_mesh import init_device_mesh

    device = torch.device(device_of(settings.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (ranks.size,))
    found: tuple[Any, Any] = None, None

    def load() -> tuple[Any, Any]:
        model, tokenizer = given_or_loaded(settings.model_copy(update={"device": "cpu"}), None, None)
        remember(model)
        _shard(model, mesh)
        return model, tokenizer

    for turn in range(ranks.size):
        if turn == ranks.rank:
            found = ranks.each(load)
        else:
            ranks.each(lambda: None)
    return found


def _shard(model: Any, mesh: Any) -> None:
    """Spread the weights of ``model``, in place: each repeated block by itself, and what is left together.

    Raises ModelError for a model without repeated blocks.
    """
    from torch.distributed.fsdp import fully_shard

    blocks = _blocks(model)
    if not blocks:
        what = "this model has no blocks that repeat, so its weights cannot be spread block by block"
        raise ModelError(what, fix="set model.fully_shard=false")
    model.requires_grad_(False)
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh)


def refuse_in_several(settings: Settings, *, given: bool) -> None:
    """Raise ConfigError for what several processes cannot do together. given: whether the caller gave the model."""
    for what, fix in wrong_in_several(settings, given=given):
        raise ConfigError(f"several processes were started: {what}", fix=fix)


def wrong_in_several(settings: Settings, *, given: bool) -> Iterator[tuple[str, str]]:
    """What several processes cannot do together, and how to mend it. given: whether the caller gives the model."""
    model, name = settings.model, settings.method.name
    kind = METHODS[name].coordinates if name in METHODS else None
    if name in VOTE_METHODS:
        yield f"method {name!r} asks for votes, in one process", "start one process, or choose another method"
    if model.device_map is not None:
        what = "model.device_map spreads the base over the devices of one process, and each takes those of the others"
        yield what, "start one process, or set model.fully_shard instead of model.device_map"
    dense, forward = (False, False) if kind is None else (kind.dense, kind.forward_only)
    auto = settings.auto is not None and bool(settings.auto.choose)
    another = "choose another method"
    for wrong, what, fix in (
        (given, "a model that was given is not taken apart", "give its folder"),
        (model.quantization is not None, "packed weights are not taken apart", "remove model.quantization"),
        (dense, f"method {name!r} changes whole weights", another),
        (forward, f"method {name!r} takes passes without a way back, one or more a unit", another),
        (settings.synthesis is not None, "one process writes public texts", "remove the group synthesis"),
        (auto, "what is auto is found by one process, which would wait for the others", "give a number"),
    ):
        if wrong and model.fully_shard:
            yield f"model.fully_shard: {what}", f"{fix}, or set model.fully_shard=false"


def is_sharded(model: torch.nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") for p in model.parameters())


class Passes:
    """Keeps the passes of a sharded model in step. idle: goes through the model, and back if it is told so, with a row
    that is nobody's."""

    def __init__(self, model: torch.nn.Module, ranks: Ranks, idle: Callable[[bool], object]) -> None:
        self._model, self._ranks, self._idle = model, ranks, idle

    @contextmanager
    def in_step(self, *, backward: bool) -> Iterator[None]:
        """Inside, each process may make any number of passes, all with or all without a backward one; at the end those
        that are done wait for the others, pass by pass."""

        def announce(*_: object) -> None:
            self._ranks.any(True)

        # Before that of FSDP, which gathers the weights of the outermost module.
        hook = self._model.register_forward_pre_hook(announce, prepend=True)
        try:
            yield
        finally:
            hook.remove()
        while self._ranks.any(False):
            self._idle(backward)


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of the longest list of modules of one class that is in no other such list."""
    modules = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    lists = [m for m in modules if len({type(block) for block in m}) == 1]
    longest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
    return list(longest) if longest is not None and len(longest) > 1 else []
