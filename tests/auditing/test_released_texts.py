"""What released texts say of canaries: scores by hand, runs with noise and without, what an audit's folder holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_cases import read_state
from tiny_models import byte_tokenizer, tiny_llama

import privlora.auditing.released_texts as audits
from privlora.accounting import read_ledger
from privlora.api import fine_tune, resume_run
from privlora.auditing import rerun
from privlora.auditing.exposure import _chance_exposure
from privlora.auditing.page import write_audit
from privlora.auditing.released_texts import (
    Canary,
    TextAudit,
    _Bigrams,
    _draw_canaries,
    _recited,
    _score_canaries,
    audit_texts,
    settings_of_audit,
)
from privlora.config import Settings, settings_from
from privlora.errors import ConfigError, GeneratorError, RunError
from privlora.mechanisms import NoiseSource
from privlora.training.files import AUDIT_MARK

WORDS = [
    f"{first}{last}" for first in "bdfglmnprt" for last in ("ade", "ilo", "une", "ost", "ek", "ay", "oor")
]
RECORDS = [{"text": f"patient {i} had a cold."} for i in range(6)]
CANARIES = 60
PRIVACY = {"noise_multiplier": 12.0, "delta": 1e-3, "public_dataset_size": 6}
# Of a model that is asked for texts.
ASKED = {"callable": None, "max_new_tokens": 12, "random_prompt": "note", "samples": 5}
TOKENIZER = byte_tokenizer(("<pad>", "</s>"), pad_token="<pad>", eos_token="</s>")


def readers_model() -> Any:
    """It reads enough bytes for a whole canary."""
    ids = {"vocab_size": len(TOKENIZER), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return tiny_llama(max_position_embeddings=128, **ids)


def sentences(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, 6, replace=False)) for _ in range(count)]


class Public:
    """Other texts with every call."""

    calls = 0

    def random(self, count: int) -> list[str]:
        self.calls += 1
        return sentences(count, self.calls)

    def vary(self, texts: Sequence[str]) -> list[str]:
        return self.random(len(texts))


def settings(output: Path, **groups: Any) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny"},
        "data": {"path": "(in memory)", "max_length": 110},
        "adapter": {"r": 2},
        "privacy": {**PRIVACY, "steps": 1, "sample_rate": 1.0},
        "synthesis": {"callable": "a:b", "seeds": CANARIES, "samples": 30},
        "method": {"name": "aug-pe"},
        "run": {"output": str(output)},
    }
    for name, group in groups.items():
        merged = {**content.get(name, {}), **group}
        content[name] = {key: value for key, value in merged.items() if value is not None}
    return settings_from(content, source="test")


def audited(chosen: Settings, **options: Any) -> TextAudit:
    trained, writer = settings_of_audit(chosen)
    given = {"canaries": CANARIES, "generator": Public(), "records": RECORDS, **options}
    return audit_texts(trained, writer, model=readers_model(), tokenizer=TOKENIZER, **given)


def bags_of_words(*args: Any, **how: Any) -> np.ndarray:
    """In the place of a model's hidden states, which a random model does not make near for texts that are."""
    texts: Sequence[str] = args[2]
    return np.array([[text.split().count(word) for word in WORDS] for text in texts], dtype=np.float64)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlora.training.assembly.hidden_states", bags_of_words)


# --- scores ---


def test_bigrams_by_hand() -> None:
    model = _Bigrams(["A b", "a  c b"], vocabulary=4)  # n = 5, all words smoothed by 4
    alone = {"a": 3 / 9, "b": 3 / 9, "c": 2 / 9, "d": 1 / 9}
    expected = [(2 + alone["a"]) / 3, (1 + alone["b"]) / 3, alone["d"] / 1, alone["a"] / 1]
    np.testing.assert_allclose(model.log_likelihoods("a b d a"), np.log(expected))
    # b is followed by nothing, so only the smoothing speaks; so it does behind d.
    assert sum(math.exp(model.log_likelihoods(f"a {word}")[1]) for word in alone) == pytest.approx(1)
    assert len(model.log_likelihoods(" ")) == 0


def test_canaries_are_public_texts_with_ends_of_their_own() -> None:
    public = sentences(10, 1)
    drawn = _draw_canaries(public, 30, 7, lambda text: len(text) < 75)
    assert len({canary.text for canary in drawn}) == 30
    assert drawn == _draw_canaries(public, 30, 7, lambda text: len(text) < 75)
    assert drawn != _draw_canaries(public, 30, 8, lambda text: len(text) < 75)
    for number, canary in enumerate(drawn):
        assert public[number % 10].startswith(canary.beginning)
        assert len(canary.end.split()) == 8
        assert set(canary.end.split()) <= {word for text in public for word in text.split()}
        assert len(canary.text) < 75
    assert any(
        len(canary.beginning.split()) == 6 for canary in _draw_canaries(public, 5, 7, lambda text: True)
    )
    with pytest.raises(ConfigError, match=r"data\.max_length"):
        _draw_canaries(public, 5, 7, lambda text: len(text) < 20)
    with pytest.raises(GeneratorError, match="2 different words"):
        _draw_canaries(["one word"], 5, 7, lambda text: True)


def test_texts_that_hold_a_canary_are_heard_and_others_are_not() -> None:
    public = sentences(50, 1)
    canaries = _draw_canaries(public, 50, 7, lambda text: True)
    for part, is_recited in (("beginning", False), ("end", True), ("text", True)):
        texts = [getattr(canary, part).upper() for canary in canaries[:25]]
        scores = _score_canaries(canaries, [*sentences(50, 2), *texts], public)
        assert scores[:25].min() > scores[25:].max(), part
        said = _recited(canaries, texts)
        assert said == [is_recited] * 25 + [False] * 25
    assert _recited(canaries, [canaries[0].end[: len(canaries[0].end) // 3]]) == [False] * 50


def test_a_common_beginning_gains_nothing() -> None:
    """One that many public texts share is probable whatever was trained on."""
    public = [*["the same few words"] * 9, *sentences(30, 1)]
    common, rare = Canary("the same few words", "a b"), Canary(public[-1], "a b")
    for texts in (public, public[::-1]):
        one, other = _score_canaries([common, rare], texts, public)
        assert one == pytest.approx(other, abs=1e-12)


# --- runs ---


def test_noise_that_is_switched_off_is_convicted(
    words: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = NoiseSource.standard_normal
    monkeypatch.setattr(NoiseSource, "standard_normal", lambda self, shape: draw(self, shape) / 1e6)
    for attempt in range(2):  # where coins let far fewer canaries in than half, right guesses are few
        found = audited(settings(tmp_path / str(attempt)))
        if found.violated:
            break
    assert found.violated
    assert found.epsilon_claimed is not None
    assert found.epsilon_lower > found.epsilon_claimed
    assert found.exposure > found.chance + 1
    assert found.area.value > 0.8
    assert found.included == len(found.scores[0])


def test_noise_that_is_on_hides_them(words: None, tmp_path: Path) -> None:
    """Over some runs: of one, exposure wanders."""
    found = [audited(settings(tmp_path / str(n)), confidence=0.9999) for n in range(3)]
    assert not any(each.violated for each in found)
    assert np.mean([each.exposure for each in found]) < np.mean([each.chance for each in found]) + 1
    assert np.mean([each.area.value for each in found]) == pytest.approx(0.5, abs=0.2)
    assert found[0].chance == pytest.approx(_chance_exposure(CANARIES - found[0].included))


def test_texts_that_copy_records_are_convicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of a private run's texts: those of a writer that was shown the records."""
    shown: list[str] = []
    with_records = audits._with_records

    def seen(data: Any, chosen: Any, column: Any, tokenizer: Any, included: Sequence[str]) -> Any:
        shown.extend(included)
        return with_records(data, chosen, column, tokenizer, included)

    monkeypatch.setattr(audits, "_with_records", seen)
    monkeypatch.setattr(audits, "final_texts", lambda *_: shown)
    found = audited(settings(tmp_path / "a"))
    assert found.violated
    assert found.exposure == found.ceiling
    assert found.recited == (found.included, 0)
    assert found.area.value == 1.0


def test_nothing_of_it_is_a_release(words: None, tmp_path: Path) -> None:
    found = audited(settings(tmp_path / "a"))
    folder = tmp_path / "a"
    assert {path.name for path in (folder / "release").iterdir()} == {AUDIT_MARK, "ledger.jsonl"}
    ledger = read_ledger(folder / "release/ledger.jsonl")
    assert ledger.plan.dataset.startswith("AUDIT, not for release")
    assert ledger.charges == 1
    assert (folder / "private").stat().st_mode & 0o777 == 0o700
    page, series = write_audit(found, folder)
    assert page.parent == series.parent == folder / "private"
    content = json.loads(series.read_text())
    assert content["exposures"] == sorted(content["exposures"], reverse=True)
    assert len(content["exposures"]) == found.included
    assert "A bound of 0 proves nothing" in page.read_text()
    with pytest.raises(RunError, match="holds an audit"):
        resume_run(folder, model=readers_model(), tokenizer=TOKENIZER, records=RECORDS, generator=Public())
    # The same again only judges again; with other settings it is another audit.
    again = audited(settings(folder))
    assert (again.exposure, again.included) == (found.exposure, found.included)
    assert read_ledger(folder / "release/ledger.jsonl").charges == 1
    with pytest.raises(RunError, match="holds another run"):
        audited(settings(folder), canaries=CANARIES + 1)


def test_half_of_the_canaries_are_records_and_vote(
    words: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    finish = rerun.finish_training
    monkeypatch.setattr(
        rerun,
        "finish_training",
        lambda parts, data, *rest, **how: (seen.append(data), finish(parts, data, *rest, **how)),
    )
    audited(settings(tmp_path / "a"))
    state = read_state(tmp_path / "a")
    (data,) = seen
    canaries = json.loads((tmp_path / "a/private/canaries.json").read_text())["canaries"]
    included = [
        f"{c['beginning']} {c['end']}" for c, chosen in zip(canaries, state.included, strict=True) if chosen
    ]
    assert 15 < len(included) < CANARIES - 15
    assert list(data.texts) == [*(record["text"] for record in RECORDS), *included]
    assert len(data.units) == len(data.examples) == len(RECORDS) + len(included)
    decoded = [TOKENIZER.decode(list(example.input_ids)) for example in list(data.examples)[len(RECORDS) :]]
    assert all(text in whole for text, whole in zip(included, decoded, strict=True))  # none is cut off


def test_an_interrupted_audit_goes_on_with_its_canaries(
    words: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(audits, "final_texts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            audited(settings(tmp_path / "a"))
    before = (tmp_path / "a/private/canaries.json").read_bytes()
    found = audited(settings(tmp_path / "a"))
    assert (tmp_path / "a/private/canaries.json").read_bytes() == before
    assert found.texts == 30
    assert read_ledger(tmp_path / "a/release/ledger.jsonl").charges == 1
    (tmp_path / "a/private/canaries.json").write_text("{}")
    with pytest.raises(RunError, match="cannot be read"):
        audited(settings(tmp_path / "a"))


def test_the_adapter_of_a_finished_run_is_trained_again_and_asked(
    quick_reports: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --from would release, of an adapter like that run's; a random model writes no words for canaries."""
    monkeypatch.setattr(audits, "_first_texts", lambda *_: sentences(CANARIES, 1))
    model = readers_model()
    fine_tune(
        model,
        RECORDS,
        tokenizer=TOKENIZER,
        privacy={**PRIVACY, "steps": 2, "sample_rate": 0.5},
        data={"max_length": 110},
        adapter={"r": 2},
        output=tmp_path / "run",
    )
    own = {**ASKED, "publish": True, "source": str(tmp_path / "run")}
    chosen = settings(tmp_path / "a", model={"name": "unnamed"}, synthesis=own)
    trained, writer = settings_of_audit(chosen)
    assert writer is not None
    found = (trained.method.name, trained.privacy.steps, trained.run.output)
    assert found == ("prism", 2, str(tmp_path / "a"))
    found = audited(chosen, generator=None)
    assert found.texts == 5
    assert not found.violated
    assert read_ledger(tmp_path / "a/release/ledger.jsonl").plan.method == "prism"
    another = {"callable": "a:b", "max_new_tokens": None, "random_prompt": None}
    for name, change, error in (
        ("other", {}, "trained an adapter of"),
        ("unnamed", another, "asks another writer"),
        ("unnamed", {"source": str(tmp_path / "nowhere")}, "no run in"),
    ):
        wrong = settings(tmp_path / "b", model={"name": name}, synthesis={**own, **change})
        with pytest.raises((ConfigError, RunError), match=error):
            settings_of_audit(wrong)


def test_without_privacy_it_shows_what_the_attack_can_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "_first_texts", lambda *_: sentences(CANARIES, 1))
    chosen = settings(
        tmp_path / "a",
        method={"name": "adamw"},
        privacy={"private": False, "noise_multiplier": None, "delta": None},
        synthesis=ASKED,
    )
    found = audited(chosen, generator=None)
    assert found.epsilon_claimed is None
    assert not found.violated
    assert found.guesses == 12
    assert {path.name for path in (tmp_path / "a/not-private").iterdir()} == {AUDIT_MARK}
    page, _ = write_audit(found, tmp_path / "a")
    assert "Nothing is claimed" in page.read_text()


def test_runs_that_cannot_be_audited_are_refused(tmp_path: Path) -> None:
    for change, error in (
        ({"data": {"evaluation": "held_out.jsonl"}}, "evaluates nothing"),
        ({"method": {"name": "prism"}}, "asks another writer"),
        ({"data": {"text": None, "prompt": "a", "completion": "b"}}, "writes whole texts"),
    ):
        with pytest.raises(ConfigError, match=error):
            audited(settings(tmp_path / "a", **change))
    with pytest.raises(ConfigError, match="can show nothing"):
        audited(settings(tmp_path / "a"), canaries=3)
    assert not (tmp_path / "a/private/config.resolved.yaml").exists()
