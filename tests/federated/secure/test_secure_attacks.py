"""What a server could try: each is refused by the clients, or gives it numbers that say nothing."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from secure_cases import SENT, TURN, Federation

from privlora.errors import PrivacyError, RunError
from privlora.federated.secure import shares, wire
from privlora.federated.secure.keys import Identity, PublicIdentity, derive, digest, exchange
from privlora.federated.secure.masks import pair_keys, self_key, shift
from privlora.federated.secure.participant import Participant
from privlora.federated.secure.wire import Terms, Turn, least_threshold

OTHER = bytes(reversed(SENT))


def masked(**settings):
    """A federation of five whose vectors came, before anything is signed."""
    federation = Federation(5, **settings)
    federation.share()
    federation.mask()
    return federation


def names(*listed):
    return {"names": ",".join(listed)}


def unmasking(federation, listed, signed):
    """A request "unmask" for a list, with these clients' signatures as they were given."""
    return names(*listed) | {
        "signers": ",".join(sorted(signed)),
        "signatures": b"".join(v for _, v in sorted(signed.items())),
    }


def looks_random(data):
    """Whether bytes have no distribution but the uniform one; errs once in 5e7 times."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    return 1e-8 < stats.chisquare(counts).pvalue < 1 - 1e-8


# --- one vector ---


def test_only_the_sum_of_all_survivors_can_be_unmasked():
    """After an honest sum the server knows every self-mask, and no pair mask between survivors."""
    federation = Federation(4, length=1 << 14)
    for name in federation.names:
        federation.vectors[name][:] = 0
    federation.share()
    federation.mask()
    federation.agree()
    federation.unmask()
    federation.collector.total()
    collector = federation.collector
    own = {name: self_key(collector._context, name, collector._seed_of(name)) for name in federation.names}
    for size in (1, 2, 3, 4):
        for chosen in itertools.combinations(federation.names, size):
            total = np.zeros(1 << 14, np.uint32)
            for name in chosen:
                total += federation.masked[name]
            shift(total, taken=[own[name] for name in chosen])
            assert looks_random(total.tobytes()) == (size < 4)
            assert total.any() == (size < 4)


def test_a_vector_that_comes_late_stays_masked():
    """The keys of a client that dropped are revealed; its self-mask stays."""
    federation = Federation(4, length=1 << 14)
    federation.share()
    requests = federation.ask_vectors()
    late = federation.answer_mask("c00", requests["c00"])["vector"]
    for name in federation.names[1:]:
        federation.collector.take("mask", name, federation.answer_mask(name, requests[name]))
    federation.agree()
    with pytest.raises(RunError):
        federation.collector.take("mask", "c00", {"vector": late, "context": federation.collector._context})
    federation.unmask()
    federation.collector.total()
    key = federation.collector._key_of("c00")
    shown = {name: federation.collector._shown[name].key for name in federation.names[1:]}
    added, taken = pair_keys(federation.collector._context, key, "c00", shown)
    shift(late, taken, added)
    assert looks_random((late - federation.vectors["c00"]).tobytes())


def test_a_revealed_key_opens_no_letter():
    federation = Federation(3)
    federation.share()
    sender, receiver = federation.people["c00"], federation.terms.member("c01")
    letter = federation.collector._letters["c00"]["c01"]
    public = federation.collector._shown["c00"].key
    known = exchange(sender._key, receiver.agreement)
    purpose = digest("letter", federation.terms.digest, "c00", "c01", public)
    for guess in (known, known + known, known + bytes(32)):
        with pytest.raises(PrivacyError):
            shares.unseal(letter, derive(guess, purpose), "c00")
    right = known + federation.identities["c00"].agree(receiver.agreement)
    assert shares.unseal(letter, derive(right, purpose), "c00").key


# --- who is in the sum ---


def test_a_client_that_is_said_to_have_dropped_to_half_of_the_clients():
    """Two lists of survivors: neither gets enough signatures, so nothing is revealed for either."""
    federation = masked()
    everybody, without = federation.names, federation.names[1:]
    lists = {"c00": everybody, "c01": everybody, "c02": without, "c03": without, "c04": everybody}
    signed = {
        name: federation.person(name).agree(names(*listed))["signature"] for name, listed in lists.items()
    }
    both = {"c02": signed["c02"], "c03": signed["c03"]}
    of_both = {name: signed[name] for name in without}
    for name in ("c02", "c03"):
        for too_few in (both, of_both):
            copy = Participant.from_bytes(federation.person(name).to_bytes(), federation.identities[name])
            with pytest.raises(PrivacyError, match="fewer than 3 clients signed"):
                copy.unmask(unmasking(federation, without, too_few))
        # The signatures of the other list do not help, whatever list is claimed.
        with pytest.raises(PrivacyError, match="fewer than 3 clients signed"):
            federation.person(name).unmask(unmasking(federation, without, signed | both))
    enough = {name: signed[name] for name in ("c00", "c01", "c04")}
    with pytest.raises(PrivacyError, match="survivors that this client did not sign"):
        federation.person("c00").unmask(unmasking(federation, without, enough))


def test_signatures_of_one_client_count_once():
    federation = masked()
    signed = {
        name: federation.person(name).agree(names(*federation.names))["signature"]
        for name in federation.names
    }
    request = names(*federation.names) | {"signers": "c00,c00,c00", "signatures": signed["c00"] * 3}
    with pytest.raises(RunError):
        federation.person("c00").unmask(request)


def test_signatures_of_a_client_that_dropped_do_not_count():
    federation = masked()
    listed = federation.names[:3]
    signed = {name: federation.person(name).agree(names(*listed))["signature"] for name in listed[:2]}
    dropped = federation.people["c04"]
    signed["c04"] = dropped._identity.sign(wire.agreement_of(dropped._context, listed))
    with pytest.raises(PrivacyError, match="fewer than 3 clients signed"):
        federation.person("c00").unmask(unmasking(federation, listed, signed))


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        (["c00", "c01"], "a sum over 2 clients"),
        (["c00"], "a sum over 1 clients"),
        (["c01", "c02", "c03"], "not of this sum"),
        (["c00", "c01", "c02", "c09"], "not of this sum"),
    ],
)
def test_lists_of_survivors_that_are_refused(listed, why):
    federation = masked()
    person = federation.people["c00"]
    with pytest.raises(PrivacyError, match=why):
        person.agree(names(*listed))
    assert person.over


@pytest.mark.parametrize("restart", [False, True])
def test_nothing_is_answered_twice(restart):
    federation = Federation(3, restart=restart)
    federation.share()
    for name, request in federation.ask_vectors().items():
        federation.collector.take("mask", name, federation.answer_mask(name, request))
        with pytest.raises(PrivacyError, match="twice or out of order"):
            federation.answer_mask(name, request)
    for name, request in federation.collector.ask_agreement().items():
        federation.collector.take("agree", name, federation.person(name).agree(request))
        with pytest.raises(PrivacyError, match="twice or out of order"):
            federation.person(name).agree(names("c00", "c01"))
    for name, request in federation.collector.ask_unmasking().items():
        federation.collector.take("unmask", name, federation.person(name).unmask(request))
        with pytest.raises(PrivacyError, match="twice or out of order"):
            federation.person(name).unmask(request)
    assert federation.collector.total() is not None


def test_a_sum_of_another_turn():
    federation = Federation(3)
    request = federation.collector.ask_shares()["c00"]
    for turn in (Turn("run", 2, "train"), Turn("run", 1, "sketch"), Turn("other", 1, "train")):
        with pytest.raises(PrivacyError, match="than is next"):
            federation.begin("c00", request, turn=turn)


@pytest.mark.parametrize("clients", range(2, 13))
def test_the_threshold_leaves_no_room_for_a_second_list(clients):
    for colluding in range(clients - 1):
        least, honest = least_threshold(clients, colluding), clients - colluding
        assert 2 * (least - colluding) > honest
        assert 2 * (least - 1 - colluding) <= honest
        assert clients >= least >= colluding + 2  # never fewer than two honest vectors in a sum


# --- the roster ---


def roster_request(federation, members, threshold):
    """A request "share" that no Terms would make."""
    return federation.terms.request() | {
        "threshold": threshold,
        "names": ",".join(member.name for member in members),
        "signing": b"".join(member.signing for member in members),
        "agreement": b"".join(member.agreement for member in members),
    }


def test_rosters_that_are_refused():
    federation = Federation(4)
    one, two, three, four = federation.terms.roster
    stranger = Identity.create().public("c01")
    cases = [
        ([one], 1, "a sum over 1 clients"),
        ([one, two, three, four], 2, "a threshold of 2 for 4"),
        ([one, two], 3, "a threshold of 3 for 2"),
        ([one, two, three], 0, "a threshold of 0"),
        ([one, PublicIdentity("c01", one.signing, stranger.agreement), three], 2, "a key twice"),
        ([one, PublicIdentity("c01", stranger.signing, one.agreement), three], 2, "a key twice"),
        ([one, PublicIdentity("c01", stranger.agreement, stranger.agreement), three], 2, "a key twice"),
        ([two, three, four], 2, "without this client"),
        ([PublicIdentity("c00", stranger.signing, stranger.agreement), two, three], 2, "without this client"),
        ([PublicIdentity("c00", one.signing, stranger.agreement), two, three], 2, "without this client"),
    ]
    for members, threshold, why in cases:
        with pytest.raises(PrivacyError, match=why):
            federation.begin("c00", roster_request(federation, members, threshold))
    for members in ([two, one, three], [one, one, two]):
        with pytest.raises(RunError):
            federation.begin("c00", roster_request(federation, members, 2))
    for damage in (
        {"signing": bytes(3)},
        {"round": "1"},
        {"loss": 1},
        {"names": "c00,../c01,c02,c03"},
        {"bits": 16},
    ):
        with pytest.raises(RunError):
            federation.begin("c00", federation.terms.request() | damage)


def test_pinned_fingerprints():
    federation = Federation(3)
    request = federation.collector.ask_shares()["c00"]
    pins = {member.name: member.fingerprint for member in federation.terms.roster}
    assert federation.begin("c00", request, pins=pins)
    for wrong in (
        pins | {"c02": Identity.create().public("c02").fingerprint},
        {"c00": pins["c00"], "c01": pins["c01"]},
    ):
        with pytest.raises(PrivacyError, match="client c02 does not have the fingerprint"):
            federation.begin("c00", request, pins=wrong)


# --- keys and shares on the way ---


def swapped(request):
    letters = request["letters"]
    return request | {"letters": letters[shares.LETTER :] + letters[: shares.LETTER]}


def flipped(field, at):
    def change(request):
        data = bytearray(request[field])
        data[at] ^= 1
        return request | {field: bytes(data)}

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swapped, "shares from client c01 were changed"),
        (flipped("letters", 0), "shares from client c01 were changed"),
        (flipped("letters", -1), "shares from client c02 were changed"),
        (flipped("keys", 40), "key that client c01 did not sign"),
        (flipped("seals", 40), "key that client c01 did not sign"),
        (flipped("signatures", 70), "key that client c01 did not sign"),
        (lambda request: request | {"signatures": bytes(192)}, "did not sign"),
        (lambda request: request | {"names": "c00,c01,c09"}, "another roster"),
        (lambda request: request | {"names": "c01,c02"}, "another roster"),
    ],
)
def test_keys_and_letters_that_were_changed(change, why):
    federation = Federation(3)
    federation.share()
    request = change(federation.ask_vectors()["c00"])
    with pytest.raises(PrivacyError, match=why):
        federation.answer_mask("c00", request)
    assert federation.people["c00"].over


@pytest.mark.parametrize(
    "damage", [{"keys": b""}, {"letters": bytes(64)}, {"length": 3}, {"length": True}, {"more": 1}]
)
def test_requests_that_cannot_be_read(damage):
    federation = Federation(3)
    federation.share()
    with pytest.raises(RunError):
        federation.answer_mask("c00", federation.ask_vectors()["c00"] | damage)


def test_fewer_keys_than_the_threshold():
    federation = Federation(4)
    federation.share()
    request = federation.ask_vectors()["c00"]
    short = {
        field: request[field][:size] for field, size in {"keys": 64, "seals": 64, "signatures": 128}.items()
    }
    with pytest.raises(PrivacyError, match="2 clients left"):
        federation.answer_mask(
            "c00", request | short | {"names": "c00,c01", "letters": request["letters"][:64]}
        )


def test_keys_of_another_sum_are_not_taken():
    """The same clients, and the keys that they signed for a round before."""
    first = Federation(3)
    first.share()
    old = first.ask_vectors()["c00"]
    for changes in (
        {"turn": Turn("run", 2, "train")},
        {"turn": Turn("run", 1, "sketch")},
        {"threshold": 3},
        {"bits": 64},
    ):
        terms = {"turn": TURN, "threshold": 2, "bits": 32} | changes
        later = Federation(3)
        later.identities = first.identities
        later.terms = Terms(**terms, roster=first.terms.roster)
        later.vectors["c00"] = later.draw(0)
        later.begin("c00", later.terms.request())
        with pytest.raises(PrivacyError, match="did not sign"):
            later.answer_mask("c00", old)


def test_two_clients_with_one_key():
    """A client that works for the server signs another client's key as its own."""
    federation = Federation(3)
    federation.share()
    request = federation.ask_vectors()["c00"]
    key, seal = request["keys"][32:64], request["seals"][64:]
    signature = federation.identities["c02"].sign(wire.to_sign(federation.terms, "c02", key, seal))
    request["keys"] = request["keys"][:64] + key
    request["signatures"] = request["signatures"][:128] + signature
    with pytest.raises(PrivacyError, match="two clients with one key"):
        federation.answer_mask("c00", request)


def test_a_client_whose_own_key_is_replaced_by_an_old_one():
    federation = Federation(3)
    federation.share()
    request = federation.ask_vectors()["c00"]
    federation.begin("c00", federation.terms.request())  # the same turn again, as no honest client would
    with pytest.raises(PrivacyError, match="own key was replaced"):
        federation.answer_mask("c00", request)


def test_keys_of_small_order():
    federation = Federation(3)
    with pytest.raises(PrivacyError, match="everybody knows"):
        federation.identities["c00"].agree(bytes(32))
    one, two, three = federation.terms.roster
    with pytest.raises(PrivacyError, match="everybody knows"):
        federation.begin(
            "c00", roster_request(federation, [one, PublicIdentity("c01", two.signing, bytes(32)), three], 2)
        )


# --- an inconsistent server ---


def test_a_client_that_was_sent_something_else_drops_out():
    federation = Federation(4)
    federation.share()
    for name, request in federation.ask_vectors().items():
        reply = federation.answer_mask(name, request, OTHER if name == "c00" else SENT)
        if name == "c00":
            with pytest.raises(RunError, match="other tensors"):
                federation.collector.take("mask", name, reply)
        else:
            federation.collector.take("mask", name, reply)
    federation.agree()
    federation.unmask()
    np.testing.assert_array_equal(federation.collector.total(), federation.expected(federation.names[1:]))


def test_a_victim_that_was_sent_something_else_cannot_be_unmasked():
    """A server that sends one client another model, says that it is in the sum, and unmasks with the other clients."""
    federation = Federation(4, length=1 << 14)
    for name in federation.names:
        federation.vectors[name][:] = 0
    federation.share()
    collector = federation.collector
    for name, request in federation.ask_vectors().items():
        reply = federation.answer_mask(name, request, OTHER if name == "c00" else SENT)
        collector.take("mask", name, reply | {"context": collector._context})
    federation.agree(without=["c00"])
    victim = federation.person("c00").agree(names(*federation.names))
    with pytest.raises(RunError, match="another list"):
        collector.take("agree", "c00", victim)
    federation.unmask()
    assert looks_random(collector.total().tobytes())
    # Nor with its self-mask taken off under its own context: the pair masks stay.
    shown = [collector._shown[name] for name in federation.names]
    context = wire.context_of(federation.terms, shown, OTHER, federation.length)
    alone = federation.masked["c00"].copy()
    shift(alone, taken=[self_key(context, "c00", collector._seed_of("c00"))])
    assert looks_random(alone.tobytes())
    for name in federation.names[1:]:
        alone += federation.masked[name]
        shift(alone, taken=[self_key(collector._context, name, collector._seed_of(name))])
    assert looks_random(alone.tobytes())


def test_masks_depend_on_all_that_the_clients_agree_on():
    federation = Federation(3)
    federation.share()
    terms = federation.terms
    shown = [federation.collector._shown[name] for name in federation.names]
    first, second, third = shown
    changed = [
        wire.context_of(terms, shown, OTHER, 5),
        wire.context_of(terms, shown, SENT, 6),
        wire.context_of(terms, shown[:2], SENT, 5),
    ]
    for change in ({"key": bytes(32)}, {"seal": bytes(32)}):
        changed.append(wire.context_of(terms, [first, second, replace(third, **change)], SENT, 5))
    fourth = Identity.create()
    for change in (
        {"turn": Turn("run", 2, "train")},
        {"turn": Turn("run", 1, "sketch")},
        {"turn": Turn("other", 1, "train")},
        {"threshold": 3},
        {"bits": 64},
        {"threshold": 3, "roster": (*terms.roster, fourth.public("c03"))},
        {"roster": (*terms.roster[:2], fourth.public("c02"))},
    ):
        changed.append(wire.context_of(replace(terms, **change), shown, SENT, 5))
    same = wire.context_of(terms, shown, SENT, 5)
    assert len({same, *changed}) == len(changed) + 1

    key, public = federation.people["c00"]._key, {"c01": shown[1].key}
    mine = pair_keys(same, key, "c00", public)[0]
    for context in changed:
        theirs = pair_keys(context, federation.people["c01"]._key, "c01", {"c00": shown[0].key})[1]
        assert mine != theirs
        vector = np.zeros(1 << 14, np.uint32)
        shift(vector, mine, theirs)
        assert looks_random(vector.tobytes())
