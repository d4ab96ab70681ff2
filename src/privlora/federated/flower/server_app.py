"""What Flower starts on the server's side: the core's rounds over Flower's grid.

Flower gives everything that an app holds to every client. So the app names itself and holds what clients are told, and
what is the server's alone (where its model, its evaluation records and its results are) lies in a file of its machine.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from privlora.config import Settings, load_settings
from privlora.errors import ConfigError, RunError, named
from privlora.federated.flower.grid import GridExchange
from privlora.federated.flower.logs import through_flower
from privlora.federated.history import Round, RoundObserver, set_aside
from privlora.federated.messages import Exchange
from privlora.federated.plans import federation_of, public_settings, with_local_method
from privlora.federated.progress import in_bytes
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted

if TYPE_CHECKING:
    from privlora.federated.run import Federated

_log = logging.getLogger(__name__)

Serve = Callable[[Settings, Exchange, Path], object]
"""From settings, whatever carries messages, and the folder of results."""

Value = bool | int | float | str

APPS: Final = "PRIVLORA_APPS"
"""Environment variable of the SuperLink: the folder on its machine in which app folders lie."""

OWN_SETTINGS: Final = "server/settings.yaml"
"""The server's own settings, in an app's folder; Flower sends them to nobody."""

APP_NAME: Final = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Plan:
    """What the server is told. settings: of the run, whole. timeout: seconds for one answer."""

    settings: Settings
    timeout: float

    def __post_init__(self) -> None:
        federation_of(self.settings)
        if type(self.timeout) not in (int, float) or not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout={named(self.timeout)} is no time in seconds", fix="give one above 0")

    @classmethod
    def read(cls, config: Mapping[str, Value], environment: Mapping[str, str] = os.environ) -> Plan:
        """From Flower's run config (app, settings, timeout) and the app's file on this machine.

        Raises:
            ConfigError: a key is missing or wrong; clients were told other settings than the server has.
        """
        settings = _own_settings(_text(config, "app"), environment)
        if _text(config, "settings") != told_to_clients(settings).to_yaml():
            what = f"the settings in the run config do not follow from {OWN_SETTINGS}"
            raise ConfigError(what, fix="write the app anew (`privlora train CONFIG --write-app`)")
        return cls(settings, config.get("timeout"))  # type: ignore[arg-type]


def make_server_app(serve: Serve | None = None, plan: Plan | None = None) -> ServerApp:
    """A ServerApp that reads Flower's run config and runs the rounds.

    Args:
        serve: in place of `_serve_aloud`.
        plan: in place of the run config, which a simulation has not.
    """
    app = ServerApp()

    def start(grid: Grid, told: Plan) -> None:
        federation = federation_of(told.settings)
        folder = Path(told.settings.run.output)
        aside = partial(set_aside, RunFolder(folder).private) if federation.trusted_server else None
        exchange = GridExchange(grid, told.timeout, federation.names, aside=aside)
        (serve or _serve_aloud)(told.settings, exchange, folder)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        if plan is not None:  # a simulation, whose caller shows the rounds
            start(grid, plan)
            return
        with through_flower():
            told = Plan.read(context.run_config)
            settings, names = told.settings, federation_of(told.settings).names
            _log.info("run folder: %s", settings.run.output)
            _log.info("base model of the server: %s", settings.model.name)
            _log.info("clients: %s; each has %g s for an answer", ", ".join(names), told.timeout)
            _log.info(
                "next all are asked to join: each message starts a process there, which may take a minute"
            )
            start(grid, told)

    return app


class Told(RoundObserver):
    """A line a round, and one for each held-out loss."""

    def __init__(self, settings: Settings) -> None:
        self._secret = federation_of(settings).trusted_server

    def on_round(self, done: Round, rounds: int) -> None:
        """Who answered, who dropped out, and the bytes of all messages."""
        of = f"round {done.step}/{rounds}"
        if done.void is not None:
            _log.warning("%s is VOID, nothing moved: %s", of, done.void)
        elif self._secret:
            _log.info("%s: done; who was drawn is a secret", of)
        else:
            gone = sorted(set(done.asked) - set(done.answered))
            names = f" ({', '.join(sorted(done.answered))})" if done.answered else ""
            lost = f"; dropped out: {', '.join(gone)}" if gone else ""
            who = f"{len(done.answered)} of {len(done.asked)} clients answered{names}{lost}"
            _log.info("%s: %s; %s down, %s up", of, who, in_bytes(done.down), in_bytes(done.up))

    def on_evaluation(self, step: int, loss: float) -> None:
        """The loss on public records."""
        _log.info("held-out loss after round %d: %.4f nats per token (mean over records)", step, loss)


def _serve_aloud(settings: Settings, exchange: Exchange, folder: Path) -> Federated:
    """The core's rounds, with lines for the operator. Raises PrivloraError, also where a signal ends it."""
    from transformers.utils.logging import disable_progress_bar

    from privlora.federated.run import serve_run  # which a client's process has no use for

    disable_progress_bar()  # of a log it would be a line
    try:
        done = serve_run(settings, exchange, folder, observer=Told(settings))
    except Interrupted as stop:
        what = f"the server was stopped after round {stop.step}, which is saved"
        raise RunError(what, fix="start it again with `flwr run`; it goes on where it was") from None
    spent = None if done.epsilon is None else rounded_up(done.epsilon)
    promise = "NOT PRIVATE" if spent is None else f"at most ε {spent} (δ {done.delta:g})"
    _log.info("the run is over: adapter, report and ledgers lie in %s; %s", done.release, promise)
    return done


def told_to_clients(settings: Settings) -> Settings:
    """What an app may hold: nothing of the server's machine. Raises ConfigError for settings of no federation."""
    return public_settings(with_local_method(settings.located()))


def _own_settings(app: str, environment: Mapping[str, str]) -> Settings:
    if not APP_NAME.fullmatch(app):
        raise ConfigError(f"app={named(app)} cannot name an app", fix="write the app anew")
    apps = environment.get(APPS)
    if not apps:
        fix = f"start flower-superlink with {APPS}=/THE/FOLDER/ABOVE/THE/APP"
        raise ConfigError(f"the server does not know where its apps lie: {APPS} is not set", fix=fix)
    path = Path(apps) / app / OWN_SETTINGS
    if not path.is_file():
        fix = f"put the app's folder into the one that {APPS} names"
        raise ConfigError(f"app {app!r} has no {OWN_SETTINGS} on the server's machine", fix=fix)
    settings = load_settings(path)
    if not Path(settings.run.output).is_absolute():
        what = f"run.output={settings.run.output!r} is relative, and Flower runs apps in a folder of its own"
        raise ConfigError(what, fix="give an absolute path")
    return settings


def _text(config: Mapping[str, Value], key: str) -> str:
    value = config.get(key)
    if not isinstance(value, str):
        fix = f"set {key} under [tool.flwr.app.config] or --run-config"
        raise ConfigError(f"the run config has no text {key!r}", fix=fix)
    return value
