"""Mechanisms of every method on a tiny model, and the ways in which they may be broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tiny_models import tiny_llama

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.auditing.canary_scores import CanaryState
from privlora.auditing.gradient_canaries import GradientCanaries, draw_canaries
from privlora.coordinates import Coordinates, PublicGradients, SpanSpace, Vector, WishartCoordinates
from privlora.coordinates.evened import Evened
from privlora.lab.audits.one_step import StepAudit, audit_step
from privlora.mechanisms import GaussianMechanism, NoiseSource, Release
from privlora.mechanisms.charges import Uncharged
from privlora.methods import METHODS, build
from privlora.optimizers import Optimizer
from privlora.training.files import RunFolder
from privlora.training.state import TrainState

Setting = tuple[GaussianMechanism, GradientCanaries, GradientCanaries]

# Those of a few directions have no room for canaries that do not get into each other's way.
ROOMY = [(name, row) for name, row in reversed(METHODS.items()) if row.private and not row.public_texts]
SPACES = list({row.space: name for name, row in ROOMY}.values())
SPANS = list({row.space: name for name, row in METHODS.items() if row.public_texts}.values())


def read_state(root: Path) -> CanaryState:
    """The canaries of an audit."""
    return CanaryState.load(RunFolder(root).canaries)


def setting(
    name: str,
    sigma: float,
    *,
    seed: int | None = None,
    others: int = 3,
    targets: Sequence[str] = ("q_proj", "up_proj", "v_proj"),
    clipping: str | None = None,
) -> Setting:
    """A mechanism of the method, other units that are short, and a canary. seed: of noise; None is the system's."""
    coordinates, _ = built(name, targets)
    adapter = coordinates.adapter
    if isinstance(coordinates, SpanSpace):
        coordinates.refresh = lambda: public_rows(coordinates)
    if seed is not None and isinstance(coordinates, WishartCoordinates):  # repeatable, unlike in a run
        coordinates.load_state_dict(coordinates.state_dict() | {"key": torch.tensor([0, 7])})
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=1.0,
        event=StepEvent(PoissonSampling(1.0), sigma, coordinates.event_layers),
        expected_batch_size=8.0,
        ledger=Uncharged(),
        noise=NoiseSource(seed),
        clipping=clipping or METHODS[name].clipping,
    )
    generator = torch.Generator().manual_seed(2)
    short = draw_canaries(adapter, others, generator, norm=0.02)
    return mechanism, short, draw_canaries(adapter, 1, generator)


def built(name: str, targets: Sequence[str]) -> tuple[Coordinates, Optimizer]:
    model = tiny_llama(num_hidden_layers=1, vocab_size=32)
    return build(METHODS[name], LowRankAdapter(model, rank=2, target_modules=list(targets)))


def public_rows(space: SpanSpace) -> PublicGradients:
    """Six, which no text has."""
    rows = torch.randn(6, space.inner.entries(), generator=torch.Generator().manual_seed(3))
    return PublicGradients(rows)


def playing(
    name: str, sigma: float, *, rate: float, seed: int | None = None
) -> tuple[TrainState, GaussianMechanism, GradientCanaries]:
    """What whole runs of one adapted layer are played with."""
    coordinates, optimizer = built(name, ["q_proj"])
    if isinstance(coordinates, SpanSpace):
        coordinates.refresh = lambda: public_rows(coordinates)
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=1.0,
        event=StepEvent(PoissonSampling(rate), sigma, coordinates.event_layers),
        expected_batch_size=8.0,
        ledger=Uncharged(),
        noise=NoiseSource(seed),
        clipping=METHODS[name].clipping,
    )
    canary = draw_canaries(coordinates.adapter, 1, torch.Generator().manual_seed(2))
    return TrainState(coordinates=coordinates, optimizer=optimizer), mechanism, canary


def opposite(canary: GradientCanaries, count: int) -> GradientCanaries:
    """``count`` units whose gradients are minus that of the one canary."""
    rows = torch.arange(count)
    left = [-u.expand(count, -1) for u in canary.left]
    right = [v.expand(count, -1) for v in canary.right]
    return GradientCanaries(count, [rows for _ in left], left, right, [s.expand(count) for s in canary.sizes])


def scale_noise(mechanism: GaussianMechanism, factor: Callable[[], float]) -> None:
    source = mechanism.noising.noise
    draw = source.standard_normal
    source.standard_normal = lambda shape: draw(shape) * factor()  # type: ignore[method-assign]


def quarter_noise(mechanism: GaussianMechanism) -> None:
    """The noise is a quarter of what is claimed."""
    scale_noise(mechanism, lambda: 0.25)


def no_noise(mechanism: GaussianMechanism) -> None:
    """Noise is not added at all."""
    scale_noise(mechanism, lambda: 0.0)


def noise_in_some_batches(mechanism: GaussianMechanism) -> None:
    """Every other logical batch goes out without noise, as where noise hangs on a micro-batch that may not come."""
    released = mechanism.release
    count = [0]

    def release() -> Release:
        count[0] += 1
        return released()

    mechanism.release = release  # type: ignore[method-assign]
    # Two releases a trial: the pair of trials has noise, or has not.
    scale_noise(mechanism, lambda: float((count[0] - 1) // 2 % 2))


def unclipped_module(mechanism: GaussianMechanism) -> None:
    """The last module's gradient hardly counts in the norm (a unit whose norm is zero would be dropped)."""
    coordinates = mechanism.coordinates
    norms_squared = coordinates.norms_squared

    def without_last(captured: Captured) -> torch.Tensor:
        p, q = list(captured.p), list(captured.q)
        squares = captured.dense_squares
        if squares is not None:  # the canary has 1e6 / 3 in this module, or all of it
            squares = 1e-6 * squares
        p[-1], q[-1] = 1e-3 * p[-1], 1e-3 * q[-1]
        return norms_squared(Captured(p, q, squares))

    even = coordinates.evened

    def evened(captured: Captured) -> Evened:
        found = even(captured)
        return replace(found, norms_squared=without_last(found.formed()))

    coordinates.norms_squared = without_last  # type: ignore[method-assign]
    coordinates.evened = evened  # type: ignore[method-assign]


def realised_divisor(mechanism: GaussianMechanism) -> None:
    """The sum is divided by the number of units that were drawn."""
    accumulate, released = mechanism.accumulate, mechanism.release
    seen: list[int] = []

    def counting(captured: Captured) -> None:
        seen.append(captured.units)
        accumulate(captured)

    def dividing() -> Release:
        mechanism.expected_batch_size = float(max(1, sum(seen)))
        seen.clear()
        return released()

    mechanism.accumulate = counting  # type: ignore[method-assign]
    mechanism.release = dividing  # type: ignore[method-assign]


def tensor_without_noise(mechanism: GaussianMechanism) -> None:
    """The first tensor of the first group gets no noise."""
    coordinates = mechanism.coordinates
    noised = coordinates.standard_normal

    def first_quiet(draw: Callable[[tuple[int, ...]], torch.Tensor]) -> Vector:
        vector = noised(draw)
        vector[0] = (torch.zeros_like(vector[0][0]), *vector[0][1:])
        return vector

    coordinates.standard_normal = first_quiet  # type: ignore[method-assign]


def columns_not_normalised(mechanism: GaussianMechanism) -> None:
    """Units enter as long as they are: the column of coefficients is never divided by its norm."""
    mechanism._clip_weights = lambda captured, lengths: torch.ones_like(lengths)  # type: ignore[method-assign]


def residual_not_noised(mechanism: GaussianMechanism) -> None:
    """Noise reaches the coordinates in the span alone, and what lies beside it goes out as it is."""
    coordinates = mechanism.coordinates
    noised = coordinates.standard_normal

    def span_alone(draw: Callable[[tuple[int, ...]], torch.Tensor]) -> Vector:
        along, *beside = noised(draw)
        return [along, *[tuple(torch.zeros_like(t) for t in parts) for parts in beside]]

    coordinates.standard_normal = span_alone  # type: ignore[method-assign]


def parts_with_a_charge_each(mechanism: GaussianMechanism) -> None:
    """Each of the two parts is bounded by C, as if each had a noise of its own that is charged for itself."""
    mechanism._clip_weights = lambda captured, lengths: torch.full_like(lengths, 2**0.5)  # type: ignore[method-assign]


def fixed_seed(mechanism: GaussianMechanism) -> None:
    """Noise comes from a seed that every process has."""
    mechanism.noising.noise = NoiseSource(insecure_seed=0)


@dataclass(frozen=True)
class Mutation:
    """One way to be wrong, and the audit that is to see it. sites: also play each module alone. twin: play a replay."""

    apply: Callable[[GaussianMechanism], None]
    sites: bool = False
    twin: bool = False

    def audits(
        self, name: str, sigma: float, *, trials: int, broken: bool = True, seed: int | None = None
    ) -> list[StepAudit]:
        """All bounds together hold with 99 % confidence. seed: of the noise; None is the system's."""
        mechanism, others, canary = setting(name, sigma, seed=seed)
        canaries: Sequence[GradientCanaries] = [canary]
        adapter = mechanism.coordinates.adapter
        if self.sites:
            generator = torch.Generator().manual_seed(3)
            canaries = [draw_canaries(adapter, 1, generator, site=s) for s in range(len(adapter.sites))]
        twin = setting(name, sigma, seed=None if seed is None else seed + 1)[0] if self.twin else None
        for each in (mechanism, twin):
            if broken and each is not None:
                self.apply(each)
        certain = 1 - 0.01 / len(canaries)
        return [
            audit_step(mechanism, mechanism.event, others, each, trials=trials, confidence=certain, twin=twin)
            for each in canaries
        ]

    def caught(self, name: str, sigma: float, *, trials: int, broken: bool = True, seed: int = 7) -> bool:
        found = self.audits(name, sigma, trials=trials, broken=broken, seed=seed)
        return any(each.violated for each in found)


MUTATIONS = {
    "noise/4": Mutation(quarter_noise),
    "no noise": Mutation(no_noise),
    "noise in some batches": Mutation(noise_in_some_batches),
    "module not clipped": Mutation(unclipped_module, sites=True),
    "realised divisor": Mutation(realised_divisor),
    "tensor without noise": Mutation(tensor_without_noise),
    "fixed seed": Mutation(fixed_seed, twin=True),
}
# Of methods that lean on public texts; those of ``gep`` concern what lies beside the span.
SPAN_MUTATIONS = {
    "column not normalised": Mutation(columns_not_normalised),
    "residual not noised": Mutation(residual_not_noised),
    "parts charged apart": Mutation(parts_with_a_charge_each),
}
