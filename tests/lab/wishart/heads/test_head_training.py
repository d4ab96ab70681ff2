"""Heads trained together are the heads that a plain loop trains, and each is as private as its event says."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from head_cases import CLASSES, COLUMNS, NOISY, RECORDS, everyone, problem, release, seeds
from torch import Tensor
from torch.nn.functional import cross_entropy

from privlora.accounting.accountants import epsilon
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.errors import ConfigError, DataError, PrivacyError, PrivloraError
from privlora.lab.wishart.head_mechanisms import MECHANISMS, Batch, gaussian_factors
from privlora.lab.wishart.head_settings import HEAD_METHODS, HeadSettings
from privlora.lab.wishart.heads import HeadData, TrainedHeads, train_heads
from privlora.mechanisms.noising import grid_width


def trained(settings: HeadSettings, members: Tensor, *, sample_rate: float = 1.0) -> TrainedHeads:
    return train_heads(
        problem(), settings, members=members, sample_rate=sample_rate, seeds=seeds(len(members))
    )


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("method", ["dp-sgd", "lora-fa"])
def test_noise_free_heads_are_those_of_torch(method: str, schedule: str) -> None:
    rank = 4 if method == "lora-fa" else None
    settings = HeadSettings(method, 6, 0.8, rank=rank, momentum=0.9, schedule=schedule)
    members = torch.rand(3, RECORDS, generator=torch.Generator().manual_seed(1)) < 0.7
    heads = trained(settings, members)
    features, labels = problem().features, problem().labels
    for n, own in enumerate(members):
        a = (
            gaussian_factors(rank, COLUMNS, torch.float64, [np.random.default_rng([0, n])])[0]
            if rank
            else torch.eye(COLUMNS, dtype=torch.float64)
        )
        b = torch.zeros(CLASSES, len(a), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([b], lr=0.8, momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        for _ in range(6):
            optimizer.zero_grad()
            loss = cross_entropy(features[own] @ (b @ a).T, labels[own], reduction="sum")
            (loss / RECORDS).backward()
            optimizer.step()
            if schedule == "cosine":
                cosine.step()
        torch.testing.assert_close(heads.weights[n], (b @ a).detach())


# m1 projects a sum without noise, which has lower rank (residuals add up to zero): there rounding chooses the frame, so
# the law is the same and the numbers are not.
REPEATABLE = [name for name in NOISY if name != "m1"]


@pytest.mark.parametrize("name", REPEATABLE)
def test_a_head_does_not_depend_on_its_company(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members = torch.rand(5, RECORDS, generator=torch.Generator().manual_seed(2)) < 0.8
    together = trained(NOISY[name], members, sample_rate=0.2)
    monkeypatch.setattr("privlora.lab.wishart.heads._MEMORY", 1)
    in_turns = trained(NOISY[name], members, sample_rate=0.2)
    torch.testing.assert_close(together.weights, in_turns.weights)


@pytest.mark.parametrize("name", REPEATABLE)
def test_gathered_batches_are_the_weighted_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = trained(NOISY[name], everyone(3), sample_rate=0.2)
    monkeypatch.setattr("privlora.lab.wishart.heads._GATHER_BELOW", 0.1)
    weighted = trained(NOISY[name], everyone(3), sample_rate=0.2)
    torch.testing.assert_close(gathered.weights, weighted.weights)


def batch_of(features: Tensor, labels: Tensor, present: Tensor) -> Batch:
    return Batch(features, labels, present.to(features.dtype)[None])


@pytest.mark.parametrize("name", ["dp-sgd", "lora-fa", "m2", "m1", "project-then-clip"])
def test_one_record_moves_what_is_noised_by_the_bound_at_most(name: str) -> None:
    """The sum before noise, and for m2 and m1 before the projection, in the coordinates that are noised."""
    features, labels = problem().features, problem().labels
    features = torch.cat([1e4 * features, 1e-3 * features])
    labels = torch.cat([labels, labels])
    settings = replace(NOISY[name], method="dp-sgd", rank=None) if name in ("m1", "m2") else NOISY[name]
    heads = torch.randn(1, CLASSES, COLUMNS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    everybody = torch.ones(len(labels), dtype=torch.bool)

    def total(present: Tensor) -> Tensor:
        found = release(replace(settings, noise_multiplier=0.0), 1)
        batch = batch_of(features, labels, present)
        summed = found.noisy_sum(batch, batch.residuals(heads))
        # back to the coordinates of an orthonormal basis
        return summed * (4 / COLUMNS) if name == "project-then-clip" else summed

    bound = 0.8 * (4 / COLUMNS) ** 0.5 if name == "project-then-clip" else 0.8
    moved = []
    for record in range(len(labels)):
        without = everybody.clone()
        without[record] = False
        moved.append(float((total(everybody) - total(without)).norm()))
    assert max(moved) <= bound
    assert max(moved) > 0.999 * bound  # large gradients are clipped to the bound, not below
    assert min(moved) < 0.1 * bound  # small ones are left alone


@pytest.mark.parametrize("name", ["dp-sgd", "lora-fa", "m1"])
def test_what_is_released_lies_on_the_grid_of_its_noise(name: str) -> None:
    """Of the methods that add noise last; the others project what lay on it."""
    features, labels = problem().features, problem().labels
    found = release(NOISY[name], 2)
    batch = Batch(features, labels, torch.ones(2, RECORDS, dtype=torch.float64))
    made = found.noisy_sum(batch, batch.residuals(torch.zeros(2, CLASSES, COLUMNS, dtype=torch.float64)))
    steps = made / grid_width(0.7 * 0.8)
    assert torch.equal(steps, steps.round())


@pytest.mark.parametrize("name", ["dp-sgd", "lora-fa", "project-then-clip", "m2", "m1", "m2 wishart"])
def test_an_empty_batch_is_released_with_full_noise(name: str) -> None:
    count, settings = 600, NOISY[name]
    features, labels = problem().features, problem().labels
    nobody = Batch(features, labels, torch.zeros(count, RECORDS, dtype=torch.float64))
    heads = torch.zeros(count, CLASSES, COLUMNS, dtype=torch.float64)
    found = release(settings, count)
    drawn = found.noisy_sum(nobody, nobody.residuals(heads))
    scale = 0.7 * 0.8
    # mean square of an entry over its entries: of noise, of projected noise, of noise in the subspace
    expected = {
        "dp-sgd": 1.0,
        "lora-fa": 1.0,
        "m1": 1.0,
        "m2": COLUMNS / 4,
        "m2 wishart": 1 + (COLUMNS + 1) / 4,
        "project-then-clip": COLUMNS / 4 * 4 / COLUMNS,
    }[name]
    per_head = drawn.square().flatten(1).mean(1)
    error = float(per_head.std()) / count**0.5
    assert float(per_head.mean()) == pytest.approx(expected * scale**2, abs=5 * error)
    assert torch.linalg.matrix_rank(drawn[0]) == CLASSES


def test_algorithm_4_has_the_law_of_m2_without_a_clip() -> None:
    """(G + E) A^T A by dense matrices: the mean exactly, the covariance of a row over many heads of one A."""
    count, settings = 4000, NOISY["m2-unclipped"]
    batch = Batch(problem().features, problem().labels, torch.ones(count, RECORDS, dtype=torch.float64))
    residuals = batch.residuals(torch.zeros(count, CLASSES, COLUMNS, dtype=torch.float64))
    a = np.random.default_rng(7).standard_normal((4, COLUMNS)) / 2
    mean = (batch.gradient(residuals)[0].numpy() @ a.T) @ a

    def drawn(noise: float) -> np.ndarray:
        found = release(replace(settings, noise_multiplier=noise), count)
        found.hidden = [np.random.default_rng(7) for _ in range(count)]
        return found.noisy_sum(batch, residuals).numpy() - mean

    assert abs(drawn(0.0)).max() < 1e-10
    rows = drawn(0.7).reshape(-1, COLUMNS)
    expected = (0.7 * 9.0) ** 2 * np.linalg.matrix_power(a.T @ a, 2)
    error = 6 * abs(expected).max() / len(rows) ** 0.5
    np.testing.assert_allclose(rows.T @ rows / len(rows), expected, atol=error)
    assert settings.step_event(0.5, COLUMNS) == replace(settings, method="m2").step_event(0.5, COLUMNS)


def test_algorithm_4_is_private_for_short_features_only() -> None:
    data = problem()
    longest = float(data.features.norm(dim=1).max())
    residuals = torch.softmax(torch.tensor([[40.0, 0.0, 0.0]]), 1) - torch.tensor([[0.0, 1.0, 0.0]])
    assert float(residuals.norm()) == pytest.approx(2**0.5)  # the longest there is
    enough, short = (replace(NOISY["m2-unclipped"], clip_norm=x * 2**0.5 * longest) for x in (1.0001, 0.9999))
    trained(enough, everyone(1))
    with pytest.raises(PrivacyError, match="NOT PRIVATE"):
        trained(short, everyone(1))
    trained(replace(short, noise_multiplier=0.0, clip_norm=None), everyone(1))  # states no epsilon


@pytest.mark.parametrize(("name", "dimensions"), [("project-then-clip", 4), ("project-then-clip fresh", 9)])
def test_project_then_clip_stays_in_its_subspace_or_draws_another(name: str, dimensions: int) -> None:
    runs = [
        train_heads(problem(), NOISY[name], members=everyone(1), sample_rate=1.0, seeds=[seed]).weights[0]
        for seed in (1, 2, 3)  # the subspaces are public
    ]
    assert torch.linalg.matrix_rank(torch.cat(runs), rtol=1e-9) == dimensions


def test_each_head_has_its_own_noise_batches_and_factors() -> None:
    for name in ("dp-sgd", "lora-fa"):
        weights = trained(NOISY[name], everyone(2)).weights
        assert not torch.allclose(weights[0], weights[1])
    private, again = (
        train_heads(problem(), NOISY["m2"], members=everyone(2), sample_rate=0.25) for _ in range(2)
    )
    assert not private.insecure
    assert not torch.allclose(private.weights, again.weights)
    assert trained(NOISY["m2"], everyone(2)).insecure


def test_batches_are_each_heads_own_and_cannot_be_foreseen() -> None:
    silent = replace(NOISY["dp-sgd"], noise_multiplier=0.0)  # so that equal batches would give equal heads
    runs = [train_heads(problem(), silent, members=everyone(2), sample_rate=0.5) for _ in range(2)]
    heads = torch.cat([run.weights for run in runs]).flatten(1)
    assert float(torch.pdist(heads).min()) > 1e-6


def test_projections_cannot_be_foreseen() -> None:
    silent = replace(NOISY["m2"], noise_multiplier=0.0)  # so that equal projections would give equal heads
    runs = [train_heads(problem(), silent, members=everyone(2), sample_rate=1.0) for _ in range(2)]
    heads = torch.cat([run.weights for run in runs]).flatten(1)
    assert float(torch.pdist(heads).min()) > 1e-6


@pytest.mark.parametrize("name", ["m2", "m2 wishart", "m1"])
def test_secret_projections_are_not_drawn_as_public_ones_are(name: str) -> None:
    found = release(NOISY[name], 2)
    batch = Batch(problem().features, problem().labels, torch.ones(2, RECORDS, dtype=torch.float64))
    public, hidden = deepcopy((found.public, found.hidden))
    found.noisy_sum(batch, batch.residuals(torch.zeros(2, CLASSES, COLUMNS, dtype=torch.float64)))
    assert [each.random() for each in found.public] == [each.random() for each in public]
    assert all(a.random() != b.random() for a, b in zip(found.hidden, hidden, strict=True))


class Counts:
    def __init__(self, limit: int) -> None:
        self.limit, self.events = limit, list[StepEvent]()

    def charge(self, event: StepEvent) -> int:
        if len(self.events) == self.limit:
            raise PrivacyError("spent")
        self.events.append(event)
        return len(self.events)


def test_ledgers_are_charged_for_every_head_and_step() -> None:
    ledgers = [Counts(4), Counts(4)]
    options = {"members": everyone(2), "sample_rate": 0.5}
    heads = train_heads(problem(), NOISY["m2"], ledgers=ledgers, **options)
    event = StepEvent(PoissonSampling(0.5), 0.7, projections=((4, COLUMNS),))
    assert heads.event == event
    assert [ledger.events for ledger in ledgers] == [[event] * 4] * 2
    with pytest.raises(PrivacyError, match="spent"):
        train_heads(problem(), NOISY["m2"], ledgers=[Counts(4), Counts(3)], **options)
    with pytest.raises(PrivacyError, match="seeds cannot be charged"):
        train_heads(problem(), NOISY["m2"], ledgers=ledgers, seeds=[1, 2], **options)
    with pytest.raises(PrivacyError, match="m1 states no epsilon"):
        train_heads(problem(), NOISY["m1"], ledgers=[Counts(4), Counts(4)], **options)


def test_heads_of_a_later_turn_charge_their_own_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privlora.lab.wishart.heads._MEMORY", 1)
    ledgers = [Counts(12) for _ in range(3)]
    train_heads(problem(), NOISY["dp-sgd"], members=everyone(3), sample_rate=0.5, ledgers=ledgers)
    assert [len(ledger.events) for ledger in ledgers] == [4, 4, 4]


@pytest.mark.parametrize("name", list(NOISY))
def test_no_noise_is_drawn_before_every_ledger_is_charged(name: str) -> None:
    batch = Batch(problem().features, problem().labels, torch.ones(2, RECORDS, dtype=torch.float64))
    residuals = batch.residuals(torch.zeros(2, CLASSES, COLUMNS, dtype=torch.float64))
    found = release(NOISY[name], 2)
    for pen, left in zip(found.pens, (1, 0), strict=True):
        pen.ledger = Counts(left)
        pen.noise.standard_normal = lambda _: pytest.fail("drawn before the charge")
    with pytest.raises(PrivacyError, match="spent"):
        found.noisy_sum(batch, residuals)


def test_what_a_head_costs() -> None:
    for name, settings in NOISY.items():
        heads = trained(settings, everyone(1), sample_rate=0.5)
        if name == "m1":
            with pytest.raises(PrivacyError, match="states no epsilon"):
                heads.epsilon(1e-3)
            continue
        projected = name.startswith("m2")
        assert heads.event.projections == (((4, COLUMNS),) if projected else ())
    assert NOISY["m2"].step_event(0.5, 4).projections == ()  # full rank is no projection
    with pytest.raises(PrivacyError, match="no epsilon"):
        HeadSettings("lora-fa", 2, 1.0, rank=2).step_event(0.5, COLUMNS)
    plain = trained(replace(NOISY["dp-sgd"], noise_multiplier=8.0), everyone(1))
    assert plain.epsilon(1e-3) == epsilon([(StepEvent(PoissonSampling(1.0), 8.0), 4)], 1e-3)


def test_rows_that_are_not_finite_count_as_nothing() -> None:
    good = problem()
    runs = []
    for value in (0.0, torch.nan):
        features = good.features.clone()
        features[3] = 0.0
        features[3, 2] = value
        data = replace(good, features=features)
        runs.append(
            train_heads(data, NOISY["dp-sgd"], members=everyone(1), sample_rate=1.0, seeds=[1]).weights
        )
    torch.testing.assert_close(runs[1], runs[0])


def test_a_record_whose_norm_bounds_nothing_counts_as_nothing() -> None:
    found = release(NOISY["dp-sgd"], 1)
    residuals = torch.ones(1, CLASSES, 4, dtype=torch.float64)
    lengths = torch.tensor([10.0, torch.inf, torch.nan, 0.0], dtype=torch.float64)
    norms = found._clipped(residuals, lengths)[0].norm(dim=0) * 10
    assert norms.tolist() == pytest.approx([0.8, 0, 0, 0], rel=2e-5)


def test_squares_that_vanish_in_single_precision_are_no_norm_of_zero() -> None:
    settings = replace(NOISY["dp-sgd"], clip_norm=1e-4)
    event = StepEvent(PoissonSampling(1.0), settings.noise_multiplier)
    found = MECHANISMS["dp-sgd"](settings, 2, torch.float32, [], event, [], [])
    batch = Batch(torch.tensor([[1e18, 0.0]]), torch.zeros(1, dtype=torch.int64), torch.ones(1, 1))
    residuals = torch.full((1, CLASSES, 1), 1e-23)
    assert float(found._clipped_sum(batch, residuals).norm()) == pytest.approx(1e-5 * 3**0.5, rel=1e-3)
    assert float(found._clipped_sum(batch, 100 * residuals).norm()) == pytest.approx(1e-4, rel=2e-5)


@pytest.mark.parametrize("together", [True, False])
def test_records_are_summed_in_double_precision(together: bool) -> None:
    """Where all heads see the same rows, and where each has its own."""
    large, small = 1.0, 2.0**-30  # float32 holds either, and not their sum
    features = torch.tensor([[large], [small]])
    features = features if together else features[None]
    batch = Batch(features, torch.zeros(2, dtype=torch.int64), torch.ones(1, 2))
    assert float(batch.gradient(torch.ones(1, 1, 2))) == large + small


def test_scores_of_heads() -> None:
    features, labels = problem().features, problem().labels
    heads = trained(replace(NOISY["dp-sgd"], steps=20), everyone(2))
    for n, weights in enumerate(heads.weights):
        losses = cross_entropy(features @ weights.T, labels, reduction="none")
        torch.testing.assert_close(heads.losses(features, labels)[n], losses)
        right = ((features @ weights.T).argmax(1) == labels).double().mean()
        torch.testing.assert_close(heads.accuracy(features, labels)[n], right)


def test_single_precision_learns_the_same() -> None:
    data = problem()
    settings = HeadSettings("m2", 10, 0.5, noise_multiplier=0.05, clip_norm=1.0, rank=6)
    double, single = (
        train_heads(each, settings, members=everyone(2), sample_rate=1.0, seeds=[1, 2]).weights
        for each in (data, replace(data, features=data.features.float()))
    )
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "m3"},
        {"steps": 0},
        {"learning_rate": float("nan")},
        {"noise_multiplier": -1.0},
        {"clip_norm": None},
        {"clip_norm": 0.0},
        {"rank": None},
        {"method": "dp-sgd"},
        {"projection": "sparse"},
        {"fresh": True},
        {"momentum": 1.0},
        {"schedule": "linear"},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(PrivloraError):
        replace(NOISY["m2"], **changes)


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (ConfigError, {"features": problem().features.half()}),
        (ConfigError, {"labels": problem().labels[:-1]}),
        (ConfigError, {"dataset_size": 0}),
        (DataError, {"classes": 2}),
    ],
)
def test_data_that_make_no_sense_are_refused(error: type[PrivloraError], changes: dict[str, object]) -> None:
    with pytest.raises(error):
        replace(problem(), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"members": everyone(2)[:, :-1]},
        {"members": everyone(2).float()},
        {"sample_rate": 0.0},
        {"seeds": [1]},
        {"seeds": [1, 1]},
        {"settings": replace(NOISY["m2"], rank=13)},
        {"data": replace(problem(), features=problem().features[:, :5])},
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    good = {"data": problem(), "settings": NOISY["m2"], "members": everyone(2), "sample_rate": 0.25}
    with pytest.raises(ConfigError):
        train_heads(**{**good, **changes})


def test_no_records_at_all_still_release() -> None:
    nobody = HeadData(torch.zeros(0, COLUMNS), torch.zeros(0, dtype=torch.int64), CLASSES, dataset_size=40)
    heads = train_heads(nobody, NOISY["m2"], members=everyone(2, 0), sample_rate=0.1)
    assert (heads.weights.abs() > 0).all()


def test_every_method_is_described_and_tried() -> None:
    assert {settings.method for settings in NOISY.values()} == set(HEAD_METHODS)
