"""A client's files: whatever is torn, missing, older or copied, it answers no question twice and never unseen."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_cases import CLIENTS, RECORDS, ROUNDS, ledgers, parts, run, settings_of

from privlora.accounting import read_ledger
from privlora.errors import PrivacyError, PrivloraError, RunError
from privlora.federated import run as engine
from privlora.federated.client import Client
from privlora.federated.desk import Desk
from privlora.federated.history import History
from privlora.federated.limits import ANYTHING
from privlora.federated.messages import KINDS, InProcess, Reply, Request
from privlora.federated.plans import public_settings, with_local_method
from privlora.federated.secure.keys import Identity
from privlora.federated.workplace import Workplace

pytestmark = pytest.mark.usefixtures("quick_reports")

NAME = "client-1"


class Honest:
    """What an honest server asked one client, round by round, and a copy of the client's folder before each round."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, rule: str = "tan", **options: Any) -> None:
        self.root, self.settings = root, settings_of(root / "run", rule, **options)
        self.asked: list[Request] = []
        self.client = root / "run/clients" / NAME

        def embedded(names: Any, answer: Any) -> Any:
            def noted(requests: list[Request]) -> list[Reply]:
                for request in requests:
                    if request.client == NAME:
                        self.asked.append(request)
                        self._copy(request)
                return answer(requests)

            return InProcess(names, noted)

        patch.setattr(engine, "InProcess", embedded)
        run(self.settings)
        patch.undo()
        self.run = History(root / "run/private/rounds.jsonl").run
        public = public_settings(with_local_method(self.settings))
        self.workplaces = {self.run: Workplace(public, *parts())}

    def _copy(self, request: Request) -> None:
        target = self.before(request.round, request.kind)
        if self.client.exists() and not target.exists():
            shutil.copytree(self.client, target)

    def before(self, number: int, kind: str) -> Path:
        return self.root / f"before-{number}-{kind}"

    def at(self, number: int, kind: str) -> tuple[Client, Desk]:
        """The client as it was before a question, in a new process."""
        folder = self.root / "now"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.before(number, kind), folder)
        client = Client(NAME, folder, records=RECORDS[:6], limits=ANYTHING, workplaces=dict(self.workplaces))
        return client, Desk(folder / self.run)

    def request(self, number: int, kind: str) -> Request:
        return next(one for one in self.asked if (one.round, one.kind) == (number, kind))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Honest:
    with pytest.MonkeyPatch.context() as patch:
        return Honest(tmp_path_factory.mktemp("honest"), patch)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Honest:
    with pytest.MonkeyPatch.context() as patch:
        return Honest(tmp_path_factory.mktemp("secure"), patch, "fedask", secure_aggregation=True)


def test_the_copy_answers(honest: Honest) -> None:
    """Else the refusals below would say nothing."""
    client, desk = honest.at(3, "train")
    reply = client.answer(honest.request(3, "train"))
    assert reply.refused is None
    assert reply.tensors
    assert read_ledger(desk.ledger).charges == 3
    note = json.loads((desk.root / "answered.json").read_text())
    assert note["charges"] == 3
    assert client.answer(honest.request(3, "train")).refused


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def cut(path: Path) -> None:
    """Without its last line."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def gone(path: Path) -> None:
    path.unlink()


FILES = ("answered.json", "ledger.jsonl", "settings.yaml")


@pytest.mark.parametrize("harm", [emptied, halved, cut, gone])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_no_answer(
    file: str, harm: Callable[[Path], None], honest: Honest, caplog: pytest.LogCaptureFixture
) -> None:
    """In particular, a client without its ledger does not train without noise."""
    client, desk = honest.at(4, "train")
    harm(desk.root / file)
    before = desk.ledger.read_bytes() if desk.ledger.exists() else b""
    reply = client.answer(honest.request(4, "train"))
    if (file, harm) == ("settings.yaml", cut):  # the last line of a mapping is one setting, or none
        return
    assert reply.refused is not None
    assert not reply.tensors
    assert "Fix" in caplog.text
    assert (desk.ledger.read_bytes() if desk.ledger.exists() else b"") == before


@pytest.mark.parametrize("file", ["sum.secret", "memory.safetensors"])
@pytest.mark.parametrize("harm", [emptied, halved, gone])
def test_a_damaged_file_of_a_secure_sum_is_no_answer(
    file: str, harm: Callable[[Path], None], secure: Honest
) -> None:
    """The round is lost for this client, and nothing of it leaves without masks."""
    client, desk = secure.at(2, "sketch")
    assert (desk.root / file).exists()
    harm(desk.root / file)
    reply = client.answer(secure.request(2, "sketch"))
    assert reply.refused is not None
    assert not reply.tensors


@pytest.mark.parametrize("harm", [emptied, halved, gone])
def test_without_the_first_sums_survivors_there_is_no_second_sum(
    harm: Callable[[Path], None], secure: Honest
) -> None:
    client, desk = secure.at(2, "unmask")
    assert client.answer(secure.request(2, "unmask")).refused is None
    harm(desk.root / "survivors.json")
    second = next(
        r for r in secure.asked if (r.round, r.values.get("stage"), r.kind) == (2, "sketch", "share")
    )
    assert client.answer(second).refused is not None


def test_an_older_ledger_is_noticed(honest: Honest) -> None:
    """Restored from a backup: the note shows after how many charges this client answered."""
    client, desk = honest.at(5, "train")
    older = honest.before(4, "train") / honest.run / "ledger.jsonl"
    shutil.copy(older, desk.ledger)
    assert read_ledger(desk.ledger).charges == 3
    with pytest.raises(PrivacyError, match="shows 3 charges, and this client answered after 4"):
        desk.opened(True)
    assert client.answer(honest.request(5, "train")).refused
    assert client.answer(Request(NAME, "leave", ROUNDS + 1, values={"run": honest.run})).refused


def test_the_ledger_of_a_copy_that_went_on_apart_is_noticed(honest: Honest) -> None:
    """Equally long, and charged for other answers."""
    client, desk = honest.at(4, "train")
    assert client.answer(honest.request(4, "train")).refused is None
    other = desk.ledger.read_bytes()
    client, desk = honest.at(5, "train")
    assert len(other) == len(desk.ledger.read_bytes())
    desk.ledger.write_bytes(other)
    with pytest.raises(PrivacyError, match="is not the ledger"):
        desk.opened(True)
    assert client.answer(honest.request(5, "train")).refused


def test_an_older_note_is_noticed_by_what_it_asks_for(honest: Honest) -> None:
    """A note alone cannot be older than the ledger by much: the plan bounds what can be charged in all."""
    client, desk = honest.at(ROUNDS, "train")
    shutil.copy(honest.before(2, "train") / honest.run / "answered.json", desk.root / "answered.json")
    for number in range(1, ROUNDS + 1):
        client.answer(honest.request(number, "train"))
    assert read_ledger(desk.ledger).charges == ROUNDS == read_ledger(desk.ledger).plan.steps


@pytest.mark.parametrize("name", ["answered.json", "ledger.jsonl"])
def test_a_disk_that_is_full(name: str, honest: Honest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be noted or charged is not answered, and the next round is."""
    client, desk = honest.at(4, "train")
    sync = os.fsync

    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert client.answer(honest.request(4, "train")).refused
    monkeypatch.undo()
    assert read_ledger(desk.ledger).charges == 3
    assert client.answer(honest.request(5, "train")).refused is None
    assert client.answer(honest.request(4, "train")).refused


def test_the_note_is_on_the_disk_before_anything_is_charged(
    honest: Honest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, desk = honest.at(4, "train")
    order: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    client.answer(honest.request(4, "train"))
    files = [name for name in order if name.startswith((".answered", "ledger"))]
    assert files == [".answered.json.privlora-tmp", "ledger.jsonl", ".answered.json.privlora-tmp"]
    assert desk.root.name in order, "the folder as well, else the rename may be lost"


def test_one_process_answers_at_a_time(honest: Honest) -> None:
    client, desk = honest.at(4, "train")
    with open(client.folder / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process answers"), client.locked():
            pass
        assert client.answer(honest.request(4, "train")).refused
        assert read_ledger(desk.ledger).charges == 3
    assert client.answer(honest.request(4, "train")).refused is None


def test_one_of_two_that_are_alike_waits_for_nobody(tmp_path: Path) -> None:
    """Both lock as clients do, so neither may share the lock with the other."""
    first, second = Client(NAME, tmp_path / "c"), Client(NAME, tmp_path / "c")
    with first.locked(), pytest.raises(RunError, match="another process answers"), second.locked():
        pass
    with second.locked():
        pass


@pytest.mark.parametrize("kind", ["folder", "ledger"])
def test_links_are_refused(kind: str, honest: Honest) -> None:
    client, desk = honest.at(4, "train")
    path = desk.root if kind == "folder" else desk.ledger
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)
    assert client.answer(honest.request(4, "train")).refused
    assert read_ledger(desk.ledger).charges == 3


def test_only_the_owner_can_read_a_clients_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while they are written, and with a umask that lets everybody read."""
    seen: dict[str, int] = {}
    replace = os.replace

    def noted(source: Path, target: Path) -> None:
        if "clients" in str(source):
            seen[Path(target).name] = stat.S_IMODE(os.stat(source).st_mode)
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    before = os.umask(0o022)
    try:
        run(settings_of(tmp_path / "run", "fedask", secure_aggregation=True))
    finally:
        os.umask(before)
    assert {"answered.json", "settings.yaml", "sum.secret", "memory.safetensors"} <= seen.keys()
    assert set(seen.values()) == {0o600}
    for client in (tmp_path / "run/clients").iterdir():
        for path in (client, *client.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "run/private").stat().st_mode) == 0o700


def test_survivors_are_of_one_round(tmp_path: Path) -> None:
    """Those of another round would let a second sum of this one be over other clients than its first."""
    desk = Desk(tmp_path)
    desk.keep_survivors(1, ["a", "b"])
    assert desk.survivors(1) == ["a", "b"]
    assert desk.survivors(2) == []


def test_training_has_one_stage_however_it_is_called(tmp_path: Path) -> None:
    """Else it could come twice in one round, under two names."""
    desk = Desk(tmp_path / "d")
    desk.open(with_local_method(settings_of(tmp_path / "x", "fedask")), None)
    for kind, stage in (("train", "sketch"), ("sketch", "train"), ("train", "other"), ("share", "other")):
        with pytest.raises(PrivacyError, match="in an unknown stage"):
            desk.begin(Request(NAME, kind, 1, values={"stage": stage}))
    desk.begin(Request(NAME, "train", 1, values={"stage": "train"}))


def test_keys_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it makes them can begin again."""
    path = tmp_path / "identity.key"
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(RunError, match="cannot be written"):
        Identity.create().save(path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    Identity.create().save(path)
    with pytest.raises(RunError, match="cannot be written"):
        Identity.create().save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["identity.key"]


def test_memory_is_of_the_round_that_was_trained(honest: Honest, tmp_path: Path) -> None:
    """A later stage of a round whose first one was not answered would sum what others no longer hold."""
    desk = Desk(tmp_path / "d")
    settings = with_local_method(settings_of(tmp_path / "x", "fedask"))
    desk.open(settings, None)
    desk.begin(Request(NAME, "train", 1))
    desk.keep("memory", {"0.left": torch.zeros(1)})
    with pytest.raises(PrivacyError, match="without its first one"):
        desk.begin(Request(NAME, "sketch", 2))
    desk.begin(Request(NAME, "sketch", 1))
    for kind in KINDS[1:6]:
        with pytest.raises(PrivloraError):
            desk.begin(Request(NAME, kind, 1, values={"stage": "train"}))
    assert len(ledgers(honest.root / "run")) == CLIENTS
