"""What distributed noise is worth, and to whom, from public numbers: the lattice of a sum, what clients that know their
own share of the noise leave of it, and how long the noise on a mean of whole clients' updates is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod, sqrt
from typing import Any, Final

from privlora.accounting import Adjacency, Plan, StepEvent, epsilon
from privlora.config import FederationSettings, Settings
from privlora.config.federation import colluding_counts, honest_left
from privlora.federated.plans import federation_of, plan_in
from privlora.mechanisms import Lattice, lattice_for
from privlora.pages.numbers import finite

ANY: Final[Mapping[str, tuple[int, ...]]] = {"sum": (1,)}
"""An answer for where the model is not at hand. What is left of the noise does not depend on its size: rounding is
calibrated away, and of the noise that covers it less than 1e-9 is."""


def lattice_of(
    federation: FederationSettings, plan: Plan | None, expected: Mapping[str, tuple[int, ...]] = ANY
) -> Lattice | None:
    """What the clients of a round round to where their noise is distributed, from public numbers; else None.

    plan: of each client's ledger. expected: names and shapes of one client's answer. Raises ConfigError where no
    lattice is fine enough.
    """
    if plan is None or not federation.distributed:
        return None
    return lattice_for(
        clip_norm=plan.clip_norm,
        noise_multiplier=plan.phases[-1][0].noise_multiplier,
        expected_batch_size=plan.expected_batch_size,
        entries=sum(prod(shape) for shape in expected.values()),
        clients=federation.per_round,
        survivors=federation.threshold,
    )


def lattices_of(
    settings: Settings, plan: Plan | None, expected: Mapping[str, tuple[int, ...]] = ANY
) -> list[Lattice]:
    """``lattice_of`` each phase of rounds; none where clients share no noise."""
    if plan is None:
        return []
    federation = federation_of(settings)
    plans = (plan_in(settings, plan, number) for number in federation.first_rounds)
    return [found for each in plans if (found := lattice_of(federation, each, expected)) is not None]


def colluding(
    federation: FederationSettings,
    lattices: Sequence[Lattice],
    plan: Plan | None,
    events: Sequence[tuple[StepEvent, int]],
) -> list[dict[str, Any]]:
    """Epsilon of the same releases for c clients and a server that work together and take off their own noise, in the
    smallest sum that they can open, for the c of `colluding_counts`.

    lattices: of each phase. events: what was, or will be, charged. Rows have ``clients``, ``noise_multiplier`` (what is
    left: sigma sqrt(`honest_left` / t)) and ``epsilon``; none where nobody knows a share, or nothing is promised.
    """
    if not lattices or plan is None or plan.insecure_noise:
        return []
    rows, n, t = [], federation.per_round, federation.threshold
    for count in colluding_counts(n, t):
        honest = honest_left(n, t, count)
        # Phases differ in what rounding adds alone; the least noise bounds all of them.
        left = min(
            replace(lattice, survivors=honest).noise_multiplier(plan.clip_norm) for lattice in lattices
        )
        weaker = tuple((replace(event, noise_multiplier=left), number) for event, number in events)
        found = epsilon_of(weaker, plan.delta, plan.adjacency)
        rows.append({"clients": count, "noise_multiplier": left, "epsilon": finite(found)})
    return rows


@lru_cache(maxsize=64)
def epsilon_of(events: tuple[tuple[StepEvent, int], ...], delta: float, adjacency: Adjacency) -> float:
    """It takes seconds, and a plan is asked for it several times."""
    return epsilon(events, delta, adjacency=adjacency)


def update_noise(federation: FederationSettings, plan: Plan | None, entries: int) -> dict[str, float] | None:
    """Of the noise on the mean of whole clients' updates; None where clients are not the unit. to_clip_norm: its length
    over C, the longest that the mean itself can be. clients_needed: in a round, for a ratio of 1 at the same sigma.

    plan: of each client's ledger, or of a trusted server's. entries: d, of one client's update. Where t < K clients'
    noise is counted on, a sum of all K has sqrt(K / t) times sigma.
    """
    if plan is None or federation.privacy_model != "client":
        return None
    shares = 1.0 if federation.trusted_server else federation.per_round / federation.threshold
    length = plan.phases[-1][0].noise_multiplier * sqrt(entries * shares)
    return {"to_clip_norm": length / federation.per_round, "clients_needed": ceil(length)}
