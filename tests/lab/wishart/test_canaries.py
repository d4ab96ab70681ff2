"""A static poison canary is noise with the label that the reference model believes in least."""

from __future__ import annotations

import pytest
import torch

from privlora.errors import ModelError
from privlora.lab import static_poison


def test_label_is_the_least_likely_class() -> None:
    weights = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    canary = static_poison(lambda x: x.flatten(1) @ weights.T, (3, 4), torch.Generator().manual_seed(1))
    probabilities = torch.softmax(weights @ canary.inputs.flatten(), 0)
    assert canary.inputs.shape == (3, 4)
    assert canary.label == int(probabilities.argmin())
    again = static_poison(lambda x: x.flatten(1) @ weights.T, (3, 4), torch.Generator().manual_seed(1))
    assert torch.equal(again.inputs, canary.inputs)


@pytest.mark.parametrize("logits", [torch.full((1, 3), torch.nan), torch.zeros(3), torch.zeros(2, 3)])
def test_odd_reference_models_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ModelError, match="reference model"):
        static_poison(lambda x: logits, (4,), torch.Generator().manual_seed(0))
