"""Records of every schema become one prompt and completion; what cannot be a record of the task is refused."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from promises import small_settings
from tiny_models import tiny_tokenizer

from privlora.config import DataSettings, checked, settings_from
from privlora.data.examples import IGNORED, encode_completions, encode_prompts
from privlora.data.records import load_records
from privlora.data.tasks import TASKS, find_task, questions
from privlora.errors import ConfigError, DataError
from privlora.training.inputs import tokenise

ASSETS = Path(os.environ.get("PRIVLORA_ASSETS") or Path(__file__).parents[3] / "shared") / "assets"

# One record of each task in the hub's columns, in ours, and the completion and gold that both give.
GLUE: list[tuple[str, dict[str, Any], dict[str, Any], str, float]] = [
    ("sst2", {"sentence": "good", "label": 1}, {"sentence1": "good", "label": 1}, " positive", 1),
    ("cola", {"sentence": "he go", "label": 0}, {"sentence1": "he go", "label": 0}, " no", 0),
    ("mrpc", {"sentence1": "a", "sentence2": "b", "label": 1}, {}, " yes", 1),
    ("stsb", {"sentence1": "a", "sentence2": "b", "label": 3.75}, {}, " 3.8", 3.75),
    ("qqp", {"question1": "a", "question2": "b", "label": 0}, {"sentence1": "a", "sentence2": "b"}, " no", 0),
    (
        "mnli",
        {"premise": "a", "hypothesis": "b", "label": 1},
        {"sentence1": "a", "sentence2": "b"},
        " maybe",
        1,
    ),
    ("qnli", {"question": "a", "sentence": "b", "label": 0}, {"sentence1": "a", "sentence2": "b"}, " yes", 0),
    ("rte", {"sentence1": "a", "sentence2": "b", "label": 1}, {"premise": "a", "hypothesis": "b"}, " no", 1),
]


@pytest.mark.parametrize(("name", "hub", "other", "completion", "gold"), GLUE)
def test_glue(name: str, hub: dict[str, Any], other: dict[str, Any], completion: str, gold: float) -> None:
    task = TASKS[name]
    ours = {"idx": 0, "sentence2": None, "label_text": None, **(other or hub), "label": hub["label"]}
    as_text = {**hub, "label": str(hub["label"])}  # as CSV files hold it
    found = [questions(task, [record])[0] for record in (hub, ours, as_text)]
    assert len(set(found)) == 1
    assert found[0].completion == completion
    assert found[0].gold == gold
    assert found[0].prompt.endswith("\nAnswer:")
    shown = [value for key, value in hub.items() if key != "label"]
    assert all(f": {value}\n" in found[0].prompt for value in shown)
    if task.names:
        named = {**hub, "label": task.names[int(gold)]}
        assert questions(task, [named])[0] == found[0]


@pytest.mark.parametrize("name", [row[0] for row in GLUE])
def test_every_label_has_its_completion(name: str) -> None:
    task, record = TASKS[name], next(row[1] for row in GLUE if row[0] == name)
    labels = range(len(task.labels)) if task.labels else [i / 5 for i in range(26)]
    made = [questions(task, [{**record, "label": label}])[0] for label in labels]
    assert [q.completion for q in made] == [task.completion(answer) for answer in task.answers]
    assert len({q.prompt for q in made}) == 1
    assert len(set(task.answers)) == len(task.answers) > 1
    for answer in task.answers:  # so that probabilities of answers need no end of text
        assert not any(other != answer and other.startswith(answer) for other in task.answers)


def test_a_mixture_is_each_records_task() -> None:
    records = [{**row[1], "task": row[0]} for row in GLUE]
    assert [q.completion for q in questions(TASKS["glue8"], records)] == [row[3] for row in GLUE]
    assert questions(TASKS["glue8"], records[2:3]) == questions(TASKS["mrpc"], records[2:3])


def test_contents_are_not_formats() -> None:
    record = {"sentence": "{0} {x} {", "label": 1}
    assert "{0} {x} {" in questions(TASKS["sst2"], [record])[0].prompt


def test_glue_as_instructions() -> None:
    record = {"instruction": "Is it good?", "input": "fine film", "output": "Positive."}
    found = questions(TASKS["sst2"], [record])[0]
    assert (found.completion, found.gold) == (" positive", 1)
    assert found.prompt.endswith("### Instruction:\nIs it good?\n\n### Input:\nfine film\n\n### Response:\n")


def test_llm_adapters() -> None:
    record = {"instruction": "1+1?", "input": "", "output": "1+1=2. The answer is 2.", "answer": "2.0"}
    found = questions(TASKS["math10k"], [{**record, "source": "gsm8k"}])[0]
    assert found.prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\n1+1?\n\n### Response:\n"
    )
    assert (found.completion, found.gold, found.source) == ("1+1=2. The answer is 2.", 2.0, "gsm8k")
    for answer, gold in ((145.0, 145.0), ("1,234", 1234.0), (3, 3.0), ("B", "B"), ("-1.5", -1.5)):
        assert questions(TASKS["svamp"], [{**record, "answer": answer}])[0].gold == gold
    bare = questions(TASKS["svamp"], [{"instruction": "1+1?", "input": "", "output": "", "answer": "2"}])[0]
    assert bare.completion == "The answer is 2."
    only_text = questions(TASKS["math10k"], [{"instruction": "1+1?", "output": "It is 2."}])[0]
    assert only_text.gold is None


def test_math_of_the_hub() -> None:
    gsm8k = {"question": "Eggs?", "answer": "She has 2*9=<<2*9=18>>18 eggs.\n#### 1,018"}
    found = questions(TASKS["gsm8k"], [gsm8k])[0]
    assert found.completion == "She has 2*9=18 eggs. The answer is 1,018."
    assert found.gold == 1018
    aqua = {"question": "Which?", "options": ["A)21", "B)5"], "rationale": "So 5.", "correct": "B"}
    found = questions(TASKS["aqua"], [aqua])[0]
    assert "Which? Answer Choices: (A) 21, (B) 5\n" in found.prompt
    assert (found.completion, found.gold) == ("So 5. The answer is B.", "B")
    svamp = {
        "Body": "Ann has 3 pens.",
        "Question": "How many?",
        "Equation": "3",
        "Answer": "3.0",
        "Type": "x",
    }
    found = questions(TASKS["svamp"], [svamp])[0]
    assert "\nAnn has 3 pens. How many?\n" in found.prompt
    assert (found.completion, found.gold) == ("The answer is 3.0.", 3.0)


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        ("sst2", {"sentense": "a", "label": 1}, "did you mean 'sentense'"),
        ("sst2", {"sentence": "a"}, "no column 'label'"),
        ("sst2", {"sentence": None, "label": 1}, "is empty (null)"),
        ("sst2", {"sentence": "a", "label": -1}, "unlabelled test splits"),
        ("sst2", {"sentence": "a", "label": 2}, "give 0 to 1"),
        ("sst2", {"sentence": "a", "label": True}, "no label"),
        ("sst2", {"sentence": "a", "label": "SECRET"}, "no label"),
        ("sst2", {"sentence": "a", "label": None}, "no label"),
        (
            "rte",
            {"sentence1": "a", "sentence2": "b", "label": 0, "label_text": "not_entailment"},
            "different",
        ),
        ("glue8", {"task": "gsm8k", "instruction": "a"}, "names no task of GLUE"),
        ("glue8", {"task": "SECRET", "sentence": "a", "label": 1}, "give one of sst2"),
        ("glue8", {"sentence": "a", "label": 1}, "no column 'task'"),
        ("mrpc", {"sentence1": "a", "sentence2": None, "label": 1}, "'sentence2' is empty (null)"),
        ("stsb", {"sentence1": "a", "sentence2": "b", "label": 5.1}, "from 0 to 5"),
        ("stsb", {"sentence1": "a", "sentence2": "b", "label": -1}, "from 0 to 5"),
        ("stsb", {"sentence1": "a", "sentence2": "b", "label": "SECRET"}, "from 0 to 5"),
        ("stsb", {"sentence1": "a", "sentence2": "b", "label": None}, "from 0 to 5"),
        ("math10k", {"text": "a"}, "no column 'instruction'"),
        ("math10k", {"instruction": "a"}, "no column 'output'"),
        ("math10k", {"instruction": "a", "output": "b", "answer": "SECRET"}, "neither a number nor a letter"),
        ("math10k", {"instruction": "a", "output": "b", "answer": "F"}, "neither a number nor a letter"),
        ("math10k", {"instruction": "a", "output": "b", "answer": "nan"}, "neither a number nor a letter"),
        ("gsm8k", {"question": "a", "answer": "SECRET"}, "####"),
        ("aqua", {"question": "a", "options": "A)1", "correct": "A"}, "list of texts"),
    ],
)
def test_refused_without_showing_contents(name: str, record: dict[str, Any], expected: str) -> None:
    of_glue = {row[0]: row[1] for row in GLUE} | {"glue8": {**GLUE[0][1], "task": "sst2"}}
    good = of_glue.get(name, {"instruction": "a", "output": "b", "answer": "1"})
    with pytest.raises(DataError, match="record 2") as caught:
        questions(TASKS[name], [good, record])
    assert expected in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_unknown_tasks_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sst2'"):
        find_task("sst-2")
    with pytest.raises(ConfigError, match="known: sst2, cola"):
        find_task("imagenet")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"task": "sst-2"}, "did you mean 'sst2'"),
        ({"task": "sst2", "text": "x"}, "remove text, or task"),
        ({"task": "sst2", "prompt": "x", "completion": "y"}, "remove prompt, completion, or task"),
        ({"task": "sst2", "messages": "x"}, "remove messages"),
        ({"task": 3}, "data.task|task"),
    ],
)
def test_contradictions_in_settings(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        checked(DataSettings, {"path": "x.jsonl", **settings}, "test")


def test_settings_of_a_task_survive_being_written() -> None:
    settings = small_settings(data={"path": "x.jsonl", "task": "rte"})
    assert settings.data.loss_on == "completion"
    assert settings_from(json.loads(settings.model_dump_json())) == settings


def test_training_and_asking_see_the_same_prompt() -> None:
    tokenizer = tiny_tokenizer()
    records = [GLUE[2][1], {**GLUE[2][1], "sentence1": "a much longer sentence than the other one is"}]
    for max_length in (512, 60):
        data = DataSettings(path="x.jsonl", task="mrpc", max_length=max_length, truncation_mode="keep_end")
        examples = tokenise(records, data, tokenizer)
        asked = questions(TASKS["mrpc"], records)
        (yes,) = encode_completions([asked[0].completion], tokenizer, prompt=asked[0].prompt)
        prompts = encode_prompts([q.prompt for q in asked], tokenizer, max_length=max_length - len(yes) - 1)
        for example, prompt in zip(examples, prompts, strict=True):
            labelled = example.labels != IGNORED
            assert example.input_ids[~labelled].tolist() == prompt.tolist()
            assert example.input_ids[labelled].tolist() == [*yes, tokenizer.eos_token_id]
            assert len(example.input_ids) <= max_length


def test_files_of_every_kind(tmp_path: Path) -> None:
    rows = [{"premise": f"p {i}", "hypothesis": f"h, {i}", "label": i % 3} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with open(tmp_path / "a.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    made = [
        questions(TASKS["mnli"], load_records(str(tmp_path / name)))
        for name in ("a.jsonl", "a.json", "a.csv", "a.parquet")
    ]
    assert made[0] == made[1] == made[2] == made[3]
    assert [row.completion for row in made[0][:3]] == [" yes", " maybe", " no"]


@pytest.mark.skipif(not ASSETS.exists(), reason="the optional data sets are absent (set PRIVLORA_ASSETS)")
@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("sst2", "glue/sst2/validation", 872),
        ("cola", "glue/cola/validation", 1043),
        ("mrpc", "glue/mrpc/validation", 408),
        ("stsb", "glue/stsb/validation", 1500),
        ("qnli", "glue/qnli/validation", 1000),
        ("gsm8k", "math/gsm8k_test", 1319),
        ("aqua", "math/aqua_test", 254),
        ("mawps", "math/mawps_test", 238),
        ("math10k", "math/train", 9415),
    ],
)
def test_real_files(name: str, file: str, count: int) -> None:
    found = questions(TASKS[name], load_records(str(ASSETS / "data" / f"{file}.jsonl.gz")))
    assert len(found) == count
    assert all(question.gold is not None for question in found)
    if name == "math10k":
        assert {question.source for question in found} == {"gsm8k", "mawps", "aqua"}
