"""Where noise is independent alone, privacy.bands is refused, before anything is loaded or charged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlora.config import Settings, settings_from
from privlora.errors import ConfigError
from privlora.rehearsals.choosing import rows_of_choice, rows_to_advise_on
from privlora.training.promise import plan_privacy

NUMBERS = {
    "target_epsilon": 4.0,
    "delta": 1e-3,
    "steps": 6,
    "expected_batch_size": 6,
    "public_dataset_size": 30,
    "bands": 3,
}


def settings(tmp_path: Path, **groups: Any) -> Settings:
    records = tmp_path / "records.jsonl"
    records.write_text('{"text": "one"}\n')
    given = {
        "model": {"name": "tiny"},
        "data": {"path": str(records), "text": "text"},
        "privacy": NUMBERS,
        "run": {"output": str(tmp_path / "run")},
    }
    return settings_from({**given, **groups}, source="test")


@pytest.mark.parametrize(
    ("what", "groups"),
    [
        (rows_of_choice, {"method": {"name": "auto"}}),
        (rows_to_advise_on, {}),
        (plan_privacy, {"method": {"name": "aug-pe"}, "synthesis": {"generator": "model"}}),
        (plan_privacy, {"method": {"name": "projected"}}),
        (plan_privacy, {"method": {"name": "dp-zo"}}),
        (plan_privacy, {"method": {"name": "prism", "metric_power": 1.0}}),
    ],
    ids=["auto", "advice", "votes", "projections", "direction", "metric"],
)
def test_what_has_independent_noise_alone_refuses_bands(
    what: Callable[[Settings], Any], groups: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.bands"):
        what(settings(tmp_path, **groups))
    assert not (tmp_path / "run").exists()


def test_federations_refuse_bands(tmp_path: Path) -> None:
    federation = {"rule": "tan", "rounds": 2, "local_steps": 2, "clients": 2}
    numbers = {name: value for name, value in NUMBERS.items() if name != "steps"}
    with pytest.raises(ConfigError, match=r"privacy\.bands does not go with a federation"):
        settings(tmp_path, privacy=numbers, federation=federation)
