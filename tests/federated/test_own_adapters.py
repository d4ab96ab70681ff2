"""The rule fedsa leaves each client a model of its own, as an adapter folder that other tools load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_cases import CLIENTS, run, settings_of
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import tiny_model, tiny_tokenizer

from privlora.cli import main
from privlora.federated.messages import Reply

pytestmark = pytest.mark.usefixtures("quick_reports")

IDS = torch.arange(2, 12)[None]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The federation's folder, and each client's own adapter."""
    folder = tmp_path_factory.mktemp("fedsa")
    model = tiny_model()
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    settings = settings_of(folder / "run", "fedsa", rounds=2)
    settings = settings.changed(model={"name": str(folder / "model")})
    told: list[Reply] = []
    run(settings, watch=told.extend)
    assert [reply.refused for reply in told] == [None] * len(told)
    return folder, sorted((folder / "run/clients").glob("*/*/private"))


def factors(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: t for name, t in tensors.items() if f"lora_{kind}." in name}


def test_each_clients_own_model_has_the_shared_right_and_a_left_of_its_own(
    done: tuple[Path, list[Path]],
) -> None:
    folder, own = done
    assert len(own) == CLIENTS
    shared = factors(folder / "run/release", "A")
    for client in own:
        assert client.stat().st_mode & 0o077 == 0
        kept = load_file(client.parent / "memory.safetensors")
        lefts = factors(client, "B")
        assert sum(t.numel() for t in lefts.values()) == sum(t.numel() for t in kept.values())
        assert float(sum(t.norm() for t in lefts.values())) > 0
        for name, tensor in factors(client, "A").items():
            torch.testing.assert_close(tensor, shared[name])
    assert any(not torch.equal(t, factors(own[1], "B")[name]) for name, t in factors(own[0], "B").items())


def test_peft_and_the_commands_load_it(done: tuple[Path, list[Path]], tmp_path: Path) -> None:
    folder, (client, *_) = done
    base = json.loads((client / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(folder / "model")
    with torch.no_grad():
        plain = tiny_model()(input_ids=IDS).logits
        adapted: Any = PeftModel.from_pretrained(tiny_model(), client)
        logits = adapted(input_ids=IDS).logits
    assert not torch.allclose(plain, logits)
    records = tmp_path / "public.jsonl"
    records.write_text('{"text": "patient 3 came in"}\n')
    for command in (
        ["evaluate", str(client), "--data", str(records)],
        ["export", str(client), str(tmp_path / "lora"), "--as-lora"],
        ["export", str(client), str(tmp_path / "whole"), "--merge"],
    ):
        assert main(command) == 0
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(input_ids=IDS).logits
    torch.testing.assert_close(merged, logits, atol=1e-4, rtol=1e-4)
    assert factors(tmp_path / "lora", "B").keys() == factors(client, "B").keys()
