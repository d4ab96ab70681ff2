"""What a model answers in its own words: batched, with a key-value cache, through transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from privlora.data.examples import pad_token
from privlora.errors import ConfigError
from privlora.evaluation.batches import evaluating, prompt_batches


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
    if min(max_new_tokens, num_beams) < 1 or not all(map(len, prompts)):
        raise ConfigError(
            "nothing to generate from or for", fix="give prompts, new tokens and at least one beam"
        )
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
    answers = [""] * len(prompts)
    with evaluating(model) as device:
        for batch in prompt_batches(
            prompts,
            tokenizer,
            room=max_new_tokens,
            copies=num_beams,
            max_tokens=max_tokens,
            device=device,
        ):
            rows = model.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList(
                    [_Stop(stop, tokenizer, batch.input_ids.shape[1])] if stop else []
                ),
            )
            for index, row in zip(batch.order, rows[:, batch.input_ids.shape[1] :].tolist(), strict=True):
                answers[index] = _text(row, ends, stop, tokenizer)
    return answers


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


def _text(row: list[int], ends: set[int], stop: Sequence[str], tokenizer: Any) -> str:
    length = next((i for i, token in enumerate(row) if token in ends), len(row))
    text = str(tokenizer.decode(row[:length], skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]
