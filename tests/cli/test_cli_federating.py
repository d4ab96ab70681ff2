"""Federated runs from the command line: what is shown, what is left, interruptions, and the table of rules."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_cases import LOADING, Call, after, check, refuses, run_settings, write_config, write_records
from federation_cases import NAMES, federation_settings, write_clients

import privlora
from privlora.accounting import read_ledger
from privlora.federated.history import Round
from privlora.federated.progress import RoundProgress
from privlora.federated.rules import RULES, RuleSettings
from privlora.rounding import rounded_up


@pytest.fixture
def config(model: Path, folder: Path) -> Path:
    """Three clients with records of their own, and public records."""
    settings = federation_settings(
        model,
        folder,
        data={"path": None, "evaluation": str(write_records(folder / "public.jsonl", 6, first=900))},
        federation={"clients": write_clients(folder)},
    )
    return write_config(folder, settings)


def test_a_federation_from_its_yaml(config: Path, folder: Path, call: Call) -> None:
    ended = call("train", config, "--json")
    assert ended.code == 0, ended.err
    found, release = ended.json, folder / "run" / "release"
    assert found["adapter"] == str(release)
    assert set(os.listdir(release)) >= {"adapter_model.safetensors", "report.html", "ledger.jsonl"}
    assert list(found["ledgers"]) == list(NAMES)
    for path in found["ledgers"].values():
        ledger = read_ledger(path)
        assert (ledger.charges, ledger.plan.unit) == (4, "record")
        assert ledger.epsilon() == found["epsilon"]
    assert (found["rounds"], found["void_rounds"], found["rule"]) == (2, [], "tan")
    assert (found["private"], found["secure_sums"], found["threshold"]) == (True, False, None)
    assert found["event"]["sampling"]["sample_rate"] == 12 / 40
    assert found["bytes_up"] > found["bytes_down"] > 0
    shown = after(ended, LOADING)
    assert "Hidden: any one record, from the server" in shown[0]
    assert "No secure sums: the server sees each client's message" in shown[0]
    assert sum(line.startswith("round 2/2  3/3 clients") for line in shown) == 1
    assert sum(line.startswith("held-out loss after round") for line in shown) == 2
    assert found["epsilon_against_another_client"] == found["epsilon"]
    assert (found["colluding"], found["warnings"]) == ([], [])


def test_what_may_be_published_holds_no_file_names_and_no_records(
    config: Path, folder: Path, call: Call
) -> None:
    ended = call("train", config)
    release = folder / "run" / "release"
    for path in release.iterdir():
        content = path.read_bytes().replace(b'"ledger-north.jsonl"', b"")  # a client's own name
        for secret in (b"north.jsonl", b"came in with", str(folder).encode()):
            assert secret not in content, path.name
    assert "came in with" not in ended.out + ended.err
    promise = ended.out.splitlines()[-1]
    for word in ("promise:", "0.001)-DP for each client", "PLD", "hidden: any one record"):
        assert word in promise


def test_other_commands_take_what_it_leaves(config: Path, folder: Path, call: Call) -> None:
    run = call("train", config, "--json").json
    planned = call("plan", config, "--json").json
    assert planned["epsilon"] == run["epsilon"]
    assert planned["noise_multiplier"] == run["event"]["noise_multiplier"]
    assert planned["releases"] == 4
    assert planned["noise_of_a_client"] == pytest.approx(2.0 * 1.0 / (12 / 3))
    assert planned["noise_of_the_mean"] == pytest.approx(planned["noise_of_a_client"] / 3**0.5)
    for way in ("down", "up"):  # 3 clients, 2 rounds; the rest is the messages' plain values
        assert run[f"bytes_{way}"] / 6 == pytest.approx(planned["bytes"][way], rel=0.05)
    north = call("budget", run["ledgers"]["north"], "--json").json
    assert north["epsilon"] == run["epsilon"]
    report = folder / "run" / "release" / "report.html"
    report.unlink()
    assert call("report", folder / "run").code == 0
    assert report.exists()
    assert call("evaluate", folder / "run", "--data", folder / "public.jsonl").code == 0


def test_a_plan_is_a_screen_for_a_person(config: Path, call: Call) -> None:
    """As that of a run; all else with --verbose."""
    shown = call("plan", config).out
    planned = call("plan", config, "--json").json
    assert len(shown.splitlines()) == 12
    assert (
        f"promise     at most ε {rounded_up(planned['epsilon'])} (δ 0.001) per record of each client\n"
        in shown
    )
    assert "\nstatement " not in shown
    assert planned["memory"]["peak"]["step_bytes"] > 0
    assert 0.5 < planned["means"]["right_guesses"] < 1
    assert planned["refused_here"] == []
    assert "\nstatement " in call("plan", config, "--verbose").out
    joint = call("plan", config, "federation.rule=joint", "federation.local_steps=1").out
    assert "against another client, which knows its own share of the noise" in joint
    assert "A client that knows its own share of the noise is right more often." in joint
    plain = call("plan", config, "privacy.private=false", "privacy.noise_multiplier=null").out
    assert plain.startswith("promise     NOT PRIVATE: no clipping, no noise\n")


def test_joint_training(config: Path, call: Call) -> None:
    joint = ["federation.rule=joint", "federation.local_steps=1", "--json"]
    planned = call("plan", config, *joint).json
    assert planned["noise_of_the_mean"] == pytest.approx(2.0 / 12)
    assert planned["noise_of_a_client"] is None
    assert [row["clients"] for row in planned["colluding"]] == [1, 2]
    assert (
        planned["epsilon_against_another_client"] == planned["colluding"][0]["epsilon"] > planned["epsilon"]
    )
    ended = call("train", config, *joint)
    assert ended.code == 0, ended.err
    assert (ended.json["secure_sums"], ended.json["threshold"]) == (True, 3)
    assert "This holds while each sum has the noise of 3 clients" in ended.err
    assert "and no single message" in ended.err
    assert ended.json["epsilon_against_another_client"] == pytest.approx(planned["colluding"][0]["epsilon"])
    assert ended.json["colluding"][0]["epsilon"] == ended.json["epsilon_against_another_client"]
    larger = f"{rounded_up(ended.json['epsilon_against_another_client'])} against another client"
    assert larger in after(ended, LOADING)[0]
    again = call("resume", Path(ended.json["adapter"]).parent)
    assert larger in again.out.splitlines()[-1]
    assert {read_ledger(path).charges for path in ended.json["ledgers"].values()} == {2}


def test_a_trusted_server_has_the_ledger(config: Path, call: Call) -> None:
    whole = ["federation.rule=ffa", "federation.privacy_model=client", "federation.trusted_server=true"]
    ended = call("train", config, *whole, "--json")
    assert ended.code == 0, ended.err
    assert "NOT from the server" in after(ended, LOADING)[0]
    assert ended.json["unit"] == "client"
    assert ended.json["ledgers"] == {}
    assert read_ledger(ended.json["ledger"]).charges == 2
    assert ended.json["bytes_down"] is ended.json["bytes_up"] is None
    assert "clients  ETA" not in ended.err
    (warned,) = ended.json["warnings"]
    assert f"WARNING: {warned}" in ended.err
    planned = call("plan", config, *whole, "--json").json
    assert planned["warnings"] == [warned]
    assert planned["participations"] is None


@pytest.mark.parametrize(
    "privacy", [["privacy.private=false", "privacy.noise_multiplier=null"], ["privacy.insecure_noise_seed=1"]]
)
def test_what_is_not_private_says_so(privacy: list[str], config: Path, folder: Path, call: Call) -> None:
    ended = call("train", config, *privacy)
    assert ended.code == 0, ended.err
    assert "NOT PRIVATE" in after(ended, LOADING)[0]
    assert "round 2/2  3/3 clients  NOT PRIVATE" in ended.err
    assert ended.out.splitlines()[-1] == "promise:  NOT PRIVATE: nothing is promised about the records"
    assert "ε" not in ended.out + ended.err
    assert call("resume", folder / "run", "--json").json["private"] is False


def _interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    shown = RoundProgress.on_round

    def on_round(self: RoundProgress, done: Round, rounds: int) -> None:
        shown(self, done, rounds)
        if done.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(RoundProgress, "on_round", on_round)


def test_an_interrupted_federation_goes_on(
    config: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "run"
    with monkeypatch.context() as patch:
        _interrupt_at(1, patch, signal.SIGTERM)
        stopped = call("train", config, "--json")
    assert (stopped.code, stopped.out) == (128 + signal.SIGTERM, "")
    last = stopped.err.splitlines()[-1]
    assert last == f"interrupted: after round 1, which is saved. Continue with `privlora resume {run}`"
    assert not (run / "release" / "adapter_model.safetensors").exists()
    # Only what was charged and begun tells that a federation is over, never a report.
    (run / "release" / "privacy_report.json").write_text("{}")
    (run / "release" / "report.html").write_text("planted")
    check(call("train", config), "holds a run already", "continue it with `privlora resume")
    run = run.rename(folder / "moved")
    resumed = call("resume", run, "--json")
    assert resumed.code == 0, resumed.err
    assert "round 1/2" not in resumed.err
    begun = re.match(
        r"going on after round 1 of 2, epsilon so far ([\d.]+) \(δ 0.001\)$", after(resumed, LOADING)[0]
    )
    assert begun is not None, resumed.err
    assert 0 < float(begun[1]) < resumed.json["epsilon"]
    assert "round 2/2  3/3 clients" in resumed.err
    assert resumed.json["adapter"] == str(run / "release")
    assert {read_ledger(path).charges for path in resumed.json["ledgers"].values()} == {4}
    again = call("resume", run, "--json")
    assert again.json == resumed.json
    over = "this federation is over already: no round is left"
    assert again.err.startswith(over)
    assert "already" not in resumed.err
    (run / "release" / "report.html").unlink()  # as a crash leaves it
    assert call("resume", run).err.startswith(over)
    assert (run / "release" / "report.html").exists()


def test_a_round_that_died_is_void_and_said_so(
    config: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("privlora.federated.local.train_locally", die)
        stopped = call("train", config)
    assert stopped.code == 130
    assert "before it could save. Continue with `privlora resume" in stopped.err.splitlines()[-1]
    resumed = call("resume", folder / "run")
    assert resumed.code == 0, resumed.err
    assert "rounds:   1 of 2 are void: nothing moved in them" in resumed.out
    charged = read_ledger(folder / "run" / "release" / "ledger.jsonl").charges
    assert charged == 2  # the round that died had not been charged
    assert f"; over {charged} steps with poisson sampling" in resumed.out


# --- the table of rules ---


def test_the_table_of_rules(call: Call) -> None:
    found = call("methods", "--rules", "--json").json
    rows = {row["name"]: row for row in found["rules"]}
    assert list(rows) == ["joint", *RULES]
    example = SimpleNamespace(**found["example"])
    assert (example.modules, example.rows, example.columns, example.rank) == (64, 4096, 4096, 16)
    sizes = [(example.modules, example.rows, example.columns)]
    for name, rule in RULES.items():
        row = rows[name]
        wanted = rule.message_sizes(sizes, RuleSettings(rank=16), number=2, clients=example.clients)
        assert (row["floats_down"], row["floats_up"]) == wanted
        assert (row["exact"], row["two_sided"]) == (rule.exact, rule.two_sided)
        assert row["secure_sums"] == ("possible" if rule.linear else "impossible")
        assert row["method"] in row["methods"]
        assert (row["summary"], row["reference"]) == (rule.summary, rule.reference)
        assert row["stages"] == list(rule.stages)
    assert rows["joint"]["secure_sums"] == "needed"
    assert "projected" not in rows["joint"]["methods"]
    clients = {name for name, row in rows.items() if "client" in row["privacy_models"]}
    assert clients == {"fedavg", "fedprox", "ffa", "fedsvd", "rolora", "tan", "alt"}


def _value(formula: str, example: SimpleNamespace) -> int:
    """Of a formula of the table, for all modules, in the second round."""
    formula = (
        formula.removesuffix(" in round 2, more in each").removesuffix(", by turns").split(", then ")[-1]
    )
    letters = {
        "m": example.rows,
        "n": example.columns,
        "r": example.rank,
        "(r+p)": example.rank + example.oversampling,
        "K": example.clients,
        "(K−1)": example.clients - 1,
    }
    close = formula.replace("(r + p)", "(r+p)").replace("(K − 1)", "(K−1)")
    return example.modules * sum(prod(letters[x] for x in term.split()) for term in close.split(" + "))


def test_formulas_and_numbers_agree(call: Call) -> None:
    found = call("methods", "--rules", "--json").json
    example = SimpleNamespace(**found["example"])
    for row in found["rules"]:
        assert _value(row["down"], example) == row["floats_down"], row["name"]
        assert _value(row["up"], example) == row["floats_up"], row["name"]


# --- machines of their own ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--superlink", "link.example:9391"], "--superlink without --write-app"),
        (["--write-app", "app", "--root-certificates", "nowhere.crt"], "'nowhere.crt' is no file"),
        (["--write-app", "app", "model.name=/nowhere/model"], "cannot load model '/nowhere/model'"),
    ],
)
def test_options_of_an_app_that_lead_nowhere(
    options: list[str], says: str, config: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    ended = call("train", config, *options)
    assert ended.code == 2
    assert says in ended.err
    assert "Fix: " in ended.err
    assert not (folder / "app").exists()
    assert not (folder / "run").exists()


@pytest.mark.parametrize("option", [["--engine", "simulation"], ["--write-app", "app"]])
def test_options_of_a_federation_need_one(option: list[str], model: Path, folder: Path, call: Call) -> None:
    alone = write_config(folder, run_settings(model, folder))
    refuses(call, folder, ["train", alone, *option], f"{option[0]} is for a federation", "`privlora init")


def test_what_only_a_run_in_one_place_has(
    config: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses(call, folder, ["train", config, "--profile"], "--profile does not go with a federation")
    refuses(call, folder, ["methods", "prism", "--rules"], "leave out 'prism', or --rules")
    monkeypatch.setattr("privlora.training.ranks.several_processes", lambda: True)
    refuses(call, folder, ["train", config], "`privlora train of a federation` runs in one")


def test_an_audit_of_too_few_trials_or_by_nobody(config: Path, folder: Path, call: Call) -> None:
    refuses(call, folder, ["audit", config, "--trials=3"], "Invalid value for '--trials'")
    refuses(call, folder, ["audit", config, "--attacker=mallory"], "is not one of 'server', 'client'")


@pytest.mark.parametrize(
    ("changed", "says"), [(["model.name=models/nope"], "it is no local folder"), ([], "holds a run already")]
)
def test_an_audit_that_cannot_be_is_refused_before_anything_is_loaded(
    changed: list[str], says: str, config: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = folder / "run-audit" / "release"
    used.mkdir(parents=True)
    (used / "ledger.jsonl").touch()
    monkeypatch.setattr("privlora.cli.auditing.loading", None)  # it would be called
    refuses(call, folder, ["audit", config, *changed], says)


def test_an_app_says_where_its_model_will_be_sought(config: Path, folder: Path, call: Call) -> None:
    ended = call("train", config, "--write-app", folder / "app")
    assert (ended.code, "note:" in ended.err) == (0, False)
    assert '"127.0.0.1:8000"' in (folder / "app/flower-home/config.toml").read_text()
    ended = call("train", config, "--write-app", folder / "hub", "model.name=owner/model")
    assert ended.code == 0
    assert "note: model.name='owner/model' is no folder here" in ended.err


# --- without the packages ---


def test_without_a_package_only_this_command_is_missing(config: Path) -> None:
    """In a process of its own, in which the package cannot be found."""
    lines: list[list[str]] = [
        ["train", str(config)],
        ["methods", "--rules"],
        ["plan", str(config)],
        ["methods"],
        ["demo", "--federated", "--output", str(config.parent / "demo")],  # before a clinic trains alone
    ]
    code = (
        "import sys, json; sys.modules['cryptography'] = None\n"
        "import privlora; privlora.fine_tune; privlora.federate\n"
        "from privlora.cli import main\n"
        f"print(json.dumps([main(line) for line in json.loads({json.dumps(json.dumps(lines))})]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=300
    )
    codes: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    assert codes == [2, 0, 0, 0, 2], ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(said) == 2
    for line in said:
        assert "needs the package cryptography, which is not installed" in line
        assert "pip install 'privlora[federated]'" in line
    assert "Traceback" not in ended.stderr
    assert not (config.parent / "demo").exists()
    assert not (config.parent / "run").exists()
