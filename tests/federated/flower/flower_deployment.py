"""A SuperLink and SuperNodes as processes of this machine, with TLS and registered keys; none of them is left.

They are started as docs/federated-deployment.md says.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
TOOLS = ("flower-superlink", "flower-supernode", "flwr", "openssl", "ssh-keygen")
HOST = "127.0.0.1"
PATIENCE = 600.0
"""Seconds after which the test gives up; an idle machine needs a fifth."""


def missing() -> str | None:
    """Why processes cannot be deployed here; None: they can."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    try:
        free_ports(1)
    except OSError as error:
        return f"no ports on {HOST}: {error}"
    return None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def make_certificates(folder: Path) -> None:
    """An authority (ca.crt) and what it signed for this machine (server.pem, server.key)."""
    folder.mkdir()
    key = "-newkey rsa:2048 -nodes"
    for line in (
        f"req -x509 {key} -days 2 -subj /CN=authority -keyout ca.key -out ca.crt",
        f"req {key} -subj /CN={HOST} -addext subjectAltName=IP:{HOST} -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -copy_extensions copy"
        " -out server.pem",
    ):
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)


class Deployment:
    """Starts Flower's commands.

    Args:
        root: for logs and Flower's folders.
        paths: where Flower's processes find modules, before what this process has.
    """

    def __init__(self, root: Path, port: int, paths: Sequence[Path] = ()) -> None:
        self.root, self.port = root, port
        self.started: dict[str, subprocess.Popen] = {}
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
        self.environment = {
            **os.environ,
            **quiet,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)]),
        }

    def start(self, name: str, *command: str, **environment: str) -> None:
        with (self.root / f"{name}.log").open("wb") as log:
            self.started[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.environment, "FLWR_HOME": str(self.root / f"home-{name}"), **environment},
                start_new_session=True,
            )

    def flwr(self, app: Path, *arguments: str) -> str:
        """The command line, with the app's connection; its output."""
        done = subprocess.run(
            ["flwr", *arguments],
            cwd=app,
            env={**self.environment, "FLWR_HOME": str(app / "flower-home")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_link(self, **environment: str) -> None:
        certificates = self.root / "certificates"
        self.start(
            "link",
            *("flower-superlink", "--host", HOST, "--port", str(self.port)),
            *("--ssl-ca-certfile", str(certificates / "ca.crt")),
            *("--ssl-certfile", str(certificates / "server.pem")),
            *("--ssl-keyfile", str(certificates / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            **environment,
        )
        self.wait_for(lambda: socket.create_connection((HOST, self.port), timeout=1).close() or True, "link")

    def make_key(self, name: str) -> Path:
        key = self.root / f"key-{name}"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)],
            check=True,
            capture_output=True,
        )
        return key

    def start_node(self, name: str, key: Path, port: int, config: str) -> None:
        self.start(
            name,
            *("flower-supernode", "--superlink", f"{HOST}:{self.port}", "--host", HOST, "--port", str(port)),
            *("--root-certificates", str(self.root / "certificates/ca.crt")),
            *("--auth-supernode-private-key", str(key), "--node-config", config),
        )

    def wait_for(self, happened, *needed: str) -> None:  # type: ignore[no-untyped-def]
        """Until ``happened``, while the processes ``needed`` live."""
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                if happened():
                    return
            dead = [name for name in needed if self.started[name].poll() is not None]
            assert not dead, f"{dead} ended early:\n{self.log(dead[0])}"
            assert time.monotonic() < end, "\n\n".join(self.log(name) for name in self.started)
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return f"{name}:\n{(self.root / f'{name}.log').read_text(errors='replace')[-3000:]}"

    def kill(self, *names: str) -> None:
        """With all that they started, as if their machines had lost power."""
        doomed = []
        for name in names:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(self.started[name].pid)
                doomed += [parent, *parent.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for name in names:
            self.started[name].wait()
        psutil.wait_procs(doomed, timeout=30)


@contextlib.contextmanager
def deployment(root: Path, paths: Sequence[Path] = ()) -> Iterator[Deployment]:
    """Nothing that was started is left afterwards."""
    deployed = Deployment(root, free_ports(1)[0], paths)
    try:
        yield deployed
    finally:
        deployed.kill(*deployed.started)


@dataclass(frozen=True)
class Registered:
    """A SuperNode that the SuperLink knows: its private key's file, and the number that Flower gave it."""

    key: Path
    node: str


def register(
    deployed: Deployment, app: Path, names: Sequence[str], suffix: str = ""
) -> dict[str, Registered]:
    """Make keys, and register the public ones under the clients' names. suffix: of the keys' files."""

    def one(name: str) -> Registered:
        key = deployed.make_key(name + suffix)
        command = ("supernode", "register", f"{key}.pub", "federation", "--name", name, "--format", "json")
        return Registered(key, str(json.loads(deployed.flwr(app, *command))["node-id"]))

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))
