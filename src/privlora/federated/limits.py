"""What an owner of records lets federations spend on them, whatever a server's settings say."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from privlora.accounting import Plan
from privlora.accounting.accountants import epsilon
from privlora.errors import ConfigError, PrivacyError


@dataclass(frozen=True)
class Limits:
    """The most that all federations of one client's folder may release together.

    What they plan is added up (basic composition of epsilon and of delta), whether it was released or not.

    Raises ConfigError for numbers that bound nothing.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < float("inf") and 0 < self.delta < 1):
            raise ConfigError(
                f"limits epsilon={self.epsilon:g} and delta={self.delta:g} bound nothing",
                fix="give an epsilon above 0, and a delta between 0 and 1",
            )

    def admit(self, plan: Plan | None, earlier: Iterable[Plan]) -> None:
        """Raise PrivacyError unless ``plan`` fits in beside those that were agreed to ``earlier``.

        plan: of this client's ledger; None where it has none, because nothing is private or the server adds the noise.
        """
        if plan is None or plan.insecure_noise:
            raise PrivacyError(
                "the server's settings leave this client without a guarantee of its own",
                why="its owner has set limits, and what this federation releases would have none",
                fix="agree on settings under which the client adds noise, or remove the limits",
            )
        plans = [plan, *earlier]
        spent = sum(epsilon(one.events(one.steps), one.delta, adjacency=one.adjacency) for one in plans)
        delta = sum(one.delta for one in plans)
        # A calibrated epsilon may exceed its target in the last digits.
        if spent > self.epsilon * (1 + 1e-6) or delta > self.delta * (1 + 1e-6):
            raise PrivacyError(
                f"this federation and {len(plans) - 1} earlier ones plan epsilon={spent:.4g} at delta={delta:.2g}, "
                f"and the owner allows {self.epsilon:g} at {self.delta:g}",
                why="everything that was released of the same records adds up",
                fix="agree on less, or raise the limits",
            )


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits for its turn: two runs that begin at once would each keep to limits that they exceed together."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / "joining.lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
