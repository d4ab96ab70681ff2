"""A client as deployments start it: anew for every message, with its owner's limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from flower_core import NAMES, difference, federation

from privlora.accounting import read_ledger
from privlora.config import Settings
from privlora.errors import ModelError, PrivloraError, RunError
from privlora.federated.client import Client
from privlora.federated.history import History
from privlora.federated.limits import ANYTHING
from privlora.federated.messages import Exchange, InProcess, Reply, Request
from privlora.federated.run import federate, serve_run
from privlora.training import models
from privlora.training.files import RunFolder

LIGHT = {"join", "share", "sketch", "agree", "unmask", "leave"}
NOISE = {"noise_multiplier": 2.0, "delta": 1e-6}


class Anew:
    """Clients of which nothing but their folders lasts from one message to the next."""

    def __init__(self, root: Path, settings: Settings, **owner: object) -> None:
        clients = settings.federation.clients if settings.federation else []
        self.paths = {client.name: client.path for client in clients if not isinstance(client, int)}
        self.root, self.owner, self.model = root, {"limits": ANYTHING, **owner}, settings.model.name
        self.kinds: list[str] = []

    def answer(self, requests: Sequence[Request]) -> list[Reply]:
        self.kinds += [request.kind for request in requests]
        return [self.client(request.client).answer(request) for request in requests]

    def client(self, name: str) -> Client:
        return Client(
            name,
            self.root / name,
            path=self.paths[name],
            model=self.model,
            **self.owner,  # type: ignore[arg-type]
        )

    def exchange(self) -> Exchange:
        return InProcess(NAMES, self.answer)


@pytest.mark.parametrize(
    ("rule", "more"), [("fedask", {"local_steps": 2}), ("tan", {"secure_aggregation": True})]
)
def test_the_model_is_loaded_to_train_and_for_nothing_else(
    tmp_path: Path, rule: str, more: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = federation(tmp_path, tmp_path / "out", rule, **more)
    anew, load, training, loads = Anew(tmp_path, settings), models.load_model, [True], []

    def loaded(*arguments: object) -> tuple:
        if not training[0]:
            raise ModelError("a model is loaded for a message that needs none", fix="")
        loads.append(arguments)
        return load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(models, "load_model", loaded)

    def answer(requests: Sequence[Request]) -> list[Reply]:
        training[0] = requests[0].kind == "train"
        try:
            return anew.answer(requests)
        finally:
            training[0] = True

    serve_run(settings, InProcess(NAMES, answer), tmp_path / "out")
    assert len(loads) == 1 + anew.kinds.count("train") == 1 + 2 * len(NAMES)  # the server's is the first
    assert set(anew.kinds) - {"train"} <= LIGHT
    assert {"join", "leave", "sketch" if rule == "fedask" else "unmask"} <= set(anew.kinds)
    federate(federation(tmp_path, tmp_path / "embedded", rule, **more))
    assert difference(tmp_path / "out", tmp_path / "embedded") < 1e-6


class Stops(Exception):
    """In place of a process that dies."""


def test_a_server_goes_on_with_what_lies_in_its_folder(tmp_path: Path) -> None:
    settings = federation(tmp_path, tmp_path / "elsewhere", "tan")
    anew, folder = Anew(tmp_path, settings), tmp_path / "out"

    def stopping(requests: Sequence[Request]) -> list[Reply]:
        if (requests[0].kind, requests[0].round) == ("train", 2):
            raise Stops
        return anew.answer(requests)

    with pytest.raises(Stops):
        serve_run(settings, InProcess(NAMES, stopping), folder)
    begun = History(RunFolder(folder).private / "rounds.jsonl")
    other = federation(tmp_path, tmp_path / "elsewhere", "tan", rounds=3)
    with pytest.raises(RunError, match="holds a run with other settings"):
        serve_run(other, anew.exchange(), folder)
    path = RunFolder(folder).settings
    kept, changed = path.read_text("utf-8"), settings.method.model_copy(update={"learning_rate": 0.5})
    path.write_text(kept.replace("learning_rate: null", "learning_rate: 0.5"), "utf-8")  # in both places
    with pytest.raises(PrivloraError, match=r"method\.learning_rate was"):
        serve_run(settings.model_copy(update={"method": changed}), anew.exchange(), folder)
    path.write_text(kept, "utf-8")
    done = serve_run(settings, anew.exchange(), folder)
    ended = History(RunFolder(folder).private / "rounds.jsonl")
    assert (done.release, done.rounds, ended.run) == (folder / "not-private", 2, begun.run)
    assert [one.void for one in ended.rounds()] == [None, "the server stopped"]
    assert anew.kinds.count("train") == len(NAMES)  # of a round that was begun, nobody is asked again
    assert not (tmp_path / "elsewhere").exists()


def test_of_a_run_that_is_over_nobody_is_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = federation(tmp_path, tmp_path / "out", "tan", privacy=NOISE, rounds=1)
    anew, folder = Anew(tmp_path, settings), RunFolder(tmp_path / "out")

    def without_c(kind: str) -> Exchange:
        return InProcess(
            NAMES, lambda asked: anew.answer([r for r in asked if (r.client, r.kind) != ("c", kind)])
        )

    serve_run(settings, without_c("leave"), folder.root)
    assert not (folder.release / "ledger-c.jsonl").exists()
    whole = serve_run(settings, anew.exchange(), folder.root)  # c has its ledger to give
    assert read_ledger(folder.release / "ledger-c.jsonl").charges == 1
    asked = len(anew.kinds)
    caplog.set_level("INFO", "privlora")
    assert serve_run(settings, InProcess([], anew.answer), folder.root) == whole
    assert len(anew.kinds) == asked
    assert "nobody is asked for anything" in caplog.text
    (folder.release / "report.html").unlink()  # died while publishing
    assert serve_run(settings, anew.exchange(), folder.root) == whole
    assert len(anew.kinds) > asked
    weights = folder.release / "adapter_model.safetensors"
    written = weights.read_bytes()
    weights.write_bytes(written + b" ")
    assert serve_run(settings, anew.exchange(), folder.root) == whole
    assert weights.read_bytes() == written


def test_pinned_clients_alone_share_keys(tmp_path: Path) -> None:
    settings = federation(tmp_path, tmp_path / "out", "tan", secure_aggregation=True, rounds=1)
    known = Anew(tmp_path, settings)
    pins = {name: known.client(name).identity.public(name).fingerprint for name in NAMES}
    assert len(set(pins.values())) == len(NAMES)
    for given, answered in ((pins, list(NAMES)), ({**pins, "c": pins["a"]}, [])):
        out = tmp_path / f"out-{len(answered)}"
        serve_run(settings, Anew(tmp_path, settings, pins=given).exchange(), out)
        (one,) = History(RunFolder(out).private / "rounds.jsonl").rounds()
        assert sorted(one.answered) == answered
