"""Public numbers for a first run, from a number of units that is rounded before anything follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from privlora.config.auto import VERY_NOISY, run_sizes
from privlora.rounding import to_one_digit

FEW: Final = 2000
"""Up to so many units public texts may teach more (docs/few-records.md)."""


@dataclass(frozen=True)
class Numbers:
    """n: units as they are published. delta: a power of ten, as YAML. batch: expected units in a step."""

    n: int
    delta: str
    batch: int
    steps: int

    @property
    def few(self) -> bool:
        return self.n <= FEW

    @property
    def noisy(self) -> bool:
        return self.n <= VERY_NOISY


def numbers_for(units: int) -> Numbers:
    """units: the true number, of which only its first digit is used."""
    n = to_one_digit(units)
    steps, batch = run_sizes(n)
    return Numbers(n, delta_for(n), round(batch), steps)


def rounds_for(steps: int) -> tuple[int, int]:
    """Of a federation: how many rounds of how many local steps make about so many steps of each client.

    >>> rounds_for(10), rounds_for(67), rounds_for(1)
    ((5, 2), (17, 4), (1, 1))
    """
    local = min(steps, 4 if steps >= 20 else 2)
    return -(-steps // local), local


def delta_for(n: int) -> str:
    """The largest power of ten that is at most 1 / (10 N) for every N that is n in one digit.

    >>> delta_for(10_000), delta_for(4000), delta_for(1)
    ('1e-6', '1e-5', '1e-1')
    """
    # N rounded up: a smaller delta promises more, and of 1,499, which are 1,000 here, 1e-4 is above a tenth of 1 / N.
    size = 10 ** (len(str(n)) - 1)
    most = n + size - 1 - size // 2
    exponent = 1
    while 10**exponent < 10 * most:
        exponent += 1
    return f"1e-{exponent}"


LONGEST: Final = 2048
"""Tokens of a record that are proposed at most."""


def length_for(tokens: float, positions: int | None) -> int:
    """A power of two from 64 to 2048 that is at least ``tokens``, and at most what the model reads.

    >>> length_for(100, None), length_for(9000, None), length_for(700, 512)
    (128, 2048, 512)
    """
    length = 64
    while length < min(tokens, LONGEST):
        length *= 2
    return length if positions is None else min(length, positions)
