"""What is written is a plain peft adapter: the same logits through PeftModel as through ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import logits, with_operands
from safetensors.torch import load_file, save_file
from tiny_models import loaded_by_peft, tiny_model, with_lora
from torch import Tensor

from privlora.adapters import LowRankAdapter, read_adapter, write_adapter
from privlora.adapters.peft_files import CONFIG_NAME, WEIGHTS_NAME, lora_scaling, merge
from privlora.errors import ModelError


def operand_factors(adapter: LowRankAdapter) -> dict[str, tuple[Tensor, Tensor]]:
    return {site.name: (site.left * site.mid, site.right) for site in adapter.sites}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gemma2"])
@pytest.mark.parametrize("targets", ["all-linear", "feed-forward", r".*1.*(q_proj|c_fc|qkv_proj)"])
def test_peft_computes_our_logits(family: str, rslora: bool, targets: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    adapter = with_operands(LowRankAdapter(model, rank=3, target_modules=targets)).attach()
    ours = logits(model)
    write_adapter(
        tmp_path, adapter, operand_factors(adapter), base_model="tiny", lora_alpha=7.0, use_rslora=rslora
    )
    adapter.detach()
    plain = logits(model)
    loaded = loaded_by_peft(tiny_model(family), tmp_path)
    torch.testing.assert_close(logits(loaded), ours, rtol=0, atol=1e-5)
    assert float((ours - plain).abs().max()) > 0.1
    merge(model, operand_factors(adapter))
    torch.testing.assert_close(logits(model), ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_peft_is_read_with_its_scale(rslora: bool, tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    theirs = with_lora(tiny_model(), 3, lora_alpha=7, use_rslora=rslora, **options).eval()
    theirs.save_pretrained(tmp_path)
    model = tiny_model()
    factors = read_adapter(tmp_path)
    assert len(factors) == 4
    assert {a.shape[-1] for a, _ in factors.values()} == {3}
    merge(model, factors)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0, atol=1e-5)


def test_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    adapter = with_operands(LowRankAdapter(tiny_model(), rank=3))
    written = operand_factors(adapter)
    write_adapter(tmp_path, adapter, written, base_model="tiny", lora_alpha=7.0)
    found = read_adapter(tmp_path)
    assert found.keys() == written.keys()
    for name, (a, b) in found.items():
        torch.testing.assert_close(a @ b.T, written[name][0] @ written[name][1].T, rtol=1e-5, atol=1e-6)


def test_the_scale_is_pefts() -> None:
    assert lora_scaling(16.0, 4, use_rslora=False) == 4.0
    assert lora_scaling(16.0, 4, use_rslora=True) == 8.0


def test_merging_keeps_the_layers_dtype(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    merge(model, operand_factors(with_operands(LowRankAdapter(tiny_model(), rank=2))))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("damage", ["missing", "no weights", "cut", "no lora_A", "extra tensor"])
def test_damaged_and_foreign_adapters_are_refused(damage: str, tmp_path: Path) -> None:
    adapter = with_operands(LowRankAdapter(tiny_model(), rank=2))
    folder = tmp_path / "adapter"
    if damage != "missing":
        write_adapter(folder, adapter, operand_factors(adapter), base_model="tiny", lora_alpha=2.0)
    weights = folder / WEIGHTS_NAME
    if damage == "no weights":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage in ("no lora_A", "extra tensor"):
        tensors: dict[str, Any] = load_file(weights)
        if damage == "no lora_A":
            del tensors[next(key for key in tensors if "lora_A" in key)]
        else:
            tensors["base_model.model.lm_head.weight"] = torch.zeros(2, 2)
        save_file(tensors, weights)
    with pytest.raises(ModelError):
        read_adapter(folder)


def test_no_pickle_is_written(tmp_path: Path) -> None:
    adapter = with_operands(LowRankAdapter(tiny_model(), rank=2))
    write_adapter(tmp_path, adapter, operand_factors(adapter), base_model="tiny", lora_alpha=2.0)
    assert {path.name for path in tmp_path.iterdir()} >= {WEIGHTS_NAME, CONFIG_NAME}
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]
