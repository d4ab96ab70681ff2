"""What Flower starts on the server's side: the core's rounds over Flower's grid."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from privlora.errors import ConfigError, named
from privlora.federated.flower.grid import GridExchange
from privlora.federated.messages import Exchange

Serve = Callable[[Mapping[str, Any], Exchange, Path], object]
"""From settings, whatever carries messages, and the folder of results."""

Value = bool | int | float | str


@dataclass(frozen=True)
class Plan:
    """What the server is told. settings: of the core. timeout: seconds for one answer. clients: None: whoever comes."""

    settings: Mapping[str, Any]
    folder: Path
    timeout: float
    clients: tuple[str, ...] | None

    @classmethod
    def read(cls, config: Mapping[str, Value]) -> Plan:
        """From Flower's run config: settings (JSON or YAML), output, timeout, clients (names between commas).

        Raises:
            ConfigError: a key is missing or wrong.
        """
        folder = Path(_text(config, "output"))
        if not folder.is_absolute():
            raise ConfigError(
                f"output={str(folder)!r} is relative, and Flower runs apps in a folder of its own",
                fix="give an absolute path",
            )
        timeout = config.get("timeout")
        if isinstance(timeout, bool | str) or timeout is None or not 0 < timeout < float("inf"):
            raise ConfigError(f"timeout={named(timeout)} is no number of seconds", fix="give one above 0")
        names = [name.strip() for name in _text(config, "clients").split(",") if name.strip()]
        return cls(_settings(_text(config, "settings")), folder, float(timeout), tuple(names) or None)


def make_server_app(serve: Serve | None = None, plan: Plan | None = None) -> ServerApp:
    """A ServerApp that reads Flower's run config and runs the rounds.

    Args:
        serve: in place of the core's ``privlora.federated.rounds.serve``.
        plan: in place of the run config, which a simulation has not.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        told = plan or Plan.read(context.run_config)
        (serve or _core())(told.settings, GridExchange(grid, told.timeout, told.clients), told.folder)

    return app


def _core() -> Serve:
    from privlora.federated.rounds import serve

    return serve


def _text(config: Mapping[str, Value], key: str) -> str:
    value = config.get(key)
    if not isinstance(value, str):
        raise ConfigError(
            f"the run config has no text {key!r}",
            fix=f"set {key} under [tool.flwr.app.config] or --run-config",
        )
    return value


def _settings(text: str) -> dict[str, Any]:
    """JSON first: YAML 1.1 takes JSON's 1e-05 for a word."""
    try:
        settings = json.loads(text)
    except ValueError:
        settings = _yaml(text)
    if not isinstance(settings, dict):
        raise ConfigError("settings in the run config name no settings", fix="write the app anew")
    return settings


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(
            "settings in the run config are neither JSON nor YAML", fix="write the app anew"
        ) from None
