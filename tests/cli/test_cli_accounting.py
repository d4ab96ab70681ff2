"""calibrate and budget on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_cases import call, run_settings, write_config

from privlora.accounting import PoissonSampling, Sampling, StepEvent, TruncatedPoissonSampling, epsilon
from privlora.errors import PrivacyError

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "accounting.json").read_text())["calibration"]


@pytest.mark.parametrize("name", ["m3", "m6"])
def test_calibrate_meets_the_vectors(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = [row for row in VECTORS if row["id"] == name]
    request = ["--epsilon", row["epsilon"], "--delta", row["delta"], "--steps", row["steps"]]
    found = call(capsys, "calibrate", *request, "--sample-rate", row["sample_rate"], "--json").json
    assert found["noise_multiplier"] == pytest.approx(row["sigma_pld"], rel=1e-4)
    assert found["epsilon"] <= row["epsilon"]
    assert found["delta"] == row["delta"]
    assert found["accountant"] == "pld"
    assert found["adjacency"] == "add-or-remove-one"


def test_a_sample_rate_in_two_forms(capsys: pytest.CaptureFixture[str]) -> None:
    request = ["calibrate", "--epsilon", 2, "--delta", 1e-5, "--steps", 5, "--json"]
    by_rate = call(capsys, *request, "--sample-rate", 0.0625).json
    by_sizes = call(capsys, *request, "--expected-batch-size", 64, "--public-dataset-size", 1024).json
    assert by_sizes == by_rate


def test_adjacency_reaches_the_accountant(capsys: pytest.CaptureFixture[str]) -> None:
    request = ["calibrate", "--epsilon", 2, "--delta", 1e-3, "--steps", 3, "--sample-rate", 0.1, "--json"]
    plain = call(capsys, *request).json
    replace_one = call(capsys, *request, "--adjacency", "replace-one").json
    assert replace_one["noise_multiplier"] > plain["noise_multiplier"]
    assert replace_one["adjacency"] == "replace-one"


def test_a_cap_reaches_the_accountant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sampling] = []

    def refuse(sampling: Sampling, *_: object, **__: object) -> None:
        asked.append(sampling)
        raise PrivacyError("asked")

    monkeypatch.setattr("privlora.cli.accounting.calibrate_noise_multiplier", refuse)
    sizes = ["--expected-batch-size", 4, "--dataset-size", 40, "--max-batch-size", 7]
    assert call(capsys, "calibrate", "--epsilon", 2, "--delta", 1e-3, "--steps", 3, *sizes).code == 2
    assert asked == [TruncatedPoissonSampling(0.1, 7, 40)]


def test_projections_reach_the_accountant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(*_: object, projections: object, **__: object) -> None:
        asked.append(projections)
        raise PrivacyError("asked")

    monkeypatch.setattr("privlora.cli.accounting.calibrate_noise_multiplier", refuse)
    request = ["calibrate", "--epsilon", 2, "--delta", 1e-3, "--steps", 3, "--sample-rate", 0.1]
    call(capsys, *request, "--projection", "64:2048", "--projection", "24:768")
    call(capsys, *request)
    assert asked == [((64, 2048), (24, 768)), ()]
    wrong = call(capsys, *request, "--projection", "64/2048")
    assert wrong.code == 2
    assert "RANK:WIDTH" in wrong.err
    assert len(asked) == 2


def test_calibrate_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    request = ["--epsilon", 2, "--delta", 1e-3, "--steps", 3, "--sample-rate", 0.1]
    words = call(capsys, "calibrate", *request).out
    assert words.startswith("noise_multiplier ")
    assert "adjacency add-or-remove-one, accountant pld" in words


def test_budget_composes_runs(
    finished: Path, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = run_settings(
        model, folder, privacy={"noise_multiplier": 4.0, "steps": 2}, run={"label": "cases"}
    )
    assert call(capsys, "train", write_config(folder, settings)).code == 0
    first, second = finished / "run", folder / "run" / "release" / "ledger.jsonl"
    found = call(capsys, "budget", first, second, "--json").json
    sampling = PoissonSampling(0.1)
    together = [(StepEvent(sampling, 2.0), 3), (StepEvent(sampling, 4.0), 2)]
    assert found["epsilon"] == epsilon(together, 1e-3)
    assert found["datasets"] == ["cases"]
    assert [run["steps_charged"] for run in found["runs"]] == [3, 2]
    other = call(
        capsys, "budget", first, second, "--delta", 1e-4, "--adjacency", "replace-one", "--json"
    ).json
    assert other["epsilon"] == epsilon(together, 1e-4, adjacency="replace-one")
    words = call(capsys, "budget", first, second).out
    assert "2 runs together are" in words


def test_a_release_is_as_good_as_its_run(
    finished: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = shutil.copytree(finished / "run" / "release", folder / "published")
    of_run = call(capsys, "budget", finished / "run", "--json").json
    of_release = call(capsys, "budget", published, "--json").json
    assert of_release["epsilon"] == of_run["epsilon"]


def test_budget_counts_copies_of_a_run_once(
    finished: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(finished / "run", folder / "copy"))
    alone = call(capsys, "budget", finished / "run", "--json").json
    both = call(capsys, "budget", finished / "run", copy, "--json").json
    assert both["epsilon"] == alone["epsilon"]
    (run,) = both["runs"]
    assert run["steps_charged"] == 3
    assert [ledger["path"] for ledger in run["ledgers"]] == [
        str(root / "release" / "ledger.jsonl") for root in (finished / "run", copy)
    ]
    assert "the longest counts: 3 releases" in call(capsys, "budget", finished / "run", copy).out
