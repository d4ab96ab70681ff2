"""Records whose gradients an attacker scales: as long as it wants, none at all, or the opposite of another record's.

A mechanism has to bound whatever gradient a record could have. Here records are ordinary ones, which the pipeline
under audit draws, tokenises, batches and differentiates as any other; only the gradient that leaves the output layer
is multiplied, for the rows that hold a marked record. Forward passes and losses are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privlora.adapters.targets import output_layer
from privlora.errors import ConfigError


@dataclass(frozen=True)
class Mark:
    """ids: all tokens of a record. factor: of its gradient at the first ``positions`` positions; 0 at the others."""

    ids: tuple[int, ...]
    factor: float
    positions: int


def opposites(one: Sequence[int], other: Sequence[int], factor: float) -> tuple[Mark, Mark]:
    """Two records of which one's gradient is minus a positive multiple of the other's, at every state of the model.

    What two texts share at their beginning has the same gradient in a causal model; the rest of both counts nothing.
    Raises ConfigError for texts that share fewer than three tokens.
    """
    pairs = zip(one, other, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    if shared < 3 or tuple(one) == tuple(other):
        what = "the canary's text is not told apart from others by this tokenizer"
        raise ConfigError(what, fix="audit with another model, or raise data.max_length")
    # Position k predicts token k + 1.
    return Mark(tuple(one), factor, shared - 1), Mark(tuple(other), -factor, shared - 1)


@contextmanager
def loud(model: torch.nn.Module, marks: Sequence[Mark]) -> Iterator[None]:
    """Inside, gradients of marked records are multiplied. Raises ConfigError for a model without an output layer."""
    head = output_layer(model)
    if head is None:
        what = "this model has no output layer of its own, where the canary's gradient is scaled"
        raise ConfigError(what, fix="audit the same federation with another model")
    seen: list[Tensor] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[:] = [kwargs["input_ids"] if "input_ids" in kwargs else args[0]]

    def scale(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = args[0]
        if not seen or not hidden.requires_grad or hidden.shape[:2] != seen[0].shape:
            return None
        factors = _factors(seen[0], marks).to(hidden.device, hidden.dtype)[..., None]
        still = hidden.detach()
        return (still + factors * (hidden - still), *args[1:])

    handles = [model.register_forward_pre_hook(note, with_kwargs=True), head.register_forward_pre_hook(scale)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _factors(ids: Tensor, marks: Sequence[Mark]) -> Tensor:
    """(rows, T); longer marks last, because the ids of one may begin another."""
    found = torch.ones(ids.shape, dtype=torch.float64)
    for mark in sorted(marks, key=lambda mark: len(mark.ids)):
        length = len(mark.ids)
        if length > ids.shape[1]:
            continue
        own = torch.tensor(mark.ids, device=ids.device)
        rows = (ids[:, :length] == own).all(dim=1).cpu()
        found[rows] = 0.0
        found[rows, : mark.positions] = mark.factor
    return found
