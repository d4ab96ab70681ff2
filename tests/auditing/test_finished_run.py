"""Auditing finished runs: what is measured, what is written, what is refused; the command line as it is typed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import call, refuses, run_settings, save_tiny_model, write_config, write_records

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.api import train_run
from privlora.auditing.bounds import floor_of, one_run_epsilon
from privlora.auditing.finished_run import Leakage, _judge, _read_secrets, audit_finished
from privlora.auditing.page import _roc_picture, _secrets_picture, _verdict_of_secrets
from privlora.config import settings_from
from privlora.errors import ConfigError, DataError, RunError
from privlora.rounding import rounded_up


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run, a plain one that memorises, and files to audit them with."""
    folder = tmp_path_factory.mktemp("runs")
    save_tiny_model(folder / "model")
    write_records(folder / "records.jsonl", 12)
    write_records(folder / "others.jsonl", 12, first=500)
    secret = {"prefix": "case ", "secret": "3", "references": ["x", "y", "z"]}
    (folder / "secrets.jsonl").write_text(json.dumps(secret) + "\n")
    runs: dict[str, dict[str, Any]] = {
        "private": {},
        "plain": {
            "privacy": {"private": False, "noise_multiplier": None, "delta": None, "steps": 60},
            "method": {"name": "adamw", "learning_rate": 0.03},
        },
    }
    for name, groups in runs.items():
        settings = run_settings(folder / "model", folder, **{**groups, "run": {"output": str(folder / name)}})
        settings["privacy"]["public_dataset_size"] = 12
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "privlora.running.gather", None
            )  # so that it does not take the name below for its own
            patch.setattr("privlora.reporting.facts.gather", lambda *_: {})
            patch.setattr("privlora.reporting.publication.write_report", lambda folder, report: None)
            train_run(settings_from(settings, source="test"))
    return folder


def files(folder: Path) -> dict[str, str]:
    return {
        "secrets": str(folder / "secrets.jsonl"),
        "members": str(folder / "records.jsonl"),
        "non_members": str(folder / "others.jsonl"),
    }


def test_a_plain_run_gives_members_away_and_claims_nothing(finished: Path) -> None:
    found = audit_finished(finished / "plain", **files(finished))
    assert found.epsilon_claimed is None
    assert not found.violated
    assert found.membership["after"].area.value > 0.7
    assert found.leakage["before"].ceiling == 2.0
    assert found.to_dict()["membership"]["after"]["members"] == 12
    assert found.epsilon_most is None
    after = replace(found.membership["after"], epsilon_most=2.0)
    claims = replace(found, epsilon_claimed=3.0, membership={**found.membership, "after": after})
    assert claims.epsilon_most == 2.0
    assert replace(claims, epsilon_claimed=1.0).epsilon_most is None  # they could have refuted it


def test_what_is_most_is_what_all_guesses_right_show() -> None:
    spread = np.linspace(0, 1, 200)
    ideal = _judge(spread + 2, spread, 1e-5, 0.95)
    assert ideal.correct == ideal.guesses
    assert ideal.epsilon_most == ideal.epsilon_lower > 0
    chance = _judge(spread, spread + 1e-3, 1e-5, 0.95)
    assert chance.epsilon_lower < chance.epsilon_most == ideal.epsilon_most


@pytest.mark.usefixtures("drawn")
def test_a_private_run_is_within_its_claim(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--{name.replace('_', '-')}={path}" for name, path in files(finished).items()]
    outcome = call(capsys, "audit", finished / "private", *options, "--json")
    assert outcome.code == 0
    assert outcome.json["violated"] is False
    assert outcome.json["epsilon"] > 0
    page = Path(outcome.json["page"])
    assert page == finished / "private" / "private" / "audit.html"
    text = page.read_text()
    assert "PRIVATE" in text
    assert "<svg" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "came in" not in text  # no record
    # Twelve members cannot refute what is claimed, and whoever reads that they did not is told so.
    after, most = outcome.json["membership"]["after"], outcome.json["epsilon_most"]
    assert after["epsilon_lower"] <= most == after["epsilon_most"] < outcome.json["epsilon"]
    assert most == one_run_epsilon(
        after["guesses"], after["guesses"], 24, outcome.json["delta"], outcome.json["confidence"]
    )
    said = f"Even if all guesses on 24 records were right, they would show only ε ≥ {rounded_up(most)}: too few to "
    said += "refute the claim."
    assert said in text
    shown = call(capsys, "audit", finished / "private", *options)
    assert f"note:        {said}\n" in shown.out
    assert "claimed: epsilon" in shown.out
    assert "AUC" in shown.out
    assert "do not publish" in shown.out


def test_one_run_from_the_command_line(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(finished, run_settings(finished / "model", finished))
    # Overrides lie over the file.
    privacy = ["privacy.public_dataset_size=12", "privacy.noise_multiplier=0.7", "privacy.steps=10"]
    arguments = ("audit", config, *privacy, "--one-run", "--canaries=40", "--json")
    outcome = call(capsys, *arguments)
    assert outcome.code == 0
    assert outcome.json["canaries"] == 40
    assert outcome.json["output"] == f"{finished / 'run'}-audit"
    assert Path(outcome.json["page"]).exists()
    assert not (finished / "run").exists()
    assert call(capsys, *arguments).json["correct"] == outcome.json["correct"]
    lines = call(capsys, *arguments[:-1]).out.splitlines()
    (said,) = [line.removeprefix("note:").strip() for line in lines if line.startswith("note:")]
    assert said in Path(outcome.json["page"]).read_text()
    beyond = outcome.json["epsilon_lower"] > outcome.json["epsilon_most"]
    assert said.endswith("; the bound is that of the signals.") == beyond


def test_what_does_not_go_together_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = finished / "private", finished / "run.yaml"
    config.touch()
    assert "--canaries needs --one-run" in call(capsys, "audit", run, "--canaries=30").err
    assert "does not go with --one-run" in call(capsys, "audit", config, "--one-run", "--limit=3").err
    assert "nothing to audit with" in call(capsys, "audit", run).err
    assert "go together" in call(capsys, "audit", run, "--members=a.jsonl").err
    assert "add --one-run" in call(capsys, "audit", config, "--secrets=a.jsonl").err
    with pytest.raises(RunError, match="no run in"):
        audit_finished(finished / "nowhere", secrets="a.jsonl")
    with pytest.raises(ConfigError, match="nothing to audit"):
        audit_finished(run)


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path / "records.jsonl")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    ledger = tmp_path / "run-shadows" / "release" / "ledger.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.touch()
    monkeypatch.setattr("privlora.cli.auditing.loading", None)  # it would be called
    config = write_config(tmp_path, run_settings(tmp_path / "model", tmp_path))
    refuses(
        partial(call, capsys),
        tmp_path,
        ["audit", config, "--shadows=20", "data.max_length=30"],
        "holds a run already",
    )


def test_secrets_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "secrets.jsonl"
    path.write_text('{"prefix": "a ", "secret": "b", "references": ["c"]}\n')
    assert _read_secrets(str(path))[0].references == ("c",)
    for bad in ('{"prefix": "a", "secret": "b"}', '{"prefix": "a", "secret": "b", "references": "c"}'):
        path.write_text(bad + "\n")
        with pytest.raises(DataError, match="secret 1: references"):
            _read_secrets(str(path))
    path.write_text('{"prefix": "a", "references": ["hidden"]}\n')
    with pytest.raises(DataError, match="no column 'secret'") as error:
        _read_secrets(str(path))
    assert "hidden" not in str(error.value)


@pytest.mark.usefixtures("drawn")
def test_the_picture_shows_what_the_claim_allows() -> None:
    claims = ((StepEvent(PoissonSampling(0.2), 1.0), 5),)
    floor = floor_of(claims)
    most = np.array([1 - floor(1 - rate) for rate in (0.01, 0.1, 0.5, 1.0)])
    assert (np.diff(most) > 0).all()
    assert (most >= [0.01, 0.1, 0.5, 1.0]).all()
    assert most[-1] == pytest.approx(1.0)
    scores = np.random.default_rng(0).standard_normal((2, 40))
    assert "lower bound" in _roc_picture({"canaries": (scores[0] + 1, scores[1])}, claims, 2.0, 0.7)
    assert "claimed" not in _roc_picture({"before": (scores[0], scores[1])}, None, None, 0.0)


def test_records_are_told_from_others_alone(finished: Path, tmp_path: Path) -> None:
    """A file against itself, or records that are in both, would show an AUC of a half, whatever the run gives away."""
    given = files(finished)
    with pytest.raises(ConfigError, match="name the same file"):
        audit_finished(finished / "plain", **{**given, "non_members": given["members"]})
    first = Path(given["members"]).read_text().splitlines()[0]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(f"{Path(given['non_members']).read_text()}{first}\n")
    with pytest.raises(DataError, match="hold the same records"):
        audit_finished(finished / "plain", **{**given, "non_members": str(mixed)})


CHANCE = Leakage(exposure=1.0, chance=1.42, ceiling=8.0, extracted=0, secrets=8)
KNOWN = replace(CHANCE, exposure=8.0, extracted=8)


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("before", "after", "leaks"),
    [
        (CHANCE, CHANCE, False),
        (CHANCE, replace(CHANCE, exposure=2.3), False),
        (CHANCE, replace(CHANCE, exposure=2.5), True),
        (CHANCE, replace(CHANCE, extracted=1), True),
        (KNOWN, KNOWN, False),  # what the base model knew is not the adapter's
    ],
)
def test_the_verdict_on_secrets_follows_from_the_numbers(
    before: Leakage, after: Leakage, leaks: bool
) -> None:
    assert _verdict_of_secrets(before, after).startswith(
        "The adapter gives" if leaks else "This attack finds nothing"
    )
    assert f"{after.exposure:.2f} bits, {after.extracted} of 8 recited" in _secrets_picture(before, after)
