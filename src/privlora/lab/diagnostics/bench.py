"""One model, its records and one common start, on which factor methods and PRISM take the same steps.

Everything random has a public seed, so that runs can be paired: each run sees the same batches, and the noise of two
runs in the same coordinates consists of the same numbers. That makes a run repeatable and NOT PRIVATE; nothing that is
trained here is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from privlora.accounting.events import StepEvent
from privlora.accounting.ledger import Plan
from privlora.adapters import Captured, LowRankAdapter
from privlora.config import OPTIMIZER_SETTINGS, MethodSettings, Settings
from privlora.config.methods import PAPER_RULES
from privlora.coordinates import Coordinates, FactorCoordinates, TangentCoordinates, Vector
from privlora.errors import ConfigError
from privlora.geometry.fixed_rank import Point, point_from_factors
from privlora.lab.diagnostics.choosing import BASELINE
from privlora.lab.diagnostics.sweep import (
    bilinear_law,
    energy,
    factor_noise,
    factor_statistic,
    move_norm,
    tangent_law,
)
from privlora.mechanisms import GaussianMechanism, Instrument, Mechanism, NoiseSource, PrivateSum, Release
from privlora.mechanisms.charges import Uncharged
from privlora.mechanisms.noising import Charged
from privlora.methods import SPACES, Hyperparameters, find_method, optimizer_of
from privlora.optimizers import Optimizer
from privlora.randomness import private_generator
from privlora.rehearsals.settling import settled
from privlora.schedules import learning_rate_at
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.fitting import in_micro_batches
from privlora.training.inputs import Data, fitted, load_data
from privlora.training.models import check_model, load_model, unchanged_afterwards
from privlora.training.promise import plan_privacy, sampler
from privlora.training.state import TrainState
from privlora.training.step import Step

PRISM: Final = "prism"
CLIPPING: Final = "flat"  # as in the paper, whatever the run's method.clipping is

# (left (L, m, r), right (L, n, r)) of each group of modules; the update is scale * left right^T.
FactorPairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Contender:
    """A method at its start: what one run moves."""

    name: str
    coordinates: Coordinates
    optimizer: Optimizer
    hyper: Hyperparameters


@dataclass(frozen=True)
class Trace:
    """What one run showed at steps 1, 2, …; norms are over all modules together.

    step_norm: ||Z_(t+1) - Z_t||_F. clip_fraction: of the batch, with a norm above C; clip_coefficient: mean of
    min(1, C / norm); both NaN for an empty batch. noise_energy: ||N_Z||_F^2 of the noise in the release, as a unit
    step along it moves Z (the bilinear term included). law_energy: its expectation at that state. factor_statistic:
    S_t = sum of scale^2 (m ||right||^2 + n ||left||^2), empty in tangent coordinates.
    """

    method: str
    noise_std: float
    step_norm: list[float] = field(default_factory=list)
    clip_fraction: list[float] = field(default_factory=list)
    clip_coefficient: list[float] = field(default_factory=list)
    noise_energy: list[float] = field(default_factory=list)
    law_energy: list[float] = field(default_factory=list)
    factor_statistic: list[float] = field(default_factory=list)


# Called before each step with the noise that its release will carry, and tau, the noise's standard deviation.
Watcher = Callable[[Contender, Vector, float], None]


@dataclass(frozen=True)
class Workbench:
    """``start``: the factor pairs from which every run sets out. ``seed``: public, of batches and noise. ``on_step``:
    called after each step of any run."""

    settings: Settings
    adapter: LowRankAdapter
    data: Data
    plan: Plan
    start: FactorPairs
    scale: float
    dtype: torch.dtype
    seed: int
    on_step: Callable[[], None] = lambda: None

    def factor_contender(self, pairs: FactorPairs, name: str = BASELINE) -> Contender:
        """A method of the space "factors", DP-AdamW by default, on these factors."""
        hyper = _hyper(self.settings, name, None)
        coordinates = FactorCoordinates(self.adapter, pairs, self.scale, self.dtype)
        optimizer = optimizer_of("factors", hyper, coordinates)
        return Contender(name, coordinates, optimizer, hyper)

    def tangent_contender(self, pairs: FactorPairs, optimizer: str | None = None) -> Contender:
        """PRISM, or the paper's form of it, at the point that these factors give; ``optimizer`` None: the run's own.

        In isometric coordinates, those of the laws that are looked at: right_weight is 1, whatever the run's is.
        Directions that the factors lack (LoRA starts with a zero factor) are drawn with the public seed.
        """
        method = find_method("prism-paper" if optimizer in PAPER_RULES else PRISM)
        hyper = _hyper(self.settings, method.name, optimizer)
        generator = torch.Generator(self.adapter.device).manual_seed(self.seed)
        points = [
            point_from_factors(self.scale * left.double(), right.double(), generator) for left, right in pairs
        ]
        points = [Point(p.U.to(self.dtype), p.S.to(self.dtype), p.V.to(self.dtype)) for p in points]
        coordinates = TangentCoordinates(self.adapter, points, self.dtype)
        made = optimizer_of(method.space, hyper, coordinates)
        return Contender(f"{PRISM} {hyper.optimizer}", coordinates, made, hyper)

    def rescaled(self, gauge: float) -> FactorPairs:
        """The start at the gauge (c left, right / c): the same Z."""
        return [(gauge * left, right / gauge) for left, right in self.start]

    def run(
        self, contender: Contender, *, steps: int, noise_multiplier: float, watcher: Watcher | None = None
    ) -> Trace:
        """Take ``steps`` private steps with seeded batches and noise."""
        coordinates = contender.coordinates
        privacy = self.settings.privacy.model_copy(update={"insecure_noise_seed": self.seed})
        draws = sampler(privacy, len(self.data.units))
        mechanism = GaussianMechanism(
            coordinates,
            clip_norm=self.plan.clip_norm,
            event=StepEvent(draws.sampling, noise_multiplier),
            expected_batch_size=self.plan.expected_batch_size,
            ledger=Uncharged(),  # nothing is released: noise with a public seed protects nobody
            noise=NoiseSource(self.seed),
            clipping=CLIPPING,
        )
        trace = Trace(contender.name, mechanism.noise_std)
        replay = NoiseSource(self.seed)

        def before_release(norms: list[Tensor]) -> None:
            # The mechanism is about to draw the same numbers from the same seed.
            noise = Charged(0, replay).vector(
                None,
                coordinates.standard_normal,
                scale=mechanism.noise_std,
                divisor=1.0,
                dtype=self.dtype,
                device=self.adapter.device,
            )
            _record_noise(trace, coordinates, noise)
            _record_clipping(trace, norms, self.plan.clip_norm)
            if watcher is not None:
                watcher(contender, noise, mechanism.noise_std)

        hyper = contender.hyper
        step = Step(
            state=TrainState(coordinates=coordinates, optimizer=contender.optimizer),
            mechanism=_Watched(mechanism, before_release),
            examples=self.data.examples,
            learning_rate=lambda number: learning_rate_at(
                number, max(steps, privacy.steps), hyper.learning_rate, hyper.schedule, hyper.warmup_steps
            ),
            draw=lambda: self.data.units.draw_records(draws.draw(), draws.generator),
            max_tokens=self.settings.run.max_tokens,
            dropout=self.settings.model.dropout,
            masks=private_generator(self.seed),
        )
        coordinates.install()
        for _ in range(steps):
            before = copied(coordinates.factors())
            step.take()
            moves = [move_norm(*pair) for pair in zip(before, coordinates.factors(), strict=True)]
            trace.step_norm.append(float(torch.cat(moves).square().sum().sqrt()))
            self.on_step()
        return trace


class _Watched(Instrument):
    """Shows the norms of a batch's units just before their release."""

    def __init__(self, inner: Mechanism, before_release: Callable[[list[Tensor]], None]) -> None:
        super().__init__(inner)
        self._before_release = before_release
        self._norms: list[Tensor] = []

    def accumulate(self, captured: Captured) -> None:
        self._norms.append(self.coordinates.norms_squared(captured).clamp_min(0).sqrt())
        super().accumulate(captured)

    def release(self, total: PrivateSum | None = None) -> Release:
        norms, self._norms = self._norms, []
        self._before_release(norms)
        return super().release(total)


@contextmanager
def open_workbench(
    settings: Settings,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[Workbench]:
    """Load what ``settings`` name (or take what is given) and attach an adapter; the model comes back unchanged.

    on_step: called after each step of any run.

    The start is that of a plain LoRA run, one factor zero, unless adapter.init says otherwise. Raises ConfigError for a
    non-private run, and as ``check_model`` and ``load_data``.
    """
    if not settings.privacy.private:
        fix = "set privacy.private=true with a target_epsilon or a noise_multiplier"
        raise ConfigError("privacy.private=false: there is no noise to diagnose", fix=fix)
    # Its laws are of one step's noise, which is independent of that of others.
    alone = settings.privacy.model_copy(update={"bands": 1, "sampling": "poisson"})
    settings = settings.model_copy(update={"privacy": alone})
    settings = in_micro_batches(settings, settings.run.max_tokens)  # it keeps gradients in many gauges
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"evaluation": None})})
    if model is None:
        model, tokenizer = load_model(settings.model)
    settings = fitted(settings, model)
    check_model(settings, model, tokenizer)
    settings = settled(settings, model, tokenizer)
    baseline = settings.model_copy(update={"method": _method(settings, BASELINE)})
    plan = plan_privacy(baseline)
    data = load_data(settings, tokenizer, records, model=model)
    with unchanged_afterwards(model):
        parts = build_parts(baseline, model, PublicStart(tokenizer))
        with parts.adapter:
            coordinates = parts.coordinates
            assert isinstance(coordinates, FactorCoordinates)
            yield Workbench(
                settings=settings,
                adapter=parts.adapter,
                data=data,
                plan=plan,
                start=copied(zip(coordinates.left, coordinates.right, strict=True)),
                scale=coordinates.scale,
                dtype=coordinates.dtype,
                seed=seed,
                on_step=on_step,
            )


def copied(pairs: Iterable[tuple[Tensor, Tensor]]) -> FactorPairs:
    """The factors as they are now."""
    return [(left.detach().clone(), right.detach().clone()) for left, right in pairs]


def _method(settings: Settings, name: str) -> MethodSettings:
    """The run's own method settings if they are about this method, else the method's defaults."""
    return settings.method if settings.method.name == name else MethodSettings(name=name)


def _hyper(settings: Settings, name: str, optimizer: str | None) -> Hyperparameters:
    chosen, method = _method(settings, name), find_method(name)
    if optimizer is not None:
        kind = SPACES[method.space].optimizers[optimizer]
        foreign = set(OPTIMIZER_SETTINGS) - {*kind.settings, *kind.space_settings}
        chosen = chosen.model_copy(update={"optimizer": optimizer, **dict.fromkeys(foreign)})
    return method.resolve(chosen, settings.adapter.init, settings.privacy.steps)


def _record_noise(trace: Trace, coordinates: Coordinates, noise: Vector) -> None:
    tau = trace.noise_std
    if isinstance(coordinates, TangentCoordinates):
        trace.noise_energy.append(energy(noise))
        trace.law_energy.append(tau**2 * sum(float(tangent_law(p).sum()) for p in coordinates.points))
        return
    assert isinstance(coordinates, FactorCoordinates)
    scale, moved, s, bilinear = coordinates.scale, 0.0, 0.0, 0.0
    pairs = zip(coordinates.left, coordinates.right, strict=True)
    for (left, right), (d_left, d_right) in zip(pairs, noise, strict=True):
        moved += float(factor_noise(left, right, d_left, d_right, scale)[2].sum())
        s += float(factor_statistic(left, right, scale).sum())
        modules, m, r = left.shape
        bilinear += modules * bilinear_law(m, right.shape[1], r, scale, tau)
    trace.noise_energy.append(moved)
    trace.law_energy.append(tau**2 * s + bilinear)
    trace.factor_statistic.append(s)


def _record_clipping(trace: Trace, norms: list[Tensor], clip_norm: float) -> None:
    found = torch.cat(norms) if norms else torch.empty(0)
    trace.clip_fraction.append(float((found > clip_norm).double().mean()))
    trace.clip_coefficient.append(float((clip_norm / found).clamp(max=1.0).mean()))
