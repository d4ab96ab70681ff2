"""A server that asks for more than was agreed on: refused in one line, before anything is charged."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from crash_cases import OPEN, RECORDS, ROUNDS, Between, ledgers, parts, run, settings_of

from privlora.accounting import read_ledger
from privlora.config import Settings, settings_from
from privlora.errors import PrivacyError
from privlora.federated.client import Client
from privlora.federated.history import History
from privlora.federated.limits import ANYTHING, Limits
from privlora.federated.messages import KINDS, InProcess, Request
from privlora.federated.plans import public_settings, with_local_method
from privlora.federated.rules.checks import refuse_foreign
from privlora.federated.workplace import Own, Workplace

pytestmark = pytest.mark.usefixtures("quick_reports")

VICTIM = "client-2"
RUN = "a1b2"


def between(patch: pytest.MonkeyPatch, kind: Callable[[Any], Between]) -> list[Between]:
    """Put an exchange of one's own between the server and the clients of the next runs; they are listed."""
    from privlora.federated import run as module

    made: list[Between] = []

    def wrapped(*arguments: Any) -> Between:
        made.append(kind(InProcess(*arguments)))
        return made[-1]

    patch.setattr(module, "InProcess", wrapped)
    return made


def charges(folder: Path) -> dict[str, int]:
    return {name: read_ledger(path).charges for name, path in ledgers(folder).items()}


# --- what is sent to be trained on ---


def first(request: Request, change: Callable[[torch.Tensor], torch.Tensor]) -> Request:
    name = next(iter(sorted(request.tensors)))  # 0.S
    return replace(request, tensors={**request.tensors, name: change(request.tensors[name])})


def bent(request: Request) -> Request:
    return replace(request, tensors={**request.tensors, "0.U": 3 * request.tensors["0.U"]})


LIES: list[Callable[[Request], Request]] = [
    lambda r: first(r, lambda t: torch.full_like(t, float("nan"))),
    lambda r: first(r, lambda t: torch.full_like(t, 1e9)),
    lambda r: first(r, lambda t: t[..., :1]),
    lambda r: first(r, lambda t: t.to(torch.int32)),
    lambda r: replace(r, tensors=dict(list(r.tensors.items())[1:])),
    lambda r: replace(r, tensors={**r.tensors, "9.S": torch.zeros(1, 2)}),
    bent,
    lambda r: replace(r, values={**r.values, "stage": "sketch"}),
]


def test_tensors_that_do_not_follow_from_the_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lie a round, to one client; it is charged for none of them, and the others go on."""

    class Lying(Between):
        def asked(self, request: Request) -> Request:
            lies = request.kind == "train" and request.client == VICTIM
            return LIES[request.round - 1](request) if lies else request

    between(monkeypatch, Lying)
    assert len(LIES) == ROUNDS
    run(settings_of(tmp_path, "tan"))
    assert charges(tmp_path) == {"client-1": ROUNDS, VICTIM: 0, "client-3": ROUNDS}
    rounds = History(tmp_path / "private/rounds.jsonl").rounds()
    assert all(one.answered == ("client-1", "client-3") for one in rounds)


# --- when and with whom ---


class Probing(Between):
    """Sends questions of its own before one of the honest server's; none may be answered."""

    probes: ClassVar[dict[tuple[str, int], Callable[[Request], Sequence[Request]]]] = {}
    refused = 0

    def send(self, requests: Sequence[Request]) -> Any:
        for request in requests:
            make = self.probes.get((request.kind, request.round))
            if request.client != VICTIM or make is None:
                continue
            for probe in make(request) or ():
                (reply,) = self.inner.send([probe])
                assert reply.refused is not None
                assert not reply.tensors
                assert not reply.values
                self.refused += 1
        return super().send(requests)


def changed(request: Request, **values: Any) -> Request:
    return replace(request, values={**request.values, **values})


def test_questions_out_of_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, "fedask", secure_aggregation=True)
    kept: list[Request] = []

    class Server(Probing):
        probes: ClassVar[Any] = {
            # A vector without masks, and a later stage without its first.
            ("share", 1): lambda r: [
                replace(r, kind="train", values={"run": r.values["run"], "stage": "train"}),
                replace(r, kind="sketch", values={"run": r.values["run"], "stage": "sketch"}),
            ],
            # Other numbers of clients, another threshold, other stages.
            ("share", 2): lambda r: (
                r.values["stage"] == "train"
                and [
                    changed(
                        r,
                        names="client-1,client-2",
                        signing=r.values["signing"][:64],
                        agreement=r.values["agreement"][:64],
                    ),
                    changed(r, threshold=2),
                    changed(r, stage="train2"),
                    changed(r, stage="sketch"),
                    replace(r, round=ROUNDS + 1),
                    replace(r, round=0),
                ]
            ),
            # Phases left out.
            ("train", 3): lambda r: [
                replace(r, kind="agree", tensors={}, values=named(r, "client-1,client-2,client-3"))
            ],
            # Survivors that were not agreed on.
            ("agree", 4): lambda r: [changed(r, names="client-1,client-2")],
            ("unmask", 5): lambda r: [changed(r, names="client-1,client-2", signers="client-1,client-2")],
            # The first stage of the next round in the place of this round's second one.
            ("train", 6): lambda r: [replace(r, kind="sketch"), changed(r, stage="sketch")],
        }

        def asked(self, request: Request) -> Request:
            if request.client == VICTIM and request.kind not in ("join", "leave"):
                kept.append(request)
            return request

    made = between(monkeypatch, Server)
    run(settings)
    assert made[0].refused >= 12
    rounds = {one.step: one for one in History(tmp_path / "private/rounds.jsonl").rounds()}
    assert rounds[2].void is None, "questions that are refused out of hand do not stop a round"
    assert rounds[7].void is None
    assert [number for number in (3, 4, 5) if rounds[number].void is None] == []
    # All that was asked, once more.
    before = charges(tmp_path)
    client = Client(VICTIM, tmp_path / "clients" / VICTIM, limits=ANYTHING)
    assert all(client.answer(request).refused for request in kept)
    assert charges(tmp_path) == before
    assert max(before.values()) <= ROUNDS


def named(request: Request, names: str) -> dict[str, Any]:
    return {"run": request.values["run"], "stage": "train", "names": names}


@pytest.mark.parametrize("kind", KINDS[1:-1])
def test_before_joining_nothing_is_answered(kind: str, tmp_path: Path) -> None:
    client = Client(VICTIM, tmp_path / "c")
    assert client.answer(Request(VICTIM, kind, 1, values={"run": RUN})).refused
    assert not (tmp_path / "c" / RUN).exists()


# --- names of runs and clients ---


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "..", "a" * 65, "ä", "a\0b", 7, None, b"ab"])
def test_names_of_runs_that_lead_elsewhere(name: Any, tmp_path: Path) -> None:
    client = Client(VICTIM, tmp_path / "inside" / "c")
    values = {"settings": terms(settings_of(tmp_path)), **({} if name is None else {"run": name})}
    assert client.answer(Request(VICTIM, "join", 0, values=values)).refused
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


# --- terms ---


def terms(settings: Settings) -> str:
    return public_settings(with_local_method(settings)).to_yaml()


def joins(client: Client, text: str, name: str = RUN) -> bool:
    reply = client.answer(Request(client.name, "join", 0, values={"run": name, "settings": text}))
    return reply.refused is None


def client_of(folder: Path, settings: Settings, **limits: Any) -> Client:
    """A client that has the model."""
    chosen = {"max_delta": 1e-2, **limits}
    given = Workplace(public_settings(with_local_method(settings)), *parts())
    return Client(VICTIM, folder, records=RECORDS, limits=Limits(**chosen), workplaces={RUN: given})


SPENDS = {"target_epsilon": 4.0, "delta": 1e-3}
WHOLE_CLIENTS = {"rule": "fedavg", "privacy_model": "client", "trusted_server": True}


@pytest.mark.parametrize(
    ("privacy", "federation", "limits"),
    [
        (OPEN, {}, {}),
        ({**SPENDS, "insecure_noise_seed": 1}, {}, {}),
        ({"noise_multiplier": 0.3, "delta": 1e-3}, {}, {}),
        (SPENDS, {}, {"max_epsilon": 2.0}),
        (SPENDS, {}, {"max_delta": 1e-4}),
        (SPENDS, {}, {"needs_secure_sums": True}),
        (SPENDS, {}, {"unit": "user"}),
        (SPENDS, {"clients_per_round": 1}, {}),
        (SPENDS, {}, {"least_clients": 4}),
        (SPENDS, WHOLE_CLIENTS, {}),
    ],
)
def test_terms_beyond_what_the_owner_allows(
    privacy: Any, federation: Any, limits: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path / "run", privacy=privacy, **federation)
    client = client_of(tmp_path / "c", settings, **limits)
    with caplog.at_level(logging.WARNING):
        assert not joins(client, terms(settings))
    assert "limits." in caplog.text
    assert not list((tmp_path / "c").rglob("*.jsonl"))
    assert joins(replace(client, limits=ANYTHING), terms(settings))


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("delta", "delta: 0.001", "delta: 0.002"),
        ("clip_norm", "clip_norm: 1.0", "clip_norm: 100.0"),
        ("private", "private: true\n  target_epsilon: 4.0", "private: false\n  target_epsilon: null"),
        ("secure", "secure_aggregation: null", "secure_aggregation: true"),
        ("seed", "insecure_noise_seed: null", "insecure_noise_seed: 3"),
    ],
)
def test_terms_do_not_change_after_joining(
    key: str, old: str, new: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = terms(settings_of(tmp_path / "run"))
    client = client_of(tmp_path / "c", settings_of(tmp_path / "run"))
    assert old in text
    assert joins(client, text)
    client.limits = ANYTHING
    with caplog.at_level(logging.WARNING):
        assert not joins(client, text.replace(old, new))
        # Also where the process died before it had written what it agreed to.
        (tmp_path / "c" / RUN / "settings.yaml").unlink()
        assert not joins(client, text.replace(old, new)) or key in ("secure", "seed")
    # Without noise there are no secure sums, so those terms are not even read as such.
    assert ("other terms" in caplog.text) == (key != "private")
    assert joins(client, text) or key in ("secure", "seed")


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "!!python/object/apply:os.system ['true']"])
def test_settings_that_are_none(text: str, tmp_path: Path) -> None:
    assert not joins(Client(VICTIM, tmp_path / "c", limits=ANYTHING), text)


@pytest.mark.parametrize("place", ["folder", "file", "hub"])
def test_the_server_does_not_choose_what_is_loaded(place: str, tmp_path: Path) -> None:
    """A folder of this machine may be another client's model; a file may be a pickle; both are the server's choice."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.pkl").write_bytes(b"\x80")
    places = {"folder": str(tmp_path / "folder"), "file": str(tmp_path / "model.pkl"), "hub": "owner/model"}
    name = places[place]
    settings = settings_of(tmp_path / "run")
    text = terms(settings).replace("name: tiny", f"name: {name}")
    assert name in text
    allowed, records = Limits(max_delta=1e-2, pins_model=False), [{"text": "mine"}]
    assert not joins(Client(VICTIM, tmp_path / "a", records=records, limits=Limits(max_delta=1e-2)), text)
    assert joins(Client(VICTIM, tmp_path / "b", records=records, limits=allowed), text) == (place == "hub")
    pinned = Client(VICTIM, tmp_path / "c", records=records, limits=Limits(max_delta=1e-2), model="mine")
    assert joins(pinned, text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  evaluation: null", "  evaluation: FILE"),
        ("  init: null\n  public_text: null", "  init: public-gradient\n  public_text: FILE"),
    ],
    ids=["evaluation", "public_text"],
)
def test_the_server_does_not_choose_what_is_read(old: str, new: str, tmp_path: Path) -> None:
    """Of this machine's files: whether one holds a client's records would show in whether it answers. Terms that name
    files are not joined; a client's records are read without looking at what they name, all the same."""
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    text = terms(settings_of(tmp_path / "run"))
    assert text.count(old) == 1
    told = settings_from(yaml.safe_load(text.replace(old, new.replace("FILE", str(file)))))
    data = Own(VICTIM, str(file)).data(told, *parts())  # without holding it against what is named
    assert (len(data.units), len(data.evaluation)) == (len(RECORDS), 0)


def test_what_is_sent_has_orthonormal_bases_on_both_sides() -> None:
    bases = {"0.U": torch.eye(4)[None, :, :2], "0.V": torch.eye(3)[None, :, :2]}
    shapes = {name: tuple(tensor.shape) for name, tensor in bases.items()}
    refuse_foreign(bases, shapes)
    for name in bases:
        with pytest.raises(PrivacyError, match="not orthonormal"):
            refuse_foreign({**bases, name: 2 * bases[name]}, shapes)
        turned = bases[name].clone()
        turned[0, 0, 1] = 0.02  # two directions that are 1.1 degrees off their right angle
        for near in (1.006 * bases[name], turned):
            with pytest.raises(PrivacyError, match="not orthonormal"):
                refuse_foreign({**bases, name: near}, shapes)
    halves = torch.linalg.qr(torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(0)))[0].bfloat16()
    refuse_foreign({"0.U": halves}, {"0.U": (1, 64, 8)})
