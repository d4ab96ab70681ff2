"""Settings of TRL, axolotl and litgpt: what means the same is taken over, and the rest is told line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_cases import Outcome, call, refuses
from starting.starting_cases import SECRET, jsonl, rows, save_base

from privlora.config import Settings, load_settings
from privlora.starting.foreign.taken import Taken
from privlora.training.promise import plan_privacy

TRL = """\
# trl sft --config
model_name_or_path: Qwen/Qwen2.5-0.5B
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: records.jsonl
dataset_train_split: train
learning_rate: 2.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.03
optim: adamw_torch_fused
weight_decay: 0.01
num_train_epochs: 3
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
max_length: 1024
packing: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
bf16: true
use_peft: true
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
use_dora: true
load_in_4bit: true
use_bnb_nested_quant: true
max_grad_norm: 1.0
eval_strategy: steps
eval_steps: 100
save_steps: 200
save_total_limit: 2
load_best_model_at_end: true
report_to: [wandb]
run_name: my-run
push_to_hub: true
hub_token: hf_secret
logging_steps: 10
group_by_length: true
seed: 42
output_dir: out/sft
my_own_key: 3
"""

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: records.jsonl
    ds_type: json
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
wandb_project: secret-project
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: auto
tf32: false
gradient_checkpointing: true
early_stopping_patience: 3
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""

LITGPT = """\
checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
out_dir: out/finetune/lora
precision: bf16-true
quantize: bnb.nf4
devices: 1
num_nodes: 1
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_query: true
lora_key: false
lora_value: true
lora_projection: false
lora_mlp: false
lora_head: false
data:
  class_path: litgpt.data.JSON
  init_args:
    json_path: records.jsonl
    mask_prompt: true
    val_split_fraction: 0.05
    prompt_style: alpaca
    ignore_index: -100
    seed: 42
    num_workers: 4
train:
  save_interval: 200
  log_interval: 1
  global_batch_size: 8
  micro_batch_size: 1
  lr_warmup_steps: 10
  epochs: 2
  max_tokens:
  max_steps:
  max_seq_length: 512
  tie_embeddings:
  max_norm:
  min_lr: 6.0e-05
eval:
  interval: 100
  max_new_tokens: 100
  max_iters: 100
  initial_validation: false
  final_validation: true
logger_name: csv
seed: 1337
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.0002
    weight_decay: 0.0
    betas:
      - 0.9
      - 0.95
"""

FILES = {"TRL": TRL, "axolotl": AXOLOTL, "litgpt": LITGPT}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With records.jsonl, of about 2000 records."""
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "records.jsonl", rows(2200, instruction="Say", input="it", output=SECRET))
    return tmp_path


def taken_over(
    capsys: pytest.CaptureFixture[str], content: str | dict[str, Any], *argv: object
) -> tuple[Settings, Outcome]:
    """The settings that `privlora init --from` makes of a file, and what it says."""
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    Path("theirs.yaml").write_text(text)
    Path("run.yaml").unlink(missing_ok=True)
    outcome = call(capsys, "init", *argv, "--from", "theirs.yaml", "--output", "run.yaml")
    assert outcome.code == 0, outcome.err
    return load_settings("run.yaml"), outcome


@pytest.mark.parametrize("dialect", FILES)
def test_every_key_is_taken_or_told(dialect: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, outcome = taken_over(capsys, FILES[dialect])
    assert f"reads as settings of {dialect}" in outcome.err
    plan_privacy(settings)
    text = Path("run.yaml").read_text()
    told = [line.removeprefix("not taken over: ") for line in outcome.err.splitlines() if "not taken" in line]
    commented = " ".join(text.partition("# Not taken over:")[2].replace("#", " ").split())
    assert all(" ".join(line.split()) in commented for line in told)
    for said in (text, outcome.err):
        assert not {"hf_secret", "secret-project", SECRET} & set(said.split())
        assert SECRET not in said


def test_trl(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, outcome = taken_over(capsys, TRL)
    model, adapter, method = settings.model, settings.adapter, settings.method
    assert (model.name, model.dtype, model.attn_implementation) == (
        "Qwen/Qwen2.5-0.5B",
        "bfloat16",
        "flash_attention_2",
    )
    assert model.quantization is not None
    assert model.quantization.bnb_4bit_use_double_quant
    assert model.gradient_checkpointing == "non-reentrant"
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (32, 64, 0.05)
    assert adapter.target_modules == ["q_proj", "v_proj"]
    assert (method.name, method.learning_rate, method.schedule) == ("dp-adamw", 2e-4, "cosine")
    assert (settings.privacy.b, settings.privacy.steps) == (32, round(3 * 2000 / 32))
    assert method.warmup_steps == round(0.03 * settings.privacy.steps)
    assert settings.data.max_length == 1024
    assert (settings.run.output, settings.run.seed, settings.run.checkpoint_every) == ("out/sft", 42, 200)
    for key, words in {
        "packing": "several people",
        "use_dora": "magnitudes",
        "max_grad_norm": "privacy.clip_norm",
        "load_best_model_at_end": "no epsilon is paid",
        "report_to": "public numbers alone",
        "group_by_length": "Poisson",
        "hub_token": "publishes nothing",
        "not known to privlora, so without effect": "my_own_key",
    }.items():
        assert any(
            line.startswith(f"not taken over: {key}: ") and words in line for line in outcome.err.splitlines()
        ), key


def test_axolotl(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, outcome = taken_over(capsys, AXOLOTL)
    assert settings.model.quantization is not None
    assert settings.adapter.target_modules == "all-linear"
    assert (settings.privacy.b, settings.privacy.steps) == (8, 1000)
    assert (settings.method.name, settings.method.warmup_steps) == ("dp-adamw", 10)
    assert settings.data.path == "records.jsonl"
    assert "val_set_size: see data.evaluation here: a PUBLIC file" in outcome.err
    assert "early_stopping_patience" in outcome.err
    small = "small for privacy" in Path("run.yaml").read_text()
    assert small


def test_litgpt(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, outcome = taken_over(capsys, LITGPT)
    assert settings.model.name == "meta-llama/Llama-3.2-1B"
    assert settings.adapter.target_modules == ["q_proj", "v_proj"]
    assert (settings.method.beta1, settings.method.beta2, settings.method.learning_rate) == (0.9, 0.95, 2e-4)
    assert settings.privacy.steps == round(2 * 2000 / 8)
    assert settings.data.loss_on == "completion"
    assert (settings.run.seed, settings.run.checkpoint_every) == (1337, 200)
    assert "data.init_args.val_split_fraction" in outcome.err


BASE = {
    "model_name_or_path": "a/b",
    "dataset_name": "records.jsonl",
    "output_dir": "out",
    "learning_rate": "1e-4",
}


@pytest.mark.parametrize(
    ("more", "place", "value"),
    [
        ({"max_steps": 77, "num_train_epochs": 3}, "privacy.steps", 77),
        ({"max_steps": -1, "num_train_epochs": 1}, "privacy.steps", 250),
        ({"per_device_train_batch_size": 4000}, "privacy.expected_batch_size", 2000),
        ({"warmup_steps": 9000}, "method.warmup_steps", 30),
        ({"optim": "sgd"}, "method.name", "dp-sgd"),
        ({"optim": "adafactor"}, "method.name", "dp-adamw"),
        ({"lora_target_modules": "all-linear"}, "adapter.target_modules", "all-linear"),
        ({"lora_target_modules": "q_proj, v_proj"}, "adapter.target_modules", ["q_proj", "v_proj"]),
        ({"lora_target_modules": "q_proj"}, "adapter.target_modules", ["q_proj"]),
        ({"lora_target_modules": ".*[qv]_proj"}, "adapter.target_modules", ".*[qv]_proj"),
        ({"model_revision": "main"}, "model.revision", None),
        ({"use_rslora": True}, "adapter.use_rslora", True),
        ({"load_in_8bit": True}, "model.quantization.load_in_8bit", True),
        ({"torch_dtype": "float16"}, "model.dtype", "auto"),
        ({"fp16": True}, "model.dtype", "auto"),
        ({"lr_scheduler_type": "constant_with_warmup"}, "method.schedule", "constant"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "method.schedule", None),
        ({"learning_rate": "fast"}, "method.learning_rate", None),
        ({"learning_rate": True}, "method.learning_rate", None),
        ({"lora_r": 2.5}, "adapter.r", 8),
        ({"attn_implementation": "kernels-community/x"}, "model.attn_implementation", None),
        ({"completion_only_loss": False}, "data.loss_on", "all"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
         "model.gradient_checkpointing", "reentrant"),
    ],
)  # fmt: skip
def test_one_key(
    more: dict[str, Any], place: str, value: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Any = taken_over(capsys, {**BASE, **more})[0]
    for name in place.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_rate_that_means_something_else_is_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, outcome = taken_over(capsys, {**BASE, "optim": "sgd", "weight_decay": 0.1})
    assert (settings.method.learning_rate, settings.method.weight_decay) == (None, None)
    assert "learning_rate: it means something else in dp-sgd" in outcome.err


def test_arguments_come_before_the_other_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_base(here / "base", positions=64)
    other = jsonl(here / "other.jsonl", rows(30, text=SECRET, note=SECRET))
    settings, _ = taken_over(
        capsys, {**BASE, "max_length": 900, "dataset_text_field": "note"}, other, "--model", base
    )
    assert (settings.model.name, settings.data.path) == (str(base), str(other))
    assert settings.data.max_length == 64
    assert settings.data.text == "note"
    assert taken_over(capsys, BASE, other, "--text", "text")[0].data.text == "text"


REFUSED: dict[str, tuple[str, list[str]]] = {
    "privlora's own": (
        "model: {name: a/b}\ndata: {path: x.jsonl}\nprivacy: {steps: 3}",
        ["privlora's own groups"],
    ),
    "of no tool": ("a: 1\nb: 2", ["of no tool that is known"]),
    "no YAML": ("a: [", ["not valid YAML"]),
    "empty": ("", ["holds no settings"]),
    "a key twice": ("output_dir: a\noutput_dir: b", ["given twice"]),
    "a data set of the hub": (
        yaml.safe_dump({**BASE, "dataset_name": "trl-lib/tldr"}),
        ["no files here", "hf://"],
    ),
    "no data": ("model_name_or_path: a/b\noutput_dir: x", ["names none"]),
    "no model": ("dataset_name: records.jsonl\noutput_dir: x", ["no model is given"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_over(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = REFUSED[name]
    (here / "theirs.yaml").write_text(content)
    refuses(capsys, here, ["init", "--from", "theirs.yaml"], *words, "Fix: ")


ODD_KEYS: tuple[Any, ...] = (
    *(SECRET, "x" * 41, "a\n", "a\x1b[31m", "\u202ea", "hf_sk0000", "0a", "", "é"),
    *(1, None, True, 1.5),
)


def test_keys_that_are_no_names_are_not_shown() -> None:
    taken = Taken("TRL", {**dict.fromkeys(ODD_KEYS, 1), "x" * 40: 2})
    taken.finish({})
    assert taken.remarks() == [
        f"not known to privlora, so without effect: (a key that is no name), {'x' * 40}"
    ]
    taken.unknown = ["a" * k for k in range(1, 24)]
    assert taken.remarks()[0].endswith(f", {'a' * 20} and 3 more")


@pytest.mark.parametrize(
    "line", ["7: a", "null: a", "1.5: a", "2026-01-01: a", '"\\e[31mb": a', "? [a, b]\n: c", "? {a: b}\n: c"]
)
def test_a_key_of_any_kind_gives_no_traceback(
    line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "trl.yaml").write_text(yaml.safe_dump(BASE) + line + "\n")
    ended = call(capsys, "init", "--from", "trl.yaml", "--output", "new.yaml")
    if "?" in line:
        assert ended.code == 2
        assert "error:" in ended.err
    else:
        assert ended.code == 0, ended.err
        assert "(a key that is no name)" in ended.err
    assert "\x1b" not in ended.out + ended.err


LEAKY = (
    *(
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "learning_rate",
        "weight_decay",
        "warmup_ratio",
        "warmup_steps",
    ),
    *("max_steps", "max_length", "seed", "save_steps", "num_train_epochs", "per_device_train_batch_size"),
)


@pytest.mark.parametrize("key", LEAKY)
def test_values_that_are_not_taken_are_not_shown(
    key: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One may be a key of a service that slipped into the wrong line."""
    (here / "trl.yaml").write_text(yaml.safe_dump({**BASE, key: "hf_SECRETTOKEN"}))
    ended = call(capsys, "init", "--from", "trl.yaml", "--output", "new.yaml")
    assert "SECRETTOKEN" not in ended.out + ended.err
    assert not Path("new.yaml").exists() or "SECRETTOKEN" not in Path("new.yaml").read_text()


@pytest.mark.parametrize(
    "text",
    ["a: *sk-SECRETTOKEN", "a: !sk-SECRETTOKEN b", "SECRETTOKEN: 1\nSECRETTOKEN: 2", "hf_SECRETTOKEN: 1"],
)
def test_errors_do_not_quote_another_tools_file(
    text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "trl.yaml").write_text(yaml.safe_dump(BASE) + text)
    ended = call(capsys, "init", "--from", "trl.yaml", "--output", "new.yaml")
    assert "SECRETTOKEN" not in ended.out + ended.err


def test_trl_renders_no_texts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(here / "records.jsonl", rows(2200, prompt="Say", completion=SECRET))
    settings, outcome = taken_over(capsys, TRL, here / "records.jsonl")
    assert (settings.data.prompt, settings.data.completion) == ("prompt", "completion")
    assert settings.data.template == "none"
    assert outcome.err.count("template") == 0
    call(capsys, "init", here / "records.jsonl", "--model", "m/m", "--output", "own.yaml")
    assert load_settings(here / "own.yaml").data.template == "auto"
