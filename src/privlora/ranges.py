"""Sizes of public numbers within which what is computed is what is accounted for.

Outside of them float32 and float64 underflow: the noise sigma C / b becomes zero while a gradient does not, or the
square of a gradient's entry does, so that its norm is not what is clipped. And how many releases can be accounted for
while somebody waits.
"""

from __future__ import annotations

from typing import Final

from privlora.errors import PrivacyError

CLIP_NORMS: Final = (1e-9, 1e9)
"""Of C. Squares of gradients that float32 loses are below 1e-38, and C^2 is not."""
BATCHES: Final = (1e-6, 1e12)
"""Of b, in units."""
NOISE_MULTIPLIERS: Final = (1e-6, 1e9)
"""Of sigma, with any promise left."""
MOST_STEPS: Final = 1_000_000
"""Of one run: the noise for more releases takes many minutes to find, and each has a line in a ledger."""
MOST_PHASES: Final = 8
"""Of one run, with noise of their own: epsilon of each takes up to some seconds."""
MOST_CLIENTS: Final = 100_000
MOST_TURNS: Final = 2 * 10**6
"""Of a federation."""
MOST_BANDS: Final = 256
"""Of correlated noise."""


# Norms are rounded in float32, and so are gradients of thousands of copies when one record leaves their micro-batch: by
# 8.4e-5 C of the sum in the worst of 200 tries (docs/sharp-edges.md).
SLACK: Final = 3e-4
# Roots, and bounds of single modules, make small gradients larger, and the rounding error of float32 with them.
RAISED_SLACK: Final = 0.01
# Below float32 a gradient's rounding depends a little on who else is in its micro-batch, so a unit that leaves moves
# the sum by more than its own part: by less than this in every measurement (docs/sharp-edges.md).
REDUCED_SLACK: Final = 0.02
SLACKS: Final = (0.0, SLACK, RAISED_SLACK, REDUCED_SLACK)
"""By which part below C a unit's gradient is clipped; 0 where nothing is rounded."""

NEAR_COPY_RUN: Final = 5
"""Words of the runs by which two texts are compared: of a near copy half of them stand in the other text."""


def refuse_outside(name: str, value: float, range_: tuple[float, float]) -> None:
    """Raises PrivacyError for a value that is no number within ``range_``."""
    low, high = range_
    if not low <= value <= high:
        raise PrivacyError(
            f"{name}={value} is not between {low:g} and {high:g}",
            why="the noise is calibrated to it, and beyond these sizes the noise or the gradients underflow",
            fix=f"set privacy.{name}",
        )
