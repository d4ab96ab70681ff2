"""Runs that write their own public texts: when the generator is asked, of which model, and what a resumed run has."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise
from run_cases import RECORDS
from safetensors.torch import load_file
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import read_ledger
from privlora.api import fine_tune, resume_run
from privlora.errors import ConfigError, DataError, GeneratorError, PrivacyError, PrivloraError
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer, StepReport
from privlora.training.step import Step

PRIVACY: dict[str, Any] = promise(steps=4, batch=6, records=30, noise_multiplier=1.0)
NOT_PRIVATE = {"private": False, "steps": 4, "expected_batch_size": 6, "public_dataset_size": 30}
K, L = 3, 2
# Whether texts that differ by a number are near copies depends on the model's state, and so on noise.
SYNTHESIS: dict[str, Any] = {"seeds": K, "variations": L - 1, "similarity_limit": None}

quickly = pytest.mark.usefixtures("quick_reports")


class Notes:
    """Numbers its texts; keeps what it was asked and what the model answered then."""

    def __init__(self, model: Any, *, fails_at: int = 0) -> None:
        self.model, self.fails_at = model, fails_at
        self.asked: list[int | list[str]] = []
        self.logits: list[torch.Tensor] = []

    def random(self, count: int) -> list[str]:
        self._asked(count)
        return [f"note {i}: a patient had a cough for {i + 2} days." for i in range(count)]

    def vary(self, texts: Sequence[str]) -> list[str]:
        self._asked(list(texts))
        return [f"{text[:20]} came back with {len(self.asked) * 10 + i}" for i, text in enumerate(texts)]

    def _asked(self, what: int | list[str]) -> None:
        self.asked.append(what)
        if len(self.asked) == self.fails_at:
            raise OSError("the line is dead")
        with torch.no_grad():
            self.logits.append(self.model(input_ids=torch.arange(4, 24)[None]).logits)


def tune(model: Any, output: Path, **options: Any) -> Any:
    settings = {
        "privacy": PRIVACY,
        "adapter": {"r": 2},
        "data": {"max_length": 60},
        "synthesis": SYNTHESIS,
        "method": {"name": "pe-sgd", "learning_rate": 0.05},
        **options,
    }
    return fine_tune(
        model, settings.pop("records", RECORDS), tokenizer=tiny_tokenizer(), output=output, **settings
    )


def go_on(output: Path, model: Any, generator: Any = None) -> Any:
    given = {"model": model, "tokenizer": tiny_tokenizer(), "records": RECORDS}
    return resume_run(output, **given, **({} if generator is None else {"generator": generator}))


def weights(output: Path, released: str = "release") -> dict[str, torch.Tensor]:
    return load_file(output / released / "adapter_model.safetensors")


@quickly
def test_the_updated_model_varies_before_each_step_and_not_after_the_last(tmp_path: Path) -> None:
    model = tiny_model()
    notes = Notes(model)
    tune(model, tmp_path / "run", generator=notes)
    fresh, first, *later = notes.asked
    assert fresh == K
    assert [len(texts) for texts in (first, *later)] == [K * (L - 1)] * PRIVACY["steps"]  # type: ignore[arg-type]
    before, first_varied, *updated = notes.logits
    assert torch.equal(before, first_varied)
    told = [first_varied, *updated]
    assert all(not torch.equal(a, b) for a, b in pairwise(told))


@quickly
def test_published_texts_are_chosen_and_varied_by_the_last_release_too(tmp_path: Path) -> None:
    model = tiny_model()
    notes = Notes(model)
    tune(model, tmp_path / "run", generator=notes, synthesis={**SYNTHESIS, "publish": True})
    _, first, *later = notes.asked
    assert [len(texts) for texts in (first, *later)] == [K * (L - 1)] * (PRIVACY["steps"] + 1)  # type: ignore[arg-type]
    found = RunFolder(tmp_path / "run").texts.read_text(encoding="utf-8")
    kept, number = later[-1], len(notes.asked) * 10
    varied = [f"{text[:20]} came back with {number + i}" for i, text in enumerate(kept)]
    assert {json.loads(line)["text"] for line in found.splitlines()} == {*kept, *varied}


@pytest.mark.parametrize(
    ("more", "needed"), [({}, 15), ({"publish": True}, 18), ({"evolution": "fresh"}, 24)]
)
def test_a_file_without_texts_for_every_step_is_refused_before_the_first(
    tmp_path: Path, more: dict[str, Any], needed: int
) -> None:
    """K L at first, and before each later step K (L - 1) or, of fresh ones, K L."""
    file = tmp_path / "public.jsonl"
    for count in (needed - 1, needed):
        lines = (json.dumps({"text": f"a public note of {i} days"}) for i in range(count))
        file.write_text("\n".join(lines), encoding="utf-8")
        synthesis = {**SYNTHESIS, "file": str(file), **more}
        output = tmp_path / f"run-{count}"
        if count < needed:
            with pytest.raises(DataError, match=f"{count} different texts.* and {needed} are needed"):
                tune(tiny_model(), output, synthesis=synthesis)
            assert not output.exists()
        else:
            tune(tiny_model(), output, synthesis=synthesis)


@quickly
@pytest.mark.parametrize(("call", "charged"), [(1, 0), (2, 0), (4, 2)])
def test_a_signal_while_texts_are_written_charges_no_step_more(
    tmp_path: Path, call: int, charged: int
) -> None:
    class Stopped(Notes):
        def _asked(self, what: int | list[str]) -> None:
            super()._asked(what)
            if len(self.asked) == call:
                signal.raise_signal(signal.SIGINT)

    model, output = tiny_model(), tmp_path / "run"
    with pytest.raises(Interrupted) as stopped:
        tune(model, output, generator=Stopped(model), run={"checkpoint_every": 1})
    assert stopped.value.step == charged == read_ledger(RunFolder(output).ledger).charges
    go_on(output, model, Notes(model))
    assert read_ledger(RunFolder(output).ledger).charges == PRIVACY["steps"]


@quickly
def test_a_signal_loses_no_step_that_no_checkpoint_has(tmp_path: Path) -> None:
    """Step 2 is taken to its end, and saved."""

    class Stopped(Notes):
        def _asked(self, what: int | list[str]) -> None:
            super()._asked(what)
            if len(self.asked) == 3:
                signal.raise_signal(signal.SIGINT)

    model, output = tiny_model(), tmp_path / "run"
    with pytest.raises(Interrupted) as stopped:
        tune(model, output, generator=Stopped(model), run={"checkpoint_every": 10})
    assert stopped.value.step == 2 == read_ledger(RunFolder(output).ledger).charges
    assert RunFolder(output).checkpoint.exists()


class StopInLastStep(Observer):
    """Raises SIGINT once the private half of the last step is taken."""

    def on_step(self, report: StepReport) -> None:
        if report.step == report.steps:
            signal.raise_signal(signal.SIGINT)


def test_a_signal_in_the_last_step_publishes_the_run(tmp_path: Path) -> None:
    """Its texts are written, and its report looks at the span again, after all steps."""
    model = tiny_model()
    publish = {**SYNTHESIS, "publish": True}
    tune(model, tmp_path / "run", generator=Notes(model), synthesis=publish, observer=StopInLastStep())
    assert RunFolder(tmp_path / "run").texts.exists()


@quickly
@pytest.mark.parametrize("evolution", ["none", "variations"])
def test_texts_evolve_after_each_step_or_stay(tmp_path: Path, evolution: str) -> None:
    model = tiny_model()
    notes = Notes(model)
    tune(model, tmp_path / "run", generator=notes, synthesis={**SYNTHESIS, "evolution": evolution})
    assert len(notes.asked) - 2 == (0 if evolution == "none" else 3)  # after steps 1, 2 and 3


@quickly
@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_generator_that_fails_loses_nothing(tmp_path: Path, fails_at: int) -> None:
    model = tiny_model()
    everybody = {**NOT_PRIVATE, "expected_batch_size": len(RECORDS)}  # so that nothing is drawn
    options: dict[str, Any] = {"privacy": everybody, "run": {"checkpoint_every": 1}}
    tune(model, tmp_path / "whole", generator=Notes(model), **options)
    with pytest.raises(GeneratorError, match="OSError"):
        tune(model, tmp_path / "run", generator=Notes(model, fails_at=fails_at), **options)
    again = Notes(model)
    again.asked = (
        [0, 0, 0] if fails_at == 4 else []
    )  # it numbers its texts by what the checkpoint has of them
    go_on(tmp_path / "run", model, again)
    whole, resumed = (weights(tmp_path / name, "not-private") for name in ("whole", "run"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@quickly
def test_a_generator_in_memory_has_to_be_given_again(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(GeneratorError):
        tune(model, tmp_path / "run", generator=Notes(model, fails_at=4))
    with pytest.raises(PrivloraError, match="generator was in memory"):
        go_on(tmp_path / "run", model)


@quickly
def test_the_model_itself_writes(tmp_path: Path) -> None:
    words = {"chat": False, "random_prompt": "note: ", "max_new_tokens": 12}
    written = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        options = {"method": {"name": "pe-sgd-fix", "learning_rate": 0.05}, "privacy": NOT_PRIVATE}
        tune(tiny_model(), tmp_path / name, synthesis={**SYNTHESIS, **words}, run={"seed": seed}, **options)
        saved = load_file(RunFolder(tmp_path / name).checkpoint)
        written.append(saved["texts/population.utf8"].numpy().tobytes())
    assert written[0] == written[1] != written[2]


@quickly
def test_a_warm_start_moves_any_method_and_charges_nothing(tmp_path: Path) -> None:
    model = tiny_model()
    evaluation = [{"text": f"note {i}: a patient had a cough for {i + 3} days."} for i in range(8)]
    losses = []
    for name, epochs in (("cold", 0), ("warm", 20)):
        chosen = {"synthesis": {**SYNTHESIS, "warm_start_epochs": epochs}, "generator": Notes(model)}
        tune(
            model,
            tmp_path / name,
            evaluation=evaluation,
            method={"name": "prism", "learning_rate": 0.05},
            **(chosen if epochs else {"synthesis": None}),
        )
        folder = RunFolder(tmp_path / name)
        rows = [json.loads(line) for line in folder.evaluations.read_text().splitlines()]
        losses.append(next(row["loss_per_example"] for row in rows if row["step"] == 0))
        assert read_ledger(folder.ledger).charges == PRIVACY["steps"]
    cold, warm = losses
    assert warm < cold - 0.1


@quickly
def test_a_warm_start_has_a_rate_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rates = tiny_model(), []
    take = Step.take

    def watched(step: Step, *drawn: Any) -> Any:
        assert callable(step.learning_rate)
        rates.append(step.learning_rate(1))
        return take(step, *drawn)

    monkeypatch.setattr(Step, "take", watched)
    chosen = {**SYNTHESIS, "warm_start_epochs": 1, "warm_start_learning_rate": 0.25}
    tune(model, tmp_path / "run", generator=Notes(model), synthesis=chosen)
    assert rates[0] == 0.25
    assert rates[-1] != 0.25


@quickly
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"synthesis": None}, "add the group synthesis"),
        ({"method": "prism", "generator": Notes(None)}, "uses no public texts"),
        (
            {"generator": Notes(None), "data": {"prompt": "text", "completion": "text"}},
            "random_prompt is not set",
        ),
        ({"generator": Notes(None), "synthesis": {"file": "a.jsonl"}}, "names another one"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tune(tiny_model(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@quickly
def test_a_private_record_among_public_texts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    lines = [{"text": f"note {i}: a cough."} for i in range(20)] + [RECORDS[4]]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    given = {"file": str(file), "seeds": 4}
    with pytest.raises(PrivacyError, match=r"synthesis\.file"):
        tune(tiny_model(), tmp_path / "run", synthesis=given)


def test_the_report_says_who_wrote_the_texts_and_that_they_are_not_protected(tmp_path: Path) -> None:
    model = tiny_model()
    tune(model, tmp_path / "run", generator=Notes(model), synthesis={**SYNTHESIS, "warm_start_epochs": 1})
    release = RunFolder(tmp_path / "run").release
    report = json.loads((release / "privacy_report.json").read_text())
    facts = report["method"]["public_texts"]
    assert K <= facts.pop("distinct") <= K * L  # noise moves gradients, and some may come to be alike
    assert facts == {"generator": "callable", "count": K * L, "evolves": True, "warm_start_epochs": 1}
    assert any("generated texts" in text for text in report["not_protected"])
    assert all(b"cough" not in path.read_bytes() for path in release.iterdir())


@quickly
def test_a_generated_text_that_is_a_record_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """To look for it would answer a question about the records; and neither is shown."""

    class Guessing(Notes):
        def random(self, count: int) -> list[str]:
            return [RECORDS[4]["text"], "My code is heron-4711, do not tell.", *super().random(count - 2)]

    model = tiny_model()
    with caplog.at_level("DEBUG"):
        tune(model, tmp_path / "run", generator=Guessing(model))
    folder = RunFolder(tmp_path / "run")
    assert read_ledger(folder.ledger).charges == PRIVACY["steps"]
    seen = [path.read_bytes().decode(errors="replace") for path in folder.release.iterdir()]
    for text in (*seen, *capfd.readouterr(), caplog.text):
        assert "heron-4711" not in text
        assert RECORDS[4]["text"] not in text


@quickly
@pytest.mark.parametrize("wrong", [None, ["half a pair \ud800"] * K, [b"caf\xe9"] * K, [" "] * K])
def test_texts_that_are_none_are_refused_before_anything_is_charged(wrong: Any, tmp_path: Path) -> None:
    model = tiny_model()
    notes = Notes(model)
    notes.random = lambda count: wrong  # type: ignore[method-assign]
    with pytest.raises(GeneratorError, match=r"call 1 \(random, 3 texts\)"):
        tune(model, tmp_path / "run", generator=notes)
    folder = RunFolder(tmp_path / "run")
    assert read_ledger(folder.ledger).charges == 0
    go_on(tmp_path / "run", model, Notes(model))
    assert read_ledger(folder.ledger).charges == PRIVACY["steps"]


def test_the_report_says_what_steps_were_released_along_and_not_where_the_run_broke(tmp_path: Path) -> None:
    """Three of four steps are lost, and the bounds over all that were kept look like those of any run."""
    model = tiny_model()
    method = {"name": "pe-sgd", "learning_rate": 0.05, "hold_out": 0.25, "ridge": 0.3}
    output = tmp_path / "run"
    with pytest.raises(GeneratorError):  # before step 4: three are charged and lost
        tune(model, output, generator=Notes(model, fails_at=5), method=method)
    go_on(output, model, Notes(model))
    release = RunFolder(output).release
    span = json.loads((release / "privacy_report.json").read_text())["method"]["span"]
    assert {len(bounds) for bounds in span.values()} == {2}
    assert span["ridge"] == [0.3, 0.3]
    assert span["texts"] == [K * L, K * L]
    assert 0 < span["directions"][0] <= span["directions"][1] <= K * L
    assert 0 < span["cosine"][0] <= span["cosine"][1] < 1
    assert span["kappa"][0] > 0.1
    before = (release / "privacy_report.json").read_text()
    go_on(output, model, Notes(model))
    again = json.loads((release / "privacy_report.json").read_text())
    assert again["method"] == json.loads(before)["method"]


@quickly
def test_a_crash_before_the_first_checkpoint_warms_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    chosen = {**SYNTHESIS, "warm_start_epochs": 3}
    with pytest.raises(GeneratorError):
        tune(model, tmp_path / "run", generator=Notes(model, fails_at=4), synthesis=chosen)
    assert not RunFolder(tmp_path / "run").checkpoint.exists()  # and two steps are charged
    begun: list[Any] = []
    monkeypatch.setattr("privlora.training.loop.warm_start", begun.append)
    go_on(tmp_path / "run", model, Notes(model))
    assert len(begun) == 1
    go_on(tmp_path / "run", model, Notes(model))
    assert len(begun) == 1  # over, so there is a checkpoint


def test_a_run_that_is_over_is_reported_again_and_asks_nobody(tmp_path: Path) -> None:
    model = tiny_model()
    tune(model, tmp_path / "run", generator=Notes(model))
    folder = RunFolder(tmp_path / "run")
    before, again = weights(tmp_path / "run"), Notes(model)
    go_on(tmp_path / "run", model, again)
    after = weights(tmp_path / "run")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read_ledger(folder.ledger).charges == PRIVACY["steps"]
    assert not again.asked


def test_a_file_that_is_used_up_is_enough_to_report_again(tmp_path: Path) -> None:
    model, file = tiny_model(), tmp_path / "public.jsonl"
    used = K * L + (PRIVACY["steps"] - 1) * K * (L - 1)  # the next step would need more
    lines = [{"text": f"note {i}: a patient had a cough for {i + 2} days."} for i in range(used)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    from_file = {**SYNTHESIS, "file": str(file), "similarity_limit": None}
    tune(model, tmp_path / "run", synthesis=from_file)
    release = RunFolder(tmp_path / "run").release
    (release / "report.html").unlink()
    go_on(tmp_path / "run", model)
    assert (release / "report.html").exists()


@quickly
@pytest.mark.parametrize("evolution", ["variations", "fresh"])
def test_a_generator_that_tells_all_it_was_given_tells_of_no_record(tmp_path: Path, evolution: str) -> None:
    """After private steps too: its own message may be shown, since it was given public texts alone."""
    given: list[str] = []

    def write(prompts: list[str]) -> list[str]:
        given.extend(prompts)
        if len(given) > 3 * K:
            raise ValueError(" ".join(given))
        return [f"variation {len(given) + i}: a cough for {i + 2} days." for i in range(len(prompts))]

    synthesis = {**SYNTHESIS, "evolution": evolution, "similarity_limit": None}
    with pytest.raises(GeneratorError, match=r"it raised ValueError: Write ") as failed:
        tune(tiny_model(), tmp_path / "run", generator=write, synthesis=synthesis)
    assert read_ledger(RunFolder(tmp_path / "run").ledger).charges >= 1
    told = str(failed.value.__cause__.__cause__)  # type: ignore[union-attr]
    assert told == " ".join(given)
    words = {word for record in RECORDS for word in (record["text"], "came in at", "with a cold")}
    assert not any(word in told for word in words)


@quickly
def test_without_variations_each_choice_asks_for_fresh_texts_of_the_moved_model(tmp_path: Path) -> None:
    """L = infinity: the texts are given up where the model that writes them has moved."""
    model = tiny_model()
    notes = Notes(model)
    tune(model, tmp_path / "run", generator=notes, synthesis={**SYNTHESIS, "evolution": "fresh"})
    assert notes.asked == [K * L] * 4
    assert not any(torch.equal(a, b) for a, b in pairwise(notes.logits))
