"""The same rounds over Flower's simulation engine, and over a SuperLink and SuperNodes with TLS and registered keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from flower_deployment import HOST, PATIENCE, deployment, free_ports, make_certificates, missing, register
from flower_stubs import expected

from privlora.federated.flower.app import write_app

HERE = Path(__file__).parent
NAMES = ("a", "b", "c")

STUB_MODULES = {
    "server_app": (
        "from flower_stubs import stub_serve\n"
        "from privlora.federated.flower.server_app import make_server_app\n"
        "app = make_server_app(stub_serve)\n"
    ),
    "client_app": (
        "from flower_stubs import StubClient\n"
        "from privlora.federated.flower.client_app import make_client_app\n"
        "app = make_client_app(StubClient)\n"
    ),
}
"""In place of those that write_app writes, which start the core."""

SIMULATION = """
from pathlib import Path
from flower_stubs import StubClient, stub_serve
from privlora.federated.flower.client_app import Place
from privlora.federated.flower.server_app import Plan
from privlora.federated.flower.simulation import simulate

root = Path({root!r})
places = [Place(name, root / name, f"data-{{name}}") for name in "abc"]
plan = Plan({{"rounds": 2, "fail": "b"}}, root / "out", 120.0, tuple("abc"))
simulate(plan, places, serve=stub_serve, make_client=StubClient)
"""


@pytest.mark.slow
def test_the_simulation_engine(tmp_path: Path) -> None:
    """In a process of its own, because Ray leaves threads; client b fails at every request."""
    pytest.importorskip("ray")
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + SIMULATION.format(root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out/result.txt").read_text() == expected(NAMES, 2, gone={(1, "train"): "b"})


@pytest.mark.slow
def test_a_deployment_that_loses_a_node(tmp_path: Path) -> None:
    """The machine of client b dies between the two stages of round 1, and the others finish.

    The operator unregisters it, so that nobody waits for it: how long Flower waits depends on its clock.
    """
    if why := missing():
        pytest.skip(why)
    output = tmp_path / "out"
    make_certificates(tmp_path / "certificates")
    with deployment(tmp_path, [HERE]) as deployed:
        app = write_app(
            tmp_path / "app",
            {"rounds": 1, "stops": [1]},
            output=output,
            clients=NAMES,
            superlink=f"{HOST}:{deployed.port}",
            root_certificates=tmp_path / "certificates/ca.crt",
            timeout=PATIENCE,
        )
        for module, source in STUB_MODULES.items():
            (app / f"privlora_app/{module}.py").write_text(source)
        deployed.start_link()
        registered = register(deployed, app, NAMES)
        for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True):
            config = f'name="{name}" folder="{tmp_path / name}" data="data-{name}"'
            deployed.start_node(name, registered[name].key, port, config)
        deployed.flwr(app, "run", ".", "federation")
        deployed.wait_for((output / "stopped").exists, "link", *NAMES)
        deployed.kill("b")
        deployed.flwr(app, "supernode", "unregister", registered["b"].node, "federation")
        (output / "go").touch()
        deployed.wait_for((output / "result.txt").exists, "link", "a", "c")
    assert (output / "result.txt").read_text() == expected(NAMES, 1, gone={(1, "sketch"): "b"})
    assert all(process.poll() is not None for process in deployed.started.values())
