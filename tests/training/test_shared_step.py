"""One process' part of a shared step, without starting others: what it shows them, adds, prepares and releases."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_cases import coordinates_of, mechanism_of
from tiny_models import tiny_model

from privlora.data.batching import micro_batches
from privlora.data.examples import Example, Examples
from privlora.errors import PrivacyError
from privlora.training.gradients import micro_batch_gradients
from privlora.training.identity import refuse_unlike_processes
from privlora.training.ranks import Ranks, RankStopped, deal
from privlora.training.shared_step import SharedStep


class Watched(Ranks):
    """One of two processes: notes what it is asked for, in order, and what it gives."""

    size = 2

    def __init__(self, rank: int = 0, lost_at: str = "") -> None:
        self.rank, self._lost_at = rank, lost_at
        self.asked: list[str] = []
        self.added: list[torch.Tensor] = []
        self.told: dict[str, object] = {}

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what == self._lost_at:
            raise RankStopped("gone")

    def dealt(self, shares: Callable[[], Any]) -> Any:
        self._note("dealt")
        return []

    def gathered(self, value: Any) -> list[Any]:
        self._note("gathered")
        return [value]

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note("add")
        self.added.append(tensor.clone())
        return tensor

    def copied(self, tensors: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self._note("copied")
        return {f"coordinates/{name}": torch.ones(1) for name in ("a", "b")}

    def refuse_unlike(self, what: str, value: object, *, why: str, fix: str) -> None:
        self._note("refuse_unlike")
        self.told[what] = value


def test_the_heaviest_unit_goes_to_whoever_has_least() -> None:
    assert deal([5, 4, 3, 3], 2) == [[0, 3], [1, 2]]
    assert deal([1, 9, 2, 2], 2) == [[1], [2, 3, 0]]
    assert deal([7, 7, 7], 5) == [[0], [1], [2], [], []]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_process_without_units_takes_part_and_adds_nothing(adaptive: bool) -> None:
    """What it does not take part in, the others wait for; what it adds would be clipped by nobody."""
    coordinates = coordinates_of()
    idle, busy = Watched(rank=1), Watched(rank=1)
    mechanism_of(coordinates, adaptive=adaptive).take_all(idle)
    mechanism = mechanism_of(coordinates, adaptive=adaptive)
    tokens = np.arange(1, 6, dtype=np.int32)
    examples = Examples([Example(tokens, tokens)], pad_token_id=0)
    with coordinates.adapter:
        for batch in micro_batches([np.array([0])], examples, max_tokens=64):
            captured, _ = micro_batch_gradients(coordinates.adapter, batch, summed=False)
            mechanism.accumulate(captured)
    mechanism.take_all(busy)
    assert idle.asked == busy.asked
    assert [t.shape for t in idle.added] == [t.shape for t in busy.added]
    assert not any(t.any() for t in idle.added)
    assert any(t.any() for t in busy.added)


def shared_step(ranks: Watched, coordinates: Any) -> tuple[SharedStep, list[str]]:
    """With parts that note what is done in the order of ``ranks``."""
    order = ranks.asked
    step = SimpleNamespace(
        draw=list,
        state=SimpleNamespace(
            coordinates=coordinates, adaptive=None, adapter=SimpleNamespace(model=tiny_model())
        ),
        examples=SimpleNamespace(lengths=None),
        accumulate=lambda own: order.append("gradients") or torch.zeros(0),
        mechanism=SimpleNamespace(take_all=lambda processes: processes.add(torch.zeros(1))),
        release=lambda total: order.append("release"),
    )
    return SharedStep(step, ranks), order  # type: ignore[arg-type]


def test_what_is_released_was_added_and_everything_was_gathered_before() -> None:
    """Whoever loses another process on the way knows that nothing was released of this batch."""
    step, order = shared_step(Watched(), None)
    step.take()
    assert order == ["dealt", "gradients", "gathered", "add", "release"]
    for lost in ("dealt", "gathered", "add"):
        step, order = shared_step(Watched(lost_at=lost), None)
        with pytest.raises(RankStopped):
            step.take()
        assert "release" not in order


def test_another_process_never_releases() -> None:
    step, order = shared_step(Watched(rank=1), None)
    step.take()
    assert order == ["dealt", "gradients", "gathered", "add"]


def test_public_work_is_the_first_process_and_the_others_take_its_state_over() -> None:
    """Else each would ask for public texts of its own, and all but one go on with others."""
    for rank, expected in ((0, ["prepare"]), (1, ["take a, b"])):
        done = list[str]()
        coordinates = SimpleNamespace(
            prepare=lambda done=done: done.append("prepare"),
            shared=dict,
            take_shared=lambda given, done=done: done.append(f"take {', '.join(given)}"),
        )
        shared_step(Watched(rank=rank), coordinates)[0]._prepare()
        assert done == expected


@pytest.mark.parametrize("name", ["projected", "wishart-m2"])
def test_processes_project_alike_whatever_keys_they_began_with(name: str) -> None:
    """Or their sums are refused: along other projections no noise of the first covers them."""
    first: Any
    other: Any
    first, other = (coordinates_of(name) for _ in range(2))
    other._key = first._key + 1
    other._draw_projections()
    assert first.place() != other.place()
    other.take_shared(first.shared())
    assert other.place() == first.place()
    for ours, theirs in zip(first.projections, other.projections, strict=True):
        assert torch.equal(ours, theirs)


def told_of(model: torch.nn.Module) -> dict[str, object]:
    ranks = Watched()
    refuse_unlike_processes(model, ranks)
    return ranks.told


def differing(one: dict[str, object], other: dict[str, object]) -> set[str]:
    assert one.keys() == other.keys()
    return {what for what in one if one[what] != other[what]}


def test_kinds_of_devices_and_threads_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 3)
    before = told_of(model)
    assert all(value is not None for value in before.values())
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
        assert differing(before, told_of(model)) == {"the device"}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert differing(before, told_of(model)) == {"the number of threads"}
    elsewhere = torch.nn.Linear(2, 3, device="meta")
    monkeypatch.setattr("privlora.training.identity._all_of_model", lambda model: "the same")
    assert differing(told_of(model), told_of(elsewhere)) == {"the device"}


def test_dtypes_are_compared_beyond_their_bits() -> None:
    model = torch.nn.Linear(2, 3, dtype=torch.bfloat16)
    before = told_of(model)
    other = torch.nn.Linear(2, 3, dtype=torch.float16)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.data = ours.data.view(torch.float16)
    assert differing(before, told_of(other)) == {"the base model"}


def test_a_sum_along_another_projection_is_refused() -> None:
    coordinates: Any = coordinates_of("wishart-m2")
    mechanism = mechanism_of(coordinates)
    place = mechanism.place
    coordinates._key += 1
    coordinates._draw_projections()
    with pytest.raises(PrivacyError, match="projection"):
        mechanism.take().refuse_elsewhere(place)
