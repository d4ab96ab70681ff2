"""Whole runs on a packed base: from settings in transformers' names to an adapter that peft loads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from quantised_models import INT8, NF4, packed_model, saved_model
from run_cases import PRIVACY, RECORDS, StopAt
from tiny_models import loaded_by_peft, tiny_model

from privlora.accounting import read_ledger
from privlora.adapters import LowRankAdapter
from privlora.adapters.peft_files import read_adapter
from privlora.adapters.quantised import bits, hold, let_go
from privlora.api import fine_tune, resume_run
from privlora.cli import main
from privlora.cli.memory import estimate_memory
from privlora.config import ModelSettings, settings_from
from privlora.errors import ConfigError, PrivloraError
from privlora.methods import METHODS
from privlora.training.files import RunFolder
from privlora.training.identity import identify
from privlora.training.loop import Interrupted
from privlora.training.model_checks import refuse_coupled
from privlora.training.models import load_model

without_reports = pytest.mark.usefixtures("quick_reports")

SHORT = {"checkpoint_every": 1, "tokens_per_micro_batch": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bitsandbytes", reason="model.quantization is an optional extra")
    return saved_model(tmp_path_factory.mktemp("base"))


def train(folder: Path, output: Path, packing: Any, **more: Any) -> Any:
    loading = {"quantization": packing, "dtype": "float32", "device": "cpu", **more.pop("loading", {})}
    return fine_tune(
        folder,
        RECORDS,
        privacy={**PRIVACY, "steps": 3},
        adapter={"r": 2, **more.pop("adapter", {})},
        data={"max_length": 40},
        loading=loading,
        output=output,
        run=SHORT,
        **{"method": {"name": "prism", "learning_rate": 3e-3}, **more},
    )


@without_reports
@pytest.mark.parametrize("packing", ["4bit", "8bit"])
def test_what_a_run_on_a_packed_base_releases_is_what_peft_computes(
    folder: Path, tmp_path: Path, packing: str
) -> None:
    release = train(folder, tmp_path / "run", packing).release
    model, _ = load_model(
        ModelSettings(name=str(folder), dtype="float32", device="cpu", quantization=packing)
    )
    ids = torch.arange(3, 30)[None]
    held = hold(model)
    with torch.no_grad():
        base = model(input_ids=ids).logits
        found = loaded_by_peft(model, release)(input_ids=ids).logits
    assert not held  # a loaded model never repacks
    # What privlora computes with the same factors.
    own, _ = load_model(ModelSettings(name=str(folder), dtype="float32", device="cpu", quantization=packing))
    factors = read_adapter(release)
    adapter = LowRankAdapter(own, rank=2)
    for group in adapter.groups:
        a, b = (torch.stack([factors[site.name][side] for site in group.sites]) for side in (0, 1))
        adapter.install(group, a, a.new_ones(a.shape[0], a.shape[-1]), b)
    with torch.no_grad(), adapter:
        expected = own(input_ids=ids).logits
    assert float((expected - base).abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@without_reports
def test_a_run_on_a_packed_base_resumes_on_that_base_alone(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(folder, output, "4bit", observer=StopAt(2))
    assert resume_run(output, records=RECORDS).steps == 3
    assert read_ledger(RunFolder(output).ledger).charges == 3
    with pytest.raises(Interrupted):
        train(folder, tmp_path / "other", "4bit", observer=StopAt(2))
    plain, tokenizer = load_model(ModelSettings(name=str(folder), dtype="float32", device="cpu"))
    in_float32 = packed_model({**NF4, "bnb_4bit_compute_dtype": "float32"})
    for model, match in ((plain, "does not follow it"), (in_float32, "not the one that the run began with")):
        with pytest.raises(PrivloraError, match=match):
            resume_run(tmp_path / "other", model=model, tokenizer=tokenizer, records=RECORDS)


def test_a_loaded_model_has_to_be_as_settings_say(folder: Path, tmp_path: Path) -> None:
    plain, tokenizer = load_model(ModelSettings(name=str(folder), dtype="float32", device="cpu"))
    for loading in ({"quantization": "4bit"}, {"attn_implementation": "eager"}):
        with pytest.raises(ConfigError, match=f"model.{next(iter(loading))} is set, and the model does not"):
            fine_tune(
                plain, RECORDS, tokenizer=tokenizer, privacy=PRIVACY, loading=loading, output=tmp_path / "run"
            )
    assert not (tmp_path / "run").exists()


def test_identities_of_packed_models() -> None:
    kinds = {
        "nf4": {**NF4, "bnb_4bit_compute_dtype": "bfloat16"},
        "in float32": {**NF4, "bnb_4bit_compute_dtype": "float32"},
        "int8": INT8,
        "another threshold": {**INT8, "llm_int8_threshold": 3.0},
    }
    models = {name: packed_model(packing) for name, packing in kinds.items()}
    found = {name: identify(None, model).model for name, model in models.items()}
    assert len(set(found.values())) == len(kinds)
    assert identify(None, packed_model(kinds["nf4"])).model == found["nf4"]
    # A pass moves the scales of 8 bits from the weight into the layer.
    with torch.no_grad():
        models["int8"](input_ids=torch.arange(3, 9)[None])
    assert identify(None, models["int8"]).model == found["int8"]
    # One of 4 bits casts its bias to what it computes in.
    biased = packed_model(kinds["in float32"], "gpt2", dtype=torch.bfloat16)
    before, held = identify(None, biased).model, hold(biased)
    with torch.no_grad():
        biased(input_ids=torch.arange(3, 9)[None])
    assert biased.transformer.h[0].mlp.c_fc.bias.dtype == torch.float32
    assert identify(None, biased).model == before
    let_go(held)
    layer = next(m for m in models["nf4"].modules() if bits(m) == 4)
    layer.weight.quant_state.absmax[0] *= 2  # the packed numbers are the same
    assert identify(None, models["nf4"]).model != found["nf4"]


def test_methods_of_dense_updates_are_refused_before_there_is_a_run(folder: Path, tmp_path: Path) -> None:
    for method in ("projected", "wishart-m2"):
        with pytest.raises(ConfigError, match=r"model\.quantization does not go with.*dense update"):
            train(folder, tmp_path / "run", "4bit", method=method)
    model, tokenizer = load_model(ModelSettings(name=str(folder), dtype="float32", quantization="4bit"))
    groups = {"privacy": PRIVACY, "adapter": {"r": 2}, "data": {"max_length": 40}, "method": "projected"}
    with pytest.raises(PrivloraError, match=r"quantised|needs float32 layers"):  # in the caller's hands
        fine_tune(model, RECORDS, tokenizer=tokenizer, output=tmp_path / "run", **groups)
    assert not (tmp_path / "run").exists()


def test_without_the_package_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "privlora.training.models.find_spec", lambda name: None if name == "bitsandbytes" else found(name)
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs the package bitsandbytes.*pip install 'privlora\[quant\]'"):
        load_model(ModelSettings(name=str(saved_model(tmp_path)), quantization="4bit"))


def test_a_merge_goes_into_the_weights_that_were_packed(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "run", "4bit")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    card = (tmp_path / "run/release/README.md").read_text()
    assert "packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'" in card


@pytest.mark.parametrize("packing", ["4bit", "8bit"])
def test_planned_bytes_are_those_of_the_loaded_model(folder: Path, packing: str) -> None:
    settings = settings_from(
        {
            "model": {"name": str(folder), "quantization": packing, "dtype": "float32"},
            "data": {"path": "x.jsonl", "max_length": 40},
            "privacy": PRIVACY,
            "adapter": {"r": 2},
        }
    )
    model, _ = load_model(settings.model)
    packed = [m for m in model.modules() if bits(m) is not None]
    names = {id(m.weight) for m in packed}
    size = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in names)
    for module in packed:
        tensors = {"weight": module.weight.data}
        if bits(module) == 4:
            state = module.weight.quant_state
            tensors["scales"] = state.absmax
            if state.nested:
                tensors["their scales"] = state.state2.absmax
        else:
            tensors["scales"] = module.weight.SCB
        size += sum(t.numel() * t.element_size() for t in tensors.values())
    planned = estimate_memory(settings, METHODS["prism"], tiny_model())
    assert planned["weight_bytes"] == size


@without_reports
def test_a_packed_folder_is_trained_on_as_it_is(tmp_path: Path) -> None:
    model = packed_model({**NF4, "bnb_4bit_compute_dtype": "bfloat16"})
    saved_model(tmp_path / "base")
    model.save_pretrained(tmp_path / "base")
    result = train(tmp_path / "base", tmp_path / "run", None)
    assert result.steps == 3
    loaded, _ = load_model(ModelSettings(name=str(tmp_path / "base"), device="cpu"))
    assert sum(bits(m) == 4 for m in loaded.modules()) == len(LowRankAdapter(loaded, rank=2).sites)


STORIES = Path(__file__).parents[3] / "shared/assets/models/stories260K"


@pytest.mark.skipif(not STORIES.exists(), reason="needs ../shared")
def test_a_small_real_model_is_causal_in_8_bits() -> None:
    """Outliers of later tokens round earlier ones by a seventh of what a token does itself."""
    pytest.importorskip("bitsandbytes")
    settings = ModelSettings(name=str(STORIES), device="cpu", quantization="8bit")
    model, tokenizer = load_model(settings)
    refuse_coupled(LowRankAdapter(model, rank=2, target_modules="all-linear"), tokenizer)
