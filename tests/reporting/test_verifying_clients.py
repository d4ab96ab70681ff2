"""What a report says of a federation is what its clients' ledgers make of it, and those are ledgers of one plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privlora.accounting import Ledger, LedgerSummary, Plan, PoissonSampling, epsilon
from privlora.accounting.events import StepEvent
from privlora.accounting.secure_sums import share_std
from privlora.api import federate
from privlora.demo import model_path, private_records
from privlora.errors import PrivacyError
from privlora.reporting import verifying_clients
from privlora.reporting.annex import Book, read_book
from privlora.reporting.seals import text_of, with_files
from privlora.reporting.verifying import Verified, verify
from privlora.reporting.verifying_clients import (
    _of_a_client,
    _refuse_other_rounds,
    check_clients,
    federation_again,
    refuse_other,
)

EVENT = StepEvent(PoissonSampling(0.1), 1.0)
PLAN = Plan(
    phases=((EVENT, 3),),
    delta=1e-5,
    target_epsilon=None,
    adjacency="add-or-remove-one",
    unit="record",
    records_per_user=None,
    clip_norm=1.0,
    expected_batch_size=4.0,
    method="prism",
    dataset="notes",
)


def _book(path: Path, charges: int, plan: Plan = PLAN, *, closed: bool = True) -> Book:
    with Ledger.create(path, plan) as ledger:
        for step in range(1, charges + 1):
            ledger.charge(plan.event_of(step))
        if closed:
            ledger.finish()
    return read_book(path, path.read_bytes())


def _report(books: Mapping[str, Book | None], of: str | None, **facts: Any) -> dict[str, Any]:
    """Of a federation whose clients add noise in full, unless ``facts`` say otherwise."""
    rows = [
        {
            "name": name,
            "rounds_asked": 3,
            "rounds_answered": book.summary.charges if book else 0,
            **_of_a_client(book),
        }
        for name, book in books.items()
    ]
    charges = {name: book.summary.charges if book else 0 for name, book in books.items()}
    log = [
        {
            "round": number,
            "asked": len(books),
            "answered": sum(count >= number for count in charges.values()),
            "dropped": [name for name, count in charges.items() if count < number],
            "void": False,
        }
        for number in (1, 2, 3)
    ]
    own = {
        "rule": {"name": "tan", "exact": False, "common": True},
        "noise_by": "client",
        "secure_sums": False,
        "threshold": None,
        "ring_bits": 64 if facts.get("secure_sums") or facts.get("noise_by") == "shares" else None,
        "lattice": None,
        "share_noise_std": None,
        "colluding": [],
        "clients_per_round": len(books),
        "local_steps": 1,
        "rounds": {"planned": 3, "done": 3, "void": 0, "log": log},
        "statement_of": of,
        "clients": rows,
    }
    return {"federation": own | facts}


@pytest.fixture
def books(tmp_path: Path) -> dict[str, Book]:
    charges = {"north": 3, "south": 3, "west": 1}
    return {name: _book(tmp_path / f"{name}.jsonl", count) for name, count in charges.items()}


def test_the_statement_is_that_of_who_released_most(books: dict[str, Book], tmp_path: Path) -> None:
    check_clients(_report(books, "north"), books, books["north"])
    check_clients(_report(books, "south"), books, books["south"])
    check_clients(_report({**books, "east": None}, "south"), books, books["south"])  # it gave no ledger
    with pytest.raises(PrivacyError, match=r"ledger-north\.jsonl has more releases than that"):
        check_clients(_report(books, "west"), books, books["west"])
    near = {"north": books["north"], "west": _book(tmp_path / "near.jsonl", 2)}
    with pytest.raises(PrivacyError, match=r"ledger-north\.jsonl has more releases than that"):
        check_clients(_report(near, "west"), near, near["west"])


def test_who_gave_no_ledger_released_no_more_than_is_stated(books: dict[str, Book], tmp_path: Path) -> None:
    report = _report({**books, "east": None}, "north")
    check_clients(report, books, books["north"])
    longer = {"federation": report["federation"] | {"local_steps": 2}}
    with pytest.raises(PrivacyError, match="'north' took part in more rounds than its ledger has"):
        check_clients(longer, books, books["north"])
    cut = {"west": _book(tmp_path / "cut.jsonl", 2)}
    with pytest.raises(PrivacyError, match="'east' took part in more rounds than the stated ledger has"):
        check_clients(_report({**cut, "east": None}, "west"), cut, cut["west"])


@pytest.mark.parametrize(
    "change",
    [
        {"rounds_asked": None, "rounds_answered": None},
        {"rounds_asked": -3},
        {"rounds_asked": 0, "rounds_answered": 0},
        {"rounds_answered": 2},
        {"rounds": {"done": 10**6}},
        {"rounds": {"void": -3}},
        {"rounds": {"void": 1, "done": 2}},
        {"rounds": {"log": []}},
        {"first": {"asked": 4}, "second": {"asked": 2}},
        {"first": {"dropped": ["west"]}},
        {"first": {"void": True}, "rounds": {"void": 1, "done": 2}},
        {"rounds": {"planned": 2}},
    ],
)
def test_rounds_and_clients_parts_in_them_agree(change: dict[str, Any], books: dict[str, Book]) -> None:
    report = _report(books, "north")
    check_clients(report, books, books["north"])
    federation = report["federation"]
    for name, number in (("first", 0), ("second", 1)):
        federation["rounds"]["log"][number] |= change.get(name, {})
    named = ("rounds", "first", "second")
    federation["clients"][0] |= {name: value for name, value in change.items() if name not in named}
    federation["rounds"] = federation["rounds"] | change.get("rounds", {})
    with pytest.raises((PrivacyError, TypeError)):
        check_clients(report, books, books["north"])


def test_a_plan_that_is_not_the_stated_one_is_not_priced(
    books: dict[str, Book], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take minutes."""
    report = _report({**books, "east": books["west"]}, "north")
    books["east"] = _book(tmp_path / "east.jsonl", 1, replace(PLAN, delta=0.5))
    monkeypatch.setattr(verifying_clients, "_cost", None)
    with pytest.raises(PrivacyError, match=r"plan\.delta"):
        check_clients(report, books, books["north"])


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"insecure_noise": True}, "insecure_noise = True"),
        ({"delta": 0.5}, r"delta = 0\.5"),
        ({"unit": "user", "records_per_user": 1}, "unit = 'user'"),
        ({"adjacency": "replace-one"}, "adjacency = 'replace-one'"),
        ({"clip_norm": 100.0}, r"clip_norm = 100\.0"),
        ({"method": "dp-zo"}, "method = 'dp-zo'"),
        ({"dataset": "audited"}, "dataset = 'audited'"),
        ({"phases": ((replace(EVENT, noise_multiplier=0.9), 3),)}, r"noise_multiplier = 0\.9"),
        ({"phases": ((StepEvent(PoissonSampling(0.2), 1.0), 3),)}, r"sample_rate = 0\.2"),
    ],
)
def test_all_ledgers_are_of_the_plan_that_is_stated(
    change: dict[str, Any], differs: str, books: dict[str, Book], tmp_path: Path
) -> None:
    """What the statement depends on is in the plan, and a federation has one."""
    books["east"] = _book(tmp_path / "east.jsonl", 3, replace(PLAN, **change))
    with pytest.raises(PrivacyError, match=rf"ledger-east\.jsonl says plan\..*{differs}, and in ledger"):
        check_clients(_report(books, "north"), books, books["north"])


def test_another_machines_noise_multiplier_is_the_same_plan(books: dict[str, Book], tmp_path: Path) -> None:
    near = replace(PLAN, phases=((replace(EVENT, noise_multiplier=1.0 + 1e-9), 3),))
    books["east"] = _book(tmp_path / "east.jsonl", 3, near)
    check_clients(_report(books, "north"), books, books["north"])


def test_each_client_has_a_ledger_of_its_own_that_is_over(books: dict[str, Book], tmp_path: Path) -> None:
    books["east"] = _book(tmp_path / "east.jsonl", 2, closed=False)
    with pytest.raises(PrivacyError, match=r"ledger-east\.jsonl is not closed"):
        check_clients(_report(books, "north"), books, books["north"])
    books["east"] = books["south"]
    with pytest.raises(PrivacyError, match=r"ledger-east\.jsonl is the ledger of another client"):
        check_clients(_report(books, "north"), books, books["north"])


def test_the_statements_ledger_is_its_clients(books: dict[str, Book], tmp_path: Path) -> None:
    nobodys = _book(tmp_path / "ledger.jsonl", 3)
    for stated in (nobodys, books["south"]):
        with pytest.raises(PrivacyError, match=r"ledger.jsonl is not that of 'north'"):
            check_clients(_report(books, "north"), books, stated)
    with pytest.raises(PrivacyError, match=r"ledger.jsonl is not that of 'nobody'"):
        check_clients(_report(books, "nobody"), books, nobodys)


def _checked(report: dict[str, Any], summary: LedgerSummary) -> None:
    refuse_other(report, {"federation": federation_again(report, summary)}, "the report", "it is")


def _shares(n: int, t: int, plan: Plan) -> dict[str, Any]:
    """What a report says where n clients share the noise, and that of t counts."""
    each = share_std(width=2.0**-20, noise_multiplier=1.0, survivors=t, clip_norm=1.0, entries=10)
    counts = sorted({1, 2, 3, n - t, n - 1} & set(range(1, n)))
    left = {c: (t - c if 2 * t > n + c else 1) / t for c in counts}
    rows = []
    for count, share in left.items():
        weaker = [(replace(event, noise_multiplier=share**0.5), steps) for event, steps in plan.phases]
        found = epsilon(weaker, plan.delta, adjacency=plan.adjacency)
        rows.append({"clients": count, "noise_multiplier": share**0.5, "epsilon": found})
    return {
        "rule": {"name": "joint", "exact": True, "common": True},
        "noise_by": "shares",
        "secure_sums": True,
        "threshold": t,
        "lattice": {"entries": 10, "width": 2.0**-20},
        "share_noise_std": 2.0**-20 * each,
        "colluding": rows,
    }


def test_what_clients_together_learn_is_said_whole(books: dict[str, Book]) -> None:
    """The rows follow from n and t, and those from the clients that are named."""
    facts, summary = _shares(3, 3, PLAN), books["north"].summary
    rows = facts["colluding"]
    assert [row["clients"] for row in rows] == [1, 2]
    _checked(_report(books, "north", **facts), summary)
    _checked(_report(books, "north"), summary)
    for forged, differs in (
        ({"colluding": [rows[0], {**rows[1], "epsilon": 0.5}]}, r"colluding\[1\]\.epsilon = 0\.5"),
        ({"colluding": []}, "colluding"),
        ({"colluding": rows[:1]}, "colluding"),
        ({"share_noise_std": 1.0}, r"share_noise_std = 1\.0"),
        ({"lattice": {"entries": 10, "width": 10.0}}, "coarser than any"),
        ({"lattice": {"entries": 10**15, "width": 2.0**-20}}, "coarser than any"),
        ({"noise_by": "client"}, "noise_by = 'client'"),
        ({"noise_by": "server"}, "noise_by = 'server'"),
        ({"secure_sums": False, "threshold": None}, "secure_sums = False"),
        ({"clients_per_round": 3000}, "clients_per_round=3000 exceeds the 3 clients"),
        ({"clients_per_round": 2, "threshold": 2}, "do not make the plan of the ledger"),
        ({"threshold": 2}, "no settings lead to the report's federation: survivors"),
        ({"rounds": {"planned": 4}}, "do not make the plan of the ledger"),
    ):
        with pytest.raises(PrivacyError, match=differs):
            _checked(_report(books, "north", **(facts | forged)), summary)
    with pytest.raises(PrivacyError, match="colluding"):
        _checked(_report(books, "north", colluding=rows), summary)


def test_a_lattice_enlarges_noise_by_a_few_per_cent_at_most(books: dict[str, Book]) -> None:
    facts, summary = _shares(3, 3, PLAN), books["north"].summary
    of_sum: dict[str, Any] = {"noise_multiplier": 1.0, "survivors": 3, "clip_norm": 1.0, "entries": 10}

    def enlarged(width: float) -> float:
        """By how much a client's noise is more than one share."""
        return float(width * share_std(width=width, **of_sum) * 3**0.5)

    def report_of(width: float) -> dict[str, Any]:
        more = {"lattice": {"entries": 10, "width": width}, "share_noise_std": enlarged(width) / 3**0.5}
        return _report(books, "north", **facts | more)

    widths = [2.0**-20 * 1.02**k for k in range(1000)]
    first = next(width for width in widths if enlarged(width) > 1.05)
    _checked(report_of(first / 1.02), summary)
    with pytest.raises(PrivacyError, match="coarser than any"):
        _checked(report_of(first), summary)


def test_single_answers_have_one_share(tmp_path: Path) -> None:
    """Of n = 7 and t = 5, three clients and the server open single answers. All releases are of one kind."""
    plan = replace(PLAN, phases=((EVENT, 6),))
    books = {f"c{number}": _book(tmp_path / f"{number}.jsonl", 6, plan) for number in range(7)}
    facts = _shares(7, 5, plan) | {"rounds": {"planned": 6}}
    assert [row["clients"] for row in facts["colluding"]] == [1, 2, 3, 6]
    _checked(_report(books, "c0", **facts), books["c0"].summary)
    more = [{**row, "noise_multiplier": 2 * row["noise_multiplier"]} for row in facts["colluding"]]
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        _checked(_report(books, "c0", **(facts | {"colluding": more})), books["c0"].summary)
    two = replace(PLAN, phases=((replace(EVENT, noise_multiplier=2.0), 3), (EVENT, 3)))
    with pytest.raises(PrivacyError, match="do not make the plan of the ledger"):
        _checked(_report(books, "c0", **facts), _book(tmp_path / "two.jsonl", 6, two).summary)


def test_a_ledger_says_whose_presence_is_hidden_and_who_adds_the_noise(tmp_path: Path) -> None:
    """In both ways: a report of whole clients has such a ledger, and a ledger of records no trusted server."""
    sampled = StepEvent(PoissonSampling(1.0), 1.0)
    plan = replace(
        PLAN, phases=((sampled, 3),), unit="client", expected_batch_size=3.0, method="fedavg prism"
    )
    names = ("north", "south", "west")
    books = {name: _book(tmp_path / f"{name}.jsonl", 3, plan) for name in names}
    shared = _shares(3, 3, plan) | {"rule": {"name": "fedavg", "exact": False, "common": True}}
    _checked(_report(books, "north", **shared), books["north"].summary)
    alone = _book(tmp_path / "server.jsonl", 3, plan).summary
    trusted = {"rule": shared["rule"], "noise_by": "server"}
    empty = dict.fromkeys(names)
    _checked(_report(empty, None, **trusted), alone)
    whole, records = books["north"].summary, _book(tmp_path / "records.jsonl", 3).summary
    for facts, of, summary, differs in (
        (shared | {"noise_by": "client"}, "north", whole, "noise_by = 'client'"),
        (shared | {"noise_by": "server"}, "north", whole, "noise_by"),
        (shared, None, whole, "no settings lead to"),
        (shared | {"clients_per_round": 2, "threshold": 2}, "north", whole, "do not make the plan"),
        (trusted, None, records, "noise_by = 'server'"),
        (trusted | {"clients_per_round": 2}, None, alone, "do not make the plan"),
    ):
        with pytest.raises(PrivacyError, match=differs):
            _checked(_report(empty, of, **facts), summary)
    with pytest.raises(PrivacyError, match=r"ledger.jsonl is not that of"):
        check_clients(_report(empty, None), {}, _book(tmp_path / "central.jsonl", 3))


@pytest.mark.parametrize("rows", [["north", "north"], ["north", "North"]])
def test_no_client_is_named_twice(rows: list[str], books: dict[str, Book]) -> None:
    report = _report(books, "north")
    report["federation"]["clients"] = [{"name": name, **_of_a_client(books["north"])} for name in rows]
    report["federation"]["clients_per_round"] = 2
    with pytest.raises(PrivacyError, match="two clients have the same name"):
        federation_again(report, books["north"].summary)


def test_a_ledger_of_many_phases_is_refused(tmp_path: Path) -> None:
    phases = tuple((replace(EVENT, noise_multiplier=1.0 + number / 10), 1) for number in range(9))
    path = tmp_path / "a.jsonl"
    Ledger.create(path, replace(PLAN, phases=phases)).close()
    with pytest.raises(PrivacyError, match="more than 8 phases"):
        read_book(path, path.read_bytes())
    few = tmp_path / "b.jsonl"
    Ledger.create(few, replace(PLAN, phases=phases[:8])).close()
    assert len(read_book(few, few.read_bytes()).summary.plan.phases) == 8


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, with_plots: Any) -> Path:
    """The release of a federation of users. Tests must not change it."""
    given = [
        {**record, "person": f"p{place // 2}"} for place, record in enumerate(private_records(36, seed=1))
    ]
    with with_plots():
        found = federate(
            str(model_path()),
            {name: given[12 * place : 12 * (place + 1)] for place, name in enumerate(("a", "b", "c"))},
            federation={"rule": "tan", "rounds": 2, "local_steps": 2},
            privacy={
                "noise_multiplier": 1.0,
                "delta": 1e-4,
                "expected_batch_size": 6,
                "public_dataset_size": 18,
                "unit": "user",
                "user_column": "person",
            },
            data={"max_length": 48},
            adapter={"r": 2},
            output=tmp_path_factory.mktemp("together") / "run",
        )
    return found.release


def _forged(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Verified:
    """As it is judged where somebody seals another report."""
    release = Path(shutil.copytree(source, folder / "release"))
    report = json.loads((release / "privacy_report.json").read_text())
    change(report)
    (release / "privacy_report.json").write_text(text_of(with_files(report, release)))
    return verify(release)


def _told(**facts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda report: report["federation"].update(facts)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (_told(), None),
        (_told(hidden="all records of one hospital"), "'federation.hidden' what no report says"),
        (_told(rule={"name": "tan", "summary": "of one hospital"}), "which is no client and no rule"),
        (_told(noise_by="server"), "noise_by"),
        (_told(clients_per_round=3000), "clients_per_round=3000"),
        (_told(local_steps=1), "do not make the plan"),
        (lambda report: report["method"].update(name="dp-zo"), "says method.name = 'dp-zo'"),
        (lambda report: report["noise"].update(noise_std=50.0), r"says noise.noise_std = 50\.0"),
        (lambda report: report["noise"].update(bands={"coefficients": [1.0, 0.5]}), "other bands"),
        (lambda report: report.update(not_protected=[]), "one thing of not_protected"),
        (
            lambda report: report["versions"].update(torch="2.13 <b>"),
            "report.json says .* among its versions",
        ),
    ],
)
def test_a_federations_report_says_what_its_ledgers_make(
    change: Callable[[dict[str, Any]], None], differs: str | None, together: Path, tmp_path: Path
) -> None:
    found = _forged(together, tmp_path, change)
    assert found.passed == (differs is None)
    if differs is not None:
        said = " ".join(check.found for check in found.checks if check.passed is False)
        with pytest.raises(PrivacyError, match=differs):
            raise PrivacyError(said)


@pytest.mark.usefixtures("quick")
def test_a_run_in_one_place_has_no_federation(together: Path, release: Path, tmp_path: Path) -> None:
    facts = json.loads((together / "privacy_report.json").read_text())["federation"]
    for of, by in ((None, "server"), (None, "client"), ("a", "client")):
        told = facts | {"statement_of": of, "noise_by": by}
        (tmp_path / f"{of}{by}").mkdir()
        found = _forged(
            release, tmp_path / f"{of}{by}", lambda report, told=told: report.update(federation=told)
        )
        assert {check.name for check in found.checks if check.passed is False} & {"epsilon", "clients"}


@pytest.mark.parametrize(
    ("rounds", "asked", "right"),
    [
        ({}, None, True),
        ({"done": 3, "void": 0}, None, False),
        ({"void": 2}, None, False),
        ({"log": [{"round": 1}]}, None, False),
        ({}, 2, False),
    ],
)
def test_a_trusted_servers_rounds_say_nothing_of_whom_it_drew(
    rounds: dict[str, Any], asked: int | None, right: bool, tmp_path: Path
) -> None:
    """And are no more than its ledger shows."""
    rows = [{"name": "north", "rounds_asked": asked, "rounds_answered": asked}]
    known = {"planned": 3, "done": 2, "void": 1, "log": []} | rounds
    federation = {"noise_by": "server", "clients": rows, "rounds": known}
    summary = _book(tmp_path / "ledger.jsonl", 2).summary
    if right:
        _refuse_other_rounds(federation, {}, summary)
    else:
        with pytest.raises(PrivacyError, match="not those of the server's ledger"):
            _refuse_other_rounds(federation, {}, summary)
