"""What ``privlora plan --advise`` compares: what rehearsals see, whose noise they have, and what follows from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from promises import promise
from tiny_models import tiny_model, tiny_tokenizer

from privlora.config import MethodSettings, Settings, settings_from
from privlora.errors import ConfigError, DataError
from privlora.methods import find_row
from privlora.rehearsals import trials
from privlora.rehearsals.choosing import _with_method, rows_to_advise_on, verdict
from privlora.rehearsals.trials import Noise, Outcome, Texts, split_texts, trial_step, try_rows
from privlora.training.assembly import Parts, PublicStart, build_parts

PRIVACY = promise(steps=2, batch=6, records=12, noise_multiplier=1.5)
STARTED = ("prism", "guided-prism", "span-prism")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "public.jsonl"
    rows = [{"text": f"visitor {i} left at {i % 7} with a dog."} for i in range(48)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlora.rehearsals.trials.MORE_TEXTS", 32)


def settings(file: Path, **more: Any) -> Settings:
    found: dict[str, Any] = {
        "model": {"name": "tiny"},
        "data": {"path": "(in memory)", "max_length": 40},
        "privacy": PRIVACY,
        "adapter": {"r": 2, "target_modules": ["q_proj"]},
        "method": {"name": "span-prism", "learning_rate": 0.02},
        "synthesis": {"file": str(file), "seeds": 8, "evolution": "none"},
    }
    for name, values in more.items():
        merged = {**found.get(name, {}), **values}
        found[name] = {key: value for key, value in merged.items() if value is not None}
    return settings_from(found, source="test")


def of(chosen: Settings, name: str) -> Settings:
    return _with_method(chosen, MethodSettings(name=name, learning_rate=chosen.method.learning_rate))


def rehearsed(
    chosen: Settings, model: Any, *rows: str, draws: int, told: Callable[..., None] = lambda *_: None
) -> dict[str, Outcome]:
    """What trials of ``rows`` gave, at the noise of a run over twelve records."""
    public = PublicStart(tiny_tokenizer())
    texts = split_texts(chosen, model, public, "span-prism", lambda *_: None)
    noises = [Noise(1.5, chosen.privacy, 12.0)]
    tried = [of(chosen, row) for row in rows]
    (found,) = try_rows(tried, noises, texts, model, public, draws=draws, told=told)
    return dict(found)


def prefer(monkeypatch: pytest.MonkeyPatch, row: str) -> list[tuple[str, float, int]]:
    """Let trials cost nothing and ``row`` win; gives (row, rate, draw) of each."""
    seen: list[tuple[str, float, int]] = []

    def losses(parts: Parts, texts: Texts, noise: Noise, draw: int, tick: Callable[[], None]) -> torch.Tensor:
        for _ in range(noise.privacy.steps):
            tick()
        seen.append((parts.method.name, parts.hyper.learning_rate, draw))
        lead = 0.5 if parts.method.name == row else 0.0
        return torch.linspace(1, 2, len(texts.held), dtype=torch.float64) - lead + 0.01 * draw

    monkeypatch.setattr(trials, "_held_losses", losses)
    return seen


@pytest.mark.parametrize("records", [4.0, 12.0, 400.0])
@pytest.mark.parametrize("row", STARTED)
def test_a_trial_has_the_runs_noise(row: str, records: float, model: Any, file: Path) -> None:
    chosen = settings(file, privacy={"clip_norm": 0.3})
    noise = Noise(1.5, chosen.privacy, records)
    public = PublicStart(tiny_tokenizer())
    texts = split_texts(chosen, model, public, "span-prism", lambda *_: None)
    parts = build_parts(of(chosen, row), model, public)
    with parts.adapter:
        step = trial_step(parts, texts.records, noise, draw=0)
    mechanism = step.mechanism
    batch = 0.5 * records  # q N
    assert mechanism.expected_batch_size == pytest.approx(min(batch, len(texts.records)))
    std = mechanism.event.noise_multiplier * mechanism.clip_norm / mechanism.expected_batch_size
    assert std == pytest.approx(1.5 * 0.3 / batch)
    drawn = [step.draw() for _ in range(100)]
    assert np.mean([len(batch) for batch in drawn]) == pytest.approx(mechanism.expected_batch_size, rel=0.15)
    assert len({i for batch in drawn for i in batch}) == min(records, len(texts.records))


def test_trials_repeat_and_the_best_rate_is_drawn_again(
    model: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prefer(monkeypatch, "prism")
    chosen = settings(file, method={"learning_rate": None})
    found = rehearsed(chosen, model, "prism", draws=3)
    own = find_row("prism").rate_of(chosen.privacy.steps)
    assert [(rate, draw) for _, rate, draw in seen] == [
        (own, 0),
        (pytest.approx(3 * own, rel=1e-2), 0),
        (pytest.approx(own / 3, rel=1e-2), 0),
        (own, 1),  # of rates that do equally well the row's own
        (own, 2),
    ]
    assert found["prism"].learning_rate == own
    assert found["prism"].losses.shape == (3, 16)


def test_every_trial_starts_from_the_same_state(
    model: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice at one rate with one draw: equal to the last bit; with another draw: not."""
    chosen = settings(file)
    held, draws = trials._held_losses, iter([0, 0, 1] * len(STARTED))
    monkeypatch.setattr(trials, "_held_losses", lambda p, t, n, draw, tick: held(p, t, n, next(draws), tick))
    found = rehearsed(chosen, model, *STARTED, draws=3)
    for outcome in found.values():
        assert torch.equal(outcome.losses[0], outcome.losses[1])
        assert not torch.equal(outcome.losses[0], outcome.losses[2])


@pytest.mark.parametrize(
    ("power", "tried"), [(2, [0, 1, 2, 3]), (-3, [0, 1, -1, -2, -3, -4]), (9, [0, 1, 2, 3, 4])]
)
def test_rates_are_sought_as_long_as_that_is_better(
    power: int, tried: list[int], model: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def losses(parts: Parts, texts: Any, noise: Noise, draw: int, tick: Callable[[], None]) -> Any:
        for _ in range(noise.privacy.steps):
            tick()
        seen.append(math.log(parts.hyper.learning_rate / own, 3))
        return torch.full((4,), abs(seen[-1] - power), dtype=torch.float64)

    monkeypatch.setattr(trials, "_held_losses", losses)
    chosen = settings(file, method={"learning_rate": None})
    own = find_row("prism").rate_of(chosen.privacy.steps)
    told: list[tuple[int, int]] = []
    found = rehearsed(chosen, model, "prism", draws=2, told=lambda _, done, total: told.append((done, total)))
    best = tried[-1] if abs(tried[-1] - power) < abs(tried[-2] - power) else tried[-2]
    assert seen == pytest.approx([*tried, best], abs=1e-2)  # rates have three digits
    assert found["prism"].learning_rate == pytest.approx(own * 3.0**best, rel=1e-2)
    steps = chosen.privacy.steps
    assert told[-1] == (len(seen) * steps, len(seen) * steps)  # though fewer were foreseen
    assert told[0] == (1, 4 * steps)


def test_a_rate_that_goes_astray_loses(model: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def astray(parts: Parts, *_: Any) -> Any:
        if parts.hyper.learning_rate > limit:
            raise torch.linalg.LinAlgError
        return step(parts, *_)

    step = trials.trial_step
    monkeypatch.setattr(trials, "trial_step", astray)
    chosen = settings(file, method={"learning_rate": None})
    limit = find_row("prism").rate_of(chosen.privacy.steps) / 5  # a third of the row's own goes astray, too
    found = rehearsed(chosen, model, "prism", draws=1)
    assert found["prism"].learning_rate < limit
    assert found["prism"].losses.isfinite().all()


def test_a_file_that_runs_out_gives_half_of_its_texts(
    model: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlora.rehearsals.trials.MORE_TEXTS", 100)
    public = PublicStart(tiny_tokenizer())
    chosen = settings(file, synthesis={"seeds": 20})  # 40 span, 8 are left
    found = split_texts(chosen, model, public, "span-prism", lambda *_: None)
    assert (len(found.spanning), len(found.records), len(found.held)) == (24, 12, 12)
    digests = [{text.digest for text in part} for part in (found.records, found.held)]
    spanning = public.texts(chosen, model, find_row("span-prism")).as_records(found.spanning)
    every = set.union(*digests, {text.digest for text in spanning})
    assert len(every) == 48  # none stands in two places


def test_a_model_writes_as_many_texts_more(model: Any, file: Path) -> None:
    words = {"file": None, "chat": False, "random_prompt": "note: ", "max_new_tokens": 8}
    chosen = settings(file, synthesis=words)
    public, told = PublicStart(tiny_tokenizer()), []
    found = split_texts(chosen, model, public, "span-prism", lambda *work: told.append(work))
    first = public.texts(chosen, model, find_row("span-prism")).texts
    assert list(found.spanning) == first  # those of the run
    assert 8 <= len(found.records) <= len(found.held) <= 16
    assert ("writing public texts", 32, 32) in told


def test_no_record_is_rehearsed_on(model: Any, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "records.jsonl"
    other.write_text("\n".join(json.dumps({"text": f"{'long ' * i}story {i}"}) for i in range(9)), "utf-8")
    found = [
        split_texts(
            settings(file, data={"path": str(path)}),
            model,
            PublicStart(tiny_tokenizer()),
            "span-prism",
            lambda *_: None,
        )
        for path in (tmp_path / "none.jsonl", other)
    ]
    digests = [[text.digest for part in (each.records, each.held) for text in part] for each in found]
    assert digests[0] == digests[1]


def test_the_error_of_a_lead_is_of_texts_and_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(3, 50, generator=generator, dtype=torch.float64)
    equal = verdict({name: Outcome(name, 0.01, losses) for name in STARTED})
    assert [row["name"] for row in equal["rows"]] == list(STARTED)
    assert (equal["lead"], equal["standard_error"]) == (0.0, 0.0)
    ahead = losses + torch.rand(3, 50, generator=generator, dtype=torch.float64)
    found = verdict(
        {"prism": Outcome("prism", 0.01, ahead), "span-prism": Outcome("span-prism", 0.01, losses)}
    )
    lead = (ahead - losses).numpy()
    expected = lead.mean(0).var(ddof=1) / 50 + lead.mean(1).var(ddof=1) / 3
    assert found["rows"][0]["name"] == "span-prism"
    assert found["standard_error"] == pytest.approx(expected**0.5)
    assert verdict({"prism": Outcome("prism", 0.01, losses[:1])})["lead"] is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"privacy": {"noise_multiplier": None, "private": False}}, "private=false adds none"),
        ({"privacy": {"clip_quantile": 0.5}}, "does not go with privacy.clip_quantile"),
        ({"method": {"name": "aug-pe", "learning_rate": None}}, "releases votes"),
    ],
)
def test_what_cannot_be_advised_on(more: dict[str, Any], words: str, file: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        rows_to_advise_on(settings(file, **more))
    assert words in str(refused.value)


def test_too_few_texts_are_refused(model: Any, file: Path) -> None:
    file.write_text("\n".join(file.read_text(encoding="utf-8").splitlines()[:20]), encoding="utf-8")
    with pytest.raises(DataError, match="20 public texts are too few to rehearse on: 10 would span"):
        split_texts(settings(file), model, PublicStart(tiny_tokenizer()), "span-prism", lambda *_: None)


def test_advice_is_between_prism_and_the_method_that_is_named(file: Path) -> None:
    own = rows_to_advise_on(settings(file, method={"name": "pe-sgd", "ridge": 1.0}))
    assert [(row.method.name, row.method.ridge) for row in own] == [("prism", None), ("pe-sgd", 1.0)]
    assert [row.method.clipping for row in own] == ["automatic", None]
    assert [row.synthesis is None for row in own] == [True, False]
    for name, clipping in (("prism", None), ("dp-adamw", "automatic")):
        rows = rows_to_advise_on(settings(file, method={"name": name}))
        assert [row.method.name for row in rows] == list(STARTED)
        assert rows[0].method.clipping == clipping
