"""A client that answers anything: its answer is dropped, the others' result is what it would be without it, and the
server ends well or says in one line why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import date, datetime, timedelta, tzinfo
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from crash_cases import ROUNDS, Between, adapter, ledgers, run, settings_of
from fact_cases import ledger_of
from test_lying_servers import VICTIM as LIAR
from test_lying_servers import between

from privlora.accounting import Ledger, LedgerSummary, read_ledger
from privlora.errors import PrivloraError, RunError
from privlora.federated.facts import keep_ledgers
from privlora.federated.history import History
from privlora.federated.messages import Reply
from privlora.federated.plans import charges_a_round, client_plan, federation_of, with_local_method
from privlora.training.files import RunFolder

pytestmark = pytest.mark.usefixtures("quick_reports")

# Noise that repeats, so that results can be compared bit by bit.
REPEATABLE = {"noise_multiplier": 1.0, "delta": 1e-3, "insecure_noise_seed": 1}

Lie = Callable[[Reply, list[Reply]], Iterable[Reply]]


def each(reply: Reply, change: Callable[[torch.Tensor], torch.Tensor]) -> list[Reply]:
    return [replace(reply, tensors={name: change(tensor) for name, tensor in reply.tensors.items()})]


def some(reply: Reply, **changes: Any) -> list[Reply]:
    return [replace(reply, **changes)]


PLAIN: dict[str, Lie] = {
    "no numbers": lambda r, _: each(r, lambda t: torch.full_like(t, float("nan"))),
    "infinite": lambda r, _: each(r, lambda t: torch.full_like(t, float("inf"))),
    "a norm of 1e9": lambda r, _: each(r, lambda t: torch.full_like(t, 1e9)),
    "a norm that overflows": lambda r, _: each(r, lambda t: torch.full_like(t, 1e308, dtype=torch.float64)),
    "whole numbers": lambda r, _: each(r, lambda t: t.to(torch.int64)),
    "bytes": lambda r, _: each(r, lambda t: torch.zeros(t.shape, dtype=torch.uint8)),
    "other shapes": lambda r, _: each(r, lambda t: t[None]),
    "empty tensors": lambda r, _: each(r, lambda t: t[..., :0]),
    "huge": lambda r, _: each(r, lambda t: t.new_zeros(2**22)),
    "one tensor less": lambda r, _: some(r, tensors=dict(list(r.tensors.items())[1:])),
    "nothing": lambda r, _: some(r, tensors={}),
    "one tensor more": lambda r, _: some(r, tensors={**r.tensors, "../../x": torch.zeros(1)}),
    "another round": lambda r, _: some(r, round=r.round + 1),
    "another kind": lambda r, _: some(r, kind="sketch"),
    "nobody's name": lambda r, _: some(r, client="client-9"),
    "an earlier answer": lambda r, before: before[:1],
    "a long refusal": lambda r, _: some(r, refused="x" * 10**6),
    "a long text": lambda r, _: some(r, tensors={}, values={"x" * 1000: "y" * 10**6, "stage": b"\0" * 10**6}),
}


class Lying(Between):
    """The liar's answers to one kind are replaced: in round k by the k-th lie."""

    lies: tuple[Lie, ...] = ()
    kind = "train"

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.before: list[Reply] = []

    def answered(self, reply: Reply) -> Iterable[Reply]:
        if (reply.client, reply.kind) != (LIAR, self.kind):
            return [reply]
        self.before.append(reply)
        return self.lies[reply.round - 1](reply, self.before)


def result_of(
    folder: Path, lies: Iterable[Lie], patch: pytest.MonkeyPatch, asked: str = "train", **options: Any
) -> dict[str, torch.Tensor]:
    class Told(Lying):
        kind = asked

    Told.lies = tuple(lies)
    with patch.context() as inner:
        between(inner, Told)
        run(settings_of(folder, privacy=REPEATABLE, **{"rounds": len(Told.lies), **options}))
    return adapter(folder)


def silent(reply: Reply, before: list[Reply]) -> Iterable[Reply]:
    return []


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_others_go_on_as_if_it_had_dropped_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = result_of(tmp_path / "without", [silent] * len(PLAIN), monkeypatch)
    lied = result_of(tmp_path / "lied", PLAIN.values(), monkeypatch)
    assert_equal(without, lied)
    for folder in ("without", "lied"):
        rounds = History(tmp_path / folder / "private/rounds.jsonl").rounds()
        assert [one.answered for one in rounds] == [("client-1", "client-3")] * len(PLAIN)


def test_an_answer_counts_once_and_for_its_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same answer, and one under another's name after that one's own."""
    lies: list[Lie] = [
        lambda r, _: [r, r],
        lambda r, _: [r, replace(r, client="client-1")],
        lambda r, _: [replace(r, client="client-1")],
    ]
    honest = result_of(tmp_path / "honest", [lambda r, _: [r]] * 2, monkeypatch)
    assert_equal(honest, result_of(tmp_path / "lied", lies[:2], monkeypatch))
    without = result_of(tmp_path / "without", [silent], monkeypatch)
    assert_equal(without, result_of(tmp_path / "other", lies[2:], monkeypatch))


def test_both_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that lies in the second stage only has dropped out between the two."""
    without = result_of(tmp_path / "without", [silent] * len(PLAIN), monkeypatch, "sketch", rule="fedask")
    lies = {**PLAIN, "another kind": lambda r, _: some(r, kind="train")}
    lied = result_of(tmp_path / "lied", lies.values(), monkeypatch, "sketch", rule="fedask")
    assert_equal(without, lied)


MASKED: list[Lie] = [
    lambda r, _: some(r, values={**r.values, "context": bytes(32)}),
    lambda r, _: some(r, values={**r.values, "context": "text"}),
    lambda r, _: some(r, values={**r.values, "context": 1.5}),
    lambda r, _: some(r, values={}),
    lambda r, _: some(r, values={**r.values, "more": 1}),
    lambda r, _: each(r, lambda t: t[:-1]),
    lambda r, _: each(r, lambda t: t[None]),
    lambda r, _: each(r, lambda t: torch.zeros(t.shape, dtype=torch.bfloat16)),
    lambda r, _: each(r, lambda t: torch.full(t.shape, float("nan"))),
    lambda r, _: each(r, lambda t: torch.zeros(t.shape, dtype=torch.uint8)),
    lambda r, _: some(r, tensors={}),
    lambda r, _: some(r, tensors={**r.tensors, "x": torch.zeros(1)}),
]


def test_lies_about_a_masked_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"rule": "joint", "clients": 4, "survivors": 3}
    without = result_of(tmp_path / "without", [silent] * len(MASKED), monkeypatch, **options)
    assert_equal(without, result_of(tmp_path / "lied", MASKED, monkeypatch, **options))


def test_any_numbers_under_the_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees what a client masked: its lie is in the sum, but the server goes on, and the state stays finite."""
    lies: list[Lie] = [lambda r, _: each(r, lambda t: torch.full_like(t, 2**31 + 7))] * 4
    for rule in ("joint", "tan"):
        found = result_of(tmp_path / rule, lies, monkeypatch, rule=rule, secure_aggregation=True)
        assert all(bool(tensor.isfinite().all()) for tensor in found.values())


@pytest.mark.parametrize(
    "values",
    [{}, {"signing": b"x", "agreement": b"y"}, {"signing": "text", "agreement": 1}, {"signing": bytes(32)}],
    ids=range(4),
)
def test_who_joins_with_keys_that_are_none_does_not_join(
    values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(Between):
        def answered(self, reply: Reply) -> Iterable[Reply]:
            return some(reply, values=values) if (reply.client, reply.kind) == (LIAR, "join") else [reply]

    between(monkeypatch, Told)
    with pytest.raises(RunError, match=f"did not join: {LIAR}"):
        run(settings_of(tmp_path, "joint", privacy=REPEATABLE))


# --- ledgers ---


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlora.federated.run.publish", lambda *_, **__: None)
        run(settings_of(folder, "tan"))
    return folder


LEDGERS: dict[str, Callable[[str], str]] = {
    "none": lambda text: "",
    "no ledger": lambda text: "{}\n[]\n",
    "not even text": lambda text: "\udcff\0\n",
    "and more": lambda text: text + "what the record says",
    "half a character": lambda text: text.replace('"dataset": "', '"dataset": "\ud800'),
    "deep": lambda text: "[" * 10**5 + "\n",
    "cut": lambda text: "".join(text.splitlines(keepends=True)[:-2]),
    "of another plan": lambda text: text.replace('"clip_norm": 1.0', '"clip_norm": 0.5'),
    "of another day": lambda text: text.replace('"created": "2', '"created": "yesterday, 2'),
    "long": lambda text: text * 1000,
}


class Kept:
    """The ledgers that clients gave, and what a server makes of them."""

    def __init__(self, ended: Path, root: Path) -> None:
        self.settings = with_local_method(settings_of(ended, "tan"))
        self.given = {name: path.read_text() for name, path in ledgers(ended).items()}
        self.rounds = ended / "private/rounds.jsonl"
        plan = client_plan(self.settings)
        assert plan is not None
        self.plan, self.folder = plan, RunFolder(root / "run")
        self.folder.create()

    def __call__(self, told: Mapping[str, str] = MappingProxyType({})) -> Mapping[str, LedgerSummary]:
        """told: what clients give instead of their own."""
        history = History(self.rounds)
        federation = federation_of(self.settings)
        names, takes = federation.names, charges_a_round(federation)
        return keep_ledgers(self.folder, names, history, self.plan, {**self.given, **told}, takes)


@pytest.fixture
def keep(ended: Path, tmp_path: Path) -> Kept:
    return Kept(ended, tmp_path)


@pytest.mark.parametrize("lie", LEDGERS)
def test_a_ledger_that_cannot_be_right_is_left_out(lie: str, keep: Kept) -> None:
    """The others' statement covers what its client can have released, as each was asked in every round."""
    told = LEDGERS[lie](keep.given[LIAR])
    assert told != keep.given[LIAR]
    found = keep({LIAR: told})
    assert LIAR not in found
    assert read_ledger(keep.folder.ledger).charges == found["client-1"].charges == ROUNDS
    assert not (keep.folder.release / f"ledger-{LIAR}.jsonl").exists()
    assert (keep.folder.release / "ledger-client-1.jsonl").read_text() == keep.given["client-1"]
    with pytest.raises(RunError, match="did not give their ledgers"):
        keep(dict.fromkeys(keep.given, told))


def test_a_whole_ledger_of_another_plan_is_left_out(keep: Kept, tmp_path: Path) -> None:
    """Its lines follow from each other, and it has as many charges as the client answered: of twice the noise."""
    phases = tuple(
        (replace(event, noise_multiplier=2 * event.noise_multiplier), steps)
        for event, steps in keep.plan.phases
    )
    made = ledger_of(tmp_path / "other.jsonl", replace(keep.plan, phases=phases), ROUNDS)
    assert made.charges == ROUNDS
    Ledger.open(made.path).finish()
    assert set(keep({LIAR: made.path.read_text()})) == {"client-1", "client-3"}


def test_a_ledger_of_two_clients_and_one_of_a_day_to_come_are_left_out(
    keep: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(keep({LIAR: keep.given["client-3"]})) == {"client-1"}
    day = read_ledger(keep.folder.ledger).created
    later = (date.fromisoformat(day) - timedelta(days=2)).isoformat()

    class Early(datetime):
        @classmethod
        def now(cls, zone: tzinfo | None = None) -> Early:
            return cls.fromisoformat(f"{later}T12:00:00+00:00")

    monkeypatch.setattr("privlora.federated.facts.datetime", Early)
    with pytest.raises(RunError, match="did not give their ledgers"):
        keep()


def test_a_statement_covers_whoever_gave_no_ledger(keep: Kept, tmp_path: Path) -> None:
    """A client without a ledger that was asked more often than all others released: no statement."""
    asked = json.dumps({"step": ROUNDS + 1, "asked": [LIAR]})
    before, keep.rounds = keep.rounds.read_text(), tmp_path / "rounds.jsonl"
    keep.rounds.write_text(f"{before}{asked}\n")
    with pytest.raises(PrivloraError, match=LIAR):
        keep({LIAR: ""})
    assert not list(keep.folder.release.iterdir())
