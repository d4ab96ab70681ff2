"""What init, plan and train say of a model is one thing, and its adapter is one that peft loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from cli_cases import call
from families import FAMILIES, save_family
from tiny_models import loaded_by_peft, tiny_model, tiny_tokenizer

from privlora import fine_tune
from privlora.adapters import read_adapter, write_adapter
from privlora.adapters.peft_files import CONFIG_NAME, merge
from privlora.adapters.quantised import bits
from privlora.config import Settings, settings_from
from privlora.demo import private_records
from privlora.errors import ModelError
from privlora.training.models import _loadable_adapter, adapter_for, check_model
from privlora.training.reach import coverage

SHORT = [
    "privacy.steps=1",
    "privacy.expected_batch_size=4",
    "method.learning_rate=0.05",
    "privacy.clip_norm=1",
]
SHORT += ["data.max_length=48", "data.unchecked=true", "method.right_weight=1"]

FEW = ("qwen2-moe", "gemma3", "opt")
"""Of which something is left out, or whose router's loss is asked for."""

LEFT_OUT = {
    "gemma3": {"fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"},
    "opt": {"fc1", "fc2"},
    "mamba": {"dt_proj", "out_proj"},
    "falcon-h1": {"out_proj"},
    "phi-moe": {"router"},
    "deepseek-v3": {"down_proj", "gate_proj", "up_proj"},
    "qwen2-moe": {"down_proj", "gate_proj", "shared_expert_gate", "up_proj"},
    "qwen3-next": {"down_proj", "gate_proj", "shared_expert_gate", "up_proj"},
}
ROUTED = ("qwen2-moe", "qwen3-moe", "qwen3-next", "phi-moe", "mixtral", "deepseek-v3", "gpt-oss")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in FEW else pytest.mark.long)
        for each in FAMILIES
        if each != "bert"
    ],
)
def test_init_plan_and_train_agree(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_family(family, tmp_path / "model")
    records = tmp_path / "notes.jsonl"
    records.write_text("\n".join(map(json.dumps, private_records(600, seed=1))))
    made = call(capsys, "init", records, "--model", model, "--output", "run.yaml")
    assert made.code == 0, made.err
    planned = call(capsys, "plan", "run.yaml", "--json", *SHORT)
    assert planned.code == 0, planned.err
    reached = planned.json["coverage"]
    assert {name for names in reached["left_out"].values() for name in names} == LEFT_OUT.get(family, set())
    assert (reached["experts"] > 0) == (family in ROUTED)
    assert 0.03 < reached["share"] < 0.6
    trained = call(capsys, "train", "run.yaml", *SHORT, f"run.output={tmp_path / 'run'}")
    assert trained.code == 0, trained.err
    release = tmp_path / "run" / "release"
    assert json.loads((release / "privacy_report.json").read_text())["adapter"]["coverage"] == reached
    ids = torch.arange(5, 25)[None]
    base, other = (hf.AutoModelForCausalLM.from_pretrained(model).eval() for _ in range(2))
    with torch.no_grad():
        plain = base(ids).logits
        merge(base, read_adapter(release))
        ours, theirs = base(ids).logits, loaded_by_peft(other, release)(ids).logits
    moved = float((ours - plain).abs().max())  # noise decides how far
    assert float((theirs - ours).abs().max()) < 0.1 * moved


@pytest.mark.parametrize("told", [True, False])
def test_a_base_in_float16(told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """init names a dtype that trains; without it plan and train say the same. told: by its config."""
    model = save_family("llama", tmp_path / "model", torch.float16)
    config = json.loads((model / "config.json").read_text())
    if not told:
        config.pop("dtype")
        (model / "config.json").write_text(json.dumps(config))
    records, target = tmp_path / "notes.jsonl", tmp_path / "run.yaml"
    records.write_text("\n".join(map(json.dumps, private_records(60, seed=1))))
    assert call(capsys, "init", records, "--model", model, "--output", target).code == 0
    assert yaml.safe_load(target.read_text())["model"]["dtype"] == "bfloat16"
    assert call(capsys, "plan", target).code == 0
    said = [call(capsys, command, target, "model.dtype=auto") for command in ("plan", "train")]
    assert all("the model is stored in float16" in each.err for each in said)


def _settings(model: object, **groups: Any) -> dict[str, Any]:
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4, "steps": 2, "expected_batch_size": 4}
    base = {"model": {"name": str(model)}, "data": {"path": "x.jsonl", "max_length": 48}}
    return {**base, "privacy": {**privacy, "public_dataset_size": 60}, **groups}


def _of(model: Any, **adapter: Any) -> tuple[Settings, Any]:
    return settings_from(_settings("base", adapter=adapter)), model


def _family(name: str) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()


@pytest.mark.parametrize("targets", [["out_proj"], r".*out_proj", ["in_proj", "out_proj"]])
def test_a_layer_that_peft_refuses_is_named_before_anything_is_charged(targets: Any) -> None:
    with pytest.raises(
        ModelError, match=r"(?s)peft does not load.*leave out out_proj with adapter.exclude_modules"
    ):
        _loadable_adapter(*_of(_family("mamba"), r=4, target_modules=targets))


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("gemma3", ["fc1"], "is not used when the model reads text"),
        ("opt", ["fc1"], "gets input of shape"),
        ("opt", "feed-forward", "no layer of this model can be adapted"),
        ("deepseek-v3", ["gate_proj"], "peft does not load"),
    ],
)
def test_without_weights_the_same_is_refused(family: str, targets: Any, message: str) -> None:
    """A plan has none; of a run with them the words are the same."""
    settings, model = _of(_family(family), r=4, target_modules=targets)
    said = []
    for each in (model, _family(family).to("meta")):
        with pytest.raises(ModelError, match=message) as caught:
            _loadable_adapter(settings, each)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_names_of_layers_are_those_that_read_text() -> None:
    """The layers of PRISM's paper, of a model that reads images, too."""
    targets = ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]
    adapter = _loadable_adapter(*_of(_family("gemma3"), r=4, target_modules=targets))
    assert all("language_model" in site.name for site in adapter.sites)
    assert coverage(adapter)["left_out"] == {
        "not called when the model reads text": ["k_proj", "q_proj", "v_proj"]
    }


def test_auto_takes_a_word_that_leaves_layers() -> None:
    adapter = adapter_for(*_of(_family("opt"), r=4, target_modules="auto"))
    assert adapter.target_modules == "all-linear"
    names = {site.name.rsplit(".", 1)[-1] for site in adapter.sites}
    assert names == {"q_proj", "k_proj", "v_proj", "out_proj"}


def test_a_word_leaves_out_layers_narrower_than_the_rank() -> None:
    model = _family("llama")  # keys and values are 16 wide
    assert coverage(adapter_for(*_of(model, r=16)))["left_out"] == {}
    adapter = adapter_for(*_of(model, r=17))
    assert coverage(adapter)["left_out"] == {"narrower than the rank": ["k_proj", "v_proj"]}
    with pytest.raises(ModelError, match=r"adapter\.r=17 exceeds the smaller side of .*k_proj"):
        adapter_for(*_of(model, r=17, target_modules=["q_proj", "k_proj"]))
    with pytest.raises(ModelError, match=r"adapter\.r=999 exceeds"):
        adapter_for(*_of(model, r=999))


def test_a_model_still_tells_its_routers_afterwards(tmp_path: Path) -> None:
    """transformers installs hooks for that at the first pass, and would not do so twice."""
    folder = save_family("mixtral", tmp_path / "model")
    model, tokenizer = (kind.from_pretrained(folder) for kind in (hf.AutoModelForCausalLM, hf.AutoTokenizer))
    ids = torch.arange(5, 25)[None]
    groups = _settings("base", data={"max_length": 48, "unchecked": True})
    fine_tune(
        model,
        private_records(60, seed=1),
        tokenizer=tokenizer,
        data=groups["data"],
        adapter={"r": 4},
        privacy=groups["privacy"],
        output=str(tmp_path / "run"),
    )
    found = model(ids, output_hidden_states=True)
    assert len(found.hidden_states) == 3
    assert float(found.aux_loss) > 0


def test_a_quantised_model_leaves_out_what_its_plan_does(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = save_family("falcon-h1", tmp_path / "model")
    packed = hf.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=hf.BitsAndBytesConfig(load_in_4bit=True)
    )
    assert any(bits(module) for module in packed.modules())
    found = [_loadable_adapter(*_of(each, r=4)) for each in (packed, _family("falcon-h1").to("meta"))]
    assert found[0].left_out == found[1].left_out != {}
    assert {site.name for site in found[0].sites} == {site.name for site in found[1].sites}


def test_whatever_reason_peft_gives_nothing_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel

    def refusing(*_: Any, **__: Any) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(PeftModel, "from_pretrained", refusing)
    with pytest.raises(ModelError, match=r"peft does not load an adapter of these layers.*no such thing"):
        check_model(*_of(tiny_model("llama"), r=2), tiny_tokenizer())


def test_a_config_holds_what_differs_from_the_defaults(tmp_path: Path) -> None:
    model = _family("llama")
    adapter = adapter_for(*_of(model, r=4))

    factors = {site.name: (torch.ones(site.m, 4), torch.ones(site.n, 4)) for site in adapter.sites}
    write_adapter(tmp_path, adapter, factors, base_model="base", lora_alpha=16.0)
    kept = json.loads((tmp_path / CONFIG_NAME).read_text())
    assert kept == {
        "base_model_name_or_path": "base",
        "inference_mode": True,
        "lora_alpha": 16,
        "peft_type": "LORA",
        "r": 4,
        "target_modules": sorted(kept["target_modules"]),
        "task_type": "CAUSAL_LM",
    }
    write_adapter(tmp_path, adapter, factors, base_model="base", lora_alpha=1.5, use_rslora=True)
    assert (
        json.loads((tmp_path / CONFIG_NAME).read_text()).items()
        >= {"use_rslora": True, "lora_alpha": 1.5}.items()
    )
