"""The embedded model as it writes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from privlora.demo import model_path


@lru_cache(maxsize=1)
def demo_model() -> tuple[Any, Any]:
    """The model and its tokenizer; whoever changes them takes the change back."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(model_path())
