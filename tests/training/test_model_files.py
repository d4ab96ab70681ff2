"""What a model's own files tell without torch agrees with what the loaded model tells; else nothing is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import PRIVACY, save_tiny_model

from privlora.config import ModelSettings, Settings, settings_from
from privlora.errors import ConfigError, ModelError, Together
from privlora.training.model_files import (
    ModelFiles,
    files_of,
    refuse_incomplete_files,
    refuse_unfit_files,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def settings_of(model: Path, data: dict[str, Any] | None = None) -> Settings:
    return settings_from(
        {
            "model": {"name": str(model)},
            "data": {"path": "(in memory)", **(data or {})},
            "privacy": PRIVACY,
        }
    )


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
    problems.of(None, refuse_unfit_files, settings_of(tmp_path, {"messages": "messages"}))
    told = str(problems.found)  # by the other files
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
