"""An embedding whose positions stretch with the longest text so far: one record would move the votes of later ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from privlora.errors import ConfigError
from privlora.synthesis.directions import record_directions
from privlora.synthesis.embeddings import SentenceEmbedding


class Stretching:
    """What sentence_transformers gives for a model with rotary positions of the type "dynamic"."""

    def __init__(self, name: str, **_: Any) -> None:
        torch.manual_seed(0)
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = hf.LlamaConfig(
            vocab_size=128, max_position_embeddings=16, rope_parameters=rope, initializer_range=0.3, **sizes
        )
        self.model = hf.LlamaModel(config).eval()

    def modules(self) -> Any:
        return self.model.modules()

    def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        with torch.no_grad():
            rows = [self.model(torch.tensor([list(t.encode())])).last_hidden_state.mean(1)[0] for t in texts]
        return torch.stack(rows).numpy()


def test_positions_that_a_long_record_would_stretch_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(SentenceTransformer=Stretching, __version__="6.0")
    monkeypatch.setitem(sys.modules, "sentence_transformers", package)
    with pytest.raises(ConfigError, match="stretches its positions with the longest text"):
        SentenceEmbedding("any")
    alone = record_directions(["a cold and a cough."], Stretching("any").encode)
    after = record_directions(["long " * 12, "a cold and a cough."], Stretching("any").encode)
    assert abs(after[1] - alone[0]).max() > 0.01  # so it has to be refused
