"""Masks: both ends make the same stream, and it is the cipher's, whatever the pieces it is made in."""

import functools
import operator

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from privlora.errors import RunError
from privlora.federated.secure import shares
from privlora.federated.secure.keys import digest, new_key, public_key
from privlora.federated.secure.masks import check_vector, pair_keys, ring_type, self_key, shift

CONTEXT = bytes(32)
KINDS = (np.uint32, np.uint64)


def pair():
    first, second = new_key(), new_key()
    added, _ = pair_keys(CONTEXT, first, "a", {"b": public_key(second)})
    _, taken = pair_keys(CONTEXT, second, "b", {"a": public_key(first)})
    return added, taken


@pytest.mark.parametrize("kind", KINDS)
def test_both_ends_of_a_pair_are_equal_and_opposite(kind):
    added, taken = pair()
    mine, theirs = np.zeros(1000, kind), np.zeros(1000, kind)
    shift(mine, added)
    shift(theirs, taken=taken)
    assert mine.all()
    assert not (mine + theirs).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 65536 - 1, 65536, 2 * 65536 + 7])
def test_a_mask_is_the_key_stream_of_the_cipher(kind, length):
    key, other = bytes(range(32)), bytes(range(1, 33))
    start = np.arange(length).astype(kind)
    vector = start.copy()
    shift(vector, [key], [other])
    zeros = bytes(length * vector.itemsize)
    streams = [
        np.frombuffer(Cipher(algorithms.ChaCha20(one, bytes(16)), None).encryptor().update(zeros), kind)
        for one in (key, other)
    ]
    np.testing.assert_array_equal(vector, start + streams[0] - streams[1])
    shift(vector, [other], [key])
    np.testing.assert_array_equal(vector, start)


def test_pair_keys_have_256_bits():
    keys = [int.from_bytes(pair()[0][0], "big") for _ in range(100)]
    assert functools.reduce(operator.or_, keys) == 2**256 - 1
    assert functools.reduce(operator.and_, keys) == 0


def test_seeds_have_128_bits():
    seeds = [int.from_bytes(shares.new_seed(), "big") for _ in range(100)]
    assert functools.reduce(operator.or_, seeds) == 2**128 - 1
    assert functools.reduce(operator.and_, seeds) == 0


def test_every_client_has_keys_of_its_own():
    seed = shares.new_seed()
    keys = {self_key(context, name, seed) for context in (CONTEXT, bytes([1]) * 32) for name in ("a", "b")}
    assert len(keys) == 4


def test_digests_of_parts_that_read_alike_differ():
    lists = [("a", "b", "c"), ("a", "bc"), ("a", b"b", "c"), ("a", "b", "c", ""), ("ab", "c")]
    lists += [("a", 1), ("a", "1")]
    assert len({digest(*parts) for parts in lists}) == len(lists)


@pytest.mark.parametrize("length", [3, 5])
def test_vectors_are_checked(length):
    with pytest.raises(RunError):
        check_vector(np.zeros(4, np.uint32), 32, length)
    with pytest.raises(RunError):
        check_vector(np.zeros(2 * length, np.uint32)[::2], 32, length)
    with pytest.raises(RunError):
        ring_type(16)


# --- shares ---


def test_any_threshold_of_shares_gives_both_secrets():
    seed, key = shares.new_seed(), new_key()
    parts = shares.split(seed, key, 3, 5)
    for chosen in ((0, 1, 2), (1, 3, 4), (0, 2, 3, 4)):
        assert shares.join_seed({i: parts[i].seed for i in chosen}, 3) == seed
        assert shares.join_key({i: parts[i].key for i in chosen}, 3) == key
    assert shares.join_seed({i: parts[i].seed for i in (0, 1)}, 3) != seed
    assert shares.join_key({i: parts[i].key for i in (0, 1)}, 3) != key
    assert key not in {part.key for part in parts}


def test_letters_have_their_stated_size():
    letter = shares.seal(shares.Share(bytes(16), bytes(32)), bytes(32))
    assert len(letter) == shares.LETTER == 64
    assert shares.unseal(letter, bytes(32), "a").to_bytes() == bytes(48)
