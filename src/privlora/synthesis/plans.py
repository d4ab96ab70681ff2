"""What rounds of votes release and cost: the plan of their ledger, alone or before private training."""

from __future__ import annotations

from typing import Any, Final

from privlora.accounting import Plan, PoissonSampling, Sampling, StepEvent, calibrate_noise_multiplier
from privlora.errors import PrivacyError
from privlora.mechanisms import VOTE_NORM

ADJACENCY: Final = "add-or-remove-one"


def plan_votes(
    rounds: int,
    *,
    target_epsilon: float,
    delta: float,
    expected_batch_size: float,
    sampling: Sampling = PoissonSampling(1.0),
    **named: Any,
) -> Plan:
    """The plan of ``rounds`` releases of votes and nothing else.

    expected_batch_size: what the sums of votes are divided by, in units; public. sampling: who votes in a round; all
    units by default. named: further fields of the ``Plan``: method, dataset, unit, records_per_user, insecure_noise.

    Raises PrivacyError for what no noise reaches, or numbers out of range.
    """
    votes = calibrate_noise_multiplier(sampling, rounds, target_epsilon, delta, adjacency=ADJACENCY)
    return _plan(
        phases=((votes.event, rounds),),
        delta=delta,
        target_epsilon=target_epsilon,
        clip_norm=VOTE_NORM,
        expected_batch_size=expected_batch_size,
        **named,
    )


def plan_votes_and_training(
    votes: StepEvent,
    rounds: int,
    training: tuple[Sampling, int],
    *,
    target_epsilon: float,
    delta: float,
    expected_batch_size: float,
    clip_norm: float,
    **named: Any,
) -> Plan:
    """The plan of ``rounds`` releases of ``votes``, then of private training with the least noise that is left to it.

    training: sampling and steps, on the same records. target_epsilon, delta: of both together. expected_batch_size,
    clip_norm: b and C of the gradients. named: as for ``plan_votes``.

    Raises PrivacyError if the votes alone cost the target, or one step of training is charged as a round of votes is:
    the ledger could not tell where training begins.
    """
    sampling, steps = training
    beside = ((votes, rounds),)
    found = calibrate_noise_multiplier(
        sampling, steps, target_epsilon, delta, adjacency=ADJACENCY, beside=beside
    )
    if found.event == votes:
        raise PrivacyError(
            "a step of training is charged as a round of votes is",
            why="both would be one phase of the ledger, and rounds of votes could go on in the steps of training",
            fix="give the votes another noise multiplier, or train on sampled batches",
        )
    return _plan(
        phases=(*beside, (found.event, steps)),
        delta=delta,
        target_epsilon=target_epsilon,
        clip_norm=clip_norm,
        expected_batch_size=expected_batch_size,
        **named,
    )


def _plan(**fields: Any) -> Plan:
    return Plan(**{"adjacency": ADJACENCY, "unit": "record", "records_per_user": None, **fields})
