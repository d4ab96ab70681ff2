"""Rounds that are killed at every point and go on: what is charged, drawn, stored and used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load, save
from vote_cases import TINY, count_letters, ledger_of, voters, votes_plan

from privlora.accounting import Ledger, PoissonSampling, StepEvent, read_ledger
from privlora.data.units import Units
from privlora.errors import ConfigError, PrivacyError
from privlora.mechanisms import NoiseSource
from privlora.mechanisms.noising import grid_width
from privlora.synthesis.directions import Floats, directions, record_directions
from privlora.synthesis.population import Population
from privlora.synthesis.rounds import Rounds, State
from privlora.synthesis.votes import NearestVotes, Voters

RECORDS = ["aa", "aab", "b", "b", "cd"]
TEXTS = ["a", "b", "c", "d"]
ROUNDS = 4


class Killed(Exception):
    """In the place of a crash of the process: nothing in memory is used afterwards."""


class Proposer:
    """Puts what it was last told, and as which release, into its texts; remembers nothing else."""

    def __init__(self, crash: Callable[[str], None]) -> None:
        self.population = Population(list(TEXTS))
        self.crash = crash

    def propose(self) -> Floats:
        self.crash("proposing")
        return directions(count_letters([text[0] for text in self.population.texts]))

    def use(self, votes: Floats, number: int) -> None:
        self.crash("using")
        told = zip(self.population.texts, votes, strict=True)
        self.population = Population([f"{text} {number}:{vote:.3f}" for text, vote in told])
        self.crash("used")


class Noise(NoiseSource):
    """Writes down what is drawn, for all processes."""

    def __init__(self, drawn: list[Any], crash: Callable[[str], None], seed: int) -> None:
        super().__init__(insecure_seed=seed)
        self.drawn, self.crash = drawn, crash

    def standard_normal(self, shape: tuple[int, ...]) -> Any:
        self.crash("charged")
        made = super().standard_normal(shape)
        self.drawn.append(made.numpy().copy())
        self.crash("drawn")
        return made


class Machine:
    """A folder with a ledger and what was stored, processes that work on it, and a crash at the n-th event."""

    def __init__(self, folder: Path, crash_at: int, sigma: float = 1.0) -> None:
        self.folder, self.sigma = folder, sigma
        self.events: list[str] = []
        self.drawn: list[Floats] = []
        self.stored: State | None = None
        self.crash_at = crash_at
        self.released: list[Floats] = []

    def event(self, name: str) -> None:
        self.events.append(name)
        if len(self.events) == self.crash_at:
            raise Killed(name)

    def save(self, state: State) -> None:
        self.event("saving")
        self.stored = {name: tensor.clone() for name, tensor in state.items()}
        self.event("saved")

    def process(self) -> Rounds:
        """Work until the end or the crash."""
        with ledger_of(self.folder, ROUNDS, phases=votes_plan(ROUNDS, self.sigma).phases) as ledger:
            rounds = Rounds(
                Proposer(self.event),
                voters(RECORDS, NearestVotes(1)),
                ledger,
                divisor=4.0,
                noise=Noise(self.drawn, self.event, seed=len(self.events)),
            )
            if self.stored is not None:
                rounds.load_state_dict(self.stored)
            rounds.run(self.save)
            return rounds

    @property
    def ledger_shows(self) -> int:
        return read_ledger(self.folder / "ledger.jsonl").charges


UNBROKEN = ["proposing", "charged", "drawn", "saving", "saved", "using", "used", "saving", "saved"] * ROUNDS


def test_the_events_of_a_run_that_nothing_stops(tmp_path: Path) -> None:
    machine = Machine(tmp_path, crash_at=-1)
    rounds = machine.process()
    assert machine.events == UNBROKEN
    assert machine.ledger_shows == len(machine.drawn) == len(rounds.released) == ROUNDS
    assert rounds.proposer.population.texts[0].count(" ") == ROUNDS


@pytest.mark.parametrize("crash_at", range(1, len(UNBROKEN) + 1))
def test_a_crash_at_any_point(crash_at: int, tmp_path: Path) -> None:
    machine = Machine(tmp_path, crash_at)
    with pytest.raises(Killed) as killed:
        machine.process()
    before = [] if machine.stored is None else machine.stored["released"].clone()
    assert machine.ledger_shows >= max(len(machine.drawn), len(before))
    rounds = machine.process()

    # What was charged stays charged, and nothing is released beyond the plan.
    assert machine.ledger_shows == ROUNDS
    lost = str(killed.value) in ("charged", "drawn") or (
        str(killed.value) == "saving" and UNBROKEN[crash_at - 2] == "drawn"
    )
    assert len(rounds.released) == ROUNDS - lost
    # One draw a charge at most, no two alike, and none in what was released twice.
    assert len(machine.drawn) == ROUNDS - (str(killed.value) == "charged")
    assert len({draw.tobytes() for draw in machine.drawn}) == len(machine.drawn)
    assert len({votes.tobytes() for votes in rounds.released}) == len(rounds.released)
    # What was stored is what goes on, to the last bit; each release was used once in what stands now.
    for old, new in zip(before, rounds.released, strict=False):
        assert np.array_equal(old, new)
    assert rounds.proposer.population.texts == [
        " ".join([text, *(f"{n}:{votes[i] * 4.0:.3f}" for n, votes in enumerate(rounds.released, 1))])
        for i, text in enumerate(TEXTS)
    ]


def test_a_run_that_is_over_releases_nothing_more(tmp_path: Path) -> None:
    machine = Machine(tmp_path, crash_at=-1)
    first = machine.process()
    count = len(machine.events)
    second = machine.process()
    assert len(machine.events) == count
    assert second.proposer.population.texts == first.proposer.population.texts


def test_the_released_mean_is_noise_and_votes(tmp_path: Path) -> None:
    machine = Machine(tmp_path, crash_at=-1, sigma=2.0)
    rounds = machine.process()
    for votes, xi in zip(rounds.released, machine.drawn, strict=True):
        # aa and aab vote for a, both b for b, and cd for c, the first of two; sigma 2, divided by 4.
        np.testing.assert_allclose(votes, (np.array([2, 2, 1, 0]) + 2.0 * xi) / 4.0, atol=1e-3)


def test_one_user_moves_a_release_by_no_more_than_a_vote(tmp_path: Path) -> None:
    """Through all of it, with the same noise: users of many records, of one, and of none that can be read."""
    owners = np.array([0, 0, 1, 2, 0, 3, 0])
    records = np.array([*RECORDS, "", "aaa"])
    released = []
    for left_out in (None, 0, 1, 2, 3):
        kept = owners != left_out
        numbers = np.unique(owners[kept], return_inverse=True)[1]
        folder = tmp_path / str(left_out)
        folder.mkdir()
        with ledger_of(folder, 1, sigma=1.0) as ledger:
            voting = voters(records[kept].tolist(), NearestVotes(2), numbers.tolist())
            rounds = Rounds(Proposer(len), voting, ledger, divisor=4.0, noise=NoiseSource(insecure_seed=6))
            rounds.run(lambda state: None)
        released.append(rounds.released[0] * 4.0)
    grid = 4.0 * len(TEXTS) * grid_width(1.0 / 4.0)
    moved = [float(np.linalg.norm(released[0] - other)) for other in released[1:]]
    assert moved[:3] == pytest.approx([1.0] * 3, abs=grid)
    assert moved[3] == 0.0  # the one without a direction


def test_sampled_voters_are_charged_as_sampled(tmp_path: Path) -> None:
    sampled = StepEvent(PoissonSampling(0.25), TINY)
    with ledger_of(tmp_path, 30, phases=((sampled, 30),)) as ledger:
        voting = voters(["aa"] * 100, NearestVotes(1), sample_rate=0.25)
        rounds = Rounds(Proposer(len), voting, ledger, divisor=4.0, noise=NoiseSource(insecure_seed=1))
        rounds.run(lambda state: None)
        assert ledger.events() == [(sampled, 30)]
    sizes = np.array([votes[0] * 4.0 for votes in rounds.released]).round()
    assert len(set(sizes)) > 5
    assert sizes.mean() == pytest.approx(25, abs=4)


def test_a_state_goes_on_with_its_own_ledger_alone(tmp_path: Path) -> None:
    one, other, older = (tmp_path / name for name in ("one", "other", "older"))
    for folder in (one, other, older):
        folder.mkdir()
    machine, apart = Machine(one, crash_at=-1), Machine(other, crash_at=-1)
    machine.process()
    apart.process()
    state = machine.stored
    machine.folder = other
    with pytest.raises(PrivacyError, match="does not show"):
        machine.process()
    # An older copy of its own ledger shows less than was released.
    lines = (one / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (older / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    machine.folder, machine.stored = older, state
    with pytest.raises(PrivacyError, match="does not show"):
        machine.process()
    machine.folder = one
    machine.process()


def test_votes_that_the_plan_does_not_expect_are_refused(tmp_path: Path) -> None:
    for number, event in enumerate(
        (StepEvent(PoissonSampling(0.5), 1.0), StepEvent(PoissonSampling(1.0), 1.0))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        voting = voters(RECORDS, NearestVotes(1), sample_rate=1.0 - 0.5 * number)
        with (
            ledger_of(folder, ROUNDS, phases=((event, ROUNDS),)) as ledger,
            pytest.raises(PrivacyError, match="planned is"),
        ):
            Rounds(Proposer(print), voting, ledger, divisor=4.0, noise=NoiseSource(insecure_seed=1))


def test_voters_drawn_by_a_seed_are_refused_unless_the_plan_says_so(tmp_path: Path) -> None:
    with ledger_of(tmp_path, ROUNDS, insecure_noise=False, sigma=1.0) as ledger:
        records = record_directions(RECORDS, count_letters)
        units = Units(np.arange(len(RECORDS)))
        with pytest.raises(PrivacyError, match="drawn by a seed"):
            Rounds(Proposer(len), voters(RECORDS, NearestVotes(1)), ledger, divisor=4.0)
        rounds = Rounds(Proposer(len), Voters(records, units, NearestVotes(1)), ledger, divisor=4.0)
        rounds.run(lambda state: None)
        assert ledger.epsilon() > 0


def test_a_candidate_without_a_text_is_refused_before_the_charge(tmp_path: Path) -> None:
    proposer = Proposer(len)
    proposer.propose = lambda: np.eye(3)  # type: ignore[method-assign]
    with ledger_of(tmp_path, ROUNDS) as ledger:
        rounds = Rounds(
            proposer,
            voters(RECORDS, NearestVotes(1)),
            ledger,
            divisor=4.0,
            noise=NoiseSource(insecure_seed=1),
        )
        with pytest.raises(ConfigError, match="3 candidates, of 4 texts"):
            rounds.run(lambda state: None)
        assert ledger.charges == 0


def test_votes_end_where_training_begins(tmp_path: Path) -> None:
    phases = ((StepEvent(PoissonSampling(1.0), 1.0), 2), (StepEvent(PoissonSampling(0.1), 1.0), 3))
    with Ledger.create(tmp_path / "ledger.jsonl", votes_plan(2, phases=phases)) as ledger:
        voting = voters(RECORDS, NearestVotes(1))
        rounds = Rounds(Proposer(len), voting, ledger, divisor=4.0, noise=NoiseSource(insecure_seed=1))
        rounds.run(lambda state: None)
        assert (ledger.charges, len(rounds.released), ledger.remaining) == (2, 2, 3)


def test_another_number_of_candidates_is_refused_before_the_charge(tmp_path: Path) -> None:
    proposer = Proposer(len)
    with ledger_of(tmp_path, ROUNDS) as ledger:
        voting = voters(RECORDS, NearestVotes(1))
        rounds = Rounds(proposer, voting, ledger, divisor=4.0, noise=NoiseSource(insecure_seed=1))

        def grow(state: State) -> None:
            if int(state["used"]):
                proposer.population.texts.append("h")

        with pytest.raises(ConfigError, match="5 candidates, of 5 texts; earlier rounds had 4"):
            rounds.run(grow)
        assert ledger.charges == 1


def test_a_file_holds_the_state(tmp_path: Path) -> None:
    """Also the first one, which has no release."""
    for crash_at in (1, UNBROKEN.index("using") + 1):
        machine = Machine(tmp_path / str(crash_at), crash_at)
        machine.folder.mkdir()
        with pytest.raises(Killed):
            machine.process()
        if machine.stored is None:
            with ledger_of(machine.folder, ROUNDS) as ledger:
                voting = voters(RECORDS, NearestVotes(1))
                fresh = Rounds(Proposer(len), voting, ledger, divisor=4.0, noise=NoiseSource(insecure_seed=1))
                machine.stored = fresh.state_dict()
        machine.stored = load(save(machine.stored))
        assert len(machine.process().released) == ROUNDS
