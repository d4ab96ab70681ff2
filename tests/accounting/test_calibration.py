import json
import logging

import pytest
from accounting_cases import load_vectors

import privlora.accounting.calibration as calibration
from privlora.accounting import (
    PoissonSampling,
    TruncatedPoissonSampling,
    calibrate_noise_multiplier,
    epsilon,
)
from privlora.errors import PrivacyError

ROWS = {row["id"]: row for row in load_vectors()["calibration"]}
EASY = (PoissonSampling(0.2), 10, 1.0, 1e-5)  # row p1: the cheapest


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVLORA_CACHE", str(tmp_path))
    return tmp_path


def count_evaluations(monkeypatch):
    grids = []
    true_function = calibration.pld_epsilon

    def counted(events, delta, adjacency, grid, **how):
        if not how:  # dp_accounting's own confirms what was found
            grids.append(grid)
        return true_function(events, delta, adjacency, grid, **how)

    monkeypatch.setattr(calibration, "pld_epsilon", counted)
    return grids


CASES = [
    pytest.param(row_id, "add-or-remove-one", "sigma_pld", marks=() if row_id[0] == "p" else pytest.mark.slow)
    for row_id in ROWS
]
CASES += [(row_id, "replace-one", "sigma_pld_replace_one") for row_id in ("p1", "p4")]


@pytest.mark.parametrize(("row_id", "adjacency", "column"), CASES)
def test_reference_rows(row_id, adjacency, column, monkeypatch):
    """Within 5e-6 of the reference, never above the target, with one evaluation on the slow fine grid."""
    row = ROWS[row_id]
    grids = count_evaluations(monkeypatch)
    result = calibrate_noise_multiplier(
        PoissonSampling(row["sample_rate"]), row["steps"], row["epsilon"], row["delta"], adjacency=adjacency
    )
    assert result.noise_multiplier == pytest.approx(row[column], rel=5e-6)
    assert result.epsilon <= row["epsilon"]
    assert grids.count(1e-4) == 1
    assert len(grids) < 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "steps", "target", "delta"),
    [
        (PoissonSampling(0.05), 7, 2.0, 1e-6),
        (PoissonSampling(1.0), 20, 3.0, 1e-5),
        (PoissonSampling(0.001), 10000, 0.1, 1e-6),  # the coarse grid is far off here
        (PoissonSampling(0.01), 100, 0.001, 1e-5),
    ],
)
def test_result_is_tight_and_never_above_the_target(sampling, steps, target, delta):
    result = calibrate_noise_multiplier(sampling, steps, target, delta, cache=False)
    assert epsilon([(result.event, steps)], delta) <= result.epsilon <= target
    less_noise = type(result.event)(sampling, result.noise_multiplier * (1 - 1e-5))
    grid = 2e-5 if target < 0.1 else 1e-4
    assert calibration.pld_epsilon({less_noise: steps}, delta, "add-or-remove-one", grid) > target


@pytest.mark.slow
def test_truncated_poisson_needs_more_noise():
    """One unit in a batch may push another one out."""
    arguments = (10, 1.0, 1e-5)
    plain = calibrate_noise_multiplier(PoissonSampling(0.2), *arguments)
    tight = calibrate_noise_multiplier(TruncatedPoissonSampling(0.2, 25, 100), *arguments)
    assert tight.noise_multiplier > 1.01 * plain.noise_multiplier
    assert epsilon([(tight.event, 10)], 1e-5) <= 1.0


@pytest.mark.slow
def test_tolerance_rounds_up_to_fewer_digits():
    rough = calibrate_noise_multiplier(*EASY, tolerance=1e-2)
    fine = calibrate_noise_multiplier(*EASY)
    assert rough.noise_multiplier == round(rough.noise_multiplier, 2)
    assert fine.noise_multiplier <= rough.noise_multiplier <= 1.02 * fine.noise_multiplier


def test_describe_states_what_the_guarantee_depends_on():
    text = calibrate_noise_multiplier(*EASY).describe()
    for part in ("10 steps", "q=0.2", "sigma=2.82571", "1e-05", "add-or-remove-one", "pld", "dp-accounting"):
        assert part in text


def test_dictionary_is_json():
    data = json.loads(json.dumps(calibrate_noise_multiplier(*EASY).to_dict()))
    assert data["event"]["noise_multiplier"] == pytest.approx(2.825706)
    assert data["accountant"] == "pld"


@pytest.fixture
def solutions(monkeypatch):
    """The questions that were solved rather than read; solving is replaced by a constant, to be fast."""
    questions = []

    def solve(*question):
        questions.append(question)
        return 2.825706, 0.9999999

    monkeypatch.setattr(calibration, "_solve", solve)
    return questions


def test_cache_is_reused_for_the_same_question_only(solutions):
    first = calibrate_noise_multiplier(*EASY)
    assert calibrate_noise_multiplier(*EASY) == first
    assert len(solutions) == 1
    sampling, steps, target, delta = EASY
    for other in [
        (PoissonSampling(0.1), steps, target, delta),
        (TruncatedPoissonSampling(0.2, 10, 20), steps, target, delta),
        (sampling, steps + 1, target, delta),
        (sampling, steps, 2.0, delta),
        (sampling, steps, target, 1e-6),
    ]:
        calibrate_noise_multiplier(*other)
    calibrate_noise_multiplier(*EASY, projections=((4, 8),))
    calibrate_noise_multiplier(*EASY, adjacency="replace-one")
    calibrate_noise_multiplier(*EASY, tolerance=1e-5)
    assert len(solutions) == 9


def test_cache_depends_on_the_versions(monkeypatch, solutions):
    calibrate_noise_multiplier(*EASY)
    monkeypatch.setattr(calibration, "accountant_versions", lambda: {"dp-accounting": "99"})
    assert calibrate_noise_multiplier(*EASY).versions == {"dp-accounting": "99"}
    assert len(solutions) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace("2.825", "0.825"),
        lambda text: json.dumps(json.loads(text) | {"epsilon": None}),
        lambda text: json.dumps(json.loads(text) | {"noise_multiplier": float("nan")}),
    ],
)
def test_damaged_cache_is_ignored_and_rewritten(damage, cache_root, caplog, solutions):
    first = calibrate_noise_multiplier(*EASY)
    (file,) = (cache_root / "calibration").iterdir()
    intact = file.read_text()
    file.write_text(damage(intact))
    with caplog.at_level(logging.WARNING):
        assert calibrate_noise_multiplier(*EASY) == first
    assert "cache entry ignored" in caplog.text
    assert len(solutions) == 2
    assert file.read_text() == intact


def test_a_cache_that_cannot_be_written_is_reported_and_does_no_harm(cache_root, caplog, solutions):
    (cache_root / "calibration").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert calibrate_noise_multiplier(*EASY).noise_multiplier == 2.825706
    assert "not cached" in caplog.text


def test_cache_can_be_switched_off(cache_root, solutions):
    calibrate_noise_multiplier(*EASY, cache=False)
    assert list(cache_root.iterdir()) == []


def test_cache_folder_follows_the_platform(monkeypatch):
    monkeypatch.delenv("PRIVLORA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(calibration.cache_folder()) == "/somewhere/privlora/calibration"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(calibration.cache_folder()).endswith(".cache/privlora/calibration")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((PoissonSampling(0.1), 0, 1.0, 1e-5), "steps"),
        ((PoissonSampling(0.1), 2.5, 1.0, 1e-5), "steps"),
        ((PoissonSampling(0.1), 10, 0.0, 1e-5), "target_epsilon"),
        ((PoissonSampling(0.1), 10, float("inf"), 1e-5), "target_epsilon"),
        ((PoissonSampling(0.1), 10, 1.0, 0.0), "delta"),
        ((PoissonSampling(0.0), 10, 1.0, 1e-5), "sample_rate"),
        ((PoissonSampling(0.1), 1, 1e4, 1e-5), "between 0.001 and 500"),
        ((PoissonSampling(0.001), 1, 400.0, 1e-5), "lower target_epsilon"),
        ((PoissonSampling(0.1), 10, 1.0, 1e-30), "delta"),
    ],
)
def test_questions_without_an_answer_are_refused_with_advice(arguments, word):
    with pytest.raises(PrivacyError, match=word) as caught:
        calibrate_noise_multiplier(*arguments)
    assert caught.value.fix


@pytest.mark.parametrize("tolerance", [0.0, 1e-9, 0.5])
def test_tolerance_out_of_range_is_refused(tolerance):
    with pytest.raises(PrivacyError, match="tolerance"):
        calibrate_noise_multiplier(*EASY, tolerance=tolerance)


def test_unknown_adjacency_is_refused():
    with pytest.raises(PrivacyError, match="adjacency"):
        calibrate_noise_multiplier(*EASY, adjacency="bounded")


FEW_OF_MANY = pytest.param((8, 2048), 8.0, 0.04944, 0.04958, marks=pytest.mark.long)


# Rank-free reference values, which are rounded up more coarsely, and exact ones of rank one, which ours may not meet.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "target", "rank_one", "rank_free"),
    [
        ((64, 2048), 0.4, 0.70699, 0.70814),
        FEW_OF_MANY,
    ],
)
def test_projected_reference_rows(size, target, rank_one, rank_free):
    result = calibrate_noise_multiplier(PoissonSampling(0.02), 500, target, 1e-5, projections=(size,))
    assert rank_one < result.noise_multiplier < rank_free
    assert result.epsilon <= target
    assert result.event.projections == (size,)
    assert f"{size[0]} of {size[1]}" in result.describe()


@pytest.mark.slow
def test_projected_result_is_tight():
    sampling, steps, target, delta = question = (PoissonSampling(1.0), 3, 1.0, 1e-5)
    result = calibrate_noise_multiplier(*question, projections=((16, 256),))
    less = type(result.event)(sampling, result.noise_multiplier * (1 - 1e-5), ((16, 256),))
    assert (
        epsilon([(result.event, steps)], delta) == result.epsilon <= target < epsilon([(less, steps)], delta)
    )


def test_projections_are_refused_where_nothing_covers_them():
    with pytest.raises(PrivacyError, match="replace-one"):
        calibrate_noise_multiplier(*EASY, projections=((8, 64),), adjacency="replace-one")
    with pytest.raises(PrivacyError, match="truncated"):
        calibrate_noise_multiplier(
            TruncatedPoissonSampling(0.2, 25, 100), 10, 1.0, 1e-5, projections=((8, 64),)
        )
