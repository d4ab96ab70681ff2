"""What an operator reads of a deployed run: through Flower's logger, in whole lines, and nothing private."""

from __future__ import annotations

import logging
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from flower_core import NAMES, federation
from flower_stubs import EmbeddedGrid
from flwr.app import Context, RecordDict

from privlora.accounting import read_ledger
from privlora.config import Settings
from privlora.errors import ConfigError, ModelError, PrivloraError, RunError
from privlora.federated.client import Client
from privlora.federated.flower.app import write_app
from privlora.federated.flower.server_app import APPS, make_server_app
from privlora.federated.limits import ANYTHING
from privlora.federated.messages import Reply, Request
from privlora.training.loop import Interrupted

NOISE = {"noise_multiplier": 2.0, "delta": 1e-6, "insecure_noise_seed": 1}
FLOWER = logging.getLogger("flwr")


class Lines(logging.Handler):
    """What Flower would stream: a formatted line each."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))

    @property
    def text(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    FLOWER.addHandler(handler)
    yield handler
    FLOWER.removeHandler(handler)


def context(app: Path) -> Context:
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=config)


def as_flower_does(app: Path, grid: EmbeddedGrid, **given: object) -> PrivloraError | None:
    """Start a ServerApp; what it raises is logged in Flower's way."""
    try:
        make_server_app(**given)(grid, context(app))  # type: ignore[arg-type]
    except PrivloraError as error:
        FLOWER.log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=error)
        return error
    return None


def deployed(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(APPS, str(tmp_path / "apps"))
    return write_app(tmp_path / "apps/app-1", settings, timeout=5)


def clients(tmp_path: Path, settings: Settings, **model: str) -> dict[str, Client]:
    """model: of those who have another."""

    def one(name: str) -> Client:
        chosen = model.get(name, settings.model.name)
        records = str(tmp_path / f"records/{name}.jsonl")
        return Client(name, tmp_path / name, path=records, model=chosen, limits=ANYTHING)

    return {name: one(name) for name in NAMES}


def test_an_operator_reads_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    settings = federation(tmp_path, tmp_path / "out", "tan", privacy=NOISE, rounds=3)
    public = str(shutil.copy(tmp_path / "records/a.jsonl", tmp_path / "public.jsonl"))
    data = settings.data.model_copy(update={"evaluation": public})
    settings = settings.model_copy(update={"data": data})
    app, own = deployed(tmp_path, settings, monkeypatch), clients(tmp_path, settings)

    def answer(requests: Sequence[Request]) -> list[Reply]:
        """c has no records any more once it has joined; b is slower than the timeout in round 2, and a too."""
        there = []
        for request in requests:
            if request.kind == "train" and request.round == 1:
                Path(str(own["c"].path)).unlink(missing_ok=True)
            if request.kind == "train" and request.round == 2 and request.client != "c":
                continue
            there.append(own[request.client].answer(request))
        return there

    assert as_flower_does(app, EmbeddedGrid(NAMES, answer)) is None
    for words in (
        f"INFO run folder: {tmp_path / 'out'}",
        "INFO round 1/3: 2 of 3 clients answered (a, b); dropped out: c; ",
        "INFO round 2: no answer to train from a, b",
        "WARNING round 2/3 is VOID",
        "INFO held-out loss after round 3: ",
        "never an answer from c",
    ):
        assert words in lines.text
    assert not logging.getLogger("privlora").handlers
    # The clients of this test log into the same process; of the server's own lines none holds what is private.
    secret = str(own["c"].path)
    of_server = [line for line in lines.said if "refuses 'train'" not in line]
    assert not any(secret in line or "Traceback" in line for line in of_server)
    assert read_ledger(tmp_path / "out/not-private/ledger-a.jsonl").charges == 2


def test_a_client_that_cannot_train_is_named_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    settings = federation(tmp_path, tmp_path / "out", "tan", rounds=1)
    app = deployed(tmp_path, settings, monkeypatch)
    own = clients(tmp_path, settings, c=str(tmp_path / "nowhere"))
    Path(str(own["b"].path)).unlink()
    error = as_flower_does(app, EmbeddedGrid(NAMES, lambda asked: [own[r.client].answer(r) for r in asked]))
    assert isinstance(error, RunError)
    said = "clients that did not join: b (its records cannot be read), c (its base model is not found)"
    assert lines.said[-1].startswith(f"ERROR {said}")
    assert "Traceback" not in lines.text


@pytest.mark.parametrize(
    ("break_it", "kind", "says"),
    [
        (lambda app, patch: patch.delenv(APPS), ConfigError, f"{APPS} is not set"),
        (lambda app, patch: _no_model(app), ModelError, "cannot load model '/nowhere/model'"),
        (
            lambda app, patch: patch.setattr("privlora.federated.run.serve_run", _interrupted),
            RunError,
            "the server was stopped after round 4, which is saved",
        ),
    ],
)
def test_errors_of_privlora_are_one_line(
    break_it: object, kind: type, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    settings = federation(tmp_path, tmp_path / "out", "tan")
    app = deployed(tmp_path, settings, monkeypatch)
    break_it(app, monkeypatch)  # type: ignore[operator]
    assert isinstance(as_flower_does(app, EmbeddedGrid(NAMES, lambda asked: [])), kind)
    said = lines.said[-1]
    assert said.startswith("ERROR ")
    assert says in said
    assert "\n" not in said


def _interrupted(*_: object, **__: object) -> None:
    raise Interrupted(4)


def _no_model(app: Path) -> None:
    """Gone after the app was written."""
    for path in (app / "server/settings.yaml", app / "pyproject.toml"):
        text = path.read_text()
        name = next(line.split()[-1] for line in (app / "server/settings.yaml").read_text().splitlines()[1:2])
        path.write_text(text.replace(name, "/nowhere/model"))


def test_where_clients_are_drawn_in_secret_no_failed_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    secret = {"privacy_model": "client", "trusted_server": True}
    settings = federation(tmp_path, tmp_path / "out", "fedavg", privacy={**NOISE, "clip_norm": 1.0}, **secret)
    app, own = deployed(tmp_path, settings, monkeypatch), clients(tmp_path, settings)

    def answer(requests: Sequence[Request]) -> list[Reply]:
        """Something else than was asked for, of training."""
        if requests[0].kind == "train":
            return [Reply(request.client, "leave", request.round) for request in requests]
        return [own[request.client].answer(request) for request in requests]

    assert as_flower_does(app, EmbeddedGrid(NAMES, answer)) is None
    assert not any("dropped" in line or "(node " in line for line in lines.said)
    aside = (tmp_path / "out/private/answers.jsonl").read_text()
    assert "round 1: a (node 1) gave an answer that is dropped" in aside
