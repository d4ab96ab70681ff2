"""Public texts of runs whose records are prompts with answers, or chats: read as the private records are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from promises import promise, small_settings
from safetensors.torch import load_file
from tiny_models import tiny_llama, tiny_tokenizer

from privlora.accounting import read_ledger
from privlora.api import fine_tune
from privlora.demo import model_path
from privlora.errors import ConfigError, DataError, PrivacyError
from privlora.methods import find_row
from privlora.synthesis.writers import ModelWriter
from privlora.training.inputs import load_data, tokenise
from privlora.training.public_form import PublicForm
from privlora.training.texts.synthetic_texts import SyntheticTexts, refuse_unusable_texts

PROMPT = "write a note."
TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
CHAT = TURNS + "{% if add_generation_prompt %}assistant: {% endif %}"
FORMS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "ask", "completion": "note"},
    "prompt, chat": {"prompt": "ask", "completion": "note", "chat_template": CHAT},
    "messages": {"messages": "talk", "chat_template": CHAT},
}
PRIVACY = promise(steps=2, batch=6, records=30, noise_multiplier=1.0)
SYNTHESIS = {"seeds": 4, "variations": 1, "similarity_limit": None}
FIXED = {"random_prompt": PROMPT}


def as_record(answer: str, prompt: str = PROMPT) -> dict[str, Any]:
    """With the columns of every form."""
    talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"ask": prompt, "note": answer, "talk": talk}


PRIVATE = [as_record(f"guest {i} came in at {i % 7} with a cold.") for i in range(30)]


def read(form: dict[str, Any], *, method: str = "pe-sgd", **synthesis: Any) -> Any:
    return small_settings(
        data={"path": "x.jsonl", "max_length": 90, **form},
        privacy=PRIVACY,
        synthesis={**SYNTHESIS, **synthesis},
        method={"name": method},
    )


def write_public(folder: Path, records: Sequence[dict[str, Any]]) -> str:
    file = folder / "public.jsonl"
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(file)


class Notes:
    def random(self, count: int) -> list[str]:
        return [f"room {i} is cold." for i in range(count)]

    def vary(self, texts: Sequence[str]) -> list[str]:
        return [f"{text} still." for text in texts]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["writer", "file"])
def test_a_public_answer_is_read_as_a_private_one(form: str, source: str, tmp_path: Path) -> None:
    """The same prompt, the same template, and the loss on the answer and its end alone."""
    answers = [f"room {i} is cold." for i in range(4)] + [f"room {i} is cold. still." for i in range(4)]
    given: dict[str, Any] = {"callable": "a:b", "random_prompt": PROMPT}
    if source == "file":
        given = {"file": write_public(tmp_path, [*map(as_record, answers)])}
    settings, tokenizer, fixed = read(FORMS[form], **given), tiny_tokenizer(), find_row("pe-sgd-fix")
    public = SyntheticTexts(settings, tiny_llama(), tokenizer, fixed, Notes()).examples()
    private = tokenise([*map(as_record, answers)], settings.data, tokenizer)
    assert sorted(each.digest for each in public) == sorted(each.digest for each in private)
    for example in public:
        learnt = tokenizer.decode(example.labels[example.labels >= 0])
        assert learnt.removesuffix("</s>") in answers
        assert PROMPT in tokenizer.decode(example.input_ids)


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("form", FORMS)
def test_the_model_answers_the_prompt_and_its_answers_evolve(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, written = list[list[str]](), set[str]()
    write = ModelWriter.write

    def heard(writer: ModelWriter, prompts: Sequence[str], key: int) -> list[str]:
        assert writer.chat == ("chat_template" in FORMS[form])
        asked.append(list(prompts))
        answers = write(writer, prompts, key)
        written.update(answer.strip() for answer in answers)
        return answers

    monkeypatch.setattr(ModelWriter, "write", heard)
    fine_tune(
        hf.AutoModelForCausalLM.from_pretrained(model_path()),
        PRIVATE,
        tokenizer=hf.AutoTokenizer.from_pretrained(model_path()),
        output=tmp_path / "run",
        data={**FORMS[form], "max_length": 90},
        privacy=PRIVACY,
        adapter={"r": 2},
        synthesis={**SYNTHESIS, **FIXED, "max_new_tokens": 12},
        method={"name": "pe-sgd", "learning_rate": 0.05},
    )
    assert asked[0] == [PROMPT] * 4
    varied = [prompt for prompts in asked[1:] for prompt in prompts if prompt != PROMPT]
    assert len(varied) >= 4 * PRIVACY["steps"]
    if "chat_template" in FORMS[form]:
        assert all(prompt.split("\n\nWrite another")[0] in written for prompt in varied)
    assert not any("guest" in prompt for prompts in asked for prompt in prompts)
    ledger = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    assert (ledger.charges, ledger.closed) == (PRIVACY["steps"], True)
    assert any(
        t.any() for t in load_file(tmp_path / "run" / "release" / "adapter_model.safetensors").values()
    )


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("method", ["pe-sgd", "pe-sgd-fix", "guided-prism", "pdp-sgd", "gep", "b-gep"])
@pytest.mark.parametrize("form", ["prompt", "messages"])
def test_records_of_a_file_keep_their_own_prompts(method: str, form: str, tmp_path: Path) -> None:
    file = write_public(tmp_path, [as_record(f"room {i} is cold.", f"ask {i}: say it.") for i in range(16)])
    run(tmp_path, FORMS[form], method, {"file": file})
    assert read_ledger(tmp_path / "run" / "release" / "ledger.jsonl").charges == PRIVACY["steps"]


def run(folder: Path, form: dict[str, Any], method: str, synthesis: dict[str, Any]) -> None:
    fine_tune(
        tiny_llama(max_position_embeddings=96),
        PRIVATE,
        tokenizer=tiny_tokenizer(),
        output=folder / "run",
        data={**form, "max_length": 90},
        privacy=PRIVACY,
        adapter={"r": 2},
        synthesis={**SYNTHESIS, **synthesis},
        method={"name": method, "top_k": 2} if method in ("gep", "b-gep", "pdp-sgd") else {"name": method},
    )


@pytest.mark.parametrize("form", ["prompt", "messages"])
def test_a_private_answer_among_public_ones_is_refused(form: str, tmp_path: Path) -> None:
    """Also under another prompt."""
    public = [as_record(f"room {i} is cold.") for i in range(16)]
    for stolen in (PRIVATE[7], as_record(PRIVATE[7]["note"], "say it.")):
        file = write_public(tmp_path, [*public, stolen])
        with pytest.raises(PrivacyError, match=r"synthesis\.file holds records that are the same as private"):
            run(tmp_path, FORMS[form], "pe-sgd-fix", {"file": file})


def test_a_near_copy_in_another_tools_form_of_messages_is_refused(tmp_path: Path) -> None:
    """Which is compared as it stands in the file, and not as the template reads it."""

    def shared(answer: str) -> dict[str, Any]:
        return {"talk": [{"from": "human", "value": PROMPT}, {"from": "gpt", "value": answer}]}

    private = [shared(f"guest {i} came in at {i % 7} with a cold.") for i in range(30)]
    public = [shared(f"room {i} is cold.") for i in range(16)]
    given = read(
        FORMS["messages"],
        file=write_public(tmp_path, [*public, shared("Guest 7  came in at 0 with a cold.")]),
    )
    with pytest.raises(PrivacyError, match=r"synthesis\.file holds records that are the same as private"):
        load_data(given, tiny_tokenizer(), private)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no prompt": (FORMS["prompt"], {}, "synthesis.random_prompt is not set"),
    "a preset": (FORMS["messages"], {"preset": "clinical-note"}, "synthesis.random_prompt is not set"),
    "a format": ({**FORMS["prompt"], "prompt": "Q: {ask}"}, FIXED, "answers one fixed prompt"),
    "two columns": ({**FORMS["prompt"], "completion": "{note} {ask}"}, FIXED, "answers one fixed prompt"),
    "one column": ({"prompt": "note", "completion": "note"}, FIXED, "answers one fixed prompt"),
    "votes": (FORMS["prompt"], {**FIXED, "method": "aug-pe"}, "synthesis writes whole texts"),
    "a data set": (FORMS["messages"], {**FIXED, "publish": True}, "synthesis writes whole texts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_public_texts_without_a_form_are_refused(name: str) -> None:
    form, synthesis, says = REFUSED[name]
    with pytest.raises(ConfigError, match=says):
        PublicForm(read(form, **synthesis)).refuse_none()


def test_a_broken_public_record_is_named_by_its_number(tmp_path: Path) -> None:
    broken = {"ask": PROMPT, "talk": "a secret"}
    file = write_public(tmp_path, [as_record("room 1 is cold."), broken])
    for form, says in (("prompt", "record 2: has no column 'note'"), ("messages", "not a list of messages")):
        settings = read(FORMS[form], file=file)
        with pytest.raises(DataError, match=says) as refused:
            refuse_unusable_texts(settings, find_row("pe-sgd"))
        assert "synthesis.file" in str(refused.value)
        assert "secret" not in str(refused.value)
