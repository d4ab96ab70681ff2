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
from functools import partial
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
from privlora.errors import DataError, named
from privlora.training import preflight
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


Refused = Callable[..., Outcome]


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Called with a command and words of its one line: it refuses, and no file in ``folder`` changes."""
    return partial(refuses, partial(call, capsys), folder)


@pytest.fixture
def untrainable(folder: Path, refused: Refused) -> Refused:
    """Called with settings, and words of the line in which `privlora train` refuses them."""
    return lambda settings, *words, **how: refused(["train", write_config(folder, settings)], *words, **how)


SETTINGS: dict[str, tuple[Groups, str]] = {
    "two noise settings": ({"privacy": {"target_epsilon": 3}}, "exactly one of them, for example"),
    "no noise setting": (
        {"privacy": {"noise_multiplier": None}},
        "exactly one of them, for example",
    ),
    "no privacy with noise": ({"privacy": {"private": False}}, "private=false contradicts noise_multiplier"),
    "no delta": ({"privacy": {"delta": None}}, "delta is missing"),
    "delta is 1/N": ({"privacy": {"delta": 0.025}}, "not below 1/N = 0.025"),
    "no public size": ({"privacy": {"public_dataset_size": None}}, "public_dataset_size is missing"),
    "three sampling settings": ({"privacy": {"sample_rate": 0.1}}, "give two of the three"),
    "no sampling setting": ({"privacy": {"expected_batch_size": None}}, "expected_batch_size or sample_rate"),
    "batch above N": ({"privacy": {"expected_batch_size": 41}}, "exceeds public_dataset_size=40"),
    "cap without N": (
        {"privacy": {"max_batch_size": 9, "sample_rate": 0.1, "public_dataset_size": None}},
        "max_batch_size needs public_dataset_size",
    ),
    "cap below the mean": ({"privacy": {"max_batch_size": 3}}, "max_batch_size=3"),
    "users without a column": ({"privacy": {"unit": "user"}}, "unit=user and user_column"),
    "column without users": ({"privacy": {"user_column": "patient"}}, "unit=user and user_column"),
    "two forms of records": ({"data": {"text": "text", "messages": "messages"}}, "only one of"),
    "prompt alone": ({"data": {"prompt": "question"}}, "prompt and completion go together"),
    "long warm-up": (
        {"method": {"warmup_steps": 4}},
        "method.warmup_steps=4 exceeds privacy.steps=3 (lines ",
    ),
    "double braces": ({"data": {"text": "{{ text }}"}}, "Fix: name one in single braces"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, model: Path, folder: Path, untrainable: Refused, refused: Refused) -> None:
    groups, word = SETTINGS[name]
    untrainable(run_settings(model, folder, **groups), word)
    refused(["plan", folder / "run.yaml"], word)


def test_overrides(model: Path, folder: Path, refused: Refused) -> None:
    config = write_config(folder, run_settings(model, folder))
    for override, word in (
        ("steps=4", "Fix: write privacy.steps=4 (group.key=value)"),
        ("privacy.stepps=3", "did you mean 'steps'?"),
        ("privacy.steps=[1", "not valid YAML"),
        ("run.label=2024-13-45", "is not valid YAML. Fix: put quotes"),
        ("run.label=*Zq", "is not valid YAML. Fix: put quotes"),
    ):
        refused(["train", config, override], word)


FILES = {
    "nothing": (b"", "holds no settings"),
    "not YAML": (b"model: {name: x\nprivacy: ]", "is not valid YAML"),
    "a record for a key": (b"patient Greta: has it\npatient Greta: again\n", "line 2 is not valid YAML"),
    "not text": (b"\xff\xfe\x00model", "cannot read"),
    "an empty group": (b"model:\nprivacy: {steps: 3}\n", "'model' (line 1) must be a group of settings"),
    "a key twice": (b"privacy:\n  clip_norm: 1\n  clip_norm: 9\n", "line 3 is not valid YAML (clip_norm"),
    "a dialogue": (b"Zqkarim: hello\nDoctor: hi\nZqkarim: ill\n", "line 3 is not valid YAML (a key is given"),
    "no number": (b"run:\n  seed: !!int Zqsec\n", "line 2 is not valid YAML"),
    "a tag": (b"a: !Zq'sec'ret x\n", "line 1 is not valid YAML"),
    "an alias": (b"a: &x [Zq]\nb:\n  c: *x\n", "line 3 holds an alias"),
    "lists in lists": (b"a:\n  " + b"[" * 9999, "line 2 holds more than 20 lists and mappings"),
    "many values": (b"a:\n  [" + b"1," * 60_000 + b"]\n", "line 2 holds more than 50000 values"),
    "a long value": (b"a:\n  " + b"1:59" * 30_000, "line 2 holds a value of more than 50000 characters"),
    "a long text": (b"#" * 1_000_001, "holds more than 1000000 characters"),
    "a Python object": (b"model: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_settings(name: str, folder: Path, refused: Refused) -> None:
    content, word = FILES[name]
    (folder / "run.yaml").write_bytes(content)
    assert "Zq" not in refused(["train", folder / "run.yaml"], word).err


def test_no_file_of_settings(folder: Path, refused: Refused) -> None:
    refused(["train", folder / "none.yaml"], "cannot read")
    refused(["plan", folder], "no run in")


RECORDS: dict[str, tuple[str, bytes, Groups, str]] = {
    "empty": ("a.jsonl", b"", {}, "no records"),
    "bad JSON": ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, "line 2"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:40], {}, "not a whole gzip"),
    "not UTF-8": ("a.jsonl", b'{"text": "\xff"}\n', {}, "not UTF-8"),
    "unknown ending": ("a.dat", b"x", {}, "does not say what it is"),
    "no such column": ("a.jsonl", b'{"note": "x"}\n', {}, "no column 'text'"),
    "not text in it": ("a.jsonl", b'{"text": 7}\n', {}, "holds int, not text"),
    "no user": (
        "a.jsonl",
        b'{"text": "x", "user": ""}\n',
        {"privacy": {"unit": "user", "user_column": "user"}},
        "names no unit",
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
def test_records(name: str, model: Path, folder: Path, untrainable: Refused) -> None:
    file, content, groups, word = RECORDS[name]
    (folder / file).write_bytes(content)
    groups = {**groups, "data": {**groups.get("data", {}), "path": str(folder / file)}}
    untrainable(run_settings(model, folder, **groups), word, quiet=False)


COLUMNS: dict[str, tuple[Groups, str]] = {
    "a format": ({"data": {"text": "{text} {body}"}}, "no column 'body'"),
    "an answer": ({"data": {"prompt": "question", "completion": "anser"}}, "did you mean 'answer'?"),
    "a label": ({"data": {"text": "text", "label": "team", "labels": 2}}, "no column 'team'"),
    "users": ({"privacy": {"unit": "user", "user_column": "patent"}}, "did you mean 'patient'?"),
    "a task": ({"data": {"task": "sst2"}}, "no column 'label'"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_the_first_record_lacks(
    name: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, untrainable: Refused
) -> None:
    """Said before a model is loaded, and before a micro-batch's memory is measured."""
    groups, word = COLUMNS[name]
    settings = run_settings(model, folder, **groups)
    untrainable(settings, word)
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
def test_records_that_are_not_there(path: str, model: Path, folder: Path, untrainable: Refused) -> None:
    settings = run_settings(model, folder, data={"path": path})
    untrainable(settings, MISSING[path], quiet=False)


MODULES: dict[str, tuple[Groups, str]] = {
    "unknown target": ({"target_modules": ["q_prj"]}, "did you mean 'q_proj'?"),
    "several in one": ({"target_modules": "q_proj,v_proj"}, "names 'q_proj,v_proj'"),
    "output layer": ({"target_modules": ["lm_head"]}, "cannot be adapted"),
    "rank": ({"r": 17}, "exceeds the smaller side"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, model: Path, folder: Path, untrainable: Refused, refused: Refused) -> None:
    adapter, word = MODULES[name]
    untrainable(run_settings(model, folder, adapter=adapter), word, quiet=False)
    refused(["plan", folder / "run.yaml"], word)


MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "cannot load model"),
    "no configuration": (lambda model: (model / "config.json").unlink(), "cannot load model"),
    "bad configuration": (lambda model: (model / "config.json").write_text("{"), "cannot load model"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "cannot load model"),
    "half the weights": (
        lambda model: os.truncate(model / "model.safetensors", 900),
        "is cut short or damaged",
    ),
    "no safetensors": (
        lambda model: (model / "model.safetensors").write_text("no"),
        "is cut short or damaged",
    ),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "its tokenizer: "),
    "half a tokenizer": (lambda model: (model / "tokenizer.json").write_text("{"), "its tokenizer: "),
    "float16": (lambda model: save_tiny_model(model, dtype=torch.float16), "float16"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, model: Path, folder: Path, untrainable: Refused) -> None:
    spoil, word = MODELS[name]
    spoilt = Path(shutil.copytree(model, folder / "model"))
    spoil(spoilt)
    outcome = untrainable(run_settings(spoilt, folder), word, quiet=False)
    assert "did you mean the folder" not in outcome.err


def test_folders_that_are_no_models(
    model: Path, finished: Path, folder: Path, untrainable: Refused, refused: Refused
) -> None:
    (folder / "hub").mkdir()
    shutil.copytree(model, folder / "hub" / "llama")
    run, base = finished / "run", named(model.name)
    adapter = Path(shutil.copytree(run / "release", folder / "adapter", ignore=lambda *_: ["ledger.jsonl"]))
    for place, words in (
        (run, ["it is a run of privlora", f"`privlora resume {run}`"]),
        (run / "release", ["holds an adapter already"]),
        (adapter, [f"holds an adapter already, of {base}", f"set adapter.init={adapter}"]),
        (folder / "hub", [f"there is no config.json in it. Fix: did you mean '{folder}/hub/llama'?"]),
    ):
        untrainable(run_settings(place, folder), "cannot load model", *words)
        refused(["plan", folder / "run.yaml"], *words)


def test_a_misspelt_model_where_no_hub_can_be_reached(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, untrainable: Refused, refused: Refused
) -> None:
    """At once: loaders ask a hub that is not there for a minute."""
    shutil.copytree(model, folder / "tinyllama")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(preflight, "getproxies", dict)
    asked = list[str]()

    def unknown(host: str, *_: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    settings = run_settings(Path("tinylama"), folder)
    words = ["it is no local folder", "the hub (huggingface.co) cannot be reached", "the folder 'tinyllama'?"]
    untrainable(settings, *words)
    assert asked == ["huggingface.co"]
    refused(["plan", "run.yaml"], *words)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(["plan", "run.yaml"], "HF_HUB_OFFLINE is set", words[-1])
    assert len(asked) == 2


def test_an_encoder_with_a_decoder_is_refused_as_such(
    model: Path, folder: Path, untrainable: Refused
) -> None:
    copy = Path(shutil.copytree(model, folder / "t5"))
    T5Config(vocab_size=512, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8).save_pretrained(copy)
    untrainable(run_settings(copy, folder), "it is an encoder with a decoder (t5)", quiet=False)


def test_what_a_plan_sees_of_a_model(
    model: Path, folder: Path, untrainable: Refused, refused: Refused
) -> None:
    long = run_settings(model, folder, data={"max_length": 129})
    small = Path(shutil.copytree(model, folder / "model"))
    spoilt = AutoModelForCausalLM.from_pretrained(small)
    spoilt.resize_token_embeddings(200)
    spoilt.save_pretrained(small)
    for settings, word in (
        (long, "data.max_length=129 exceeds the 128 positions"),
        (run_settings(small, folder), "the model knows only those below 200"),
    ):
        untrainable(settings, word, quiet=False)
        refused(["plan", folder / "run.yaml"], word)


@pytest.mark.parametrize("device", ["gpu", "mps:0", "cuda:99"])
def test_devices(device: str, model: Path, folder: Path, untrainable: Refused) -> None:
    settings = run_settings(model, folder, model={"device": device})
    untrainable(settings, f"model.device='{device}'", quiet=False)


def test_an_output_that_is_taken(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = ["holds a run already, and that is finished", f"its results are in {finished}/run/release"]
    argv: list[object] = ["train", finished / "run.yaml"]
    outcome = refuses(partial(call, capsys), finished, argv, *over, "set run.output to another folder")
    assert "privlora resume" not in outcome.err


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_an_output_that_cannot_be_made(
    code: int, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    config = write_config(folder, run_settings(model, folder))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    refused(["train", config], "cannot create", os.strerror(code))


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
    "--epsilon 3 --delta 0 --sample-rate 0.01 --steps 10": "delta=0.0: ",
    "--epsilon 3 --delta 1e-5 --steps 10": "exactly one of --sample-rate",
    "--epsilon 3 --delta 0.1 --steps 10 --expected-batch-size 4 --public-dataset-size 40": "1/N = 0.025",
    "--epsilon three --delta 1e-5 --sample-rate 0.01 --steps 10": "target_epsilon='three': ",
    "--epsilon 3 --delta 1e-5 --sample-rate 0.01": "--steps",
}


@pytest.mark.parametrize("options", CALIBRATE)
def test_calibrate(options: str, refused: Refused) -> None:
    refused(["calibrate", *options.split()], CALIBRATE[options])


LEDGERS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "edited": (
        lambda lines: [lines[0].replace('"steps": 3', '"steps": 9'), *lines[1:]],
        "line 2 is not what was written",
    ),
    "a charge removed": (lambda lines: lines[:1] + lines[2:], "line 2 is not what was written"),
    "a charge repeated": (lambda lines: [*lines[:2], *lines[1:]], "line 3 is not what was written"),
    "no JSON": (lambda _: ["hello\n"], "line 1 is not what was written"),
    "empty": (lambda _: [], "no complete first line"),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers(name: str, finished: Path, folder: Path, refused: Refused) -> None:
    change, word = LEDGERS[name]
    run = Path(shutil.copytree(finished / "run", folder / "run"))
    ledger = run / "release" / "ledger.jsonl"
    ledger.write_text("".join(change(ledger.read_text().splitlines(keepends=True))))
    refused(["budget", run], word)
    refused(["budget", finished / "run", ledger], word)
    refused(["resume", run], "shows 0 releases" if name == "empty" else word, quiet=False)


def test_budgets(finished: Path, folder: Path, refused: Refused) -> None:
    run = finished / "run"
    refused(["budget", folder / "none.jsonl"], "cannot be read")
    refused(["budget", folder], "cannot be read")
    refused(["budget", run, "--delta", "1"], "delta=1.0")
    refused(["budget"], "LEDGER")


def test_resuming(finished: Path, folder: Path, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    refused(["resume", folder], "no run in")
    refused(["resume", folder / "none"], "no run in")
    unfinished = Path(shutil.copytree(finished / "run", folder / "a run"))
    settings = RunFolder(unfinished).settings
    before = settings.read_text()
    edited = yaml.safe_load(before)
    edited["data"].update({name: str(folder / f"no-{name}.jsonl") for name in ("path", "evaluation")})
    settings.write_text(yaml.safe_dump(edited))
    words = ["no-path.jsonl", f"`privlora resume '{unfinished}' --data FILE --evaluation FILE`"]
    refused(["resume", unfinished], *words, quiet=False)
    settings.write_text(before)
    checkpoint = unfinished / "private" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:50])
    outcome = call(capsys, "resume", unfinished)
    check(outcome, "checkpoint", "is damaged")


def test_evaluating(finished: Path, model: Path, folder: Path, refused: Refused) -> None:
    run, data = finished / "run", folder / "records.jsonl"
    for argv, word in (
        ([run], "--data"),
        ([run, "--data", folder / "none.jsonl"], "there is no file"),
        ([folder, "--data", data], "cannot load model"),
        ([model, "--data", data, "--base", model], "there is no adapter"),
        ([model, "--data", data, "--text", "note"], "no column 'note'"),
    ):
        refused(["evaluate", *argv], word)
    spoilt = Path(shutil.copytree(run / "release", folder / "adapter"))
    (spoilt / "adapter_model.safetensors").write_bytes(b"nonsense")
    refused(["evaluate", spoilt, "--data", data], "a folder of the machine that trained")
    argv = ["evaluate", spoilt, "--data", data, "--base", model]
    refused(argv, "does not load on this base model", said=EVALUATING)
    (spoilt / "adapter_config.json").write_text("{}")
    refused(["evaluate", spoilt, "--data", data], "cannot be read")


def test_exporting(finished: Path, folder: Path, refused: Refused) -> None:
    run, new = finished / "run", folder / "new"
    for argv, word in (
        ([], "RUN is missing; OUT is missing; one of --merge and --as-lora is missing"),
        ([run, new, "--merge", "--as-lora"], "are both given"),
        ([run, "--output", folder, "--as-lora"], "exists already"),
        ([folder, new, "--as-lora"], "no run in"),
        ([run, folder / "records.jsonl" / "new", "--as-lora"], "cannot write"),
    ):
        refused(["export", *argv], word)
    spoilt = Path(shutil.copytree(run, folder / "run"))
    (spoilt / "release" / "adapter_model.safetensors").write_bytes(b"nonsense")
    refused(["export", spoilt, new, "--merge"], "is not as the run wrote it")
    (spoilt / "release" / "adapter_model.safetensors").unlink()
    refused(["export", spoilt, new, "--merge"], "is not finished")


@pytest.mark.parametrize("line", ["trian", "plan . privacy.steps=0"])
def test_a_process_of_its_own(line: str, folder: Path) -> None:
    before = tree(folder)
    command = [sys.executable, "-m", "privlora", *line.split()]
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
