from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from privlora.accounting.events import PoissonSampling, TruncatedPoissonSampling
from privlora.data.sampling import BallsInBinsSampler, CyclicPoissonSampler, PoissonSampler
from privlora.errors import ConfigError, PrivacyError
from privlora.randomness import private_generator

DRAWS = 4000


def presence(sampler: PoissonSampler | CyclicPoissonSampler, units: int, draws: int = DRAWS) -> np.ndarray:
    """(draws, units) of 0 and 1."""
    table = np.zeros((draws, units), dtype=np.int64)
    for row in table:
        row[sampler.draw()] = 1
    return table


def test_every_unit_has_probability_q() -> None:
    units, q = 50, 0.1
    counts = presence(PoissonSampler(units, q, insecure_seed=1), units).sum(axis=0)
    chi_square = ((counts - DRAWS * q) ** 2 / (DRAWS * q * (1 - q))).sum()
    assert 1e-3 < stats.chi2.sf(chi_square, df=units) < 1 - 1e-3


def test_batch_size_is_binomial() -> None:
    units, q = 50, 0.1
    sizes = presence(PoissonSampler(units, q, insecure_seed=2), units).sum(axis=1)
    edges = np.arange(1, 11)
    observed = np.bincount(np.digitize(sizes, edges), minlength=len(edges) + 1)
    cdf = np.concatenate([[0.0], stats.binom.cdf(edges - 1, units, q), [1.0]])
    assert stats.chisquare(observed, DRAWS * np.diff(cdf)).pvalue > 1e-3


def test_units_are_pairwise_independent() -> None:
    units, q = 20, 0.3
    table = presence(PoissonSampler(units, q, insecure_seed=3), units)
    together = (table.T @ table)[np.triu_indices(units, 1)]
    z = (together - DRAWS * q * q) / math.sqrt(DRAWS * q * q * (1 - q * q))
    assert abs(z).max() < 4.5  # 190 pairs; a fixed batch size of 6 would give z near -3 on average
    assert abs(z.mean()) < 0.5


@pytest.mark.parametrize("q", [0.001, 0.02, 0.5, 1.0])
def test_a_draw_has_distinct_indices_in_range(q: float) -> None:
    sampler = PoissonSampler(20_000, q, insecure_seed=4)
    for _ in range(20):
        drawn = sampler.draw()
        assert drawn.dtype == np.int64
        assert drawn.ndim == 1
        assert len(np.unique(drawn)) == len(drawn)
        assert len(drawn) == 0 or (drawn.min() >= 0 and drawn.max() < 20_000)


def test_rate_one_takes_everyone() -> None:
    assert sorted(PoissonSampler(7, 1.0, insecure_seed=0).draw()) == list(range(7))


@pytest.mark.parametrize(("units", "q"), [(100, 1e-9), (0, 0.5)])
def test_empty_batches_are_batches(units: int, q: float) -> None:
    sampler = PoissonSampler(units, q, insecure_seed=5)
    for _ in range(20):
        drawn = sampler.draw()
        assert drawn.shape == (0,)
        assert drawn.dtype == np.int64


def test_truncation_drops_uniformly_at_random() -> None:
    units, bound, q = 20, 5, 0.5
    table = presence(
        PoissonSampler(units, q, max_batch_size=bound, dataset_size=units, insecure_seed=6), units
    )
    sizes = table.sum(axis=1)
    assert sizes.max() == bound
    law = stats.binom(units, q)
    expected_size = sum(min(k, bound) * law.pmf(k) for k in range(units + 1))
    assert sizes.mean() == pytest.approx(expected_size, abs=4 * sizes.std() / math.sqrt(DRAWS))
    rate = expected_size / units
    counts = table.sum(axis=0)
    assert abs(counts - DRAWS * rate).max() < 4.5 * math.sqrt(DRAWS * rate * (1 - rate))


def test_truncation_treats_missing_units_as_empty_places() -> None:
    """The law over a unit's presence must not depend on whether the other places are filled."""
    few = PoissonSampler(1, 0.5, max_batch_size=2, dataset_size=20, insecure_seed=7)
    full = PoissonSampler(20, 0.5, max_batch_size=2, dataset_size=20, insecure_seed=8)
    rate_few = presence(few, 1)[:, 0].mean()
    rate_full = presence(full, 20)[:, 0].mean()
    assert rate_few == pytest.approx(0.1, abs=0.02)
    assert rate_full == pytest.approx(rate_few, abs=0.03)


def test_states_what_it_samples() -> None:
    assert PoissonSampler(10, 0.25).sampling == PoissonSampling(0.25)
    truncated = PoissonSampler(90, 0.25, max_batch_size=44, dataset_size=100)
    assert truncated.sampling == TruncatedPoissonSampling(0.25, 44, 100)


def test_expected_batch_size_is_public() -> None:
    neighbours = [PoissonSampler(n, 0.064, dataset_size=1000) for n in (1000, 999)]
    assert [s.expected_batch_size for s in neighbours] == [64.0, 64.0]
    with pytest.raises(ConfigError, match="dataset_size"):
        _ = PoissonSampler(1000, 0.064).expected_batch_size


def test_secure_draws_do_not_repeat_and_insecure_ones_do() -> None:
    def first(seed: int | None) -> list[int]:
        np.random.seed(0)
        return PoissonSampler(1000, 0.5, insecure_seed=seed).draw().tolist()

    assert first(None) != first(None)
    assert first(9) == first(9)
    assert not PoissonSampler(10, 0.5).insecure
    assert PoissonSampler(10, 0.5, insecure_seed=0).insecure


def test_key_comes_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def randbits(bits: int) -> int:
        asked.append(bits)
        return 7

    monkeypatch.setattr("privlora.randomness.secrets.randbits", randbits)
    private_generator()
    assert asked == [128]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"units": -1, "sample_rate": 0.1}, ConfigError, "units"),
        ({"units": 10, "sample_rate": 0.0}, ConfigError, "sample_rate"),
        ({"units": 10, "sample_rate": 1.1}, ConfigError, "sample_rate"),
        ({"units": 10, "sample_rate": float("nan")}, ConfigError, "sample_rate"),
        ({"units": 10, "sample_rate": 0.1, "dataset_size": 0}, ConfigError, "dataset_size"),
        ({"units": 10, "sample_rate": 0.1, "max_batch_size": 4}, ConfigError, "without dataset_size"),
        (
            {"units": 10, "sample_rate": 0.1, "max_batch_size": 0, "dataset_size": 10},
            ConfigError,
            "max_batch_size",
        ),
        (
            {"units": 11, "sample_rate": 0.1, "max_batch_size": 4, "dataset_size": 10},
            PrivacyError,
            "more privacy units",
        ),
    ],
)
def test_refuses(kwargs: dict[str, float], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PoissonSampler(**kwargs)  # type: ignore[arg-type]


def in_turn(
    units: int, classes: int, q: float, key: int = 3, seed: int | None = 1
) -> tuple[CyclicPoissonSampler, list[int]]:
    """A sampler, and the count of charges that it asks for."""
    charged = [0]
    sampler = CyclicPoissonSampler(units, q, classes, key=key, charged=lambda: charged[0], insecure_seed=seed)
    return sampler, charged


def classes_of(units: int, classes: int, key: int) -> np.ndarray:
    """(units,): in which step of a cycle each is drawn, by a sampler that draws all."""
    sampler, charged = in_turn(units, classes, 1.0, key)
    found = np.full(units, -1)
    for charged[0] in range(classes):
        found[sampler.draw()] = charged[0]
    return found


def test_in_a_cycle_each_unit_has_its_turn_once() -> None:
    sampler, charged = in_turn(60, 4, 1.0)
    for cycle in range(3):
        drawn = []
        for charged[0] in range(4 * cycle, 4 * cycle + 4):
            drawn += sampler.draw().tolist()
        assert sorted(drawn) == list(range(60))


def test_the_class_follows_what_is_charged() -> None:
    """Whatever was drawn before: a step that a crash lost shifts nobody."""
    first, charges = in_turn(60, 4, 1.0)
    again, others = in_turn(60, 4, 1.0, seed=None)
    for charges[0] in (0, 1, 2, 3, 5, 6, 6, 11):
        others[0] = charges[0] + 4
        assert sorted(first.draw()) == sorted(again.draw())


def test_units_of_a_class_join_with_probability_q_and_independently() -> None:
    units, q = 40, 0.3
    sampler, _ = in_turn(units, 2, q)
    own = classes_of(units, 2, 3) == 0
    table = presence(sampler, units)
    assert table[:, ~own].sum() == 0
    counts = table[:, own].sum(axis=0)
    chi_square = ((counts - DRAWS * q) ** 2 / (DRAWS * q * (1 - q))).sum()
    assert 1e-3 < stats.chi2.sf(chi_square, df=int(own.sum())) < 1 - 1e-3
    sizes = table.sum(axis=1)
    assert sizes.var() == pytest.approx(own.sum() * q * (1 - q), rel=0.15)


def test_classes_are_dealt_uniformly_and_each_by_itself() -> None:
    """Not in equal parts: then whoever is added would move others to another class."""
    units, classes = 30, 3
    counts = np.array([np.bincount(classes_of(units, classes, key), minlength=classes) for key in range(600)])
    total = counts.sum(axis=0)
    assert stats.chisquare(total).pvalue > 1e-3
    assert counts[:, 0].var() == pytest.approx(units * (1 / 3) * (2 / 3), rel=0.3)


def test_nobodys_class_depends_on_who_else_is_there() -> None:
    for classes in (2, 3, 7, 8):
        whole = classes_of(500, classes, key=11)
        for fewer in (1, 77, 499):
            assert (classes_of(fewer, classes, key=11) == whole[:fewer]).all()


def test_classes_of_a_key_are_the_same_in_every_process() -> None:
    assert classes_of(12, 4, key=5).tolist() == classes_of(12, 4, key=5).tolist()
    assert classes_of(50, 4, key=5).tolist() != classes_of(50, 4, key=6).tolist()


def test_coins_are_the_operating_systems() -> None:
    draws = []
    for _ in range(2):
        sampler, _ = in_turn(400, 2, 0.5, seed=None)
        draws.append(sampler.draw().tolist())
    assert draws[0] != draws[1]


@pytest.mark.parametrize(("units", "q"), [(-1, 0.5), (3, 0.0), (3, 1.01)])
def test_bad_cyclic_settings_are_refused(units: int, q: float) -> None:
    with pytest.raises(ConfigError):
        in_turn(units, 2, q)


def test_an_empty_class_gives_an_empty_batch() -> None:
    sampler, charged = in_turn(0, 2, 0.5)
    for charged[0] in range(4):
        assert sampler.draw().shape == (0,)


def in_passes(units: int, bins: int, key: int = 5) -> tuple[BallsInBinsSampler, list[int]]:
    charged = [0]
    return BallsInBinsSampler(units, bins, key=key, charged=lambda: charged[0]), charged


def test_in_a_pass_each_unit_is_drawn_once_and_passes_are_dealt_anew() -> None:
    sampler, charged = in_passes(60, 4)
    places = []
    for turn in range(40):
        place = np.full(60, -1)
        for step in range(4):
            charged[0] = 4 * turn + step
            drawn = sampler.draw()
            assert (place[drawn] == -1).all()
            place[drawn] = step
        assert (place >= 0).all()
        places.append(place)
    table = np.stack(places)
    assert stats.chisquare(np.bincount(table.ravel())).pvalue > 1e-3
    same = (table[1:] == table[:-1]).mean()  # as often as chance has it
    assert same == pytest.approx(0.25, abs=0.04)
    sizes = (table == 0).sum(axis=1)
    assert sizes.var() == pytest.approx(60 * 0.25 * 0.75, rel=0.6)  # not equal parts, which would move others


def test_the_step_of_a_pass_follows_what_is_charged_and_nobody_else() -> None:
    whole, charged = in_passes(60, 4)
    few, others = in_passes(59, 4)
    for charged[0] in (0, 3, 9, 4, 9, 2):
        others[0] = charged[0]
        assert whole.draw()[whole.draw() < 59].tolist() == few.draw().tolist()
    assert in_passes(60, 4, key=6)[0].draw().tolist() != in_passes(60, 4)[0].draw().tolist()
    assert in_passes(0, 4)[0].draw().tolist() == []
    with pytest.raises(PrivacyError, match="not between 2 and"):
        in_passes(60, 1)
