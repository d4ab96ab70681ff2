"""The Gaussian mechanism on clipped sums of per-unit gradients (Abadi et al. 2016, in any coordinates)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from privlora.accounting.bands import split_noise_multiplier
from privlora.accounting.events import CyclicPoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.coordinates import Coordinates, ReleaseLaw
from privlora.errors import ConfigError, PrivacyError
from privlora.mechanisms.banded import CorrelatedNoise
from privlora.mechanisms.charges import Charges
from privlora.mechanisms.noise import NoiseSource
from privlora.mechanisms.noising import Noising
from privlora.mechanisms.release import Mechanism, PrivateSum, Release
from privlora.ranges import BATCHES, CLIP_NORMS, RAISED_SLACK, REDUCED_SLACK, SLACK, refuse_outside

# C_t stays within this factor of where it started, even if all gradients are zero or infinite.
_FARTHEST = 1e6


class AdaptiveClipNorm:
    """C_t, the norm to which units are clipped at step t. Public: a function of earlier noisy counts alone.

    C_{t+1} = C_t exp(-rate (f_t - quantile)), where f_t is the noisy share of the batch's norms that are <= C_t
    (Andrew et al. 2021, section 2). initial: C_1 > 0. quantile: in (0, 1). rate: the paper has 0.2, which is too slow
    for short runs.
    """

    def __init__(self, initial: float, quantile: float, rate: float = 0.5) -> None:
        self.initial = initial
        self.quantile = quantile
        self.rate = rate
        self.value = initial

    def update(self, share: float) -> None:
        """Move ``value`` by the noisy share of norms that were <= ``value``; with noise, it may lie outside [0, 1]."""
        moved = self.value * math.exp(self.rate * (self.quantile - min(max(share, 0.0), 1.0)))
        self.value = min(max(moved, self.initial / _FARTHEST), self.initial * _FARTHEST)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": torch.tensor(self.value, dtype=torch.float64)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.value = float(tensors["value"])


# flat: units above C are scaled down to it (Abadi et al. 2016). automatic: all units are scaled to about C (Bu et al.
# 2023). spectral: each unit's weak modules and directions are brought up (coordinates.evened), then as flat.
# per-module: each module's part above C / sqrt(modules) is scaled down to it (McMahan et al. 2018; He et al. 2023).
# normalized: all units above a public floor are scaled to C (Zou et al. 2026), where the coordinates know one.
CLIPPING = ("flat", "automatic", "spectral", "normalized", "per-module")
# Those that leave no clipping norm to adapt.
UNADAPTED = ("automatic", "normalized")

# Automatic clipping multiplies by C / (norm + this), so that small gradients count less (Bu et al. 2023, AUTO-S).
_STABILITY = 0.01

# Per module no part is scaled by more than this times what flat clipping would scale the unit by: a part that nearly
# cancels is mostly rounding, which company in a micro-batch changes (docs/sharp-edges.md).
MOST_RAISED = 30.0


def clipping_slack(adapter: LowRankAdapter, clipping: str) -> float:
    """s: a unit's gradient is clipped to norm C (1 - s), a little below C. Public."""
    if adapter.reduced_precision:
        return REDUCED_SLACK
    return RAISED_SLACK if clipping in ("spectral", "per-module") else SLACK


def takes_units_alone(clipping: str) -> bool:
    """Whether ``clipping`` enlarges what company in a micro-batch rounds, so that each unit must be computed alone."""
    return clipping in (*UNADAPTED, "per-module")


class GaussianMechanism(Mechanism):
    """sum_i g_i min(1, C / ||g_i||) + N(0, (sigma C)^2 I), divided by the public expected batch size b.

    Guarantee: adding or removing one unit moves the sum by at most C (replacing one, by 2 C), over all modules
    together; so one release is ``event``: a Gaussian mechanism of noise_multiplier sigma on a sampled batch. The ledger
    is charged before noise is drawn. ``clipping`` (CLIPPING) says how a unit's norm is bounded by C; what it does to a
    unit is a function of that unit alone.

    ``adaptive`` clips at C_t instead and scales by the public C / C_t, so that no unit's norm exceeds C and all steps
    have the same noise. The same release then holds a noisy count of the norms <= C_t, which gives C_{t+1}; ``event``
    covers both together (``split_noise_multiplier``).

    ``correlated`` draws the noise of each step so that it takes back a part of that of earlier steps; ``event`` is then
    of cyclic Poisson sampling, and a cycle of steps costs what one of it would (mechanisms.banded).

    | edge case                        | what happens                                            |
    |----------------------------------|---------------------------------------------------------|
    | no unit in the batch             | zero sum, full noise, charged                           |
    | a unit's gradient is NaN or inf  | that unit counts as zero                                |
    | a unit's gradient is zero        | it stays zero (never divided by its norm)               |
    | a norm that is not above zero    | that unit counts as zero, whatever its gradient         |
    | the ledger refuses               | its error passes through; nothing is released           |
    | release of step T + 1            | refused by the ledger                                   |
    """

    needs_examples = True

    def __init__(
        self,
        coordinates: Coordinates,
        *,
        clip_norm: float,
        event: StepEvent,
        expected_batch_size: float,
        ledger: Charges,
        noise: NoiseSource | None = None,
        clipping: str = "flat",
        adaptive: AdaptiveClipNorm | None = None,
        correlated: CorrelatedNoise | None = None,
    ) -> None:
        if clipping not in CLIPPING:
            raise ConfigError(f"unknown clipping {clipping!r}", fix=f"one of {', '.join(CLIPPING)}")
        if adaptive is not None and clipping in UNADAPTED:
            raise ConfigError(
                f"{clipping} clipping has no clipping norm to adapt",
                why="it scales every gradient to the same norm, so the noisy count would be paid for nothing",
                fix="use flat or spectral, or leave privacy.clip_quantile out",
            )
        if adaptive is not None and coordinates.draws is not None:
            raise ConfigError(
                "the clipping norm cannot be adapted with a random projection",
                why="the count is not projected, so the projection's event would not cover it",
                fix="leave privacy.clip_quantile out, or use another method",
            )
        refuse_outside("clip_norm", clip_norm, CLIP_NORMS)
        refuse_outside("expected_batch_size", expected_batch_size, BATCHES)
        if event.projections != coordinates.event_layers:
            raise PrivacyError(
                f"the event has the projections {event.projections}, the coordinates {coordinates.event_layers}",
                why="the noise was calibrated for another mechanism",
                fix="build the event with projections=coordinates.event_layers",
            )
        self._refuse_uncovered(event, adaptive, correlated, coordinates)
        plan = getattr(ledger, "plan", None)
        if plan is not None and (plan.clip_norm, plan.expected_batch_size) != (
            clip_norm,
            expected_batch_size,
        ):
            raise PrivacyError(
                f"clip_norm={clip_norm:g} and expected_batch_size={expected_batch_size:g} are not the ledger's plan, "
                f"{plan.clip_norm:g} and {plan.expected_batch_size:g}",
                why="the ledger would state what was not done",
                fix="give plan.clip_norm and plan.expected_batch_size",
            )
        self.coordinates = coordinates
        self.clip_norm = clip_norm
        self.event = event
        self.expected_batch_size = expected_batch_size
        self.noising = Noising(ledger, noise or NoiseSource(), correlated)
        self.clipping = clipping
        self.slack = clipping_slack(coordinates.adapter, clipping)
        if takes_units_alone(clipping):
            coordinates.adapter.one_by_one = True
        if self.noising.noise.secure:
            coordinates.begin()
        self.adaptive = adaptive
        self._sum_multiplier, self._count_std = event.noise_multiplier, 0.0
        if adaptive is not None:
            self._sum_multiplier, self._count_std = split_noise_multiplier(event.noise_multiplier)
        clipped_at = clip_norm if adaptive is None else adaptive.value
        coordinates.expect(ReleaseLaw(self._sum_multiplier, clipped_at, expected_batch_size, clipping))
        # Private: running count of the current batch; +1/2 for a unit with norm <= C_t, else -1/2.
        self._count: Tensor | float = 0.0

    @property
    def noise_std(self) -> float:
        """tau = sigma C / b, the standard deviation of the noise in each coordinate of a release.

        Of correlated noise that of the last release, or of the first one before there is any: tau times the norm of its
        row of C^-1.
        """
        white = self._sum_multiplier * self.clip_norm / self.expected_batch_size
        correlated = self.noising.correlated
        return white if correlated is None else white * correlated.row_norm

    def sensitivity(self, adjacency: str = "add-or-remove-one") -> float:
        if adjacency == "add-or-remove-one":
            return self.clip_norm
        if adjacency == "replace-one":
            return 2 * self.clip_norm
        raise PrivacyError(f"unknown adjacency {adjacency!r}", fix="add-or-remove-one or replace-one")

    @staticmethod
    def _refuse_uncovered(
        event: StepEvent,
        adaptive: AdaptiveClipNorm | None,
        correlated: CorrelatedNoise | None,
        coordinates: Coordinates,
    ) -> None:
        """Raise PrivacyError unless noise and sampling are those of one accounted mechanism."""
        sampling = event.sampling
        bands = sampling.classes if isinstance(sampling, CyclicPoissonSampling) else 1
        if bands != (1 if correlated is None else correlated.bands):
            raise PrivacyError(
                f"the noise has {1 if correlated is None else correlated.bands} bands, and batches are drawn by "
                f"{sampling.describe()}",
                why="the price of a cycle holds where a unit is drawn at most once in as many steps as there are bands",
                fix="sample from as many classes as the noise has bands; a single band is plain Poisson sampling",
            )
        if correlated is not None and (adaptive is not None or coordinates.draws is not None):
            raise PrivacyError(
                "correlated noise does not go with "
                + ("a random projection" if adaptive is None else "counts of norms"),
                why="the price of a cycle covers one vector a step, with the noise of its row of C^-1",
                fix="set privacy.bands=1, or choose another method and leave privacy.clip_quantile out",
            )

    def discard(self) -> None:
        super().discard()
        self._count = 0.0

    def accumulate(self, captured: Captured) -> None:
        captured = self.coordinates.encode(captured)
        if self.clipping == "spectral":
            evened = self.coordinates.evened(captured)
            weights = self._clip_weights(evened.norms_squared.sqrt(), evened.raw_squared.sqrt())
            self._add(self.coordinates.evened_sum(evened, weights))
            return
        parts = None
        if self.clipping == "per-module":
            parts = self.coordinates.module_norms_squared(captured).sqrt()
        norms = self._norms(captured) if parts is None else torch.linalg.vector_norm(parts, dim=0)
        captured.zero(~torch.isfinite(norms))
        weights = self._clip_weights(norms, norms) if parts is None else self._module_weights(parts, norms)
        self._add(self.coordinates.partial_sum(captured, weights))

    @property
    def pending(self) -> bool:
        return super().pending or float(self._count) != 0

    @property
    def place(self) -> str:
        clipped_at = self.clip_norm if self.adaptive is None else self.adaptive.value
        return f"{super().place} {self.clipping} {self.clip_norm} {clipped_at}"

    def _take(self) -> PrivateSum:
        count = float(self._count)
        return replace(super()._take(), count=count)

    def release(self, total: PrivateSum | None = None) -> Release:
        total = self._given(total)
        self._refuse_used_projection()
        charged = self.noising.charge(self.event)
        self.coordinates.released_on = self.coordinates.draws
        vector = charged.vector(
            total.vector,
            self.coordinates.standard_normal,
            scale=self._sum_multiplier * self.clip_norm,
            divisor=self.expected_batch_size,
            dtype=self.coordinates.dtype,
            device=self.coordinates.adapter.device,
        )
        clipped_at = self.clip_norm
        if self.adaptive is not None:
            clipped_at = self.adaptive.value
            count = torch.tensor([total.count], dtype=torch.float64)
            share = charged.tensor(
                count, scale=self._count_std, divisor=self.expected_batch_size, dtype=torch.float64
            )
            self.adaptive.update(0.5 + float(share))
        return Release(vector, self.noise_std, charged.step, clipped_at)

    def _refuse_used_projection(self) -> None:
        draw = self.coordinates.draws
        if draw is not None and draw == self.coordinates.released_on:
            raise PrivacyError(
                "this projection has served for a release before",
                why="the accounting holds for projections that are independent of all that was released",
                fix="call coordinates.advance() after each step: it draws the next projection",
            )

    def _clip_weights(self, norms: Tensor, lengths: Tensor) -> Tensor:
        """(units,) factors that rescale gradients of ``norms`` to ``lengths`` (x C / C_t if adaptive), capped at C."""
        finite = torch.isfinite(norms) & ~torch.isnan(lengths)
        bound = self.clip_norm * (1 - self.slack)
        if self.clipping == "automatic":
            lengths = bound * norms / (norms + _STABILITY)
        elif self.clipping == "normalized":
            lengths = bound * norms / norms.clamp_min(self.coordinates.norm_floor())
        if self.adaptive is not None:
            lengths = lengths * self._counted(lengths, finite)
        # A gradient without a norm that could bound it is not released.
        return torch.where(finite & (norms > 0), lengths.clamp(max=bound) / norms, 0.0)

    def _module_weights(self, parts: Tensor, norms: Tensor) -> Tensor:
        """(modules, units) factors that bring each module's part, of norm ``parts``, to C / sqrt(modules) at most.

        So a unit of ``norms`` (units,) has norm C at most, whatever its parts are.
        """
        finite = torch.isfinite(norms)
        whole = self.clip_norm * (1 - self.slack)
        most = (MOST_RAISED * whole / norms).clamp(max=self._counted(norms, finite))
        lengths = (most * parts).clamp(max=whole / len(parts) ** 0.5)
        return torch.where(finite & (parts > 0), lengths / parts, 0.0)

    def _counted(self, norms: Tensor, finite: Tensor) -> float:
        """C / C_t, once the finite ``norms`` (units,) are counted, where the clipping norm is adaptive; else 1."""
        if self.adaptive is None:
            return 1.0
        inside = (norms <= self.adaptive.value).double() - 0.5
        self._count = self._count + torch.where(finite & norms.isfinite(), inside, 0.0).sum()
        return self.clip_norm / self.adaptive.value

    def _norms(self, captured: Captured) -> Tensor:
        # The root of a negative square is NaN, and that unit counts as zero.
        return self.coordinates.norms_squared(captured).sqrt()
