import shutil

import pytest
from accounting_cases import make_plan, poisson

from privlora.accounting import Ledger, PoissonSampling, StepEvent, compose_ledgers, epsilon
from privlora.errors import PrivacyError

FIRST, SECOND = poisson(0.1, 3.0), poisson(0.05, 2.0)


@pytest.fixture
def run(tmp_path):
    """Writes a ledger and returns its path."""

    def write(name, event=FIRST, charges=3, **changes):
        path = tmp_path / name
        with Ledger.create(path, make_plan(event=event, **changes)) as ledger:
            for _ in range(charges):
                ledger.charge(event)
        return path

    return write


def test_total_is_the_composition_of_what_was_charged(run):
    statement = compose_ledgers([run("a"), run("b", SECOND, charges=5), run("c", charges=0)])
    assert [budget.epsilon for budget in statement.runs] == [
        epsilon([(FIRST, 3)], 1e-5),
        epsilon([(SECOND, 5)], 1e-5),
        0.0,
    ]
    assert statement.epsilon == epsilon([(FIRST, 3), (SECOND, 5)], 1e-5)
    assert max(budget.epsilon for budget in statement.runs) < statement.epsilon


def test_projected_and_plain_runs_compose(run):
    projected = StepEvent(PoissonSampling(0.1), 0.9, ((8, 64),))
    statement = compose_ledgers([run("a"), run("b", projected, charges=5)])
    assert statement.epsilon == epsilon([(FIRST, 3), (projected, 5)], 1e-5)
    assert max(budget.epsilon for budget in statement.runs) < statement.epsilon


def test_two_runs_cost_what_one_run_of_their_length_costs(run):
    halves = compose_ledgers([run("a", charges=2), run("b", charges=3)])
    assert halves.epsilon == compose_ledgers([run("c", charges=5)]).epsilon


def test_statement_says_what_it_depends_on(run):
    text = compose_ledgers([run("a")]).describe()
    for part in ("1e-05", "per record", "add-or-remove-one", "pld", "dp-accounting"):
        assert part in text
    assert "different data" not in text


def test_different_data_are_named(run):
    statement = compose_ledgers([run("a"), run("b", dataset="diaries")])
    assert statement.datasets == ("diaries", "letters")
    assert "diaries, letters" in statement.describe()


@pytest.mark.parametrize(("field", "value"), [("delta", 1e-6), ("adjacency", "replace-one")])
def test_different_delta_or_adjacency_must_be_decided(run, field, value):
    paths = [run("a"), run("b", **{field: value})]
    with pytest.raises(PrivacyError, match=field):
        compose_ledgers(paths)
    statement = compose_ledgers(paths, **{field: value})
    expected = {"delta": 1e-5, "adjacency": "add-or-remove-one"} | {field: value}
    assert statement.epsilon == epsilon([(FIRST, 6)], **expected)


def test_records_and_users_do_not_add_up(run):
    with pytest.raises(PrivacyError, match="unit"):
        compose_ledgers([run("a"), run("b", unit="user", records_per_user=3)], delta=1e-5)


def copy_of(path, charges=0):
    """A copy that went on for so many more steps."""
    copy = path.with_name(f"{path.name}-and-{charges}")
    shutil.copy(path, copy)
    with Ledger.open(copy) as ledger:
        for _ in range(charges):
            ledger.charge(ledger.plan.event)
    return copy


def test_a_run_given_twice_counts_once(run):
    path = run("a")
    statement = compose_ledgers([path, copy_of(path), path])
    assert statement.epsilon == compose_ledgers([path]).epsilon
    assert [(budget.releases, len(budget.copies)) for budget in statement.runs] == [(3, 3)]


def test_of_a_copy_and_its_continuation_the_longer_counts(run):
    path = run("a", steps=12)
    longer = copy_of(path, 5)
    for paths in ([path, longer], [longer, path], [path, longer, copy_of(longer, 2)]):
        statement = compose_ledgers(paths)
        releases = 8 if len(paths) == 2 else 10
        assert [budget.releases for budget in statement.runs] == [releases]
        assert statement.epsilon == epsilon([(FIRST, releases)], 1e-5)
        assert f"the longest counts: {releases} releases" in statement.describe()


def test_copies_that_went_on_apart_count_with_all_their_steps(run):
    """One ledger, copied at step 4 and continued by 3 and by 5: 12 releases, not the longest copy's 9."""
    path = run("a", charges=4, steps=12)
    paths = [copy_of(path, 3), copy_of(path, 5)]
    statement = compose_ledgers([*paths, run("b", SECOND, charges=5)])
    assert [budget.releases for budget in statement.runs] == [12, 5]
    assert statement.runs[0].epsilon == epsilon([(FIRST, 12)], 1e-5)
    assert statement.epsilon == epsilon([(FIRST, 12), (SECOND, 5)], 1e-5)
    words = statement.describe()
    assert f"{paths[0]} (7), {paths[1]} (9)" in words
    assert "continued apart" in words
    assert "12 releases" in words


def test_one_run_with_two_plans_is_refused(run):
    path = run("a")
    header, _ = path.read_text().split("\n", 1)
    other = path.with_name("other")
    other.write_text(header.replace('"noise_multiplier": 3.0', '"noise_multiplier": 9.0') + "\n")
    with pytest.raises(PrivacyError, match="different plans"):
        compose_ledgers([path, other])


def test_one_run_with_reproducible_noise_spoils_the_statement(run):
    with pytest.raises(PrivacyError, match="NOT PRIVATE"):
        compose_ledgers([run("a"), run("b", insecure_noise=True)])


def test_no_ledger_is_no_statement():
    with pytest.raises(PrivacyError, match="no ledger"):
        compose_ledgers([])
