"""The fields of a secure sum's messages, by phase; `secure.wire` says what they hold.

They stand by themselves so that messages can be listed where the packages of secure sums are not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np

Phase = Literal["share", "mask", "agree", "unmask"]

PHASES: Final[tuple[Phase, ...]] = ("share", "mask", "agree", "unmask")
"""In the order of a sum."""

REQUESTS: Final[Mapping[Phase, Mapping[str, type]]] = {
    "share": {
        "run": str,
        "round": int,
        "stage": str,
        "threshold": int,
        "bits": int,
        "names": str,
        "signing": bytes,
        "agreement": bytes,
    },
    "mask": {
        "length": int,
        "names": str,
        "keys": bytes,
        "seals": bytes,
        "signatures": bytes,
        "letters": bytes,
    },
    "agree": {"names": str},
    "unmask": {"names": str, "signers": str, "signatures": bytes},
}
REPLIES: Final[Mapping[Phase, Mapping[str, type]]] = {
    "share": {"key": bytes, "seal": bytes, "signature": bytes, "letters": bytes},
    "mask": {"vector": np.ndarray, "context": bytes},
    "agree": {"signature": bytes},
    "unmask": {"seeds": bytes, "keys": bytes},
}
