"""A trusted server's epsilon counts on nobody knowing whom it drew: what it leaves and shows tells nobody."""

from __future__ import annotations

import io
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federated_cases import Federation, owners, records, settings_of, without_noise
from rich.console import Console
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import ledger
from privlora.data.sampling import PoissonSampler
from privlora.errors import PrivacyError, RunError
from privlora.federated import local
from privlora.federated.client import Session, Work
from privlora.federated.history import ASIDE, Round, RoundObserver
from privlora.federated.messages import REFUSED, Request
from privlora.federated.plans import with_local_method
from privlora.federated.progress import RoundProgress
from privlora.federated.run import federate
from privlora.federated.server import NOTHING_LACKED
from privlora.federated.server import SECRET as SECRET_WORDS
from privlora.mechanisms.updates import ClippedUpdate

NAMES = [f"owner-{k}" for k in range(4)]
SECRET = {"privacy_model": "client", "trusted_server": True, "clients_per_round": 2, "rounds": 3}
# Whom the server draws in each round: places among the clients.
DRAWS: dict[str, Sequence[Sequence[int]]] = {
    "a few": [[0], [1, 2], [3]],
    "all, then nobody": [[0, 1, 2, 3], [], [0, 1, 2, 3]],
    "nobody": [[], [], []],
}


def drawing(patch: pytest.MonkeyPatch, rounds: Sequence[Sequence[int]]) -> None:
    """The server's sampler, known by its number of units, draws these; clients draw all of their records."""
    left = iter(rounds)

    def draw(self: PoissonSampler) -> np.ndarray:
        chosen = next(left) if self._units == len(NAMES) else range(self._units)
        return np.array(chosen, dtype=np.int64)

    patch.setattr(PoissonSampler, "draw", draw)


def left_by(
    rule: str, rounds: Sequence[Sequence[int]], root: Path, fails: Sequence[str] = ()
) -> tuple[dict[str, bytes], str]:
    """Files of release/, and what is printed; without all that is drawn at random, and updates of zero. fails: clients
    that refuse to train."""
    with pytest.MonkeyPatch.context() as patch:
        without_noise(patch)
        drawing(patch, rounds)
        patch.setattr(secrets, "token_hex", lambda size=16: "ab" * size)
        patch.setattr(ledger, "uuid", SimpleNamespace(uuid4=lambda: "7" * 8))
        patch.setattr(
            ClippedUpdate, "clipped", lambda self, _: torch.zeros(self.entries, dtype=torch.float64)
        )
        patch.setattr(Session, "begin", refusing(Session.begin, fails))
        settings = settings_of(rule, NAMES, federation=SECRET, run={"output": str(root), "evaluate_every": 1})
        shown = Console(file=io.StringIO(), record=True, width=200)
        with RoundProgress(shown, private=True) as observer:
            done = federate(
                settings,
                model=tiny_model(),
                tokenizer=tiny_tokenizer(),
                records=owners(len(NAMES)),
                evaluation=records(9),
                observer=observer,
            )
    return {path.name: path.read_bytes() for path in done.release.iterdir()}, shown.export_text()


def refusing(begin: Callable[..., Any], fails: Sequence[str]) -> Callable[..., Any]:
    def begins(self: Session, request: Request, held: ExitStack) -> Any:
        if request.client in fails:
            raise RunError("this machine cannot train", fix="mend it")
        return begin(self, request, held)

    return begins


def of_the_server(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Lines of its log; those of clients stand elsewhere, where they are on machines of their own."""
    own = [record for record in caplog.records if record.name != "privlora.federated.client"]
    return [(record.levelno, record.getMessage()) for record in own if record.name.startswith("privlora")]


def test_who_fails_and_how_often_is_said_aside_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that always fails, drawn never, once or always: what the log says is the same."""
    said = []
    for name, fails in (("nobody", ()), ("a few", NAMES[1:]), ("all, then nobody", NAMES[:1])):
        with caplog.at_level(logging.INFO, "privlora"):
            files, shown = left_by("fedavg", DRAWS[name], tmp_path / name, fails)
        said.append((of_the_server(caplog), files, shown))
        caplog.clear()
        lines = (tmp_path / name / "private/answers.jsonl").read_text().splitlines()
        aside = [json.loads(line)["said"] for line in lines]
        assert [line for line in aside if "refuses train" in line] == [
            f"round {number}: {NAMES[place]} refuses train: its own log says why"
            for number, drawn in enumerate(DRAWS[name], start=1)
            for place in drawn
            if NAMES[place] in fails
        ]
        assert aside[-1] == (NOTHING_LACKED if not fails else aside[-1])
        assert ("never an answer from" in aside[-1]) == bool(fails)
    assert said[0] == said[1] == said[2]
    assert (logging.INFO, SECRET_WORDS) in said[0][0]


def test_what_a_trusted_server_leaves_is_the_same_whoever_was_drawn(tmp_path: Path) -> None:
    """Also with rolora, whose messages are of another size in every other round."""
    found = {name: left_by("rolora", rounds, tmp_path / name) for name, rounds in DRAWS.items()}
    files, shown = found.pop("a few")
    assert {"adapter_model.safetensors", "privacy_report.json", "README.md", "report.html"} < set(files)
    assert "round 2/3" in shown
    for name, (others, also) in found.items():
        assert set(others) == set(files), name
        for file, content in files.items():
            assert others[file] == content, (name, file)
        assert also == shown


@pytest.mark.parametrize("place", ["Session.begin", "Work.reply", "local.train_locally"])
def test_an_error_of_any_kind_is_a_client_that_does_not_answer(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not end the run, from which it would follow whom the server drew. Of training that clients of a process
    share, none of them answers."""
    federation = Federation(
        tmp_path, settings_of("fedavg", NAMES, federation=SECRET), owners(len(NAMES))
    ).join()
    kind, _, name = place.partition(".")
    broken: Any = {"Session": Session, "Work": Work, "local": local}[kind]
    works = getattr(broken, name)

    def raises(self: Any, *given: Any) -> Any:
        of = given[0].client if name == "begin" else self.request.client if name == "reply" else NAMES[0]
        if of == NAMES[0]:
            raise ZeroDivisionError("Zanzibar")
        return works(self, *given)

    monkeypatch.setattr(broken, name, raises)
    replies = federation.exchange.send([federation.request(each) for each in NAMES[:2]])
    refused = {reply.client: reply.refused for reply in replies}
    assert refused == {NAMES[0]: REFUSED, NAMES[1]: REFUSED if kind == "local" else None}
    assert f"{NAMES[0]} refuses 'train' of round 1: ZeroDivisionError at client.py:" in caplog.text
    assert "Zanzibar" not in caplog.text  # what others raise may quote a record


def test_clients_are_not_drawn_otherwise_than_the_ledger_charges(tmp_path: Path) -> None:
    """Settings that changed since the ledger was begun, and that clients joined all the same."""
    federation = Federation(tmp_path, settings_of("fedavg", NAMES, federation=SECRET), owners(len(NAMES)))
    other = settings_of("fedavg", NAMES, federation={**SECRET, "clients_per_round": 3})
    federation.settings = with_local_method(other)
    with pytest.raises(PrivacyError, match="drawn in another way than the ledger's plan says"):
        federation.run()
    assert federation.exchange.requests("join")
    assert not federation.exchange.requests("train")


class Rounds(RoundObserver):
    def __init__(self) -> None:
        self.seen: list[Round] = []

    def on_round(self, done: Round, rounds: int) -> None:
        self.seen.append(done)


@pytest.mark.parametrize("trusted", [True, False])
def test_observers_are_told_who_came_only_where_it_is_no_secret(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own history, which is private, has it."""
    drawing(monkeypatch, DRAWS["a few"])
    group: dict[str, Any] = SECRET if trusted else {"rounds": 3}
    made = Federation(tmp_path, settings_of("fedavg", NAMES, federation=group), owners(len(NAMES)))
    rounds, observer = made.rounds(), Rounds()
    rounds.observer = observer
    rounds.serve()
    assert all(one.asked for one in made.done())
    for one in observer.seen:
        assert bool(one.asked or one.answered or one.down or one.up or one.sent) != trusted


def test_an_answer_that_is_dropped_leaves_no_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drawing(monkeypatch, DRAWS["a few"])
    made = Federation(tmp_path, settings_of("fedavg", NAMES, federation=SECRET), owners(len(NAMES)))
    wrong = {"0.left": torch.zeros(1)}
    made.exchange.change = lambda reply: replace(reply, tensors=wrong) if reply.kind == "train" else reply
    with caplog.at_level(logging.INFO):
        made.run()
    assert "dropped" not in caplog.text
    assert "owner-" not in caplog.text
    aside = (made.folder.private / ASIDE).read_text()
    assert "round 1: the answer of owner-0 is dropped" in aside


def test_bytes_to_a_client_are_of_those_who_were_sent_something(tmp_path: Path) -> None:
    """A client that drops out of a secure sum before vectors are asked for is not sent the adapter."""
    group = {"secure_aggregation": True, "survivors": 3, "rounds": 1}
    made = Federation(tmp_path, settings_of("fedavg", NAMES, federation=group), owners(len(NAMES)))
    lost: Callable[[Request], bool] = lambda m: m.client == NAMES[0] and m.kind != "join"  # noqa: E731
    made.exchange.drop = lost
    made.run()
    (done,) = made.done()
    assert (len(done.asked), len(done.answered), done.sent) == (4, 3, 3)
