"""One record of one client: how far it moves what is summed, and that nothing but noised sums moves a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated_cases import (
    Federation,
    Records,
    drawing,
    everyone,
    nobody,
    owners,
    records,
    settings_of,
    without_noise,
)
from torch import Tensor

from privlora.coordinates.base import Vector
from privlora.errors import RunError
from privlora.federated.client import Session
from privlora.federated.messages import Reply
from privlora.federated.rules import RULES
from privlora.mechanisms.noising import Charged
from privlora.training.state import States

C = 0.05
NAMES = ["owner-0", "owner-1"]
VECTOR, INTEGERS = Charged.vector, Charged.integers


class Sums:
    """The private sums that met noise, flat, in order. Noise alone goes on, so later sums are at the same points."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: list[Tensor] = []
        kept = self

        def vector(self: Charged, total: Vector | None, *args: Any, **options: Any) -> Vector:
            kept.found.append(_flat(total))
            return VECTOR(self, None, *args, **options)

        def integers(self: Charged, total: Tensor | None, **options: Any) -> np.ndarray:
            kept.found.append(_flat([(total,)] if total is not None else None))
            return INTEGERS(self, None, **options)

        patch.setattr(Charged, "vector", vector)
        patch.setattr(Charged, "integers", integers)


def _flat(total: Vector | None) -> Tensor:
    if total is None:
        return torch.zeros(1, dtype=torch.float64)
    return torch.cat([t.double().flatten() for parts in total for t in parts])


def trained(folder: Path, rule: str, own: Mapping[str, Records], **groups: Any) -> tuple[Federation, Reply]:
    """Owner 0 answers "train" of round 1; its noise repeats, and no masks hide what it would send into a sum."""
    federation = {"secure_aggregation": None, **groups.pop("federation", {})}
    privacy = {"clip_norm": C, "insecure_noise_seed": 5, **groups.pop("privacy", {})}
    chosen = settings_of(rule, list(own), federation=federation, privacy=privacy, **groups)
    made = Federation(folder, chosen, own).join()
    return made, asked(made, "train")


def asked(made: Federation, kind: str) -> Reply:
    with pytest.MonkeyPatch.context() as patch:
        for check in ("_refuse_unlisted", "_participant"):
            patch.setattr(Session, check, lambda self, request: None)
        patch.setattr(
            Session, "send", lambda self, r, tensors: Reply(self.client.name, r.kind, r.round, tensors)
        )
        return made.clients["owner-0"].answer(made.request("owner-0", kind))


@pytest.mark.parametrize("rule", ["tan", "fedavg", "alt", "joint"])
def test_one_record_moves_what_is_summed_by_no_more_than_the_clipping_norm(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing(monkeypatch, everyone)
    kept, full = Sums(monkeypatch), records(0)
    sums = []
    for left_out in [None, *range(len(full))]:
        own = {**owners(2), "owner-0": [r for i, r in enumerate(full) if i != left_out]}
        kept.found = []
        trained(tmp_path / str(left_out), rule, own)
        sums.append(list(kept.found))
    steps = 1 if rule == "joint" else 2
    assert [len(found) for found in sums] == [steps] * len(sums)
    for step in range(steps):
        moved = [float((sums[0][step] - less[step]).norm()) for less in sums[1:]]
        assert max(moved) <= C * (1 + 1e-6)
        assert min(moved) > C * 0.9  # all were clipped, so the bound was met


@pytest.mark.parametrize("rule", ["tan", "fedavg", "alt", "joint"])
def test_a_record_moves_no_other_records_gradient(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long record beside five short ones: what leaves is its own part, to rounding."""
    kept, full = Sums(monkeypatch), records(0)
    sums = []
    for chosen in (range(6), range(5), [5]):
        drawing(monkeypatch, lambda units, chosen=chosen: [i for i in chosen if i < units])
        kept.found = []
        trained(tmp_path / str(len(sums)), rule, {**owners(2), "owner-0": full})
        sums.append(kept.found[0])
    both, short, long = sums
    assert float((both - short - long).norm()) < 1e-5 * C


def answers(made: Federation, first: Reply) -> list[Reply]:
    """All of the owner's answers of the round."""
    found = [first]
    for stage in made.server.stages[1:]:
        made.server.add(made.server.stages[0], dict(first.tensors), 1.0)
        made.server.close(made.server.stages[0], 1, 1)
        found.append(asked(made, stage))
    return found


ALL_PRIVATE = [(rule, "record") for rule in sorted(RULES)] + [("fedavg", "client"), ("tan", "client")]


@pytest.mark.parametrize(("rule", "unit"), [*ALL_PRIVATE, ("joint", "record")])
def test_messages_are_functions_of_noised_sums_and_public_numbers(
    rule: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sums, and with noise that repeats, clients with other data say the same, bit for bit."""
    Sums(monkeypatch)
    said = []
    for name, own in (("a", owners(2)), ("b", {**owners(2), "owner-0": records(9, (11, 3, 25))})):
        made, first = trained(tmp_path / name, rule, own, federation={"privacy_model": unit})
        said.append(answers(made, first))
    assert len(said[0]) == len(said[1]) == (2 if rule == "fedask" else 1)
    for one, other in zip(*said, strict=True):
        assert one.refused is None
        assert replace(one, tensors={}) == replace(other, tensors={})
        assert one.tensors.keys() == other.tensors.keys()
        for tensor in one.tensors:
            assert torch.equal(one.tensors[tensor], other.tensors[tensor])


@pytest.mark.parametrize(("rule", "unit"), [*ALL_PRIVATE, ("joint", "record")])
def test_every_number_that_leaves_is_noised(
    rule: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same draws of the same records under other noise: no number of any message stays what it was."""
    drawing(monkeypatch, everyone)
    said = []
    for silent in (True, False):
        with monkeypatch.context() as patch:
            if silent:
                without_noise(patch)
            made, first = trained(tmp_path / str(silent), rule, owners(2), federation={"privacy_model": unit})
            said.append(answers(made, first))
    for one, other in zip(*said, strict=True):
        for name, tensor in one.tensors.items():
            assert tensor.numel() > 0
            same = (tensor == other.tensors[name]).double().mean()
            assert float(same) < 0.01, name


@pytest.mark.parametrize(
    ("rule", "secure"), [*product(("tan", "fedavg", "alt"), (True, False)), ("joint", True)]
)
def test_an_empty_batch_says_as_much_as_a_full_one(
    rule: str, secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    for choose in (nobody, everyone):
        drawing(monkeypatch, choose)
        chosen = settings_of(rule, NAMES, federation={"rounds": 1, "secure_aggregation": secure})
        made = Federation(tmp_path / choose.__name__, chosen, owners(2)).run()
        (first, second) = made.exchange.replies("train")
        shapes.append([{n: (t.shape, t.dtype) for n, t in r.tensors.items()} for r in (first, second)])
        assert all(bool((t != 0).any()) for t in first.tensors.values())
        assert made.ledger_of("owner-0").charges == chosen.federation.local_steps
    assert shapes[0] == shapes[1]


def test_neighbours_messages_differ_by_the_record_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of one noise: their difference is the record's clipped gradient, rounded to the lattice."""
    drawing(monkeypatch, everyone)
    full, vectors = records(0), []
    for name, own in (("a", full), ("b", full[:-1])):
        made, reply = trained(tmp_path / name, "joint", {**owners(2), "owner-0": own})
        vectors.append(reply.tensors["sum"].numpy())
    lattice = made.server._mechanism.lattice  # type: ignore[attr-defined]
    moved = lattice.opened(vectors[0] - vectors[1])
    reach = C + lattice.width * np.sqrt(lattice.entries)
    assert 0.9 * C < float(np.linalg.norm(moved)) <= reach
    assert lattice.entries == len(moved)


@pytest.mark.parametrize("rule", ["tan", "joint"])
def test_a_void_round_leaves_the_servers_state_as_it_was(rule: str, tmp_path: Path) -> None:
    """What came of a round that is not counted, and whose answerers are not named, may not be in the model."""
    made = Federation(tmp_path, settings_of(rule, list(owners(3)), federation={"rounds": 1}), owners(3))
    before, close = made.server.states(), made.server.close

    def failing(stage: str, number: int, present: int) -> None:
        close(stage, number, present)
        assert not alike(made.server.states(), before)
        raise RunError("the state cannot move", fix="go on with the next round")

    made.server.close = failing  # type: ignore[method-assign]
    made.run()
    assert [one.void for one in made.done()] == ["the state cannot move"]
    assert alike(made.server.states(), before)


def alike(one: States, other: States) -> bool:
    pairs = ((found, other[group]) for group, found in one.items())
    return all(torch.equal(tensor, those[name]) for these, those in pairs for name, tensor in these.items())


@pytest.mark.parametrize("rule", ["fedavg", "tan", "flexlora", "fedask", "flora", "scaffold"])
def test_answers_of_a_round_that_is_void_are_forgotten(rule: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, settings_of(rule, NAMES), owners(len(NAMES)))
    server, generator = federation.server, torch.Generator().manual_seed(1)
    expected, before = server.expected("train", 1), server.states()
    first, second = (
        {name: torch.randn(shape, generator=generator) for name, shape in expected.items()} for _ in range(2)
    )
    found = []
    for stale in (False, True):
        if stale:
            server.add("train", first, 1.0)
        server.take_states(before)
        server.add("train", second, 1.0)
        server.close("train", 1, 1)
        found.append(server.tensors(server.stages[-1]))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor)
