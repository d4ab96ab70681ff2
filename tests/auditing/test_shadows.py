"""The judgement on shadow adapters, whole audits by them, and the command line as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import call, run_settings, save_tiny_model, write_config, write_records

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.auditing.asked import OF_SHADOWS
from privlora.auditing.bounds import Floats
from privlora.auditing.page import write_audit
from privlora.auditing.shadows import _judge_shadows, audit_shadows
from privlora.auditing.text_canaries import TEXT_CANARIES
from privlora.config import Settings, load_settings, settings_from
from privlora.demo import model_path, private_records
from privlora.errors import ConfigError

EVENT = StepEvent(PoissonSampling(1.0), 1.0)


def settings(**groups: dict[str, Any]) -> Settings:
    """A run of the embedded model on 8 records, not private unless ``groups`` say so."""
    small = {"steps": 5, "expected_batch_size": 4, "public_dataset_size": 8}
    given = {
        "model": {"name": str(model_path()), "dtype": "float32", "device": "cpu"},
        "data": {"path": "(in memory)", "max_length": 16, "unchecked": True},
        "adapter": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        "privacy": {"private": False},
        "method": {"name": "adamw", "learning_rate": 0.02},
        **groups,
    }
    return settings_from({**given, "privacy": {**small, **given["privacy"]}}, source="test")


def scores(distance: float, count: int, seed: int) -> tuple[Floats, Floats]:
    generator = np.random.default_rng(seed)
    return distance + generator.standard_normal(count), generator.standard_normal(count)


def test_the_bound_is_below_the_claim_of_a_correct_run_and_above_that_of_a_wrong_one() -> None:
    """One Gaussian release at noise multiplier 1, whose best attack has scores at distance 1; then at distance 2."""
    one = settings(
        privacy={"noise_multiplier": 1.0, "delta": 1e-5, "steps": 1, "private": True},
        method={"name": "dp-sgd"},
    )
    right = _judge_shadows(one, "codes", EVENT, *scores(1.0, 2000, 0))
    assert right.epsilon_claimed is not None
    assert 0.7 * right.epsilon_claimed < right.epsilon_lower < right.epsilon_claimed
    assert right.epsilon_lower_plain <= right.epsilon_lower
    assert not right.violated
    assert right.judged == 3200  # a fifth taught the threshold
    assert right.result.members == 2000
    wrong = _judge_shadows(one, "codes", EVENT, *scores(2.0, 400, 0))
    assert wrong.violated
    assert wrong.epsilon_lower > wrong.epsilon_claimed  # type: ignore[operator]
    nothing = _judge_shadows(one, "codes", EVENT, *scores(-1.0, 400, 0))
    assert nothing.epsilon_lower == 0
    assert not nothing.violated
    assert right.epsilon_most is wrong.epsilon_most is None  # so many could have refuted the claim


def test_few_adapters_say_what_they_could_have_shown(tmp_path: Path) -> None:
    one = settings(
        privacy={"noise_multiplier": 0.2, "delta": 1e-5, "steps": 1, "private": True},
        method={"name": "dp-sgd"},
    )
    weak = StepEvent(PoissonSampling(1.0), 0.2)
    few = _judge_shadows(one, "codes", weak, *scores(1.0, 10, 0))
    ideal = _judge_shadows(one, "codes", weak, *scores(50.0, 10, 0))
    assert few.epsilon_most == ideal.epsilon_most == ideal.epsilon_lower
    assert few.epsilon_lower <= few.epsilon_most < few.epsilon_claimed  # type: ignore[operator]
    page, series = write_audit(few, tmp_path)
    assert json.loads(series.read_text())["epsilon_most"] == few.epsilon_most
    assert (
        f"Even if all guesses on {few.judged} adapters were right, they would show only ε ≥ "
        in page.read_text()
    )


def test_plain_training_gives_its_canary_away() -> None:
    told: list[tuple[int, int]] = []
    found = audit_shadows(
        settings(),
        adapters=40,
        kind="least-likely",
        records=private_records(8, seed=1),
        seed=1,
        progress=lambda done, total: told.append((done, total)),
    )
    # 0.92 to 0.995 in a few tries: batches are drawn from the operating system.
    assert found.result.area.value > 0.75
    assert found.scores[0].mean() > found.scores[1].mean()
    assert found.epsilon_claimed is None
    assert not found.violated
    assert found.to_dict()["mechanism"] is None
    assert "members" in found.to_dict()  # how many, not their scores
    assert found.to_dict()["members"] == 20
    assert told[-1] == (200, 200)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shadows")
    save_tiny_model(folder / "model")
    write_records(folder / "records.jsonl", 12)
    written = run_settings(folder / "model", folder)
    written["privacy"]["public_dataset_size"] = 12
    written["method"] = {"name": "dp-adamw"}
    return write_config(folder, written)


@pytest.mark.usefixtures("drawn")
def test_shadows_from_the_command_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_yet = [
        "method.learning_rate=auto",
        "run.tokens_per_micro_batch=auto",
    ]  # as `privlora init` writes them
    options = ["privacy.steps=2", *open_yet, "--shadows=20", "--kind=codes", "--json"]
    outcome = call(capsys, "audit", config, *options)
    assert outcome.code == 0, outcome.err
    # One honest run in twenty is accused, so what is found is not asked for here.
    assert outcome.json["violated"] in (False, True)
    assert outcome.json["judged"] == 16
    assert outcome.json["violated"] or outcome.json["epsilon_lower"] <= outcome.json["epsilon_claimed"]
    assert outcome.json["output"] == f"{config.parent / 'run'}-shadows"
    page = Path(outcome.json["page"])
    assert page.parent.name == "private"
    assert "<svg" in page.read_text()
    assert "PRIVATE" in page.read_text()
    assert not (config.parent / "run").exists()
    assert not list((config.parent / "run-shadows").glob("release/*"))  # no adapter, no statement


def test_what_does_not_go_together_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, options in {
        "two audits": ["--one-run", "--shadows=20"],
        "--canaries does not go with --shadows": ["--shadows=20", "--canaries=9"],
        "--members does not go with --shadows": ["--shadows=20", "--members=a.jsonl"],
        "unknown canaries 'gradient'": ["--shadows=20", "--kind=gradient"],
    }.items():
        assert words in call(capsys, "audit", config, *options).err
    assert tuple(TEXT_CANARIES) == OF_SHADOWS
    chosen = load_settings(config)
    with pytest.raises(ConfigError, match="can show nothing"):
        audit_shadows(chosen, adapters=10)


@pytest.mark.parametrize("row", ["dp-zo", "projected"])
def test_rows_that_train_alone_are_refused_by_their_names(
    row: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = call(capsys, "audit", config, f"method.name={row}", "--shadows=20", "--kind=codes")
    assert outcome.code == 2
    assert f"method {row!r} trains no shadow adapters" in outcome.err
    assert "Coordinates" not in outcome.err
