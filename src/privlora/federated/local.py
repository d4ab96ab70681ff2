"""What clients of one process do with their records: train side by side, each as it would alone.

A round's clients share the frozen model and its passes (stacked adapters). Draws, clipping, noise and ledgers are each
one's own, so nothing that one sends depends on who else is in the process, but for the last digits of gradients that
noise covers at each step. Where whole clients are hidden there is none between steps, and each trains by itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privlora.accounting import Ledger
from privlora.adapters.peft_files import CONFIG_NAME, lora_scaling
from privlora.config import Settings
from privlora.coordinates import (
    Coordinates,
    FactorCoordinates,
    FixedTangentCoordinates,
    OneFactorCoordinates,
    Vector,
)
from privlora.data.examples import Examples
from privlora.federated import plans
from privlora.federated.messages import SUM
from privlora.federated.rules import Beginning, Tensors
from privlora.federated.rules.base import SIDES, names_of
from privlora.federated.rules.checks import refuse_foreign
from privlora.federated.workplace import Workplace, in_words
from privlora.geometry.fixed_rank import Point
from privlora.mechanisms import Layout, NoiseSource, PlainSums, ShareMechanism
from privlora.mechanisms.charges import ChargeAll, Charges
from privlora.methods import SPACES, Hyperparameters, find_method, optimizer_of
from privlora.schedules import learning_rate_at
from privlora.stacked import JointAdapter, Member, Team, joined, stack_parts
from privlora.stacked.parts import StackedNoise
from privlora.training.assembly import Parts
from privlora.training.files import write_atomically
from privlora.training.inputs import Data
from privlora.training.models import adapter_for, unchanged_afterwards
from privlora.training.promise import sampler
from privlora.training.step import Step

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One client's part of a round. data, ledger, seed: its own; seed: of tests alone, whose noise repeats. The ledger
    has releases left for the round (`plans.refuse_spent`).

    number: of the round. sent: what the server sent. beginning: by the rule; None for joint.
    """

    name: str
    data: Data
    number: int
    sent: Mapping[str, Tensor]
    beginning: Beginning | None
    ledger: Ledger | None
    seed: int | None = None


@dataclass(frozen=True)
class Ended:
    """Where a client's training ended; a function of its releases. travelled: see `Rule.answer`."""

    state: Tensors
    travelled: float


def train_locally(jobs: Sequence[Job], workplace: Workplace) -> Sequence[Ended | np.ndarray | None]:
    """The local steps of a round, for all jobs of it, in their order; of joint, vectors.

    None, where whole clients are hidden, for one without records or whose gradient is not a number: it moves nothing.
    """
    settings = workplace.loaded[2]
    if plans.federation_of(settings).joint:
        return _vectors(jobs, workplace)
    if plans.federation_of(settings).privacy_model != "record" and settings.privacy.private:
        # Steps without noise enlarge what rounding carries from one client's records into another's update.
        return [_train_hidden(job, workplace) for job in jobs]
    return _train(jobs, workplace)


def _train_hidden(job: Job, workplace: Workplace) -> Ended | None:
    # What a client moves without records, by decay or a pull alone, would count beside the C that clipping leaves it.
    if not len(job.data.units):
        return None
    try:
        return _train([job], workplace)[0]
    except Exception as error:  # noqa: BLE001 - a refusal would tell of its records
        _log.error("%s sends an update of zero: %s", job.name, in_words(error))
        return None


def _train(jobs: Sequence[Job], workplace: Workplace) -> list[Ended]:
    model, _, settings = workplace.loaded
    number, federation = jobs[0].number, plans.federation_of(settings)
    mine, steps = plans.client_settings(settings), federation.local_steps
    beginnings = [job.beginning for job in jobs if job.beginning is not None]
    rate = rates(settings, number)
    sigma = None if jobs[0].ledger is None else jobs[0].ledger.plan.phases[-1][0].noise_multiplier
    if federation.privacy_model == "client":
        sigma = None  # noise is added to whole updates
    with unchanged_afterwards(model):
        owners = owners_of([job.data for job in jobs])
        parts = stack_parts(_parts(mine, model, beginnings[0], number), len(jobs), owners)
        parts.coordinates.load_state_dict(joined([beginning.state for beginning in beginnings]))
        parts.optimizer.drift = _drift(parts, beginnings, number)
        examples = _end_to_end([job.data.examples for job in jobs])
        ledgers: dict[str, Charges] = {job.name: job.ledger for job in jobs if job.ledger is not None}
        members = members_of(jobs, mine, ledgers if sigma is not None else {})
        team = Team(parts, examples, members, noise_multiplier=sigma, learning_rate=rate)
        told = workplace.told
        team.take(steps, None if told is None else lambda done: told(done, steps))
    tau = 0.0 if sigma is None else sigma * mine.privacy.clip_norm / mine.privacy.b
    travelled = sum(rate(step) for step in range(1, steps + 1)) / (tau or 1.0)
    return [Ended(state, travelled) for state in team.states()]


def rates(settings: Settings, number: int) -> Callable[[int], float]:
    """The learning rate of steps 1, 2, … of a round."""
    federation, hyper = plans.federation_of(settings), plans.resolved(settings)
    before, steps = (number - 1) * federation.local_steps, federation.steps
    shape = steps, hyper.learning_rate, hyper.schedule, hyper.warmup_steps
    return lambda step: learning_rate_at(before + step, *shape)


def scale_of(settings: Settings) -> float:
    """LoRA's, of the settings' adapter."""
    lora = settings.adapter
    return lora_scaling(lora.lora_alpha, lora.r, lora.use_rslora)


def _dtype_beside(model: torch.nn.Module) -> torch.dtype:
    """Of what a client trains beside the frozen model: float32, unless the model is float64."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32


def _parts(settings: Settings, model: torch.nn.Module, beginning: Beginning, number: int) -> Parts:
    """One client's parts, at the beginning of a round."""
    trains = plans.rule_of(plans.federation_of(settings)).trains(number, plans.rule_settings(settings))
    hyper = plans.resolved(settings)
    lora = settings.adapter
    widened = settings.changed(adapter={"r": 2 * lora.r}) if trains == "tangent" else settings
    adapter = adapter_for(widened, model, dropout=lora.lora_dropout)
    hyper = replace(hyper, averaging=0.0)  # the server averages; of a client, where it ends is asked
    scale = 1.0 if trains == "tangent" else scale_of(settings)
    for group, pair in zip(adapter.groups, beginning.offset or (), strict=False):
        adapter.subtract(group, -scale * pair[0], pair[1])
    dtype, groups = _dtype_beside(model), range(len(adapter.groups))

    def of(name: str, g: int) -> Tensor:
        return beginning.state[f"{g}.{name}"].to(adapter.device, dtype)

    coordinates: Coordinates
    if trains == "tangent":
        points = [Point(of("U", g), of("S", g), of("V", g)) for g in groups]
        weight = hyper.settings.get("right_weight", 1.0)
        coordinates = FixedTangentCoordinates(adapter, points, dtype, right_weight=weight)
    else:
        pairs = [(of("left", g), of("right", g)) for g in groups]
        if trains == "both":
            coordinates = FactorCoordinates(adapter, pairs, scale, dtype)
        else:
            coordinates = OneFactorCoordinates(adapter, pairs, scale, dtype, side=trains)
    return _trained_in(coordinates, settings, hyper)


def write_beginning(folder: Path, beginning: Beginning, workplace: Workplace, base: str) -> None:
    """Write the model that a client would train on from ``beginning`` as an adapter. base: the place of its base model.

    Raises RunError where nothing can be written.
    """
    model, _, settings = workplace.loaded
    last = plans.federation_of(settings).rounds
    with unchanged_afterwards(model):
        _parts(plans.client_settings(settings), model, beginning, last).write_adapter(folder)
    config = json.loads((folder / CONFIG_NAME).read_bytes())
    config["base_model_name_or_path"] = base  # its place, since nobody else reads it
    write_atomically(folder / CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True), mode=0o600)


def _trained_in(coordinates: Coordinates, settings: Settings, hyper: Hyperparameters) -> Parts:
    method = find_method(settings.method.name)
    optimizer = optimizer_of(method.space, hyper, coordinates)
    return Parts(method=method, coordinates=coordinates, optimizer=optimizer, settings=settings, hyper=hyper)


def _drift(parts: Parts, beginnings: Sequence[Beginning], number: int) -> Callable[[], Vector] | None:
    """The pull towards the beginning and the control variates, in what is trained; None without either."""
    settings = parts.settings
    rule, pull = plans.rule_of(plans.federation_of(settings)), beginnings[0].pull
    names = SIDES[rule.trains(number, plans.rule_settings(settings))]
    controls = [beginning.control for beginning in beginnings if beginning.control is not None]
    if not pull and not controls:
        return None
    state = parts.coordinates.state_dict()
    start = {name: tensor.clone() for name, tensor in state.items()}
    control = joined(controls) if controls else {}

    def drift() -> Vector:
        now, moved = parts.coordinates.state_dict(), dict[str, Tensor]()
        for name in names_of(start, names):
            pulled = pull * (now[name] - start[name])
            moved[name] = pulled + control[name].to(pulled) if name in control else pulled
        return [tuple(moved[f"{g}.{name}"] for name in names) for g in range(len(parts.adapter.groups))]

    return drift


def members_of(jobs: Sequence[Job], settings: Settings, ledgers: Mapping[str, Charges]) -> list[Member]:
    """settings: of a client in the round. ledgers: of the members that are charged for themselves."""
    members, first = [], 0
    for job in jobs:
        seeds = (None, None) if job.seed is None else (2 * job.seed, 2 * job.seed + 1)
        privacy = settings.privacy.model_copy(update={"insecure_noise_seed": seeds[0]})
        units, noise = job.data.units, NoiseSource(seeds[1])
        own: dict[str, Any] = {"ledger": ledgers[job.name]} if job.name in ledgers else {}
        members.append(
            Member(units=units, sampler=sampler(privacy, len(units)), first=first, noise=noise, **own)
        )
        first += len(job.data.examples)
    return members


def owners_of(data: Sequence[Data]) -> Tensor:
    counts = torch.tensor([len(each.examples) for each in data])
    return torch.repeat_interleave(torch.arange(len(data)), counts)


def _end_to_end(examples: Sequence[Examples]) -> Examples:
    return Examples([one for each in examples for one in each], pad_token_id=examples[0].pad_token_id)


def _vectors(jobs: Sequence[Job], workplace: Workplace) -> list[np.ndarray]:
    """Each client's share of one step of central training, in the order of ``jobs``: (entries,) ring integers, or
    float64 without noise.

    A client draws its Poisson share, clips, sums and adds its share of the noise, at a common public point; the server
    sees the secure sum alone. Accounting, noise and accuracy are the central ones; only the sum is taken elsewhere.
    """
    model, _, settings = workplace.loaded
    with unchanged_afterwards(model):
        parts = _joint_parts(settings, model, jobs)
        members = members_of(jobs, settings, {})  # the mechanism charges for them
        step = Step(
            state=parts,
            mechanism=_mechanism(parts, jobs, members),
            examples=_end_to_end([job.data.examples for job in jobs]),
            learning_rate=0.0,  # nothing moves here
            max_tokens=settings.run.max_tokens,
            dropout=settings.model.dropout,
        )
        with parts.adapter:
            step.accumulate([unit for member in members for unit in member.draw()])
        mechanism = step.mechanism
        if isinstance(mechanism, ShareMechanism):
            return mechanism.shares(len(jobs))
        assert isinstance(mechanism, PlainSums)
        return mechanism.sums(len(jobs))


def _joint_parts(settings: Settings, model: torch.nn.Module, jobs: Sequence[Job]) -> Parts:
    """The method at the point that was sent, with whose each record is."""
    hyper = plans.resolved(settings)
    adapter = adapter_for(settings, model, dropout=settings.adapter.lora_dropout)
    space = SPACES[find_method(settings.method.name).space]
    of_space: dict[str, Any] = {
        name: hyper.settings[name] for name in space.optimizers[hyper.optimizer].space_settings
    }
    dtype = _dtype_beside(model)
    # Where it starts makes no difference: the point follows.
    of_space |= {"scale": scale_of(settings), "dtype": dtype, "subspaces": None}
    start = space.start(adapter, "random", seed=0, **of_space)
    joint = JointAdapter.like(adapter, len(jobs), owners_of([job.data for job in jobs]))
    coordinates = start.stacked(joint, 1)
    refuse_foreign(jobs[0].sent, {n: tuple(t.shape) for n, t in coordinates.state_dict().items()})
    coordinates.load_state_dict({name: t.to(dtype) for name, t in jobs[0].sent.items()})
    return _trained_in(coordinates, settings, hyper)


def _mechanism(parts: Parts, jobs: Sequence[Job], members: Sequence[Member]) -> ShareMechanism | PlainSums:
    settings = parts.settings
    privacy, ledgers = settings.privacy, [job.ledger for job in jobs if job.ledger is not None]
    if not ledgers:
        b, steps = privacy.b, privacy.steps
        return PlainSums(parts.coordinates, expected_batch_size=b, steps=steps, needs_examples=True)
    plan = ledgers[0].plan
    entries = {SUM: (Layout.of(parts.coordinates).entries,)}
    lattice = plans.lattice_of(plans.federation_of(settings), plan, entries)
    assert lattice is not None
    return ShareMechanism(
        parts.coordinates,
        clip_norm=privacy.clip_norm,
        # What is charged is what is sampled; a ledger refuses it if it is not what was planned next.
        event=replace(plan.event, sampling=members[0].sampler.sampling),
        expected_batch_size=privacy.b,
        ledger=ChargeAll(ledgers),
        lattice=lattice,
        noise=StackedNoise([member.noise for member in members]),
        clipping=parts.hyper.clipping,
    )
