"""What an adapter says to public prompts: on the screen, in the report, on the page and in the card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from run_cases import PUBLIC, RECORDS, Bench, Warned
from tiny_models import tiny_model, tiny_tokenizer

from privlora import federate
from privlora.config import DataSettings
from privlora.reporting import rewrite_report
from privlora.reporting.answers import _common_lines, _told, answers
from privlora.reporting.card import card
from privlora.reporting.page import render
from privlora.reporting.verifying import verify
from privlora.reporting.wording import faults, spoken
from privlora.training.files import RunFolder

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}.{{ m.content }}{{ eos_token if m.role == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}a.{% endif %}"
)


def data_of(**columns: Any) -> DataSettings:
    return DataSettings(path="(in memory)", max_length=40, **columns)


def prompts_of(data: DataSettings, records: list[dict[str, Any]], tokenizer: Any = None) -> list[str]:
    found = answers(tiny_model(), tokenizer or tiny_tokenizer(), data, records)
    return [each["prompt"] for each in found["shown"]]


class Ending(torch.nn.Module):
    """A tiny model that ends every answer at once, as an adapter does that has learnt to."""

    def __new__(cls) -> Any:
        model = tiny_model()

        def ends(_: Any, __: Any, out: Any) -> Any:
            out.logits[..., tiny_tokenizer().eos_token_id] = 1e4
            return out

        model.register_forward_hook(ends)
        return model


def test_a_prompt_that_training_cuts_is_asked_whole() -> None:
    """As whoever uses the adapter asks it."""
    data = DataSettings(path="(in memory)", max_length=8, prompt="q", completion="a")
    assert prompts_of(data, [{"q": "a prompt of some", "a": "answer"}]) == ["a prompt of some"]


def test_a_prompt_is_what_stands_before_the_answer_in_training() -> None:
    pairs = [{"q": f"number {i}", "a": "of some length"} for i in range(5)]
    form = {"prompt": "q", "completion": "a"}
    first = [f"number {i}" for i in range(3)]
    assert prompts_of(data_of(**form), pairs) == first
    assert prompts_of(data_of(**form, loss_on="completion"), pairs) == first
    assert prompts_of(data_of(text="{q}{a}"), pairs[:1]) == ["number 0of "]  # a beginning of half its length
    chosen = [{"q": "which", "good": "this one", "bad": "that one"}]
    assert prompts_of(data_of(prompt="q", chosen="good", rejected="bad"), chosen) == ["which"]


@pytest.mark.parametrize("loss_on", ["all", "completion"])
def test_a_chat_is_asked_with_its_generation_prompt(loss_on: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    turns = [("user", "hello"), ("assistant", "good day"), ("user", "bye"), ("assistant", "farewell")]
    talk = [{"talk": [{"role": role, "content": words} for role, words in turns]}]
    data = data_of(messages="talk", loss_on=loss_on)
    (asked,) = prompts_of(data, talk, tokenizer)
    assert asked == "u.hello a."
    own = prompts_of(data, [], tokenizer)
    assert len(own) == 3
    assert all(each.endswith(" a.") for each in own)


def test_lines_that_all_prompts_begin_or_end_with_are_not_shown() -> None:
    asked = [f"system\nBe kind.\nuser\n{text}\nassistant\n" for text in ("one", "two")]
    start, end = _common_lines(asked)
    assert [text[start : len(text) - end] for text in asked] == ["one\n", "two\n"]
    assert [_common_lines(few) for few in (asked[:1], [], ["Q: one", "Q: two"])] == [(0, 0)] * 3


@pytest.mark.parametrize(
    "columns", [{"text": "note"}, {"prompt": "{a}: {b}", "completion": "c"}, {"task": "gsm8k"}]
)
def test_without_public_records_the_model_is_asked_something_of_privloras_own(
    columns: dict[str, Any],
) -> None:
    found = answers(tiny_model(), tiny_tokenizer(), data_of(**columns), [])
    assert found["asked"] == "own"
    assert found["shown"]


def test_where_prompts_are_from_is_said() -> None:
    found = answers(
        tiny_model(), tiny_tokenizer(), data_of(text="note"), [{"note": "a public text of some words"}]
    )
    assert found["asked"] == "data.evaluation"


def test_who_writes_nothing_is_not_asked() -> None:
    labelled = data_of(label="y", labels=["a", "b"])
    assert answers(tiny_model(), tiny_tokenizer(), labelled, []) is None
    plain = SimpleNamespace(parameters=lambda: iter(()))
    assert answers(plain, tiny_tokenizer(), data_of(text="text"), []) is None


def test_a_model_that_cannot_be_asked_keeps_its_release(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.generate = lambda **_: 1 / 0
    assert answers(model, tiny_tokenizer(), data_of(text="text"), RECORDS) is None
    assert "the adapter could not be asked" in caplog.text


@pytest.mark.parametrize(
    ("text", "row", "fault"),
    [
        ("", [], "ends at once"),
        (" \n", [5, 6], "says nothing"),
        ("ha ha ha", [4] * 12, "repeats itself"),
        ("one two three", [9, 1, *[2, 3, 4, 5, 6] * 3], "repeats itself"),
        ("one two three", [*range(30)], None),
        ("yes yes", [4, 4, 4], None),
        ("a question that has some length", [*range(9)], "repeats the prompt"),
        ("a short one", [*range(4)], None),
    ],
)
def test_what_is_odd_about_an_answer(text: str, row: list[int], fault: str | None) -> None:
    asked = "a short one, and a question that has some length?"
    assert _told(text, row, asked) == {"text": text.strip(), "fault": fault}


def test_nothing_of_an_answer_has_an_effect(report: dict[str, Any]) -> None:
    """Neither on a terminal, nor on the page, nor in the card; and a long one is cut."""
    wild = (
        "<script>alert(1)</script> | [a](javascript:1) \x1b[31m\u202e`x` http://a.b www.a.b *b*\n# h"
        + "y" * 999
    )
    told = _told(wild, [1, 2], "asked")
    assert len(str(told["text"])) <= 301
    assert not any(c in str(told["text"]) for c in "\x1b\u202e")
    said = {
        "asked": "own",
        "max_new_tokens": 40,
        "shown": [{"prompt": wild[:200], "base": told, "adapter": told}],
        "begun": 1,
        "ends_at_once": {"base": 0, "adapter": 0},
    }
    page, text = (made({**report, "answers": said}) for made in (render, card))
    assert "<script>alert" not in page
    row = next(line for line in text.splitlines() if "alert" in line)
    assert row.count(" | ") == 2
    assert not re.search(r"(?<!\\)[<*`\[]", row)
    assert "http://" not in row
    assert "www." not in row
    assert all(line.isprintable() for line in spoken(said))


def test_an_adapter_that_ends_at_once_is_told_everywhere(tmp_path: Path) -> None:
    bench, observer = Bench(), Warned()
    bench.model = Ending()
    folder = RunFolder(tmp_path / "run")
    result = bench.start(folder.root, evaluation=PUBLIC, observer=observer)
    words = "on 4 of 4 public prompts the adapter's answer ends at once; the base model's does on 4"
    assert any(words in each and "Fix: " in each for each in observer.warnings)
    assert faults(result.report["answers"]) == [words]
    for name in ("report.html", "README.md"):
        shown = (folder.release / name).read_text().replace("&#39;", "'")
        assert f"Warning: {words}." in shown
        assert "visitor" in shown  # the prompts are public
        assert "patient" not in shown
    assert sum("(ends at once)" in line for line in spoken(result.report["answers"])) == 6
    assert verify(folder.release).passed
    before = {path.name: path.read_bytes() for path in folder.release.iterdir()}
    rewrite_report(folder)
    assert {path.name: path.read_bytes() for path in folder.release.iterdir()} == before


def test_the_answers_are_those_of_what_is_released(tmp_path: Path) -> None:
    """Of the average of the iterates, as peft loads it, and the model is given back."""
    from peft import PeftModel

    bench = Bench()
    options = {"method": {"name": "dp-adamw", "learning_rate": 0.5}, "evaluation": PUBLIC}
    result = bench.start(tmp_path / "run", **options)
    tuned = PeftModel.from_pretrained(bench.model, str(result.release))
    again = answers(tuned, bench.tokenizer, data_of(text="text"), PUBLIC)
    assert again == result.report["answers"]
    assert any(each["base"] != each["adapter"] for each in again["shown"])


def test_a_federation_shows_its_adapters_answers(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 1.0, "delta": 1e-3, "expected_batch_size": 6, "public_dataset_size": 30}
    found = federate(
        tiny_model(),
        {"a": RECORDS[:15], "b": RECORDS[15:]},
        federation={"rule": "tan", "rounds": 1, "local_steps": 1},
        privacy=privacy,
        tokenizer=tiny_tokenizer(),
        evaluation=PUBLIC,
        adapter={"r": 2},
        data={"max_length": 40},
        output=tmp_path / "run",
    )
    report = json.loads((found.release / "privacy_report.json").read_text())
    assert len(report["answers"]["shown"]) == 3
    assert "What it says" in (found.release / "report.html").read_text()


def test_of_more_prompts_it_is_seen_whether_answers_end_at_once(tmp_path: Path) -> None:
    """Each prompt counts once, and three are answered in full."""
    pairs = [{"q": f"number {i % 20}", "a": "of some length"} for i in range(60)]
    data = data_of(prompt="q", completion="a")
    found = answers(Ending(), tiny_tokenizer(), data, pairs)
    assert (len(found["shown"]), found["begun"]) == (3, 12)
    assert found["ends_at_once"] == {"base": 12, "adapter": 12}
    assert len({each["prompt"] for each in found["shown"]}) == 3
    once = answers(tiny_model(), tiny_tokenizer(), data, pairs[:1] * 5)
    assert once["begun"] == 1


def test_prompts_leave_room_for_an_answer() -> None:
    """In a model that reads 64 tokens."""
    long = [{"q": "a" * 60, "a": "b"}]
    data = DataSettings(path="(in memory)", max_length=64, prompt="q", completion="a")
    assert np.array([len(each) <= 24 for each in prompts_of(data, long)]).all()


def test_a_base_model_that_repeats_itself_is_no_news() -> None:
    odd, fine = {"text": "ha", "fault": "repeats itself"}, {"text": "ha", "fault": None}

    def told(*both: dict[str, Any]) -> list[str]:
        shown = [{"prompt": "p", "base": both[0], "adapter": both[1]}]
        ends = {"base": 0, "adapter": 0}
        return faults(
            {"asked": "own", "max_new_tokens": 40, "shown": shown, "begun": 1, "ends_at_once": ends}
        )

    assert told(odd, odd) == told(odd, fine) == []
    assert len(told(fine, odd)) == 1
