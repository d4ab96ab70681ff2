"""What every bound here checks: what happens to the random matrix M, and that sizes are sizes."""

from __future__ import annotations

from enum import Enum

from privlora.errors import PrivacyError


class Use(Enum):
    """How M is drawn and who sees it. A bound takes it as an argument, so that each caller has to say it."""

    FRESH_SECRET = "drawn for one release, independently of data and history, and never shown"
    FRESH_PUBLIC = "drawn for one release, independently of data and history, and shown with the output"
    REUSED = "used for more than one release, as the frozen A of LoRA-FA is"


_WHY = {
    Use.FRESH_PUBLIC: "given M the output is a fixed function of the data, up to noise that this bound does not count",
    Use.REUSED: "after the first release the next gradient may lie in M's range entirely, and several vectors under "
    "one M make a matrix, whose release without noise is not private (Proposition 2)",
}


def require(statement: str, use: Use, *allowed: Use) -> None:
    """Raise PrivacyError unless `statement` (its name, for the message) holds for this `use` of M."""
    if use not in allowed:
        raise PrivacyError(
            f"{statement} does not hold for a projection that is {use.value}",
            why=_WHY[use],
            fix="draw a fresh projection for each release, or clip after projecting, which holds for any M",
        )


def in_range(holds: bool, **values: object) -> None:
    """Raise PrivacyError, with the names of ``values``, unless they are in the range that a docstring states."""
    if not holds:
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        raise PrivacyError(f"{named} is out of range", fix="see the docstring for what holds")


def check_sizes(**sizes: int) -> None:
    """Raise PrivacyError unless every size is a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PrivacyError(f"{name}={value!r} is not a positive integer", fix="give a whole number >= 1")
