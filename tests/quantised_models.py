"""Tiny random models whose frozen weights bitsandbytes has packed, on the CPU. Tests with one skip without it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import tiny_model, tiny_tokenizer
from transformers.pytorch_utils import Conv1D

NF4: Mapping[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8: Mapping[str, Any] = {"load_in_8bit": True}


def saved_model(folder: Path, family: str = "llama", *, louder: float = 1.0) -> Path:
    """A tiny model and its tokenizer. louder: what every eighth feature behind a norm is multiplied by."""
    model = tiny_model(family)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "ln_" in name:
                p[::8] *= louder
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def packed_model(
    packing: Mapping[str, Any],
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    louder: float = 1.0,
) -> Any:
    """As transformers loads it, and as nobody has run it yet."""
    pytest.importorskip("bitsandbytes", reason="model.quantization is an optional extra")
    with tempfile.TemporaryDirectory() as folder:
        return hf.AutoModelForCausalLM.from_pretrained(
            saved_model(Path(folder), family, louder=louder),
            dtype=dtype,
            quantization_config=hf.BitsAndBytesConfig(**packing),
            device_map={"": "cpu"},
        ).eval()


def unpacked_model(model: Any) -> Any:
    """A copy of float32 layers that holds the numbers which the packed ones stand for."""
    from privlora.adapters.quantised import bits, dense_weight

    plain = hf.AutoModelForCausalLM.from_config(
        hf.AutoConfig.for_model(**_without_packing(model.config.to_dict()))
    )
    tensors = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    for name, module in model.named_modules():
        if bits(module) is not None:
            dense = dense_weight(name, module)
            transposed = isinstance(plain.get_submodule(name), Conv1D)
            tensors[f"{name}.weight"] = dense.T if transposed else dense
    plain.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False)
    return plain.float().eval()


def _without_packing(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "quantization_config"}
