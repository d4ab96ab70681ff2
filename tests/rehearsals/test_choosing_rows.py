"""``method.name: auto``: what rehearsals see, whose noise they have, what follows from them, and what a run keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from promises import promise
from run_cases import StopAt
from tiny_models import tiny_model, tiny_tokenizer

import privlora.api
import privlora.running
from privlora.accounting import read_ledger
from privlora.api import fine_tune, resume_run
from privlora.config import Settings, settings_from
from privlora.errors import ConfigError, DataError, PrivloraError, RunError
from privlora.methods import CHOICES, find_row
from privlora.rehearsals import choosing, trials
from privlora.rehearsals.choosing import _with_row, choose, rows_of_choice, rows_to_advise_on, verdict
from privlora.rehearsals.kept import because, read_choice
from privlora.rehearsals.trials import Noise, Outcome, Texts, split_texts, trial_step, try_rows
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted
from privlora.training.promise import plan_privacy

RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold."} for i in range(12)]
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
    monkeypatch.setattr("privlora.rehearsals.choosing.REHEARSALS", 2)


def groups(file: Path, **more: Any) -> dict[str, Any]:
    found = {
        "privacy": PRIVACY,
        "adapter": {"r": 2, "target_modules": ["q_proj"]},
        "method": {"name": "auto", "learning_rate": 0.02},
        "synthesis": {"file": str(file), "seeds": 8, "evolution": "none"},
        "run": {"checkpoint_every": 1},
    }
    for name, values in more.items():
        merged = {**found.get(name, {}), **values}
        found[name] = {key: value for key, value in merged.items() if value is not None}
    return found


def settings(file: Path, **more: Any) -> Settings:
    given = {"data": {"path": "(in memory)", "max_length": 40}, **more}
    return settings_from({"model": {"name": "tiny"}, **groups(file, **given)}, source="test")


def start(model: Any, root: Path, file: Path, observer: Any = None, **more: Any) -> Any:
    return fine_tune(
        model,
        RECORDS,
        tokenizer=tiny_tokenizer(),
        output=root,
        data={"max_length": 40},
        observer=observer,
        **groups(file, **more),
    )


def rehearsed(
    chosen: Settings, model: Any, *rows: str, draws: int, told: Callable[..., None] = lambda *_: None
) -> dict[str, Outcome]:
    """What trials of ``rows`` gave, at the noise of a run over twelve records."""
    public = PublicStart(tiny_tokenizer())
    texts = split_texts(chosen, model, public, "span-prism", lambda *_: None)
    noises = [Noise(1.5, chosen.privacy, 12.0)]
    tried = [_with_row(chosen, row) for row in rows]
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


@pytest.mark.parametrize("row", STARTED)
def test_a_run_is_the_row_that_did_better(
    row: str, model: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prefer(monkeypatch, row)
    noises: list[Noise] = []
    true = choosing.try_rows

    def watched(rows: Any, given: Any, *more: Any, **others: Any) -> Any:
        noises.extend(given)
        return true(rows, given, *more, **others)

    monkeypatch.setattr(choosing, "try_rows", watched)
    start(model, tmp_path / "run", file)
    (noise,) = noises  # of the run, by its public number of records
    assert (noise.multiplier, noise.records) == (1.5, 12)
    folder = RunFolder(tmp_path / "run")
    kept = yaml.safe_load(folder.settings.read_text(encoding="utf-8"))
    assert kept["method"]["name"] == row
    assert ("synthesis" in kept) == (row != "prism")  # which PRISM would refuse
    assert kept["method"].get("clipping") == {"prism": "automatic"}.get(row)  # as it was rehearsed
    assert read_ledger(folder.ledger).plan.method == row
    assert read_ledger(folder.ledger).charges == 2  # rehearsals charge nobody
    found = json.loads(folder.choice.read_text(encoding="utf-8"))
    assert (found["asked"], found["row"], found["lead"]) == ("auto", row, 0.5)
    assert found["tried"] == len({(name, rate) for name, rate, _ in seen})
    assert found["private_runs"] == found["tried"]
    assert (found["spanning"], found["in_place_of_records"], found["held_out"]) == (16, 16, 16)
    report = json.loads(folder.report.read_text(encoding="utf-8"))
    assert report["method"]["name"] == row
    assert report["method"]["choice"] == found
    assert f"{row}, because with 16 public texts" in (folder.release / "report.html").read_text("utf-8")


def test_what_is_chosen_is_said_and_rehearsals_are_shown(
    model: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, "span-prism")
    told, said = [], []

    class Watching(StopAt):
        def on_public_work(self, what: str, done: int, total: int) -> None:
            if what.startswith("rehearsing"):
                told.append((what, done, total))

        def on_choice(self, why: str) -> None:
            said.append(why)

    run = settings(file, run={"output": str(tmp_path / "run")}, model={"name": "tiny"})
    privlora.api.train_run(
        run, model=model, tokenizer=tiny_tokenizer(), records=RECORDS, observer=Watching(-1)
    )
    each = 2 * run.privacy.steps
    names = [f"rehearsing {row} on public texts" for row in STARTED for _ in range(each)]
    assert told == [(name, number, 3 * each) for number, name in enumerate(names, 1)]
    assert said[0].startswith("span-prism, because")


def test_a_resume_goes_on_with_what_was_chosen(
    model: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, "span-prism")
    with pytest.raises(Interrupted):
        start(model, tmp_path / "run", file, StopAt(1))
    folder = RunFolder(tmp_path / "run")
    before = folder.choice.read_bytes()
    prefer(monkeypatch, "prism")
    monkeypatch.setattr(privlora.running, "choose", lambda *_: pytest.fail("it chose again"))
    resume_run(tmp_path / "run", model=model, tokenizer=tiny_tokenizer(), records=RECORDS)
    assert folder.choice.read_bytes() == before
    assert json.loads(folder.report.read_text(encoding="utf-8"))["method"]["choice"] == json.loads(before)
    assert read_ledger(folder.ledger).plan.method == "span-prism"
    # Another one, with no number out of place, is not taken up.
    planted = json.loads(before)
    planted["rows"][1]["loss"] += 0.25
    folder.choice.write_text(json.dumps(planted), encoding="utf-8")
    with pytest.raises(RunError, match=r"choice\.json' is not what the run wrote"):
        resume_run(tmp_path / "run", model=model, tokenizer=tiny_tokenizer(), records=RECORDS)


def test_a_damaged_choice_is_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.release.mkdir()
    assert read_choice(folder) is None
    no_number = '{"row": "prism", "rows": [], "clip_norm": NaN, "median_norm": 1}'
    for damaged in ("{", "{}", "[]", no_number):
        folder.choice.write_text(damaged, encoding="utf-8")
        with pytest.raises(RunError, match=r"choice\.json' is damaged"):
            read_choice(folder)


def test_no_record_plays_a_part(model: Any, file: Path, tmp_path: Path) -> None:
    """What is chosen, to the last digit, whatever the records are, or without any."""
    other = tmp_path / "records.jsonl"
    other.write_text("\n".join(json.dumps({"text": f"{'long ' * i}story {i}"}) for i in range(9)), "utf-8")
    found = [
        choose(settings(file, data={"path": str(path), "max_length": 40}), 1.5, model, tiny_tokenizer()).facts
        for path in (tmp_path / "none.jsonl", other)
    ]
    assert found[0] == found[1]  # real rehearsals, so they repeat as well
    assert {row["name"] for row in found[0]["rows"]} == set(STARTED)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("records", [4.0, 12.0, 400.0])
@pytest.mark.parametrize("row", STARTED)
def test_a_trial_has_the_runs_noise(row: str, records: float, model: Any, file: Path) -> None:
    chosen = settings(file, privacy={"clip_norm": 0.3})
    noise = Noise(1.5, chosen.privacy, records)
    public = PublicStart(tiny_tokenizer())
    texts = split_texts(chosen, model, public, "span-prism", lambda *_: None)
    parts = build_parts(_with_row(chosen, row), model, public)
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
    assert found["prism"].tried == 3
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


def test_a_warm_start_is_the_one_that_was_rehearsed(
    model: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, "prism")
    warm = settings(file, method={"learning_rate": None}, synthesis={"warm_start_epochs": 1})
    found = choose(warm, 1.5, model, tiny_tokenizer()).settings
    assert found.synthesis.warm_start_learning_rate == find_row("prism").relative_learning_rate
    assert found.method.learning_rate == find_row("prism").rate_of(warm.privacy.steps)


def test_of_equal_rows_the_first_is_taken_and_the_error_is_of_texts_and_draws() -> None:
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
    lost = Outcome("prism", 0.01, torch.full((3, 50), float("inf"), dtype=torch.float64))
    facts = verdict({"prism": lost, "span-prism": Outcome("span-prism", 0.01, losses)})
    told = because(
        {"row": "span-prism", "untrained": 0.1, "in_place_of_records": 9, "held_out": 50, "draws": 3, **facts}
    )
    assert "not finite with prism" in told
    assert "No method did better than no training (0.1000)" in told


def test_the_noise_does_not_depend_on_the_choice(file: Path) -> None:
    plans = [plan_privacy(row) for row in rows_of_choice(settings(file))]
    assert not any(event.projections for plan in plans for event, _ in plan.phases)
    assert plans[0].phases == plans[1].phases
    assert [plan.method for plan in plans] == list(CHOICES["auto"].rows)


def test_one_rate_for_several_rows_is_in_entries_and_the_rows_own_are_as_they_have_them(file: Path) -> None:
    def units(**more: Any) -> list[bool]:
        rows = rows_of_choice(settings(file, **more))
        return [
            find_row(row.method.name).resolve(row.method, None, row.privacy.steps).relative_rate
            for row in rows
        ]

    assert units(method={"learning_rate": 0.02}) == [False] * 3
    assert units(method={"learning_rate": None}) == [True, False, True]
    warm = {"warm_start_epochs": 1, "warm_start_learning_rate": 0.01}
    assert units(method={"learning_rate": None}, synthesis=warm) == [False] * 3
    with pytest.raises(ConfigError, match=r"may take guided-prism.*relative_rate=true"):
        units(method={"learning_rate": None, "relative_rate": True})


def test_all_rows_bring_every_record_to_one_norm(file: Path) -> None:
    assert [row.method.clipping for row in rows_of_choice(settings(file))] == ["automatic", None, None]
    assert [row.method.clipping for row in rows_of_choice(settings(file, method={"clipping": "flat"}))] == [
        "flat"
    ] * 3
    advised = rows_to_advise_on(settings(file, method={"name": "pe-sgd"}))
    assert [(row.method.name, row.method.clipping) for row in advised] == [
        ("prism", "automatic"),
        ("pe-sgd", None),
    ]
    own = rows_to_advise_on(settings(file, method={"name": "prism"}))
    assert own[0].method.clipping is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"privacy": {"noise_multiplier": None, "private": False}}, "private=false adds none"),
        ({"privacy": {"clip_quantile": 0.5}}, "does not go with privacy.clip_quantile"),
        (
            {"method": {"ridge": 1.0}},
            "may take prism: optimizer 'rank' of method 'prism' has no setting 'ridge'",
        ),
        ({"method": {"clipping": "spectral"}}, "may take span-prism: method 'span-prism' cannot clip"),
        ({"synthesis": {"dpo_learning_rate": 2}}, "dpo_learning_rate is read by method popri"),
    ],
)
def test_settings_that_a_row_has_not(more: dict[str, Any], words: str, file: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        rows_of_choice(settings(file, **more))
    assert words in str(refused.value)


def test_what_cannot_be_rehearsed(model: Any, file: Path, tmp_path: Path) -> None:
    def refused(kind: type[PrivloraError], words: str, **more: Any) -> None:
        with pytest.raises(kind, match=words):
            start(model, tmp_path / "run", file, **more)
        assert not (tmp_path / "run").exists()

    with pytest.raises(ConfigError, match="needs public texts to rehearse on"):
        fine_tune(
            model,
            RECORDS,
            tokenizer=tiny_tokenizer(),
            privacy=PRIVACY,
            method="auto",
            output=tmp_path / "run",
        )
    file.write_text("\n".join(file.read_text(encoding="utf-8").splitlines()[:20]), encoding="utf-8")
    refused(DataError, "20 public texts are too few to rehearse on: 10 would span, 5 stand for records")


def test_where_nothing_chooses_the_name_is_refused_with_its_rows() -> None:
    with pytest.raises(ConfigError, match="stands for prism or guided-prism or span-prism"):
        find_row("auto")


def test_advice_is_between_prism_and_the_row_that_is_named(file: Path) -> None:
    own = rows_to_advise_on(settings(file, method={"name": "pe-sgd", "ridge": 1.0}))
    assert [row.method.name for row in own] == ["prism", "pe-sgd"]
    assert (own[0].method.ridge, own[1].method.ridge) == (None, 1.0)
    for name in ("prism", "dp-adamw", "auto"):
        rows = rows_to_advise_on(settings(file, method={"name": name}))
        assert [row.method.name for row in rows] == list(STARTED)
    with pytest.raises(ConfigError, match="releases votes"):
        rows_to_advise_on(settings(file, method={"name": "aug-pe"}))
