"""The private phase of rows that release votes: all rounds, then what follows from them without privacy."""

from __future__ import annotations

from collections.abc import Callable

from privlora.accounting import Ledger
from privlora.mechanisms import NoiseSource
from privlora.synthesis.directions import record_directions
from privlora.synthesis.population import Population
from privlora.synthesis.rounds import Rounds, State
from privlora.synthesis.votes import Voters
from privlora.training.assembly import Parts
from privlora.training.inputs import Data
from privlora.training.texts.polls import POLLS


def take_votes(parts: Parts, data: Data, ledger: Ledger, save: Callable[[], None]) -> None:
    """Take the rounds that are left, and make of the last one what the run leaves.

    save: stores ``parts`` durably; called after each release and after each use of one, and once at the end. What it
    raises, as after a signal, passes through: everything up to then is stored. Raises GeneratorError where the
    generator fails; the round's release is stored, and used when the run goes on.
    """
    ballot, texts, privacy = parts.ballot, parts.texts, parts.settings.privacy
    assert ballot is not None
    assert texts is not None
    assert parts.settings.synthesis is not None
    if ballot.over:
        return
    poll = POLLS[parts.method.name](parts)
    voters = Voters(
        record_directions(data.texts, ballot.embed),
        data.units,
        poll.encode,
        sample_rate=privacy.q,
        insecure_seed=privacy.insecure_noise_seed,
    )
    rounds = Rounds(
        poll.proposer,
        voters,
        ledger,
        divisor=ledger.plan.expected_batch_size,
        noise=NoiseSource(privacy.insecure_noise_seed),
    )
    if ballot.rounds:
        rounds.load_state_dict(ballot.rounds)

    def keep(state: State) -> None:
        ballot.rounds = state
        save()

    rounds.run(keep)
    texts.stand(Population(poll.texts()))
    if not parts.settings.synthesis.publish:
        poll.finish()
    ballot.over = True
    save()
