"""What Flower starts on a client's side, anew for every message: the core's client, in the client's own folder."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model

from privlora.data.formats import Format
from privlora.disk import locked
from privlora.errors import ConfigError, PrivloraError, named
from privlora.federated.client import Client
from privlora.federated.flower.logs import through_flower
from privlora.federated.flower.records import NAME, message_type, packed, read_request
from privlora.federated.limits import Limits
from privlora.federated.messages import BAD_CONFIG, KINDS, NAME_PATTERN, OTHER_NAME, REFUSED, Reply

_log = logging.getLogger(__name__)

_Node = create_model(
    "_Node",
    __config__=ConfigDict(strict=True, extra="forbid"),
    name=(Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")], ...),
    folder=(str, ...),
    data=(str, ...),
    format=(Format, "auto"),
    model=(str | None, None),
    revision=(str | None, None),
    pins=(str | None, None),
    **{limit.name: (get_type_hints(Limits)[limit.name], limit.default) for limit in fields(Limits)},  # type: ignore[call-overload]
)
"""What a node config may hold. pins: a file of JSON, fingerprints by name. Others: of `Client` and `Limits`."""


def client_of(config: Mapping[str, Any]) -> Client:
    """The client of a node config. Raises ConfigError: a key is missing, unknown or wrong, or a path is relative."""

    def of(key: Any) -> str:
        return key if key in _Node.model_fields else named(str(key))

    wrong = [f"{of(key)}: not a number" for key, value in config.items() if value != value]
    try:
        node = _Node(**config)
    except ValidationError as error:
        wrong += [f"{of(one['loc'][0])}: {one['msg']}" for one in error.errors()]
    if wrong:
        raise ConfigError(
            f"the node config is wrong: {'; '.join(wrong)}",
            fix=f"keys are {', '.join(_Node.model_fields)}; name, folder and data are needed, as in --node-config "
            """'name="…" folder="/…" data="/…" model="/…"'; see docs/federated-deployment.md""",
        )
    own = dict(node)
    folder, limits = Path(own.pop("folder")), {limit.name: own.pop(limit.name) for limit in fields(Limits)}
    if not folder.is_absolute():
        raise ConfigError("folder in the node config is relative", fix="give an absolute path")
    own["pins"] = None if own["pins"] is None else _pins(Path(own["pins"]))
    return Client(folder=folder, path=own.pop("data"), limits=Limits(**limits), **own)


def _pins(path: Path) -> dict[str, str]:
    try:
        return TypeAdapter(dict[str, str]).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        what = f"pins in the node config cannot be read ({type(error).__name__})"
        why = "without them the server says who takes part in a secure sum"
        raise ConfigError(what, why=why, fix='give the path of a file {"NAME": "FINGERPRINT", …}') from None


MakeClient = Callable[[Client], Any]
"""What it gives answers requests, as the core's client does."""


def make_client_app(
    make_client: MakeClient | None = None, places: Sequence[Client] | None = None
) -> ClientApp:
    """A ClientApp that answers every kind of message.

    Whatever goes wrong, the server gets a reply that refuses in fixed words and holds no word of the error, which may
    quote records: Flower would send the server an exception's text. The client's own log has it: one line for an error
    of privlora, a traceback for any other.

    Args:
        make_client: what answers in a client's place.
        places: all clients, in a simulation, where node configs hold a number only.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        # Workers of a simulation have a log of their own.
        with through_flower() if places is None else contextlib.nullcontext():
            reply = _answer(message, context.node_config, places, make_client)
            return Message(packed(reply), reply_to=message)

    for kind in (NAME, *KINDS):
        category, action = message_type(kind).split(".")
        (app.train if category == "train" else app.query)(action)(handle)
    return app


def _answer(
    message: Message,
    config: Mapping[str, Any],
    places: Sequence[Client] | None,
    make_client: MakeClient | None,
) -> Reply:
    name, why = "", BAD_CONFIG
    try:
        if places is None:
            own = client_of(config)
        else:  # of a simulation: as new as in a process of its own
            own = replace(places[int(config["partition-id"])], workplaces={})
        name, why = own.name, REFUSED
        request = read_request(message)
        if request.kind == NAME:
            return Reply(name, NAME, 0)
        if request.client != name:
            why = OTHER_NAME
            what = f"the server calls it {named(request.client)}, and its node config says name={named(name)}"
            raise ConfigError(
                what, fix="start flower-supernode with the name that its key is registered under"
            )
        own.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Each waits for its turn: Flower starts a process a message, those of several runs at once.
        with locked(own.folder / "turn.lock", wait=True):
            reply = (own if make_client is None else make_client(own)).answer(request)
        packed(reply)  # what cannot be sent is known here, and not in Flower
        return reply
    except Exception as error:  # noqa: BLE001 - Flower would send the text of any exception to the server
        if isinstance(error, PrivloraError):
            _log.error("this client answers nothing: %s", error)
        else:
            traceback.print_exception(error, file=sys.stderr)
        return _refusal(name, message, why)


def _refusal(name: str, message: Message, why: str) -> Reply:
    _, kind = message.metadata.message_type.split(".")
    group = message.metadata.group_id
    return Reply(name, kind, int(group) if group.isdecimal() else 0, refused=why)
