"""What Flower starts on a client's side, anew for every message: the core's client, in the client's own folder."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from privlora.errors import ConfigError
from privlora.federated.flower.records import NAME, check_name, message_type, read_request, write_reply
from privlora.federated.messages import KINDS, Reply, Request

REFUSED: Final = "an error on the client's machine; its own log says which"
"""All that a server learns of an error that nobody expected: what an error says may quote records."""


class Answers(Protocol):
    """The core's client."""

    def answer(self, request: Request) -> Reply:
        """To one request."""


@dataclass(frozen=True)
class Place:
    """Where a client lives. name: public. folder: what survives between messages. data: its records."""

    name: str
    folder: Path
    data: str

    def __post_init__(self) -> None:
        check_name(self.name)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Place:
        """From the node config: name, folder and data, each as text.

        Raises:
            ConfigError: one is missing, or a path is relative.
        """
        missing = [key for key in ("name", "folder", "data") if not isinstance(config.get(key), str)]
        if missing:
            raise ConfigError(
                f"the node config lacks {', '.join(missing)}",
                fix="""start flower-supernode with --node-config 'name="…" folder="/…" data="/…"'""",
            )
        if not Path(config["folder"]).is_absolute():
            raise ConfigError("folder in the node config is relative", fix="give an absolute path")
        return cls(config["name"], Path(config["folder"]), config["data"])


MakeClient = Callable[[Path, str], Answers]


def make_client_app(
    make_client: MakeClient | None = None, places: Sequence[Place] | None = None
) -> ClientApp:
    """A ClientApp that answers every kind of message.

    Whatever goes wrong, the server gets a reply that refuses and holds no word of the error: Flower would send the
    server an exception's text. The traceback goes to the client's own standard error.

    Args:
        make_client: from folder and data, in place of the core's ``privlora.federated.client.Client``.
        places: of all clients, in a simulation, where node configs hold a number only.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        place = _place(context.node_config, places)
        return Message(write_reply(_answer(message, place, make_client)), reply_to=message)

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
            return _refusal(place, message, f"this client is called {place.name}")
        reply = (make_client or _core())(place.folder, place.data).answer(request)
        write_reply(reply)  # what cannot be sent is known here, and not in Flower
        return reply
    except Exception:  # noqa: BLE001 - Flower would send the text of any exception to the server
        traceback.print_exc(file=sys.stderr)
        return _refusal(place, message, REFUSED)


def _refusal(place: Place, message: Message, why: str) -> Reply:
    _, kind = message.metadata.message_type.split(".")
    group = message.metadata.group_id
    return Reply(place.name, kind, int(group) if group.isdecimal() else 0, refused=why)


def _core() -> MakeClient:
    from privlora.federated.client import Client

    return Client
