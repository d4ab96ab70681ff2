"""What stays real on paper, and that the model stays as it is."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_llama
from torch._subclasses.fake_tensor import FakeTensor

from privlora.training.paper import on_paper, tensors_in


def test_small_tensors_keep_their_values_and_large_ones_have_none() -> None:
    with on_paper(tiny_llama()):
        assert torch.arange(10).tolist() == list(range(10))
        assert isinstance(torch.zeros(2**15), FakeTensor)


def test_the_model_stays_as_it_is_and_has_its_twin_on_paper() -> None:
    model = tiny_llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with on_paper(model) as twin:
        assert type(twin) is type(model)
        assert all(isinstance(p, FakeTensor) for p in twin.parameters())
        logits = twin(input_ids=torch.zeros(2, 5, dtype=torch.int64)).logits
        assert logits.shape == (2, 5, model.config.vocab_size)
    assert all(bool((p == before[name]).all()) for name, p in model.named_parameters())
    assert model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.isfinite().all()


def test_what_is_raised_is_raised_and_paper_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="of its own"), on_paper(tiny_llama()):
        raise RuntimeError("of its own")
    assert not isinstance(torch.zeros(2**15), FakeTensor)


def test_tensors_are_found_in_lists() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert list(tensors_in([a, [1, (b,)], "c"])) == [a, b]
