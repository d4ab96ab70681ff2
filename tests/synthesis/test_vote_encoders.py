"""How records vote: for true neighbours, each unit by itself, and never with more than norm 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vote_cases import TINY, count_letters, voters

from privlora.accounting import PoissonSampling, StepEvent
from privlora.data.units import Units
from privlora.errors import ConfigError
from privlora.mechanisms import NoiseSource, VoteMechanism
from privlora.mechanisms.charges import Uncharged
from privlora.synthesis.directions import Floats, directions, record_directions
from privlora.synthesis.votes import Encoder, NearestVotes, Voters, similarity_scores

CANDIDATES = ["aa", "ab", "b", "c", "cccd", "gh"]
ENCODERS = [NearestVotes(1), NearestVotes(3), similarity_scores]


def of(texts: Sequence[str]) -> Floats:
    return directions(count_letters(texts))


def test_each_record_votes_for_its_true_neighbours() -> None:
    """All pairwise distances by hand; of those that tie but for rounding, either."""
    records = ["aaa", "aab", "bbbb", "cd", "ghgh", "gab"]
    for k in (1, 2, 4):
        for text in records:
            vote = NearestVotes(k)(of([text]), of(CANDIDATES))
            apart = np.linalg.norm(of(CANDIDATES) - of([text]), axis=1).round(12)
            assert sorted(apart[vote > 0]) == sorted(apart)[:k]
            assert set(vote[vote > 0]) == {k**-0.5}
            assert np.linalg.norm(vote) == pytest.approx(1)


def test_the_first_of_equally_near_candidates_wins() -> None:
    for k in (1, 2):
        vote = NearestVotes(k)(of(["a"]), of(["b", "a", "aa", "a"]))
        assert np.flatnonzero(vote).tolist() == [1, 2][:k]


def test_distances_are_to_means_of_directions_not_to_their_line() -> None:
    """With look-ahead candidates are shorter than 1: one in the right direction may still be far away."""
    candidates = np.array([[0.05, 0.0], [0.8, 0.55]])
    assert NearestVotes(1)(np.array([[1.0, 0.0]]), candidates).tolist() == [0.0, 1.0]


def exact(record: Floats, candidates: Floats) -> list[float]:
    """Products one number at a time."""
    return [math.fsum(a * b for a, b in zip(record, row, strict=True)) for row in candidates]


@pytest.mark.parametrize("number", [5, 8, 30])
@pytest.mark.parametrize("k", [1, 3])
def test_the_nearest_are_those_of_exact_distances(k: int, number: int) -> None:
    """Signed directions in 8 dimensions, and candidates of any length up to 1, as means of several are."""
    draw = np.random.default_rng(number)
    records = directions(draw.standard_normal((40, 8)))
    candidates = directions(draw.standard_normal((number, 8))) * draw.uniform(0.1, 1, (number, 1))
    for record in records:
        products, squares = exact(record, candidates), [sum(exact(row, row[None])) for row in candidates]
        apart = [1 - 2 * product + square for product, square in zip(products, squares, strict=True)]
        vote = NearestVotes(k)(record[None], candidates)
        assert set(np.flatnonzero(vote)) == set(np.argsort(apart)[:k])


@pytest.mark.parametrize("number", [5, 8, 30])
def test_scores_are_those_of_exact_cosines(number: int) -> None:
    draw = np.random.default_rng(number)
    records, candidates = (directions(draw.standard_normal((n, 8))) for n in (40, number))
    for pair in records.reshape(20, 2, 8):
        cosines = np.sum([exact(record, candidates) for record in pair], axis=0)
        centred = cosines - math.fsum(cosines) / number
        expected = centred / math.sqrt(math.fsum(centred**2))
        np.testing.assert_allclose(similarity_scores(pair, candidates), expected, rtol=0, atol=1e-12)


def test_a_vote_does_not_know_how_its_record_lies_in_memory() -> None:
    draw = np.random.default_rng(3)
    (record,), candidates = (directions(draw.standard_normal((n, 257))) for n in (1, 30))
    beside = np.repeat(record[:, None], 3, axis=1).T  # its numbers lie three apart
    assert not beside[1].flags.c_contiguous
    for encode in ENCODERS:
        assert encode(beside[1:2], candidates).tobytes() == encode(record[None], candidates).tobytes()


def test_what_has_no_direction_takes_no_part() -> None:
    for encode in ENCODERS:
        assert not encode(of(["", "xyz"]), of(CANDIDATES)).any()
        assert not encode(of(["a"])[:0], of(CANDIDATES)).any()
        both = encode(of(["", "ab"]), of(CANDIDATES))
        assert np.array_equal(both, encode(of(["ab"]), of(CANDIDATES)))
    # "h" is at right angles to all candidates, so a candidate at zero would be the nearest.
    assert NearestVotes(1)(of(["h"]), of(["", "a"])).tolist() == [0.0, 1.0]
    assert NearestVotes(2)(of(["h"]), of(["", "a"])).all()


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="k=0"):
        NearestVotes(0)
    with pytest.raises(ConfigError, match="3 numbers, records of 8"):
        list(voters(["a"], NearestVotes(1)).votes(np.eye(3)))


def test_more_neighbours_than_candidates_are_all_of_them() -> None:
    """No error, which would come only where somebody votes."""
    vote = NearestVotes(3)(of(["a"]), of(["a", "b"]))
    assert vote.tolist() == [3**-0.5] * 2


def test_scores_are_standardised_similarities() -> None:
    scores = similarity_scores(of(["ab", "c"]), of(CANDIDATES))
    exact = (of(CANDIDATES) @ of(["ab", "c"]).T).sum(axis=1)
    standardised = (exact - exact.mean()) / exact.std()
    np.testing.assert_allclose(scores, standardised / len(CANDIDATES) ** 0.5, atol=1e-12)
    assert np.linalg.norm(scores) == pytest.approx(1)


def test_rounding_is_not_blown_up_to_a_score() -> None:
    """A record as near to one candidate as to any other says nothing."""
    alike = np.array([[1.0, 0.0], [1.0, 1e-9], [1.0, -1e-9]])
    assert np.abs(similarity_scores(np.array([[0.6, 0.8]]), alike)).max() < 2e-3
    assert not similarity_scores(np.array([[0.6, 0.8]]), alike[[0, 0, 0]]).any()


# --- units and their sum ---

WORDS = st.text("abcdefghx", max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(WORDS, max_size=8),
    owners=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    candidates=st.lists(WORDS, min_size=3, max_size=6),
    encode=st.sampled_from(ENCODERS),
)
def test_no_unit_moves_the_sum_by_more_than_one(
    texts: list[str], owners: list[int], candidates: list[str], encode: Encoder
) -> None:
    """By brute force: users of several records, of none that can be read, and repeated ones."""
    owner_of = dict(zip(range(len(texts)), owners, strict=False))
    users = sorted(set(owner_of.values()))

    def summed(present: Sequence[int]) -> Floats:
        kept = [i for i in owner_of if owner_of[i] in present]
        numbers = [list(present).index(owner_of[i]) for i in kept]
        voting = voters([texts[i] for i in kept], encode, numbers)
        return mechanism().clipped_sum(voting.votes(of(candidates)), len(candidates))

    everyone = summed(users)
    for user in users:
        moved = everyone - summed([u for u in users if u != user])
        assert np.square(moved).sum() <= 1.0
        # The user's own part and nothing else: batch-mates have no influence on it, in any bit.
        assert np.array_equal(moved, summed([user]))


def mechanism(sigma: float = TINY) -> VoteMechanism:
    return VoteMechanism(
        event=StepEvent(PoissonSampling(1.0), sigma),
        divisor=1.0,
        ledger=Uncharged(),
        noise=NoiseSource(insecure_seed=1),
    )


@pytest.mark.parametrize("encode", ENCODERS)
def test_a_user_of_many_records_has_one_vote(encode: Encoder) -> None:
    for texts in (["ab"] * 50, ["aa", "b", "c", "gh"] * 5, ["ab"]):
        voting = voters(texts, encode, [0] * len(texts))
        total = mechanism().clipped_sum(voting.votes(of(CANDIDATES)), len(CANDIDATES))
        assert np.linalg.norm(total) == pytest.approx(1.0, abs=1e-6)
        assert np.linalg.norm(total) <= 1.0


@pytest.mark.parametrize("encode", ENCODERS)
def test_no_bit_of_a_vote_depends_on_other_records(encode: Encoder) -> None:
    """With directions whose products round: 257 numbers, and any number of other records."""
    draw = np.random.default_rng(2)
    records, candidates = (directions(draw.standard_normal((n, 257))) for n in (40, 30))
    alone = [encode(records[i : i + 1].copy(), candidates).tobytes() for i in range(40)]
    for chosen in (range(40), range(39, -1, -1), range(3, 11)):
        voting = Voters(records[list(chosen)], Units(np.arange(len(chosen))), encode, insecure_seed=1)
        assert {vote.tobytes() for vote in voting.votes(candidates)} == {alone[i] for i in chosen}


def test_the_noisy_histogram_finds_the_candidates_that_records_are_near() -> None:
    texts = ["aa"] * 6 + ["cd", "ccd", "cccdd", "ccccd"] + ["gh", "gg"] + [""] * 3
    voting = voters(texts, NearestVotes(1))
    ((mean,),) = mechanism().release(voting.votes(of(CANDIDATES)), len(CANDIDATES)).vector
    assert mean.numpy().round(3).tolist() == [6, 0, 0, 0, 4, 2]


def test_without_a_unit_nobody_votes() -> None:
    voting = Voters(record_directions([], count_letters), Units(np.zeros(0, dtype=np.int64)), NearestVotes(1))
    assert list(voting.votes(of(CANDIDATES))) == []


def test_voters_are_drawn_as_they_say() -> None:
    texts = ["aa"] * 400
    assert voters(texts, NearestVotes(1)).sampling == PoissonSampling(1.0)
    assert len(list(voters(texts, NearestVotes(1)).votes(of(CANDIDATES)))) == 400
    sampled = voters(texts, NearestVotes(1), sample_rate=0.25)
    assert sampled.sampling == PoissonSampling(0.25)
    sizes = [len(list(sampled.votes(of(CANDIDATES)))) for _ in range(30)]
    assert len(set(sizes)) > 5
    assert np.mean(sizes) == pytest.approx(100, abs=8)


def test_a_bound_on_a_users_records_is_kept() -> None:
    units = Units(np.zeros(40, dtype=np.int64), max_records_per_unit=2)
    records = record_directions(["aa", "b"] * 20, count_letters)
    (vote,) = Voters(records, units, NearestVotes(1), insecure_seed=3).votes(of(CANDIDATES))
    assert vote.sum() == pytest.approx(2)
