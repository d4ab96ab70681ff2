"""What a call in Python shows, and where it may be passed on."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_cases import PRIVACY, PUBLIC, RECORDS
from tiny_models import tiny_model, tiny_tokenizer

from privlora import fine_tune, resume_run
from privlora.config import settings_from
from privlora.consoles import VARIABLE
from privlora.data.summary import DataSummary
from privlora.errors import DataError, PrivacyError, RunError
from privlora.running import _Screen
from privlora.training.callbacks import PublicEvent
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer
from privlora.training.progress import WRITING

NUMBERS = DataSummary(730, 730, 41.0, 77.0, cut=0.42, mostly_cut=0.21, empty=0.013, repeated=0.027)


def settings(folder: Path, **run: Any) -> Any:
    return settings_from(
        {
            "model": {"name": "m"},
            "data": {"path": "notes.jsonl", "max_length": 40},
            "privacy": {**PRIVACY, "public_dataset_size": 400},
            "run": {"output": str(folder), **run},
        },
        source="here",
    )


def told(folder: Path, *, terminal: bool) -> str:
    written = io.StringIO()
    shown = _Screen(Console(file=written, force_terminal=terminal, width=500, highlight=False))
    shown.on_data(NUMBERS, settings(folder))
    return written.getvalue()


def test_what_may_be_passed_on_has_nothing_of_the_records(tmp_path: Path) -> None:
    where = "statistics of the records: private/data_summary.json\n"
    assert told(tmp_path, terminal=False) == where
    assert "730 records" in told(tmp_path, terminal=True)


def call(folder: Path, **more: Any) -> Any:
    given = {"tokenizer": tiny_tokenizer(), "data": {"max_length": 40}, "adapter": {"r": 2}, **more}
    return fine_tune(tiny_model(), RECORDS, privacy=PRIVACY, output=folder, **given)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)


@pytest.mark.usefixtures("asked")
def test_a_call_shows_its_run_without_seconds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = PRIVACY["steps"]
    call(tmp_path / "run")
    out, err = capfd.readouterr()
    assert out == ""
    assert (
        "plan: epsilon 4.000 at delta 0.001 for each record, over 12 steps with poisson sampling (adj" in err
    )
    assert "dp-accounting" not in err  # versions stand in the ledger
    assert f"step {steps}/{steps}  ε" in err
    assert not re.search(r"ETA|\d s/|PRIVATE", err)
    assert err.splitlines()[-1] == WRITING  # after the last step, while packages that write are imported
    assert "reading the records" not in err  # nor a word whose time would tell how many there are


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("asked", [False, True])
def test_a_silent_call_shows_no_bars_of_others_and_gives_them_back(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    def bars() -> list[bool]:
        return [logging.is_progress_bar_enabled(), not are_progress_bars_disabled()]

    def train(*_: Any, **__: Any) -> None:
        seen.extend(bars())
        raise RuntimeError

    seen = list[bool]()
    monkeypatch.setattr("privlora.training.callbacks.checked_callbacks", train)
    enable_progress_bars()
    before = bars()
    with pytest.raises(RuntimeError):
        call(tmp_path / "run", show_progress=asked)
    assert seen == (before if asked else [False, False])
    assert bars() == before


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("said", ["argument", "environment", "observer"])
def test_a_call_may_be_silent(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    more = {"argument": {"show_progress": False}, "observer": {"observer": Observer()}}.get(said, {})
    if said == "environment":
        monkeypatch.setenv(VARIABLE, "0")
    call(tmp_path / "run", **more)
    assert not re.search("plan|step|ε", capfd.readouterr().err)


def stop(event: PublicEvent) -> None:
    if event.kind == "step":
        event.stop()


def test_whoever_stops_a_run_is_told_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted) as stopped:
        call(folder, evaluation=PUBLIC, callbacks=[stop])
    go_on = f"privlora.resume_run({str(folder)!r}, model=..., tokenizer=..., records=..., evaluation=...)"
    assert stopped.value.__notes__ == [f"All is saved. Go on with {go_on}"]
    with pytest.raises(
        RunError, match=r"records and evaluation were in memory.*records=\.\.\., evaluation=\.\.\."
    ):
        resume_run(folder, model=tiny_model(), tokenizer=tiny_tokenizer())


def test_a_run_goes_on_with_files_that_have_moved(tmp_path: Path) -> None:
    def write(path: Path, records: Any) -> Path:
        path.write_text("".join(f'{{"text": "{record["text"]}"}}\n' for record in records))
        return path

    before = write(tmp_path / "notes.jsonl", RECORDS)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    rest: dict[str, Any] = {"model": model, "tokenizer": tokenizer}
    with pytest.raises(Interrupted):
        fine_tune(
            model,
            before,
            tokenizer=tokenizer,
            privacy=PRIVACY,
            data={"max_length": 40},
            adapter={"r": 2},
            output=tmp_path / "run",
            callbacks=[stop],
        )
    after = before.rename(tmp_path / "moved.jsonl")
    with pytest.raises(DataError, match=r"notes\.jsonl.*--data FILE`") as moved:
        resume_run(tmp_path / "run", **rest)
    assert f"`privlora resume {shlex.quote(str(tmp_path / 'run'))} --data FILE`" in str(moved.value)
    assert "evaluation" not in str(moved.value)
    for number in (1, 12, 500):  # with so few delta would not do, and so many are no rounding
        more = write(tmp_path / "more.jsonl", [{"text": f"somebody else {i}."} for i in range(number)])
        with pytest.raises(PrivacyError, match="not those that the run began with") as refused:
            resume_run(tmp_path / "run", records=more, **rest)
        assert not {"public_dataset_size", "delta", str(number)} & set(str(refused.value).split())
    with pytest.raises(TypeError, match=r"resume_run\(\) got an unexpected keyword argument 'evil'"):
        resume_run(tmp_path / "run", evil=1)
    others = write(tmp_path / "others.jsonl", [*RECORDS[1:], {"text": "somebody else came in."}])
    with pytest.raises(PrivacyError, match="not those that the run began with"):
        resume_run(tmp_path / "run", records=others, **rest)
    assert resume_run(tmp_path / "run", records=after, **rest).steps == PRIVACY["steps"]


def test_a_run_goes_on_with_its_public_records(tmp_path: Path) -> None:
    """What lies in their place would have its loss published."""
    with pytest.raises(Interrupted):
        call(tmp_path / "run", evaluation=PUBLIC, callbacks=[stop])
    given: dict[str, Any] = {"model": tiny_model(), "tokenizer": tiny_tokenizer(), "records": RECORDS}
    with pytest.raises(PrivacyError, match="evaluation records are not those"):
        resume_run(tmp_path / "run", evaluation=[{"text": "of somebody else."}], **given)
    assert resume_run(tmp_path / "run", evaluation=PUBLIC, **given).steps == PRIVACY["steps"]
