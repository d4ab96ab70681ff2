"""Members of a team: records, starts, draws, noise and ledgers of their own, and parties at one common point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_shadow_training import METHODS, records, settings, tiny_model
from torch import Tensor

from privlora.accounting import Ledger, Plan
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import LowRankAdapter
from privlora.coordinates import FixedTangentCoordinates, OneFactorCoordinates
from privlora.data.examples import Examples
from privlora.data.sampling import PoissonSampler
from privlora.data.units import Units
from privlora.errors import ConfigError, PrivacyError
from privlora.geometry.fixed_rank import Tangent
from privlora.mechanisms import GaussianMechanism, MeanMechanism, Mechanism, NoiseSource
from privlora.mechanisms.charges import Uncharged
from privlora.methods import optimizer_of
from privlora.stacked import JointAdapter, Member, Team, joined, slices, stack_parts
from privlora.training.assembly import Parts, build_parts
from privlora.training.state import TrainState
from privlora.training.step import Step

SIGMA = 0.3
SIZES, RATES = (4, 1, 2), (0.5, 1.0, 0.7)
OWNERS = torch.tensor([0, 0, 0, 0, 1, 2, 2])
CLIENTS = ["dp-adamw", "prism", "fixed tangent", "right factor", "not private"]
# The same with a learning rate in the size of the frozen weights.
RELATIVE = [f"{name}, relative" for name in ("dp-adamw", "prism", "fixed tangent")]


def template(name: str, model: Any) -> Parts:
    """Parts as a federation makes them: a method's, in the space in which clients train."""
    relative, name = name in RELATIVE, name.removesuffix(", relative")
    method = {"fixed tangent": {"name": "prism", "averaging": 0.0}, "right factor": {"name": "ffa"}}.get(name)
    parts = build_parts(
        settings({**(method or METHODS[name]), **({"relative_rate": True} if relative else {})}), model
    )
    parts.adapter.detach()
    if name == "fixed tangent":
        wider = LowRankAdapter(model, rank=4, target_modules=["q_proj", "v_proj", "up_proj"])
        coordinates: Any = FixedTangentCoordinates(wider, parts.coordinates.as_points(), torch.float64)
    elif name == "right factor":
        old = parts.coordinates
        assert isinstance(old, OneFactorCoordinates)
        pairs = [(torch.randn_like(a), b) for a, b in zip(old.left, old.right, strict=True)]
        coordinates = OneFactorCoordinates(old.adapter, pairs, old.scale, old.dtype, side="right")
    else:
        return parts
    hyper = parts.hyper
    optimizer = optimizer_of(parts.method.space, hyper, coordinates)
    return replace(parts, coordinates=coordinates, optimizer=optimizer, average=None)


def starts(parts: Parts) -> list[dict[str, Tensor]]:
    """Three different ones: each is the last one after a step of noise."""
    found = []
    generator = torch.Generator().manual_seed(2)
    for _ in SIZES:
        if isinstance(parts.coordinates, FixedTangentCoordinates):
            noise = parts.coordinates.standard_normal(
                lambda s: 0.01 * torch.randn(s, generator=generator, dtype=torch.float64)
            )
            parts.coordinates.move([Tangent(*each) for each in noise], 1.0)
        elif "0.S" in parts.coordinates.state_dict():
            state = {n: t.clone() for n, t in parts.coordinates.state_dict().items()}
            for g in range(len(parts.adapter.groups)):
                turned = state[f"{g}.V"] + 0.1 * torch.randn(
                    state[f"{g}.V"].shape, generator=generator, dtype=torch.float64
                )
                state[f"{g}.V"] = torch.linalg.qr(turned).Q
            parts.coordinates.load_state_dict(state)
        else:
            for name, t in parts.coordinates.state_dict().items():
                t += 0.1 * torch.randn(t.shape, generator=generator, dtype=torch.float64) * ("left" in name)
        found.append({name: t.clone() for name, t in parts.coordinates.state_dict().items()})
    return found


def members(ledgers: list[Any] | None = None, *, seeded: bool = True) -> list[Member]:
    firsts = np.cumsum((0, *SIZES))
    return [
        Member(
            units=Units(np.arange(SIZES[k])),
            sampler=PoissonSampler(SIZES[k], RATES[k], insecure_seed=10 + k if seeded else None),
            first=int(firsts[k]),
            noise=NoiseSource(20 + k if seeded else None),
            **({} if ledgers is None else {"ledger": ledgers[k]}),
        )
        for k in range(3)
    ]


def rate(step: int) -> float:
    return 0.05 / step


def alone(name: str, k: int, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Client k in a run of its own, with nobody's records but its own."""
    torch.manual_seed(0)
    parts = template(name, tiny_model())
    parts.coordinates.load_state_dict(start)
    first = sum(SIZES[:k])
    examples = Examples(list(records())[first : first + SIZES[k]], pad_token_id=0)
    privacy, sampler = parts.settings.privacy, PoissonSampler(SIZES[k], RATES[k], insecure_seed=10 + k)
    mechanism: Mechanism = MeanMechanism(
        parts.coordinates, expected_batch_size=privacy.b, steps=3, needs_examples=True
    )
    if privacy.private:
        mechanism = GaussianMechanism(
            parts.coordinates,
            clip_norm=privacy.clip_norm,
            event=StepEvent(PoissonSampling(RATES[k]), SIGMA),
            expected_batch_size=privacy.b,
            ledger=Uncharged(),
            noise=NoiseSource(20 + k),
            clipping=parts.hyper.clipping,
        )
    step = Step(
        state=parts,
        mechanism=mechanism,
        examples=examples,
        learning_rate=rate,
        draw=sampler.draw,
        max_tokens=50,
    )
    with parts.adapter:
        step.take_many(3)
    return dict(parts.coordinates.state_dict())


def products(name: str, state: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    coordinates = template(name, tiny_model()).coordinates
    coordinates.load_state_dict(state)
    return [a @ b.mT for a, b in coordinates.factors()]


@pytest.mark.parametrize("name", [*CLIENTS, *RELATIVE])
def test_each_member_is_what_it_would_be_alone_from_its_own_start(name: str) -> None:
    torch.manual_seed(0)
    parts = template(name, tiny_model())
    begun = starts(parts)
    stacked = stack_parts(parts, 3, OWNERS)
    stacked.coordinates.load_state_dict(joined(begun))
    sigma = SIGMA if parts.settings.privacy.private else None
    team = Team(stacked, records(), members(), noise_multiplier=sigma, learning_rate=rate)
    taken: list[int] = []
    team.take(2, taken.append)
    team.take(1, taken.append)
    assert taken == [1, 2, 1]
    for k, (state, start) in enumerate(zip(team.states(), begun, strict=True)):
        before, found, expected = (products(name, s) for s in (start, state, alone(name, k, start)))
        for z0, z, w in zip(before, found, expected, strict=True):
            assert float((w - z0).norm()) > 1e-6
            torch.testing.assert_close(z, w, rtol=1e-5, atol=1e-5 * float((w - z0).norm()))


def test_states_that_were_given_out_do_not_move() -> None:
    stacked = stack_parts(template("dp-adamw", tiny_model()), 3, OWNERS)
    team = Team(stacked, records(), members(), noise_multiplier=SIGMA)
    team.take(1)
    given = team.states()
    kept = [{name: t.clone() for name, t in state.items()} for state in given]
    team.take(1)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(given, kept, strict=True) for name in a)
    assert not torch.equal(team.states()[0]["0.left"], given[0]["0.left"])


def test_slices_are_joined_again() -> None:
    state = {"0.left": torch.randn(6, 4, 2), "1.S": torch.randn(3, 2)}
    parts = slices(state, 3)
    assert torch.equal(parts[1]["0.left"], state["0.left"][2:4])
    assert torch.equal(parts[2]["1.S"], state["1.S"][2:])
    again = joined(parts)
    assert all(torch.equal(again[name], state[name]) for name in state)


class Charged:
    def __init__(self) -> None:
        self.events: list[StepEvent] = []

    def charge(self, event: StepEvent) -> int:
        self.events.append(event)
        return len(self.events)


def test_each_ledger_is_charged_for_how_its_own_member_samples() -> None:
    stacked = stack_parts(template("dp-adamw", tiny_model()), 3, OWNERS)
    ledgers = [Charged() for _ in SIZES]
    Team(stacked, records(), members(ledgers), noise_multiplier=SIGMA).take(2)
    for ledger, q in zip(ledgers, RATES, strict=True):
        assert ledger.events == [StepEvent(PoissonSampling(q), SIGMA)] * 2


def plan_of(**change: Any) -> Plan:
    given: dict[str, Any] = {
        "phases": ((StepEvent(PoissonSampling(RATES[0]), 2.0), 3),),
        "delta": 1e-5,
        "target_epsilon": None,
        "adjacency": "add-or-remove-one",
        "unit": "record",
        "records_per_user": None,
        "clip_norm": 0.05,
        "expected_batch_size": 3.0,
        "method": "dp-adamw",
        "dataset": "x",
        "insecure_noise": False,
    }
    return Plan(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "seeded", "refused"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"clip_norm": 0.1}, False, True),
        ({"expected_batch_size": 4.0}, False, True),
        ({"insecure_noise": True}, False, True),
    ],
)
def test_a_ledger_plans_what_the_team_does(
    change: dict[str, Any], seeded: bool, refused: bool, tmp_path: Any
) -> None:
    stacked = stack_parts(template("dp-adamw", tiny_model()), 3, OWNERS)
    with Ledger.create(tmp_path / "l", plan_of(**change)) as ledger:
        own = members([ledger, Uncharged(), Uncharged()], seeded=seeded)
        if refused:
            with pytest.raises(PrivacyError, match="plans another clipping norm"):
                Team(stacked, records(), own, noise_multiplier=2.0)
            return
        Team(stacked, records(), own, noise_multiplier=2.0).take(2)
        assert ledger.charges == 2


def test_seeded_batches_alone_are_not_private(tmp_path: Any) -> None:
    stacked = stack_parts(template("dp-adamw", tiny_model()), 3, OWNERS)
    with Ledger.create(tmp_path / "l", plan_of()) as ledger:
        first, *rest = members([ledger, Uncharged(), Uncharged()], seeded=False)
        seeded = replace(first, sampler=PoissonSampler(SIZES[0], RATES[0], insecure_seed=1))
        with pytest.raises(PrivacyError, match="kind of noise"):
            Team(stacked, records(), [seeded, *rest], noise_multiplier=2.0)


@pytest.mark.parametrize("owners", [[0, 3], [-1, 0], [0.0, 1.0], [[0, 1]]])
def test_a_record_is_of_somebody_in_the_stack(owners: list[Any]) -> None:
    with pytest.raises(ConfigError, match="not numbers from 0 to 2"):
        stack_parts(template("dp-adamw", tiny_model()), 3, torch.tensor(owners))


def summed(coordinates: Any, examples: Examples, clipping: str) -> list[tuple[Tensor, ...]]:
    """The private sum of all examples, at a clipping norm that bounds them."""
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=0.05,
        event=StepEvent(PoissonSampling(0.5), SIGMA),
        expected_batch_size=3,
        ledger=Uncharged(),
        clipping=clipping,
    )
    state = TrainState(coordinates=coordinates, optimizer=_Still(coordinates))  # type: ignore[arg-type]
    step = Step(state=state, mechanism=mechanism, examples=examples, learning_rate=0.0, max_tokens=50)
    with coordinates.adapter:
        step.accumulate(range(len(examples)))
    vector = mechanism.take().vector
    assert vector is not None
    return vector


class _Still:
    """Moves nothing."""

    def __init__(self, coordinates: Any) -> None:
        self.coordinates = coordinates


@pytest.mark.parametrize("clipping", ["flat", "spectral", "per-module"])
@pytest.mark.parametrize("name", CLIENTS[:-1])
def test_parties_at_one_point_have_the_sums_of_their_own_records(name: str, clipping: str) -> None:
    torch.manual_seed(0)
    parts = template(name, tiny_model())
    parts.coordinates.load_state_dict(starts(parts)[-1])
    joint = JointAdapter.like(parts.adapter, 3, OWNERS)
    coordinates = parts.coordinates.stacked(joint, 1)
    assert coordinates.place() == parts.coordinates.place()
    found = summed(coordinates, records(), clipping)
    first = 0
    for k, size in enumerate(SIZES):
        own = Examples(list(records())[first : first + size], pad_token_id=0)
        expected = summed(parts.coordinates, own, clipping)
        first += size
        for stacked, alone_ in zip(found, expected, strict=True):
            for t, e in zip(stacked, alone_, strict=True):
                assert len(t) == 3 * len(e)
                assert float(e.norm()) > 1e-6
                torch.testing.assert_close(
                    t.unflatten(0, (3, -1))[k], e, rtol=1e-5, atol=1e-6 * float(e.norm())
                )


def test_a_joint_sum_is_not_released_as_if_it_were_one_partys() -> None:
    parts = template("dp-adamw", tiny_model())
    coordinates = parts.coordinates.stacked(JointAdapter.like(parts.adapter, 3, OWNERS), 1)
    mechanism = GaussianMechanism(
        coordinates,
        clip_norm=0.05,
        event=StepEvent(PoissonSampling(0.5), SIGMA),
        expected_batch_size=3,
        ledger=Uncharged(),
    )
    state = TrainState(coordinates=coordinates, optimizer=_Still(coordinates))  # type: ignore[arg-type]
    step = Step(state=state, mechanism=mechanism, examples=records(), learning_rate=0.0)
    with coordinates.adapter:
        step.accumulate(range(7))
    with pytest.raises(PrivacyError, match="meets noise of shape"):
        mechanism.release()
