"""Who sees what of a federation, and who is trusted with what: words that a report's facts make, and that no report
holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from privlora.config import FederationSettings

Facts = Mapping[str, Any]  # report["federation"]

NO_COMMON_ADAPTER = (
    "rule {rule} has no common adapter: what is released is the shared right factors (lora_A) and does nothing by "
    "itself; a client's own model has √(lora_alpha / r) times the left factors that it keeps (memory.safetensors in "
    "its folder) as lora_B"
)


def noise_by(federation: FederationSettings, *, private: bool) -> str | None:
    """Who adds the noise: each client for itself, all clients in shares, or the server; None without noise."""
    if not private:
        return None
    if federation.trusted_server:
        return "server"
    return "shares" if federation.distributed else "client"


def hidden(statement: Mapping[str, Any] | None) -> str:
    """Whose presence is hidden."""
    if statement is None:
        return "nothing"
    if statement["unit"] != "client":
        return f"one {statement['unit']} of any client"
    return (
        "all records of one client, which without any sends an update of zero; that it is a client is public"
    )


def against(facts: Facts) -> str:
    """Against whom the statement holds."""
    by = facts["noise_by"]
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
        f"of {facts['threshold']} clients that work with nobody; a server that works with clients can open sums with "
        "less noise"
    )


def parties(facts: Facts) -> list[tuple[str, str, str]]:
    """Who; what it sees of a run that follows the protocol; and what the statement rests on it for."""
    return [
        ("the server", _server_sees(facts), _server_trusted(facts)),
        ("another client", _client_sees(facts), _client_trusted(facts)),
        ("whoever gets the adapter", "the adapter, and every file beside it", "nothing"),
    ]


def warnings(facts: Facts, rank: int) -> list[str]:
    """What would disappoint whoever gets the adapter, a line each. facts: ``rule``, ``clients_per_round`` and
    ``update_noise`` of them. rank: of the adapter."""
    rule, noise, found = facts["rule"], facts["update_noise"], list[str]()
    if noise is not None and noise["to_clip_norm"] >= 1:
        found.append(
            f"the noise on the mean update has the length of {noise['to_clip_norm']:.3g} clip_norms, and an update at "
            "most that of one, so it drowns what clients learned; at this noise multiplier it takes about "
            f"{noise['clients_needed']} clients in a round, or hide records instead (privacy_model: record)"
        )
    if not rule["common"]:
        found.append(NO_COMMON_ADAPTER.format(rule=rule["name"]))
    if rule["name"] == "fedask" and not rule["exact"]:
        count = facts["clients_per_round"]
        found.append(
            "sketches of r + p columns lose a part of the mean update, whose rank may be "
            f"{count * rank}; federation.oversampling={(count - 1) * rank} would keep all of it"
        )
    return found


def _server_sees(facts: Facts) -> str:
    what = {
        None: "update, as it was trained",
        "client": "update, with that client's own noise in it",
        "shares": f"clipped {'gradients' if facts['rule']['name'] == 'joint' else 'update'} with its share of the "
        "noise",
        "server": "update, clipped and without noise",
    }[facts["noise_by"]]
    if facts["secure_sums"]:
        return f"the sum, over the clients of a round, of each one's {what}; and who was asked and answered"
    return f"each client's {what}; and who was asked and answered"


def _server_trusted(facts: Facts) -> str:
    by = facts["noise_by"]
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


def _client_sees(facts: Facts) -> str:
    sees = "the adapter as the server sends it, after each round"
    return f"{sees}; and its own share of the noise" if facts["noise_by"] == "shares" else sees


def _client_trusted(facts: Facts) -> str:
    if facts["noise_by"] != "shares":
        return "nothing private; it can spoil the adapter"
    return (
        "drawing its share of the noise and keeping it to itself: what is stated counts on "
        f"{facts['threshold']} clients that do"
    )
