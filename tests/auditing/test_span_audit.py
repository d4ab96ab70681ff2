"""A space that is registered from outside is audited like one of the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_cases import MUTATIONS, setting
from span_space import span
from test_canary_run import audited

from privlora.lab.audits.one_step import audit_step

pytestmark = pytest.mark.usefixtures("span")
assert span  # the fixture


def test_a_correct_step_is_within_its_claim() -> None:
    mechanism, others, canary = setting("span", 1.0, seed=7)
    result = audit_step(mechanism, mechanism.event, others, canary, trials=200)
    assert not result.violated
    assert result.epsilon_lower >= 0.15 * result.epsilon_claimed


@pytest.mark.parametrize(
    "mutation", ["noise/4", "no noise", pytest.param("module not clipped", marks=pytest.mark.long)]
)
def test_a_broken_step_is_caught(mutation: str) -> None:
    assert MUTATIONS[mutation].caught("span", 1.0, trials=150)


def test_a_run_with_canaries_is_judged(tmp_path: Path) -> None:
    found = audited(tmp_path / "audit", name="span")
    assert found.canaries == 40
    assert not found.violated
