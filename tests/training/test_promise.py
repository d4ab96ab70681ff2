"""The plan of a run is of the data sets that its settings make neighbours."""

from __future__ import annotations

from typing import Any

import pytest
from promises import promise, small_settings

from privlora.accounting import epsilon
from privlora.config import Settings
from privlora.errors import ConfigError
from privlora.training.promise import plan_privacy


def _settings(limit: int | None, **privacy: Any) -> Settings:
    plan = promise(steps=20, batch=20, records=100, delta=1e-5, **({"target_epsilon": 3} | privacy))
    return small_settings(data={"path": "unused.jsonl", "limit": limit}, privacy=plan)


@pytest.mark.parametrize("privacy", [{}, {"target_epsilon": None, "target_found": 0.05}])
def test_epsilon_of_the_first_records_is_that_of_replacing_one(privacy: dict[str, Any]) -> None:
    whole, first = (plan_privacy(_settings(limit, **privacy)) for limit in (None, 100))
    assert (whole.adjacency, first.adjacency) == ("add-or-remove-one", "replace-one")
    (event, _), (other, _) = whole.phases[-1], first.phases[-1]
    assert other.noise_multiplier > 1.2 * event.noise_multiplier
    if not privacy:
        assert epsilon(first.phases, 1e-5, adjacency="replace-one") <= 3


def test_first_records_without_an_epsilon_for_replacing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.limit"):
        plan_privacy(_settings(100, sampling="balls-in-bins"))
    assert plan_privacy(_settings(None, sampling="balls-in-bins")).adjacency == "add-or-remove-one"
