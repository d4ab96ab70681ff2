"""FedProx and SCAFFOLD under differential privacy: what they add to clients' steps is there, after the noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federated_cases import Federation, owners, settings_of
from torch import Tensor

from privlora.errors import ConfigError
from privlora.federated.plans import public_settings, with_local_method

NAMES = ["owner-0", "owner-1"]


def after(folder: Path, rule: str, rounds: int = 1, **federation: Any) -> list[Tensor]:
    chosen = settings_of(
        rule,
        NAMES,
        method={"name": "dp-sgd", "learning_rate": 0.5},
        privacy={"insecure_noise_seed": 11},
        federation={"rounds": rounds, "local_steps": 3, **federation},
    )
    return Federation(folder, chosen, owners(2)).run().updates()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_metric_that_follows_the_update_is_refused_also_where_settings_changed_since() -> None:
    read = settings_of("tan", NAMES, method={"name": "prism"})
    changed = read.method.model_copy(update={"metric_power": 1.0})
    with pytest.raises(ConfigError, match="joint alone"):
        with_local_method(read.model_copy(update={"method": changed}))


def test_scaffolds_control_variates_are_of_one_rate_for_all_modules() -> None:
    chosen = settings_of("scaffold", NAMES, method={"name": "dp-sgd", "relative_rate": True})
    with pytest.raises(ConfigError, match=r"scaffold does not go with method\.relative_rate"):
        with_local_method(chosen)


def test_clients_move_in_the_units_of_the_frozen_weights(tmp_path: Path) -> None:
    """Told by the server whichever it is, so that no version's default decides at a client."""
    found = []
    for name, relative in (("in", True), ("out", False), ("default", None)):
        method = {"name": "dp-sgd", "learning_rate": 0.5, "relative_rate": relative}
        chosen = settings_of("fedavg", NAMES, method=method, privacy={"insecure_noise_seed": 11})
        assert public_settings(with_local_method(chosen)).method.relative_rate is bool(relative)
        found.append(Federation(tmp_path / name, chosen, owners(2)).run().updates())
    assert same(found[1], found[2])
    assert not same(found[0], found[1])


def test_fedprox_pulls_private_clients_and_is_fedavg_without_a_pull(tmp_path: Path) -> None:
    """Seeds repeat draws and noise, so that equal steps are equal bit for bit."""
    plain = after(tmp_path / "avg", "fedavg")
    assert same(plain, after(tmp_path / "again", "fedavg"))
    assert same(plain, after(tmp_path / "zero", "fedprox", proximal=0.0))
    pulled = after(tmp_path / "prox", "fedprox", proximal=0.5)
    moved = [float((a - b).norm() / b.norm()) for a, b in zip(pulled, plain, strict=True)]
    assert min(moved) > 0.05
    # The pull is towards the beginning, where the update is zero.
    assert all(float(a.norm()) < float(b.norm()) for a, b in zip(pulled, plain, strict=True))


def test_scaffold_is_fedavg_until_there_are_control_variates(tmp_path: Path) -> None:
    assert same(after(tmp_path / "a", "fedavg"), after(tmp_path / "s", "scaffold"))
    two = after(tmp_path / "a2", "fedavg", rounds=2), after(tmp_path / "s2", "scaffold", rounds=2)
    assert all(float((a - b).norm() / b.norm()) > 0.01 for a, b in zip(*two, strict=True))
