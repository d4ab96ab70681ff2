"""C.1: the first step of standard LoRA, by peft and torch, betrays its data set to whoever knows two candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, with_lora

from privlora.errors import ModelError
from privlora.lab import first_step_asymmetries


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows of tokens, and the same with another last one."""
    ids = torch.randint(3, 57, (9, 12), generator=torch.Generator().manual_seed(0))
    return ids[:8], torch.cat([ids[:7], ids[8:]])


def loss_on(ids: torch.Tensor) -> Any:
    return lambda model: model(input_ids=ids, labels=ids).loss


def step(folder: Path, ids: torch.Tensor, rank: int, make: Any = torch.optim.SGD, steps: int = 1) -> Path:
    torch.manual_seed(len(str(folder)))
    model = with_lora(tiny_model(), rank, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_on(ids)(model).backward()
        optimizer.step()
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("rank", [1, 4, 20])
def test_two_adapters_are_told_apart(rank: int, tmp_path: Path) -> None:
    candidates = batches()
    folders = [step(tmp_path / f"{n}", ids, rank) for n, ids in enumerate(candidates)]
    model = tiny_model()
    scores = first_step_asymmetries(model, folders, [loss_on(ids) for ids in candidates])
    for truth, (own, other) in enumerate((row[truth], row[1 - truth]) for truth, row in enumerate(scores)):
        assert own < 1e-4 < 1e-2 < other, truth
    kept = tiny_model().state_dict()
    assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(("make", "steps"), [(torch.optim.AdamW, 1), (torch.optim.SGD, 4)])
def test_other_steps_are_explained_by_no_candidate(make: Any, steps: int, tmp_path: Path) -> None:
    candidates = batches()
    folder = step(tmp_path / "a", candidates[0], 4, make, steps)
    ((own, other),) = first_step_asymmetries(tiny_model(), [folder], [loss_on(ids) for ids in candidates])
    assert min(own, other) > 1e-3


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = step(tmp_path / "a", batches()[0], 2)
    with pytest.raises(ModelError, match="no layer"):
        first_step_asymmetries(tiny_model("gpt-neox"), [folder], [loss_on(batches()[0])])
