"""Audit of a whole training run by canaries of one and the same run: white box, in gradient space.

Half of the canaries, by a coin each, are in the training. A canary that is in is a privacy unit of its own: Poisson
sampling draws it into each step with the probability of any other unit, and it is clipped like one. The attacker sees
all releases and states and knows the records' part of each sum, as the guarantee allows, and scores a canary by the
likelihood ratio that is optimal for the claimed mechanism: with x_t = <release_t - records' part, canary's
contribution> b / C^2 and s_t = ||contribution||^2 / C^2,

    score = sum_t ln(1 - q + q exp((2 x_t - s_t) / (2 sigma^2))).

Where noise is correlated between steps it is made white first, and the sum is over cycles of steps (`canary_signals`).
Then "in" is guessed for the highest scores, "out" for the lowest, and nothing in between. How many are guessed depends
on public numbers alone. Beside the guesses stand the signals of all canaries together (``canary_signals``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from privlora.accounting.accountants import Events, epsilon, typical_energy
from privlora.accounting.events import (
    BallsInBinsSampling,
    CyclicPoissonSampling,
    StepEvent,
    TruncatedPoissonSampling,
)
from privlora.auditing.bounds import (
    Floats,
    beyond_claim,
    epsilon_at,
    floor_of,
    largest_refuted,
    one_run_epsilon,
    one_run_refutes,
    with_mu,
)
from privlora.auditing.canary_signals import Cycles, Signals, Whitening, added_by, claimed, log_ratio, times
from privlora.auditing.gradient_canaries import GradientCanaries, alignments
from privlora.auditing.membership import area_under_curve
from privlora.coordinates import Vector, add_vectors
from privlora.data.sampling import CyclicPoissonSampler, PoissonSampler, classes_of
from privlora.errors import ConfigError, RunError
from privlora.mechanisms import GaussianMechanism, Instrument, PrivateSum, Release
from privlora.randomness import private_generator
from privlora.training.files import write_atomically

_CHUNK = 16  # canaries that join a sum at a time
_SIGNALS_SHARE = 0.8  # of the error probability, for the signals where there are any; the rest is for guesses
_PLANNED_SHARE = 0.8  # of what is left for guesses, for those that suit a correct run
_FRACTIONS = (0.2, 0.02, 0.05, 0.1, 0.15, 0.3, 0.5)  # of the canaries, to be guessed; the first if none helps


@dataclass
class CanaryState:
    """What the attacker's side of a run has to remember. PRIVATE: ``included`` is what the attacker must not know.

    seed: of the canaries' directions or texts. included: (canaries,) bool. scores: (canaries,) float64. releases: how
    many were scored. signals: of canaries in gradient space, which those of texts leave empty; None of a single canary.
    """

    seed: int
    included: NDArray[np.bool_]
    scores: NDArray[np.float64]
    releases: int = 0
    signals: Signals | None = None

    @classmethod
    def draw(cls, canaries: int) -> CanaryState:
        """Fair coins and a seed of the operating system."""
        generator = private_generator()
        chosen = generator.random(canaries) < 0.5
        return cls(int(generator.integers(2**62)), chosen, np.zeros(canaries), signals=Signals())

    @property
    def sides(self) -> tuple[Floats, Floats]:
        """Scores of those that were in, and of those that were not."""
        return self.scores[self.included], self.scores[~self.included]

    def save(self, path: Path) -> None:
        tensors = {"included": torch.from_numpy(self.included), "scores": torch.from_numpy(self.scores)}
        metadata = {"seed": str(self.seed), "releases": str(self.releases)}
        metadata["signals"] = json.dumps(self.signals and asdict(self.signals))
        write_atomically(path, save(tensors, metadata=metadata))

    @classmethod
    def load(cls, path: Path) -> CanaryState:
        """Raises RunError for a file that is missing or damaged."""
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in ("included", "scores")}
            signals = json.loads(metadata["signals"])
            numbers = int(metadata["releases"]), signals and Signals(**signals)
            return cls(int(metadata["seed"]), tensors["included"], tensors["scores"], *numbers)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise unreadable(path, error, "which were in the training") from None


def unreadable(path: Path, error: Exception, unknown: str) -> RunError:
    """For a file of an audit's canaries that is damaged, without which nobody knows what is ``unknown``."""
    what = f"the canaries in {str(path)!r} cannot be read ({type(error).__name__})"
    return RunError(what, why=f"without them nobody knows {unknown}", fix="audit anew in another folder")


def other_sampling() -> ConfigError:
    """Of a run whose units are not drawn each by itself."""
    why = "a canary could push a unit out of a truncated batch, and balls in bins have no bound for canaries yet"
    fix = "remove privacy.max_batch_size and privacy.sampling for the audit"
    return ConfigError("an audit needs plain Poisson sampling", why=why, fix=fix)


class CanaryMechanism(Instrument):
    """A mechanism with canaries among its units; scores each release before the state moves on.

    inner: the mechanism under audit, with plain or cyclic Poisson sampling. saved: called when a release was scored.
    """

    inner: GaussianMechanism

    def __init__(
        self,
        inner: GaussianMechanism,
        canaries: GradientCanaries,
        state: CanaryState,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        sampling = inner.event.sampling
        if isinstance(sampling, TruncatedPoissonSampling | BallsInBinsSampling):
            raise other_sampling()
        super().__init__(inner)
        self._canaries, self._state, self._saved = canaries, state, saved
        self._known: Vector | None = None  # of the last batch: the records' part, which the attacker knows
        self._drawn = torch.empty(0, dtype=torch.int64)  # which canaries are in it: no attacker knows
        self._rate, self._sigma = sampling.sample_rate, inner.event.noise_multiplier
        self._turn = getattr(inner.noising.ledger, "charges", 0)
        # Poisson sampling draws each unit by itself, so drawing the canaries apart is the same law.
        self._sampler: PoissonSampler | CyclicPoissonSampler
        count = len(state.scores)
        if isinstance(sampling, CyclicPoissonSampling):
            assert inner.noising.correlated is not None
            c, classes = claimed(inner.noising.correlated.coefficients), sampling.classes
            self._sampler = CyclicPoissonSampler(
                count, self._rate, classes, key=state.seed, charged=lambda: self._turn
            )
        else:  # cycles of one step
            c, classes = (1.0,), 1
            self._sampler = PoissonSampler(count, self._rate)
        self._whitening = Whitening(c, self.coordinates, whole=not state.releases)
        self._cycles = Cycles(classes_of(state.seed, classes, count), c, state.scores)

    def take(self) -> PrivateSum:
        self._known = self.inner.clipped_sum()
        drawn = self._sampler.draw()
        self._drawn = torch.from_numpy(drawn[self._state.included[drawn]])
        for chunk in self._drawn.split(_CHUNK):
            if len(chunk):
                self.inner.accumulate(self._canaries.captured(self.coordinates.adapter, chunk))
        return super().take()

    def release(self, total: PrivateSum | None = None) -> Release:
        released = super().release(total)
        rest = released.vector
        if self._known is not None:
            rest = add_vectors(rest, times(self._known, -1 / self.inner.expected_batch_size))
        state, signals = self._state, self._state.signals
        added = None if signals is None else added_by(self.inner, self._canaries, self._drawn)
        rest, added, weight = self._whitening.row(rest, added, float(len(self._drawn)))
        x, size = (t.numpy() for t in alignments(self.inner, self._canaries, rest))
        state.scores = self._cycles.seen(self._turn, x, size, self._rate, self._sigma)
        if signals is not None and added is not None and self._whitening.white:
            signals.add(self.inner, self._canaries, self._drawn, rest, added, weight)
        state.releases += 1
        self._turn = released.step
        self._saved()
        return released


@dataclass(frozen=True, kw_only=True)
class Guessed:
    """What guesses show of a run.

    epsilon_lower: with probability ``confidence`` the run's epsilon at ``delta`` is at least this, if its releases are
    of the kind that was planned, with a noise multiplier that the audit finds (for a run that claims nothing: see each
    audit). epsilon_lower_plain: without any such assumption, at the same confidence. epsilon_claimed: of the plan, None
    where nothing is claimed. epsilon_most: the largest epsilon_lower that guesses could have shown, had all been right;
    None where they could have refuted the plan, or nothing is claimed. violated: so many right guesses would be too
    lucky under the plan's own privacy curve. correct: right guesses.

    For pages alone: scores, of what was in and of what was not; events, what is claimed.
    """

    correct: int
    epsilon_lower: float
    epsilon_lower_plain: float
    epsilon_claimed: float | None = None
    epsilon_most: float | None = None
    delta: float
    confidence: float
    violated: bool = False
    scores: tuple[Floats, Floats] = field(compare=False, repr=False)
    events: Events | None = field(default=None, compare=False)

    @property
    def curves(self) -> dict[str, tuple[Floats, Floats]]:
        """For the picture, by their names."""
        return {"canaries": self.scores}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready facts about private records, without single scores."""
        return {k: v for k, v in asdict(self).items() if k not in ("scores", "events")}


@dataclass(frozen=True, kw_only=True)
class OneRunAudit(Guessed):
    """What one run gave away about its canaries.

    epsilon_lower: the larger of what the guesses refute and epsilon_signals, what the signals of all canaries together
    do; None without signals. epsilon_lower_plain: by guesses (Steinke et al. 2023). epsilon_most: also None where
    signals refuted the plan. violated: also where such signals are too unlikely under the plan's noise. area: AUC of
    the scores; 0.5 is chance.
    """

    page: ClassVar[str] = "canaries"
    canaries: int
    guesses: int
    epsilon_signals: float | None = None
    area: float

    @property
    def guessed(self) -> str:
        return f"{self.canaries} canaries"


def judge_canaries(
    state: CanaryState, event: StepEvent, steps: int, delta: float, *, confidence: float = 0.95
) -> OneRunAudit:
    """Guess, count, and bound. event, steps, delta: what is claimed.

    Two games are played. In the first ``_planned_guesses`` are made, which is sharpest for a correct run; in the second
    half of all canaries are guessed, which convicts a run with far too little noise. They and the signals share the
    error probability, and the largest bound is told.
    """
    canaries, right, planned = len(state.scores), right_guesses(state), [(event, steps)]
    event, steps = event.releases(steps)
    error, signals = 1 - confidence, 0.0
    together = state.signals if state.signals is not None and state.signals.dimensions else None
    if together is not None:
        of_signals = 1 - error * _SIGNALS_SHARE
        signals = together.largest_mu(event, steps, of_signals)
        error *= 1 - _SIGNALS_SHARE
    best, half = _planned_guesses(canaries, event, steps, 1 - error * _PLANNED_SHARE), 2 * (canaries // 4)
    shares = {best: _PLANNED_SHARE, half: 1 - _PLANNED_SHARE} if best != half else {half: 1.0}
    played = []
    for guesses, share in shares.items():
        game = _Game(guesses, canaries, 1 - error * share, event, steps)
        correct = right(guesses // 2)
        plain = one_run_epsilon(correct, guesses, canaries, delta, 1 - (1 - confidence) * share)
        played.append((game, correct, game.bound(correct), plain))
    refuted = [game.refutes(correct) for game, correct, _, _ in played]
    violated = signals > 1 / event.noise_multiplier or any(refuted)
    game, correct, bound, _ = max(played, key=lambda each: each[2])
    most, claimed = _most([each[0] for each in played]), epsilon([(event, steps)], delta)

    def epsilon_of(mu: float) -> float:
        return epsilon_at(mu, event, steps, delta)

    return OneRunAudit(
        canaries=canaries,
        guesses=game.guesses,
        correct=correct,
        epsilon_lower=epsilon_of(max(bound, signals)),
        epsilon_lower_plain=max(plain for *_, plain in played),
        epsilon_signals=None if together is None else epsilon_of(signals),
        epsilon_claimed=claimed,
        epsilon_most=None if most is None or violated else min(epsilon_of(most), claimed),
        delta=delta,
        confidence=confidence,
        area=area_under_curve(*state.sides).value,
        violated=violated,
        scores=state.sides,
        events=planned,
    )


def right_guesses(state: CanaryState) -> Callable[[int], int]:
    """From h, how many are right of 2 h guesses: "in" for the h highest scores, "out" for the h lowest."""
    canaries = len(state.scores)
    # Ties are broken at random, not by the order of the canaries.
    order = np.lexsort((private_generator().random(canaries), state.scores))
    included = state.included[order]
    return lambda half: int(included[canaries - half :].sum() + (~included[:half]).sum())


@dataclass(frozen=True)
class _Game:
    """So many guesses on canaries, judged at a confidence. event, steps: what is claimed."""

    guesses: int
    canaries: int
    confidence: float
    event: StepEvent
    steps: int

    def refutes(self, correct: int, mu: float | None = None) -> bool:
        """Whether so many right are too many for the claim, or for a noise multiplier of 1 / mu."""
        event = self.event if mu is None else with_mu(self.event, mu)
        floor = floor_of(((event, self.steps),))
        return one_run_refutes(floor, correct, self.guesses, self.canaries, self.confidence)

    def largest_mu(self, correct: int, largest: float) -> float:
        """Largest 1 / noise_multiplier, at most ``largest``, that is refuted; 0 if none is."""
        return largest_refuted(lambda mu: self.refutes(correct, mu), largest, tolerance=largest / 200)

    def bound(self, correct: int) -> float:
        """The same, also beyond the claim where that is refuted."""
        claim = 1 / self.event.noise_multiplier
        if not self.refutes(correct):
            return self.largest_mu(correct, claim)
        largest = beyond_claim(self.event, self.steps, lambda mu: True)
        # The search may be too coarse to find the claim, which is refuted.
        return max(self.largest_mu(correct, largest), claim)


def _most(games: Sequence[_Game]) -> float | None:
    """Largest 1 / noise_multiplier that guesses refute in any of the games, if all are right; None if they refute the
    plan itself."""
    if any(game.refutes(game.guesses) for game in games):
        return None
    return max(game.largest_mu(game.guesses, 1 / game.event.noise_multiplier) for game in games)


def _planned_guesses(canaries: int, event: StepEvent, steps: int, confidence: float) -> int:
    """The even number of guesses that gives the best bound on a correct run, by simulating one with public numbers."""
    generator = np.random.default_rng(0)
    simulated = min(20_000, max(2_000, 10**7 // steps))
    present = np.arange(simulated) % 2 == 1
    size = np.full(simulated, typical_energy(event))
    scores = np.zeros(simulated)
    rate, sigma = event.sampling.sample_rate, event.noise_multiplier
    for _ in range(steps):
        drawn = present & (generator.random(simulated) < rate)
        x = drawn * size + sigma * np.sqrt(size) * generator.standard_normal(simulated)
        scores += log_ratio(x, size, rate, sigma)
    order = np.argsort(scores)
    bounds = {}
    for fraction in _FRACTIONS:
        half = max(1, round(fraction * canaries / 2))
        tail = max(1, round(fraction * simulated / 2))
        accuracy = (present[order[-tail:]].mean() + (~present[order[:tail]]).mean()) / 2
        game = _Game(2 * half, canaries, confidence, event, steps)
        bounds[2 * half] = game.largest_mu(round(2 * half * float(accuracy)), 1 / sigma)
    return max(bounds, key=lambda guesses: bounds[guesses])
