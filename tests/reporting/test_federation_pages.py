"""Card, page and figure of a federation, as functions of its facts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from reporting_cases import STEPS
from test_pages import HOSTILE, LOADING, Tags

from privlora.reporting.card import card
from privlora.reporting.page import render
from privlora.reporting.parties import never_released, noise_scope, size
from privlora.reporting.plots import rounds_plot

pytestmark = pytest.mark.usefixtures("drawn")

CLIENT = {"name": "a", "weight": 1.0, "rounds_asked": 3, "rounds_answered": 3, "steps_charged": 3}
CLIENT |= {"steps_planned": 4, "epsilon": 1.25, "epsilon_planned": 1.5, "delta": 1e-3}
ROUND = {
    "round": 1,
    "asked": 2,
    "answered": 2,
    "dropped": [],
    "bytes_down": 900,
    "bytes_up": 2000,
    "void": False,
}
FACTS: dict[str, Any] = {
    "rule": {"name": "tan", "exact": False, "common": True},
    "noise_by": "client",
    "secure_sums": True,
    "threshold": 2,
    "ring_bits": 64,
    "lattice": None,
    "share_noise_std": None,
    "colluding": [],
    "update_noise": None,
    "clients_per_round": 2,
    "local_steps": 1,
    "statement_of": "a",
    "clients": [CLIENT, {**CLIENT, "name": "b"}],
    "rounds": {
        "planned": STEPS + 1,
        "done": STEPS - 1,
        "void": 1,
        "log": [
            ROUND,
            {**ROUND, "round": 2, "answered": 1, "dropped": ["b"]},
            {**ROUND, "round": 3, "answered": 0, "void": True},
        ],
    },
    "bytes": {"down": 450.0, "up": 1000.0, "formula_down": 110.0, "formula_up": 120.0},
}


@pytest.fixture
def federated(report: dict[str, Any]) -> dict[str, Any]:
    """A report with a federation; tests may change it."""
    return {**report, "federation": copy.deepcopy(FACTS)}


def test_a_run_in_one_place_has_no_such_section(report: dict[str, Any]) -> None:
    assert "Trained together" not in render(report) + card(report)
    assert noise_scope(None) == "one step"


def test_the_page_stays_whole_and_needs_nothing_else(federated: dict[str, Any]) -> None:
    page = render(federated)
    assert not {tag for tag, _ in Tags(page).seen} & LOADING
    assert "<td>3 of 4</td>" in page
    assert "450 B measured; the rule&#39;s formula: 110 numbers" in page


def test_hostile_texts_stay_text(federated: dict[str, Any]) -> None:
    known = {tag for tag, _ in Tags(render(federated)).seen}
    facts = federated["federation"]
    facts["clients"][0]["name"] = facts["statement_of"] = HOSTILE
    page, text = render(federated), card(federated)
    assert {tag for tag, _ in Tags(page).seen} == known
    assert "<script" not in text.replace(text.split("```python\n")[1].split("\n```\n")[0], "")


def test_the_same_rounds_give_the_same_picture(federated: dict[str, Any]) -> None:
    picture = rounds_plot(federated)
    assert picture is not None
    assert picture == rounds_plot(copy.deepcopy(federated))
    assert ">void<" in picture
    assert ">held-out loss<" in picture
    federated["evaluation"] = []
    without = rounds_plot(federated)
    assert without is not None
    assert ">held-out loss<" not in without


def test_without_rounds_there_is_no_picture(federated: dict[str, Any]) -> None:
    federated["federation"]["rounds"]["log"] = []
    assert rounds_plot(federated) is None


@pytest.mark.parametrize(
    ("charged", "answered", "silent"), [(0, 2, True), (1, 0, False), (None, 0, True), (None, 1, False)]
)
def test_who_never_released_goes_by_the_ledger_where_there_is_one(
    charged: int | None, answered: int, silent: bool
) -> None:
    facts = {"clients": [{**CLIENT, "steps_charged": charged, "rounds_answered": answered}]}
    assert never_released(facts) == (["a"] if silent else [])


def test_bytes_are_read_in_powers_of_ten() -> None:
    assert [size(count) for count in (12, 1000, 2_345_000, 7e9)] == ["12 B", "1 kB", "2.35 MB", "7 GB"]
