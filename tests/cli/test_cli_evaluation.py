"""evaluate on tasks: from a run with a task, with --task, in parts, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_cases import EVALUATING, Call, after, check, run_settings, write_config

from privlora.cli import main
from privlora.config import load_settings
from privlora.reporting.verifying import verify
from privlora.training.files import RunFolder

REVIEWS = [{"sentence": f"film number {i}", "label": i % 2} for i in range(12)]
SUMS = [
    {"instruction": f"{i}+1?", "input": "", "output": f"It is {i + 1}.", "answer": i + 1} for i in range(3)
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with a finished run of task sst2."""
    folder = tmp_path_factory.mktemp("task")
    write(folder / "records.jsonl", REVIEWS)
    data = {"task": "sst2", "max_length": 100}
    settings = run_settings(model, folder, data=data, privacy={"public_dataset_size": 12})
    assert main(["train", str(write_config(folder, settings))]) == 0
    return folder


def test_a_run_brings_its_task(trained: Path, call: Call) -> None:
    data = ["--data", write(trained / "public.jsonl", REVIEWS[:10])]
    of_run = call("evaluate", trained / "run", *data, "--json")
    assert of_run.code == 0, of_run.err
    found = of_run.json
    assert (found["task"], found["scoring"], found["metric_name"]) == ("sst2", "likelihood", "accuracy")
    assert (found["examples"], found["unparsable"]) == (10, 0)
    assert found["interval"][0] <= found["metric"] <= found["interval"][1]
    assert "per_example" not in found
    adapter = trained / "run" / "release"
    of_adapter = call("evaluate", adapter, *data, "--task", "sst2", "--max-length", 100, "--json").json
    assert of_adapter["metric"] == found["metric"]


def test_own_columns_replace_the_runs_task(trained: Path, call: Call) -> None:
    data = ["--data", write(trained / "public.jsonl", REVIEWS)]
    column = ["--text", "sentence"]
    loss = call("evaluate", trained / "run", *data, *column, "--json")
    assert loss.json["loss_per_example"] > 0
    base = load_settings(trained / "run.yaml").model.name
    model = call("evaluate", base, *data, *column, "--max-length", 100, "--json")
    assert loss.json["base"]["loss_per_example"] == pytest.approx(model.json["loss_per_example"], rel=1e-5)
    assert "base" not in model.json
    shown = call("evaluate", trained / "run", *data, *column)
    gained = loss.json["base"]["loss_per_example"] - loss.json["loss_per_example"]
    assert f"gained           {gained:.4f}: " in shown.out
    other = call("evaluate", trained / "run", *data, "--task", "cola", "--json")
    assert other.json["metric_name"] == "matthews_correlation"


def test_a_yaml_in_the_place_of_its_run(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "chats.yaml"
    for content in ("run: {output: runs/chats}", "- not: settings"):
        file.write_text(content)
        check(call("evaluate", file), "is a YAML of settings", "give the folder of its run")


def test_without_data_a_run_brings_its_own(trained: Path, call: Call) -> None:
    ended = call("evaluate", trained / "run")
    assert (ended.code, "no records are given" in ended.err) == (2, True)
    settings = RunFolder(trained / "run").settings
    before, public = settings.read_text(), write(trained / "own.jsonl", REVIEWS[:4])
    assert "evaluation: null" in before
    try:
        settings.write_text(before.replace("evaluation: null", f"evaluation: {public}"))
        found = call("evaluate", trained / "run", "--json")
    finally:
        settings.write_text(before)
    assert (found.json["examples"], found.json["data"]) == (4, [str(public)])


def test_generation_and_every_answer(model: Path, tmp_path: Path, call: Call) -> None:
    data = ["--data", write(tmp_path / "sums.jsonl", SUMS)]
    asked = ["--task", "gsm8k", "--max-new-tokens", 4, "--beams", 2, "--max-length", 100]
    found = call("evaluate", model, *data, *asked, "--per-example", "--json")
    assert found.code == 0, found.err
    assert found.json["scoring"] == "generation"
    assert len(found.json["per_example"]["answers"]) == 3
    assert found.json["per_example"]["gold"] == [1, 2, 3]
    shown = call("evaluate", model, *data, *asked)
    assert after(shown, *EVALUATING) == []
    assert "3 records by generation" in shown.out
    assert "95% interval" in shown.out


def test_a_suite_in_one_command(model: Path, tmp_path: Path, call: Call) -> None:
    rows = [{"sentence1": f"first {i}", "sentence2": "second", "label": i % 2} for i in range(4)]
    files = [
        write(tmp_path / f"{task}.jsonl", [{**r, "task": task} for r in rows]) for task in ("rte", "mrpc")
    ]
    asked = ["--task", "glue8", "--data", files[0], "--data", files[1]]
    found = call("evaluate", model, *asked, "--json").json
    assert [one["task"] for one in found["tasks"]] == ["rte", "mrpc"]
    assert found["metric"] == pytest.approx(sum(one["metric"] for one in found["tasks"]) / 2)
    assert f"mean of 2 tasks {found['metric']:.4f}" in call("evaluate", model, *asked).out


def test_files_are_parts(model: Path, tmp_path: Path, call: Call) -> None:
    rows = [{"sentence1": f"first {i}", "sentence2": "second", "label": i % 2} for i in range(8)]
    files = [write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[:4])]
    asked = ["--task", "mrpc", "--data", files[0], "--data", files[1]]
    found = call("evaluate", model, *asked, "--json").json
    assert {name: part["examples"] for name, part in found["parts"].items()} == {
        str(files[0]): 8,
        str(files[1]): 4,
    }
    means = [(part["accuracy"] + part["f1"]) / 2 for part in found["parts"].values()]
    assert found["metric"] == pytest.approx(sum(means) / 2)
    shown = call("evaluate", model, *asked)
    assert f"of {files[0]}: " in shown.out
    assert "mean of accuracy and f1" in shown.out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--task", "sst-2"], "did you mean 'sst2'"),
        (["--task", "sst2", "--text", "sentence"], "remove text, or task"),
        (["--task", "mnli"], "has no column 'premise'"),
        (["--task", "sst2", "--scoring", "guess"], "likelihood or generation"),
        (["--task", "gsm8k", "--scoring", "likelihood"], "no fixed set of answers"),
        (["--scoring", "likelihood"], "give --task"),
        (["--task", "sst2", "--per-example"], "add --json"),
        (["--task", "sst2", "--beams", 0], "Invalid value for '--beams'"),
        (["--task", "gsm8k", "--max-new-tokens", 0], "Invalid value for '--max-new-tokens'"),
        (["--text", "sentence", "--data", "gone.jsonl"], "gone.jsonl"),
        (["--text", "nothing"], "has no column 'nothing'"),
    ],
)
def test_refused(
    argv: list[object],
    expected: str,
    model: Path,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line, before anything is loaded."""
    monkeypatch.setattr("privlora.cli.evaluation.loading", None)  # it would be called
    data = write(tmp_path / "records.jsonl", REVIEWS)
    ended = call("evaluate", model, "--data", data, *argv)
    assert ended.code == 2
    assert expected in ended.err
    assert ended.err.count("\n") == 1
    assert ended.out == ""


@pytest.mark.parametrize("second", ["records.jsonl", "other.jsonl"])
def test_every_part_is_looked_at_before_anything_is_loaded(
    second: str, model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(tmp_path / "records.jsonl", REVIEWS)
    write(tmp_path / "other.jsonl", SUMS)
    monkeypatch.setattr("privlora.cli.evaluation.loading", None)  # it would be called
    parts = ["--data", first, "--data", tmp_path / second]
    ended = call("evaluate", model, *parts, "--task", "sst2")
    (line,) = ended.err.splitlines()
    assert (ended.code, ended.out) == (2, "")
    assert ("names a file twice" if second == first.name else "holds no label") in line


def test_what_only_a_model_tells_is_refused_after_it(model: Path, tmp_path: Path, call: Call) -> None:
    data = write(tmp_path / "records.jsonl", REVIEWS)
    ended = call("evaluate", model, "--data", data, "--task", "sst2", "--max-length", 10)
    assert (ended.code, ended.out) == (2, "")
    (line,) = after(ended, *EVALUATING)
    assert "leave no room" in line


def test_all_that_is_wrong_with_a_call_is_told_at_once(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlora.cli.evaluation.loading", None)  # it would be called
    monkeypatch.chdir(tmp_path)
    asked = ["--data", "gone.jsonl", "--data", "lost.jsonl", "--dtype", "float99"]
    check(
        call("evaluate", "nowhere", *asked, "--per-example"),
        "cannot load model 'nowhere'",
        "dtype=",
        "how to ask is set",
        "--per-example is printed with --json only",
        "there is no file gone.jsonl",
        "there is no file lost.jsonl",
    )
    check(call("evaluate", "nowhere", *asked), "cannot load model 'nowhere'", "dtype=")


def test_all_that_is_wrong_with_an_export_is_told_at_once(tmp_path: Path, call: Call) -> None:
    check(
        call("export", tmp_path / "nowhere", tmp_path),
        "one of --merge and --as-lora is missing",
        "exists already",
        "no run in",
    )


def test_a_release_says_in_which_form_it_is_asked(
    model: Path, tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card names the form, and `evaluate` takes it from a release that lies alone."""
    pairs = [{"prompt": f"day {i}?", "completion": f"fine {i}"} for i in range(30)]
    write(tmp_path / "records.jsonl", pairs)
    form = {"prompt": "{prompt}\n", "completion": "completion"}
    data = {**form, "loss_on": "completion", "text": None}
    settings = run_settings(model, tmp_path, data=data)
    assert main(["train", str(write_config(tmp_path, settings))]) == 0
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "run" / "release", alone)
    report = json.loads((alone / "privacy_report.json").read_text())
    assert report["method"]["form"] == {**form, "template": "auto"}
    assert "ask it in the same form" in (alone / "README.md").read_text()
    assert verify(alone).passed
    capsys.readouterr()
    public = ["--data", write(tmp_path / "public.jsonl", [{**pair, "id": 1} for pair in pairs[:5]])]
    asked = call("evaluate", alone, "--base", model, *public, "--json")
    given = ["--prompt", "{prompt}\n", "--completion", "completion", "--loss-on", "completion"]
    same = call("evaluate", tmp_path / "run", *public, *given, "--json")
    assert asked.json["loss_per_example"] == pytest.approx(same.json["loss_per_example"], rel=1e-6)
    (alone / "privacy_report.json").unlink()
    lost = call("evaluate", alone, "--base", model, *public).err
    assert "has no column 'text'" in lost
