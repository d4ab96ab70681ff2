"""What a server opens with the help of c of n clients, at each threshold t: played against real participants.

It shows honest clients two lists of survivors, or two lists of keys. The colluding clients sign whatever it takes.
"""

import itertools
from functools import cache

import pytest
from collusion_cases import Collusion
from secure_cases import SENT, Federation

from privlora.config.federation import honest_left
from privlora.errors import PrivacyError
from privlora.federated.secure.participant import Participant
from privlora.federated.secure.wire import least_threshold

CASES = [(n, t) for n in range(3, 10) for t in range(n // 2 + 1, n + 1)]


class Server(Collusion):
    """The last c clients are its own."""

    def __init__(self, clients, threshold, colluding):
        base = self.base = masked(clients, threshold)
        honest, own = base.names[: clients - colluding], base.names[clients - colluding :]
        super().__init__(
            {name: self.again(name, base.after[name]) for name in honest},
            {name: base.people[name] for name in own},
            base.identities,
            {name: base.private[name] for name in own},
            {name: shown.key for name, shown in base.collector._shown.items()},
            base.masked,
            threshold,
        )

    def again(self, name, kept):
        return Participant.from_bytes(kept, self.base.identities[name])

    def show_other_keys(self, name, listed):
        """``name`` masks for the keys of ``listed`` alone."""
        asked, own = self.base.asked[name], self.names.index(name)
        places = [self.names.index(one) for one in listed]
        letters = [place - (place > own) for place in places if place != own]

        def of(field, size, places):
            return b"".join(asked[field][size * at : size * (at + 1)] for at in places)

        change = {f: of(f, size, places) for f, size in (("keys", 32), ("seals", 32), ("signatures", 64))}
        change |= {"names": ",".join(listed), "letters": of("letters", 64, letters)}
        self.people[name] = self.again(name, self.base.before[name])
        answer = self.people[name].mask(asked | change, self.base.vectors[name].copy(), SENT)
        self.vectors[name] = answer["vector"]

    def opens(self, chosen):
        found = self.opened(chosen)
        return found is not None and bool((found == self.base.expected(chosen)).all())


@cache
def masked(clients, threshold):
    made = Federation(clients, threshold, length=8)
    made.share()
    made.private = {name: person._key for name, person in made.people.items()}
    made.before = {name: person.to_bytes() for name, person in made.people.items()}
    made.asked = made.ask_vectors()
    for name, request in made.asked.items():
        made.collector.take("mask", name, made.answer_mask(name, request))
    made.after = {name: person.to_bytes() for name, person in made.people.items()}
    return made


@pytest.mark.parametrize(("clients", "threshold"), CASES)
def test_two_lists_of_survivors_open_single_answers_just_where_it_is_said(clients, threshold):
    for colluding in range(clients):
        server = Server(clients, threshold, colluding)
        least, honest = honest_left(clients, threshold, colluding), server.honest
        if 2 * threshold > clients + colluding:
            # One list opens, over as few as are said; for a second one signatures are lacking.
            few, rest = honest[:least], honest[least:]
            server.tell(few, [*few, *server.own])
            if rest:
                with pytest.raises(PrivacyError, match=f"fewer than {threshold} clients signed"):
                    server.tell(rest, [*honest, *server.own])
            assert server.opens(few)
            assert [name for name in honest if server.opens([name])] == (few if least == 1 else [])
            assert not any(
                server.opens(list(pair)) for pair in itertools.combinations(few, least - 1) if pair
            )
        else:
            assert least == 1
            half = (len(honest) + 1) // 2
            for group in filter(None, (honest[:half], honest[half:])):
                server.tell(group, [*group, *server.own])
            assert all(server.opens([name]) for name in honest)


@pytest.mark.parametrize(("clients", "threshold"), CASES)
def test_two_lists_of_keys_open_no_more(clients, threshold):
    """One client masks for itself, colluding clients and those who are then said to have dropped out."""
    for colluding in range(threshold - 1):
        server = Server(clients, threshold, colluding)
        victim, *others = server.honest
        group, dropped = others[: threshold - colluding], others[threshold - colluding :]
        if 2 * threshold > clients + colluding:
            with pytest.raises(PrivacyError, match="clients left"):
                server.show_other_keys(victim, sorted([victim, *dropped, *server.own]))
            continue
        server.show_other_keys(victim, sorted([victim, *dropped, *server.own]))
        server.tell(group, [victim, *group, *server.own])
        assert server.opens([victim])


@pytest.mark.parametrize(("clients", "threshold"), CASES)
def test_clients_refuse_thresholds_that_open_single_answers(clients, threshold):
    """With the clients that a sum can do without on the server's side: all thresholds up to two thirds."""
    colluding = clients - threshold
    federation = Federation(clients, threshold)
    request = federation.collector.ask_shares()["c00"]
    assert (honest_left(clients, threshold, colluding) > 1) == (3 * threshold > 2 * clients)
    assert (threshold >= least_threshold(clients, colluding)) == (3 * threshold > 2 * clients)
    if 3 * threshold > 2 * clients:
        assert federation.begin("c00", request, colluding=colluding)
    else:
        with pytest.raises(PrivacyError, match="may collude"):
            federation.begin("c00", request, colluding=colluding)
