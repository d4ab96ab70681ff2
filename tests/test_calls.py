"""Calls in Python: all that is wrong with one is told at once, and before torch is imported."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from promises import promise

import privlora
from privlora.errors import ConfigError, DataError, ModelError, PrivloraError

PRIVACY = promise(steps=3, batch=2, records=9, delta=1e-5, target_epsilon=3)
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
        assert re.search(r"(privacy\['delta'\]|delta)=2: input should be less than 1", told)
    assert "unknown method 'prizm'" in found[0]


def told(call: Any, *arguments: Any, **options: Any) -> PrivloraError:
    with pytest.raises(PrivloraError) as caught:
        call(*arguments, **options)
    return caught.value


def test_all_that_is_wrong_with_a_call_is_told_at_once() -> None:
    error = told(
        *(privlora.fine_tune, "tiny", [{"text": "Lovelace"}, 3]),
        privacy={**PRIVACY, "delta": 2, "stepz": 1},
        method={"name": "dp-zo", "clipping": "per-module", "relative_rate": True},
        data={"txt": "a", "path": "b"},
        run=3,
        output="",
        callbacks=3,
        observer=4,
        tokenizer="path/to/tokenizer",
    )
    assert type(error) is ConfigError
    for words in (
        "output is empty",
        "run is of type int, not a mapping of settings",
        "data holds 'path'",
        "unknown setting 'privacy.stepz'",
        "privacy['delta']=2: ",
        "method.relative_rate=true cannot be used",
        "callbacks is of type int",
        "tokenizer is of type str, and no tokenizer",
    ):
        assert words in str(error)
    assert "Lovelace" not in str(error)


@pytest.mark.parametrize(
    ("call", "given", "meant"),
    [
        ("fine_tune", {"eval_dataset": []}, "did you mean evaluation?"),
        ("fine_tune", {"columns": {}}, "did you mean data?"),
        ("fine_tune", {"max_grad_norm": 1}, r"did you mean privacy=dict\(clip_norm=...\)\?"),
        ("federate", {"evil": 3}, "'evil'$"),
        ("PrivateTrainer", {"records": []}, "it takes those of a trainer"),
        ("fine_tune", {"patient Greta has it since 1999": 1}, "not shown"),
    ],
)
def test_an_argument_that_there_is_not_is_a_type_error_with_what_is_meant(
    call: str, given: dict[str, Any], meant: str
) -> None:
    needed = {"train_dataset": TEXTS} if call == "PrivateTrainer" else {}
    with pytest.raises(
        TypeError, match=rf"{call}\(\) got an unexpected keyword argument .*{meant}"
    ) as caught:
        getattr(privlora, call)("tiny", **given, **needed)
    assert "Greta" not in str(caught.value)


def _of_clients() -> dict[str, Any]:
    return {name: value for name, value in PRIVACY.items() if name != "steps"}


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
    error = told(privlora.fine_tune, tmp_path, [{"text": "x"}], privacy=PRIVACY, data=columns, **output)
    assert type(error) is DataError
    assert "no column 'a'" in str(error)
    assert "no column 'q'" in str(error)


def test_help_and_completion_know_what_a_call_takes() -> None:
    found = inspect.signature(privlora.fine_tune).parameters
    assert list(found)[:3] == ["model", "records", "privacy"]
    assert found["method"].default == "prism"
    assert "Fine-tune a causal LM privately" in (inspect.getdoc(privlora.fine_tune) or "")
    assert set(privlora.__all__) <= set(dir(privlora))
    assert all(getattr(privlora, name) is not None for name in privlora.__all__)
    with pytest.raises(AttributeError, match="no attribute 'finetune'"):
        _ = privlora.finetune


def test_columns_are_proposed_without_a_word_of_a_record(tmp_path: Path) -> None:
    rows = [{"patient": 7, "note": "Lovelace came late"}]
    asked = [{"question": "Who is Lovelace?", "answer": "Ada"}]
    for records in (rows, asked):
        error = told(privlora.fine_tune, tmp_path, records, privacy=PRIVACY, output=tmp_path / "run")
        assert "Fix: name its columns, as data.text=NAME; or " in str(error)
        assert "Lovelace" not in str(error)


def test_a_folder_of_other_files_is_no_place_for_a_run(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "north.csv").write_text("text\na\n")
    error = told(privlora.fine_tune, tmp_path / "none", TEXTS, privacy=PRIVACY, output=clients)
    assert f"{str(clients)!r} is not empty, and what it holds is no run of privlora" in str(error)
    assert "run.output" in str(error)
    assert "north" not in str(error)
    terms: dict[str, Any] = {"rule": "tan", "rounds": 2, "clients": 2}
    of_clients = {"federation": terms, "privacy": _of_clients(), "output": clients}
    assert "is no run of privlora" in str(told(privlora.federate, tmp_path / "none", TEXTS, **of_clients))
    assert [path.name for path in clients.iterdir()] == ["north.csv"]
