"""Small classifiers of every family, their records, and their coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf
from promises import promise, small_settings
from tiny_models import VOCAB, tiny_tokenizer

from privlora.adapters import LowRankAdapter
from privlora.adapters.headed import HeadedAdapter
from privlora.config import Settings
from privlora.coordinates.headed import HeadedCoordinates
from privlora.data.examples import Examples
from privlora.methods import METHODS, build
from privlora.training.classifier import head_name, headed
from privlora.training.inputs import tokenise

NAMES = ["no", "yes", "maybe"]


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "num_labels": len(NAMES),
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, Any] = {
    "llama": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**COMMON, **ENDS)),
    "gpt2": lambda: hf.GPT2ForSequenceClassification(
        hf.GPT2Config(
            **{"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
            **{"pad_token_id": 0, "num_labels": len(NAMES), "initializer_range": 0.3},
        )
    ),
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**COMMON)),
    "roberta": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**COMMON, **ENDS)),
    "modernbert": lambda: hf.ModernBertForSequenceClassification(
        hf.ModernBertConfig(**COMMON, **ENDS, cls_token_id=1, sep_token_id=2)
    ),
    "deberta": lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**COMMON)),
}


def classifier(family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family]().to(dtype).eval()


RECORDS = [
    {"text": "hello abc", "label": "yes"},
    {"text": "a", "label": "no"},
    {"text": "def ghi jkl mno", "label": "maybe"},
    {"text": "zz", "label": "yes"},
    {"text": "", "label": "no"},
]


def labelled(**data: Any) -> Settings:
    return settings_of(data={"path": "x.jsonl", "text": "text", "label": "label", "labels": NAMES, **data})


def settings_of(**groups: Mapping[str, Any]) -> Settings:
    own = promise(steps=2, batch=2, records=5, noise_multiplier=1.0, delta=1e-5)
    return small_settings(**{"privacy": own, **groups})


def examples_of(records: list[dict[str, Any]], **data: Any) -> Examples:
    return tokenise(records, labelled(max_length=24, **data).data, tiny_tokenizer())


def adapted(model: Any, rank: int = 3) -> HeadedAdapter:
    name = head_name(model, len(NAMES))
    return headed(LowRankAdapter(model, rank=rank, exclude_modules=[name]), len(NAMES))


def started(model: Any, method: str) -> tuple[HeadedAdapter, HeadedCoordinates, Any]:
    adapter = adapted(model)
    dtype = next(model.parameters()).dtype
    coordinates, optimizer = build(METHODS[method], adapter, dtype=dtype)
    assert isinstance(coordinates, HeadedCoordinates)
    torch.manual_seed(1)
    for tensors in (coordinates.head.right, getattr(coordinates.body, "left", [])):
        for t in tensors:
            t.copy_(0.3 * torch.randn_like(t))
    coordinates.install()
    return adapter, coordinates, optimizer
