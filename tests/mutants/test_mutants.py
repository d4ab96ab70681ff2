"""The list of mutants fits the source, and the runner's verdicts are right; the mutants run by ``make mutants``."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutant_registry import (
    Edit,
    Mutant,
    MutantError,
    StaleError,
    chosen,
    load_mutants,
    missing_tests,
    mutate,
    mutated_files,
)
from run import ROOT, Runner, sampled

from privlora.methods import METHODS

MUTANTS = load_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_source_and_names_tests_that_exist(mutant: Mutant) -> None:
    for file, text in mutated_files(mutant, ROOT / "src").items():
        compile(text, file, "exec")
    assert all(edit.old != edit.new for edit in mutant.edits)
    assert missing_tests(mutant, ROOT) == []
    assert mutant.audit is None or METHODS[mutant.audit].private


def test_there_are_enough_of_each_kind() -> None:
    themes = [mutant.name.split("/")[0] for mutant in MUTANTS]
    assert len(themes) >= 250
    released = {"sampling", "clipping", "noise", "masks", "charging", "resuming", "composing", "releasing"}
    assert {*released, "accounting", "companions", "inputs", "models"} <= set(themes)
    assert sum(mutant.audit is not None for mutant in MUTANTS) >= 7


# --- the runner, on a package of three lines ---

GOOD = "def half(x: float) -> float:\n    return x / 2\n"
TESTS = """
import time

from privlora.numbers import half


def test_half() -> None:
    assert half(4) == 2


def test_zero() -> None:
    assert half(0) == 0


def test_slow() -> None:
    time.sleep(60 * (half(2) - 1))
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    root = tmp_path_factory.mktemp("toy")
    package = root / "src" / "privlora"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "numbers.py").write_text(GOOD)
    (root / "test_toy.py").write_text(TESTS)
    return Runner(root)


def toy(old: str, new: str, test: str = "test_half") -> Mutant:
    return Mutant("toy/one", "nothing", (Edit("numbers.py", old, new),), (f"test_toy.py::{test}",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "test", "verdict", "detail"),
    [
        ("x / 2", "x / 3", "test_half", "killed", "test_toy.py::test_half (AssertionError)"),
        ("x / 2", "x / 3", "test_zero", "survived", "no test failed"),
        ("x // 2", "x / 3", "test_half", "stale", "numbers.py: found 0 times, not 1: 'x // 2'"),
        ("x", "x", "test_half", "stale", "numbers.py: found 2 times, not 1: 'x'"),
        ("def half", "import nothing_of_that_name\ndef half", "test_half", "broken", "ModuleNotFoundError"),
        ("def half", "def third", "test_half", "broken", "pytest ended with 4"),
        ("x / 2", "y / 2", "test_half", "broken", "(NameError)"),
        ("x / 2", "x / 3", "test_of_another_name", "broken", "pytest ended with 4"),
    ],
)
def test_verdicts(runner: Runner, old: str, new: str, test: str, verdict: str, detail: str) -> None:
    outcome = runner.test(toy(old, new, test))
    assert outcome.verdict == verdict
    assert detail in outcome.detail
    assert (runner.root / "src/privlora/numbers.py").read_text() == GOOD


def test_a_mutant_that_takes_too_long_is_not_killed(runner: Runner) -> None:
    outcome = Runner(runner.root, timeout=1).test(toy("x / 2", "x", "test_slow"))
    assert outcome.verdict == "timeout"


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_are_named(runner: Runner) -> None:
    assert runner.failing(["test_toy.py::test_half", "test_toy.py::test_zero"]) == []
    (runner.root / "test_red.py").write_text(
        "def test_red() -> None:\n    import privlora\n    assert False\n"
    )
    assert runner.failing(["test_toy.py", "test_red.py"]) == ["test_red.py::test_red"]
    assert runner.failing(["test_nowhere.py"]) != []


def test_another_copy_of_the_package_is_no_verdict(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("run.mutate", lambda mutant, source, target: target.mkdir())
    monkeypatch.setenv("PYTHONPATH", str(runner.source))
    outcome = runner.test(toy("x / 2", "x / 3"))
    assert outcome.verdict == "broken"
    assert "not the copy" in outcome.detail


# --- the list ---


def test_several_edits_are_made_one_after_the_other(tmp_path: Path) -> None:
    package = tmp_path / "src" / "privlora"
    package.mkdir(parents=True)
    (package / "a.py").write_text("one one two")
    edits = (Edit("a.py", "one", "1", count=2), Edit("a.py", "1 two", "1 2"))
    mutate(Mutant("toy/two", "nothing", edits, ()), tmp_path / "src", tmp_path / "copy")
    assert (tmp_path / "copy/privlora/a.py").read_text() == "1 1 2"
    assert (package / "a.py").read_text() == "one one two"
    with pytest.raises(StaleError, match="no such file"):
        mutated_files(Mutant("toy/three", "nothing", (Edit("b.py", "", ""),), ()), tmp_path / "src")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[mutant]]\nname = 'a'", "lacking"),
        ("[[mutant]]\nname='a'\nbreaks='b'\nfile='c'\nold='d'\nnew='e'\ntests=['f']\nodd=1", "odd"),
        ("[[mutant]]\nname='a'\nbreaks='b'\nfile='c'\nold='d'\nnew='e'\ntests=[]", "lacking"),
        ("[[mutant]]\nname='a'\nbreaks='b'\nfile='c'\nold='d'\nnew='e'\ntests=['f']\n" * 2, "twice"),
        ("mutants = []", "alone"),
    ],
)
def test_lists_that_are_not_written_as_they_must_be(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "theme.toml").write_text(text)
    with pytest.raises(MutantError, match=message):
        load_mutants(tmp_path)


def test_names_and_globs_choose() -> None:
    assert chosen(MUTANTS, []) == MUTANTS
    assert {m.name.split("/")[0] for m in chosen(MUTANTS, ["noise"])} == {"noise"}
    assert [m.name for m in chosen(MUTANTS, ["noise/hal?"])] == ["noise/half"]
    with pytest.raises(MutantError, match="no mutant"):
        chosen(MUTANTS, ["nois"])


def test_a_sample_can_be_drawn_again() -> None:
    first = sampled(MUTANTS, 0.1, seed=3)
    assert first == sampled(MUTANTS, 0.1, seed=3) != sampled(MUTANTS, 0.1, seed=4)
    assert len(first) == round(0.1 * len(MUTANTS))
    assert len(sampled(MUTANTS[:2], 0.1, seed=3)) == 1
