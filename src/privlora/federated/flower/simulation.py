"""The same apps in Flower's simulation engine: the server in this process, the clients in Ray's workers.

Ray listens on the machine's own address, whatever it is told. Where that matters, start the program in a network
namespace that has a loopback device and nothing else (Linux; it needs no root where users may have namespaces)::

    unshare -rn sh -c 'ip link set lo up && exec "$@"' _ python simulate.py
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from privlora.config import Settings, load_settings
from privlora.errors import ConfigError, PrivloraError, RunError
from privlora.federated.client import Client
from privlora.federated.flower.client_app import make_client_app
from privlora.federated.flower.logs import without_banner
from privlora.federated.flower.server_app import Plan, Serve, make_server_app
from privlora.federated.history import RoundObserver
from privlora.federated.messages import Exchange
from privlora.federated.run import Federated, Records, prepare


def simulate(
    settings: Settings | str | Path,
    *,
    records: Records | Mapping[str, Records] | None = None,
    evaluation: Records | None = None,
    observer: RoundObserver | None = None,
    fresh: bool = True,
    timeout: float = 3600.0,
    workers: int = 1,
) -> Federated:
    """A federation in Flower's simulation engine: as `privlora.federated.run.federate`, but for who answers.

    Each client is asked in a worker of Ray, which loads the base model anew for every message that needs it, so
    model.name has to be one that workers can load. Where a client is slower than ``timeout``, its answer is lost. A
    signal ends the engine at once, and voids the round that is under way.

    Args:
        settings: of the run, or their YAML file; with clients that have paths, or with a number of clients among whom
            records are cut.
        records: in memory: of all clients together, to be cut, or each client's by its name.
        evaluation: PUBLIC records in memory, in the place of data.evaluation.
        observer: sees rounds end.
        fresh: False goes on with the run in ``run.output``.
        timeout: seconds that clients have for one answer.
        workers: processes that answer for clients, on one core each.

    Raises:
        ConfigError: flwr's extra "simulation" is not installed.
        RunError: the engine failed in an unexpected way.
        PrivloraError: whatever `federate` raises.
    """
    _refuse_without_ray()
    settings = settings if isinstance(settings, Settings) else load_settings(settings)
    here = prepare(settings, records=records, evaluation=evaluation, fresh=fresh)
    settings = here.workplace.loaded[2]
    places = [here.client(name) for name in here.records]
    done: list[Federated] = []
    failed: list[PrivloraError] = []

    def serve(_: Settings, exchange: Exchange, __: Path) -> None:
        try:
            done.append(here.serve(exchange, evaluation=evaluation, observer=observer))
        except PrivloraError as error:
            failed.append(error)
            raise

    try:
        _run_apps(Plan(settings, timeout), places, serve=serve, workers=workers)
    except RunError as stopped:
        # The engine may tell of another error than the first.
        raise (failed[0] if failed else stopped) from None
    return done[0]


def _run_apps(plan: Plan, places: Sequence[Client], *, serve: Serve | None = None, workers: int = 1) -> None:
    """Run the two apps in Flower's simulation engine until the server has finished.

    Args:
        plan: what the server is told.
        places: of the clients, one each; their folders outlive the simulation.
        serve: in place of the core's.
        workers: processes that answer for clients, on one core each.

    Raises:
        ConfigError: flwr's extra "simulation" is not installed.
        RunError: the engine or the server failed in an unexpected way; errors of privlora pass unchanged.
    """
    _refuse_without_ray()
    # Flower calls it deprecated, but has nothing else that starts apps in the caller's process.
    with _own_ray(), without_banner():
        from flwr.simulation import run_simulation

        try:
            run_simulation(
                server_app=make_server_app(serve, plan),
                client_app=make_client_app(places=places),
                num_supernodes=len(places),
                backend_config={
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                    "init_args": {"num_cpus": workers, "include_dashboard": False},
                },
            )
        except PrivloraError:
            raise
        except Exception as error:
            raise RunError(f"Flower's simulation stopped: {error}", fix="the log above says where") from error


def _refuse_without_ray() -> None:
    if find_spec("ray") is None:
        fix = "run pip install 'flwr[simulation]==1.41.*'"
        raise ConfigError("Flower's simulation engine needs ray", fix=fix)


@contextlib.contextmanager
def _own_ray() -> Iterator[None]:
    """Ray ends with the simulation, and what Flower and Ray change in the environment is put back."""
    import ray

    before, running = dict(os.environ), ray.is_initialized()
    with tempfile.TemporaryDirectory(prefix="flwr-") as home:
        os.environ["FLWR_HOME"] = home
        try:
            yield
        finally:
            if not running:
                ray.shutdown()
            os.environ.clear()
            os.environ.update(before)
