"""White-box audit of a federation's round: does what an attacker sees tell whether one unit was at a client?

The game of one_step on the real pipeline of clients and server (rehearsal): the attacker knows everything, chooses all
records, and sees what the statement allows it to see. Of each view three statistics are played, and share the error
probability:

    alignment   <what is seen, what the canary adds to it>, each tensor weighted by one over its own noise variance:
                tight for Gaussian noise of the claimed size. What the canary adds is taken from rounds with hardly any.
    learnt      a linear rule that is fitted to the first trials, each entry by its own variance: decides where entries
                have no noise, or are what no honest client would send
    energy      ||what is seen||^2: sees a scale that depends on the data

Weights and thresholds are learnt on the first trials and judged on the others, so the confidence holds.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.special import ndtri

from privlora.accounting.accountants import Events, epsilon
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.auditing.bounds import (
    Errors,
    Floats,
    accuracy_mu,
    gaussian_epsilon,
    judged_errors,
    rate_at_least,
)
from privlora.auditing.rehearsal import (
    MASKED,
    OPENED,
    UPDATE,
    Rehearsal,
    Seen,
    Stage,
    View,
    noise_counted_on,
    rehearsed,
    stage_of,
)
from privlora.config import Settings
from privlora.errors import ConfigError, PrivacyError
from privlora.federated.plans import federation_of, with_local_method
from privlora.federated.workplace import Workplace
from privlora.methods import METHODS
from privlora.precision import own_context

_STATISTICS = {"alignment": 0.9, "learnt": 0.06, "energy": 0.04}  # parts of the error probability
_VIEWS = {"messages": 0.8, "broadcasts": 0.2}  # where there are both
_PILOT = 200  # trials of each world to learn from, or a quarter of all if that is less
_QUIET = 1e-4  # noise multiplier of the rounds that show what the canary adds
_LARGEST_MU = 12.0
# Optimizers whose moves are linear in a release, the better first.
_LINEAR = ("sgd", "lora-fa")


@dataclass(frozen=True)
class ViewAudit:
    """attacker: in words. view: what it sees. epsilon_lower: with the audit's confidence, epsilon is at least this.
    epsilon_most: the largest that it could have been, by any statistic, had all guesses been right; most_judged: how
    many guesses that statistic makes. statistic: which one gave epsilon_lower, with correct of judged guesses. scores:
    of judged trials without and with the canary, for pictures."""

    attacker: str
    view: str
    epsilon_lower: float
    epsilon_most: float
    statistic: str
    correct: int
    judged: int
    most_judged: int
    scores: tuple[Floats, Floats]

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "scores"}


@dataclass(frozen=True)
class FederationAudit:
    """views: one for each attacker. epsilon_claimed: of one round's releases, by the ledger. releases: how many these
    are. trials: rounds of a victim in each world. noise: whose the claim rests on, in words."""

    views: tuple[ViewAudit, ...]
    event: StepEvent
    releases: float
    epsilon_claimed: float
    delta: float
    confidence: float
    trials: int
    rule: str
    unit: str
    noise: str
    page: ClassVar[str] = "federation"

    @property
    def strongest(self) -> ViewAudit:
        return max(self.views, key=lambda view: view.epsilon_lower)

    @property
    def epsilon_lower(self) -> float:
        return self.strongest.epsilon_lower

    @property
    def epsilon_most(self) -> float | None:
        """The largest epsilon_lower that so many guesses could have shown, had all been right; None where they could
        have refuted the claim."""
        most = self._most.epsilon_most
        return most if most < self.epsilon_claimed else None

    @property
    def guessed(self) -> str:
        """By the statistic of epsilon_most."""
        return f"{self._most.most_judged} rounds"

    @property
    def _most(self) -> ViewAudit:
        return max(self.views, key=lambda view: view.epsilon_most)

    @property
    def violated(self) -> bool:
        """An attacker saw more than is claimed."""
        return self.epsilon_lower > self.epsilon_claimed

    @property
    def curves(self) -> dict[str, tuple[Floats, Floats]]:
        """Of the strongest attacker."""
        return {"canaries": self.strongest.scores[::-1]}

    @property
    def events(self) -> Events:
        """What a round is charged with."""
        return [(self.event, math.ceil(self.releases))] if self.releases else []

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without scores and event."""
        found = ("epsilon_lower", "epsilon_most", "violated")
        return {
            **{k: v for k, v in vars(self).items() if k not in ("views", "event")},
            **{name: getattr(self, name) for name in found},
            "noise_multiplier": self.event.noise_multiplier,
            "attackers": [view.to_dict() for view in self.views],
        }


@own_context()
def audit_federation(
    settings: Settings,
    *,
    attacker: str = "server",
    trials: int = 1000,
    confidence: float = 0.95,
    sampled: bool = False,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> FederationAudit:
    """Play ``trials`` rounds with and as many without the canary, and bound one round's epsilon from below.

    settings: of a federation; its records are not read, its rounds not run. attacker: "server", which colludes with
    all clients on whose noise the statement does not count; or "client". sampled: units are drawn at the settings'
    rate, and the bound is for a sampled release; else all units are in each batch, which shows more. progress: called
    with (done, all) trials.

    The bound assumes that a release is of the claimed kind, with a noise multiplier that the audit finds.

    Raises ConfigError for fewer than 40 trials or settings that cannot be audited, PrivacyError if the canary does not
    show in a round that has hardly any noise.
    """
    if trials < 40:
        raise ConfigError(f"trials={trials} is too few for a bound", fix="play at least 40 trials")
    settings = with_local_method(settings)
    stage = stage_of(settings, attacker)
    rounds = 2 * math.ceil(trials / max(1, len(stage.victims) // 2))
    chosen = rehearsed(settings, stage, rounds=rounds, sampled=sampled)
    workplace = Workplace(chosen, model, tokenizer)
    # In memory where there is such a folder: what is written in an audit need not survive it.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="privlora-audit-", dir=memory) as folder:
        along = _contributions(settings, stage, Path(folder) / "quiet", workplace)
        scores = {view: Scores(along[view], min(_PILOT, trials // 4)) for view in stage.attackers}
        worlds = _worlds_of(chosen, stage, Path(folder), workplace)
        for done, pair in enumerate(_trials(worlds, trials), start=1):
            for seen in pair:
                for view, kept in scores.items():
                    kept.take(getattr(seen, view), present=seen.present)
            if progress is not None:
                progress(done, trials)
        statement, played = worlds[0].statement(), worlds[0].rounds
    plan = statement.plan
    event, delta, releases = plan.phases[-1][0], plan.delta, statement.charges / played
    claimed = epsilon([(event, math.ceil(releases))], plan.delta) if releases else 0.0
    shares = _VIEWS if len(scores) > 1 else dict.fromkeys(scores, 1.0)
    least = max(1, math.ceil(releases))
    each = {view: 1 - (1 - confidence) * shares[view] for view in scores}
    judged = (_judge(kept, stage, view, event, least, delta, each[view]) for view, kept in scores.items())
    return FederationAudit(
        views=tuple(judged),
        event=event,
        releases=releases,
        epsilon_claimed=claimed,
        delta=delta,
        confidence=confidence,
        trials=trials,
        rule=federation_of(settings).rule,
        unit=plan.unit,
        noise=noise_counted_on(settings),
    )


def _worlds_of(settings: Settings, stage: Stage, folder: Path, workplace: Workplace) -> list[Rehearsal]:
    """One with half of the victims in each world, or one for each world where there is one victim."""
    if len(stage.victims) > 1:
        halves = {name: bool(number % 2) for number, name in enumerate(stage.victims)}
        return [Rehearsal(settings, stage, folder / "both", workplace, halves)]
    found = []
    for present in (False, True):
        own, seed = settings, settings.privacy.insecure_noise_seed
        if seed is not None and present:  # other noise than in the other world
            own = settings.changed(privacy={"insecure_noise_seed": seed + 104729})
        alone = dict.fromkeys(stage.victims, present)
        found.append(Rehearsal(own, stage, folder / str(int(present)), workplace, alone))
    return found


def _trials(worlds: list[Rehearsal], trials: int) -> Iterator[tuple[Seen, Seen]]:
    """So many pairs of rounds without and with the canary. The worlds are closed behind the last."""
    waiting: dict[bool, list[Seen]] = {False: [], True: []}
    try:
        for _ in range(trials):
            while not all(waiting.values()):
                for seen in itertools.chain.from_iterable(world.play() for world in worlds):
                    waiting[seen.present].append(seen)
            yield waiting[False].pop(), waiting[True].pop()
    finally:
        for world in worlds:
            world.close()


def _contributions(
    settings: Settings, stage: Stage, folder: Path, workplace: Workplace
) -> Mapping[str, View]:
    """What the canary adds to each view, up to a factor, from one pair of rounds with hardly any noise."""
    quiet = rehearsed(settings, stage, rounds=2)
    privacy = quiet.privacy.model_copy(update={"noise_multiplier": _QUIET})
    method = quiet.method
    if federation_of(quiet).privacy_model == "record":
        # Others scale entries by themselves, so what they do with noise is something else.
        row = METHODS[method.name]
        alike = [row, *(other for other in METHODS.values() if other.coordinates is row.coordinates)]
        pairs = [(other.name, one) for one in _LINEAR for other in alike if one in other.optimizers]
        name, optimizer = pairs[0] if pairs else (row.name, row.optimizer)
        changes = {"name": name, "optimizer": optimizer, "clipping": method.clipping or row.clipping}
        method = method.model_copy(update={"learning_rate": 0.1, "relative_rate": False, **changes})
    quiet = quiet.model_copy(update={"privacy": privacy, "method": method})
    place = Workplace(quiet, *workplace.loaded[:2])
    ((absent, present),) = _trials(_worlds_of(quiet, stage, folder, place), 1)
    found = {}
    for view in stage.attackers:
        one, other = getattr(absent, view), getattr(present, view)
        found[view] = {name: other[name] - one[name] for name in one if other[name].shape == one[name].shape}
        updates = [name for name in found[view] if name.startswith(UPDATE)]
        if updates:  # factors turn and change signs where their product moves smoothly
            found[view] = {name: found[view][name] for name in updates}
        # Of masked messages, whose difference is that of masks: what it would be without them.
        masked = [name for name in found[view] if name.startswith(MASKED)]
        for name in masked:
            opened = found[view].get(name.replace(MASKED, OPENED))
            found[view][name] = torch.zeros_like(one[name]) if opened is None else opened
        if not any(bool(t.any()) for t in found[view].values()):
            what = "the canary does not show in a round without noise: the audit would see nothing"
            raise PrivacyError(what, fix="audit with another model or other target_modules")
    return found


@dataclass
class _World:
    """Of each trial: products with what the canary adds, energies, and of those not learnt from the fitted rule's
    scores. sums, squares: of what was seen in those that are learnt from."""

    products: list[list[float]] = field(default_factory=list)
    energies: list[float] = field(default_factory=list)
    learnt: list[float] = field(default_factory=list)
    sums: dict[str, Any] = field(default_factory=dict)
    squares: dict[str, Any] = field(default_factory=dict)


class Scores:
    """Of all trials of one view, as they come: worlds False and True.

    along: what the canary adds. pilot: trials of each world to learn from; nothing else of them is kept.
    """

    def __init__(self, along: View, pilot: int) -> None:
        self._along = {name: t for name, t in along.items() if bool(t.any())}
        self._sizes = np.array([float(t @ t) for t in self._along.values()])
        self.pilot, self.middle = pilot, 0.0
        self._rule: View | None = None
        self._worlds = {False: _World(), True: _World()}

    def take(self, seen: View, *, present: bool) -> None:
        world = self._worlds[present]
        world.products.append([float(seen[name] @ t) for name, t in self._along.items()])
        world.energies.append(sum(float(seen[name] @ seen[name]) for name in self._along))
        if len(world.products) <= self.pilot:
            for name, tensor in seen.items():
                world.sums[name] = world.sums.get(name, 0) + tensor
                world.squares[name] = world.squares.get(name, 0) + tensor.square()
            return
        if self._rule is None:
            self._rule = self._fit()
        world.learnt.append(float(sum(float(seen[name] @ t) for name, t in self._rule.items())))

    def worlds(self) -> dict[str, tuple[Floats, Floats, int]]:
        """Of each statistic: scores without and with the canary, and how many of the first are for learning."""
        worlds = self._worlds.values()
        products = [np.array(world.products) for world in worlds]
        variances = products[0][: self.pilot].var(axis=0)
        floor = 1e-12 * np.square(np.abs(products[0]).max(axis=0)) + 1e-300
        weights = self._sizes / np.maximum(variances, floor)
        absent, present = (each @ weights for each in products)
        learnt = [np.array(world.learnt) for world in worlds]
        energies = [np.array(world.energies) for world in worlds]
        return {
            "alignment": (absent, present, self.pilot),
            "learnt": (learnt[0], learnt[1], 0),
            "energy": (energies[0], energies[1], self.pilot),
        }

    def _fit(self) -> View:
        """Difference of means over variance, entry by entry, less what puts the middle of both worlds at zero."""
        rule = {}
        for name in self._worlds[False].sums:
            means = [world.sums[name] / self.pilot for world in self._worlds.values()]
            squares = [world.squares[name] / self.pilot for world in self._worlds.values()]
            spread = (squares[0] - means[0].square() + squares[1] - means[1].square()) / 2
            floor = 1e-12 * float((squares[0] + squares[1]).mean()) + 1e-300
            rule[name] = (means[1] - means[0]) / spread.clamp_min(floor)
            self.middle += float(rule[name] @ (means[0] + means[1])) / 2
        return rule


def _judge(
    kept: Scores, stage: Stage, view: str, event: StepEvent, releases: int, delta: float, confidence: float
) -> ViewAudit:
    found = []
    for name, (absent, present, pilot) in kept.worlds().items():
        threshold = kept.middle if name == "learnt" else None
        errors = judged_errors(absent, present, pilot, threshold=threshold)
        shared = 1 - (1 - confidence) * _STATISTICS[name]
        bound, most = (_bound_of(event, releases, each, delta, shared) for each in (errors, errors.if_none()))
        judged, guesses = (absent[pilot:], present[pilot:]), errors.absent + errors.present
        who = stage.attackers[view]
        found.append(ViewAudit(who, view, bound, most, name, errors.correct, guesses, guesses, judged))
    best = max(found, key=lambda audit: audit.epsilon_lower)
    able = max(found, key=lambda audit: audit.epsilon_most)
    return replace(best, epsilon_most=able.epsilon_most, most_judged=able.judged)


def _bound_of(event: StepEvent, releases: int, errors: Errors, delta: float, confidence: float) -> float:
    """Epsilon of the largest noise that so many right guesses rule out."""
    if event.sampling == PoissonSampling(1.0):
        return gaussian_epsilon(accuracy_mu(errors, confidence), delta)
    accuracy = rate_at_least(errors.correct, errors.absent + errors.present, confidence)

    if releases > 1:
        raise ConfigError("sampled rounds of several releases have no bound", fix="set local_steps=1")
    # No test is better than at q times what tells N(0, 1) from N(mu, 1).
    told = min(max(0.0, 2 * accuracy - 1) / event.sampling.sample_rate, 1.0)
    mu = min(_LARGEST_MU, 2 * float(ndtri((1 + told) / 2)))
    return epsilon([(replace(event, noise_multiplier=1 / mu), 1)], delta) if mu else 0.0
