"""The method popri as a run: what its adapter is, and what a crash leaves of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise
from run_cases import PUBLIC, Bench
from torch import Tensor

from privlora.accounting import read_ledger
from privlora.adapters.peft_files import read_adapter
from privlora.errors import ConfigError
from privlora.training.texts import voting
from privlora.training.texts.preferences import PreferenceTuner
from privlora.training.texts.voting import train_on_texts

ROUNDS = 2
PRIVACY = promise(steps=ROUNDS, batch=30, records=30, noise_multiplier=1.0)
SYNTHESIS = {
    "requests": 3,
    "answers": 3,
    "seeds": 4,
    "variations": 0,
    "max_new_tokens": 8,
    "dpo_learning_rate": 0.02,
    "epochs": 1,
}
REPEATED = {**PRIVACY, "insecure_noise_seed": 5}

pytestmark = pytest.mark.usefixtures("quick_reports")


class Killed(BaseException):
    """In the place of a crash of the process."""


class Tuned(list[tuple[Any, dict[str, Tensor]]]):
    """What each round was tuned on, and from where; at round ``crash`` the process dies, ``before`` or after it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.crash, self.before = 0, True
        tune = PreferenceTuner.tune

        def noted(tuner: PreferenceTuner, preferences: Any) -> None:
            self.append((preferences, tuner._state.states()["coordinates"]))
            if self.before:
                self.die()
            tune(tuner, preferences)
            self.die()

        patch.setattr(PreferenceTuner, "tune", noted)

    def die(self) -> None:
        if len(self) == self.crash:
            raise Killed


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Tuned:
    pytest.importorskip("trl", reason="without the extra preferences")
    return Tuned(monkeypatch)


def start(bench: Bench, folder: Path, privacy: Any = PRIVACY, method: Any = "popri", **synthesis: Any) -> Any:
    return bench.start(
        folder, method=method, privacy=privacy, synthesis={**SYNTHESIS, **synthesis}, evaluation=PUBLIC
    )


def update(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*/adapter_model.safetensors")
    return {name: a @ b.T for name, (a, b) in read_adapter(file.parent).items()}


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.allclose(one[name], other[name], atol=1e-7) for name in one)


def test_the_adapter_is_what_preferences_tuned_or_has_learnt_its_texts(
    bench: Bench, tmp_path: Path, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it does from the start of the run, as it would with texts of anybody else."""
    begun: list[dict[str, Tensor]] = []

    def noted(parts: Any, epochs: int) -> None:
        begun.append(parts.states()["coordinates"])
        assert len(parts.texts.texts) == SYNTHESIS["seeds"]
        train_on_texts(parts, epochs)

    monkeypatch.setattr(voting, "train_on_texts", noted)
    start(bench, tmp_path / "learnt", REPEATED)
    (first, at_first), (_, at_second) = tuned
    assert first
    assert {tuple(each) for each in first} == {("prompt", "chosen", "rejected")}
    assert all(torch.equal(begun[0][name], tensor) for name, tensor in at_first.items())
    assert differs(at_first, at_second)
    assert differs(update(tmp_path / "learnt"), {n: 0 * w for n, w in update(tmp_path / "learnt").items()})

    start(bench, tmp_path / "tuned", REPEATED, epochs=0)
    assert len(begun) == 1
    (path,) = (tmp_path / "tuned").glob("*/ledger.jsonl")
    ledger = read_ledger(path)
    assert (ledger.plan.method, ledger.charges) == ("popri", ROUNDS)
    assert differs(update(tmp_path / "tuned"), update(tmp_path / "learnt"))


@pytest.mark.parametrize("before", [True, False])
def test_a_round_whose_tuning_is_cut_off_is_tuned_again(
    before: bool, bench: Bench, tmp_path: Path, tuned: Tuned
) -> None:
    tuned.crash, tuned.before = 2, before
    with pytest.raises(Killed):
        start(bench, tmp_path / "run", epochs=0)
    tuned.crash = 0
    bench.resume(tmp_path / "run", PUBLIC)
    _, (preferences, point), (again, point_again) = tuned
    assert again == preferences
    assert all(torch.equal(point_again[name], tensor) for name, tensor in point.items())
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == ROUNDS


def test_a_crash_while_the_last_texts_are_learnt_changes_nothing(
    bench: Bench, tmp_path: Path, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(bench, tmp_path / "whole", REPEATED)

    def cut_off(parts: Any, epochs: int) -> None:
        train_on_texts(parts, epochs)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(voting, "train_on_texts", cut_off)
        with pytest.raises(Killed):
            start(bench, tmp_path / "cut", REPEATED)
    bench.resume(tmp_path / "cut", PUBLIC)
    whole, cut = update(tmp_path / "whole"), update(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert len(tuned) == 2 * ROUNDS


@pytest.mark.parametrize(
    ("method", "synthesis", "said"),
    [
        ("aug-pe", {}, "read by method popri and not by aug-pe"),
        ("popri", {"evolution": "none"}, "evolution=none keeps the first"),
        ("pe-sgd", {}, "read by method popri and not by pe-sgd"),
        (
            "popri",
            {"endpoint": "http://localhost:1/v1", "endpoint_model": "x"},
            "tunes the model that writes",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    method: str, synthesis: dict[str, Any], said: str, bench: Bench, tmp_path: Path, tuned: Tuned
) -> None:
    with pytest.raises(ConfigError, match=said):
        start(bench, tmp_path / "run", method=method, **synthesis)
    assert not (tmp_path / "run").exists()


def test_a_request_that_would_be_cut_is_refused_before_a_charge(
    bench: Bench, tmp_path: Path, tuned: Tuned
) -> None:
    with pytest.raises(ConfigError, match="a request for texts has 70 tokens"):
        start(bench, tmp_path / "run", random_prompt="a" * 70)
    assert read_ledger(tmp_path / "run/release/ledger.jsonl").charges == 0


def test_an_adapter_that_nothing_trained_is_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="epochs=0"):
        bench.start(tmp_path / "run", method="aug-pe", privacy=PRIVACY, synthesis={"epochs": 0})


def test_without_trl_nothing_begins(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlora.training.texts.preferences.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        start(bench, tmp_path / "run")
    assert not (tmp_path / "run").exists()
