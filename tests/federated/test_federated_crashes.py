"""Whatever kills a federation in one process, and whenever: ledgers cover what left, nobody answers twice, and resuming
ends the plan."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from crash_cases import CLIENTS, ROUNDS, check_charges, check_ended, go_on, run, settings_of
from run_cases import in_a_child

from privlora.config import Settings
from privlora.errors import PrivacyError, RunError
from privlora.federated.client import Session, Work
from privlora.federated.history import STOPPED, History, RoundObserver
from privlora.federated.messages import Reply, Request
from privlora.training.loop import Interrupted

RULES: dict[str, dict[str, Any]] = {"joint": {}, "tan": {}, "fedask": {"secure_aggregation": True}}

pytestmark = pytest.mark.usefixtures("quick_reports")


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is imported or calibrated once is done before any process is forked."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlora.federated.run.publish", lambda *_, **__: None)
        run(settings_of(tmp_path_factory.mktemp("warm") / "run", "fedask", secure_aggregation=True))


@contextmanager
def answers_logged(log: Path) -> Iterator[None]:
    """Each answer that is about to leave a client, in one unbuffered write: client, round, stage and kind."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    trained, answered = Work.reply, Session.answer

    def note(request: Request, reply: Reply) -> Reply:
        line = f"{request.client} {request.round} {request.values.get('stage', '-')} {request.kind}\n"
        os.pwrite(file, line.encode(), 0)  # O_APPEND: always at the end
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "reply", lambda self, end: note(self.request, trained(self, end)))
        patch.setattr(Session, "answer", lambda self, request: note(request, answered(self, request)))
        yield
    os.close(file)


def trained(log: Path) -> list[tuple[str, int]]:
    """Answers to "train" that left; also checks that no question of a round was answered twice."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    within = [line for line in lines if line.split()[3] not in ("join", "leave")]
    assert len(set(within)) == len(within)
    return [(line.split()[0], int(line.split()[1])) for line in within if line.endswith(" train")]


# Calls around which a process may die; a run makes a few hundred of them.
DANGEROUS = ("fsync", "replace", "ftruncate", "open", "mkdir", "link")


def deadly(at: int) -> None:
    """Make this process kill itself before (odd) or after (even) its ``at``-th dangerous call."""
    count = [0]

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def then_die(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == at and at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **options)
            finally:
                if count[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        return then_die

    for name in DANGEROUS:
        setattr(os, name, wrapped(getattr(os, name)))


@pytest.mark.parametrize("rule", RULES)
def test_kill_9_and_go_on(rule: str, tmp_path: Path) -> None:
    """Nine kills a rule: six around a write of a file that is drawn, three at random moments."""
    rng = random.Random(rule)
    folder, log = tmp_path / "run", tmp_path / "log"
    settings = settings_of(folder, rule, **RULES[rule])

    def work(at: int | None = None) -> Settings:
        with answers_logged(log):
            if at is not None:
                deadly(at)
            go_on(settings)
        return settings

    kills = 0
    for at in [rng.randint(1, 12), *(rng.randint(10, 60) for _ in range(5)), None, None, None]:
        later = rng.uniform(0.05, 0.6) if at is None else None
        code = in_a_child(lambda at=at: work(at), kill_after=later)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        check_charges(folder, settings, trained(log))
    assert kills >= 6
    with answers_logged(log):
        result = go_on(settings)
    check_charges(folder, settings, trained(log))
    check_ended(folder, settings, result)


def dies_after(patch: pytest.MonkeyPatch, place: str, call: int) -> None:
    """Let this process be killed when the ``call``-th call of a method is over."""
    module, kind, name = place.rsplit(".", 2)
    owner = getattr(sys.modules[f"privlora.{module}"], kind)
    whole, count = getattr(owner, name), [0]

    def mortal(*args: Any, **options: Any) -> Any:
        result = whole(*args, **options)
        count[0] += 1
        if count[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    patch.setattr(owner, name, mortal)


MOMENTS = {
    "a client joined": ("federated.client.Session._join", 2),
    "the round was noted": ("federated.history.History.begin", 2),
    "a client noted the question": ("federated.desk.Desk.begin", 2),
    "an answer was charged": ("federated.desk.Desk.charged", CLIENTS + 1),
    "the round was closed": ("federated.server.Turn.take", 2),
    "the round ended, its state unsaved": ("federated.history.History.end", 2),
    "the ledgers were given": ("federated.server.Rounds._leave", 1),
    "the adapter was written": ("training.assembly.Parts.write_adapter", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_at_each_moment_of_a_round(moment: str, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    settings = settings_of(folder, "tan")

    def work() -> None:
        with answers_logged(log), pytest.MonkeyPatch.context() as patch:
            dies_after(patch, *MOMENTS[moment])
            go_on(settings)

    assert in_a_child(work) == -signal.SIGKILL
    check_charges(folder, settings, trained(log))
    with answers_logged(log):
        result = go_on(settings)
    check_charges(folder, settings, trained(log))
    check_ended(folder, settings, result)
    rounds = History(folder / "private/rounds.jsonl").rounds()
    voids = [one.step for one in rounds if one.void is not None]
    assert voids == ([] if "joined" in moment or "ledgers" in moment or "adapter" in moment else voids[:1])
    assert all(one.void in (None, STOPPED) for one in rounds)


def test_a_round_whose_state_was_lost_counts_as_void(tmp_path: Path) -> None:
    """What is written of a round is what the adapter holds of it."""
    folder = tmp_path / "run"
    settings = settings_of(folder, "tan")

    def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            dies_after(patch, "federated.history.History.end", 1)
            run(settings)

    assert in_a_child(work) == -signal.SIGKILL
    before = History(folder / "private/rounds.jsonl").rounds()
    assert before[0].answered
    go_on(settings)
    first, *others = History(folder / "private/rounds.jsonl").rounds()
    assert first.void == STOPPED
    assert first.answered == ()
    assert first.up == before[0].up
    assert len(others) == ROUNDS - 1


def test_one_server_at_a_time(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", "tan")
    run(settings)
    with (
        History(tmp_path / "run/private/rounds.jsonl").locked(),
        pytest.raises(RunError, match="another process serves"),
    ):
        run(settings, fresh=False)


def test_a_history_that_vanished_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    history = History(path)
    path.unlink()
    with pytest.raises(RunError, match=r"is gone.*restore it"), history.locked():
        pass
    assert not path.exists()  # else the run would get another name
    path.write_text('{"step": 1, "asked": []}\n')
    with pytest.raises(RunError, match=r"name of its run.*restore it"):
        History(path)


class _Stop(RoundObserver):
    """Asks the server to stop after its first round."""

    def on_round(self, done: Any, rounds: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("group", "edit"), [("method", {"learning_rate": 0.5}), ("privacy", {"clip_norm": 9.0})]
)
def test_edited_settings_do_not_go_on(group: str, edit: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", "tan")

    with pytest.raises(Interrupted):
        run(settings, observer=_Stop())
    other = settings.model_copy(update={group: getattr(settings, group).model_copy(update=edit)})
    (name,) = edit
    with pytest.raises((PrivacyError, RunError), match=rf"began are other ones now: {group}\.{name} was"):
        run(other, fresh=False)
    assert run(settings, fresh=False).rounds == ROUNDS


def test_a_server_that_forgot_its_run_does_not_begin_again(tmp_path: Path) -> None:
    """The clients would release their whole budget once more, under a new name."""
    folder = tmp_path / "run"
    settings = settings_of(folder, "tan")

    with pytest.raises(Interrupted):
        run(settings, observer=_Stop())
    (folder / "private/rounds.jsonl").unlink()
    (folder / "private/checkpoint.safetensors").unlink()
    with pytest.raises(PrivacyError, match="another run"):
        run(settings, fresh=False)
