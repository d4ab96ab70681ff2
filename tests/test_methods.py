"""The table of methods: its rows, how settings reach their optimizers, and a run of every row, private and not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import loaded_by_peft, tiny_model, tiny_tokenizer

from privlora.adapters import LowRankAdapter
from privlora.api import Result, fine_tune, resume_run
from privlora.config import OPTIMIZER_SETTINGS, MethodSettings, load_settings
from privlora.config.methods import PAPER_RULES
from privlora.coordinates import OneFactorCoordinates
from privlora.errors import ConfigError
from privlora.methods import METHODS, SPACES, build, find_method, find_row
from privlora.training.observer import Observer

RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold."} for i in range(30)]
PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-3}
STEPS: dict[str, Any] = {"steps": 3, "expected_batch_size": 6, "public_dataset_size": 30}


def tune(folder: Path, method: Any, privacy: Mapping[str, Any] = PRIVATE, **more: Any) -> Result:
    small = {"adapter": {"r": 2}, "data": {"max_length": 40}, "tokenizer": tiny_tokenizer()}
    given = {**small, "output": folder, "privacy": {**STEPS, **privacy}, **more}
    return fine_tune(tiny_model(), RECORDS, method=method, **given)


def test_the_rows() -> None:
    assert [name for name, row in METHODS.items() if not row.private] == ["adamw"]
    for row in METHODS.values():
        assert set(row.optimizers) <= set(SPACES[row.space].optimizers)


def test_every_setting_of_an_optimizer_can_be_set_and_no_other() -> None:
    known = set()
    for space in SPACES.values():
        for kind in space.optimizers.values():
            own = {**kind.settings, **kind.space_settings}
            assert MethodSettings(**own).model_dump(include=set(own)) == own  # type: ignore[arg-type]
            known |= set(own)
    assert known == set(OPTIMIZER_SETTINGS)


@pytest.mark.parametrize(
    ("name", "private"),
    [
        *((name, True) for name, row in METHODS.items() if row.private),
        *(
            pytest.param(name, False, marks=() if name in ("prism", "adamw") else pytest.mark.long)
            for name in METHODS
        ),
    ],
)
def test_every_row_trains_stops_and_goes_on(
    name: str, private: bool, tmp_path: Path, quick_reports: None, public_texts: None
) -> None:
    class Stop(Exception):
        pass

    class StopsAfterTwo(Observer):
        def on_step(self, report: Any) -> None:
            if report.step == 2:
                raise Stop

    promise = PRIVATE if private else {"private": False}
    often = {"observer": StopsAfterTwo(), "run": {"checkpoint_every": 1}}
    with pytest.raises(Stop):
        tune(tmp_path / "run", name, promise, **often)
    model = tiny_model()
    result = resume_run(tmp_path / "run", model=model, tokenizer=tiny_tokenizer(), records=RECORDS)
    assert result.steps == 3
    assert (result.epsilon is not None) is private
    assert result.release.name == ("release" if private else "not-private")
    adapted = loaded_by_peft(model, result.release)
    change = [p for key, p in adapted.named_parameters() if "lora_B" in key]
    assert change
    assert all(bool(p.isfinite().all()) and float(p.abs().max()) > 0 for p in change)


def test_settings_of_the_optimizer_reach_it(tmp_path: Path, quick_reports: None) -> None:
    row = find_method("lora+")
    hyper = row.resolve(MethodSettings(name="lora+", learning_rate_ratio=3.0, beta1=0.5), None, 10)
    assert hyper.settings == {"beta1": 0.5, "beta2": 0.999, "weight_decay": 0.0, "learning_rate_ratio": 3.0}
    assert hyper.to_dict()["learning_rate_ratio"] == 3.0
    assert "settings" not in hyper.to_dict()
    _, optimizer = build(row, LowRankAdapter(tiny_model(), rank=2), settings=hyper.settings)
    inner: Any = optimizer
    assert {group["lr"] for group in inner._inner.param_groups if group["params"]} == {1.0, 3.0}
    tune(tmp_path / "run", {"name": "lora+", "learning_rate_ratio": 3.0})
    kept = (tmp_path / "run/private/config.resolved.yaml").read_text()
    assert "learning_rate_ratio: 3.0" in kept
    # What was left open stands above it for readers, and stays open for a resume.
    top = kept.partition("model:")[0].splitlines()
    assert top[0] == "# What null stands for in this run:"
    assert {
        f"#   method.learning_rate: {row.rate_of(STEPS['steps'])}",
        "#   adapter.init: random",
        "#   method.optimizer: lora+",
    } <= set(top)
    assert not any("learning_rate_ratio" in line for line in top)
    assert load_settings(tmp_path / "run/private/config.resolved.yaml").method.learning_rate is None


def test_rows_have_defaults_of_their_own() -> None:
    assert find_method("prism").resolve(MethodSettings(), None, 10).settings["beta2"] == 0.99
    assert find_method("dp-sgd").resolve(MethodSettings(name="dp-sgd"), None, 10).settings == {"beta1": 0.0}


_ADAM = {"beta1": 0.9, "beta2": 0.999}
_ADAMW = {**_ADAM, "weight_decay": 0.0}
_SPAN = {"alpha": 1.0, "ridge": 1e-6, "top_k": 0, "hold_out": 0.0}
_PRISM = {"beta1": 0.0, "beta2": 0.99, "error_feedback": 1.0, "right_weight": 1.0, "metric_power": 0.0}
RESOLVED: dict[tuple[str, str], dict[str, float]] = {
    **{("prism", optimizer): _PRISM for optimizer in ("rank", "scalar", "sgd")},
    **{("prism-paper", optimizer): _ADAM for optimizer in PAPER_RULES},
    ("dp-adamw", "adamw"): _ADAMW,
    ("dp-sgd", "sgd"): {"beta1": 0.0},
    ("dp-adambc", "adambc"): {**_ADAM, "floor": 1.0},
    ("lora+", "lora+"): {**_ADAMW, "learning_rate_ratio": 6.0},
    ("ffa", "adamw"): _ADAMW,
    ("ffa", "sgd"): {"beta1": 0.0},
    ("lora-fa", "lora-fa"): _ADAM,
    ("lamb", "lamb"): _ADAMW,
    ("lora-rite", "rite"): _ADAM,
    ("riemannian", "riemannian"): _ADAMW,
    **{(row, "sgd"): {"beta1": 0.0} for row in ("projected", "wishart-m2")},
    **{(row, "adamw"): _ADAMW for row in ("projected", "wishart-m2")},
    **{(row, "adamw"): {**_ADAMW, **_SPAN} for row in ("pe-sgd", "pe-sgd-fix")},
    **{(row, "sgd"): {"beta1": 0.0, **_SPAN} for row in ("pe-sgd", "pe-sgd-fix")},
    **{
        ("span-prism", o): {"beta1": 0.9, "beta2": 0.99, "error_feedback": 0.0, **_SPAN, "ridge": 1.0}
        for o in ("scalar", "sgd", "rank")
    },
    **{
        ("guided-prism", o): {
            **{"beta1": 0.0, "beta2": 0.99, "error_feedback": 1.0},
            **{"ridge": 0.0, "top_k": 0, "beside": 0.3},
        }
        for o in ("rank", "scalar", "sgd")
    },
    **{
        (row, o): {**own, **space}
        for row, space in {
            "pdp-sgd": {"ridge": 0.0, "top_k": 50, "beside": 0.0},
            "gep": {"top_k": 50},
            "b-gep": {"alpha": 0.5, "ridge": 0.0, "top_k": 50, "hold_out": 0.0},
        }.items()
        for o, own in (("adamw", _ADAMW), ("sgd", {"beta1": 0.0}))
    },
    ("dp-zo", "sgd"): {"beta1": 0.0, "perturbation": 1e-3},
    ("dp-zo", "adamw"): {**_ADAMW, "perturbation": 1e-3},
    ("adamw", "adamw"): _ADAMW,
}


def test_every_default_is_what_it_was() -> None:
    """A default that changes makes another method of the same name: raise the row's revision with it."""
    rows = {(row.name, optimizer) for row in METHODS.values() for optimizer in row.optimizers}
    assert set(RESOLVED) == rows
    for (name, optimizer), expected in RESOLVED.items():
        chosen = MethodSettings(name=name, optimizer=optimizer)
        found = METHODS[name].resolve(chosen, None, 10, private=METHODS[name].private).settings
        if name == "span-prism":  # which chooses them
            expected = {**expected, "hold_out": 0.25}
            expected = {key: expected[key] for key in expected if key not in ("alpha", "ridge", "top_k")}
        assert list(found.items()) == list(expected.items()), (name, optimizer)


def test_what_is_not_given_is_chosen_where_public_gradients_are_held_out() -> None:
    def settings(name: str, *, private: bool = True, **given: Any) -> dict[str, float]:
        chosen = MethodSettings(name=name, **given)
        found = METHODS[name].resolve(chosen, None, 10, private=private).settings
        return {key: found[key] for key in ("alpha", "ridge", "top_k", "hold_out") if key in found}

    assert settings("span-prism") == {"hold_out": 0.25}
    assert settings("span-prism", ridge=3.0) == {"ridge": 3.0, "hold_out": 0.25}
    assert settings("span-prism", hold_out=0.0) == {"alpha": 1.0, "ridge": 1.0, "top_k": 0, "hold_out": 0.0}
    assert settings("span-prism", private=False)["hold_out"] == 0.0
    assert settings("span-prism", alpha=0.5, ridge=3.0, top_k=0)["hold_out"] == 0.0
    assert settings("pe-sgd", hold_out=0.2, alpha=1.0) == {"alpha": 1.0, "hold_out": 0.2}
    with pytest.raises(ConfigError, match=r"hold_out=0.2 has nothing to choose.*or leave one of them out"):
        settings("pe-sgd", hold_out=0.2, alpha=1.0, ridge=0.0, top_k=5)
    with pytest.raises(ConfigError, match=r"nothing to choose: there is no noise.*set method.hold_out=0"):
        settings("pe-sgd", hold_out=0.2, private=False)
    with pytest.raises(ConfigError, match="no setting 'hold_out'"):
        settings("gep", hold_out=0.2)


def test_prisms_defaults_follow_the_start_and_the_noise() -> None:
    row = find_method("prism")

    def chosen(init: str | None = None, private: bool = True, **given: float) -> tuple[float, ...]:
        hyper = row.resolve(MethodSettings(**given), init, 10, private=private)  # type: ignore[arg-type]
        names = ("beta1", "error_feedback", "right_weight")
        return hyper.averaging, *(hyper.settings[name] for name in names)

    assert chosen() == (0.5, 0.0, 1.0, 1.0)
    assert chosen("public-gradient") == (0.5, 0.0, 1.0, 0.25)
    assert chosen("public-gradient", right_weight=0.5) == (0.5, 0.0, 1.0, 0.5)
    assert chosen(private=False) == (0.0, 0.5, 0.0, 1.0)
    assert chosen(private=False, averaging=0.9, error_feedback=2.0) == (0.9, 0.5, 2.0, 1.0)


@pytest.mark.parametrize(
    ("method", "setting"),
    [("dp-adamw", "learning_rate_ratio"), ("dp-sgd", "weight_decay"), ("prism", "weight_decay")],
)
def test_a_setting_that_an_optimizer_does_not_have_is_refused(method: str, setting: str) -> None:
    """Where settings are read: test_rows.py."""
    with pytest.raises(ConfigError, match=setting):
        build(find_method(method), LowRankAdapter(tiny_model(), rank=2), settings={setting: 2.0})


@pytest.mark.parametrize("name", ["ffa", "lora-fa"])
def test_the_frozen_factor_of_one_factor_rows_is_public(name: str) -> None:
    """It depends on the seed alone, so that nothing of it needs noise."""
    ends = [build(find_method(name), LowRankAdapter(tiny_model(), rank=2), seed=4)[0] for _ in range(2)]
    assert all(isinstance(end, OneFactorCoordinates) for end in ends)
    one, other = ([b for _, b in end.factors()] for end in ends)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_clipping_norm_that_adapts_goes_with_a_projection_before_the_clip_only(
    tmp_path: Path, quick_reports: None
) -> None:
    result = tune(tmp_path / "after", "projected", {**PRIVATE, "clip_quantile": 0.5})
    assert result.epsilon is not None
    with pytest.raises(ConfigError, match=r"clip_quantile.*wishart-m2"):
        tune(tmp_path / "before", "wishart-m2", {**PRIVATE, "clip_quantile": 0.5})
    assert not (tmp_path / "before").exists()


@pytest.mark.parametrize("name", ["projected", "wishart-m2"])
def test_dense_updates_are_not_averaged(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot average"):
        tune(tmp_path / "run", {"name": name, "averaging": 0.9})
    assert not (tmp_path / "run").exists()


ELSEWHERE = {
    **dict.fromkeys(("dp-bandmf", "BandMF", "dp-ftrl"), "set privacy.bands"),
    "mezo": "write dp-zo",
    "adam": "write dp-adamw",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_other_tools_are_answered(name: str) -> None:
    for call in (find_row, find_method):
        with pytest.raises(ConfigError, match=rf"^unknown method '{name}'. Fix: .*{ELSEWHERE[name]}"):
            call(name)


@pytest.mark.parametrize("name", ["mezo", "bandmf"])
def test_a_row_that_a_user_adds_has_its_own_name(
    name: str, tmp_path: Path, quick_reports: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another tool calls something else so, which is answered with what it is here."""
    row = replace(METHODS["dp-sgd"], name=name)
    monkeypatch.setitem(METHODS, name, row)
    assert find_row(name) is find_method(name) is row
    result = tune(tmp_path / "run", name)
    assert load_settings(tmp_path / "run/private/config.resolved.yaml").method.name == name
    assert result.epsilon is not None
