"""Sums are exact whoever drops out, while enough stay; else they are void."""

import itertools

import numpy as np
import pytest
from secure_cases import TURN, Federation

from privlora.errors import PrivacyError, RunError
from privlora.federated.secure.collector import Collector
from privlora.federated.secure.participant import Participant
from privlora.federated.secure.wire import Terms

PHASES = 4


def outcome(federation, leaves):
    """Whether the sum has to be known, when client i drops out before answer ``leaves[i]`` (4: never)."""
    return all(
        sum(leave > phase for leave in leaves) >= federation.terms.threshold for phase in range(PHASES)
    )


def check(clients, leaves, **settings):
    federation = Federation(clients, **settings)
    lost = [
        {n for n, leave in zip(federation.names, leaves, strict=True) if leave == phase}
        for phase in range(PHASES)
    ]
    if outcome(federation, leaves):
        total = federation.run(*lost)
        stayed = [name for name, leave in zip(federation.names, leaves, strict=True) if leave > 1]
        assert list(federation.collector.survivors) == stayed
        np.testing.assert_array_equal(total, federation.expected(stayed))
    else:
        with pytest.raises(RunError, match="is void"):
            federation.run(*lost)


def test_any_drop_out_of_three():
    for leaves in itertools.product(range(PHASES + 1), repeat=3):
        check(3, leaves)


@pytest.mark.parametrize("clients", range(3, 13))
def test_drop_outs_of_many(clients):
    draws = np.random.default_rng(clients)
    check(clients, [PHASES] * clients)
    for _ in range(4):
        leaves = draws.choice(PHASES + 1, clients, p=[0.08] * 4 + [0.68])
        check(clients, leaves, bits=int(draws.choice([32, 64])))


@pytest.mark.parametrize("phase", range(PHASES))
@pytest.mark.parametrize(("stay", "known"), [(4, True), (3, False)])
def test_the_threshold_is_where_it_is_said_to_be(phase, stay, known):
    leaves = [PHASES] * stay + [phase] * (6 - stay)
    assert outcome(Federation(6), leaves) is known
    check(6, leaves)


def test_a_client_is_a_new_process_for_each_message():
    for lost in ([], ["c01"]):
        federation = Federation(4, restart=True)
        total = federation.run((), lost, (), ())
        np.testing.assert_array_equal(total, federation.expected(federation.collector.survivors))


def test_steps_come_once_and_in_their_order():
    federation = Federation(2)
    with pytest.raises(RunError, match="out of order"):
        federation.ask_vectors()
    federation.share()
    with pytest.raises(RunError, match="twice"):
        federation.share()
    federation = Federation(2)
    np.testing.assert_array_equal(federation.run(), federation.expected(federation.names))
    with pytest.raises(RunError, match="is over"):
        federation.collector.total()


def test_a_void_sum_stays_void():
    federation = Federation(5)
    federation.share()
    federation.mask(["c00", "c01", "c02"])
    with pytest.raises(RunError, match="2 of 5 clients sent a vector, 3 have to"):
        federation.agree()
    with pytest.raises(RunError, match="out of order"):
        federation.collector.ask_agreement()
    with pytest.raises(RunError, match="out of order"):
        federation.collector.total()


def test_a_later_sum_of_a_round_loses_nobody():
    federation = Federation(4, whole=True)
    np.testing.assert_array_equal(federation.run(), federation.expected(federation.names))
    for lost in ([["c00"], [], [], []], [[], ["c00"], [], []]):
        with pytest.raises(RunError, match="is void"):
            Federation(4, whole=True).run(*lost)
    # All vectors came, so nothing is lost with those who leave afterwards.
    federation = Federation(4, whole=True)
    np.testing.assert_array_equal(federation.run((), (), ["c00"], ()), federation.expected(federation.names))


@pytest.mark.parametrize("phase", ["keys", "survivors"])
def test_clients_refuse_a_later_sum_that_lost_somebody(phase):
    federation = Federation(4, whole=True)
    federation.collector = Collector(federation.terms)  # a server that does not mind
    if phase == "keys":
        federation.share(["c03"])
        with pytest.raises(PrivacyError, match="3 clients left"):
            federation.mask()
    else:
        federation.share()
        federation.mask(["c03"])
        with pytest.raises(PrivacyError, match="without all clients of the earlier one"):
            federation.agree()


def test_clients_refuse_a_later_sum_over_others():
    federation = Federation(4)
    request = federation.collector.ask_shares()["c00"]
    with pytest.raises(PrivacyError, match="over other clients than the earlier one"):
        federation.begin("c00", request, earlier=[*federation.names, "c04"])


def test_wrong_replies_do_not_count():
    federation = Federation(4)
    federation.share()
    taken = federation.collector
    requests = federation.ask_vectors()
    replies = {name: federation.answer_mask(name, request) for name, request in requests.items()}
    right = replies["c00"]
    for wrong in (
        right | {"vector": right["vector"][:-1]},
        right | {"vector": right["vector"].astype(np.uint64)},
        right | {"vector": right["vector"].astype(np.float32) * np.nan},
        right | {"vector": right["vector"].reshape(1, -1)},
        right | {"vector": right["vector"].tolist()},
        right | {"context": bytes(32)},
        right | {"context": right["context"][:-1]},
        right | {"loss": 1},
        {"vector": right["vector"]},
    ):
        with pytest.raises(RunError):
            taken.take("mask", "c00", wrong)
    with pytest.raises(RunError, match="without being asked"):
        taken.take("share", "c00", right)
    with pytest.raises(RunError, match="without being asked"):
        taken.take("mask", "nobody", right)
    for name in ("c01", "c02", "c03"):
        taken.take("mask", name, replies[name])
    with pytest.raises(RunError, match="twice"):
        taken.take("mask", "c01", replies["c01"])
    federation.agree()
    federation.unmask()
    np.testing.assert_array_equal(taken.total(), federation.expected(["c01", "c02", "c03"]))


@pytest.mark.parametrize(("field", "lost", "owner"), [("seeds", (), "self-mask"), ("keys", ["c04"], "key")])
def test_wrong_shares_are_seen(field, lost, owner):
    federation = Federation(5)
    federation.share()
    federation.mask(lost)
    federation.agree()
    for name, request in federation.collector.ask_unmasking().items():
        reply = federation.person(name).unmask(request)
        if name == "c00":
            # The first byte of an X25519 key has bits that do not count. Of the seeds, the second is that of c01.
            place = 21 if field == "seeds" else 5
            reply[field] = reply[field][:place] + bytes([reply[field][place] ^ 1]) + reply[field][place + 1 :]
        if field == "keys" or name != "c01":  # who does not give its own seed needs the others' shares of it
            federation.collector.take("unmask", name, reply)
    with pytest.raises(RunError, match=f"shares of the {owner} of client .* do not fit"):
        federation.collector.total()


def test_a_seed_that_was_not_sealed_does_not_count():
    federation = Federation(5)
    federation.share()
    federation.mask()
    federation.agree()
    for name, request in federation.collector.ask_unmasking().items():
        reply = federation.person(name).unmask(request)
        if name == "c00":
            with pytest.raises(RunError, match="another seed of its self-mask than it had sealed"):
                federation.collector.take("unmask", name, reply | {"seeds": bytes(16) + reply["seeds"][16:]})
            continue  # the others' shares of its seed are enough
        federation.collector.take("unmask", name, reply)
    np.testing.assert_array_equal(federation.collector.total(), federation.expected(federation.names))


def test_the_collector_looks_at_signatures():
    federation = Federation(3)
    request = federation.collector.ask_shares()["c00"]
    reply = federation.begin("c00", request)
    with pytest.raises(RunError, match="did not sign"):
        federation.collector.take("share", "c00", reply | {"signature": bytes(64)})
    with pytest.raises(RunError, match="did not sign"):
        federation.collector.take("share", "c01", reply | {"letters": reply["letters"]})
    federation.collector.take("share", "c00", reply)

    federation = Federation(3)
    federation.share()
    federation.mask()
    federation.collector.ask_agreement()
    with pytest.raises(RunError, match="another list"):
        federation.collector.take("agree", "c00", {"signature": bytes(64)})


def test_what_is_kept_holds_only_what_is_needed_still():
    federation = Federation(3)
    federation.share()
    person = federation.people["c00"]
    key, seed = person._key, person._seed
    before = person.to_bytes()
    assert key.hex().encode() in before
    assert seed.hex().encode() in before
    federation.mask()
    after = person.to_bytes()
    assert key.hex().encode() not in after
    assert seed.hex().encode() in after  # it gives this itself, once the list of survivors is signed
    held = person._held["c01"].to_bytes()
    assert held.hex().encode() in after
    federation.agree()
    federation.unmask()
    assert person.over
    assert held.hex().encode() not in person.to_bytes()
    assert seed.hex().encode() not in person.to_bytes()
    assert held[:16].hex() not in repr(person) + repr(vars(person))


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"terms": 3}'])
def test_damaged_bytes_of_a_participant(data):
    with pytest.raises(RunError, match="damaged"):
        Participant.from_bytes(data, Federation(2).identities["c00"])


def test_terms_survive_the_message():
    terms = Federation(4, bits=64).terms
    assert Terms.of(terms.request()) == terms
    assert terms.turn == TURN
