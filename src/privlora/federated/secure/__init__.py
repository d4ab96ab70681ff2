"""Secure sums: the server learns the sum of the clients' integer vectors and nothing else of them.

``docs/secure-aggregation.md`` says against whom this holds. ``Participant`` is a client, ``Collector`` the server.
"""

import privlora.federated.secure.packages  # noqa: F401 - refuses where they are missing
from privlora.federated.messages import PHASES, Phase
from privlora.federated.secure.collector import Collector
from privlora.federated.secure.fixed import agreed_digest, decode, encode
from privlora.federated.secure.keys import Identity, PublicIdentity
from privlora.federated.secure.participant import Participant
from privlora.federated.secure.wire import Message, Terms, Turn, least_threshold

__all__ = [
    "PHASES",
    "Collector",
    "Identity",
    "Message",
    "Participant",
    "Phase",
    "PublicIdentity",
    "Terms",
    "Turn",
    "agreed_digest",
    "decode",
    "encode",
    "least_threshold",
]
