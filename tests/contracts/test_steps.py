"""Charges, releases and steps: every release is charged first, an empty batch is a full step, T + 1 is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from method_cases import (
    ONE_A_SPACE,
    Case,
    CountingLedger,
    by_any_variant,
    by_space,
    by_variant,
    flat,
    make_case,
    poisoned_model,
)
from tiny_models import uneven_examples
from torch import Tensor

import privlora
from privlora.accounting import Ledger, Plan, read_ledger
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured
from privlora.data.sampling import PoissonSampler
from privlora.errors import PrivacyError, PrivloraError
from privlora.mechanisms import Mechanism, Release


def plan(steps: int, case: Case) -> Plan:
    return Plan(
        phases=((StepEvent(PoissonSampling(0.01), 1.0, case.coordinates.event_layers), steps),),
        delta=1e-5,
        target_epsilon=None,
        adjacency="add-or-remove-one",
        unit="record",
        records_per_user=None,
        clip_norm=1.0,
        expected_batch_size=4.0,
        method="test",
        dataset="test",
    )


def some_gradients(case: Case, units: int = 3) -> Captured:
    sites = [(site.m, site.n) for site in case.adapter.sites]
    return case.gradients(
        [torch.randn(units, m, 3) for m, _ in sites], [torch.randn(units, n, 3) for _, n in sites]
    )


@by_variant
def test_an_empty_batch_is_a_full_step(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    ledger = CountingLedger()
    mechanism = case.mechanism(ledger=ledger)
    sampler = PoissonSampler(10, sample_rate=1e-9)
    # Of one noisy number a step may be short by chance.
    least = 0.0 if case.row.coordinates.forward_only else 1e-3
    for step in range(1, 21):
        before = case.weights()
        drawn = sampler.draw()
        assert len(drawn) == 0
        release = case.step(mechanism, uneven_examples(), 0.05) if len(drawn) else mechanism.release()
        case.optimizer.step(release, 0.05)
        case.coordinates.advance()
        assert release.step == step
        assert float(flat(release.vector).norm()) > 0
        assert float((case.weights() - before).norm()) > least
    assert len(ledger.events) == 20


@by_space
def test_step_t_plus_1_is_refused_and_releases_nothing(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)
    with Ledger.create(tmp_path / "ledger.jsonl", plan(3, case)) as ledger:
        mechanism = case.mechanism(ledger=ledger)
        for _ in range(3):
            case.step(mechanism, uneven_examples())
        case.feed(mechanism, uneven_examples())
        drawn = _count_draws(mechanism)
        with pytest.raises(PrivacyError, match="all 3 steps"):
            mechanism.release()
        assert drawn == [0]
    assert read_ledger(tmp_path / "ledger.jsonl").charges == 3


def test_the_non_private_mechanism_refuses_step_t_plus_1_too(tmp_path: Path) -> None:
    mechanism = make_case(("adamw", "adamw"), tmp_path).mechanism(steps=1)
    mechanism.release()
    with pytest.raises(PrivloraError, match="step 2 of a plan for 1"):
        mechanism.release()


@by_space
def test_the_charge_comes_before_the_noise(variant: tuple[str, str], tmp_path: Path) -> None:
    case = make_case(variant, tmp_path)

    class Refusing(CountingLedger):
        def charge(self, event: StepEvent) -> int:
            raise OSError("disk full")

    mechanism = case.mechanism(ledger=Refusing())
    drawn = _count_draws(mechanism)
    with pytest.raises(OSError, match="disk full"):
        mechanism.release()
    assert drawn == [0]


def _count_draws(mechanism: Any) -> list[int]:
    drawn = [0]
    draw = mechanism.noising.noise.standard_normal

    def counted(shape: tuple[int, ...]) -> Tensor:
        drawn[0] += 1
        return draw(shape)

    mechanism.noising.noise.standard_normal = counted
    return drawn


@by_space
def test_a_batch_whose_release_failed_is_forgotten(variant: tuple[str, str], tmp_path: Path) -> None:
    # Else its units could be in the next sum as well, and contribute 2 C.
    case = make_case(variant, tmp_path)
    failing = [True]

    class FailsOnce(CountingLedger):
        def charge(self, event: StepEvent) -> int:
            if failing.pop() if failing else False:
                raise OSError("disk full")
            return super().charge(event)

    mechanism = case.mechanism(ledger=FailsOnce(), sigma=0.0)
    gradients = some_gradients(case)
    mechanism.accumulate(gradients)
    with pytest.raises(OSError, match="disk full"):
        mechanism.release()
    mechanism.accumulate(gradients)
    fresh = case.mechanism(sigma=0.0)
    fresh.accumulate(gradients)
    torch.testing.assert_close(flat(mechanism.release().vector), flat(fresh.release().vector), rtol=0, atol=0)


class Injected(BaseException):
    pass


def injecting(at: int) -> tuple[Callable[..., Any], list[bool]]:
    """A trace function that raises before the ``at``-th line executed inside the package, and whether each line was
    one of the mechanism or of the ledger."""
    root, lines = str(Path(privlora.__file__).parent), list[bool]()
    near = tuple(f"{root}/{room}/" for room in ("mechanisms", "accounting"))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(root):
            return None
        if event == "line":
            lines.append(frame.f_code.co_filename.startswith(near))
            if len(lines) == at:
                raise Injected
        return trace

    return trace, lines


def places(lines: list[bool], count: int) -> list[int]:
    """``count`` of the lines, evenly: three quarters of them where charges and releases are made."""
    near, far = ([at for at, one in enumerate(lines, start=1) if one == of] for of in (True, False))
    return sorted(
        {own[k * len(own) // n] for own, n in ((near, 3 * count // 4), (far, count // 4)) for k in range(n)}
    )


def train(
    case: Case, ledger: Ledger, releases: list[Tensor], trace: Callable[..., Any] | None = None
) -> None:
    """The rest of the plan, with gradients from nowhere; ``releases`` is a side log of what got out."""
    mechanism: Mechanism = case.mechanism(ledger=ledger)
    while ledger.remaining:
        batches = [some_gradients(case), some_gradients(case)]
        sys.settrace(trace)
        try:
            for captured in batches:
                mechanism.accumulate(captured)
            release = mechanism.release()
            releases.append(flat(release.vector))
            case.optimizer.step(release, 0.05)
            case.coordinates.advance()
        finally:
            sys.settrace(None)


@by_variant
def test_charges_cover_releases_wherever_an_exception_strikes(
    variant: tuple[str, str], tmp_path: Path
) -> None:
    steps = 2
    case = make_case(variant, tmp_path, targets="q_proj|.*layers.0.*proj")
    trace, lines = injecting(at=-1)
    with Ledger.create(tmp_path / "dry.jsonl", plan(steps, case)) as ledger:
        train(case, ledger, [], trace)
    assert len(lines) > 300
    lost = 0
    for at in places(lines, 32 if variant in ONE_A_SPACE else 16):
        path, releases = tmp_path / f"{at}.jsonl", []
        trace, _ = injecting(at)
        with Ledger.create(path, plan(steps, case)) as ledger, pytest.raises(Injected):
            train(case, ledger, releases, trace)
        with Ledger.open(path) as ledger:
            assert len(releases) <= ledger.charges <= len(releases) + 1
            lost += ledger.charges - len(releases)
            train(case, ledger, releases)
        assert read_ledger(path).charges == steps
        assert steps - 1 <= len(releases) <= steps
        assert all(not torch.equal(a, b) for i, a in enumerate(releases) for b in releases[:i])
    assert lost > 0  # some exceptions did strike between the charge and the release


@by_any_variant
@pytest.mark.parametrize("impostor", ["vector", "tuple", "lookalike"])
def test_an_optimizer_takes_nothing_but_a_release(
    variant: tuple[str, str], impostor: str, tmp_path: Path
) -> None:
    case = make_case(variant, tmp_path)
    release = case.mechanism().release()

    class Lookalike:
        vector, noise_std, step = release.vector, release.noise_std, release.step

    fake: Any = {
        "vector": release.vector,
        "tuple": (release.vector, release.noise_std, release.step),
        "lookalike": Lookalike(),
    }[impostor]
    before = case.weights()
    with pytest.raises(PrivacyError, match="not a Release"):
        case.optimizer.step(fake, 0.1)
    assert torch.equal(case.weights(), before)
    assert isinstance(release, Release)


@by_space
def test_a_trainable_parameter_beside_the_adapter_is_refused_by_name(
    variant: tuple[str, str], tmp_path: Path
) -> None:
    case = make_case(variant, tmp_path)
    case.feed(case.mechanism(), uneven_examples())
    case.adapter.model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    with pytest.raises(PrivacyError, match=r"model\.layers\.0\.input_layernorm\.weight.*not privatised"):
        case.feed(case.mechanism(), uneven_examples())


@by_space
def test_a_module_that_gets_no_gradient_is_refused_by_name(variant: tuple[str, str], tmp_path: Path) -> None:
    model = poisoned_model()
    model.model.forgotten = torch.nn.Linear(8, 8)

    def taken() -> None:
        case = make_case(variant, tmp_path, model=model)  # public texts are the first to find out
        case.feed(case.mechanism(), uneven_examples())

    with pytest.raises(PrivacyError, match=r"model\.forgotten.*no gradient"):
        taken()


@by_variant
def test_a_step_inside_an_autocast_moves_as_outside(variant: tuple[str, str], tmp_path: Path) -> None:
    """To the bit, in a loop of one's own: its gradients and what follows from its release."""
    found = []
    for where in (nullcontext, partial(torch.autocast, "cpu", dtype=torch.bfloat16)):
        torch.manual_seed(0)
        case = make_case(variant, tmp_path)
        mechanism = case.mechanism(seed=3)
        with where(), torch.no_grad():
            releases = [flat(case.step(mechanism, uneven_examples(3)[:3]).vector) for _ in range(2)]
        found.append(torch.cat([*releases, case.weights().flatten()]))
    assert torch.equal(*found)
