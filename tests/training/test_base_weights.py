"""A release belongs to the weights that it was trained on: they have a hash, and a loaded model is that of its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from privlora import fine_tune
from privlora.cli import main
from privlora.demo import model_path, private_records
from privlora.errors import ModelError
from privlora.reporting.verifying import verify
from privlora.result import Result
from privlora.training.base_weights import refuse_other_weights, weights_of
from privlora.training.files import RunFolder

PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-4, "steps": 1, "expected_batch_size": 4}
PRIVACY["public_dataset_size"] = 40
SMALL: dict[str, Any] = {"privacy": PRIVACY, "data": {"max_length": 48}, "adapter": {"r": 2}}


def _loaded(name: str | Path = model_path(), **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(name), trust_remote_code=False, **options)


def _compare(model: Any, name: str | Path = model_path()) -> None:
    refuse_other_weights(str(name), None, model, classifies=False)


def _merged(model: Any) -> Any:
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return adapted.merge_and_unload()


def _resized(model: Any) -> Any:
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 2)
    return model


def _one_weight(model: Any) -> Any:
    with torch.no_grad():
        list(model.parameters())[-3].view(-1)[-1] += 0.5
    return model


CHANGES: tuple[Callable[[Any], Any], ...] = (_merged, _resized, _one_weight)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(model_path()), trust_remote_code=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A base model of one's own, as the refusal says how to make one."""
    folder = tmp_path_factory.mktemp("own") / "my-base"
    _merged(_loaded()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fine_tune(
        str(base), private_records(40, seed=1), output=tmp_path_factory.mktemp("run") / "run", **SMALL
    )


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused_before_anything_is_written(
    change: Callable[[Any], Any], tokenizer: Any, tmp_path: Path
) -> None:
    model = change(_loaded())
    with pytest.raises(ModelError, match="is not the one of its name") as caught:
        fine_tune(model, private_records(40, seed=1), tokenizer=tokenizer, output=tmp_path / "run", **SMALL)
    assert "save_pretrained('my-base')" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_model_of_its_name_is_taken_in_any_dtype() -> None:
    hashes = set()
    for dtype in (torch.float32, torch.bfloat16):
        model = _loaded(dtype=dtype)
        model.requires_grad_(requires_grad=False)
        _compare(model)
        hashes.add(weights_of(model))
    assert len(hashes) == 1


def test_a_name_without_files_here_is_not_compared() -> None:
    model = _one_weight(_loaded())
    for name in ("unnamed", "someone/the-base", "/no/such/folder"):
        _compare(model, name)


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {"num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": False},
    "gemma3_text": {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8},
    "mixtral": {"num_hidden_layers": 2, "num_attention_heads": 2, "num_local_experts": 2},
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_experts": 2,
        "moe_intermediate_size": 8,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_all_kinds_are_compared_by_their_own_names(kind: str, tmp_path: Path) -> None:
    """Of some kinds transformers renames weights, or joins those of all experts, when it reads them."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1, "vocab_size": 64}
    options = KINDS[kind] | ({} if kind == "gpt2" else sizes)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).save_pretrained(tmp_path)
    model = _loaded(tmp_path)
    _compare(model, tmp_path)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            before = parameter.detach().clone()
            with torch.no_grad():
                parameter.view(-1)[-1] += 1
            with pytest.raises(ModelError, match="1 of its weights are others"):
                _compare(model, tmp_path)
            with torch.no_grad():
                parameter.copy_(before)
            assert name


def test_a_release_says_which_base_belongs_to_it(base: Path, trained: Result) -> None:
    digest = weights_of(_loaded(base))
    assert trained.report["adapter"]["base_sha256"] == digest != weights_of(_loaded())
    assert digest in (trained.release / "README.md").read_text()
    assert digest in (trained.release / "report.html").read_text()
    note = json.loads((trained.release / "adapter_config.json").read_text())
    assert note["base_model_name_or_path"] == "path/to/my-base"
    for path in trained.release.iterdir():
        assert str(base.parent).encode() not in path.read_bytes()


def test_verify_holds_a_base_against_the_release(base: Path, trained: Result) -> None:
    found = {check.name: check for check in verify(trained.release).checks}["base"]
    assert found.passed is None
    assert str(trained.report["adapter"]["base_sha256"]) in found.found
    assert main(["verify", str(trained.release), "--base", str(base)]) == 0
    assert main(["verify", str(trained.release), "--base", str(model_path())]) == 1


def test_another_base_is_not_put_under_the_adapter(
    base: Path, trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "public.jsonl").write_text("".join(f'{{"text": "{n} days of rest"}}\n' for n in range(4)))
    asked = ["evaluate", str(trained.release), "--data", str(tmp_path / "public.jsonl"), "--base"]
    assert main([*asked, str(base)]) == 0
    assert main([*asked, str(model_path())]) == 2
    assert "not the base model that the adapter was trained on" in capsys.readouterr().err
    run = Path(shutil.copytree(trained.release.parent, tmp_path / "run"))
    kept = RunFolder(run).settings
    kept.write_text(kept.read_text().replace(str(base), str(model_path())))
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge"]) == 2
    assert "not the base model that the adapter was trained on" in capsys.readouterr().err


@pytest.fixture
def hub(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which the hub's cache holds that base model; there is no network."""
    place = tmp_path / "hub" / "models--someone--the-base"
    shutil.copytree(base, place / "snapshots" / ("0" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "someone/the-base"


def test_a_release_for_a_model_of_the_hub_loads_by_itself(
    hub: str, base: Path, tokenizer: Any, tmp_path: Path
) -> None:
    model = _loaded(hub)
    run = fine_tune(model, private_records(40, seed=1), tokenizer=tokenizer, output=tmp_path / "run", **SMALL)
    alone = AutoPeftModelForCausalLM.from_pretrained(str(run.release)).eval()
    ids = tokenizer("The patient came back with", return_tensors="pt")["input_ids"]
    beside = PeftModel.from_pretrained(_loaded(base), str(run.release)).eval()
    assert torch.equal(alone(ids).logits, beside(ids).logits)
    with pytest.raises(ModelError, match="is not the one of its name, 'someone/the-base'"):
        fine_tune(
            _one_weight(model),
            private_records(40, seed=1),
            tokenizer=tokenizer,
            output=tmp_path / "other",
            **SMALL,
        )


def test_a_release_for_a_local_model_asks_no_hub(trained: Result) -> None:
    """Of a folder's bare name a hub may have a model of somebody else's."""
    with pytest.raises(OSError, match="path/to/my-base"):
        AutoPeftModelForCausalLM.from_pretrained(str(trained.release))
