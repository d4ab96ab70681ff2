"""Relative learning rates: one rate serves models of other widths, depths and weight scales.

Rules move every number of a module's release by about the rate where there is noise alone, so a step's length is the
rate times sqrt(d), whatever matrix W (m, n) it stands on. Multiplied by the module's weight unit

    u = ||W||_F / sqrt(d M)      d: numbers that the noise of one step moves (Coordinates.moved_numbers); M: modules

a step of noise alone moves each module by the rate over sqrt(M) times ||W||_F, in the norm of the numbers that move. So
the rate is the root of the sum over modules of the squares of those shares. What small moves of modules do to a model's
predictions adds up (docs/choosing.md), hence the root. W is public and never changes, so this is post-processing of
releases with public numbers, and epsilon is the same.

Along the span of public gradients in tangent coordinates a step goes where gradients agree, and not each module's own
way as noise does. There the unit of all modules is 1 / sqrt(D), with D the dimension: the rate is the step's length.
"""

from __future__ import annotations

from torch import Tensor

from privlora.coordinates import Coordinates

# Fraction of the peak at relative time t in [0, 1] after the warm-up.
WeightUnits = list[Tensor] | None
"""(L,) a group, in the coordinates' dtype and on their device; None: steps are in entries, which is a unit of 1."""


def weight_units(coordinates: Coordinates) -> list[Tensor]:
    """The weight unit of each module. Of the norms of W0, also where a part of it is trained (spectral-split).

    Raises ConfigError where releases belong to no module, ModelError for a weight without a finite norm above 0.
    """
    device = coordinates.adapter.device
    return [unit.to(coordinates.dtype).to(device) for unit in coordinates.weight_units()]


def scaled(t: Tensor, units: WeightUnits, group: int) -> Tensor:
    """A step of the modules of a group, (L, ...), in their units; as it is where there are none."""
    return t if units is None else t * units[group].view(-1, *[1] * (t.dim() - 1))
