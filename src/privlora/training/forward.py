"""How a model runs in training: in its own precision, without its own dropout unless asked for, on random numbers that
nobody can foresee.

Which mask a row gets depends on who else is in its micro-batch. So whoever foresees the masks sees one record move the
contributions of all others, and no clipping bounds that. Masks that are drawn afresh and kept secret are independent of
the company: a record then moves the sum by its own part alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from privlora.errors import RunError
from privlora.precision import own_context

# In the state of torch's CPU generator (mt19937): where its 624 words begin, each in 8 bytes.
_WORDS_AT, _WORDS = 24, 624


@contextmanager
def training_passes(
    model: torch.nn.Module, generator: np.random.Generator, *, dropout: bool = False
) -> Iterator[None]:
    """Forward and backward passes of one logical batch; afterwards modes, generators and precisions are as before.

    generator: keys every generator that a forward pass can use: torch's on the CPU and on all devices, Python's and
    numpy's. dropout: whether the model's own dropout, and what else its training mode draws, is on.
    """
    with own_context(), _mode(model, dropout), _keyed(generator):
        yield


@contextmanager
def _mode(model: torch.nn.Module, dropout: bool) -> Iterator[None]:
    """Training mode; or evaluation mode but for modules that recompute activations, which they do in training only."""
    flags = [(module, module.training) for module in model.modules()]
    replaced = []
    for module, _ in flags:
        module.training = dropout or bool(getattr(module, "gradient_checkpointing", False))
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if module.training and not dropout and checkpoint is not None:
            # Some of these modules also drop by themselves; inside, they are to see the evaluation mode.
            vars(module)["_gradient_checkpointing_func"] = _evaluating(module, checkpoint)
            replaced.append((module, checkpoint))
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        for module, checkpoint in replaced:
            vars(module)["_gradient_checkpointing_func"] = checkpoint


def _evaluating(module: torch.nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """``checkpoint`` of functions during which ``module`` is in evaluation mode, also when they are recomputed."""

    def checkpointed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def inside(*inputs: Any, **named: Any) -> Any:
            module.training = False
            try:
                return function(*inputs, **named)
            finally:
                module.training = True

        return checkpoint(inside, *args, **options)

    return checkpointed


@contextmanager
def _keyed(generator: np.random.Generator) -> Iterator[None]:
    """Fresh states for all global generators; the user's come back."""
    devices = _device_generators()
    saved = [(each, each.get_state()) for each in (torch.default_generator, *devices)]
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        torch.default_generator.set_state(_cpu_state(generator))
        for each in devices:
            each.manual_seed(int(generator.integers(2**64, dtype=np.uint64)))
        random.seed(generator.bytes(32))
        kind = type(mtrand.get_bit_generator())
        np.random.set_state(dict(kind(generator.integers(2**32, size=8).tolist()).state))
        yield
    finally:
        for each, state in saved:
            each.set_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _device_generators() -> list[torch.Generator]:
    """torch's default generators of all accelerators that are in use."""
    found: list[torch.Generator] = []
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            found += backend.default_generators
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found


def _cpu_state(generator: np.random.Generator) -> Tensor:
    """A state of torch's CPU generator with fresh bits in all its words; a seed would keep 32 bits in all."""
    fresh = torch.Generator()
    state = fresh.get_state()
    words = state[_WORDS_AT : _WORDS_AT + 8 * _WORDS].view(torch.int64)
    if int(words[0]) != fresh.initial_seed() % 2**32:
        raise RunError(
            f"torch {torch.__version__} keeps its CPU generator in a form that privlora does not know",
            why="dropout masks that can be foreseen would void the guarantee",
            fix="use another release of torch, such as that of constraints.txt",
        )
    words.copy_(torch.from_numpy(generator.integers(2**32, size=_WORDS)))
    return state
