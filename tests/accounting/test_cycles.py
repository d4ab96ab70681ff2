"""Cyclic Poisson sampling: n steps cost ceil(n / b) independent releases, in every place where a price is asked."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from accounting_cases import make_plan, poisson

from privlora.accounting import Ledger, calibrate_noise_multiplier, epsilon, read_ledger
from privlora.accounting.accountants import Accountant, Adjacency, delta_curve
from privlora.accounting.budget import compose_ledgers
from privlora.accounting.events import (
    CyclicPoissonSampling,
    PoissonSampling,
    StepEvent,
    TruncatedPoissonSampling,
)
from privlora.errors import PrivacyError

RATE, SIGMA, DELTA = 0.08, 1.1, 1e-5


def cyclic(bands: int, rate: float = RATE, sigma: float = SIGMA) -> StepEvent:
    return StepEvent(CyclicPoissonSampling(rate, bands), sigma)


@pytest.mark.parametrize(
    ("bands", "steps", "cycles"), [(2, 1, 1), (2, 2, 1), (2, 3, 2), (8, 24, 3), (8, 25, 4)]
)
@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_each_cycle_that_has_begun_costs_one_release(
    bands: int, steps: int, cycles: int, adjacency: Adjacency
) -> None:
    found = epsilon([(cyclic(bands), steps)], DELTA, adjacency=adjacency)
    assert found == epsilon([(poisson(RATE, SIGMA), cycles)], DELTA, adjacency=adjacency)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_of_every_accountant(accountant: Accountant) -> None:
    found = epsilon([(cyclic(4), 10)], DELTA, accountant=accountant)
    assert found == epsilon([(poisson(RATE, SIGMA), 3)], DELTA, accountant=accountant)


def test_two_runs_have_cycles_of_their_own() -> None:
    """Five steps of one and three of another are 2 + 1 cycles of 4, and not 2."""
    found = epsilon([(cyclic(4), 5), (cyclic(4), 3)], DELTA)
    assert found == epsilon([(poisson(RATE, SIGMA), 3)], DELTA)


def test_the_whole_curve_is_of_cycles() -> None:
    asked = [0.0, 0.5, 1.0]
    assert delta_curve([(cyclic(4), 10)], asked) == delta_curve([(poisson(RATE, SIGMA), 3)], asked)


def test_calibration_is_that_of_independent_releases() -> None:
    found = calibrate_noise_multiplier(CyclicPoissonSampling(RATE, 8), 24, 2.0, DELTA, cache=False)
    plain = calibrate_noise_multiplier(PoissonSampling(RATE), 3, 2.0, DELTA, cache=False)
    assert found.noise_multiplier == plain.noise_multiplier
    assert found.epsilon == plain.epsilon
    assert found.events == ((cyclic(8, sigma=found.noise_multiplier), 24),)


def test_more_bands_are_calibrated_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of one number of bands is not taken for another."""
    monkeypatch.setenv("PRIVLORA_CACHE", str(tmp_path))
    two, four = (
        calibrate_noise_multiplier(CyclicPoissonSampling(RATE, b), 16, 2.0, DELTA).noise_multiplier
        for b in (2, 4)
    )
    assert two > 1.01 * four


def test_one_class_is_no_cycle() -> None:
    with pytest.raises(PrivacyError, match="not between 2 and"):
        CyclicPoissonSampling(0.1, 1)


def test_an_event_is_read_as_it_was_written() -> None:
    event = cyclic(8)
    assert StepEvent.from_dict(json.loads(json.dumps(event.to_dict()))) == event
    assert event.to_dict()["sampling"] == {"kind": "cyclic_poisson", "sample_rate": RATE, "classes": 8}
    assert "8 bands" in event.describe()
    assert "8 classes" in event.describe()
    with pytest.raises(PrivacyError, match=r"classes=8\.0"):
        StepEvent.from_dict({**event.to_dict(), "sampling": {**event.to_dict()["sampling"], "classes": 8.0}})


def test_correlated_noise_is_of_no_projection() -> None:
    with pytest.raises(PrivacyError, match="cyclic"):
        StepEvent(CyclicPoissonSampling(0.1, 2), 1.0, ((8, 64),))


def test_a_plan_of_cycles_has_one_phase() -> None:
    with pytest.raises(PrivacyError, match="several phases"):
        make_plan(phases=((poisson(0.1, 1.0), 2), (cyclic(4), 8)))
    with pytest.raises(PrivacyError, match="one phase only"):
        calibrate_noise_multiplier(
            CyclicPoissonSampling(RATE, 4), 8, 2.0, DELTA, others=[(PoissonSampling(0.1), 3)]
        )


@pytest.mark.parametrize(
    "other",
    [
        poisson(RATE, SIGMA),
        cyclic(3),
        cyclic(4, rate=RATE / 2),
        cyclic(4, sigma=SIGMA / 2),
        replace(cyclic(4), sampling=TruncatedPoissonSampling(RATE, 10, 100)),
    ],
)
def test_a_ledger_of_cycles_takes_their_steps_alone(tmp_path: Path, other: StepEvent) -> None:
    with Ledger.create(tmp_path / "ledger", make_plan(event=cyclic(4), steps=6)) as ledger:
        ledger.charge(cyclic(4))
        with pytest.raises(PrivacyError, match="charged in step 2"):
            ledger.charge(other)
        assert ledger.charges == 1


def test_a_step_out_of_order_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger.create(path, make_plan(event=cyclic(4), steps=6)) as ledger:
        for _ in range(5):
            ledger.charge(cyclic(4))
    assert read_ledger(path).epsilon() == epsilon([(poisson(RATE, SIGMA), 2)], DELTA)
    lines = path.read_text().splitlines(keepends=True)
    for wrong in ([*lines[:2], *lines[3:]], [*lines[:2], lines[3], lines[2], *lines[4:]]):
        path.write_text("".join(wrong))
        with pytest.raises(PrivacyError):
            read_ledger(path)


def test_copies_that_took_back_the_same_noise_are_not_composed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger.create(path, make_plan(event=cyclic(4), steps=12)) as ledger:
        for _ in range(3):
            ledger.charge(cyclic(4))
    copies = []
    for more in (1, 1, 3):  # the first two differ in their last charges alone
        copies.append(Path(shutil.copy(path, tmp_path / f"copy-{len(copies)}")))
        with Ledger.open(copies[-1]) as ledger:
            for _ in range(more):
                ledger.charge(cyclic(4))
    assert compose_ledgers([path, copies[2]]).epsilon == epsilon([(poisson(RATE, SIGMA), 2)], DELTA)
    with pytest.raises(PrivacyError, match="continued apart"):
        compose_ledgers(copies[:2])
    with pytest.raises(PrivacyError, match="continued apart"):
        compose_ledgers(copies[1:])
