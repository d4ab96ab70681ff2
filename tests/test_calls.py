"""Calls in Python: all that is wrong with one is told at once, and before torch is imported."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import privlora
from privlora.errors import ConfigError, DataError, ModelError, PrivloraError
from privlora.training.files import RunFolder

PRIVACY: dict[str, Any] = {
    "target_epsilon": 3,
    "delta": 1e-5,
    "steps": 3,
    "expected_batch_size": 2,
    "public_dataset_size": 9,
}
TEXTS = ["a"] * 9


@pytest.fixture(autouse=True)
def a_model_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as is seen before it is loaded: the folder "tiny"."""
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    for name in ("config.json", "tokenizer.json"):
        Path("tiny", name).write_text("{}")


_EARLY = """
import json, sys
import privlora
def told(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
bad = dict(target_epsilon=3, delta=2, steps=3, expected_batch_size=2, public_dataset_size=9)
good = {**bad, "delta": 1e-5}
found = [
    told(privlora.fine_tune, "./none", ["a"], privacy=bad, method="prizm"),
    told(privlora.fine_tune, "./none", ["a"], privacy=good),
    told(privlora.synthesize, "./none", ["a"], privacy=bad, synthesis={}),
    told(privlora.federate, "./none", {"a": ["x"], "b": ["y"]}, privacy=bad, federation={"rounds": 1}),
    told(privlora.PrivateTrainer, "./none", privlora.PrivateConfig(max_steps=3, delta=2), train_dataset=["a"]),
    told(privlora.resume_run, "./none"),
]
print(json.dumps([found, sorted({"torch", "transformers", "peft"} & set(sys.modules))]))
"""


def test_arguments_are_looked_at_before_torch_is_imported() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", _EARLY],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=120,
    )
    found, slow = json.loads(ended.stdout)
    assert slow == []
    assert found[1].startswith("ModelError: cannot load model './none': it is no local folder")
    assert found[5].startswith("RunError: no run in 'none'")
    for told in (found[0], *found[2:5]):
        assert "privacy.delta=2 is not below 1" in told
    assert "unknown method 'prizm'" in found[0]


def told(call: Any, *arguments: Any, **options: Any) -> PrivloraError:
    with pytest.raises(PrivloraError) as caught:
        call(*arguments, **options)
    return caught.value


@pytest.mark.parametrize(
    ("auto", "words"),
    [
        ("all", "auto is of type str, not a mapping of settings"),
        (3, "auto is of type int"),
        ({"all": "yes"}, "is neither true nor false"),
        ({"All": True}, "unknown setting 'auto.All'"),
        (False, "or set auto=dict(all=True), which finds what is not given"),
        (None, "privacy.steps is missing"),
    ],
)
def test_what_is_no_auto(auto: Any, words: str) -> None:
    sizeless = {name: PRIVACY[name] for name in ("target_epsilon", "delta", "public_dataset_size")}
    assert words in str(told(privlora.fine_tune, "tiny", TEXTS, privacy=sizeless, auto=auto))
    assert words not in str(
        told(privlora.fine_tune, "tiny", TEXTS, privacy=sizeless, auto=True, method="dp-sdg")
    )


def test_all_that_is_wrong_with_a_call_is_told_at_once() -> None:
    error = told(
        *(privlora.fine_tune, "tiny", [{"text": "Lovelace"}, 3]),
        privacy={**PRIVACY, "delta": 2, "stepz": 1},
        method={"name": "dp-zo", "clipping": "per-module", "relative_rate": True},
        columns={"txt": "a", "path": "b"},
        run=3,
        output="",
        eval_dataset=[],
        evil=1,
    )
    assert type(error) is ConfigError
    for words in (
        "fine_tune has no argument eval_dataset",
        "fine_tune() has no argument 'evil'",
        "output is empty",
        "run is of type int",
        "columns holds 'path'",
        "unknown setting 'data.txt'",
        "unknown setting 'privacy.stepz'",
        "privacy.delta=2 is not below 1",
        "method 'dp-zo' cannot clip as clipping='per-module' does",
        "method.relative_rate=true cannot be used",
    ):
        assert words in str(error)
    assert "Lovelace" not in str(error)
    assert len(error.fixes) == 11


def test_arguments_of_no_use_are_told_beside_the_rest() -> None:
    wrong: dict[str, Any] = {"method": 3, "output": 5, "callbacks": 3, "observer": 4}
    error = told(privlora.fine_tune, "tiny", TEXTS, privacy=PRIVACY, profile="yes", show_progress=1, **wrong)
    for words in (
        "method is of type int",
        "output is of type int",
        "callbacks is of type int",
        "observer is of type int, without a method on_step",
        "profile is of type str, and neither True nor False. Fix: give profile=True or profile=False",
        "show_progress is of type int, and neither True nor False",
    ):
        assert words in str(error)
    assert len(error.parts) == 6
    error = told(privlora.resume_run, 5, tokenizer=3, callbacks=[3], profile=None, records=4)
    for words in (
        "root is of type int",
        "tokenizer is of",
        "callbacks[0] is of",
        "profile is of",
        "records: ",
    ):
        assert words in str(error)
    args = privlora.PrivateConfig(**_of_clients(), max_steps=3)
    error = told(privlora.PrivateTrainer, "tiny", args, train_dataset=TEXTS, peft_config=3, callbacks=3)
    assert [part.what.partition(" is ")[0] for part in error.parts] == ["peft_config", "callbacks"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"modle": "tiny", "train_dataset": TEXTS}, "modle: did you mean 'model'?"),
        ({"model": "tiny", "train_datset": TEXTS}, "train_datset: did you mean 'train_dataset'?"),
        ({"model": "tiny", "data": TEXTS}, "data: it is called train_dataset here"),
        ({"model": "tiny"}, "give a list of mappings or of texts"),
    ],
)
def test_an_argument_that_is_needed_is_told_by_its_name(given: dict[str, Any], meant: str) -> None:
    args = privlora.PrivateConfig(**_of_clients(), max_steps=3)
    error = told(privlora.PrivateTrainer, args=args, **given)
    assert error.fixes[0].startswith(meant)
    assert len(error.fixes) == (1 if list(given) == ["model"] else 2)
    assert isinstance(error, TypeError) or "data" in given  # as Python has it
    bad = privlora.PrivateConfig(**{**_of_clients(), "delta": 2}, max_steps=3)
    assert "delta=2 is not below 1" in str(told(privlora.PrivateTrainer, args=bad, **given))


def test_what_is_not_given_by_any_name_is_told_together() -> None:
    error = told(privlora.fine_tune)
    assert [part.what.partition(" is not given")[0] for part in error.parts] == ["privacy", "data", "model"]
    for call in (privlora.resume_run, privlora.resume_federation):
        with pytest.raises(
            TypeError, match=r"root is not given, which resume_\w+ needs. Fix: give the folder of"
        ):
            call()
    with pytest.raises(TypeError, match="synthesis is not given"):
        privlora.synthesize("tiny", TEXTS)
    args = privlora.PrivateConfig(**_of_clients(), max_steps=3)
    with pytest.raises(TypeError, match="positional arguments"):
        privlora.PrivateTrainer("tiny", args, None, TEXTS)
    with pytest.raises(TypeError, match="multiple values for argument 'args'"):
        privlora.PrivateTrainer("tiny", args, args=args, train_dataset=TEXTS)


def test_what_is_not_given_does_not_hide_the_rest() -> None:
    error = told(privlora.fine_tune, "tiny", TEXTS, adapter={"rank": 3}, run={"seed": "x"})
    assert "privacy is not given" in str(error)
    assert "unknown setting 'adapter.rank'" in str(error)
    assert "run.seed=" in str(error)
    assert len(error.fixes) == 3


def test_an_argument_that_nothing_is_called_is_a_type_error_alone() -> None:
    with pytest.raises(
        TypeError, match=r"fine_tune\(\) has no argument 'columnz'. Fix: columnz: did you mean 'columns'"
    ):
        privlora.fine_tune("tiny", TEXTS, privacy=PRIVACY, columnz={})
    terms: dict[str, Any] = {"rule": "tan", "rounds": 2, "clients": 2}
    with pytest.raises(TypeError, match="has no argument 'evil'"):
        privlora.federate("tiny", TEXTS, federation=terms, privacy=_of_clients(), evil=3)
    with pytest.raises(TypeError, match="has no argument 'evil'"):
        privlora.synthesize("tiny", TEXTS, synthesis={}, privacy=PRIVACY, evil=3)
    with pytest.raises(TypeError, match="has no argument") as caught:
        privlora.fine_tune("tiny", TEXTS, privacy=PRIVACY, **{"patient Greta has it since 1999": 1})
    assert "Greta" not in str(caught.value)
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        privlora.resume_run("runs/a", [{"text": "a"}])


def _of_clients() -> dict[str, Any]:
    return {name: value for name, value in PRIVACY.items() if name != "steps"}


def test_a_federation_tells_all() -> None:
    clients = {"north": ["a"], "south": 3}
    error = told(
        *(privlora.federate, "tiny", clients),
        federation={"rule": "tann", "rounds": 0, "clients": 2},
        privacy={**_of_clients(), "delta": 2},
        eval_dataset=["b"],
    )
    for words in (
        "federate has no argument eval_dataset",
        "data names the clients",
        "data['south']: records in memory",
        "federation.rule: unknown rule (text, not shown",
        "federation.rounds=0",
        "privacy.delta=2",
    ):
        assert words in str(error)
    assert len(error.fixes) == 6
    error = told(privlora.federate, "tiny", {"north": ["a"], "south": ["b"]}, federation=3, run={"seed": "x"})
    assert (
        len(error.fixes) == 3
    )  # federation, privacy, run; and nothing of steps or clients that nobody knows


def test_texts_tell_all() -> None:
    error = told(privlora.synthesize, "tiny", TEXTS, synthesis={"generator": "gpt"}, run=3, train_dataset=[])
    for words in (
        "synthesize has no argument train_dataset",
        "privacy is not given",
        "is no generator",
        "run is of type",
    ):
        assert words in str(error)
    assert len(error.fixes) == 4


def test_a_trainer_tells_all() -> None:
    error = told(privlora.PrivateConfig, packing=True, rank=3, steps=2)
    assert [words in str(error) for words in ("packing is set", "has no 'rank'", "is called max_steps")] == [
        True
    ] * 3
    args = privlora.PrivateConfig(
        target_epsilon=-1, delta=2, num_train_epochs=3, expected_batch_size=2, public_dataset_size=9, bf16=True,
        lr_scheduler_type="polynomial", eval_strategy="epoch",
    )  # fmt: skip
    error = told(
        *(privlora.PrivateTrainer, "tiny", args),
        train_dataset=TEXTS,
        eval_dataset=3,
        compute_metrics=len,
        columns=3,
        evil=1,
    )
    for words in (
        "PrivateTrainer() has no argument 'evil'",
        "compute_metrics is given",
        "num_train_epochs=3, and private training counts steps",
        "lr_scheduler_type='polynomial'",
        "columns is of type int",
        "eval_dataset: records in memory",
        "privacy.target_epsilon=-1",
        "privacy.delta=2",
    ):
        assert words in str(error)
    assert len(error.fixes) == 8


def test_what_is_not_there_is_told_together(tmp_path: Path) -> None:
    output = {"output": tmp_path / "run"}
    error = told(
        privlora.fine_tune, tmp_path / "none", "a.jsonl", evaluation="b.jsonl", privacy=PRIVACY, **output
    )
    assert type(error) is ConfigError
    for words in (
        "cannot load model",
        "data.path: there is no file a",
        "data.evaluation: there is no file b",
    ):
        assert words in str(error)
    error = told(privlora.fine_tune, tmp_path / "none", TEXTS, privacy=PRIVACY, **output)
    assert type(error) is ModelError
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    columns = {"prompt": "q", "completion": "a"}
    error = told(privlora.fine_tune, tmp_path, [{"text": "x"}], privacy=PRIVACY, columns=columns, **output)
    assert type(error) is DataError
    assert "no column 'a'" in str(error)
    assert "no column 'q'" in str(error)


def test_help_and_completion_know_what_a_call_takes() -> None:
    found = inspect.signature(privlora.fine_tune).parameters
    assert list(found)[:3] == ["model", "data", "privacy"]
    assert found["method"].default == "prism"
    assert "Fine-tune a causal LM privately" in (inspect.getdoc(privlora.fine_tune) or "")
    assert set(privlora.__all__) <= set(dir(privlora))
    assert all(getattr(privlora, name) is not None for name in privlora.__all__)
    with pytest.raises(AttributeError, match="no attribute 'finetune'"):
        _ = privlora.finetune


def test_columns_are_proposed_as_the_call_takes_them(tmp_path: Path) -> None:
    """Nothing of a record is shown."""
    rows = [{"patient": 7, "note": "Lovelace came late"}]
    asked = [{"question": "Who is Lovelace?", "answer": "Ada"}]
    args = privlora.PrivateConfig(
        target_epsilon=3, delta=1e-5, max_steps=2, expected_batch_size=2, public_dataset_size=100
    )
    output = {"output": tmp_path / "run"}
    pair = "columns=dict(prompt=NAME) with columns=dict(completion=NAME)"
    for records in (rows, asked):
        error = told(privlora.fine_tune, tmp_path, records, privacy=PRIVACY, **output)
        assert f"Fix: name its columns, as columns=dict(text=NAME); or {pair}" in str(error)
        of_trainer = told(privlora.PrivateTrainer, str(tmp_path), args, train_dataset=records)
        assert f"name its columns, as dataset_text_field=NAME; or {pair}" in str(of_trainer)
        assert "Lovelace" not in f"{error} {of_trainer}"


def test_settings_are_mended_as_arguments_of_the_call() -> None:
    error = told(
        *(privlora.fine_tune, "tiny", TEXTS),
        privacy={**PRIVACY, "delta": 2, "stepz": 4},
        columns={"max_len": 3},
        method={"name": "prism", "learning_rate": "fast"},
    )
    for words in (
        "privacy.delta=2 is not below 1. Fix: a number below 1, as privacy=dict(delta=1e-5)",
        "did you mean 'max_length'? Write columns=dict(max_length=3)",
        "as method=dict(learning_rate=0.001)",
    ):
        assert words in str(error)
    args = privlora.PrivateConfig(
        target_epsilon=3, delta=2, max_steps=2, expected_batch_size=2, public_dataset_size=100
    )
    error = told(privlora.PrivateTrainer, "tiny", args, train_dataset=TEXTS)
    assert error.fixes == ("a number below 1, as delta=1e-5",)


def test_a_name_of_a_tokenizer_is_none() -> None:
    """Its type is told beside what else is wrong, and not that a string has no token."""
    with_one: dict[str, Any] = {"privacy": {**PRIVACY, "delta": 2}, "tokenizer": "path/to/tokenizer"}
    of_clients = {
        **with_one,
        "privacy": {**_of_clients(), "delta": 2},
        "federation": {"rule": "tan", "rounds": 2},
    }
    args = privlora.PrivateConfig(**{**_of_clients(), "delta": 2}, max_steps=3)
    for error, name in (
        (told(privlora.fine_tune, "tiny", TEXTS, **with_one), "tokenizer"),
        (told(privlora.synthesize, "tiny", TEXTS, synthesis={}, **with_one), "tokenizer"),
        (told(privlora.federate, "tiny", {"a": ["x"], "b": ["y"]}, **of_clients), "tokenizer"),
        (
            told(privlora.PrivateTrainer, "tiny", args, train_dataset=TEXTS, processing_class="tok"),
            "processing_class",
        ),
    ):
        assert f"{name} is of type str, and no tokenizer" in str(error)
        assert f"{name}=AutoTokenizer.from_pretrained(...), or leave it out" in str(error)
        assert "delta=2 is not below 1" in str(error)
    for call in (privlora.resume_run, privlora.resume_federation):
        assert "tokenizer is of type str" in str(told(call, "runs/none", tokenizer="tok"))


def test_a_name_of_other_trainers_stands_for_no_missing_argument() -> None:
    error = told(privlora.fine_tune, model="tiny", train_dataset=TEXTS, privacy={**PRIVACY, "delta": 2})
    assert "Fix: train_dataset: it is called data here" in str(error)
    assert "delta=2 is not below 1" in str(error)
    assert len(error.fixes) == 3
    with pytest.raises(TypeError, match="root is not given"):
        privlora.resume_run(output_dir="runs/none")  # type: ignore[call-arg]


def test_a_folder_of_other_files_is_no_place_for_a_run(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "north.csv").write_text("text\na\n")
    error = told(privlora.fine_tune, tmp_path / "none", TEXTS, privacy=PRIVACY, output=clients)
    assert f"{str(clients)!r} is not empty, and what it holds is no run of privlora" in str(error)
    assert "pass output=" in str(error) or "set output" in str(error)
    assert "north" not in str(error)
    terms: dict[str, Any] = {"rule": "tan", "rounds": 2, "clients": 2}
    of_clients = {"federation": terms, "privacy": _of_clients(), "output": clients}
    assert "is no run of privlora" in str(told(privlora.federate, tmp_path / "none", TEXTS, **of_clients))
    assert [path.name for path in clients.iterdir()] == ["north.csv"]


def test_a_folder_in_which_a_run_has_begun_or_nothing_lies_is_taken(tmp_path: Path) -> None:
    for name, kept in {
        "new": None,
        "empty": "",
        "begun": "private",
        "logged": "train.log",
        "hidden": ".git",
    }.items():
        folder = tmp_path / name
        if kept is not None:
            (folder / kept).mkdir(parents=True)
        RunFolder(folder).refuse_foreign()


def test_no_data_is_told_as_such() -> None:
    terms: dict[str, Any] = {"rule": "tan", "rounds": 2, "clients": 2}
    for call, more in (
        (privlora.fine_tune, {"privacy": PRIVACY}),
        (privlora.federate, {"privacy": _of_clients(), "federation": terms}),
    ):
        error = told(call, "tiny", None, output=3, **more)
        assert "data is None, so there are no records. Fix: give a list of mappings or of texts" in str(error)
        assert "has no value" not in str(error)
    assert "or the path of a file of records" in str(told(privlora.fine_tune, "tiny", 3, privacy=PRIVACY))


def test_a_setting_by_another_name_is_not_missing_too() -> None:
    error = told(privlora.fine_tune, "tiny", TEXTS, privacy={"epsilon": 3, "public_datset_size": 9})
    assert str(error).count("target_epsilon") == 1
    assert str(error).count("public_dataset_size") == 2  # did you mean it, and the line to write
    assert "privacy.delta is missing" in str(error)


def test_a_slip_of_the_pen_that_another_group_has() -> None:
    error = told(privlora.fine_tune, "tiny", TEXTS, privacy=PRIVACY, run={"seeds": 1})
    assert error.fix == (
        "did you mean 'seed'? Else it belongs elsewhere: write synthesis=dict(seeds=…). Write run=dict(seed=1)"
    )
