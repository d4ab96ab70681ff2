"""What Flower starts on a client's side, anew for every message: the core's client, in the client's own folder."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, get_args

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from privlora.accounting.ledger_format import Unit
from privlora.data.formats import Format
from privlora.disk import lock
from privlora.errors import ConfigError, PrivloraError, named
from privlora.federated.flower.logs import through_flower
from privlora.federated.flower.records import NAME, check_name, message_type, read_request, write_reply
from privlora.federated.limits import Limits
from privlora.federated.messages import BAD_CONFIG, KINDS, OTHER_NAME, REFUSED, Reply

_log = logging.getLogger(__name__)

_NEEDED: Final = ("name", "folder", "data")
_TEXTS: Final = (*_NEEDED, "format", "model", "revision", "pins")
_LIMITS: Final = tuple(limit.name for limit in fields(Limits))


@dataclass(frozen=True)
class Place:
    """Where a client lives, and what its owner allows.

    name: public. folder: what survives between messages. data: its records' file; records: the same in memory, in a
    simulation. format: of the file; "auto" goes by its ending. model: where it has the base model, if not where the
    server's settings say; revision: of it, on the hub. pins: the fingerprint of each client that secure sums may be
    over, by name. limits: of what a server may ask for.
    """

    name: str
    folder: Path
    data: str | None = None
    records: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    format: Format = "auto"
    model: str | None = None
    revision: str | None = None
    pins: Mapping[str, str] | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_name(self.name)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Place:
        """Of the node config: texts name, folder, data, format, model, revision, pins (a file), and those of `Limits`.

        Raises:
            ConfigError: a key is missing, unknown or wrong, or a path is relative.
        """
        unknown = sorted(set(config) - {*_TEXTS, *_LIMITS})
        if unknown:
            raise ConfigError(
                f"the node config has unknown keys: {', '.join(map(named, unknown))}",
                fix=f"keys are {', '.join((*_TEXTS, *_LIMITS))}",
            )
        missing = [key for key in _NEEDED if key not in config]
        missing += [key for key in _TEXTS if key in config and not isinstance(config[key], str)]
        if missing:
            raise ConfigError(
                f"the node config lacks {', '.join(missing)}",
                fix="""start flower-supernode with --node-config 'name="…" folder="/…" data="/…" model="/…"'""",
            )
        if not Path(config["folder"]).is_absolute():
            raise ConfigError("folder in the node config is relative", fix="give an absolute path")
        if config.get("format", "auto") not in get_args(Format):
            raise ConfigError(
                f"format={named(config['format'])} in the node config is unknown",
                why="it says what one record is, and so what is protected",
                fix=f"one of {', '.join(get_args(Format))}",
            )
        pins = None if "pins" not in config else _pins(Path(config["pins"]))
        return cls(
            config["name"],
            Path(config["folder"]),
            config["data"],
            format=config.get("format", "auto"),
            model=config.get("model"),
            revision=config.get("revision"),
            pins=pins,
            limits=_limits(config),
        )


def _pins(path: Path) -> dict[str, str]:
    """A file of JSON: fingerprints by name."""
    try:
        pins = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(pins, dict) or not all(isinstance(value, str) for value in pins.values()):
            raise ValueError
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"pins in the node config cannot be read ({type(error).__name__})",
            why="without them the server says who takes part in a secure sum",
            fix='give the path of a file {"NAME": "FINGERPRINT", …}',
        ) from None
    return pins


def _limits(config: Mapping[str, Any]) -> Limits:
    given = {key: config[key] for key in _LIMITS if key in config}
    usual = Limits()
    for key, value in given.items():
        others = (int, float) if key.startswith("max_") else (type(getattr(usual, key)),)
        wanted = (str,) if key in ("unit", "user_column") else others
        if type(value) not in wanted or value != value:
            raise ConfigError(
                f"{key}={named(value)} in the node config is no limit",
                fix="see docs/federated-deployment.md for the limits and their types",
            )
    unit = given.get("unit")
    if unit is not None and unit not in get_args(Unit):
        raise ConfigError(
            f"unit={named(unit)} in the node config is unknown", fix=f"one of {', '.join(get_args(Unit))}"
        )
    return Limits(**given)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits for its turn: Flower starts a process a message, those of several runs at once."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / "turn.lock", "wb") as file:
        lock(file.fileno(), wait=True)
        yield


MakeClient = Callable[[Place], Any]
"""What it gives answers requests, as the core's client does."""


def make_client_app(
    make_client: MakeClient | None = None, places: Sequence[Place] | None = None
) -> ClientApp:
    """A ClientApp that answers every kind of message.

    Whatever goes wrong, the server gets a reply that refuses in fixed words and holds no word of the error, which may
    quote records: Flower would send the server an exception's text. The client's own log has it: one line for an error
    of privlora, a traceback for any other.

    Args:
        make_client: in place of the core's ``privlora.federated.client.Client``.
        places: of all clients, in a simulation, where node configs hold a number only.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        # Workers of a simulation have a log of their own.
        with through_flower() if places is None else contextlib.nullcontext():
            return Message(write_reply(_reply(message, context)), reply_to=message)

    def _reply(message: Message, context: Context) -> Reply:
        try:
            place = _place(context.node_config, places)
        except Exception as error:  # noqa: BLE001 - as in _answer
            _tell(error)
            return _refusal("", message, BAD_CONFIG)
        return _answer(message, place, make_client)

    for kind in (NAME, *KINDS):
        category, action = message_type(kind).split(".")
        (app.train if category == "train" else app.query)(action)(handle)
    return app


def _place(config: Mapping[str, Any], places: Sequence[Place] | None) -> Place:
    return Place.read(config) if places is None else places[int(config["partition-id"])]


def _answer(message: Message, place: Place, make_client: MakeClient | None) -> Reply:
    try:
        request = read_request(message)
        if request.kind == NAME:
            return Reply(place.name, NAME, 0)
        if request.client != place.name:
            _log.error(
                "the server calls this client %s, and its node config says name=%s: it answers nothing. Fix: start "
                "flower-supernode with the name under which its key is registered",
                named(request.client),
                named(place.name),
            )
            return _refusal(place.name, message, OTHER_NAME)
        with _alone(place.folder):
            reply = (make_client or _core)(place).answer(request)
        write_reply(reply)  # what cannot be sent is known here, and not in Flower
        return reply
    except Exception as error:  # noqa: BLE001 - Flower would send the text of any exception to the server
        _tell(error)
        return _refusal(place.name, message, REFUSED)


def _tell(error: Exception) -> None:
    """In this client's own log."""
    if isinstance(error, PrivloraError):
        _log.error("this client answers nothing: %s", error)
    else:
        traceback.print_exception(error, file=sys.stderr)


def _refusal(name: str, message: Message, why: str) -> Reply:
    _, kind = message.metadata.message_type.split(".")
    group = message.metadata.group_id
    return Reply(name, kind, int(group) if group.isdecimal() else 0, refused=why)


def _core(place: Place) -> Any:
    from privlora.federated.client import Client

    own = dict(vars(place))
    return Client(path=own.pop("data"), **own)
