"""One federation through every engine: this process, Flower's simulation, SuperNodes with TLS and keys."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from flower_core import FOUR, difference, federate_losing, federation
from flower_deployment import HOST, PATIENCE, deployment, free_ports, make_certificates, missing, register

from privlora.accounting import read_ledger
from privlora.config import Settings
from privlora.federated.flower.app import write_app
from privlora.federated.run import federate

HERE = Path(__file__).parent
RULES = ("joint", "fedask")  # sums and gradients; factors, in two stages
NOISE = {"noise_multiplier": 0.5, "delta": 1e-5, "insecure_noise_seed": 5}
"""Noise that repeats: engines can be compared, and there are ledgers."""

GATED_SERVER = (
    "from flower_core import gated_serve\n"
    "from privlora.federated.flower.server_app import make_server_app\n"
    "app = make_server_app(gated_serve)\n"
)
"""In place of the module that write_app writes, which starts the core without gates."""

SIMULATION = """
import ray
from pathlib import Path
from flower_core import federation
from privlora.federated.flower.simulation import simulate

root = Path({root!r})
ray.init(num_cpus=1, include_dashboard=False)  # once for all
for rule in {rules!r}:
    print(simulate(federation(root, root / f"simulated-{{rule}}", rule)))
"""


@pytest.mark.long
def test_the_simulation_engine_gives_the_same_adapters(tmp_path: Path) -> None:
    """In a process of its own, because Ray leaves threads."""
    pytest.importorskip("ray")
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
    code += SIMULATION.format(root=str(tmp_path), rules=RULES)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rule in RULES:
        federate(federation(tmp_path, tmp_path / f"embedded-{rule}", rule))
        assert difference(tmp_path / f"embedded-{rule}", tmp_path / f"simulated-{rule}") < 1e-6
    assert difference(tmp_path / "embedded-joint", tmp_path / "embedded-fedask") > 1e-3


def runs_of(root: Path, place: str) -> dict[str, Settings]:
    """A round each. label: before which messages a deployed server waits."""

    def one(name: str, rule: str, label: str, **more: object) -> Settings:
        settings = federation(root, root / place / name, rule, FOUR, privacy=NOISE, rounds=1, **more)
        return settings.model_copy(update={"run": settings.run.model_copy(update={"label": label})})

    return {
        "sketches": one("sketches", "fedask", "sketch", local_steps=2),
        "sum": one("sum", "joint", "agree", survivors=3),
    }


@pytest.mark.long
def test_a_deployment_that_loses_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of client b dies: between the stages of one run, and between "train" and "agree" of another.

    Both finish without it, the second with what it had sent masked, and wait for its ledger until it is back, with a
    new key and its old folder. The operator unregisters it, so that nobody waits for answers: how long Flower waits
    depends on its clock.
    """
    if why := missing():
        pytest.skip(why)
    runs, out = runs_of(tmp_path, "deployed"), tmp_path / "deployed"
    gates = {name: out / f"gates-{name}" for name in runs}
    make_certificates(tmp_path / "certificates")
    with deployment(tmp_path, [HERE]) as deployed:
        apps = {}
        for name, settings in runs.items():
            apps[name] = write_app(
                tmp_path / "apps" / name,
                settings,
                superlink=f"{HOST}:{deployed.port}",
                root_certificates=tmp_path / "certificates/ca.crt",
                timeout=PATIENCE,
            )
            (apps[name] / "privlora_app/server_app.py").write_text(GATED_SERVER)
        app = apps["sum"]
        deployed.start_link(PRIVLORA_APPS=str(tmp_path / "apps"))
        nodes = register(deployed, app, FOUR)
        ports = dict(zip(FOUR, free_ports(len(FOUR)), strict=True))
        configs = {
            name: f'name="{name}" folder="{tmp_path / name}" data="{tmp_path / f"records/{name}.jsonl"}" '
            f'model="{runs["sum"].model.name}" must_be_private=false'
            for name in FOUR
        }
        for name in FOUR:
            deployed.start_node(name, nodes[name].key, ports[name], configs[name])
        with ThreadPoolExecutor(len(runs)) as pool:
            started = pool.map(
                lambda one: json.loads(deployed.flwr(one, "run", ".", "federation", "--format", "json")),
                apps.values(),
            )
            numbers = {name: str(told["run-id"]) for name, told in zip(apps, started, strict=True)}
        for waits in (gates["sketches"] / "sketch-waits", gates["sum"] / "agree-waits"):
            deployed.wait_for(waits.exists, "link", *FOUR)
        deployed.kill("b")
        deployed.flwr(app, "supernode", "unregister", nodes["b"].node, "federation")
        (gates["sketches"] / "sketch-goes").touch()
        (gates["sum"] / "agree-goes").touch()
        back = register(deployed, app, ["b"], suffix="-2")["b"]
        deployed.wait_for(lambda: answered(gates["sketches"], "sketch"), "link", "a", "c", "d")
        deployed.wait_for(lambda: answered(gates["sum"], "agree"), "link", "a", "c", "d")
        deployed.start_node("b", back.key, ports["b"], configs["b"])
        for name in ("sketches", "sum"):
            deployed.wait_for((gates[name] / "over").exists, "link", *FOUR)
        streamed = {
            name: deployed.flwr(apps[name], "log", numbers[name], "federation", "--show") for name in runs
        }
    for name, settings in runs.items():
        folder = Path(settings.run.output)
        for line in (f"run folder: {folder}", f"ledgers lie in {folder / 'not-private'}"):
            assert line in streamed[name]
        assert "Traceback" not in streamed[name]
    assert "round 1/1: 3 of 4 clients answered (a, c, d); dropped out: b; " in streamed["sketches"]
    assert all(process.poll() is not None for process in deployed.started.values())
    said = {name: (gates[name] / "over").read_text() for name in runs}
    assert all(text.startswith("Federated(") for text in said.values()), said

    here = runs_of(tmp_path, "embedded")
    federate_losing(here["sketches"], "b", "sketch", monkeypatch)
    monkeypatch.undo()
    federate_losing(here["sum"], "b", "agree", monkeypatch)
    for name, settings in runs.items():
        folder = Path(settings.run.output)
        assert difference(folder, tmp_path / "embedded" / name) < 1e-6
        rounds = [json.loads(line) for line in (folder / "private/rounds.jsonl").read_text().splitlines()]
        there = list(FOUR) if name == "sum" else ["a", "c", "d"]
        assert (sorted(rounds[-1]["answered"]), rounds[-1]["void"]) == (there, None)
        for client in (
            settings.federation.names if settings.federation else ()
        ):  # what b was charged for before it died stays charged
            kept = tmp_path / client / rounds[0]["run"] / "ledger.jsonl"
            given = folder / "not-private" / f"ledger-{client}.jsonl"
            assert given.read_text() == kept.read_text()
            steps = settings.federation.local_steps if settings.federation else 0
            assert read_ledger(given).charges == steps


def answered(gates: Path, kind: str) -> bool:
    rows = [json.loads(line) for line in (gates / "times.jsonl").read_text().splitlines()]
    return any(row[0] == kind for row in rows)
