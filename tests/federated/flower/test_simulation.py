"""What is around Flower's simulation engine; test_engines.py runs the engine itself."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("flwr")
import flwr.simulation
from flower_core import federation
from flower_stubs import EmbeddedGrid
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp

from privlora.errors import ConfigError, RunError
from privlora.federated.client import Client
from privlora.federated.flower import simulation
from privlora.federated.flower.server_app import Plan
from privlora.federated.flower.simulation import _run_apps, simulate


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Puts something else in place of the engine."""
    return lambda run: monkeypatch.setattr(flwr.simulation, "run_simulation", run)


def start(tmp_path: Path) -> None:
    settings = federation(tmp_path, tmp_path / "out", "tan")
    _run_apps(Plan(settings, 1.0), [Client("a", tmp_path / "a", "data")], workers=3)


def test_the_engine_is_told_how_many_and_where(engine: Callable, tmp_path: Path) -> None:
    told: dict = {}

    def run(**arguments: object) -> None:
        told.update(arguments, home=os.environ["FLWR_HOME"], there=Path(os.environ["FLWR_HOME"]).is_dir())
        os.environ["PYTHONPATH"] = "changed"  # as Flower does

    engine(run)
    before = dict(os.environ)
    start(tmp_path)
    assert dict(os.environ) == before
    assert told["num_supernodes"] == 1
    assert told["backend_config"]["init_args"]["num_cpus"] == 3
    assert told["there"]
    assert not Path(told["home"]).exists()


def test_flowers_banner_is_not_shown_and_all_else_is(
    engine: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from flwr.supercore.logger import warn_deprecated_feature

    assert "The `run_simulation` function is deprecated" in inspect.getsource(flwr.simulation.run_simulation)

    def run(**arguments: object) -> None:
        warn_deprecated_feature("The `run_simulation` function is deprecated and will be removed.")
        warn_deprecated_feature("Another one.")

    engine(run)
    start(tmp_path)
    assert "`run_simulation`" not in caplog.text
    assert "Another one." in caplog.text


def test_settings_may_be_a_file(tmp_path: Path, engine: Callable) -> None:
    settings = federation(tmp_path, tmp_path / "out", "tan")
    (tmp_path / "clinics.yaml").write_text(settings.to_yaml())

    def run(**arguments: object) -> None:
        raise ConfigError(f"far enough, with {arguments['num_supernodes']}")

    engine(run)
    with pytest.raises(ConfigError, match="far enough, with 3"):
        simulate(str(tmp_path / "clinics.yaml"))
    with pytest.raises(ConfigError):
        simulate(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(ConfigError("a setting is wrong"), ConfigError), (RuntimeError("crashed"), RunError)],
)
def test_errors_say_where_they_come_from(
    raised: Exception, kind: type[Exception], engine: Callable, tmp_path: Path
) -> None:
    """Those of privlora itself pass unchanged."""

    def run(**arguments: object) -> None:
        raise raised

    engine(run)
    before = dict(os.environ)
    with pytest.raises(kind, match=str(raised)) as caught:
        start(tmp_path)
    assert (caught.value is raised) == (kind is ConfigError)
    assert dict(os.environ) == before


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(simulation, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'flwr\[simulation\]"):
        start(tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'flwr\[simulation\]"):
        simulate(federation(tmp_path, tmp_path / "out", "tan"))
    assert not (tmp_path / "out").exists()


def test_what_went_wrong_at_the_server_comes_first(engine: Callable, tmp_path: Path) -> None:
    """The engine tells of its own crash, which follows from it."""
    settings = federation(tmp_path, tmp_path / "out", "tan")

    def run(*, server_app: ServerApp, **arguments: object) -> None:
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        try:
            server_app(EmbeddedGrid(["a", "b", "c"], lambda requests: []), context)
        except RunError as error:
            raise RuntimeError("Simulation Runtime crashed.") from error

    engine(run)
    with pytest.raises(RunError, match=r"clients that did not join: a \(no answer\), b \(no answer\), c"):
        simulate(settings)
