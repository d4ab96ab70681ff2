"""Shadow adapters: many runs of one configuration, half of them with one more record, told apart by its loss.

The static poison attack of Hu et al. 2026 (protocol F.1; Nasr et al. 2021) on a causal LM. Every adapter is trained on
the same records from the same public start, with Poisson batches and noise of its own, half of them with a canary as
one more privacy unit. The score of an adapter is the fall of its loss on the canary. Adapters are independent given the
records, so each is one trial, and counts of right guesses bound the epsilon of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from privlora.accounting.accountants import delta_curve, epsilon
from privlora.accounting.events import StepEvent
from privlora.auditing.asked import OF_SHADOWS, check_kind
from privlora.auditing.bounds import (
    GRID,
    Errors,
    Floats,
    accuracy_mu,
    beyond_claim,
    epsilon_at,
    gaussian_epsilon,
    judged_errors,
    largest_refuted,
    rate_at_least,
    threshold_epsilon,
    with_mu,
)
from privlora.auditing.canary_scores import Guessed
from privlora.auditing.membership import MembershipResult, judge_membership
from privlora.auditing.rerun import Rerun
from privlora.auditing.text_canaries import add_records, record_losses, room_for, text_canaries
from privlora.config import Settings
from privlora.errors import ConfigError
from privlora.methods import find_method
from privlora.precision import own_context
from privlora.randomness import private_generator
from privlora.stacked import train_adapters
from privlora.training.assembly import PublicStart
from privlora.training.inputs import load_data

_TOKENS = 32  # of a canary, at most: its loss is a mean over tokens
_PILOT = 5  # one adapter in five sets the threshold that judges the others
_FEWEST = 20
_DELTA = 1e-5  # of the bound, for a run that claims nothing


@dataclass(frozen=True, kw_only=True)
class ShadowAudit(Guessed):
    """What adapters with the canary and adapters without it gave away.

    epsilon_lower: of a run that claims nothing, if it is mu-GDP for some mu. correct of judged: right guesses by a
    threshold that other adapters taught. scores: the fall of the loss in nats per token. steps: of each adapter.
    """

    page: ClassVar[str] = "shadows"
    method: str
    kind: str
    steps: int
    judged: int
    result: MembershipResult

    @property
    def guessed(self) -> str:
        return f"{self.judged} adapters"

    def to_dict(self) -> dict[str, Any]:
        facts = super().to_dict()
        mechanism = self.events[0][0].describe() if self.events else None
        return {"mechanism": mechanism, **facts.pop("result"), **facts}


@own_context()
def audit_shadows(
    settings: Settings,
    *,
    adapters: int = 200,
    kind: str = "random-tokens",
    confidence: float = 0.95,
    temperature: float | None = None,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Sequence[Mapping[str, Any]] | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ShadowAudit:
    """Train ``adapters`` as ``settings`` say, half of them with a canary, and bound epsilon from below.

    Nothing is written and no adapter is kept. The result is a fact about private records.

    Args:
        settings: of the run under audit; private or not.
        kind: one of auditing.text_canaries.
        temperature: of ``text_canaries``.
        model, tokenizer, records: instead of those that ``settings`` name; a model needs its tokenizer.
        seed: of the canary; None: of the operating system. Batches and noise are never seeded.
        progress: called with (steps taken, steps of all adapters together) after each step.

    Raises:
        ConfigError: fewer than 20 adapters, another kind, or a setting that does not go with many adapters.
    """
    _refuse(settings, adapters, kind, temperature)
    run = Rerun.of(settings, model, tokenizer, records, usual=False)  # many take each step together
    settings, model, tokenizer = run.settings, run.model, run.tokenizer
    data = load_data(settings, tokenizer, records, model=model)
    drawn = int(private_generator().integers(2**62)) if seed is None else seed
    length = min(_TOKENS, settings.data.max_length)
    (canary,) = text_canaries(kind, 1, length, tokenizer, drawn, model=model, temperature=temperature)
    examples, units = add_records(data.examples, data.units, [canary])
    each = adapters // 2
    members = torch.ones(2 * each, len(units), dtype=torch.bool)
    members[each:, -1] = False
    total = 2 * each * settings.privacy.steps
    alone = examples[-1:]
    with room_for(kind, model, tokenizer, 1, drawn):
        trained = train_adapters(
            settings,
            model,
            examples,
            members=members,
            units=units,
            public=PublicStart(tokenizer),
            progress=None if progress is None else lambda done: progress(done, total),
        )
        scores = record_losses(model, alone) - trained.losses(alone).numpy()[:, 0]
    return _judge_shadows(settings, kind, trained.event, scores[:each], scores[each:], confidence)


def _judge_shadows(
    settings: Settings,
    kind: str,
    event: StepEvent | None,
    members: Floats,
    non_members: Floats,
    confidence: float = 0.95,
) -> ShadowAudit:
    """Guess, count and bound, from as many scores with the canary as without. event: of one step, as claimed."""
    planned, delta = settings.privacy.steps, settings.privacy.delta or _DELTA
    # The threshold is half-way between the medians of a pilot.
    pilot = max(1, len(members) // _PILOT)
    threshold = (np.median(members[:pilot]) + np.median(non_members[:pilot])) / 2
    errors = judged_errors(non_members, members, pilot, threshold=float(threshold))
    violated, claimed, most = False, None, None
    if event is None:
        lower = gaussian_epsilon(accuracy_mu(errors, confidence), delta)
    else:
        alone, steps = event.releases(planned)
        claimed = epsilon([(alone, steps)], delta)
        violated = _refuted(alone, steps, errors, confidence)
        lower = epsilon_of_errors(alone, steps, errors, delta, confidence)
        best = errors.if_none()
        if not _refuted(alone, steps, best, confidence):
            most = min(epsilon_of_errors(alone, steps, best, delta, confidence), claimed)
    return ShadowAudit(
        method=settings.method.name,
        kind=kind,
        events=None if event is None else [(event, planned)],
        steps=planned,
        epsilon_lower=lower,
        epsilon_lower_plain=threshold_epsilon(errors, delta, confidence),
        epsilon_claimed=claimed,
        epsilon_most=most,
        delta=delta,
        confidence=confidence,
        violated=violated,
        correct=errors.correct,
        judged=errors.absent + errors.present,
        result=judge_membership(members, non_members, confidence=confidence),
        scores=(members, non_members),
    )


def _refuted(event: StepEvent, steps: int, errors: Errors, confidence: float) -> bool:
    """No test has a balanced accuracy above (1 + delta(0)) / 2, where delta(0) is the curve's at epsilon 0.

    As for ``accuracy_mu``, one Clopper-Pearson bound serves both worlds.
    """
    accuracy = rate_at_least(errors.correct, errors.absent + errors.present, confidence)
    return 2 * accuracy - 1 > delta_curve([(event, steps)], [0.0], grid=GRID)[0]


def epsilon_of_errors(event: StepEvent, steps: int, errors: Errors, delta: float, confidence: float) -> float:
    """Epsilon of ``steps`` events with the least noise that so many right guesses call for, 0 if they call for none.

    Of independent trials, as many with the canary as without.
    """

    def refuted(mu: float) -> bool:
        return _refuted(with_mu(event, mu), steps, errors, confidence)

    largest = beyond_claim(event, steps, refuted)
    mu = largest_refuted(refuted, largest, tolerance=largest / 200)
    if _refuted(event, steps, errors, confidence):
        mu = max(mu, 1 / event.noise_multiplier)  # the search may be too coarse to find it
    return epsilon_at(mu, event, steps, delta)


def _refuse(settings: Settings, adapters: int, kind: str, temperature: float | None) -> None:
    coordinates = find_method(settings.method.name).coordinates  # rows of votes take no steps
    if coordinates.dense or coordinates.forward_only:
        what = f"method {settings.method.name!r} trains no shadow adapters: they are trained side by side"
        raise ConfigError(what, fix="audit another method, or this one with --one-run --kind random-tokens")
    check_kind(kind, temperature, OF_SHADOWS)
    if adapters < _FEWEST:
        raise ConfigError(f"{adapters} adapters can show nothing", fix="train 200 or more")
