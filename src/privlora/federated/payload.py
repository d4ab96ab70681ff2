"""What leaves a client after training: a release as it is, or integers of a secure sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from privlora.accounting import Ledger
from privlora.config import FederationSettings, Settings
from privlora.federated.plans import federation_of, lattice_of
from privlora.federated.rules import Tensors
from privlora.federated.secure import FixedPoint, Layout, digest_of, encode
from privlora.mechanisms import ClippedUpdate, NoiseSource, Noising

FIXED_BITS = 64
# Of an entry of an update that clients have noised themselves.
_LIMIT = 2.0**12


def fixed_point(federation: FederationSettings) -> FixedPoint:
    """How updates that are releases already become integers."""
    return FixedPoint(FIXED_BITS, _LIMIT, federation.per_round)


def like_of(expected: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Tensors of these names and shapes, with no values of their own."""
    return {name: torch.empty(shape, device="meta") for name, shape in expected.items()}


def agreed_digest(terms: str, sent: Tensors) -> bytes:
    """32 bytes: all that a client's answer follows from beside its records. terms: `public_settings` as YAML.

    Masks depend on it. A client whose terms differ in anything, such as what sums are divided by, rounds to another
    lattice, and its noise would be too small or too large for the others'.
    """
    return digest_of(sent, {"terms": terms})


def clipped_share(answer: Tensors, settings: Settings, ledger: Ledger, noise: NoiseSource) -> np.ndarray:
    """A whole client's part of a secure sum: clipped, rounded, with its share of the noise; charged before."""
    update = ClippedUpdate(answer, settings.privacy.clip_norm)
    shapes = {name: tuple(t.shape) for name, t in answer.items()}
    lattice = lattice_of(federation_of(settings), ledger.plan, shapes)
    assert lattice is not None
    event = ledger.plan.phases[-1][0]
    return update.share(answer, Noising(ledger, noise), event, lattice)


def fixed_share(answer: Tensors, settings: Settings, weight: float) -> np.ndarray:
    """A release's part of a secure sum. Raises RunError for entries beyond the public limit."""
    weighted = {name: tensor.double() * weight for name, tensor in answer.items()}
    return encode(weighted, Layout.of(weighted), fixed_point(federation_of(settings)))
