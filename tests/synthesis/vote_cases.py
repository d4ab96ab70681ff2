"""Texts of letters and an embedding that counts them, for votes whose right outcome can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privlora.accounting import Ledger, Plan, PoissonSampling, StepEvent
from privlora.data.units import Units
from privlora.synthesis.directions import record_directions
from privlora.synthesis.votes import Encoder, Voters

LETTERS = "abcdefgh"
TINY = 1e-6  # the least noise that there may be: what follows is as without any


def count_letters(texts: Sequence[str]) -> NDArray[np.float64]:
    """(n, 8): how often each letter stands in a text."""
    return np.array([[text.count(letter) for letter in LETTERS] for text in texts], dtype=np.float64).reshape(
        len(texts), len(LETTERS)
    )


def voters(
    texts: Sequence[str], encode: Encoder, owners: Sequence[int] | None = None, **settings: Any
) -> Voters:
    """One unit a text, or those of ``owners``."""
    number = np.arange(len(texts)) if owners is None else np.array(owners, dtype=np.int64)
    return Voters(record_directions(texts, count_letters), Units(number), encode, insecure_seed=4, **settings)


def votes_plan(rounds: int, sigma: float = TINY, **changes: Any) -> Plan:
    """Every unit votes in every round; the noise can be replayed."""
    fields: dict[str, Any] = {
        "phases": ((StepEvent(PoissonSampling(1.0), sigma), rounds),),
        "delta": 1e-5,
        "target_epsilon": None,
        "adjacency": "add-or-remove-one",
        "unit": "record",
        "records_per_user": None,
        "clip_norm": 1.0,
        "expected_batch_size": 4.0,
        "method": "aug-pe",
        "dataset": "letters",
        "insecure_noise": True,
    }
    return Plan(**{**fields, **changes})


def ledger_of(folder: Path, rounds: int, **changes: Any) -> Ledger:
    """A new ledger, or the one that is there."""
    path = folder / "ledger.jsonl"
    return Ledger.open(path) if path.exists() else Ledger.create(path, votes_plan(rounds, **changes))


class Doubling:
    """Varies a text by doubling its last letter; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def random(self, count: int) -> list[str]:
        return [LETTERS[i % len(LETTERS)] for i in range(count)]

    def vary(self, texts: Sequence[str]) -> list[str]:
        self.asked.append(list(texts))
        return [text + text[-1] for text in texts]
