"""What is refused before the weights are loaded, without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import PRIVACY, record, save_tiny_model
from tiny_models import tiny_tokenizer

from privlora.config import IN_MEMORY, Settings, settings_from
from privlora.errors import DataError, PrivacyError, PrivloraError
from privlora.training import models
from privlora.training.inputs import load_all
from privlora.training.models import look_at_model
from privlora.training.preflight import preflight

RECORDS = [record(number) for number in range(20)]
SHARED = [{"text": "a text of nobody"}, {"text": RECORDS[7]["text"]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(models, "_from_files", loaded)


def written(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return str(path)


def read(settings: Settings, tokenizer: Any = None, records: Any = None, evaluation: Any = None) -> None:
    """What a run does before it loads the weights."""
    ready, _, own = look_at_model(settings, tokenizer)
    load_all(ready, own, records, evaluation)


def run_of(model: Path, data: dict[str, Any], **groups: Any) -> Settings:
    return settings_from(
        {"model": {"name": str(model)}, "data": {"max_length": 48, **data}, "privacy": PRIVACY, **groups}
    )


@pytest.mark.parametrize("where", ["evaluation", "public_text", "file"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_public_records_that_are_private_ones(
    where: str, in_memory: bool, model: Path, tmp_path: Path
) -> None:
    private, public = written(tmp_path / "a.jsonl", RECORDS), written(tmp_path / "b.jsonl", SHARED)
    groups: dict[str, Any] = {}
    if where == "public_text":
        groups["adapter"] = {"init": "public-gradient", "public_text": public}
    if where == "file":
        groups |= {"auto": {"file": public}, "method": {"learning_rate": "auto"}}
    data = {"path": private} | ({"evaluation": public} if where == "evaluation" else {})
    given: dict[str, Any] = {"records": RECORDS} if in_memory else {}
    if in_memory and where == "evaluation":
        given["evaluation"] = SHARED
    with pytest.raises(PrivacyError, match="are the same as private ones in text") as caught:
        read(run_of(model, data, **groups), None, **given)
    assert RECORDS[7]["text"] not in str(caught.value)


def test_records_of_a_task_are_compared_as_the_task_shows_them(model: Path, tmp_path: Path) -> None:
    rows = [{"sentence": f"a film of {number}", "label": number % 2} for number in range(20)]
    data = {"task": "sst2", "evaluation": written(tmp_path / "b.jsonl", [rows[3]])}
    with pytest.raises(PrivacyError, match="evaluation"):
        read(run_of(model, {**data, "path": written(tmp_path / "a.jsonl", rows)}), None)


def test_texts_in_a_list_are_records_too(model: Path, tmp_path: Path) -> None:
    """Also where one of them holds the name of a column."""
    texts = ["a text of nobody", "text of somebody", RECORDS[7]["text"]]
    settings = run_of(model, {"path": "(in memory)", "evaluation": "(in memory)"})
    with pytest.raises(PrivacyError, match="are the same as private ones in text"):
        read(settings, None, [each["text"] for each in RECORDS], texts)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["a.jsonl", "a.json", "a list"])
def test_a_chat_template_that_refuses_is_told_by_its_name_and_lines(
    kind: str, own: bool, model: Path, tmp_path: Path
) -> None:
    """Also where it refuses late records alone, and of a JSON list, which is read as a whole."""
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception(messages[0].content) }}{% endif %}{{ messages }}"
    chats = [
        {"chat": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]}
        for _ in range(90)
    ]
    for late in (70, 80):
        chats[late]["chat"].insert(0, {"role": "system", "content": "Zanzibar"})
    path = tmp_path / kind
    if kind == "a.json":
        path.write_text(json.dumps(chats))
    elif kind == "a.jsonl":
        written(path, chats)
    data = {"path": str(path) if kind != "a list" else IN_MEMORY, "messages": "chat"}
    tokenizer = tiny_tokenizer()
    if own:
        data["chat_template"] = refuses
    else:
        tokenizer.chat_template = refuses
    with pytest.raises(DataError) as caught:
        read(run_of(model, data), tokenizer, chats if kind == "a list" else None)
    whose = "data.chat_template" if own else "the tokenizer's chat template"
    place = {"a.jsonl": "lines", "a.json": "items", "a list": "records"}[kind]
    assert f"{place} 71, 81: {whose} refuses these messages" in str(caught.value)
    assert "Zanzibar" not in str(caught.value)
    assert "or give another template as data.chat_template" in str(caught.value)


def test_a_run_without_privacy_has_nothing_to_compare(model: Path, tmp_path: Path) -> None:
    data = {
        "path": written(tmp_path / "a.jsonl", RECORDS),
        "evaluation": written(tmp_path / "b.jsonl", SHARED),
    }
    privacy = {**PRIVACY, "private": False, "noise_multiplier": None}
    read(
        run_of(model, data).model_copy(update={"privacy": run_of(model, data, privacy=privacy).privacy}), None
    )


def test_a_length_that_leaves_no_answer(model: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(DataError, match=r"data\.max_length=4"):
        read(run_of(model, {"path": path, "max_length": 4}), None)
    asked = {
        "path": path,
        "prompt": "{text}",
        "completion": "patient",
        "max_length": 2,
        "loss_on": "completion",
    }
    with pytest.raises(PrivloraError, match=r"data\.max_length=2"):
        read(run_of(model, asked), None)


def broken_at(path: Path, line: int) -> str:
    """A file of records with one line that is none."""
    written(path, RECORDS)
    lines = path.read_text().splitlines()
    lines[line - 1] = '{"text": "Ada of Mainz" and more}'
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("where", ["public_text", "auto", "synthesis"])
def test_every_file_that_a_run_reads_is_read_to_its_end(where: str, model: Path, tmp_path: Path) -> None:
    data, broken = {"path": broken_at(tmp_path / "a.jsonl", 19)}, broken_at(tmp_path / "b.jsonl", 20)
    groups: dict[str, Any] = {
        "public_text": {"adapter": {"init": "public-gradient", "public_text": broken}},
        "auto": {"auto": {"file": broken}, "method": {"learning_rate": "auto"}},
        "synthesis": {"synthesis": {"file": broken}, "method": {"name": "prism-span"}},
    }[where]
    run = {"output": str(tmp_path / "run")}
    with pytest.raises(DataError) as caught:
        read(run_of(model, data, run=run, **groups))
    for words in ("a.jsonl, line 19: this is not JSON", "b.jsonl, line 20: this is not JSON"):
        assert words in str(caught.value)


def test_what_a_run_does_not_read_may_be_broken(model: Path, tmp_path: Path) -> None:
    """Where records in memory are given instead."""
    broken = broken_at(tmp_path / "a.jsonl", 20)
    read(run_of(model, {"path": broken}), records=RECORDS)
    with pytest.raises(DataError, match="line 20"):
        read(run_of(model, {"path": broken}))


def test_a_folder_that_can_be_written_is_left_as_it_was(model: Path, tmp_path: Path) -> None:
    settings = run_of(model, {"path": "(in memory)"}, run={"output": str(tmp_path / "far" / "run")})
    preflight(settings, RECORDS)
    assert not list(tmp_path.iterdir())
    (tmp_path / "far").symlink_to(tmp_path / "nowhere")
    with pytest.raises(PrivloraError, match=r"cannot create .*No such file.*set run\.output to a writable"):
        preflight(settings, RECORDS)
