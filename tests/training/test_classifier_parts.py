"""Both parts of a classifier together: sums, states and processes know of the last layer as of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from classifier_cases import RECORDS, classifier, examples_of, started
from counting_ledger import CountingLedger
from rank_cases import found_together

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured
from privlora.coordinates.headed import HeadedCoordinates
from privlora.data.batching import collate
from privlora.errors import PrivacyError
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.training.gradients import micro_batch_gradients
from privlora.training.ranks import OneProcess, Ranks
from privlora.training.shared_step import SharedStep
from privlora.training.state import TrainState
from privlora.training.step import Step


def mechanism_on(coordinates: HeadedCoordinates, clipping: str = "flat") -> GaussianMechanism:
    return GaussianMechanism(
        coordinates,
        clip_norm=0.7,
        event=StepEvent(PoissonSampling(0.01), 1.0),
        expected_batch_size=1.0,
        ledger=CountingLedger(),
        clipping=clipping,
        noise=NoiseSource(3),
    )


def step_on(coordinates: HeadedCoordinates, optimizer: object) -> Step:
    """On all records, in the same order each time."""
    examples = examples_of(RECORDS)
    return Step(
        state=TrainState(coordinates=coordinates, optimizer=optimizer),  # type: ignore[arg-type]
        mechanism=mechanism_on(coordinates),
        examples=examples,
        learning_rate=0.1,
        draw=lambda: list(range(len(examples))),
    )


def gradients(coordinates: HeadedCoordinates, units: Sequence[int] = range(len(RECORDS))) -> Captured:
    batch = collate([np.array([k]) for k in units], examples_of(RECORDS))
    with coordinates.adapter:
        return micro_batch_gradients(coordinates.adapter, batch)[0]


@pytest.mark.parametrize("clipping", ["flat", "spectral", "automatic", "per-module"])
@pytest.mark.parametrize("part", ["body", "head"])
def test_a_unit_that_is_not_finite_in_one_part_moves_nothing(part: str, clipping: str) -> None:
    """Not by what is finite of it, and 0 times what is not finite is not 0."""
    _, coordinates, _ = started(classifier(), "dp-adamw")
    mechanism = mechanism_on(coordinates, clipping)

    def total(captured: Captured) -> torch.Tensor:
        mechanism.accumulate(captured)
        vector = mechanism.take().spend().vector
        assert vector is not None
        return torch.cat([t.flatten() for parts in vector for t in parts]).double()

    whole = gradients(coordinates)
    sides = [[t.clone() for t in side] for side in (whole.p, whole.q)]
    site = {"body": 0, "head": -1}[part]
    for side in sides:
        assert side[site][2].any()
        side[site][2] = float("nan")
    found = total(Captured(*sides, whole.dense_squares))
    assert found.isfinite().all()
    # Weak modules are scaled by more, and so is what company rounds in them.
    atol = 1e-5 if clipping == "per-module" else 1e-6
    torch.testing.assert_close(found, total(gradients(coordinates, [0, 1, 3, 4])), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("clipping", ["flat", "spectral", "automatic", "per-module"])
@pytest.mark.parametrize("method", ["dp-adamw", "prism"])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-6, 1e-8])
def test_a_unit_whose_body_is_far_below_its_last_layer_moves_no_more_than_c(
    size: float, clipping: str, method: str
) -> None:
    """Whatever brings weak modules up: below 1e-4 of the last layer's it brings the body up by less."""
    _, coordinates, _ = started(classifier(), method)
    mechanism = mechanism_on(coordinates, clipping)
    whole = gradients(coordinates, [2])
    sides = ([*(t * size for t in side[:-1]), side[-1]] for side in (whole.p, whole.q))
    mechanism.accumulate(Captured(*sides, whole.dense_squares))
    vector = mechanism.take().spend().vector
    assert vector is not None
    norm = torch.cat([t.flatten() for parts in vector for t in parts]).double().norm()
    assert norm <= 0.7
    assert norm > 0.6 or clipping == "per-module"  # where the body's part of C is lost with it


def test_a_sum_is_of_the_last_layer_that_it_was_taken_at() -> None:
    _, coordinates, _ = started(classifier(), "dp-adamw")
    mechanism = mechanism_on(coordinates)
    totals = []
    for _ in range(2):
        mechanism.accumulate(gradients(coordinates))
        totals.append(mechanism.take())
    coordinates.head.right[0].add_(1e-6)
    coordinates.install()
    with pytest.raises(PrivacyError, match="another point"):
        mechanism.release(totals[0])
    with pytest.raises(PrivacyError, match="another point"):
        mechanism.take() + totals[1]


def test_what_the_optimizer_remembers_of_the_last_layer_is_taken_up() -> None:
    _, one, optimizer = started(classifier(), "dp-adamw")
    step = step_on(one, optimizer)
    with one.adapter:
        step.take_many(2)
    _, two, other = started(classifier(), "dp-adamw")
    again = TrainState(coordinates=two, optimizer=other)
    states = {
        name: {key: t.clone() for key, t in state.items()} for name, state in step.state.states().items()
    }
    again.take_states(states)
    kept, taken = step.state.states(), again.states()
    assert any(name.startswith("head.") for name in kept["optimizer"])
    for name, state in kept.items():
        assert state.keys() == taken[name].keys()
        assert all(torch.equal(t, taken[name][key]) for key, t in state.items()), name


def test_several_processes_take_gradients_at_one_last_layer(tmp_path: Path) -> None:
    """Three steps give what one process gives; noise has a public seed here."""

    def walked(ranks: Ranks) -> list[torch.Tensor]:
        _, coordinates, optimizer = started(classifier(), "dp-adamw")
        step = SharedStep(step_on(coordinates, optimizer), ranks)
        for _ in range(3):
            with coordinates.adapter:
                step.take()
        return [t.clone() for t in coordinates.state_dict().values()]

    alone = walked(OneProcess())
    first, _ = found_together(2, tmp_path, walked)
    for one, both in zip(alone, first, strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(both, one, rtol=1e-3, atol=1e-5)
