"""What a model's own files tell without torch agrees with what the loaded model tells; else nothing is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import PRIVACY, save_tiny_model
from tiny_models import FAMILIES, tiny_model

from privlora.adapters.targets import feature_sizes, find_targets
from privlora.config import AdapterSettings, ModelSettings, Settings, load_settings, settings_from
from privlora.errors import ConfigError, ModelError, Together
from privlora.training.model_checks import positions_of
from privlora.training.model_files import (
    ModelFiles,
    files_of,
    refuse_incomplete_files,
    refuse_unfit_files,
)
from privlora.training.sources import refuse_first


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_positions_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    files = ModelFiles(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert files.positions in (None, positions_of(model))
    words, linear = files.layers
    sizes = {min(feature_sizes(model.get_submodule(name)) or ()) for name in find_targets(model)}
    assert {min(each) for each in files.linear.values()} in (set(), sizes)
    if linear:
        assert all(files.may_match(re.escape(name)) for name in find_targets(model))
        assert not files.may_match(r".*\.q_prj")
    modules = {word for name, _ in model.named_modules() for word in name.split(".")}
    if linear:
        assert linear == {name.split(".")[-1] for name in find_targets(model)}
        assert linear <= words
        assert words - modules <= {"weight", "bias", "embed_out"}
    if family in ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt-neox", "gemma2"):
        assert linear
        assert files.positions == 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def settings_of(model: Path, data: dict[str, Any] | None = None, targets: Any = "all-linear") -> Settings:
    return settings_from(
        {
            "model": {"name": str(model)},
            "data": {"path": "(in memory)", **(data or {})},
            "privacy": PRIVACY,
            "adapter": {"target_modules": targets},
        }
    )


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        ({"r": 999}, "adapter.r=999 exceeds the smaller side of .*set adapter.r to at most"),
        ({"r": 999, "target_modules": ["down_proj"]}, "exceeds the smaller side of '.*down_proj'"),
        ({"r": 999, "target_modules": "feed-forward"}, "exceeds the smaller side of '.*(gate|up|down)_proj'"),
        ({"r": 2, "target_modules": "feed-forward"}, None),
        ({"r": 999, "target_modules": "auto"}, "exceeds the smaller side of '.*(gate|up|down)_proj'"),
        (
            {"r": 999, "target_modules": ["feed-forward"]},
            "exceeds the smaller side of '.*(gate|up|down)_proj'",
        ),
        ({"r": 2, "target_modules": "auto"}, None),
        ({"target_modules": "feed_forward"}, "did you mean 'feed-forward'"),
        ({"r": 999, "target_modules": ["ghost"]}, "^adapter.target_modules names 'ghost'"),
        ({"target_modules": ["q_proj,v_proj"]}, r"no module but several.*: \[q_proj, v_proj\]"),
        (
            {"target_modules": ".*ghost"},
            "adapter.target_modules names '.*ghost', which this model does not have",
        ),
        ({"r": 2, "target_modules": "model.*q_proj"}, None),
        ({"r": 2}, None),
        ({"r": 999, "layers_to_transform": [77]}, None),
        ({"r": 999, "target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, None),
    ],
)
def test_what_the_sizes_of_layers_tell(model: Path, adapter: dict[str, Any], told: str | None) -> None:
    """Without the model; what is not said here is said once it is loaded."""
    settings = settings_of(model)
    changed = settings.model_copy(update={"adapter": AdapterSettings(**adapter)})
    if told is None:
        refuse_unfit_files(changed)
        return
    with pytest.raises(ModelError, match=told):
        refuse_unfit_files(changed)


def test_they_are_told_together_and_before_torch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a file that is not there, each with its line."""
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"model: {{name: {model}}}\nprivacy: {json.dumps(PRIVACY)}\nrun: {{output: {tmp_path / 'run'}}}\ndata:\n"
        f"  path: {tmp_path}/none.jsonl\n  max_length: 999\nadapter:\n  target_modules: [q_prj, ghost, v_proj]\n"
    )
    monkeypatch.setattr(torch, "device", None)  # no tensor is made
    with pytest.raises(ConfigError) as caught:
        refuse_first(load_settings(yaml))
    assert str(caught.value).splitlines()[0] == "3 mistakes:"
    assert "data.max_length=999 (line 6) exceeds the 128 positions of the model" in str(caught.value)
    assert "adapter.target_modules (line 8) names 'q_prj', 'ghost', which" in str(caught.value)
    assert "did you mean 'q_proj'? its linear layers are down_proj, gate_proj, k_proj" in str(caught.value)
    assert "data.path (line 5): there is no file" in str(caught.value)


def test_a_default_length_gives_way(model: Path) -> None:
    refuse_unfit_files(settings_of(model))
    refuse_unfit_files(settings_of(model, {"max_length": 128}))
    with pytest.raises(ModelError, match="exceeds the 128 positions"):
        refuse_unfit_files(settings_of(model, {"max_length": 129}))


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ".*q_proj", ["self_attn.q_proj", "mlp.up_proj"], ["lm_head"], ["score", "q_proj"]],
)
def test_what_only_the_model_can_tell_is_left_to_it(targets: Any, model: Path) -> None:
    refuse_unfit_files(settings_of(model, targets=targets))


@pytest.mark.parametrize("targets", ["[", "*proj"])
def test_a_pattern_that_is_none_is_told_before_torch(targets: str, model: Path) -> None:
    with pytest.raises(
        ModelError, match=r"is no regular expression.*a pattern of whole module names such as '\.\*proj'"
    ):
        refuse_unfit_files(settings_of(model, targets=targets))


def test_a_chat_needs_a_template(model: Path, tmp_path: Path) -> None:
    chats = {"messages": "messages"}
    with pytest.raises(ConfigError, match="no chat template"):
        refuse_unfit_files(settings_of(model, chats))
    with pytest.raises(ConfigError, match="no chat template"):
        refuse_unfit_files(settings_of(model, {"chosen": "a", "rejected": "b"}))
    refuse_unfit_files(settings_of(model, {"chosen": "a", "rejected": "b", "prompt": "c"}))
    refuse_unfit_files(settings_of(model, chats), own_template=False)
    refuse_unfit_files(settings_of(model, {**chats, "chat_template": "{{ messages[0].content }}"}))
    refuse_unfit_files(settings_of(save_tiny_model(tmp_path, chat=True), chats))


ROPES: list[dict[str, Any]] = [
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
    {"original_max_position_embeddings": 32},
    {"text_config": {"max_position_embeddings": 512}},
    {"rope_scaling": "odd"},
]


@pytest.mark.parametrize("more", ROPES)
def test_positions_of_which_more_than_one_number_speaks(more: dict[str, Any]) -> None:
    plain = {"model_type": "llama", "max_position_embeddings": 64}
    assert ModelFiles(Path(), plain).positions == 64
    assert ModelFiles(Path(), {**plain, "rope_scaling": None}).positions == 64
    assert ModelFiles(Path(), {**plain, **more}).positions is None


@pytest.mark.parametrize("config", [{"model_type": "mixtral"}, {"quantization_config": {}}])
def test_layers_that_are_renamed_while_they_are_loaded(
    config: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    for each in model.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, **config}))
    refuse_unfit_files(settings_of(tmp_path, targets=["ghost"]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 8),
        ("model.safetensors", b"\x05" + b"\0" * 7 + b"[[1]]"),
        ("model.safetensors", b"\x09" + b"\0" * 7 + b'{"a": {}}'),
        ("tokenizer_config.json", b"[]"),
    ],
)
def test_files_that_cannot_be_read_are_left_to_who_loads_them(
    name: str, content: bytes, model: Path, tmp_path: Path
) -> None:
    for each in model.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / name).write_bytes(content)
    problems = Together()
    problems.of(None, refuse_unfit_files, settings_of(tmp_path, {"messages": "messages"}, ["ghost"]))
    told = str(problems.found)  # by the other files
    assert ("ghost" in told) == (name == "tokenizer_config.json")
    assert ("template" in told) == (name == "model.safetensors")


def copied(model: Path, folder: Path) -> Path:
    for each in model.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    return folder


def test_files_that_lack_or_are_cut_short_are_told_together(model: Path, tmp_path: Path) -> None:
    weights, tokenizer = copied(model, tmp_path) / "model.safetensors", tmp_path / "tokenizer.json"
    refuse_unfit_files(settings_of(tmp_path))
    whole = weights.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for cut in (len(whole) - 1, header, header - 1, 8, 3, 0):
        weights.write_bytes(whole[:cut])
        with pytest.raises(
            ModelError, match=r"model\.safetensors' is cut short or damaged\. Fix: copy it again"
        ):
            refuse_incomplete_files(settings_of(tmp_path).model)
    tokenizer.unlink()
    with pytest.raises(ModelError) as caught:
        refuse_unfit_files(settings_of(tmp_path))
    assert "it has no tokenizer.json (nor other tokenizer files)" in str(caught.value)
    assert "cut short" in str(caught.value)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    with pytest.raises(ModelError, match=r"a pointer of git LFS.*`git lfs pull`"):
        refuse_unfit_files(settings_of(tmp_path))


def test_weights_in_parts_are_those_of_the_index(model: Path, tmp_path: Path) -> None:
    whole = copied(model, tmp_path) / "model.safetensors"
    part, other = tmp_path / "model-1.safetensors", tmp_path / "consolidated.safetensors"
    part.write_bytes(whole.read_bytes()[:-1])
    other.write_bytes(b"of another program")
    refuse_incomplete_files(settings_of(tmp_path).model)  # neither is read
    whole.unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": part.name, "b": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-1\.safetensors' is cut short"):
        refuse_incomplete_files(settings_of(tmp_path).model)
    index.write_text("[]")
    refuse_incomplete_files(settings_of(tmp_path).model)


@pytest.mark.parametrize(
    ("name", "content", "there"),
    [
        ("tokenizer.model", "", True),
        ("vocab.txt", "", True),
        ("tokenizer_config.json", '{"tokenizer_class": "ByT5Tokenizer"}', True),
        ("tokenizer_config.json", '{"auto_map": {}}', True),
        ("tokenizer_config.json", "[]", False),
        ("chat_template.jinja", "", False),
    ],
)
def test_what_makes_a_tokenizer(name: str, content: str, there: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert ModelFiles(tmp_path, {}).lacks_a_tokenizer is not there


def test_a_model_that_is_nowhere() -> None:
    settings = settings_of(Path("nobody/nothing"))
    assert files_of(settings.model) is None
    refuse_unfit_files(settings)
    for name in ("~nobody-of-that-name/model", "a" * 9999):
        refuse_incomplete_files(ModelSettings(name=name))
