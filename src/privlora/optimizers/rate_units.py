"""Learning rates in the size of the frozen weights, so that one rate serves models of other widths and weight scales.

Rules move every number of a module's release by about the rate where there is noise alone, so a step's length is the
rate times sqrt(d), whatever matrix W (m, n) it stands on. Multiplied by the module's weight unit

    u = ||W||_F / sqrt(d)        d: numbers that the noise of one step moves (Coordinates.moved_numbers)

a step of noise alone is as long as the rate times ||W||_F, in the norm of the numbers that move: the rate is the share
of each frozen matrix's norm by which the noise of one step moves it. W is public and never changes, so this is
post-processing of releases with public numbers, and epsilon is the same.
"""

from __future__ import annotations

from torch import Tensor

from privlora.coordinates import Coordinates

WeightUnits = list[Tensor] | None
"""(L,) a group, in the coordinates' dtype and on their device; None: steps are in entries, which is a unit of 1."""


def weight_units(coordinates: Coordinates) -> list[Tensor]:
    """The weight unit of each module. Of the norms of W0, also where a part of it is trained (spectral-split).

    Raises ConfigError where releases belong to no module, ModelError for a weight without a finite norm above 0.
    """
    numbers, adapter = coordinates.moved_numbers(), coordinates.adapter
    norms = adapter.weight_norms()
    pairs = zip(norms, numbers, strict=True)
    return [(of_group / d**0.5).to(coordinates.dtype).to(adapter.device) for of_group, d in pairs]


def scaled(t: Tensor, units: WeightUnits, group: int) -> Tensor:
    """A step of the modules of a group, (L, ...), in their units; as it is where there are none."""
    return t if units is None else t * units[group].view(-1, *[1] * (t.dim() - 1))
