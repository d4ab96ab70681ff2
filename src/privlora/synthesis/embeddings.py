"""Texts as vectors of length 1: by the base model's own hidden states, or by a sentence-transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import torch

from privlora.data.examples import Template, build_examples
from privlora.errors import ConfigError, named
from privlora.evaluation.batches import evaluating, prompt_batches, stretched_by_length, takes_positions

_ANY: Final = "a"  # stands for a text without a token
_SOME: Final = 16  # tokens, which hold those that a tokenizer adds and one more


class Attached(Protocol):
    """An adapter that can be taken off, as ``adapters.LowRankAdapter``."""

    @property
    def attached(self) -> bool: ...

    def attach(self) -> Any: ...

    def detach(self) -> None: ...


def hidden_states(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    adapter: Attached | None = None,
    max_length: int = 512,
    max_tokens: int = 8192,
) -> np.ndarray:
    """The base model's last hidden states, averaged over each text's tokens and divided by their norm.

    Padding has no part in it, so a text's vector depends on other texts by rounding at most; with ``max_tokens=1``
    every text is alone in its batch, and its vector is a function of it alone, as private texts have to have it.

    Args:
        model: a causal LM; a peft model's adapter is left out.
        tokenizer: its tokenizer.
        texts: N of them; what is behind ``max_length`` tokens is cut off.
        adapter: is taken off meanwhile, if it is attached.
        max_tokens: bound on the padded tokens of a batch.

    Returns:
        (N, d) float32. A text without a token has zeros.
    """
    records = [{"text": text} for text in texts]
    examples = build_examples(records, Template(text="text"), tokenizer, max_length=max_length, add_eos=False)
    some = [i for i, example in enumerate(examples) if len(example.input_ids)]
    with base_alone(model, adapter) as base, evaluating(base) as device:
        inner = base.base_model
        found = np.zeros((len(texts), base.config.hidden_size), dtype=np.float32)
        for batch in prompt_batches(
            [examples[i].input_ids for i in some],
            tokenizer,
            room=0,
            copies=1,
            max_tokens=max_tokens,
            device=device,
        ):
            positions = {"position_ids": batch.position_ids} if takes_positions(base) else {}
            states = inner(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **positions
            ).last_hidden_state.float()
            weights = (batch.attention_mask / batch.lengths[:, None])[:, :, None]
            # Where nothing is attended to, a state may be NaN.
            mean = states.masked_fill(weights == 0, 0.0).mul(weights).sum(dim=1)
            unit = torch.nn.functional.normalize(mean, dim=-1)
            found[[some[i] for i in batch.order]] = unit.cpu().numpy()
    return found


class SentenceEmbedding:
    """A sentence-transformers model, loaded once: texts to vectors, (N, d) float32 of norm 1. A text without a token
    has zeros.

    name: a local folder or a hub name. device: None takes what sentence-transformers prefers. Raises ConfigError if the
    package is not installed, or the model not there.
    """

    def __init__(self, name: str, *, device: str | None = None) -> None:
        try:
            from sentence_transformers import SentenceTransformer, __version__
        except ImportError:
            __version__ = "0"
        if int(__version__.partition(".")[0]) < 6:
            raise ConfigError(
                "embeddings by a sentence-transformers model need that package, from version 6 on",
                why="earlier ones run code of a model's folder, which would see the private texts",
                fix="pip install -U sentence-transformers, or use the base model's hidden states",
            )
        try:
            self._model = SentenceTransformer(name, device=device, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 - loaders raise anything; the user needs the cause
            raise ConfigError(
                f"synthesis.embedding={named(name)} cannot be loaded ({type(error).__name__})",
                fix="give the folder or the hub name of a public sentence-transformers model; or leave it out, and the "
                "base model's hidden states are used",
            ) from None
        if any(stretched_by_length(getattr(module, "config", None)) for module in self._model.modules()):
            raise ConfigError(
                f"synthesis.embedding={named(name)} stretches its positions with the longest text",
                why="after a long record it would place all later ones elsewhere: one record would move the votes "
                "of others",
                fix="give a model whose rope_type is neither dynamic nor longrope; or leave it out, and the base "
                "model's hidden states are used",
            )

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        # Models fail on a text without a token, and whether one does would tell of the private texts.
        empty = [not self._has_token(text) for text in texts]
        vectors = self._model.encode(
            [_ANY if none else text for text, none in zip(texts, empty, strict=True)],
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        found = np.array(vectors, dtype=np.float32)
        found[empty] = 0.0
        return found

    def _has_token(self, text: str) -> bool:
        tokenizer = getattr(self._model, "tokenizer", None)
        if not callable(tokenizer):  # models of words alone have another kind, and take any text
            return True
        return len(tokenizer(text, truncation=True, max_length=_SOME)["input_ids"]) > 0


@contextmanager
def base_alone(model: Any, adapter: Attached | None) -> Iterator[Any]:
    """The model as it was before any adapter."""
    taken_off = adapter is not None and adapter.attached
    if adapter is not None and taken_off:
        adapter.detach()
    try:
        if hasattr(model, "get_base_model"):  # peft
            with model.disable_adapter():
                yield model.get_base_model()
        else:
            yield model
    finally:
        if adapter is not None and taken_off:
            adapter.attach()
