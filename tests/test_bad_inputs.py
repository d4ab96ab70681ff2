"""Whatever is wrong with an input: one line says so, exit code 2, no traceback, and no file is changed."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import yaml
from cli_cases import (
    EVALUATING,
    Outcome,
    call,
    check,
    record,
    refuses,
    run_settings,
    save_tiny_model,
    tree,
    write_config,
    write_records,
)
from transformers import AutoModelForCausalLM, T5Config

import privlora
from privlora.accounting import read_ledger
from privlora.config import settings_from
from privlora.errors import DataError, PrivloraError, named
from privlora.training import model_names
from privlora.training.files import RunFolder

Groups = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a run that went well, beside its records."""
    from privlora.cli import main

    folder = tmp_path_factory.mktemp("finished")
    write_records(folder / "records.jsonl")
    assert main(["train", str(write_config(folder, run_settings(model, folder)))]) == 0
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with good records, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    write_records(tmp_path / "records.jsonl")
    return tmp_path


def refuses_settings(
    capsys: pytest.CaptureFixture[str], folder: Path, settings: Groups, *words: str, quiet: bool = True
) -> None:
    refuses(capsys, folder, ["train", write_config(folder, settings)], *words, quiet=quiet)


SETTINGS: dict[str, tuple[Groups, str]] = {
    "unknown group": ({"privcy": {"steps": 3}}, "did you mean 'privacy'?"),
    "unknown setting": ({"privacy": {"clipnorm": 1}}, "did you mean 'clip_norm'?"),
    "two noise settings": ({"privacy": {"target_epsilon": 3}}, "exactly one of target_epsilon"),
    "no noise setting": ({"privacy": {"noise_multiplier": None}}, "exactly one of target_epsilon"),
    "no privacy with noise": ({"privacy": {"private": False}}, "private=false contradicts noise_multiplier"),
    "no delta": ({"privacy": {"delta": None}}, "delta is missing"),
    "delta is 1/N": ({"privacy": {"delta": 0.025}}, "not below 1/N = 0.025"),
    "delta is no number": ({"privacy": {"delta": "small"}}, "privacy.delta=(text, not shown"),
    "delta above 1": ({"privacy": {"delta": 1.5}}, "privacy.delta=1.5"),
    "no public size": ({"privacy": {"public_dataset_size": None}}, "public_dataset_size is missing"),
    "three sampling settings": ({"privacy": {"sample_rate": 0.1}}, "give two of the three"),
    "no sampling setting": ({"privacy": {"expected_batch_size": None}}, "expected_batch_size or sample_rate"),
    "batch above N": ({"privacy": {"expected_batch_size": 41}}, "exceeds public_dataset_size=40"),
    "sampling above 1": ({"privacy": {"sample_rate": 2, "expected_batch_size": None}}, "sample_rate=2"),
    "cap without N": (
        {"privacy": {"max_batch_size": 9, "sample_rate": 0.1, "public_dataset_size": None}},
        "max_batch_size needs public_dataset_size",
    ),
    "cap below the mean": ({"privacy": {"max_batch_size": 3}}, "max_batch_size=3"),
    "users without a column": ({"privacy": {"unit": "user"}}, "unit=user and user_column"),
    "column without users": ({"privacy": {"user_column": "patient"}}, "unit=user and user_column"),
    "zero steps": ({"privacy": {"steps": 0}}, "privacy.steps=0"),
    "clipping is a truth value": ({"privacy": {"clip_norm": True}}, "clip_norm=true"),
    "infinite noise": ({"privacy": {"noise_multiplier": float("inf")}}, "privacy.noise_multiplier=inf"),
    "two forms of records": ({"data": {"text": "text", "messages": "messages"}}, "only one of"),
    "prompt alone": ({"data": {"prompt": "question"}}, "prompt and completion go together"),
    "no data": ({"data": {"path": None}}, "data.path is missing"),
    "no model": ({"model": {"name": None}}, "model.name is missing"),
    "list for a group": ({"run": None}, "'run'"),
    "long warm-up": (
        {"method": {"warmup_steps": 4}},
        "method.warmup_steps=4 exceeds privacy.steps=3 (lines ",
    ),
    "double braces": ({"data": {"text": "{{ text }}"}}, "Fix: name one in single braces"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups, word = SETTINGS[name]
    if groups == {"run": None}:
        settings: Groups = {**run_settings(model, folder), "run": ["output"]}
    else:
        settings = run_settings(model, folder, **groups)
    refuses_settings(capsys, folder, settings, word)
    refuses(capsys, folder, ["plan", folder / "run.yaml"], word)


def test_evaluation_on_the_private_records(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"evaluation": [f"{folder}/./records.jsonl"]}
    refuses_settings(capsys, folder, run_settings(model, folder, data=data), "would be published")


OVERRIDES = {
    "privacy.steps": "group.key=value",
    "steps=4": "Fix: write privacy.steps=4 (group.key=value)",
    "privacy.stepps=3": "did you mean 'steps'?",
    "modl.name=x": "did you mean 'model'?",
    "privacy.steps=[1": "not valid YAML",
    "model.name=3": "model.name=3",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides(override: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(folder, run_settings(model, folder))
    refuses(capsys, folder, ["train", config, override], OVERRIDES[override])


FILES = {
    "nothing": (b"", "holds no settings"),
    "a list": (b"- model\n- data\n", "holds no settings"),
    "not YAML": (b"model: {name: x\nprivacy: ]", "is not valid YAML"),
    "a record for a key": (b"patient Greta: has it\npatient Greta: again\n", "line 2 is not valid YAML"),
    "not text": (b"\xff\xfe\x00model", "cannot read"),
    "an empty group": (b"model:\nprivacy: {steps: 3}\n", "'model' (line 1) must be a group of settings"),
    "a key twice": (b"privacy:\n  clip_norm: 1\n  clip_norm: 9\n", "line 3 is not valid YAML (clip_norm"),
    "a colon too few": (b"model:\n  name: x\n\ndata\n  # of notes\n  path: x\n", "line 4 or 5 is not valid"),
    "a dialogue": (b"Zqkarim: hello\nDoctor: hi\nZqkarim: ill\n", "line 3 is not valid YAML (a key is given"),
    "a day that no month has": (b"run:\n  label: 2024-13-45\n", "line 2 is not valid YAML"),
    "no number": (b"run:\n  seed: !!int Zqsec\n", "line 2 is not valid YAML"),
    "an alias of nothing": (b"a: *Zqsecret\n", "line 1 holds an alias"),
    "a tag": (b"a: !Zq'sec'ret x\n", "line 1 is not valid YAML"),
    "an alias": (b"a: &x [Zq]\nb:\n  c: *x\n", "line 3 holds an alias"),
    "lists in lists": (b"a:\n  " + b"[" * 9999, "line 2 holds more than 20 lists and mappings"),
    "mappings in mappings": (b"".join(b" " * n + b"a:\n" for n in range(99)), "line 20 holds more than 20"),
    "many values": (b"a:\n  [" + b"1," * 60_000 + b"]\n", "line 2 holds more than 50000 values"),
    "a long value": (b"a:\n  " + b"1:59" * 30_000, "line 2 holds a value of more than 50000 characters"),
    "a long text": (b"#" * 1_000_001, "holds more than 1000000 characters"),
    "a Python object": (b"model: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_settings(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, word = FILES[name]
    (folder / "run.yaml").write_bytes(content)
    refuses(capsys, folder, ["train", folder / "run.yaml"], word)
    assert "Zq" not in call(capsys, "train", folder / "run.yaml").err


def test_a_value_of_the_command_line_that_yaml_cannot_read(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(folder, run_settings(model, folder))
    for value in ("2024-13-45", "!!int Zqsec", "*Zq"):
        refuses(capsys, folder, ["train", config, f"run.label={value}"], "is not valid YAML. Fix: put quotes")


def test_no_file_of_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(capsys, folder, ["train", folder / "none.yaml"], "cannot read")
    refuses(capsys, folder, ["plan", folder], "cannot read")


RECORDS: dict[str, tuple[str, bytes, Groups, str]] = {
    "empty": ("a.jsonl", b"", {}, "no records"),
    "blank lines": ("a.txt", b"\n \n", {}, "no records"),
    "bad JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, "line 2"),
    "a JSON list by lines": ("a.jsonl", b'[\n{"text": "x"}\n', {}, "no JSON list of objects, from line 3 on"),
    "no objects": ("a.jsonl", b"[1, 2]\n", {}, "not an object"),
    "JSON that is no list": ("a.json", b'{"text": "x"}', {}, "no JSON list of objects"),
    "not UTF-8": ("a.jsonl", b'{"text": "\xff"}\n', {}, "not UTF-8"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:40], {}, "not a whole gzip"),
    "no Parquet": ("a.parquet", b"PAR1", {}, "not a readable Parquet"),
    "uneven CSV": ("a.csv", b"text,patient\nx\n", {}, "line 2"),
    "unknown ending": ("a.dat", b"x", {}, "does not say what it is"),
    "no such column": ("a.jsonl", b'{"note": "x"}\n', {}, "no column 'text'"),
    "misspelt column": ("a.jsonl", b'{"note": "x"}\n', {"data": {"text": "nte"}}, "did you mean 'note'?"),
    "not text in it": ("a.jsonl", b'{"text": 7}\n', {}, "holds int, not text"),
    "bad format": ("a.jsonl", b'{"text": "x"}\n', {"data": {"text": "{text!r}"}}, "plain {column}"),
    "no user": (
        "a.jsonl",
        b'{"text": "x", "user": ""}\n',
        {"privacy": {"unit": "user", "user_column": "user"}},
        "names no unit",
    ),
    "bad messages": (
        "a.jsonl",
        b'{"messages": "hello"}\n',
        {"data": {"messages": "messages"}},
        "chat template",
    ),
    "too many for the cap": (
        "a.txt",
        b"note\n" * 41,
        {"privacy": {"max_batch_size": 9}},
        "more privacy units than dataset_size=40",
    ),
    "delta above the true 1/N": (
        "a.txt",
        b"note\n" * 20,
        {"privacy": {"public_dataset_size": None, "sample_rate": 0.1, "delta": 0.1}},
        "not below 1 / number of units",
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, content, groups, word = RECORDS[name]
    (folder / file).write_bytes(content)
    groups = {**groups, "data": {**groups.get("data", {}), "path": str(folder / file)}}
    refuses_settings(capsys, folder, run_settings(model, folder, **groups), word, quiet=False)


COLUMNS: dict[str, tuple[Groups, str]] = {
    "a format": ({"data": {"text": "{text} {body}"}}, "no column 'body'"),
    "an answer": ({"data": {"prompt": "question", "completion": "anser"}}, "did you mean 'answer'?"),
    "chats": ({"data": {"messages": "chats"}}, "no column 'chats'"),
    "a label": ({"data": {"text": "text", "label": "team", "labels": 2}}, "no column 'team'"),
    "the second text of a pair": (
        {"data": {"text": "text", "text_pair": "other", "label": "patient", "labels": 2}},
        "no column 'other'",
    ),
    "the worse answer": (
        {"data": {"prompt": "question", "chosen": "answer", "rejected": "bad"}},
        "column 'bad'",
    ),
    "users": ({"privacy": {"unit": "user", "user_column": "patent"}}, "did you mean 'patient'?"),
    "a task": ({"data": {"task": "sst2"}}, "no column 'label'"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_the_first_record_lacks(
    name: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before a model is loaded, and before a micro-batch's memory is measured."""
    groups, word = COLUMNS[name]
    settings = run_settings(model, folder, **groups)
    refuses_settings(capsys, folder, settings, word)
    with pytest.raises(DataError, match="no column"):
        privlora.train_run(settings_from(settings, source="test"), model=torch.nn.Linear(1, 1))


def test_a_plan_looks_at_no_record(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = run_settings(model, folder, data={"text": "none"})
    ended = call(capsys, "plan", write_config(folder, settings))
    assert ended.code == 0
    assert "no column" not in ended.out + ended.err


MISSING = {
    "missing.jsonl": "there is no file missing.jsonl",
    "./missing": "is no local file",
    ".": "is not a file",
    "org/name:train": "a hub dataset is written hf://name:split",
    "hf://no-such-org/no-such-data:train": "the hub dataset no-such-org/no-such-data",
}


@pytest.mark.parametrize("path", MISSING)
def test_records_that_are_not_there(
    path: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = run_settings(model, folder, data={"path": path})
    refuses_settings(capsys, folder, settings, MISSING[path], quiet=False)


MODULES: dict[str, tuple[Groups, str]] = {
    "unknown target": ({"target_modules": ["q_prj"]}, "did you mean 'q_proj'?"),
    "unmatched expression": ({"target_modules": "q_proj,v_proj"}, "names 'q_proj,v_proj'"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "not a linear layer"),
    "output layer": ({"target_modules": ["lm_head"]}, "cannot be adapted"),
    "everything excluded": ({"layers_to_transform": [7]}, "no module is left"),
    "rank": ({"r": 17}, "exceeds the smaller side"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, word = MODULES[name]
    refuses_settings(capsys, folder, run_settings(model, folder, adapter=adapter), word, quiet=False)
    refuses(capsys, folder, ["plan", folder / "run.yaml"], word)


def _truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _garble(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"not tensors at all")


MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "cannot load model"),
    "no configuration": (lambda model: (model / "config.json").unlink(), "cannot load model"),
    "bad configuration": (lambda model: (model / "config.json").write_text("{"), "cannot load model"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "cannot load model"),
    "half the weights": (_truncate, "model.safetensors' is cut short or damaged"),
    "no safetensors": (_garble, "model.safetensors' is cut short or damaged"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "it has no tokenizer.json"),
    "half a tokenizer": (lambda model: (model / "tokenizer.json").write_text("{"), "its tokenizer: "),
    "float16": (lambda model: save_tiny_model(model, dtype=torch.float16), "float16"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, word = MODELS[name]
    spoilt = Path(shutil.copytree(model, folder / "model"))
    spoil(spoilt)
    refuses_settings(capsys, folder, run_settings(spoilt, folder), word, quiet=False)
    assert "did you mean the folder" not in call(capsys, "train", folder / "run.yaml").err


def test_folders_that_are_no_models(
    model: Path, finished: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "hub").mkdir()
    shutil.copytree(model, folder / "hub" / "llama")
    run, base = finished / "run", named(model.name)
    adapter = Path(shutil.copytree(run / "release", folder / "adapter", ignore=lambda *_: ["ledger.jsonl"]))
    for place, words in (
        (run, ["it is a run of privlora. Fix: name its base model", "--merge`", f"`privlora resume {run}`"]),
        (run / "release", ["holds an adapter already"]),
        (adapter, [f"holds an adapter already, of {base}", f"set adapter.init={adapter}"]),
        (folder, ["there is no config.json in it"]),
        (folder / "hub", [f"there is no config.json in it. Fix: did you mean '{folder}/hub/llama'?"]),
    ):
        refuses_settings(capsys, folder, run_settings(place, folder), "cannot load model", *words)
        refuses(capsys, folder, ["plan", folder / "run.yaml"], *words)
        refuses(
            capsys,
            folder,
            ["init", folder / "records.jsonl", "--model", place, "--output", folder / "x.yaml"],
            words[0],
        )


def test_a_misspelt_model_where_no_hub_can_be_reached(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: loaders ask a hub that is not there for a minute."""
    shutil.copytree(model, folder / "tinyllama")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_names, "getproxies", dict)
    asked = list[str]()

    def unknown(host: str, *_: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    settings = run_settings(Path("tinylama"), folder)
    words = ["it is no local folder", "the hub (huggingface.co) cannot be reached", "the folder 'tinyllama'?"]
    refuses_settings(capsys, folder, settings, *words)
    assert asked == ["huggingface.co"]
    refuses(capsys, folder, ["plan", "run.yaml"], *words)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refuses(capsys, folder, ["plan", "run.yaml"], "HF_HUB_OFFLINE is set", words[-1])
    assert len(asked) == 2


def test_an_encoder_with_a_decoder_is_refused_as_such(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(model, folder / "t5"))
    T5Config(vocab_size=512, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8).save_pretrained(copy)
    words = ["it is an encoder with a decoder (t5). Fix: use a decoder-only model"]
    refuses_settings(capsys, folder, run_settings(copy, folder), *words)
    refuses(capsys, folder, ["plan", folder / "run.yaml"], *words)
    init = ["init", folder / "records.jsonl", "--model", copy, "--output", folder / "x.yaml"]
    refuses(capsys, folder, init, *words)


def test_what_a_plan_sees_of_a_model(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = run_settings(model, folder, data={"max_length": 129})
    small = Path(shutil.copytree(model, folder / "model"))
    spoilt = AutoModelForCausalLM.from_pretrained(small)
    spoilt.resize_token_embeddings(200)
    spoilt.save_pretrained(small)
    for settings, word in (
        (long, "data.max_length=129 exceeds the 128 positions"),
        (run_settings(small, folder), "the model knows only those below 200"),
    ):
        refuses_settings(capsys, folder, settings, word, quiet=False)
        refuses(capsys, folder, ["plan", folder / "run.yaml"], word)


@pytest.mark.parametrize("device", ["gpu", "mps:0", "cuda:99"])
def test_devices(device: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = run_settings(model, folder, model={"device": device})
    refuses_settings(capsys, folder, settings, f"model.device='{device}'", quiet=False)


def test_an_output_that_is_taken(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = ["holds a run already, and that is finished", f"its results are in {finished}/run/release"]
    refuses(capsys, finished, ["train", finished / "run.yaml"], *over, "set run.output to another folder")
    assert "privlora resume" not in call(capsys, "train", finished / "run.yaml").err


def test_an_output_below_a_file(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = run_settings(model, folder, run={"output": str(folder / "records.jsonl" / "run")})
    refuses_settings(capsys, folder, settings, "Not a directory")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_an_output_that_cannot_be_made(
    code: int, model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(folder, run_settings(model, folder))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    refuses(capsys, folder, ["train", config], "cannot create", os.strerror(code))


class _FullDisk:
    """Stands in for a function of `os`; after ``writes`` calls it fails as a full disk does."""

    def __init__(self, real: Callable[..., Any], writes: int) -> None:
        self.real, self.left = real, writes

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.real(*args)


@pytest.mark.parametrize(("function", "writes"), [("write", 0), ("write", 2), ("replace", 0), ("replace", 1)])
def test_a_disk_that_is_full(
    function: str,
    writes: int,
    model: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run stops in one line; with space again it goes on, and never charges more than planned."""
    config = write_config(folder, run_settings(model, folder))
    run = folder / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, function, _FullDisk(getattr(os, function), writes))
        check(call(capsys, "train", config), "No space left on device")
    assert not list(run.rglob("*-tmp"))
    started = RunFolder(run).settings.exists()
    again = call(capsys, "resume", run) if started else call(capsys, "train", config)
    assert again.code == 0, again.err
    ledger = read_ledger(run / "release" / "ledger.jsonl")
    assert ledger.closed
    assert ledger.charges == 3


CALIBRATE = {
    "--epsilon 1e9 --delta 1e-5 --sample-rate 0.01 --steps 10": "between 0.001 and 500",
    "--epsilon nan --delta 1e-5 --sample-rate 0.01 --steps 10": "target_epsilon=nan",
    "--epsilon 3 --delta 0 --sample-rate 0.01 --steps 10": "delta=0.0: ",
    "--epsilon 3 --delta 1e-5 --sample-rate 2 --steps 10": "sample_rate=2.0: ",
    "--epsilon 3 --delta 1e-5 --sample-rate 0.01 --steps 0": "steps=0: ",
    "--epsilon 3 --delta 1e-5 --steps 10": "exactly one of --sample-rate",
    "--epsilon 3 --delta 0.1 --steps 10 --expected-batch-size 4 --public-dataset-size 40": "1/N = 0.025",
    "--epsilon three --delta 1e-5 --sample-rate 0.01 --steps 10": "target_epsilon='three': ",
    "--epsilon 3 --delta 1e-5 --sample-rate 0.01": "--steps",
}


@pytest.mark.parametrize("options", CALIBRATE)
def test_calibrate(options: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(capsys, folder, ["calibrate", *options.split()], CALIBRATE[options])


def _lower_the_noise(lines: list[str]) -> list[str]:
    return [lines[0].replace('"steps": 3', '"steps": 9'), *lines[1:]]


LEDGERS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "edited": (_lower_the_noise, "line 2 is not what was written"),
    "a charge removed": (lambda lines: lines[:1] + lines[2:], "line 2 is not what was written"),
    "a charge repeated": (lambda lines: [*lines[:2], *lines[1:]], "line 3 is not what was written"),
    "no JSON": (lambda _: ["hello\n"], "line 1 is not what was written"),
    "empty": (lambda _: [], "no complete first line"),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers(name: str, finished: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, word = LEDGERS[name]
    run = Path(shutil.copytree(finished / "run", folder / "run"))
    ledger = run / "release" / "ledger.jsonl"
    ledger.write_text("".join(change(ledger.read_text().splitlines(keepends=True))))
    refuses(capsys, folder, ["budget", run], word)
    refuses(capsys, folder, ["budget", finished / "run", ledger], word)
    refuses(capsys, folder, ["resume", run], "shows 0 releases" if name == "empty" else word, quiet=False)


def test_budgets(finished: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished / "run"
    refuses(capsys, folder, ["budget", folder / "none.jsonl"], "cannot be read")
    refuses(capsys, folder, ["budget", folder], "cannot be read")
    refuses(capsys, folder, ["budget", run, "--delta", "1"], "delta=1.0")
    refuses(capsys, folder, ["budget"], "LEDGER")


def test_resuming(finished: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(capsys, folder, ["resume", folder], "no run in")
    refuses(capsys, folder, ["resume", folder / "none"], "no run in")
    unfinished = Path(shutil.copytree(finished / "run", folder / "a run"))
    settings = RunFolder(unfinished).settings
    before = settings.read_text()
    for moved, more in ((["path"], ""), (["path", "evaluation"], " --evaluation FILE")):
        edited = yaml.safe_load(before)
        edited["data"].update({name: str(folder / f"no-{name}.jsonl") for name in moved})
        settings.write_text(yaml.safe_dump(edited))
        words = [
            "no-path.jsonl",
            f"`privlora resume '{unfinished}' --data FILE{more}`, or in Python resume_run(",
        ]
        refuses(capsys, folder, ["resume", unfinished], *words, quiet=False)
    settings.write_text(before)
    checkpoint = unfinished / "private" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:50])
    outcome = call(capsys, "resume", unfinished)
    check(outcome, "checkpoint", "is damaged")


def test_evaluating(finished: Path, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = finished / "run", folder / "records.jsonl"
    refuses(capsys, folder, ["evaluate", run], "--data")
    refuses(capsys, folder, ["evaluate", run, "--data", folder / "none.jsonl"], "there is no file")
    refuses(capsys, folder, ["evaluate", folder, "--data", data], "cannot load model")
    refuses(capsys, folder, ["evaluate", model, "--data", data, "--base", model], "there is no adapter")
    refuses(capsys, folder, ["evaluate", model, "--data", data, "--text", "note"], "no column 'note'")
    refuses(capsys, folder, ["evaluate", model, "--data", data, "--max-length", 1], "max_length=1")
    spoilt = Path(shutil.copytree(run / "release", folder / "adapter"))
    (spoilt / "adapter_model.safetensors").write_bytes(b"nonsense")
    refuses(capsys, folder, ["evaluate", spoilt, "--data", data], "a folder of the machine that trained")
    refuses(
        capsys,
        folder,
        ["evaluate", spoilt, "--data", data, "--base", model],
        "does not load on this base model",
        said=EVALUATING,
    )
    (spoilt / "adapter_config.json").write_text("{}")
    refuses(capsys, folder, ["evaluate", spoilt, "--data", data], "cannot be read")


def test_exporting(finished: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, new = finished / "run", folder / "new"
    refuses(capsys, folder, ["export"], "RUN, OUT and one of --merge and --as-lora are missing")
    refuses(capsys, folder, ["export", run, new], "one of --merge and --as-lora is missing")
    refuses(capsys, folder, ["export", run, new, "--merge", "--as-lora"], "are both given")
    refuses(capsys, folder, ["export", run, "--output", folder, "--as-lora"], "exists already")
    refuses(capsys, folder, ["export", folder, new, "--as-lora"], "no run in")
    refuses(capsys, folder, ["export", run, folder / "records.jsonl" / "new", "--as-lora"], "cannot write")
    spoilt = Path(shutil.copytree(run, folder / "run"))
    (spoilt / "release" / "adapter_model.safetensors").write_bytes(b"nonsense")
    refuses(capsys, folder, ["export", spoilt, new, "--merge"], "is not as the run wrote it")
    (spoilt / "release" / "adapter_model.safetensors").unlink()
    refuses(capsys, folder, ["export", spoilt, new, "--merge"], "is not finished")


@pytest.mark.parametrize(
    "line",
    ["trian", "train none.yaml", "calibrate --epsilon 3 --delta 1e-5 --steps 3", "plan . privacy.steps=0"],
)
def test_a_process_of_its_own(line: str, folder: Path) -> None:
    before = tree(folder)
    command = [sys.executable, "-m", "privlora.cli", *line.split()]
    environment = {**os.environ, "PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=120
    )
    check(Outcome(ended.returncode, ended.stdout, ended.stderr))
    assert ended.stderr.count("\n") == 1
    assert tree(folder) == before


def test_errors_never_quote_a_record(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "the code is 481502"
    lines = [json.dumps(record(0)), f'{{"text": "{secret}"', json.dumps({"text": [secret]})]
    for name, content in (("a.jsonl", "\n".join(lines[:2])), ("b.jsonl", lines[2]), ("c.jsonl", secret)):
        (folder / name).write_text(content)
        settings = run_settings(model, folder, data={"path": str(folder / name)})
        outcome = call(capsys, "train", write_config(folder, settings))
        check(outcome)
        assert "481502" not in outcome.err


SECRET = "sk-live-Mueller1987"


@pytest.mark.parametrize(
    "place",
    [
        *(
            "privacy.steps",
            "privacy.delta",
            "privacy.unit",
            "method.name",
            "method.optimizer",
            "method.clipping",
        ),
        *("model.dtype", "model.quantization", "adapter.r", "data.format", "data.task", "data.max_length"),
        *("run.seed", "run.report_to", "synthesis.generator", "synthesis.api_key_env", "synthesis.count"),
        *("federation.rule", "privacy.private", "adapter.layers_to_transform", "run.tokens_per_micro_batch"),
    ],
)
def test_no_word_is_shown_that_may_be_a_secret(place: str) -> None:
    """A key or a word of a record, in the place of a number, of one of some words or of a name."""
    group, name = place.split(".")
    values: dict[str, Any] = {
        "model": {"name": "some/model"},
        "data": {"path": "a.jsonl"},
        "privacy": {"steps": 3, "noise_multiplier": 1, "delta": 1e-5, "expected_batch_size": 4},
    }
    values["privacy"]["public_dataset_size"] = 100
    values.setdefault(group, {})[name] = SECRET
    with pytest.raises(PrivloraError) as caught:
        settings_from(values, methods=True)
    assert name in str(caught.value)
    assert "Mueller" not in str(caught.value)
