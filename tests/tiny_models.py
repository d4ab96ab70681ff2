"""Tiny random causal LMs of every supported family, tokenizers and adapters for them, and batches of uneven rows."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from privlora.data.batching import MicroBatch, collate
from privlora.data.examples import IGNORED, Example, Examples

VOCAB = 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {**_GQA, "head_dim": 6, "sliding_window": 4, "query_pre_attn_scalar": 8}

FAMILIES: dict[str, Callable[..., hf.PretrainedConfig]] = {
    "llama": lambda **k: hf.LlamaConfig(**_GQA, tie_word_embeddings=False, **k),
    "llama-tied": lambda **k: hf.LlamaConfig(**_GQA, tie_word_embeddings=True, **k),
    "qwen2": lambda **k: hf.Qwen2Config(**_GQA, **k),
    "qwen3": lambda **k: hf.Qwen3Config(**_GQA, head_dim=6, **k),
    "gemma": lambda **k: hf.GemmaConfig(**_GQA, head_dim=6, **k),
    "gemma2": lambda **k: hf.Gemma2Config(**_GEMMA, final_logit_softcapping=2.0, **k),
    "gemma3": lambda **k: hf.Gemma3TextConfig(**_GEMMA, **k),
    "mistral": lambda **k: hf.MistralConfig(**_GQA, sliding_window=4, **k),
    "phi": lambda **k: hf.PhiConfig(**_COMMON, **k),
    "phi3": lambda **k: hf.Phi3Config(**_GQA, **k),
    "gpt-neox": lambda **k: hf.GPTNeoXConfig(**_COMMON, **k),
    "gpt2": lambda **k: hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **k,
    ),
}

# Their experts' kernels know no float64, and are no Linear layers that an adapter could be beside.
MIXTURES: dict[str, Callable[..., hf.PretrainedConfig]] = {
    "mixtral": lambda **k: hf.MixtralConfig(**_GQA, num_local_experts=4, num_experts_per_tok=2, **k)
}


def tiny_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2
) -> Any:
    """A random model in evaluation mode; the large initial weights make every token matter to the others."""
    torch.manual_seed(seed)
    config = {**FAMILIES, **MIXTURES}[family](initializer_range=0.3)
    config.num_hidden_layers = layers
    model = hf.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def tiny_llama(*, seed: int = 0, **sizes: Any) -> Any:
    """A random Llama of two layers of width 16 in evaluation mode; ``sizes`` are further fields of its config."""
    torch.manual_seed(seed)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**small, **sizes})).eval()


def with_lora(model: Any, r: int = 2, **options: Any) -> Any:
    """The model under peft's own LoRA; ``options`` are further fields of LoraConfig."""
    from peft import LoraConfig, get_peft_model  # takes seconds, which a collection should not wait for

    return get_peft_model(model, LoraConfig(r=r, **options))


def loaded_by_peft(model: Any, folder: Path) -> Any:
    """The model with the adapter in ``folder`` in evaluation mode, as peft loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder)).eval()


def set_checkpointing(model: Any, *, reentrant: bool) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def random_example(rng: np.random.Generator, length: int, labelled: int | None = None) -> Example:
    """``length`` random tokens of which the last ``labelled`` (None: all) are labels."""
    ids = rng.integers(3, VOCAB - 4, size=length).astype(np.int32)
    labels = ids.copy()
    if labelled is not None:
        labels[: length - labelled] = IGNORED
    return Example(ids, labels)


def uneven_examples(seed: int = 0, lengths: Sequence[int] = (9, 2, 14, 5, 21, 3)) -> list[Example]:
    """Rows of very different lengths; every third one has labels at its end only, and the last has none."""
    rng = np.random.default_rng(seed)
    rows = [random_example(rng, n, None if i % 3 else max(1, n // 3)) for i, n in enumerate(lengths)]
    return [*rows, random_example(rng, 7, 0)]


def _public_text(length: int) -> Example:
    ids = np.random.default_rng(90 + length).integers(3, 32, size=length).astype(np.int32)
    return Example(ids, ids.copy())


PUBLIC_TEXTS = Examples([_public_text(n) for n in (6, 13, 9, 4, 11, 7)], pad_token_id=0)
"""For methods that lean on public texts; of the first 32 tokens."""


def one_batch(
    examples: Sequence[Example],
    units: Sequence[Sequence[int]] | None = None,
    *,
    pad: int = 0,
    double: bool = False,
) -> MicroBatch:
    """All units (default: each example is one), longest first, as one micro-batch of ``pad`` more columns."""
    chosen = [np.atleast_1d(unit) for unit in (range(len(examples)) if units is None else units)]
    chosen.sort(key=lambda unit: -max(len(examples[record].input_ids) for record in unit))
    batch = collate(chosen, Examples(examples, pad_token_id=0))
    if pad:
        wide = {
            name: torch.nn.functional.pad(getattr(batch, name), (0, pad), value=value)
            for name, value in (
                ("input_ids", 0),
                ("attention_mask", 0),
                ("labels", IGNORED),
                ("token_weight", 0),
            )
        }
        batch = replace(batch, **wide)
    return in_double(batch) if double else batch


def in_double(batch: MicroBatch) -> MicroBatch:
    """The same batch with weights that are exact in float64 (1/3 in float32 is off by 1e-8)."""
    predicted = (batch.labels != IGNORED) & (torch.arange(batch.labels.shape[1]) > 0)
    row = 1.0 / torch.bincount(batch.unit_index, minlength=batch.unit_count).double()[batch.unit_index]
    weight = predicted * (row / predicted.sum(dim=1).clamp_min(1))[:, None]
    return replace(batch, token_weight=weight)


@contextmanager
def everything_in_double() -> Iterator[None]:
    """transformers computes norms and softmax in float32 whatever the model's dtype; here it may not."""
    to, float_, softmax = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax

    def to_double(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return to(self, *args, **kwargs)

    def softmax_double(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype == torch.float64:
            kwargs.pop("dtype", None)
        return softmax(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to_double)
        patch.setattr(torch.Tensor, "float", lambda t: t if t.dtype == torch.float64 else float_(t))
        patch.setattr(torch.nn.functional, "softmax", softmax_double)
        yield


def byte_tokenizer(
    special: Sequence[str] = ("<pad>", "<s>", "</s>"),
    *,
    letters: Sequence[str] | None = None,
    merges: Sequence[tuple[str, str]] = (),
    template: str | None = None,
    **options: Any,
) -> hf.PreTrainedTokenizerFast:
    """``special`` tokens first, then one token a byte and the given merges; decoding gives back the text.

    letters: the bytes that have a token, in order (default: all). template: what is written around each text, as
    "<s> $A </s>". options: of PreTrainedTokenizerFast, the roles of special tokens.
    """
    spelt = {
        letter: pre_tokenizers.ByteLevel(False).pre_tokenize_str(letter)[0][0] for letter in letters or ()
    }
    alphabet = spelt.values() or sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges), unk_token=options.get("unk_token")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if template:
        written = [(token, vocabulary[token]) for token in special if token in template]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=written)
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def tiny_tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a character; knows what the tiny models' vocabulary has room for."""
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    letters = string.ascii_lowercase + string.digits + " .,:?"
    return byte_tokenizer(list(roles.values()), letters=letters, **roles)
