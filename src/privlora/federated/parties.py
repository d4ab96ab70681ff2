"""Who sees what of a federation, and who is trusted with what: the privacy model in words."""

from __future__ import annotations

from dataclasses import dataclass

from privlora.config import FederationSettings, Settings
from privlora.federated.plans import federation_of


@dataclass(frozen=True)
class Party:
    """party: who. sees: of a run that follows the protocol. trusted_with: what the statement rests on it for."""

    party: str
    sees: str
    trusted_with: str


def noise_by(federation: FederationSettings, *, private: bool) -> str | None:
    """Who adds the noise: each client for itself, all clients in shares, or the server; None without noise."""
    if not private:
        return None
    if federation.trusted_server:
        return "server"
    return "shares" if federation.distributed else "client"


def unit(settings: Settings) -> str:
    """Whose presence is hidden."""
    if federation_of(settings).privacy_model == "record":
        return f"one {settings.privacy.unit} of any client"
    return (
        "all records of one client, which without any sends an update of zero; that it is a client is public"
    )


def against(federation: FederationSettings, *, private: bool) -> str:
    """Against whom the statement holds."""
    by, t = noise_by(federation, private=private), federation.threshold
    if by is None:
        return "nobody: nothing was clipped and no noise was added"
    if by == "client":
        return "everybody but the client itself: the server, all other clients together, and whoever gets the adapter"
    if by == "server":
        return (
            "whoever sees the adapter after each round, other clients too, but not against the server, which sees each "
            "client's update"
        )
    return (
        "whoever sees no more than sums over clients and what follows from them, as long as every sum holds the noise "
        f"of {t} clients that work with nobody; a server that works with clients can open sums with less noise"
    )


def parties(federation: FederationSettings, *, private: bool) -> list[Party]:
    """The server, another client, whoever gets the adapter."""
    by = noise_by(federation, private=private)
    return [
        Party("the server", _server_sees(federation, by), _server_trusted(federation, by)),
        Party("another client", _client_sees(by), _client_trusted(federation, by)),
        Party("whoever gets the adapter", "the adapter, and every file beside it", "nothing"),
    ]


def _server_sees(federation: FederationSettings, by: str | None) -> str:
    what = {
        None: "update, as it was trained",
        "client": "update, with that client's own noise in it",
        "shares": f"clipped {'gradients' if federation.joint else 'update'} with its share of the noise",
        "server": "update, clipped and without noise",
    }[by]
    if federation.secure:
        return f"the sum, over the clients of a round, of each one's {what}; and who was asked and answered"
    return f"each client's {what}; and who was asked and answered"


def _server_trusted(federation: FederationSettings, by: str | None) -> str:
    if by is None:
        return "all that clients send"
    if by == "server":
        return "each client's clipped update, and with adding the noise"
    if by == "client":
        return "nothing private; the adapter's quality rests on it"
    return (
        "handing out the clients' own keys, where clients have not pinned them: with keys of its own in the place of "
        "theirs it would open a sum in which their noise is missing"
    )


def _client_sees(by: str | None) -> str:
    sees = "the adapter as the server sends it, after each round"
    return f"{sees}; and its own share of the noise" if by == "shares" else sees


def _client_trusted(federation: FederationSettings, by: str | None) -> str:
    if by != "shares":
        return "nothing private; it can spoil the adapter"
    return (
        "drawing its share of the noise and keeping it to itself: what is stated counts on "
        f"{federation.threshold} clients that do"
    )
