"""The demo's material: a small model that ships with the package, and generated data with canaries."""

from __future__ import annotations

from pathlib import Path

from privlora.demo.corpus import Canary, make_canaries, private_records, public_texts

__all__ = ["Canary", "make_canaries", "model_path", "private_records", "public_texts"]


def model_path() -> Path:
    """The folder of the embedded model and tokenizer, for `from_pretrained` of the transformers Auto classes.

    A Llama of 1.4 million parameters (4 layers, width 160, vocabulary 1280, 256 positions), pretrained on
    `public_texts` alone by benchmarks/demo_model.py. Stored as float16, loaded as float32.
    """
    return Path(__file__).parent / "model"
