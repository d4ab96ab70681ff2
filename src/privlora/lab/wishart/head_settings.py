"""What the heads of one call to `train_heads` have in common, and the event that one step of one head is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.errors import ConfigError, PrivacyError, nearest

HEAD_METHODS = ("dp-sgd", "lora-fa", "m2", "m2-unclipped", "m1", "project-then-clip")
SCHEDULES = ("constant", "cosine")
PROJECTIONS = ("haar", "wishart")


@dataclass(frozen=True)
class HeadSettings:
    """How heads are trained.

    Attributes:
        method: "dp-sgd": full gradients, full noise (Abadi et al. 2016). "lora-fa": W = W0 + B A with A frozen; clip
            and noise on the gradient of B. "m2": clip the full gradient, add noise, then a fresh random projection (Hu
            et al. 2026). "m2-unclipped": the same of Wishart matrices, from the gradient of B alone and without a clip
            (their Algorithm 4): private only where every record's features have a norm of clip_norm / sqrt 2 at most,
            since residuals have one of sqrt 2 at most; longer ones are refused. "m1": the projection before the noise;
            for study, states no epsilon. "project-then-clip": project on a random subspace first, then clip there and
            add noise there.
        steps: T, the number of releases of each head.
        learning_rate: of SGD on the mean gradient (sum / expected_batch_size).
        noise_multiplier: sigma = noise standard deviation / clip_norm, in each coordinate that is noised: all of W
            (dp-sgd, m2, m1), B (lora-fa), or W in the orthonormal basis of the subspace (project-then-clip).
        clip_norm: C, the bound on one record's full gradient, in the Frobenius norm. lora-fa bounds the gradient of B
            by C; project-then-clip bounds the projected gradient by C sqrt(r / d), the norm that it has left on
            average; m2-unclipped states C and clips nothing. None: no bound, and then no noise either.
        rank: r, of A or of the subspace. None for dp-sgd.
        projection: of m2 and m1. "wishart": A^T A with A (r x d) of N(0, 1/r) entries, as in the paper. "haar":
            (d / r) P with P the orthogonal projector on the same subspace; same privacy, smaller variance, r <= d.
        fresh: project-then-clip only: a new subspace at every step, instead of one for the whole run.
        momentum: of SGD, in [0, 1).
        schedule: of the learning rate: "constant", or "cosine" (from learning_rate to 0 over the steps).

    Raises:
        ConfigError: a setting is unknown, missing, out of range or without effect.
        PrivacyError: noise without a bound on what one record contributes.
    """

    method: str
    steps: int
    learning_rate: float
    noise_multiplier: float = 0.0
    clip_norm: float | None = None
    rank: int | None = None
    projection: str = "haar"
    fresh: bool = False
    momentum: float = 0.0
    schedule: str = "constant"

    def __post_init__(self) -> None:
        known = {"method": HEAD_METHODS, "schedule": SCHEDULES, "projection": PROJECTIONS}
        for name, names in known.items():
            if (value := getattr(self, name)) not in names:
                raise ConfigError(f"unknown {name} {value!r}", fix=nearest(value, names))
        sensible = self.steps >= 1 and 0 < self.learning_rate < math.inf and 0 <= self.momentum < 1
        if not sensible:
            raise ConfigError(
                f"steps={self.steps}, learning_rate={self.learning_rate} or momentum={self.momentum} is out of range",
                fix="take at least one step, at a rate above 0, with momentum in [0, 1)",
            )
        if (self.method == "dp-sgd") != (self.rank is None) or (self.rank is not None and self.rank < 1):
            fix = "give a rank of at least 1, to all methods but dp-sgd"
            raise ConfigError(f"{self.method} with rank={self.rank}", fix=fix)
        if self.fresh and self.method != "project-then-clip":
            raise ConfigError(f"fresh has no effect on {self.method}", fix="leave fresh out")
        if not 0 <= self.noise_multiplier < math.inf:
            fix = "give the noise's standard deviation divided by clip_norm, or calibrate it"
            raise PrivacyError(
                f"noise_multiplier={self.noise_multiplier} is not a finite number >= 0", fix=fix
            )
        needed = self.noise_multiplier > 0 or self.method == "project-then-clip"
        if not 0 < self.clip_norm < math.inf if self.clip_norm is not None else needed:
            raise PrivacyError(
                f"{self.method} with noise_multiplier={self.noise_multiplier:g} needs clip_norm above 0",
                why="noise protects only contributions that are bounded, and is calibrated to the bound",
                fix="set clip_norm",
            )

    def step_event(self, sample_rate: float, dimensions: int) -> StepEvent:
        """What one step of one head is, for a ledger or an accountant.

        M2's fresh projection counts (Theorem 5 of Hu et al. 2026, made exact): the event names its rank and the
        ``dimensions`` d of the features. The other methods are a Gaussian mechanism on what they clip.

        Raises:
            PrivacyError: m1, or no noise and no bound.
        """
        if self.method == "m1":
            raise PrivacyError("m1 states no epsilon", fix="use m2 or project-then-clip")
        if self.clip_norm is None:
            raise PrivacyError("heads without clip_norm and noise have no epsilon", fix="set both")
        sampling = PoissonSampling(sample_rate)
        if self.method in ("m2", "m2-unclipped") and self.rank is not None and self.rank < dimensions:
            return StepEvent(sampling, self.noise_multiplier, projections=((self.rank, dimensions),))
        return StepEvent(sampling, self.noise_multiplier)

    def check_fit(self, classes: int, dimensions: int) -> None:
        """ConfigError unless heads of ``classes`` rows and ``dimensions`` columns can be trained like this."""
        if self.method in ("m1", "m2") and dimensions < 2 * classes:
            what = f"{self.method} with {dimensions} features and {classes} classes, and it needs two for each class"
            raise ConfigError(what, fix="use dp-sgd: so few features leave nothing to project")
        wishart = self.method in ("m1", "m2") and self.projection == "wishart"  # any rank
        if self.method not in ("lora-fa", "m2-unclipped") and not wishart and (self.rank or 0) > dimensions:
            raise ConfigError(
                f"rank={self.rank} is above the {dimensions} features", fix="choose a lower rank, or dp-sgd"
            )

    def rate(self, step: int) -> float:
        """Learning rate of step 0, 1, …, T - 1."""
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * step / self.steps)) / 2
        return self.learning_rate
