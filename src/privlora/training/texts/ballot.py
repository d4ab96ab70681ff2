"""What a row that releases votes adds to a run's state: its embedding, and what its rounds go on from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from privlora.config import Settings
from privlora.synthesis.directions import Embedding
from privlora.synthesis.embeddings import Attached, SentenceEmbedding, hidden_states

_OVER, _START = "over", "start."


class Ballot:
    """A part of a run's state, in the run's one checkpoint with all else that moves.

    embed: of texts, public; private records go through it one at a time.
    """

    def __init__(self, embed: Embedding) -> None:
        self.embed = embed
        self.rounds: dict[str, Tensor] = {}
        """Of ``synthesis.rounds.Rounds.state_dict``, as it was stored last; empty before the first release."""
        self.start: dict[str, Tensor] = {}
        """The coordinates before the first round, of rows whose rounds move them; else empty."""
        self.over = False
        """Whether all that follows from the last round is made."""

    @property
    def waiting(self) -> bool:
        """Whether the last release is stored and what follows from it is not."""
        return bool(self.rounds) and int(self.rounds["used"]) < len(self.rounds["released"])

    def state_dict(self) -> dict[str, Tensor]:
        start = {_START + name: tensor for name, tensor in self.start.items()}
        return {**self.rounds, **start, _OVER: torch.tensor(self.over)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.start = {n.removeprefix(_START): t for n, t in tensors.items() if n.startswith(_START)}
        self.rounds = {n: t for n, t in tensors.items() if n != _OVER and not n.startswith(_START)}
        self.over = bool(tensors[_OVER])


def build_embedding(
    settings: Settings, model: torch.nn.Module, tokenizer: Any, adapter: Attached
) -> Embedding:
    """What synthesis.embedding names, or the base model's hidden states, without the adapter.

    Raises ConfigError for a model of embeddings that cannot be loaded.
    """
    assert settings.synthesis is not None
    if settings.synthesis.embedding is not None:
        device = str(next(model.parameters()).device)
        return SentenceEmbedding(settings.synthesis.embedding, device=device)
    found: Embedding = partial(
        hidden_states,
        model,
        tokenizer,
        adapter=adapter,
        max_length=settings.data.max_length,
        max_tokens=settings.run.max_tokens,
    )
    return found
