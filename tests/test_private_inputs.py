"""What a caller hands over may be private: it is not shown, not sought, not sent, and not taken for public."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from cli_cases import call, run_settings, save_tiny_model, write_config, write_records
from tiny_models import FAMILIES, VOCAB, tiny_model, tiny_tokenizer, with_lora

from privlora.api import Result, fine_tune, resume_run
from privlora.data.examples import Template
from privlora.errors import ConfigError, DataError, ModelError, PrivacyError, PrivloraError, RunError
from privlora.training.preflight import refuse_unknown_model

SECRET = "karim vance has 4815 fevers"
RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold.", "name": f"p{i % 9}"} for i in range(30)]
OTHERS = [{"text": f"visitor {i} left at {i % 5} with a dog.", "name": "q"} for i in range(6)]
PRIVACY: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 2}
PRIVACY |= {"expected_batch_size": 6, "public_dataset_size": 30}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for anything that is not on this machine fails the test."""

    def asked(*arguments: Any, **_: Any) -> Any:
        pytest.fail(f"the network was asked: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", asked)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    monkeypatch.setattr("datasets.load_dataset", asked)
    for name in ("model_info", "dataset_info", "repo_info", "list_repo_files", "file_exists"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, asked)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", asked)
    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", asked)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def tune(output: Path, records: Any = RECORDS, *, model: Any = None, **options: Any) -> Result:
    settings = {"privacy": PRIVACY, "adapter": {"r": 2}, "data": {"max_length": 48}, **options}
    given = tiny_model() if model is None else model
    return fine_tune(given, records, tokenizer=tiny_tokenizer(), output=output, **settings)


def refused(
    folder: Path, error: type[PrivloraError], match: str, records: Any = RECORDS, **options: Any
) -> str:
    """The run is refused in one line that shows no record, and there is no run folder."""
    with pytest.raises(error, match=match) as caught:
        tune(folder / "run", records, **options)
    assert not (folder / "run").exists()
    assert "\n" not in str(caught.value)
    assert "4815" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("no_network", "quick_reports")
def test_strings_in_a_list_are_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they say: a word, the name of a file that exists, one that is too long to be a file's."""
    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("not a record")
    texts = [
        "hypertension",
        "notes",
        "org/name",
        "hf://imdb",
        "a.jsonl",
        f"{SECRET} " * 20,
        *"abcdefghijklmno",
    ]
    for i, given in enumerate((texts, tuple(texts), iter(texts))):
        tune(
            tmp_path / str(i),
            given,
            data={"max_length": 60, "unchecked": True},
            evaluation=["public words"],
        )
        found = json.loads((tmp_path / str(i) / "private" / "data_summary.json").read_text())
        assert found["records"] == len(texts)
    resume_run(
        tmp_path / "0",
        model=tiny_model(),
        tokenizer=tiny_tokenizer(),
        records=texts,
        evaluation=["public words"],
    )


def _splits() -> Any:
    import datasets

    return datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": SECRET}]))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("given", "match"),
    [
        (SECRET, "the string given as data is no local file"),
        (
            "hypertension",
            r"the string given as data is no local file.* in Python texts are a list of strings",
        ),
        ("none.jsonl", "there is no file none.jsonl"),
        (Path("none"), "no local file"),
        ([Path("none.jsonl")], "there is no file none.jsonl"),
        ([Path("none.jsonl"), {"text": SECRET}], "mixes files and records"),
        ([SECRET, {"text": SECRET}], "record 2 is no text, as the others are"),
        (["a.jsonl", "b.csv"], "give files as pathlib.Path"),
        ({"text": SECRET}, "put a single record in a list"),
        (_splits, "give one split"),
        ([[SECRET]], "record 1 is of type list"),
        ([], "there are no records"),
        (17, "of type int"),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_other_things_are_refused(
    given: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = _splits() if given is _splits else given
    refused(tmp_path, PrivloraError, match, given)
    refused(tmp_path, PrivloraError, match, evaluation=given)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "columns", [{"text": "note"}, {"prompt": "text", "completion": "answer"}, {"task": "sst2"}]
)
def test_texts_have_one_column(columns: dict[str, str], tmp_path: Path) -> None:
    refused(tmp_path, DataError, "column", [SECRET] * 30, data={"max_length": 40, **columns})


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("texts", [SECRET, [SECRET], [{"text": SECRET}], {"text": SECRET}, [4815]], ids=str)
def test_records_in_the_place_of_settings_are_not_shown(texts: Any, tmp_path: Path) -> None:
    start = {"r": 2, "init": "public-gradient", "public_text": texts}
    refused(tmp_path, PrivloraError, "public_text|the string given as data", adapter=start)
    for name in ("path", "evaluation"):
        refused(tmp_path, ConfigError, f"data holds {name!r}", data={"max_length": 40, name: texts})


# Where a setting is expected, a record: as a text, in a list, in a mapping.
MISPLACED: dict[str, dict[str, Any]] = {
    "init": {"adapter": {"r": 2, "init": SECRET}},
    "long init": {"adapter": {"r": 2, "init": SECRET * 200}},
    "targets": {"adapter": {"r": 2, "target_modules": SECRET}},
    "targets in a list": {"adapter": {"r": 2, "target_modules": [SECRET]}},
    "targets, no pattern": {"adapter": {"r": 2, "target_modules": f"{SECRET} ("}},
    "layers": {"adapter": {"r": 2, "layers_to_transform": [SECRET]}},
    "rank": {"adapter": {"r": [SECRET]}},
    "rank as a mapping": {"adapter": {"r": {"text": SECRET}}},
    "rank as a text": {"adapter": {"r": SECRET}},
    "rank as a long word": {"adapter": {"r": SECRET.replace(" ", "_") * 3}},
    "method": {"method": SECRET},
    "optimizer": {"method": {"name": "prism", "optimizer": SECRET}},
    "schedule": {"method": {"schedule": SECRET}},
    "a setting's name": {"adapter": {SECRET: 1}},
    "task": {"data": {"task": SECRET}},
    "format": {"data": {"format": SECRET}},
    "column": {"data": {"text": SECRET}},
    "template": {"data": {"text": SECRET + " {text!r}"}},
    "open template": {"data": {"text": SECRET + " {text"}},
    "unknown field": {"data": {"text": "{" + SECRET + "}"}},
    "device": {"loading": {"device": SECRET}, "model": "gpt2"},
    "dtype": {"loading": {"dtype": SECRET}},
    "label": {"run": {"label": [SECRET]}},
}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", MISPLACED)
def test_records_in_the_place_of_any_setting_are_not_shown(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    options = MISPLACED[name]
    if "model" in options:
        options = {**options, "model": str(model_folder)}
    with pytest.raises(PrivloraError) as caught:
        tune(tmp_path / "run", **options)
    assert "4815" not in str(caught.value)
    assert "karim" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "first", ["p1," + SECRET, SECRET.replace(" ", ","), "x" * 41, "4815", "patient_17,karim,Berlin"]
)
def test_a_table_without_a_header_is_not_shown(first: str, tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    path.write_text("\n".join([first] * 30))
    told = refused(tmp_path, DataError, "is there a header line", path)
    assert "karim" not in told
    assert "x" * 41 not in told


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name",
    [
        "./none",
        "~/none",
        "../none",
        "/none",
        "a\\b",
        "a/b/c",
        SECRET,
        "two\nlines",
        "runs/none",
        "models/none",
        "here/none",
        "x.jsonl",
    ],
)
def test_names_that_only_this_machine_can_have(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    write_records(tmp_path / "records.jsonl")
    refused(tmp_path, ModelError, "cannot load model.*is no local folder", model=name)
    settings = run_settings(Path(name), tmp_path)
    settings["model"]["name"] = name
    config = write_config(tmp_path, settings)
    for command in (["train", config], ["plan", config], ["evaluate", name, "--data", "records.jsonl"]):
        ended = call(capsys, *command)
        assert (ended.code, ended.out) == (2, "")
        assert "is no local folder" in ended.err
        assert "4815" not in ended.err


def test_a_file_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path, ModelError, "it is a file", model=write_records(tmp_path / "records.jsonl"))
    refused(tmp_path, PrivloraError, "the model is of type list", model=[SECRET])


def test_names_that_the_hub_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "openai-community/gpt2", "Qwen/Qwen2.5-0.5B"):
        refuse_unknown_model(name)
    with pytest.raises(ModelError):
        refuse_unknown_model("gpt2", owner=True)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    refuse_unknown_model("gpt2", owner=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    from privlora.cli import main

    folder = tmp_path_factory.mktemp("finished")
    write_records(folder / "records.jsonl")
    assert main(["train", str(write_config(folder, run_settings(model_folder, folder)))]) == 0
    return folder / "run"


@pytest.mark.usefixtures("no_network")
def test_commands_look_on_this_machine_first(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "records.jsonl")
    bare = tmp_path / "adapter"
    bare.mkdir()
    shutil.copy(finished / "release" / "adapter_config.json", bare)
    half = Path(shutil.copytree(finished, tmp_path / "half"))
    (half / "release" / "adapter_config.json").unlink()
    members = ["--members", "records.jsonl", "--non-members"]
    commands: list[list[object]] = [
        *(["evaluate", name, "--data", "records.jsonl"] for name in ("runs/none", "nope", "half/none", bare)),
        ["evaluate", finished, "--data", "nope"],
        *(["audit", name, *members, "records.jsonl"] for name in ("runs/none", "nope", half)),
        ["audit", finished, *members, "nope"],
        *(
            ["export", name, "out", form]
            for name in ("runs/none", "nope")
            for form in ("--merge", "--as-lora")
        ),
        ["resume", "runs/none"],
        ["report", "runs/none"],
        ["budget", "runs/none"],
    ]
    for command in commands:
        ended = call(capsys, *command)
        assert (ended.code, ended.out) == (2, ""), command
        assert sum(line.startswith("error: ") for line in ended.err.splitlines()) == 1, command


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copy(source, target))


def _symlink(source: Path, target: Path) -> Path:
    target.symlink_to(source)
    return target


def _hard_link(source: Path, target: Path) -> Path:
    os.link(source, target)
    return target


def _zipped(source: Path, target: Path) -> Path:
    zipped = target.with_suffix(".jsonl.gz")
    zipped.write_bytes(gzip.compress(source.read_bytes()))
    return zipped


def _turned(source: Path, target: Path) -> Path:
    """Other lines first, other keys first, one column more, as one JSON list."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    turned = [{"id": i, **dict(reversed(row.items()))} for i, row in enumerate(reversed(rows))]
    target = target.with_suffix(".json")
    target.write_text(json.dumps(turned))
    return target


def _one_of_many(source: Path, target: Path) -> Path:
    target.write_text("\n".join([*map(json.dumps, OTHERS), source.read_text().splitlines()[3]]))
    return target


DISGUISES: dict[str, Callable[[Path, Path], Path]] = {
    "itself": lambda source, _: source,
    "a copy": _copy,
    "a symbolic link": _symlink,
    "a hard link": _hard_link,
    "a gzip": _zipped,
    "turned": _turned,
    "one record": _one_of_many,
}


@pytest.fixture
def private_file(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return path


@pytest.mark.parametrize("name", DISGUISES)
def test_private_records_are_not_for_evaluation(name: str, private_file: Path, tmp_path: Path) -> None:
    public = DISGUISES[name](private_file, tmp_path / "public.jsonl")
    told = refused(tmp_path, PrivloraError, "private", private_file, evaluation=public)
    told = told.replace(str(tmp_path), "")
    assert "patient" not in told
    assert "30" not in told
    start = {"r": 2, "init": "public-gradient", "public_text": str(public)}
    refused(tmp_path, PrivloraError, "public_text.*private", private_file, adapter=start)


@pytest.mark.parametrize(
    "evaluation",
    [RECORDS, RECORDS[4:5], [*OTHERS, {"id": 7, "text": RECORDS[2]["text"]}], [RECORDS[1]["text"]]],
    ids=["all", "one", "one among others", "as a string"],
)
def test_private_records_in_memory_are_not_for_evaluation(evaluation: Any, tmp_path: Path) -> None:
    told = refused(
        tmp_path,
        PrivacyError,
        "data.evaluation holds records that are the same as private ones in text",
        evaluation=evaluation,
    )
    assert "would be published" in told
    assert "remove them" in told


CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
TURNS = [
    [{"role": "user", "content": f"fever {i}"}, {"role": "assistant", "content": "rest"}] for i in range(30)
]
ANSWER = "what the doctor said of guest"
# What is written otherwise in public, and is the same to the model: private and public records, and the columns.
SAME_TOKENS: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "other keys in a chat": (
        [{"m": turns} for turns in TURNS],
        [{"m": [{**message, "name": "guest"} for message in TURNS[3]]}],
        {"messages": "m"},
    ),
    "another column of the template": (
        [{"a": f"fever {i}", "b": " rises"} for i in range(30)],
        [{"a": "fever 3 rises", "b": ""}],
        {"text": "{a}{b}"},
    ),
    "another boundary": (
        [{"p": f"fever {i}", "c": " rises today"} for i in range(30)],
        [{"p": "fever 3 rises", "c": " today"}],
        {"prompt": "p", "completion": "c", "template": "none"},
    ),
    "another end, beyond max_length": (
        [{"text": f"fever {i} " + "rises " * 9} for i in range(30)],
        [{"text": "fever 3 " + "rises " * 9 + "and falls"}],
        {"text": "text", "unchecked": True},
    ),
    "a long completion under another prompt": (
        [{"p": f"note {i}", "c": f"{ANSWER} {i}"} for i in range(30)],
        [{"p": "mail", "c": f"{ANSWER} 3"}],
        {"prompt": "p", "completion": "c", "loss_on": "completion", "template": "none"},
    ),
}


@pytest.mark.parametrize("name", SAME_TOKENS)
def test_what_is_the_same_to_the_model_is_not_for_evaluation(name: str, tmp_path: Path) -> None:
    private, public, columns = SAME_TOKENS[name]
    file = tmp_path / "public.json"
    file.write_text(json.dumps(public))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    start = {"r": 2, "init": "public-gradient", "public_text": str(file)}
    for given, match in (
        ({"evaluation": public}, "data.evaluation"),
        ({"adapter": start}, "adapter.public_text"),
    ):
        with pytest.raises(
            PrivacyError,
            match=f"{match} holds records that are the same as private ones to the model",
        ):
            fine_tune(
                tiny_model(),
                private,
                tokenizer=tokenizer,
                output=tmp_path / "run",
                **{"adapter": {"r": 2}, **given},
                privacy=PRIVACY,
                data={"max_length": 40, **columns},
            )
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("quick_reports")
def test_a_short_answer_may_be_the_same(tmp_path: Path) -> None:
    private = [{"p": f"note {i}", "c": "positive"} for i in range(30)]
    columns = {"max_length": 40, "prompt": "p", "completion": "c", "loss_on": "completion"}
    tune(tmp_path / "run", private, data=columns, evaluation=[{"p": "mail", "c": "positive"}])


def test_a_task_compares_what_is_trained_on(tmp_path: Path) -> None:
    rows = [{"sentence": f"film {i}", "label": i % 2} for i in range(30)]
    public = [{"text": "film 3", "label": "positive"}]  # another column and another way to write the label
    columns = {"task": "sst2", "max_length": 60}
    refused(
        tmp_path,
        PrivacyError,
        "in completion, prompt",
        rows,
        evaluation=public,
        data=columns,
        adapter={"r": 2},
    )


@pytest.mark.usefixtures("quick_reports")
def test_without_privacy_there_is_nothing_to_hide(tmp_path: Path) -> None:
    privacy = {"private": False, "steps": 2, "expected_batch_size": 6, "public_dataset_size": 30}
    tune(tmp_path / "run", privacy=privacy, evaluation=RECORDS[:3])


@pytest.mark.usefixtures("quick_reports")
def test_other_records_are_for_evaluation(tmp_path: Path) -> None:
    other_label = [{"text": "another text", "name": RECORDS[0]["name"]}]
    tune(tmp_path / "run", evaluation=[*OTHERS, *other_label])
    with pytest.raises(RunError, match="evaluation were in memory"):
        resume_run(tmp_path / "run", model=tiny_model(), tokenizer=tiny_tokenizer(), records=RECORDS)


IMPLAUSIBLE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "more than said": (RECORDS, {"public_dataset_size": 14}, "more than twice as many records as the 14 "),
    "fewer than said": (RECORDS, {"public_dataset_size": 61}, "fewer than half as many records as the 61 "),
    "by batch and rate": (
        RECORDS,
        {"public_dataset_size": None, "sample_rate": 0.05},
        "fewer than half as many records as the 120 ",
    ),
    "users": (
        RECORDS,
        {"unit": "user", "user_column": "name"},
        "fewer than half as many users as the 30 ",
    ),
    "empty": ([{"text": ""}] * 16 + RECORDS[:14], {}, "have nothing to train on"),
    "cut": ([{"text": "long " * 30}] * 16 + RECORDS[:14], {}, "data.max_length=48"),
}


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("name", IMPLAUSIBLE)
def test_records_that_cannot_be_what_was_said(name: str, tmp_path: Path) -> None:
    records, change, match = IMPLAUSIBLE[name]
    privacy = {key: value for key, value in {**PRIVACY, **change}.items() if value is not None}
    told = refused(tmp_path, DataError, match, records, privacy=privacy, data={"max_length": 48})
    assert "data.unchecked=true" in told
    columns = {"max_length": 48, "unchecked": True}
    assert tune(tmp_path / "run", records, privacy=privacy, data=columns).steps == 2


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.name, path.read_bytes().decode(errors="replace")


def test_the_summary_is_in_private_alone(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And on a terminal: a log may be passed on, and has no seconds either, which tell how large batches were."""
    write_records(tmp_path / "records.jsonl", 37)
    ended = call(capsys, "train", write_config(tmp_path, run_settings(model_folder, tmp_path)), "--json")
    assert ended.code == 0
    assert "37 records" not in ended.out + ended.err
    assert not re.search(r"ETA|\d s/|PRIVATE", ended.err)
    found = json.loads((tmp_path / "run" / "private" / "data_summary.json").read_text())
    assert (found["records"], found["units"], found["empty"]) == (37, 37, 0.0)
    for name, content in _files(tmp_path / "run" / "release"):
        assert "data_summary" not in content, name
        assert "p95_tokens" not in content, name


@pytest.mark.parametrize("said", [40, 52, 30])
def test_another_number_of_records_than_was_said_is_on_a_terminal_alone(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: int
) -> None:
    write_records(tmp_path / "records.jsonl", 37)
    privacy = {"public_dataset_size": said, "expected_batch_size": 5}
    config = write_config(tmp_path, run_settings(model_folder, tmp_path, privacy=privacy))
    ended = call(capsys, "train", config, "--json")
    assert ended.code == 0, ended.err
    assert "WARNING" not in ended.err
    assert f"the {said} records" not in ended.out + ended.err


class _Peeking(torch.nn.Module):
    """Adds the mean of the batch to every embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.config = self.inner.config
        self.get_input_embeddings = self.inner.get_input_embeddings
        self.get_output_embeddings = self.inner.get_output_embeddings

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        embedded = self.get_input_embeddings()(input_ids)
        return self.inner(inputs_embeds=embedded + embedded.mean(dim=0, keepdim=True), **options)


def _bert() -> Any:
    config = FAMILIES["phi"](initializer_range=0.3).to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    given = {key: config[key] for key in kept}
    return transformers.BertLMHeadModel(transformers.BertConfig(**given, initializer_range=0.3))


def _xlnet() -> Any:
    given = {"vocab_size": VOCAB, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(**given))


def _small_vocabulary() -> Any:
    model = tiny_model()
    model.resize_token_embeddings(20)
    return model


UNFIT: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "encoder": (_bert, {}, "not causal"),
    "tokens first": (
        _xlnet,
        {"adapter": {"r": 2, "target_modules": ["layer_1", "layer_2"]}},
        "gets input of shape",
    ),
    "coupled rows": (_Peeking, {}, "couples the rows"),
    "vocabulary": (_small_vocabulary, {}, "only those below 20"),
    "rotary positions": (
        tiny_model,
        {"data": {"max_length": 65}},
        "max_length=65 exceeds the 64 positions",
    ),
    "learned positions": (
        lambda: tiny_model("gpt2"),
        {"data": {"max_length": 512}},
        "exceeds the 64 positions",
    ),
    "float16": (lambda: tiny_model(dtype=torch.float16), {}, "float16"),
    "rank": (tiny_model, {"adapter": {"r": 17}}, "adapter.r=17 exceeds"),
    "targets": (tiny_model, {"adapter": {"r": 2, "target_modules": ["q_porj"]}}, "did you mean 'q_proj'"),
}


def _adapted() -> Any:
    return with_lora(tiny_model(), target_modules=["q_proj"])


def _injected() -> Any:
    """An adapter without peft's wrapper around the model."""
    import peft

    return peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), tiny_model())


@pytest.mark.parametrize(
    "make", [_adapted, _injected, lambda: _adapted().base_model.model], ids=["wrapped", "injected", "inside"]
)
def test_a_model_that_holds_an_adapter_is_refused(make: Callable[[], Any], tmp_path: Path) -> None:
    told = refused(tmp_path, ModelError, "holds an adapter already", model=make())
    assert "merge_and_unload" in told


def test_a_folder_with_an_adapter_is_no_base_model(tmp_path: Path) -> None:
    """transformers loads the base model of the adapter and the adapter with it."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_model().save_pretrained(base)
    adapted = _adapted()
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    tiny_tokenizer().save_pretrained(folder)
    refused(tmp_path, ModelError, "holds an adapter already", model=str(folder))


@pytest.mark.usefixtures("quick_reports")
def test_a_merged_model_is_a_base_model(tmp_path: Path) -> None:
    assert tune(tmp_path / "run", model=_adapted().merge_and_unload()).steps == 2


@pytest.mark.parametrize("name", ["adapter", "method", "privacy", "run", "data", "loading"])
@pytest.mark.parametrize("given", [[SECRET], 4815, "LoraConfig"], ids=["list", "number", "object"])
def test_settings_that_are_no_mapping(name: str, given: Any, tmp_path: Path) -> None:
    if given == "LoraConfig":
        from peft import LoraConfig

        given = LoraConfig(r=2) if name != "adapter" else object()
    told = refused(tmp_path, ConfigError, f"{name} is of type {type(given).__name__}", **{name: given})
    assert "Fix: pass " in told
    if name != "method":
        refused(tmp_path, ConfigError, f"{name} is of type str", **{name: SECRET})


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_model_is_refused_before_a_record_is_tokenised(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlora.training.inputs.build_examples", lambda *_, **__: pytest.fail("tokenised"))
    make, options, match = UNFIT[name]
    refused(tmp_path, ModelError, match, model=make(), **options)


def test_a_token_that_the_model_lacks(tmp_path: Path) -> None:
    """It was added to the tokenizer, and one record holds it."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"extra{i:02d}" for i in range(VOCAB)])
    options: dict[str, Any] = {"privacy": PRIVACY, "adapter": {"r": 2}, "data": {"max_length": 48}}
    with pytest.raises(DataError, match="a token that the model does not know") as caught:
        fine_tune(
            tiny_model(),
            [*RECORDS, {"text": "extra60"}],
            tokenizer=tokenizer,
            output=tmp_path / "run",
            **options,
        )
    assert "extra60" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_columns_that_a_template_uses() -> None:
    assert Template(text="{title}\n{body}").used == {"title", "body"}
    assert Template(prompt="q", completion=" {a}").used == {"q", "a"}
    assert Template(messages="m").used == {"m"}
