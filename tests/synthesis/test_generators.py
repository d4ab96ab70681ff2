"""Generators: the words that writers are asked in, what is refused of their answers, and files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from synthesis_cases import StubGenerator, StubWriter

from privlora.config.synthesis import SynthesisSettings
from privlora.errors import ConfigError, DataError, GeneratorError
from privlora.synthesis.generators import (
    FileGenerator,
    OwnGenerator,
    PromptedGenerator,
    build_generator,
    prompts_of,
)
from privlora.synthesis.prompts import PRESETS, Prompts, beginning

WORDS = Prompts("write one", "{text} | {tone}", lead_in="Note: ", tones=("calm", "loud"))
SECRET = "what nobody may read"
CALLABLE = SynthesisSettings(callable="a:b")


def echo(prompts: Sequence[str]) -> list[str]:
    return [f"about {prompt}" for prompt in prompts]


def asking(answer: Any, *, chat: bool = True, seed: int = 7) -> PromptedGenerator:
    return PromptedGenerator(StubWriter(answer, chat=chat), WORDS, seed=seed)


def test_a_chat_is_asked() -> None:
    generator = asking(echo)
    assert generator.random(3) == ["about write one"] * 3
    varied = generator.vary(["a{tone}", "b{text}"] * 20)
    assert set(varied) == {
        f"about {text} | {tone}" for text in ("a{tone}", "b{text}") for tone in ("calm", "loud")
    }


def test_tones_are_drawn_uniformly_by_the_public_seed() -> None:
    loud = [text.endswith("loud") for text in asking(echo).vary(["a"] * 2000)]
    assert abs(sum(loud) - 1000) < 5 * 500**0.5
    assert [text.endswith("loud") for text in asking(echo).vary(["a"] * 2000)] == loud
    assert [text.endswith("loud") for text in asking(echo, seed=8).vary(["a"] * 2000)] != loud


def test_a_model_without_chat_goes_on() -> None:
    writer = StubWriter(lambda prompts: [" and so on "] * len(prompts), chat=False)
    generator = PromptedGenerator(writer, WORDS, seed=0)
    assert generator.random(1) == ["and so on"]
    assert generator.vary(["one two three four"]) == ["one two and so on"]
    assert writer.asked == [["Note: "], ["Note: one two"]]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("one two three four", "one two"),
        ("one two", "one"),
        ("onetwothree", "onetw"),
        ("漢字漢字", "漢字"),
        ("one\n\ntwo words here", "one\n\ntwo"),
        ("", ""),
    ],
)
def test_a_beginning_ends_between_words(text: str, kept: str) -> None:
    assert beginning(text) == kept


def test_a_prompt_that_is_repeated_is_removed() -> None:
    assert asking(lambda prompts: [f"{p} the text" for p in prompts]).random(1) == ["the text"]


def test_empty_texts_are_asked_for_again_and_the_others_kept() -> None:
    answers = iter([["a", " ", "c", ""], ["", "d"], ["b"]])
    generator = asking(lambda _: next(answers))
    assert generator.random(4) == ["a", "b", "c", "d"]
    writer: Any = generator._writer
    assert [len(asked) for asked in writer.asked] == [4, 2, 1]
    assert len(set(writer.keys)) == 3


def test_a_continuation_of_nothing_is_asked_for_again() -> None:
    answers = iter([["\n"], [" more"]])
    assert asking(lambda _: next(answers), chat=False).vary(["one two"]) == ["one more"]


def test_texts_that_stay_empty_end_in_an_error() -> None:
    generator = asking(lambda prompts: [""] * len(prompts))
    with pytest.raises(
        GeneratorError, match=r"stub, call 1 \(random, 3 texts\): 3 of 3 texts are empty, 8 times"
    ):
        generator.random(3)
    writer: Any = generator._writer
    assert len(writer.asked) == 8


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "returned nothing"),
        (SECRET, "returned a str, not a list"),
        (iter([SECRET] * 2), "not a list"),
        ([SECRET], "1 texts instead of 2"),
        ([SECRET] * 3, "3 texts instead of 2"),
        ([SECRET, 5], "text 2 of what it returned is of type int"),
        ([SECRET, SECRET.encode()], "text 2 of what it returned is of type bytes"),
        ([SECRET, None], "text 2 of what it returned is of type NoneType"),
        ([SECRET + "\ud800", SECRET], "text 1 of what it returned cannot be written as UTF-8"),
    ],
)
@pytest.mark.parametrize("kind", ["function", "object"])
def test_what_is_no_list_of_texts_is_refused(answer: Any, words: str, kind: str) -> None:
    class Own(StubGenerator):
        def vary(self, texts: Sequence[str]) -> Any:
            return answer

    own = Own() if kind == "object" else lambda prompts: answer if len(prompts) == 2 else ["x"] * len(prompts)
    generator = build_generator(CALLABLE, seed=0, own=own)
    generator.random(1)
    with pytest.raises(GeneratorError, match=words) as refused:
        generator.vary(["a text", "another"])
    assert "call 2 (vary, 2 texts)" in str(refused.value)
    assert SECRET not in str(refused.value)
    assert refused.value.fix


def test_a_call_that_failed_can_be_made_again() -> None:
    broken = [True]

    def write(prompts: list[str]) -> list[str]:
        if broken[0]:
            raise RuntimeError("no credit left\nfor \x1b[31mtoday " + "and on" * 99)
        return echo(prompts)

    expected = build_generator(CALLABLE, seed=3, own=echo).vary(["a"] * 9)
    generator = build_generator(CALLABLE, seed=3, own=write)
    before = generator.state_dict()
    with pytest.raises(
        GeneratorError,
        match=r"raised RuntimeError: no credit left for \[31mtoday (and on)+\w*…, at test_generators.py, line \d+",
    ) as failed:
        generator.vary(["a"] * 9)
    assert len(str(failed.value)) < 450
    assert str(failed.value).isprintable()
    assert "call 1 (vary, 9 texts)" in str(failed.value)
    assert generator.state_dict() == before
    broken[0] = False
    assert generator.vary(["a"] * 9) == expected


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, MemoryError])
def test_a_function_cannot_end_the_run_in_silence(ending: type[BaseException]) -> None:
    def write(prompts: list[str]) -> list[str]:
        raise ending

    generator = build_generator(CALLABLE, seed=0, own=write)
    with pytest.raises(GeneratorError, match=ending.__name__):
        generator.random(1)


def of_a_library() -> BaseException:
    return RuntimeError(f"MPS backend out of memory ({SECRET} allocated)")


def after_another() -> BaseException:
    error = ValueError(SECRET)
    error.__cause__ = torch.OutOfMemoryError("full")
    return error


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError(SECRET)


@pytest.mark.parametrize(
    "ending",
    [MemoryError(SECRET), torch.OutOfMemoryError(SECRET), of_a_library(), after_another(), Mute()],
    ids=lambda error: type(error).__name__,
)
def test_how_much_memory_the_process_holds_is_not_told(ending: BaseException) -> None:
    """A library says so where it runs out, and private batches had a part in it."""

    def write(prompts: list[str]) -> list[str]:
        raise ending

    generator = build_generator(CALLABLE, seed=0, own=write)
    with pytest.raises(GeneratorError, match=type(ending).__name__) as failed:
        generator.random(1)
    assert SECRET not in str(failed.value)


@pytest.mark.parametrize("kind", ["function", "object"])
def test_a_hanging_callable_is_left_behind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = threading.Event()

    class Hanging(StubGenerator):
        def random(self, count: int) -> list[str]:
            wakes.wait(60)
            return super().random(count)

    monkeypatch.setattr("privlora.synthesis.writers.PATIENCE", 0.05)
    monkeypatch.setattr("privlora.synthesis.generators.PATIENCE", 0.05)
    own = Hanging() if kind == "object" else lambda prompts: wakes.wait(60)
    with pytest.raises(GeneratorError, match=r"call 1 \(random, 2 texts\): it did not answer within 0.05 s"):
        build_generator(CALLABLE, seed=0, own=own).random(2)
    wakes.set()


def test_a_function_cannot_change_what_it_is_given() -> None:
    def write(prompts: list[str]) -> list[str]:
        answers = echo(prompts)
        prompts.clear()
        return answers

    texts = ["a", "b"]
    assert len(build_generator(CALLABLE, seed=0, own=write).vary(texts)) == 2
    assert texts == ["a", "b"]


def test_callables_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_texts.py").write_text(
        "class Own:\n"
        "    def random(self, count): return ['fresh'] * count\n"
        "    def vary(self, texts): return [t + '!' for t in texts]\n"
        "own = Own()\n"
        "number = 5\n"
        "def write(prompts): return [p.upper() for p in prompts]\n"
    )
    (tmp_path / "broken_texts.py").write_text("raise OSError('no')")
    monkeypatch.syspath_prepend(str(tmp_path))

    def named(place: str) -> Any:
        return build_generator(SynthesisSettings(callable=place), seed=0)

    assert named("own_texts:own").vary(["a"]) == ["a!"]
    assert isinstance(named("own_texts:own"), OwnGenerator)
    assert named("own_texts:write").random(1)[0].isupper()
    for place, words in [
        ("no_texts:write", "ModuleNotFoundError"),
        ("own_texts:wrote", "AttributeError"),
        ("broken_texts:write", "OSError"),
        ("own_texts:number", "the generator is an int"),
        ("own_texts:Own", "the generator is a type"),
    ]:
        with pytest.raises(ConfigError, match=words):
            named(place)
    for module in ("own_texts", "broken_texts"):
        sys.modules.pop(module, None)


def test_an_object_has_words_of_its_own() -> None:
    settings = SynthesisSettings(callable="a:b", preset="clinical-note")
    with pytest.raises(ConfigError, match=r"synthesis\.preset is not read"):
        build_generator(settings, seed=0, own=StubGenerator())
    assert build_generator(settings, seed=0, own=echo).random(1)


def test_a_run_that_is_resumed_goes_on() -> None:
    whole = asking(echo)
    first, second = whole.vary(["a"] * 50), whole.vary(["a"] * 50)
    assert first != second
    stopped = asking(echo)
    stopped.vary(["a"] * 50)
    resumed = asking(echo)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.vary(["a"] * 50) == second


def of_file(texts: Sequence[str], *, seed: int = 0) -> FileGenerator:
    settings = SynthesisSettings(file="public.jsonl")
    generator = build_generator(settings, seed=seed, texts=texts)
    assert isinstance(generator, FileGenerator)
    return generator


def test_a_file_gives_each_text_once() -> None:
    texts = [f"text {i}" for i in range(20)]
    generator = of_file([*texts, " ", "", "TEXT  3", "text 4"])
    first = generator.random(8)
    resumed = of_file([*texts, " ", "", "TEXT  3", "text 4"])
    resumed.load_state_dict(generator.state_dict())
    second = generator.vary(["anything"] * 12)
    assert sorted([*first, *second]) == sorted(texts)
    assert first != texts[:8]
    assert resumed.vary(["anything"] * 12) == second
    with pytest.raises(DataError, match="0 different texts that are not used yet, and 1 are needed"):
        generator.random(1)


def test_a_files_order_is_of_the_seed() -> None:
    texts = [f"text {i}" for i in range(20)]
    assert of_file(texts, seed=1).random(20) == of_file(texts, seed=1).random(20)
    assert of_file(texts, seed=1).random(20) != of_file(texts, seed=2).random(20)


def test_a_file_that_has_too_few_keeps_them() -> None:
    generator = of_file(["a", "b"])
    with pytest.raises(DataError, match="are needed"):
        generator.random(3)
    assert sorted(generator.random(2)) == ["a", "b"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_ask_in_whole_words(name: str) -> None:
    preset = PRESETS[name]
    assert len(set(preset.tones)) == len(preset.tones) >= 7
    asked = preset.variation_of("the {tone} text", "calm")
    assert "the {tone} text" in asked
    assert "calm" in asked
    assert "{" not in asked.replace("the {tone} text", "") + preset.random + preset.lead_in
    assert name == "text" or preset.lead_in.endswith(":\n\n")


def test_own_prompts_take_the_place_of_a_preset() -> None:
    own = prompts_of(SynthesisSettings(random_prompt="a haiku", variation_prompt="not {text}"))
    assert (own.random, own.lead_in) == ("a haiku", "a haiku")
    assert own.variation_of("this", "sad") == "not this"
    assert prompts_of(SynthesisSettings(random_prompt="a haiku")).variation == PRESETS["text"].variation
    assert prompts_of(SynthesisSettings(preset="clinical-note")) is PRESETS["clinical-note"]
    assert prompts_of(SynthesisSettings()) is PRESETS["text"]


def test_a_fresh_text_stands_where_nothing_follows_on_a_text() -> None:
    def answer(prompts: Sequence[str]) -> list[str]:
        return ["" if "the end" in prompt else "something new" for prompt in prompts]

    writer = StubWriter(answer)
    generator = PromptedGenerator(writer, PRESETS["text"], seed=0)
    assert generator.vary(["a story", "the end"]) == ["something new", "something new"]
    assert [len(asked) for asked in writer.asked] == [2, *[1] * 7, 1]
    assert writer.asked[-1] == [PRESETS["text"].random]


@pytest.mark.parametrize("chat", [False, True])
def test_several_samples_of_each_request(chat: bool) -> None:
    """In the generator's own words or others, numbered with its other calls."""

    def answer(prompts: Sequence[str]) -> list[str]:
        return [f"{prompt} text {i} " for i, prompt in enumerate(prompts)]

    writer = StubWriter(answer, chat=chat)
    generator = PromptedGenerator(writer, WORDS, seed=0)
    assert generator.samples(["one", "two"], 3) == [
        ["text 0", "text 1", "text 2"],
        ["text 3", "text 4", "text 5"],
    ]
    assert writer.asked == [["one"] * 3 + ["two"] * 3]
    again = PromptedGenerator(writer, WORDS, seed=0)
    again.load_state_dict(generator.state_dict())
    assert again.samples(["one"], 1) == generator.samples(["one"], 1)
    assert writer.keys[1] == writer.keys[2] != writer.keys[0]
    requests = generator.requests(3)
    tones = ("calm", "loud", "calm")
    assert requests == ([f"write one Write in a {tone} tone." for tone in tones] if chat else ["Note: "] * 3)


def test_an_empty_sample_is_asked_for_again_in_the_same_words() -> None:
    writer = StubWriter(lambda prompts: ["", "b"] if len(prompts) == 2 else ["a"])
    assert PromptedGenerator(writer, WORDS, seed=0).samples(["one"], 2) == [["a", "b"]]
    assert writer.asked == [["one", "one"], ["one"]]
    assert writer.keys[0] != writer.keys[1]
    with pytest.raises(GeneratorError, match="stub, call 1"):
        PromptedGenerator(StubWriter(lambda prompts: [""] * len(prompts)), WORDS, seed=0).samples(["one"], 2)
