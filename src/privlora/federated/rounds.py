"""The rounds of a federation, as its server sees them: ask, take in what comes, move, save.

The same lines drive clients of this process, of Flower's simulation and of other machines: only the Exchange differs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from privlora.accounting import Ledger, Plan
from privlora.config import Settings
from privlora.data.examples import Examples
from privlora.data.sampling import PoissonSampler
from privlora.errors import PrivacyError, RunError
from privlora.evaluation import evaluate_next_token
from privlora.federated.history import STOPPED, Aside, History, Round, RoundObserver, why_void
from privlora.federated.messages import Exchange, Reply, Request, refuse_unlisted
from privlora.federated.plans import client_rate, federation_of, public_settings
from privlora.federated.schedule import participants, secret_participants
from privlora.federated.secure import PublicIdentity
from privlora.federated.server import Server
from privlora.federated.turn import Turn, roster_of
from privlora.pages.numbers import finite
from privlora.training.checkpoint import Mark, load_checkpoint, save_checkpoint
from privlora.training.files import RunFolder, append_line, read_lines
from privlora.training.loop import Interrupted
from privlora.training.stopping import stop_on_signal

_log = logging.getLogger(__name__)

_AFTER_ROUND: Final = (
    "stopping after this round, and saving. A second Ctrl-C or SIGTERM stops at once: the round is then void, and what "
    "it charged stays charged"
)

_SHOWN = 10  # rounds that a line names

SECRET: Final = (
    f"whom the server drew, and who answered, is its secret, which epsilon counts on: private/{Aside.NAME} says what "
    "rounds lacked"
)
"""What a trusted server's log says at the end, whatever came of it."""

NOTHING_LACKED: Final = (
    "in every round at least half of those drawn answered, and everybody who was drawn in some"
)


@dataclass
class Rounds:
    """A federation's server at work.

    server: what moves. plan: of each client's ledger. ledger: a trusted server's own. evaluation: PUBLIC records, for
    the held-out loss.
    """

    settings: Settings
    exchange: Exchange
    server: Server
    folder: RunFolder
    history: History
    plan: Plan | None = None
    ledger: Ledger | None = None
    evaluation: Examples | None = None
    observer: RoundObserver = field(default_factory=RoundObserver)
    _roster: dict[str, PublicIdentity] = field(default_factory=dict, init=False)

    def serve(self) -> dict[str, str]:
        """All rounds that are left; gives the ledgers that clients gave, as text, empty where there is none.

        A round that was begun and not ended, because this process died, stays void: its clients may have been charged
        for it, and are not asked twice. Raises Interrupted, after saving, on a signal; RunError if a client
        does not join.
        """
        federation = federation_of(self.settings)
        every = self.settings.run.evaluation_interval(federation.rounds)
        self._join()
        self.take_up()
        begun = self.history.begun
        if begun == 0:
            self._evaluate(0)
        with stop_on_signal(_AFTER_ROUND) as stop:
            for number, asked in enumerate(self._participants(), start=1):
                if number <= begun:
                    continue
                done = self._take(number, asked)
                last = number == federation.rounds
                if last or (every and number % every == 0):
                    self._evaluate(number)  # first: a round is shown with its own loss
                self._show(done)
                if stop.is_set() and not last:
                    raise Interrupted(number)
        self._evaluate(federation.rounds)
        given = self._leave(federation.rounds)
        missed = shortfall(self.history.rounds())
        if federation.trusted_server:
            _log.info("%s", SECRET)
            self._aside(missed or NOTHING_LACKED)
        elif missed is not None:
            _log.warning("ATTENTION: %s", missed)
        return given

    @property
    def _aside(self) -> Aside:
        return Aside(self.folder.private)

    def take_up(self) -> None:
        """Go back to the last round that was saved; nobody is asked anything."""
        saved = 0
        if self.folder.checkpoint.exists():
            saved, states = load_checkpoint(self.folder.checkpoint, run_id=self.history.run)
            self.server.take_states(states)
        self.history.void_after(saved)

    def _participants(self) -> Iterator[list[str]]:
        """Of rounds 1, 2, …; a secret where a trusted server's ledger counts on it."""
        federation, privacy = federation_of(self.settings), self.settings.privacy
        if self.ledger is None:
            names, seed = federation.names, self.settings.run.seed
            return participants(names, federation.per_round, federation.rounds, seed)
        sampler = PoissonSampler(
            federation.size, client_rate(federation), insecure_seed=privacy.insecure_noise_seed
        )
        if sampler.sampling != self.ledger.plan.event.sampling:
            raise PrivacyError(
                "clients are drawn in another way than the ledger's plan says",
                why="the stated epsilon holds for what is charged",
                fix="resume with the settings of the first run",
            )
        return secret_participants(federation.names, sampler, federation.rounds)

    def _take(self, number: int, asked: list[str]) -> Round:
        """One round: its stages, then what is saved of it."""
        self.history.begin(number, asked)
        turn = Turn(
            self.settings,
            self.exchange,
            self.server,
            self.history.run,
            number,
            self._roster,
            self.plan,
            self.ledger,
            self._aside,
            self.observer.on_phase,
        )
        before = self.server.states()
        void, answered = None, asked
        try:
            for stage in self.server.stages:
                answered = turn.take(stage, answered)
        except RunError as reason:
            self.server.take_states(before)
            void, answered = reason.what, []
        done = Round(number, tuple(asked), tuple(answered), turn.down, turn.up, void, turn.sent)
        self.history.end(done)  # first: a checkpoint of a round that did not end could not be told from it
        if void is None:
            mark = Mark(number, self.history.run, None)
            save_checkpoint(self.folder.checkpoint, self.server.states(), mark)
        return done

    def _show(self, done: Round) -> None:
        shown = done if self.ledger is None else done.untold()
        self.observer.on_round(shown, federation_of(self.settings).rounds)

    def _join(self) -> None:
        """Every client agrees to the public settings, or the federation does not begin."""
        size = federation_of(self.settings).size
        self.observer.on_phase(f"asking {size} clients to join", None, None)
        terms = public_settings(self.settings).to_yaml()
        values = {"run": self.history.run, "settings": terms}
        names = federation_of(self.settings).names
        missing = set(names) - set(self.exchange.names())
        if missing:
            raise RunError(
                f"clients that cannot be reached: {', '.join(sorted(missing))}", fix="start them, then go on"
            )
        refused: dict[str, str] = {}
        replies = self._answers([Request(name, "join", 0, values=values) for name in names], refused)
        joined = {reply.client for reply in replies}
        if federation_of(self.settings).secure:
            self._roster = roster_of(replies)
            joined &= set(self._roster)
        if joined != set(names):
            absent = sorted(set(names) - joined)
            shown = [f"{name} ({refused.get(name, 'no answer')})" for name in absent]
            raise RunError(
                f"clients that did not join: {', '.join(shown)}",
                why="a client joins terms that it can keep with its records and its budget",
                fix="mend what each of them said: above, or where a client on another machine logs",
            )
        _log.info("all %d clients joined", len(names))

    def _answers(self, requests: list[Request], refused: dict[str, str] | None = None) -> list[Reply]:
        """Replies that are listed and no refusals. refused: takes in why others do not count, in fixed words."""
        secure, found = federation_of(self.settings).secure, []
        for reply in self.exchange.send(requests):
            try:
                refuse_unlisted(reply, secure)
            except RunError as unlisted:
                _log.warning("the answer of %s is dropped: %s", reply.client, unlisted)
                why = "its answer is not listed"
            else:
                found += [reply] if reply.refused is None else []
                why = "its key is no key" if reply.refused is None else reply.refused
            if refused is not None:
                refused[reply.client] = why
        return found

    def _leave(self, number: int) -> dict[str, str]:
        """Each client's ledger, as the client gave it; without those that gave none."""
        names = federation_of(self.settings).names
        values = {"run": self.history.run}
        self.exchange.names()  # waits for those that are away, as long as for an answer
        replies = self._answers([Request(name, "leave", number + 1, values=values) for name in names])
        return {reply.client: str(reply.values["ledger"]) for reply in replies}

    def _evaluate(self, step: int) -> None:
        """Held-out loss of what would be exported now, on public records."""
        rows = read_lines(self.folder.evaluations)
        if not self.evaluation or any(row["step"] == step for row in rows):
            return
        self.observer.on_phase("measuring the held-out loss", None, None)
        with self.server.exported() as model:
            result = evaluate_next_token(model, self.evaluation)
        append_line(self.folder.evaluations, {"step": step, **finite(result.to_dict())})
        self.observer.on_evaluation(step, result.loss_per_example)


def shortfall(rounds: Sequence[Round]) -> str | None:
    """What rounds lacked that the report says too, for the log's last line: None where at least half of those asked
    answered in every round, and everybody in some."""
    done = [one for one in rounds if one.void is None]
    reasons = {str(one.void) for one in rounds if one.void is not None}
    found: list[str] = []
    if reasons:
        void = f"{len(rounds) - len(done)} of {len(rounds)} rounds are void ({why_void(rounds)})"
        found.append(f"{void}, nothing moved in them")
    asked = {name for one in done for name in one.asked}
    absent = sorted(asked - {name for one in done for name in one.answered})
    few = [one.step for one in done if 2 * len(one.answered) < len(one.asked)]
    if absent:
        found.append(f"never an answer from {', '.join(absent)}: nothing was learnt from their records")
    if few:
        which = str(len(few)) if len(few) > _SHOWN else ", ".join(map(str, few))
        found.append(f"fewer than half of those asked answered in rounds: {which} (of {len(rounds)})")
    look = ". See what these clients logged" if absent or few or reasons - {STOPPED} else ""
    return f"{'; '.join(found)}{look}" if found else None
