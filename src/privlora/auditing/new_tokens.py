"""Tokens that no record can hold: rows behind a model's vocabulary, for as long as an audit takes.

A tokenizer gives ids of its own vocabulary, so an id behind it stands in no record, whatever the records are, and the
ids of records stay what they are. Its row of the output layer is drawn like one of the model's own rows. The frozen
model grows by these rows alone: what is trained, clipped and noised is what it was. Records do meet them as further
answers that are wrong, which is a part of what is trained with canaries and of no run without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from privlora.adapters.quantised import bits
from privlora.errors import ModelError


def first_new_token(model: Any, tokenizer: Any) -> int:
    """The first id that the tokenizer never gives and the model does not know. Raises ModelError."""
    rows, largest = len(_layers(model)[0].weight), max(tokenizer.get_vocab().values(), default=-1)
    return max(rows, len(tokenizer), largest + 1)


@contextmanager
def new_tokens(model: Any, tokenizer: Any, count: int, seed: int) -> Iterator[None]:
    """Inside, the model knows ``count`` ids from ``first_new_token`` on; afterwards it has its own weights again.

    A new row is normal with the mean and the deviation of the model's own rows in each column, a function of ``seed``.

    Raises ModelError for a model that does not tell its embeddings and output layer, or has them packed or in parts.
    """
    first = first_new_token(model, tokenizer)
    embeddings, head = _layers(model)
    parts = [(embeddings, "weight"), (head, "weight")]
    if getattr(head, "bias", None) is not None:
        parts.append((head, "bias"))
    kept = [(module, name, getattr(module, name)) for module, name in parts]
    grown: dict[int, torch.nn.Parameter] = {}  # tied weights are one parameter, and stay one
    try:
        for module, name, own in kept:
            if id(own) not in grown:
                rows = _rows(own.detach(), first + count - len(own), seed)
                whole = torch.cat([own.detach(), rows])
                grown[id(own)] = torch.nn.Parameter(whole, requires_grad=own.requires_grad)
            setattr(module, name, grown[id(own)])
        yield
    finally:
        for module, name, own in kept:
            setattr(module, name, own)


def _rows(own: Tensor, count: int, seed: int) -> Tensor:
    """(count, ...) like the rows of ``own``, (rows, ...)."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn = torch.randn(count, *own.shape[1:], generator=generator).to(own.device)
    spread, centre = torch.std_mean(own.float(), dim=0)
    return (centre + spread * drawn).to(own.dtype)


def _layers(model: Any) -> tuple[Any, Any]:
    """The embeddings and the output layer."""
    found: list[Any] = [
        getattr(model, name)() if hasattr(model, name) else None
        for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    weights: list[Any] = [getattr(layer, "weight", None) for layer in found]
    plain = all(type(weight) is torch.nn.Parameter for weight in weights)
    if not plain or any(bits(layer) is not None for layer in found) or len(weights[0]) != len(weights[1]):
        raise ModelError(
            "this model can have no new tokens: its embeddings and its output layer are not two plain tables of as "
            "many rows",
            why="a new token needs a row of its own in both",
            fix="give canaries of another kind, such as --kind prefix-suffix",
        )
    return found[0], found[1]
