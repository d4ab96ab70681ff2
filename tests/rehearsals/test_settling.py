"""Learning rate and clip norm that public records choose, and sizes that follow from public numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

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
from privlora.config import Settings, methods, settings_from
from privlora.config.auto import of_few, run_sizes
from privlora.config.reading import checked
from privlora.errors import ConfigError, DataError, PrivacyError, RunError
from privlora.lab.diagnostics.bench import open_workbench
from privlora.mechanisms import CorrelatedNoise, band_coefficients, prefix_error
from privlora.methods import METHODS, RATE_STEPS, SPACES, find_row
from privlora.ranges import MOST_STEPS
from privlora.rehearsals import settling, trials
from privlora.rehearsals.kept import because, keep_choice
from privlora.rehearsals.recommending import recommend
from privlora.rehearsals.settling import _trial_batch, settle
from privlora.training.assembly import Parts, PublicStart, build_parts, plan_run
from privlora.training.files import RunFolder
from privlora.training.fitting import in_micro_batches
from privlora.training.inputs import tokenise
from privlora.training.loop import Interrupted
from privlora.training.misfits import refuse_unrehearsed
from privlora.training.promise import plan_privacy
from privlora.training.step import Step

RECORDS = [{"text": f"story {i} of a cat"} for i in range(24)]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("public") / "public.jsonl"
    words = ("red", "blue", "green", "old", "new", "wet")
    path.write_text("\n".join(json.dumps({"text": f"{i} {words[i % 5]} dogs"}) for i in range(48)), "utf-8")
    return path


def settings(public: Path | None, **groups: dict[str, Any]) -> Settings:
    base: dict[str, Any] = {
        "model": {"name": "tiny"},
        "data": {"path": "private.jsonl", "max_length": 16},
        "adapter": {"r": 2},
        "privacy": promise(steps=2, batch=12, records=24, delta=1e-4, noise_multiplier=1.0),
        "method": {"name": "prism", "learning_rate": "auto"},
        "auto": {"file": str(public)} if public else {},
    }
    for name, group in groups.items():
        base[name] = {**base.get(name, {}), **group}
    return settings_from(base)


def settled(chosen: Settings) -> Any:
    return settle(chosen, plan_privacy(chosen, tiny_model()), tiny_model(), tiny_tokenizer())


def test_sizes_follow_from_public_numbers_alone() -> None:
    for units in (50, 500, 5_000, 50_000, 10**7):
        for passes in (0.5, 5, 50):
            steps, batch = run_sizes(units, passes)
            assert steps >= 10
            assert 1 <= batch <= max(1, units / 2)
            if batch < round(units / 2) and steps > 10:
                assert steps * batch == pytest.approx(passes * units, rel=0.05)
                assert steps == pytest.approx(0.3 * math.sqrt(passes * units), rel=0.05)
    assert run_sizes(10_000, 5, steps=100) == (100, 500)
    assert run_sizes(10_000, 5, batch=100) == (500, 100)
    assert run_sizes(100, 0.5, batch=50) == (1, 50)
    assert run_sizes(10**9, 5, batch=1)[0] == MOST_STEPS


@pytest.mark.parametrize(
    ("privacy", "steps", "batch"),
    [
        ({"steps": "auto", "expected_batch_size": "auto"}, 10, 12),
        ({"steps": "auto"}, 10, 12),
        ({"expected_batch_size": "auto"}, 2, 12),
    ],
)
def test_auto_is_gone_once_settings_are_read(privacy: dict[str, Any], steps: int, batch: float) -> None:
    found = settings(None, privacy=privacy, method={"learning_rate": 0.1})
    assert (found.privacy.steps, found.privacy.b) == (steps, batch)
    assert "auto" not in yaml.safe_load(found.to_yaml())  # all is numbers, so a resume reads these
    assert settings_from(yaml.safe_load(found.to_yaml())).privacy == found.privacy


_LEFT: dict[str, tuple[dict[str, dict[str, Any]], set[str], dict[str, Any]]] = {
    "nothing is given": ({}, {"right_weight", "clip_norm", "learning_rate"}, {"metric_power": 1.0}),
    "all is given": (
        {
            "privacy": {"clip_norm": 0.5},
            "method": {"learning_rate": 0.01, "metric_power": 0.0, "right_weight": 0.5},
        },
        set(),
        {"metric_power": 0.0, "right_weight": 0.5, "learning_rate": 0.01},
    ),
    "noise that takes back": (
        {"privacy": {"bands": 4}},
        {"clip_norm", "learning_rate"},
        {"metric_power": None, "right_weight": None},
    ),
    "an adapter": ({"adapter": {"init": "random"}}, {"clip_norm", "learning_rate"}, {"metric_power": None}),
    "a clip norm that is learnt": (
        {"privacy": {"clip_quantile": 0.5}},
        {"right_weight", "learning_rate"},
        {"metric_power": 1.0},
    ),
    "one length for all": (
        {"method": {"clipping": "automatic"}},
        {"right_weight", "learning_rate"},
        {"clipping": "automatic", "metric_power": 1.0},
    ),
    "few": ({"privacy": {"public_dataset_size": 500}}, {"learning_rate"}, {"clipping": "automatic"}),
    "few, and a clip norm": (
        {"privacy": {"public_dataset_size": 500, "clip_norm": 0.5}},
        {"learning_rate"},
        {"clipping": None, "metric_power": None},
    ),
    "another optimizer": (
        {"method": {"name": "prism-paper"}},
        {"clip_norm", "learning_rate"},
        {"metric_power": None},
    ),
    "factors": ({"method": {"name": "dp-sgd"}}, {"clip_norm", "learning_rate"}, {"metric_power": None}),
    "public texts": ({"method": {"name": "pe-sgd"}}, set(), {"clipping": None}),
    "votes": ({"method": {"name": "aug-pe"}}, set(), {}),
    "few, and a clip norm that is learnt": (
        {"privacy": {"public_dataset_size": 500, "clip_quantile": 0.5}},
        {"learning_rate"},
        {"clipping": None},
    ),
    "a warm start": (
        {"synthesis": {"preset": "text", "warm_start_epochs": 1}},
        set(),
        {"metric_power": None, "learning_rate": None},
    ),
    "independent noise": (
        {"privacy": {"bands": 1}},
        {"right_weight", "clip_norm", "learning_rate"},
        {"metric_power": 1.0},
    ),
    "labels": ({"data": {"label": "label", "labels": ["a", "b"]}}, set(), {"metric_power": None}),
    "few labels": (
        {"data": {"label": "label", "labels": ["a", "b"]}, "privacy": {"public_dataset_size": 500}},
        set(),
        {"clipping": "automatic"},
    ),
    "no privacy": ({"privacy": {"private": False, "noise_multiplier": None, "delta": None}}, set(), {}),
}


_NO_TEXTS = ("labels", "few labels", "a warm start")


@pytest.mark.parametrize("case", _LEFT)
def test_all_is_left_to_auto_where_it_goes_with_what_is_given(case: str) -> None:
    groups, chosen, method = _LEFT[case]
    base: dict[str, Any] = {
        "model": {"name": "tiny"},
        "data": {"path": "private.jsonl"},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4, "public_dataset_size": 1000},
        "auto": {"all": True},
    }
    for name, group in groups.items():
        given = {**base.get(name, {}), **group}
        base[name] = {k: v for k, v in given.items() if v is not None or name != "privacy"}
    found = settings_from(base)
    assert set(found.auto.choose if found.auto else ()) == chosen
    assert {name: getattr(found.method, name) for name in method} == method
    units = base["privacy"]["public_dataset_size"]
    assert (found.privacy.steps, found.privacy.b) == run_sizes(units)
    assert found.auto is None or not found.auto.all
    started = found.adapter.init is not None
    weighed = case not in ("public texts", "votes", "no row", "no privacy")
    assert found.adapter.r == (8 if weighed and not started else 16)
    layers = found.adapter.target_modules
    assert layers == (
        "auto" if weighed and units > 500 and not started and case not in _NO_TEXTS else "all-linear"
    )


@pytest.mark.parametrize(("passes", "units"), [("1", 1000), (1, "1000"), ("1e0", "1_000")])
def test_numbers_that_are_texts_are_numbers(passes: Any, units: Any) -> None:
    """As those that settings take for numbers; they had been left out of sizes, whose run was another."""
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4, "public_dataset_size": units}
    content: dict[str, Any] = {"model": {"name": "tiny"}, "data": {"path": "r.jsonl"}, "privacy": privacy}
    found = settings_from({**content, "auto": {"all": True, "passes": passes}})
    assert (found.privacy.steps, found.privacy.b) == run_sizes(1000, 1)
    sized = {**privacy, "steps": "20", "expected_batch_size": "auto"}
    assert settings_from({**content, "privacy": sized}).privacy.b == run_sizes(1000, 5, steps=20)[1]


def test_all_that_is_given_stays(public: Path) -> None:
    found = settings(public, auto={"all": True})
    assert (found.privacy.steps, found.privacy.b) == (2, 12)
    rated = settings(None, privacy={"expected_batch_size": None, "sample_rate": 0.25}, auto={"all": True})
    assert (rated.privacy.q, rated.privacy.steps) == (0.25, 2)
    with pytest.raises(ConfigError, match="public_dataset_size"):
        settings(None, privacy={"steps": None, "public_dataset_size": None}, auto={"all": True})


@pytest.mark.parametrize("name", METHODS)
def test_what_a_row_leaves_to_noise_is_what_can_be_weighed(name: str) -> None:
    """Settings are read without the table, whose own refusal is held against what they leave open."""
    asked = settings(None, method={"name": name})

    def refused() -> bool:
        try:
            refuse_unrehearsed(asked)
        except ConfigError:
            return True
        return False

    assert methods.METHODS[name].weighed == (not refused())


@pytest.mark.parametrize("written", [True, {"all": True}, {"passes": 2}, None])
def test_all_on_the_command_line(written: Any, tmp_path: Path) -> None:
    """However the file says it, what is laid over it counts."""
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4, "public_dataset_size": 1000}
    content: dict[str, Any] = {"model": {"name": "tiny"}, "data": {"path": "r.jsonl"}, "privacy": privacy}
    if written is not None:
        content["auto"] = written
    found = settings_from(content, ["auto.all=true", "auto.passes=1", "method.metric_power=0.5"])
    assert (found.privacy.steps, found.privacy.b) == run_sizes(1000, 1)
    assert found.method.metric_power == 0.5
    assert set(found.auto.choose) == {"right_weight", "clip_norm", "learning_rate"}
    assert settings_from(content, ["auto=true", "auto.passes=1"]).privacy.steps == found.privacy.steps
    with pytest.raises(ConfigError, match="steps is missing"):
        settings_from(content, ["auto.all=false"])
    with pytest.raises(ConfigError, match=r"Fix: write auto\.all=true"):
        settings_from(content, ["auto=all"])
    with pytest.raises(ConfigError, match="Fix: write auto: true"):
        settings_from({**content, "auto": "all"})
    with pytest.raises(ConfigError, match=r"unknown setting 'auto\.limt'"):
        settings_from(content, ["auto.all=true", "auto.limt=40"])


def test_all_is_of_what_is_left_out() -> None:
    """Groups that are made already do not tell it, so that nothing would follow from it."""
    read = settings(None, method={"learning_rate": 0.1})
    with pytest.raises(ConfigError, match=r"auto\.all is of what a file or a call leaves out"):
        checked(Settings, {**dict(read), "auto": {"all": True}}, "settings")


def test_sizes_on_the_command_line_win(tmp_path: Path) -> None:
    base = yaml.safe_load(settings(None, method={"learning_rate": 0.1}).to_yaml())
    base["privacy"]["steps"] = "auto"
    found = settings_from(base, ["privacy.steps=7", "auto.passes=2"])
    assert found.privacy.steps == 7


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            {"data": {"path": "public.jsonl"}, "auto": {"file": "public.jsonl"}},
            "auto.file names .*, which is private",
        ),
        ({"data": {"evaluation": "public.jsonl"}, "auto": {"file": "public.jsonl"}}, "also data.evaluation"),
        ({"method": {"learning_rate": 0.1}}, "auto.file is read to choose settings, and none is auto"),
        ({"privacy": {"clip_norm": "auto", "clip_quantile": 0.5}}, "learns the clip norm"),
        ({"privacy": {"private": False, "noise_multiplier": None}}, "adds no noise"),
        ({"data": {"label": "label", "labels": 2}}, "texts that a model writes"),
        (
            {"privacy": {"steps": "auto", "public_dataset_size": None, "sample_rate": 0.5}},
            "public_dataset_size",
        ),
        ({"privacy": {"expected_batch_size": "auto", "sample_rate": 0.5}}, "remove sample_rate"),
        ({"auto": {"passes": 0}, "privacy": {"steps": "auto"}}, "passes"),
        ({"auto": {"file": [{"text": "a story"}]}}, r"auto\.file: it names files.* one JSON object a line"),
        ({"auto": {"choose": ["steps"]}}, "choose"),
        ({"privacy": {"clip_norm": 3.0}, "auto": {"choose": ["clip_norm"]}}, "clip_norm is a number"),
        ({"method": {"right_weight": 0.3}, "auto": {"choose": ["right_weight"]}}, "right_weight is a number"),
        (
            {"method": {"learning_rate": 0.1}, "auto": {"choose": ["learning_rate"]}},
            "learning_rate is a number",
        ),
        ({"method": {"learning_rate": None}, "privacy": {"steps": "Auto"}}, "as steps: 200, or auto"),
        ({"synthesis": {"preset": "text"}}, "not rehearsed with here"),
        ({"federation": {"rule": "tan", "rounds": 2, "clients": 3}}, "does not go with a federation"),
        (
            {
                "federation": {"rule": "tan", "rounds": 2, "clients": 3},
                "auto": {"all": True},
                "method": {"learning_rate": None},
                "privacy": {"steps": None},
            },
            r"auto\.all does not go with a federation",
        ),
    ],
)
def test_what_auto_does_not_go_with(groups: dict[str, Any], told: str, public: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        settings(public, **groups)


@pytest.mark.parametrize("row", ["pe-sgd", "guided-prism", "popri", "adamw", "wishart-m2"])
def test_rows_that_cannot_be_rehearsed(row: str, public: Path) -> None:
    chosen = settings(public, method={"name": row})
    with pytest.raises(ConfigError, match="cannot be auto with method"):
        plan_run(chosen)


@pytest.mark.parametrize("row", ["dp-adamw", "dp-sgd", "dp-zo", "projected", "ffa"])
def test_rows_that_can(row: str, public: Path) -> None:
    chosen = settings(public, method={"name": row}, privacy={"clip_norm": "auto", "steps": 1})
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = settle(chosen, plan_privacy(chosen, model), model, tiny_tokenizer())
    assert found.settings.method.learning_rate is not None
    assert found.settings.privacy.clip_norm > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_whoever_does_not_rehearse_refuses(public: Path) -> None:
    """A study, an audit or a diagnosis would take the default in silence."""
    with pytest.raises(ConfigError, match="learning_rate is auto, and nothing chooses it here"):
        build_parts(settings(public), tiny_model(), PublicStart(tiny_tokenizer()))


def test_default_rates_fall_with_the_root_of_the_steps_where_noise_is_added() -> None:
    for row in METHODS.values():
        falls = row.private and not row.public_texts
        own = row.learning_rate
        if row.relative_rate:
            own = row.relative_learning_rate or float(f"{own / (SPACES[row.space].weight_unit or 1):.3g}")
        assert row.rate_of(RATE_STEPS) == own
        assert row.rate_of(RATE_STEPS, relative=False) == row.learning_rate
        ratio = row.rate_of(RATE_STEPS) / row.rate_of(16 * RATE_STEPS)
        assert ratio == pytest.approx(4.0 if falls else 1.0, rel=1e-2)
        assert row.rate_of(96, private=False) == own
    assert find_row("aug-pe").rate_of(96) == find_row("aug-pe").learning_rate


def test_default_rates_grow_where_less_noise_is_left_in_sums() -> None:
    """By the power 1.5 of what is left: measured (docs/results.md)."""
    row = find_row("dp-sgd")
    for steps, bands in ((24, 4), (96, 16)):
        c = band_coefficients(bands, steps)
        left = math.sqrt(prefix_error(c, steps) / prefix_error((1.0,), steps))
        grown = row.rate_of(steps, bands=bands) / row.rate_of(steps)
        assert grown == pytest.approx(left**-1.5, rel=1e-2)
    assert row.rate_of(96, private=False, bands=16) == row.learning_rate
    assert find_row("pe-sgd").rate_of(96, bands=16) == find_row("pe-sgd").learning_rate
    assert row.rate_of(10**9) > 0  # at once


def test_trials_have_the_correlated_noise_of_the_run(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rehearsals on public records and by noise alone; and its start is the default rate of such a run."""
    asked: list[tuple[int, int]] = []
    following = CorrelatedNoise.next

    def noted(self: CorrelatedNoise, step: int, white: Any) -> Any:
        asked.append((self.bands, step))
        return following(self, step, white)

    monkeypatch.setattr(CorrelatedNoise, "next", noted)
    for place in (public, None):
        asked.clear()
        banded = settings(place, privacy={"bands": 3, "steps": 4, "expected_batch_size": 6})
        found = settled(banded)
        tried = [row["learning_rate"] for row in found.facts["rows"]]
        assert find_row("prism").rate_of(4, bands=3) in tried
        assert {bands for bands, _ in asked} == {3}
        assert [step for _, step in asked[:8]] == [1, 2, 3, 4] * 2
        if place is not None:
            draws = sum(row["draws"] for row in found.facts["rows"])
            assert len(asked) == 4 * draws


def test_the_noise_of_a_size_is_that_of_its_sum() -> None:
    """Of correlated noise, too: the root of the expected square of all of it, over T steps of b."""
    for bands in (1, 3):
        chosen = settings(
            None,
            privacy={
                "noise_multiplier": None,
                "target_epsilon": 4,
                "bands": bands,
                "steps": 6,
                "expected_batch_size": 4,
            },
        )
        found = recommend(chosen).by_passes
        assert {size.batch for size in found} >= {12, 4}  # half of the units, which no third of them holds
        size = next(size for size in found if size.own)
        c = band_coefficients(bands, 6)
        left = math.sqrt(prefix_error(c, 6) / prefix_error((1.0,), 6))
        assert size.noise == pytest.approx(size.noise_multiplier * left / (4 * math.sqrt(6)), rel=1e-6)
        assert (left < 0.95) == (bands > 1)


@pytest.mark.parametrize("dropout", [False, True])
def test_trials_have_the_dropout_of_the_run(dropout: bool, public: Path) -> None:
    chosen = settings(public, model={"dropout": dropout}).model_copy(update={"auto": None})
    parts = build_parts(chosen, tiny_model(), PublicStart(tiny_tokenizer()))
    records = tokenise(RECORDS, chosen.data, tiny_tokenizer())
    assert trials.trial_step(parts, records, trials.Noise(1.0, chosen.privacy, 24), 0).dropout is dropout
    parts.adapter.detach()


def test_a_reason_that_a_failed_start_left_is_not_that_of_the_next(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.choice.parent.mkdir(parents=True)
    folder.choice.write_text("{}")
    keep_choice(folder, None)
    assert not folder.choice.exists()


def test_the_best_rate_is_taken_and_refined(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = find_row("prism").rate_of(2, relative=False)
    seen: list[float] = []

    def losses(parts: Parts, *_: Any) -> Any:
        seen.append(parts.hyper.learning_rate)
        return torch.full((4,), abs(math.log2(seen[-1] / own) - 1.5), dtype=torch.float64)

    monkeypatch.setattr(trials, "_held_losses", losses)
    found = settled(settings(public, method={"relative_rate": False}))
    assert found.settings.method.learning_rate == pytest.approx(own * 2**1.5, rel=1e-2)
    assert seen == pytest.approx([own * 2**k for k in (0, 1, -1, 2, 1.5, 1.5, 1)], rel=1e-2)
    assert found.settings.auto is None
    assert found.facts["rows"][0]["learning_rate"] == found.settings.method.learning_rate
    assert "because with" in because(found.facts)


def test_a_rate_of_the_settings_is_the_only_one_that_is_tried(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int]] = []

    def losses(parts: Parts, texts: Any, noise: Any, draw: int, *_: Any) -> Any:
        asked.append((parts.hyper.learning_rate, draw))
        return torch.full((4,), 1.5, dtype=torch.float64)

    monkeypatch.setattr(trials, "_held_losses", losses)
    open_, model = settings(public), tiny_model()
    texts = settling.public_texts(open_, trials.Bench(model, tiny_tokenizer()))
    given = settings(None, method={"learning_rate": 0.3})
    found = settling.try_rates(given, 1.0, texts, trials.Bench(model, tiny_tokenizer()), 2.0)
    assert asked == [(0.3, 0)]
    assert (found.learning_rate, found.loss) == (0.3, 1.5)
    assert found.to_dict("prism", 2.0)["equal_from"] is None


def test_what_is_kept_has_the_spread_of_draws(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of draws differ by 0.2, as much at each rate, and rates by less than a thousandth."""
    own = find_row("prism").rate_of(2)

    def losses(parts: Parts, texts: Any, noise: Any, draw: int, *_: Any) -> Any:
        apart = 1e-4 * abs(math.log2(parts.hyper.learning_rate / own)) * (1 + torch.arange(4) % 2)
        return 2.0 + 0.2 * draw + apart.double()

    monkeypatch.setattr(trials, "_held_losses", losses)
    facts = settled(settings(public)).facts
    first = facts["rows"][0]
    assert first["learning_rate"] == pytest.approx(own, rel=1e-2)
    assert (first["draws"], first["spread"]) == (2, pytest.approx(0.2 / math.sqrt(2), rel=1e-3))
    assert facts["equal_from"] == facts["equal_to"] == first["learning_rate"]
    assert {row["spread"] for row in facts["rows"] if row["draws"] == 1} == {None}


def test_phases_are_named_and_end(public: Path) -> None:
    told: list[tuple[str, int, int]] = []
    chosen = settings(public, privacy={"clip_norm": "auto"})
    settle(
        chosen,
        plan_privacy(chosen, tiny_model()),
        tiny_model(),
        tiny_tokenizer(),
        lambda *what: told.append(what),
    )
    for name, begins in (
        ("reading public records", 1),
        ("measuring gradient norms of public records", 32),
        ("rehearsing learning rates of prism", 8 * chosen.privacy.steps),
    ):
        phase = [(done, total) for what, done, total in told if what.startswith(name)]
        assert phase[0] == (0, begins)
        assert phase[-1][0] == phase[-1][1] >= begins
        assert [total for _, total in phase] == sorted(total for _, total in phase)
        assert [done for done, _ in phase] == sorted(done for done, _ in phase)
    norms = [number for number, (what, *_) in enumerate(told) if "norms" in what]
    assert max(norms) < min(number for number, (what, *_) in enumerate(told) if "rates" in what)


@pytest.mark.parametrize("on", ["public records", "its own texts"])
def test_what_was_measured_before_an_interruption_is_kept_for_the_same_run(
    on: str, public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, norms and finished trials, in private/ alone; the choice is that of a run that nobody interrupted."""
    take, taken = Step.take, list[int]()

    def start(name: str, *, stop: int | None = None, seed: int = 0) -> RunFolder:
        def counted(self: Step, *drawn: Any) -> Any:
            if len(taken) == stop:
                raise KeyboardInterrupt
            taken.append(1)
            return take(self, *drawn)

        taken.clear()
        monkeypatch.setattr(Step, "take", counted)
        folder = RunFolder(tmp_path / name)
        chosen = settings(
            public if on == "public records" else None,
            privacy={"clip_norm": "auto"},
            method={"relative_rate": False},  # whose default is far from what is found
            run={"output": str(folder.root), "seed": seed},
        )
        try:
            privlora.api.train_run(chosen, model=tiny_model(), tokenizer=tiny_tokenizer(), records=RECORDS)
        except KeyboardInterrupt:
            assert stop is not None
        return folder

    whole = start("whole").choice.read_text()
    all_of_them = len(taken)
    stopped = start("run", stop=5)
    assert [path.name for path in stopped.root.rglob("*")] == ["private", "measured.json"]
    assert stopped.private.stat().st_mode & 0o077 == 0
    kept = stopped.measured.read_text()
    with monkeypatch.context() as patch:
        for name in ("noise_alone.generate_tokens", "settling._at_the_start"):  # neither is done again
            patch.setattr(f"privlora.rehearsals.{name}", None)
        assert start("run").choice.read_text() == whole
    assert len(taken) == all_of_them - 4  # of five steps, four of whole trials
    assert not stopped.measured.exists()
    other = start("run2", stop=0)
    other.measured.write_text(kept)
    taken_up = start("run2", seed=1).choice.read_text()
    assert taken_up == start("run3", seed=1).choice.read_text()  # of other settings nothing is taken up


def test_what_few_units_make_of_sizes_is_said() -> None:
    for units in (10, 100, 150, 1000, 10_000):
        for passes in (0.5, 1, 5, 10, 20):
            steps, batch = run_sizes(units, passes)
            said = of_few(units, passes, steps, batch)
            short = round(0.3 * math.sqrt(passes * units)) < 10
            other = abs(steps * batch / units / passes - 1) > 0.1
            assert (said is not None) == (short or other)
            assert said is None or f"so it is {steps} steps of {batch:g}" in said
            assert said is None or ("has at least 10," in said) == short
            assert of_few(units, passes, steps + 1, batch) is None
    assert "no batch has more than half of the units" in str(of_few(100, 20, *run_sizes(100, 20)))
    assert "no batch has less than one unit" in str(of_few(10, 0.5, *run_sizes(10, 0.5)))


def test_the_clip_norm_is_a_quarter_of_the_median_norm(public: Path) -> None:
    found = settled(settings(public, privacy={"clip_norm": "auto"}, method={"learning_rate": 0.1}))
    assert found.facts["rows"] == []
    assert found.settings.privacy.clip_norm == float(f"{found.facts['median_norm'] / 4:.2g}")
    assert found.settings.method.learning_rate == 0.1
    assert "a quarter of the median norm" in because(found.facts)
    again = settled(settings(public, privacy={"clip_norm": "auto"}, method={"learning_rate": 0.1}))
    assert again.facts == found.facts


def test_trials_have_the_noise_of_the_run_and_few_records(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a trial draws, each coordinate of its mean has the noise sigma C / b of the run."""
    taken: list[tuple[float, float]] = []

    def losses(parts: Parts, texts: Any, noise: Any, draw: int, *_: Any) -> Any:
        mechanism = trials.trial_step(parts, texts.records, noise, draw).mechanism
        event: Any = mechanism.event  # type: ignore[attr-defined]
        drawn = mechanism.expected_batch_size  # type: ignore[attr-defined]
        taken.append((drawn, event.noise_multiplier * mechanism.clip_norm / drawn))  # type: ignore[attr-defined]
        return torch.zeros(4, dtype=torch.float64)

    monkeypatch.setattr(trials, "_held_losses", losses)
    settled(settings(public, privacy={"noise_multiplier": 1.5, "clip_norm": 0.3}))
    assert {drawn for drawn, _ in taken} == {8}
    assert [std for _, std in taken] == pytest.approx([1.5 * 0.3 / 12] * len(taken))


def test_how_many_records_a_trial_draws() -> None:
    for batch, sigma, dimension in ((256, 0.83, 46_240), (1024, 1.0, 46_240), (4096, 1.3, 10**7)):
        drawn = _trial_batch(batch, sigma, dimension)
        noise, sampling = (sigma / batch) ** 2 * dimension, 1 / drawn
        assert drawn == 8 or sampling <= 0.2 * noise * 1.001
        assert drawn <= batch


def test_a_run_takes_what_was_settled_and_resumes_with_it(public: Path, tmp_path: Path) -> None:
    def start(observer: Any = None) -> None:
        fine_tune(
            tiny_model(),
            RECORDS,
            tokenizer=tiny_tokenizer(),
            privacy={**settings(public).privacy.model_dump(exclude_none=True), "clip_norm": "auto"},
            adapter={"r": 2},
            data={"max_length": 16},
            method={"name": "prism", "learning_rate": "auto"},
            auto={"file": str(public)},
            output=str(tmp_path / "run"),
            observer=observer,
            show_progress=False,
        )

    with pytest.raises(Interrupted):
        start(StopAt(1))
    folder = RunFolder(tmp_path / "run")
    found = json.loads(folder.choice.read_text("utf-8"))
    kept = yaml.safe_load(folder.settings.read_text("utf-8"))
    assert kept["method"]["learning_rate"] == found["rows"][0]["learning_rate"]
    assert kept["privacy"]["clip_norm"] == found["clip_norm"] == read_ledger(folder.ledger).plan.clip_norm
    assert "auto" not in kept
    assert read_ledger(folder.ledger).charges == 1  # rehearsals charge nobody
    resume_run(tmp_path / "run", model=tiny_model(), tokenizer=tiny_tokenizer(), records=RECORDS)
    report = json.loads(folder.report.read_text("utf-8"))
    assert report["method"]["choice"] == found
    assert "public records instead of private ones" in " ".join(
        (folder.release / "report.html").read_text("utf-8").split()
    )
    # Another one, with no number out of place, is not taken up.
    planted = {**found, "untrained": found["untrained"] + 0.25}
    folder.choice.write_text(json.dumps(planted, indent=1) + "\n", "utf-8")
    with pytest.raises(RunError, match=r"choice\.json' is not what the run wrote"):
        resume_run(tmp_path / "run", model=tiny_model(), tokenizer=tiny_tokenizer(), records=RECORDS)


def test_no_record_plays_a_part(public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is settled whatever the records are, and however many: they are not handed over."""
    given: list[tuple[Any, ...]] = []
    true = privlora.running.settle

    def watched(*arguments: Any) -> Any:
        given.append(arguments)
        return true(*arguments)

    monkeypatch.setattr(privlora.running, "settle", watched)
    found = []
    for i, records in enumerate((RECORDS, [{"text": f"other {i * i}"} for i in range(40)])):
        run = settings(public, run={"output": str(tmp_path / f"run{i}")})
        privlora.api.train_run(run, model=tiny_model(), tokenizer=tiny_tokenizer(), records=records)
        found.append((tmp_path / f"run{i}" / "release" / "choice.json").read_bytes())
    assert found[0] == found[1]
    assert [len(arguments) for arguments in given] == [6, 6]  # settings, plan, model, tokenizer, told, kept


@pytest.mark.parametrize("name", ["data.path", "data.evaluation"])
def test_copies_of_private_or_evaluation_records_choose_nothing(
    name: str, public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the file is called: records are compared, in their columns and as tokens, before anything is chosen."""
    monkeypatch.setattr(privlora.running, "settle", lambda *_: pytest.fail("losses on a copy"))
    some = [json.loads(line) for line in public.read_text("utf-8").splitlines()][36:]
    other = [{"text": f"{record['text']} "} for record in some] if name == "data.path" else some
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(json.dumps(record) for record in some), "utf-8")
    more = {"evaluation": str(held)} if name == "data.evaluation" else {}
    run = settings(public, data=more, run={"output": str(tmp_path / "run")})
    given = RECORDS if name == "data.evaluation" else other
    error = DataError if name == "data.evaluation" else PrivacyError
    with pytest.raises(error, match=r"auto\.file"):
        privlora.api.train_run(run, model=tiny_model(), tokenizer=tiny_tokenizer(), records=given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["data.path", "data.evaluation"])
def test_copies_that_differ_where_they_are_cut_off_choose_nothing(name: str, tmp_path: Path) -> None:
    texts = [f"{i} is how a long story of dogs begins that goes on" for i in range(48)]
    for file, end in (("public", ""), ("held", " and on")):
        lines = (json.dumps({"text": text + end}) for text in texts)
        (tmp_path / f"{file}.jsonl").write_text("\n".join(lines), "utf-8")
    more = {"evaluation": str(tmp_path / "held.jsonl")} if name == "data.evaluation" else {}
    run = settings(tmp_path / "public.jsonl", data=more, run={"output": str(tmp_path / "run")})
    given = RECORDS if name == "data.evaluation" else [{"text": f"{text} and on"} for text in texts[:24]]
    error = DataError if name == "data.evaluation" else PrivacyError
    with pytest.raises(error, match=r"auto\.file"):
        privlora.api.train_run(run, model=tiny_model(), tokenizer=tiny_tokenizer(), records=given)


def test_whatever_repeats_a_run_refuses_copies_too(public: Path) -> None:
    """An audit and a diagnosis settle before records are read, and compare then."""
    copies = [json.loads(line) for line in public.read_text("utf-8").splitlines()][:24]
    run = settings(public)
    found = settling.settled(run, tiny_model(), tiny_tokenizer())
    assert (found.auto.file, found.auto.choose) == (str(public), [])
    assert isinstance(found.method.learning_rate, float)
    with (
        pytest.raises(PrivacyError, match=r"auto\.file"),
        open_workbench(run, model=tiny_model(), tokenizer=tiny_tokenizer(), records=copies),
    ):
        pass


def test_a_rehearsal_does_not_follow_from_free_memory(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its losses are published, and free memory may follow from private files."""
    seen: list[int] = []
    built: list[int] = []
    true, parts = privlora.running.settle, privlora.running.build_parts

    def watched(given: Settings, *more: Any) -> Any:
        seen.append(given.run.max_tokens)
        return true(given, *more)

    def building(given: Settings, *more: Any) -> Any:
        built.append(given.run.max_tokens)
        return parts(given, *more)

    monkeypatch.setattr(privlora.running, "settle", watched)
    monkeypatch.setattr(privlora.running, "build_parts", building)
    kept = []
    for fits in (9000, 5000, 512):

        def cut(given: Settings, *_: Any, fits: int = fits, **__: Any) -> Any:
            return in_micro_batches(given, fits), None

        monkeypatch.setattr(privlora.running, "with_micro_batches", cut)
        output = str(tmp_path / f"run{fits}")
        run = settings(public, run={"output": output, "tokens_per_micro_batch": "auto"})
        privlora.api.train_run(run, model=tiny_model(), tokenizer=tiny_tokenizer(), records=RECORDS)
        kept.append(RunFolder(Path(output)).choice.read_bytes())
    assert seen == [4096, 4096, 512]
    assert built == [9000, 5000, 512]  # the run itself takes what fits
    assert kept[0] == kept[1]


def test_no_record_is_learnt_and_held_out(public: Path) -> None:
    texts = [record["text"] for record in map(json.loads, public.read_text("utf-8").splitlines())]
    twice = tokenise([{"text": text} for text in texts * 2], settings(public).data, tiny_tokenizer())
    of = [{tuple(example.input_ids.tolist()) for example in part} for part in settling._split(twice, 0)]
    assert not of[0] & of[1]
    assert sum(map(len, of)) == len(set(texts))


def test_one_noisy_number_a_step_has_no_rate_by_noise_alone(public: Path) -> None:
    alone = settings(None, method={"name": "dp-zo"})
    with pytest.raises(ConfigError, match=r"dp-zo' and no auto\.file"):
        plan_run(alone)
    assert plan_run(settings(public, method={"name": "dp-zo"}))  # which rehearses it


def test_trials_train_on_all_steps_and_are_scored_on_what_they_did_not_see(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, trained, steps, meant = [], [], [], []
    losses, many, norms = trials.record_losses, Step.take_many, settling.sequential_batches

    def of(examples: Any) -> set[tuple[int, ...]]:
        return {tuple(int(i) for i in example.input_ids) for example in examples}

    monkeypatch.setattr(trials, "record_losses", lambda m, e: (scored.append(of(e)), losses(m, e))[1])
    monkeypatch.setattr(
        Step,
        "take_many",
        lambda self, count, *rest: (
            trained.append(of(self.examples)),
            steps.append(count),
            many(self, count, *rest),
        )[2],
    )
    monkeypatch.setattr(
        settling, "sequential_batches", lambda e, **more: (meant.append(of(e)), norms(e, **more))[1]
    )
    monkeypatch.setattr(settling, "MOST_TEXTS", 40)
    chosen = settings(public, privacy={"clip_norm": "auto"})
    found = settled(chosen)
    texts = settling.public_texts(chosen, trials.Bench(tiny_model(), tiny_tokenizer()))
    assert len(texts.records) + len(texts.held) == 40  # of 48
    count = sum(row["draws"] for row in found.facts["rows"])
    assert scored == [of(texts.held)] * (1 + count)  # the first before any training
    assert trained == [of(texts.records)] * count
    assert set(steps) == {chosen.privacy.steps}
    assert meant == [of(texts.records)]
    assert found.facts["untrained"] != found.facts["rows"][0]["loss"]


def test_the_median_is_no_mean(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from privlora.coordinates import TangentCoordinates

    def squares(self: Any, captured: Any) -> Any:
        found = torch.ones_like(true(self, captured))
        found[0] = 1e6
        return found

    true = TangentCoordinates.norms_squared
    monkeypatch.setattr(TangentCoordinates, "norms_squared", squares)
    assert (
        settled(settings(public, privacy={"clip_norm": "auto"}, method={"learning_rate": 0.1})).facts[
            "median_norm"
        ]
        == 1.0
    )
