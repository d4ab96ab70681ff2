"""calibrate and budget on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_cases import Call, check, run_settings, write_config

from privlora.accounting import PoissonSampling, Sampling, StepEvent, TruncatedPoissonSampling, epsilon
from privlora.errors import PrivacyError

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "accounting.json").read_text())["calibration"]


@pytest.mark.parametrize("name", ["m3", "m6"])
def test_calibrate_meets_the_vectors(name: str, call: Call) -> None:
    (row,) = [row for row in VECTORS if row["id"] == name]
    request = ["--epsilon", row["epsilon"], "--delta", row["delta"], "--steps", row["steps"]]
    found = call("calibrate", *request, "--sample-rate", row["sample_rate"], "--json").json
    assert found["noise_multiplier"] == pytest.approx(row["sigma_pld"], rel=1e-4)
    assert found["epsilon"] <= row["epsilon"]
    assert found["delta"] == row["delta"]
    assert found["accountant"] == "pld"
    assert found["adjacency"] == "add-or-remove-one"


def test_a_cap_reaches_the_accountant(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sampling] = []

    def refuse(sampling: Sampling, *_: object, **__: object) -> None:
        asked.append(sampling)
        raise PrivacyError("asked")

    monkeypatch.setattr("privlora.cli.accounting.calibrate_noise_multiplier", refuse)
    sizes = ["--expected-batch-size", 4, "--dataset-size", 40, "--max-batch-size", 7]
    assert call("calibrate", "--epsilon", 2, "--delta", 1e-3, "--steps", 3, *sizes).code == 2
    assert asked == [TruncatedPoissonSampling(0.1, 7, 40)]


@pytest.mark.slow
def test_bands_cost_and_leave_what_plan_says(model: Path, tmp_path: Path, call: Call) -> None:
    target = {"target_epsilon": 3.0, "noise_multiplier": None, "steps": 8, "bands": 3}
    config = write_config(tmp_path, run_settings(model, tmp_path, privacy=target, method={"name": "dp-sgd"}))
    planned = call("plan", config, "--json").json
    request = ["--epsilon", 3, "--delta", planned["delta"], "--steps", 8]
    for size in (["--sample-rate", 0.1], ["--expected-batch-size", 4, "--public-dataset-size", 40]):
        found = call("calibrate", *request, *size, "--bands", 3, "--json").json
        for name in ("noise_multiplier", "bands", "noise_in_sums", "noise_in_sums_at_equal_epsilon"):
            assert found[name] == planned[name]
        assert found["event"]["sampling"] == {"kind": "cyclic_poisson", "sample_rate": 0.1 * 3, "classes": 3}
    cycles = StepEvent(PoissonSampling(0.1 * 3), found["noise_multiplier"])
    assert found["epsilon"] == epsilon([(cycles, 3)], planned["delta"]) <= 3
    shown = call("calibrate", *request, "--sample-rate", 0.1, "--bands", 3).out.splitlines()
    assert shown[1].startswith("bands 3: in the sums of steps ")
    assert "noise correlated in 3 bands" in shown[2]


@pytest.mark.long
def test_bands_that_auto_chooses(call: Call) -> None:
    request = ["calibrate", "--epsilon", 2, "--delta", 1e-5]
    few = ["--sample-rate", 0.6, "--steps", 3]
    alone = call(*request, *few, "--bands", "auto")
    assert alone.out.splitlines()[1] == "bands auto: 1 is best here"
    plain = call(*request, *few, "--json").json
    assert call(*request, *few, "--bands", "auto", "--json").json == {**plain, "bands_by_auto": 1}
    assert call(*request, *few, "--bands", 1, "--json").json == plain
    found = call(*request, "--sample-rate", 0.005, "--steps", 40, "--bands", "auto", "--json").json
    assert found["bands"] == found["bands_by_auto"] == found["event"]["sampling"]["classes"] > 1
    assert found["noise_in_sums_at_equal_epsilon"] < 1


def test_bands_are_of_neighbours_as_said(call: Call) -> None:
    request = ["--epsilon", 2, "--delta", 1e-3, "--steps", 4, "--sample-rate", 0.1, "--bands", 2, "--json"]
    plain = call("calibrate", *request).json
    replaced = call("calibrate", *request, "--adjacency", "replace-one").json
    assert replaced["noise_multiplier"] > plain["noise_multiplier"]
    one = [*request[:-3], "--json"]
    single, other = (
        call("calibrate", *one, "--adjacency", kind).json["noise_multiplier"]
        for kind in ("add-or-remove-one", "replace-one")
    )
    for found, sigma in ((plain, single), (replaced, other)):  # each beside one band of its own adjacency
        ratio = found["noise_multiplier"] / sigma * found["noise_in_sums"]
        assert found["noise_in_sums_at_equal_epsilon"] == pytest.approx(ratio, rel=1e-4)


def test_auto_chooses_bands_for_the_neighbours_that_are_meant(call: Call) -> None:
    words = ["--epsilon", 2, "--delta", 1e-5, "--steps", 64, "--sample-rate", 0.04, "--bands", "auto"]
    chosen = [
        call("calibrate", *words, "--adjacency", kind, "--json").json["bands_by_auto"]
        for kind in ("add-or-remove-one", "replace-one")
    ]
    assert chosen == [4, 1]


def test_all_that_is_wrong_is_told_at_once(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rules of settings; options that a calibration cannot do without are asked for one by one."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be computed")

    monkeypatch.setattr("privlora.cli.accounting.calibrate_noise_multiplier", refuse)
    check(call("calibrate", "--epsilon", 3, "--steps", 3), "Missing option '--delta'")
    wrong = ["--epsilon", -3, "--delta", 2, "--steps", 0, "--sample-rate", 1.5, "--projection", "9:4"]
    check(
        call("calibrate", *wrong, "--bands", 0, "--max-batch-size", 0),
        "target_epsilon=-3.0: ",
        "delta=2.0: ",
        "steps=0: ",
        "sample_rate=1.5: ",
        "max_batch_size=0: ",
        "--projection '9:4' is not RANK:WIDTH",
        "bands=0: ",
        "--bands does not go with --projection",
    )
    sizes = ["--expected-batch-size", 4, "--public-dataset-size", 20]
    more = ["--epsilon", 3, "--delta", 0.1, "--steps", 5]
    check(call("calibrate", *more, *sizes), "delta=0.1 is not below 1/N = 0.05")
    words = ["--epsilon", "much", "--delta", "little", "--steps", 4.5, "--sample-rate", "x"]
    check(call("calibrate", *words), "target_epsilon='much': ", "delta='little': ", "steps='4.5': ")
    request = ["--epsilon", 3, "--delta", 1e-5, "--steps", 4, "--sample-rate", 0.1]
    long = "9" * 5000  # more digits than Python reads
    check(call("calibrate", *request, "--bands", long), "bands=")
    check(call("calibrate", *request, "--projection", f"4:{long}"), "is not RANK:WIDTH")


def test_a_promise_in_shares_of_guesses(call: Call) -> None:
    request = ["calibrate", "--delta", 1e-5, "--steps", 20, "--sample-rate", 0.05]
    found = call(*request, "--right-guesses", 0.6, "--json").json
    assert 0.59 < found["means"]["right_guesses"] <= 0.6
    again = call(*request, "--epsilon", found["epsilon"], "--json").json
    assert again["noise_multiplier"] == pytest.approx(found["noise_multiplier"], rel=1e-5)
    banded = call(*request, "--found", 0.05, "--bands", 2, "--json").json
    assert 0.049 < banded["means"]["found_at_1_percent"] <= 0.05
    refused = call(*request, "--found", "Mrs Smith has HIV")
    check(refused, "target_found")
    assert "Smith" not in refused.err + refused.out
    check(call(*request), "give either --epsilon or shares", "--epsilon 3")
    check(call(*request, "--found", 0.05, "--epsilon", 3), "give either --epsilon or shares")
    check(call(*request, "--found", 0.05, "--bands", "auto"), "target_epsilon, which is missing")


@pytest.mark.parametrize(
    "option", ["--epsilon", "--delta", "--steps", "--sample-rate", "--bands", "--projection"]
)
def test_a_sentence_in_the_place_of_a_number_is_not_shown(option: str, call: Call) -> None:
    given = {"--epsilon": 3, "--delta": 1e-5, "--steps": 4, "--sample-rate": 0.1, option: "Mrs Smith has HIV"}
    refused = call("calibrate", *(word for pair in given.items() for word in pair))
    check(refused, "not shown")
    assert "Smith" not in refused.err + refused.out


def test_projections_reach_the_accountant(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(*_: object, projections: object, **__: object) -> None:
        asked.append(projections)
        raise PrivacyError("asked")

    monkeypatch.setattr("privlora.cli.accounting.calibrate_noise_multiplier", refuse)
    request = ["calibrate", "--epsilon", 2, "--delta", 1e-3, "--steps", 3, "--sample-rate", 0.1]
    call(*request, "--projection", "64:2048", "--projection", "24:768")
    call(*request)
    assert asked == [((64, 2048), (24, 768)), ()]
    wrong = call(*request, "--projection", "64/2048")
    assert wrong.code == 2
    assert "RANK:WIDTH" in wrong.err
    assert len(asked) == 2


def test_budget_composes_runs(finished: Path, model: Path, folder: Path, call: Call) -> None:
    settings = run_settings(
        model, folder, privacy={"noise_multiplier": 4.0, "steps": 2}, run={"label": "cases"}
    )
    assert call("train", write_config(folder, settings)).code == 0
    first, second = finished / "run", folder / "run" / "release" / "ledger.jsonl"
    found = call("budget", first, second, "--json").json
    sampling = PoissonSampling(0.1)
    together = [(StepEvent(sampling, 2.0), 3), (StepEvent(sampling, 4.0), 2)]
    assert found["epsilon"] == epsilon(together, 1e-3)
    assert found["datasets"] == ["cases"]
    assert [run["steps_charged"] for run in found["runs"]] == [3, 2]
    other = call("budget", first, second, "--delta", 1e-4, "--adjacency", "replace-one", "--json").json
    assert other["epsilon"] == epsilon(together, 1e-4, adjacency="replace-one")
    words = call("budget", first, second).out
    assert "2 runs together are" in words


def test_a_release_is_as_good_as_its_run(finished: Path, folder: Path, call: Call) -> None:
    published = shutil.copytree(finished / "run" / "release", folder / "published")
    of_run = call("budget", finished / "run", "--json").json
    of_release = call("budget", published, "--json").json
    assert of_release["epsilon"] == of_run["epsilon"]


def test_budget_counts_copies_of_a_run_once(finished: Path, folder: Path, call: Call) -> None:
    copy = Path(shutil.copytree(finished / "run", folder / "copy"))
    alone = call("budget", finished / "run", "--json").json
    both = call("budget", finished / "run", copy, "--json").json
    assert both["epsilon"] == alone["epsilon"]
    (run,) = both["runs"]
    assert run["steps_charged"] == 3
    assert [ledger["path"] for ledger in run["ledgers"]] == [
        str(root / "release" / "ledger.jsonl") for root in (finished / "run", copy)
    ]
    assert "the longest counts: 3 releases" in call("budget", finished / "run", copy).out
