"""What a row that releases votes adds to a run's state: its embedding, and what its rounds go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from privlora.config import Settings, SynthesisSettings
from privlora.config.synthesis import OF_METHOD
from privlora.errors import ConfigError
from privlora.methods import Method
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


def refuse_settings_of_others(chosen: SynthesisSettings, method: Method) -> None:
    """Raise ConfigError for settings that another method reads, or that leave this one without effect."""
    for name in sorted(chosen.given & OF_METHOD.keys()):
        if OF_METHOD[name] != method.name:
            raise ConfigError(
                f"synthesis.{name} is read by method {OF_METHOD[name]} and not by {method.name}",
                why="a setting that is ignored would make two runs look different that are the same",
                fix=f"remove it, or set method.name={OF_METHOD[name]}",
            )
    if not chosen.epochs and not method.tunes_writer:
        raise ConfigError(
            f"synthesis.epochs=0 leaves method {method.name!r} an adapter that nothing trained",
            fix="set it to at least 1",
        )
    if method.tunes_writer and chosen.generator != "model":
        raise ConfigError(
            f"method {method.name!r} tunes the model that writes, and generator={chosen.generator} asks another writer",
            why="no preference would ever reach what writes the texts",
            fix="set synthesis.generator=model, or choose aug-pe",
        )


def refuse_what_votes_have_not(settings: Settings, method: Method) -> None:
    """Raise ConfigError for settings of gradients, where votes are released and they would be ignored."""
    privacy, called = settings.privacy, method.called
    if not privacy.private:
        raise ConfigError(
            f"method.name={method.name} releases sums of {called}, and exact ones are never made",
            why="they would show single records",
            fix="remove privacy.private=false and give a target, or choose adamw",
        )
    given: Sequence[tuple[str, bool, str]] = (
        ("privacy.clip_norm", privacy.clip_norm != 1.0, "those of a unit have norm 1"),
        ("privacy.clip_quantile", privacy.clip_quantile is not None, "those of a unit have norm 1"),
        (
            "privacy.bands",
            privacy.bands != 1,
            "each round asks all records afresh, with independent noise",
        ),
        (
            "privacy.max_batch_size",
            privacy.max_batch_size is not None,
            "who takes part is drawn without a cap",
        ),
        ("method.clipping", settings.method.clipping is not None, "no gradient of a record is taken"),
    )
    for name, is_given, why in given:
        if is_given:
            raise ConfigError(
                f"{name} does not go with method {method.name!r}, which releases {called}",
                why=f"{why}, so it would have no effect",
                fix=f"remove {name}",
            )
