"""Directions of texts in an embedding. That of a private record is computed from that record alone.

An embedding that pads texts to the longest of their batch, or whose matrix products take other paths for other numbers
of rows, gives a text another last digit beside other texts, and the nearest candidate can turn on it: one record would
then move the votes of others, and the sum by more than its own. So private texts are handed to the embedding one by
one, and what follows from each is computed without a matrix product. Then nothing of another record enters, and votes
need no slack for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privlora.errors import ConfigError

Floats = NDArray[np.float64]
Embedding = Callable[[Sequence[str]], Any]
"""From n texts (n, d) numbers, row i of text i. It keeps nothing from one call to the next."""


def record_directions(texts: Sequence[str], embed: Embedding) -> Floats:
    """PRIVATE. (n, d) float64, rows of norm 1, or zero for a text without a direction (see ``directions``).

    Each row is a function of its text alone: ``embed`` sees one text at a time. Raises ConfigError if it does not give
    one row, or rows of several lengths.
    """
    rows = [directions(embed([text])) for text in texts]
    if len({row.shape for row in rows}) > 1 or any(len(row) != 1 for row in rows):
        raise ConfigError(
            "an embedding did not give one row for a text, or rows of several lengths",
            fix="give one row of as many numbers for every text",
        )
    return np.concatenate(rows) if rows else np.zeros((0, 0))


def directions(embedded: Any) -> Floats:
    """(n, d) float64: each row at norm 1. A row that is zero or not finite, or whose norm is, becomes zero.

    embedded: (n, d) numbers.
    """
    rows = np.array(embedded, dtype=np.float64)
    if rows.ndim != 2:
        raise ConfigError(
            f"an embedding gave numbers of shape {rows.shape}", fix="give one row of numbers a text"
        )
    made = np.zeros(rows.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for row, direction in zip(rows, made, strict=True):
            norm = np.sqrt(np.square(row).sum())
            if 0 < norm < np.inf:
                direction[:] = row / norm
    return made
