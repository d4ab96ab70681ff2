"""A federation in words: who sees what, who is trusted with what, what its rounds were. Pure functions of the facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from privlora.config import FederationSettings

Facts = Mapping[str, Any]  # report["federation"]

NO_COMMON_ADAPTER = (
    "rule {rule} has no common adapter: what is released is the shared right factors (lora_A) and does nothing by "
    "itself; a client's own model is the adapter that it keeps in its own folder (RUN/private)"
)
MOST_NAMED: Final = 8
"""Clients that released nothing in a sentence; the page and the JSON have all of them."""
# By who adds the noise: each client for itself, all clients in shares, the server, or nobody.
_AGAINST: Final = {
    "client": "everybody but the client itself: the server, all other clients together, and whoever gets the adapter",
    "shares": "whoever sees no more than sums over clients and what follows from them, as long as every sum holds the "
    "noise of {threshold} clients that work with nobody; a server that works with clients can open sums with less "
    "noise",
    "server": "whoever sees the adapter after each round, other clients too, but not against the server, which sees "
    "each client's update",
    None: "nobody: nothing was clipped and no noise was added",
}
_SENT: Final = {
    "client": "update, with that client's own noise in it",
    "shares": "clipped {what} with its share of the noise",
    "server": "update, clipped and without noise",
    None: "update, as it was trained",
}
_TRUSTED: Final = {
    "client": "nothing private; the adapter's quality rests on it",
    "shares": "handing out the clients' own keys, where clients have not pinned them: with keys of its own in the "
    "place of theirs it would open a sum in which their noise is missing",
    "server": "each client's clipped update, and with adding the noise",
    None: "all that clients send",
}


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
    return _AGAINST[facts["noise_by"]].format(threshold=facts["threshold"])


def parties(facts: Facts) -> list[tuple[str, str, str]]:
    """Who; what it sees of a run that follows the protocol; and what the statement rests on it for."""
    by, client_sees = facts["noise_by"], "the adapter as the server sends it, after each round"
    sent = _SENT[by].format(what="gradients" if facts["rule"]["name"] == "joint" else "update")
    whose = "the sum, over the clients of a round, of each one's" if facts["secure_sums"] else "each client's"
    trusted = "nothing private; it can spoil the adapter"
    if by == "shares":
        client_sees += "; and its own share of the noise"
        trusted = (
            "drawing its share of the noise and keeping it to itself: what is stated counts on "
            f"{facts['threshold']} clients that do"
        )
    return [
        ("the server", f"{whose} {sent}; and who was asked and answered", _TRUSTED[by]),
        ("another client", client_sees, trusted),
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


def by_whom(facts: Facts) -> str:
    """How many clients the adapter is of, in a few words."""
    silent, size = len(never_released(facts)), len(facts["clients"])
    return f"{size - silent or 'none'} of {size} clients" if silent else f"{size} clients together"


def who_trained(facts: Facts) -> str:
    """The same in a sentence, and in another who released nothing."""
    silent = never_released(facts)
    more = f" and {len(silent) - MOST_NAMED} more" if len(silent) > MOST_NAMED else ""
    nothing = f" Nothing was released by {', '.join(silent[:MOST_NAMED])}{more}." if silent else ""
    return f"Trained by {by_whom(facts)}.{nothing}"


def never_released(facts: Facts) -> list[str]:
    """Clients of which nothing is in the adapter: not charged, or, without ledgers, never heard."""
    return [
        client["name"]
        for client in facts["clients"]
        if client["steps_charged"] == 0
        or (client["steps_charged"] is None and client["rounds_answered"] == 0)
    ]


def noise_scope(facts: Facts | None) -> str:
    """Of what the section on weights shows the noise."""
    if facts is None or (facts["noise_by"] == "shares" and facts["rule"]["name"] == "joint"):
        return "one step"
    if facts["noise_by"] == "client":
        return "one step of one client, where the federation started and before clients are averaged,"
    return "one round, at the point where the federation started,"


def size(count: float) -> str:
    """Bytes for reading, in powers of ten.

    >>> size(387_856.0)
    '388 kB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
