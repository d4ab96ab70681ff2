"""White-box audit of whole runs: can an attacker who sees every release tell whether one unit was among the records?

Each run takes its steps from the same state by ``training.step``, with the canary as a unit that is drawn at the rate
that is charged, or without it. The attacker knows the public state at each step, and with it the canary's own column,
and the records' part of every sum; so there are no records. Its statistic is the likelihood ratio of the claimed
mechanism, the optimum for a run of that kind, and its threshold is public: 0. Runs are independent, so that the bound
comes as near to the claim as their number allows, which one run with many canaries cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import StepEvent
from privlora.auditing.bounds import Errors
from privlora.auditing.canary_scores import CanaryMechanism, CanaryState
from privlora.auditing.gradient_canaries import GradientCanaries
from privlora.auditing.shadows import epsilon_of_errors
from privlora.data.examples import Examples
from privlora.errors import ConfigError
from privlora.lab.audits.one_step import Audited
from privlora.mechanisms import GaussianMechanism
from privlora.precision import own_context
from privlora.training.state import TrainState
from privlora.training.step import Step


@dataclass(frozen=True)
class RunsAudit(Audited):
    """Of a run; one draw for each release. trials: runs in each world. correct: right guesses of 2 ``trials``."""

    steps: int
    correct: int


@own_context()
def audit_runs(
    state: TrainState,
    mechanism: GaussianMechanism,
    claimed: Sequence[tuple[StepEvent, int]],
    canary: GradientCanaries,
    *,
    steps: int,
    learning_rate: float,
    delta: float = 1e-5,
    trials: int = 1000,
    confidence: float = 0.95,
) -> RunsAudit:
    """Play ``trials`` runs of ``steps`` steps with and as many without the one canary, all from the present state.

    mechanism: on ``state.coordinates``, built with ``Uncharged`` as its ledger and plain Poisson sampling in its event.
    claimed: what a run is said to cost, (event, number) of each kind. The state is left as it was.

    Raises ConfigError for fewer than 100 trials, which could not show anything, and for several canaries.
    """
    if trials < 100 or canary.count != 1:
        fix = "play at least 100 trials of one canary"
        raise ConfigError(f"trials={trials} of {canary.count} canaries give no bound", fix=fix)
    if mechanism.noising.correlated is not None:
        what = "runs that are played one after another share one source of correlated noise: they are not independent"
        raise ConfigError(what, fix="audit a mechanism with independent noise, or one run by many canaries")
    start = state.states()
    scores = np.zeros((2, trials))
    for trial in range(trials):
        for present in (0, 1):
            secret = CanaryState(0, np.array([bool(present)]), np.zeros(1))
            step = Step(
                state=state,
                mechanism=CanaryMechanism(mechanism, canary, secret),
                examples=Examples([], pad_token_id=0),
                learning_rate=learning_rate,
            )
            for _ in range(steps):
                step.take([])
            scores[present, trial] = secret.scores[0]
            state.optimizer.reset()
            state.take_states(start)
    errors = Errors(int((scores[0] > 0).sum()), trials, int((scores[1] <= 0).sum()), trials)
    return RunsAudit(
        epsilon_lower=epsilon_of_errors(mechanism.event, steps, errors, delta, confidence),
        epsilon_claimed=epsilon(list(claimed), delta),
        delta=delta,
        confidence=confidence,
        steps=steps,
        trials=trials,
        correct=errors.correct,
    )
