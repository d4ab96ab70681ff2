"""Which clients train in which round: by a public schedule, each equally often; or drawn in secret."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from privlora.data.sampling import PoissonSampler
from privlora.randomness import counter_generator


@lru_cache(maxsize=4)
def timetable(names: tuple[str, ...], per_round: int, rounds: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """All of ``participants``: by it a client knows when it may be asked, and together with whom."""
    return tuple(map(tuple, participants(names, per_round, rounds, seed)))


def participants(names: Sequence[str], per_round: int, rounds: int, seed: int) -> Iterator[list[str]]:
    """The clients of rounds 1, 2, … in the order of ``names``: those that trained least so far, ties by a public draw.

    No client is drawn more often than ceil(rounds * per_round / len(names)) times, and any two differ by one at most.
    """
    taken = dict.fromkeys(names, 0)
    for number in range(1, rounds + 1):
        draws = dict(zip(names, counter_generator(seed, stream=number).random(len(names)), strict=True))
        chosen = set(sorted(names, key=lambda name: (taken[name], draws[name]))[:per_round])
        for name in chosen:
            taken[name] += 1
        yield [name for name in names if name in chosen]


def secret_participants(names: Sequence[str], sampler: PoissonSampler, rounds: int) -> Iterator[list[str]]:
    """PRIVATE. The clients of each round in the order of ``names``, perhaps none: each joins by a coin of its own.

    sampler: over the clients; what it states is what a trusted server's releases are charged with.
    """
    for _ in range(rounds):
        yield [names[place] for place in sorted(sampler.draw())]
