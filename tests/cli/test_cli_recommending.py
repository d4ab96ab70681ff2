"""``privlora plan --sizes``: noise of sizes, exactly; losses on public records; no private record."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cli_cases import Call, check, refuses, run_settings, write_config, write_records
from promises import promise

from privlora.accounting import PoissonSampling, calibrate_noise_multiplier
from privlora.config.auto import run_sizes
from privlora.rehearsals import recommending
from privlora.rehearsals.pace import Pace
from privlora.rehearsals.recommending import Recommendation, Size, advice

PRIVACY = promise(steps=100, batch=20, records=2000, delta=1e-5, target_epsilon=3) | {
    "noise_multiplier": None
}


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Path:
    """The private records are not there."""
    return write_config(
        tmp_path, run_settings(model, tmp_path, privacy=PRIVACY, adapter={"target_modules": ["q_proj"]})
    )


def test_noise_is_that_of_the_accountant(config: Path, call: Call) -> None:
    found = call("plan", config, "--sizes", "--json").json
    sizes = found["by_passes"] + found["by_epsilon"]
    for size in (sizes[0], sizes[-1]):
        sampling = PoissonSampling(size["batch"] / 2000)
        sigma = calibrate_noise_multiplier(sampling, size["steps"], size["epsilon"], 1e-5).noise_multiplier
        assert size["noise_multiplier"] == sigma
        assert size["noise"] == pytest.approx(sigma / (size["batch"] * math.sqrt(size["steps"])))
    assert [size["epsilon"] for size in found["by_epsilon"]] == [0.5, 1, 2, 3, 6, 8]
    noises = [size["noise"] for size in found["by_epsilon"]]
    assert noises == sorted(noises, reverse=True)
    (own,) = (size for size in found["by_passes"] if size["own"])
    assert (own["steps"], own["batch"], own["divided"]) == (100, 20, False)
    divided = [size for size in found["by_passes"] if size["divided"]]
    assert [size["noise"] for size in divided] == sorted((s["noise"] for s in divided), reverse=True)
    assert all((s["steps"], s["batch"]) == run_sizes(2000, s["passes"]) for s in divided)
    assert {size["loss"] for size in sizes} == {None}


@pytest.mark.usefixtures("drawn")
def test_it_advises_larger_batches_and_writes_a_page(config: Path, call: Call, tmp_path: Path) -> None:
    outcome = call("plan", config, "--sizes", "--page", tmp_path / "page.html")
    assert outcome.code == 0, outcome.err
    assert "less noise than 100 steps of 20: larger batches, fewer steps" in outcome.out
    assert "No loss is shown: --public FILE rehearses each size" in outcome.out
    assert outcome.out.count("<- these settings") == 2
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Sizes of a private run" in page
    assert page.count("<svg") == 1
    assert "<script" not in page
    assert str(tmp_path) not in page


def test_minutes_become_passes(config: Path, call: Call) -> None:
    outcome = call("plan", config, "--sizes", "--minutes", 10, "--tokens", 9, "--json")
    found = outcome.json
    assert found["pace"]["tokens"] == 9
    (fitting,) = (
        size
        for size in found["by_passes"]
        if (size["steps"], size["batch"]) == run_sizes(2000, found["fitting"])
    )
    assert 0 < fitting["minutes"] <= found["budget"] == 10
    timed = Pace(**found["pace"])
    for size in found["by_passes"] + found["by_epsilon"]:
        assert size["minutes"] == pytest.approx(timed.minutes(size["steps"], size["batch"]))


def test_a_finished_run_stands_for_its_settings(model: Path, tmp_path: Path, call: Call) -> None:
    write_records(tmp_path / "records.jsonl")
    small = {
        "privacy": {**PRIVACY, "steps": 2, "public_dataset_size": 40, "expected_batch_size": 4, "delta": 1e-3}
    }
    config = write_config(tmp_path, run_settings(model, tmp_path, **small))
    run = tmp_path / "run"
    check(call("plan", tmp_path), "no run in")
    assert call("train", config).code == 0
    (tmp_path / "records.jsonl").unlink()
    found, own = (call("plan", *given, "--json").json for given in ([run], [config, "--sizes"]))
    assert found == own
    for more in (["--cross-check"], ["--advise"], ["privacy.steps=3"]):
        refuses(call, run, ["plan", run, *more], "does not go with the folder of a run")


@pytest.mark.parametrize(
    "given", [["--public", "p.jsonl"], ["--minutes", 1], ["--tokens", 9], ["--page", "p.html"]]
)
def test_options_of_sizes(given: list[object], config: Path, call: Call) -> None:
    refuses(call, config.parent, ["plan", config, *given], f"{given[0]} is of sizes", "add --sizes")
    refuses(call, config.parent, ["plan", config, "--sizes", "--advise"], "--advise does not go with --sizes")


@pytest.mark.parametrize(
    ("file", "more", "said"),
    [
        ("none.jsonl", [], "auto.file (on the command line): there is no file "),
        (".", [], "is not a file"),
        ("few.jsonl", [], "auto.file holds 5 different records with a token to learn, and 32 are needed"),
        ("records.jsonl", [], "which is private"),
        (
            "few.jsonl",
            ["data.label=label", "data.labels=2"],
            "method.learning_rate=auto does not go with data.label",
        ),
        ("few.jsonl", ["method.name=wishart-m2"], "cannot be auto with method 'wishart-m2'"),
        ("12", [], "auto.file holds 5 different records"),
        ("\N{GRINNING FACE}.jsonl", [], "auto.file holds 5 different records"),
    ],
)
def test_public_records_that_do_not_do(
    file: str,
    more: list[str],
    said: str,
    config: Path,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("few.jsonl", "12", "\N{GRINNING FACE}.jsonl"):
        write_records(tmp_path / name, 5)
    monkeypatch.chdir(tmp_path)
    refused = call("plan", config, "--sizes", *more, "data.format=jsonl", "--public", file)
    check(refused, said)


@pytest.mark.usefixtures("drawn")
def test_public_records_are_rehearsed(
    config: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path / "public.jsonl", 40, first=100)
    monkeypatch.setattr(recommending, "_PASSES", (0.02,))
    monkeypatch.setattr(recommending, "_EPSILONS", (1.0,))
    words = ["privacy.steps=2", "privacy.expected_batch_size=10", "auto.passes=0.02"]
    page = tmp_path / "page.html"
    given = ["--public", tmp_path / "public.jsonl", "--page", page]
    outcome = call("plan", config, "--sizes", *words, *given, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    sizes = found["by_passes"] + found["by_epsilon"]
    assert all(math.isfinite(size["loss"]) for size in sizes)
    assert (found["public"], math.isfinite(found["untrained"])) == (24, True)
    c = {round(size["learning_rate"] * math.sqrt(size["steps"]), 4) for size in sizes}
    assert max(c) == pytest.approx(min(c), rel=0.01)  # one rate, in units of the noise of a run
    assert "after a rehearsal" in page.read_text("utf-8")
    assert "<th>loss</th>" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["privacy.target_epsilon=null", "privacy.noise_multiplier=1"], "have none"),
        (["method.name=popri"], "releases preference scores"),
    ],
)
def test_refusals(words: list[str], told: str, config: Path, call: Call) -> None:
    check(call("plan", config, "--sizes", *words), told)


def test_public_records_are_looked_for_before_anything_is_loaded(
    config: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlora.cli.recommending.loading", None)  # it would be called
    argv = ["plan", config, "--sizes", "--public", folder / "public.jsonl"]
    refuses(call, folder, argv, "auto.file (on the command line): ")


def size(passes: float, noise: float, loss: float, *, own: bool = False) -> Size:
    return Size(3.0, passes, round(10 * passes), 100.0, 1.0, noise, 0.01, loss, own)


def test_no_more_passes_are_advised_where_longer_rehearsals_learn_by_heart() -> None:
    rates = {
        "rows": [{"name": "prism", "learning_rate": 0.01, "loss": 1.5, "spread": 0.02, "draws": 2}],
        "equal_from": 0.01,
        "equal_to": 0.01,
    }

    def told(*losses: float) -> str:
        sizes = [size(2**i, 0.2 / 2**i, loss, own=i == 1) for i, loss in enumerate(losses)]
        found = Recommendation(2000.0, 1e-5, sizes, sizes, 2.0, 20, rates)
        return " ".join(advice(found))

    worse = told(1.6, 1.5, 1.6, 1.7)
    assert "More passes are not advised" in worse
    assert "times the passes" not in worse
    assert "2 times the passes (40 steps of 100) take away 50% of the noise." in told(1.6, 1.5, 1.4, 1.3)
    later = told(1.6, 1.5, 1.4, 1.6)  # the next size is better yet
    assert "2 times the passes" in later
    assert "More passes than 4 made" in later
    assert "not advised" not in told(1.6, 1.5, 1.51, 1.535)  # no more than draws differ by
    assert "not advised" not in told(2.2, 2.1, 2.2, 2.3)  # worse than no training: these records say little
