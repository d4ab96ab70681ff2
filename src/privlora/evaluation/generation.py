"""What a model answers in its own words: batched, with a key-value cache, through transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from privlora.data.examples import pad_token
from privlora.errors import ConfigError, ModelError
from privlora.evaluation.batches import PromptBatch, evaluating, prompt_batches
from privlora.randomness import counter_generator


@dataclass(frozen=True)
class Sampling:
    """Draws from the model instead of its most probable tokens.

    Prompt i has a stream of uniforms of its own, one for each token, so that what it draws depends on no other prompt
    and no batch, and torch's own generators are neither read nor moved.
    """

    key: int
    """PUBLIC; modulo 2^128."""
    temperature: float = 1.0
    """Above 0; logits are divided by it."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature={self.temperature} is not above 0", fix="give 1, or another one")


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    num_beams: int = 1,
    stop: Sequence[str] = (),
    max_tokens: int = 8192,
    use_cache: bool = True,
) -> list[str]:
    """The most probable continuation of each prompt (greedy, or by beam search); there is no sampling.

    Sampling, penalties and lengths of the model's own generation settings are not used.

    Args:
        model: a causal LM; peft models and attached adapters count as they are.
        tokenizer: its tokenizer.
        prompts: token ids, at least one each.
        max_new_tokens: limit of an answer, which may end earlier at EOS or at a stop string.
        num_beams: 1 is greedy.
        stop: the answer ends before the first of these strings.
        max_tokens: bound on beams x (prompt + new tokens) of a batch (a single prompt may exceed it).

    Returns:
        The answers without special tokens.

    Raises:
        ConfigError: a prompt is empty, or a number is below 1.
    """
    rows = generate_tokens(
        model,
        tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        stop=stop,
        max_tokens=max_tokens,
        use_cache=use_cache,
    )
    texts = [decoded(tokenizer, row) for row in rows]
    return [text[: min((text.find(s) for s in stop if s in text), default=len(text))] for text in texts]


def generate_tokens(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    num_beams: int = 1,
    stop: Sequence[str] = (),
    max_tokens: int = 8192,
    use_cache: bool = True,
    sampling: Sampling | None = None,
    told: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """The token ids that follow each prompt, before the first that ends a turn; the rest as in ``generate``.

    sampling: draws; None takes the most probable. A row may go on behind its stop string. told: after each
    token, how many prompts are answered; of a batch as large a part as of its longest answers.

    Raises ConfigError as ``generate``, and for sampling with beams; ModelError if a probability to draw by is NaN.
    """
    if min(max_new_tokens, num_beams) < 1 or not all(map(len, prompts)):
        raise ConfigError(
            "nothing to generate from or for", fix="give prompts, new tokens and at least one beam"
        )
    if sampling is not None and num_beams > 1:
        raise ConfigError("beams are not drawn", fix="give num_beams=1, or no sampling")
    ends = _ends(model, tokenizer)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=pad_token(tokenizer),
        eos_token_id=sorted(ends) or None,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        length_penalty=1.0,
        min_length=0,
    )
    answers: list[list[int]] = [[] for _ in prompts]
    answered = 0
    with evaluating(model) as device:
        for batch in prompt_batches(
            prompts,
            tokenizer,
            room=max_new_tokens,
            copies=num_beams,
            max_tokens=max_tokens,
            device=device,
        ):
            start = batch.input_ids.shape[1]
            rows = model.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                generation_config=settings,
                trust_remote_code=False,
                logits_processor=LogitsProcessorList(
                    [_Draw(sampling, batch, max_new_tokens)] if sampling is not None else []
                ),
                stopping_criteria=StoppingCriteriaList(
                    [
                        *([_Stop(stop, tokenizer, start)] if stop else []),
                        *([_Heard(told, answered, start, max_new_tokens)] if told is not None else []),
                    ]
                ),
            )
            for index, row in zip(batch.order, rows[:, start:].tolist(), strict=True):
                length = next((i for i, token in enumerate(row) if token in ends), len(row))
                answers[index] = row[:length]
            answered += len(batch.order)
            if told is not None:
                told(answered)
    return answers


def start_of_text(tokenizer: Any, *, fix: str) -> np.ndarray:
    """(1,) int32: what a text begins with that nothing asks for. Raises ConfigError, with ``fix``, if there is none."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise ConfigError(
            "the tokenizer has neither BOS nor EOS, so the model cannot begin a text from nothing", fix=fix
        )
    return np.array([token], dtype=np.int32)


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of token ids, without special ones."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _Draw(LogitsProcessor):
    """Leaves of each row's tokens one alone, drawn by inverting the distribution function at the row's next uniform."""

    def __init__(self, sampling: Sampling, batch: PromptBatch, steps: int) -> None:
        self._sampling, self._start = sampling, batch.input_ids.shape[1]
        uniforms = [counter_generator(sampling.key, stream=index).random(steps) for index in batch.order]
        self._uniforms = torch.from_numpy(np.stack(uniforms)).to(batch.input_ids.device)  # (b, steps) float64

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        p = (scores.double() / self._sampling.temperature).softmax(dim=-1)
        below = p.cumsum(dim=-1)
        total = below[:, -1:]
        if not total.isfinite().all():
            raise ModelError(
                "the model's probabilities are not numbers",
                fix="its training diverged: lower the learning rate",
            )
        # transformers may look one step ahead, and drops what it finds there.
        step = min(input_ids.shape[1] - self._start, self._uniforms.shape[1] - 1)
        # Below the total, so that the token that is found has a probability.
        at = torch.minimum(
            self._uniforms[:, step : step + 1] * total, total.nextafter(torch.zeros_like(total))
        )
        chosen = torch.searchsorted(below, at, right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


class _Heard(StoppingCriteria):
    """Stops nothing, and reports how many prompts are answered."""

    def __init__(self, told: Callable[[int], None], answered: int, start: int, most: int) -> None:
        self._told, self._answered, self._start, self._most = told, answered, start, most

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        rows, length = input_ids.shape
        self._told(self._answered + rows * (length - self._start) // self._most)
        return torch.zeros(rows, dtype=torch.bool, device=input_ids.device)


class _Stop(StoppingCriteria):
    """Ends a row once its new text holds a stop string.

    transformers' own ``stop_strings`` decodes the whole vocabulary first, and fails where decoding adds blanks.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Any, start: int) -> None:
        self._stop, self._tokenizer, self._start = stop, tokenizer, start
        self._tail = max(len(text.encode()) for text in stop) + 1  # no token holds less than a byte

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._start :][:, -self._tail :])
        ended = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """The tokenizer's EOS, which ends completions in training, and the ids that end a turn in the model's settings."""
    own = model.generation_config.eos_token_id
    listed = own if isinstance(own, list | tuple) else [own]
    return {int(token) for token in (tokenizer.eos_token_id, *listed) if token is not None}
