"""A generator that repeats itself: refused where nothing differs, told of where most of it is copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from promises import promise
from run_cases import Bench, Warned

from privlora.accounting import read_ledger
from privlora.errors import GeneratorError
from privlora.reporting.publication import read_report
from privlora.reporting.tables import method_table
from privlora.training.files import RunFolder

PRIVACY = promise(steps=2, batch=30, records=30, noise_multiplier=1.0)

quickly = pytest.mark.usefixtures("quick_reports")


def of_kinds(count: int) -> Callable[[list[str]], list[str]]:
    """Answers that repeat themselves after ``count``."""
    return lambda prompts: [
        f"note {i % count}: a cough for {i % count + 2} days." for i in range(len(prompts))
    ]


def tune(output: Path, method: str, generator: Any, observer: Any = None, **synthesis: Any) -> None:
    texts = {"seeds": 8, "variations": 0, "similarity_limit": None, **synthesis}
    given = {"method": method, "observer": observer, "synthesis": texts, "generator": generator}
    Bench().start(output, privacy=PRIVACY, **given)


@pytest.mark.parametrize("method", ["pe-sgd-fix", "span-prism", "aug-pe", "prism"])
def test_texts_that_are_all_the_same_are_refused_before_anything_is_charged(
    tmp_path: Path, method: str
) -> None:
    warm = {"warm_start_epochs": 1} if method == "prism" else {}
    with pytest.raises(GeneratorError, match="asked for 8 public texts, and gave 1 distinct"):
        tune(tmp_path / "run", method, of_kinds(1), **warm)
    assert read_ledger(RunFolder(tmp_path / "run").ledger).charges == 0


def test_texts_whose_gradients_are_all_alike_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    with pytest.raises(GeneratorError, match="gradients of 4 public texts are all alike"):
        tune(tmp_path / "run", "pe-sgd-fix", of_kinds(4), similarity_limit=1e-9)
    assert read_ledger(RunFolder(tmp_path / "run").ledger).charges == 0


@quickly
@pytest.mark.parametrize("method", ["pe-sgd-fix", "aug-pe"])
@pytest.mark.parametrize(("kinds", "warns"), [(4, True), (5, False)])
def test_a_run_on_copies_says_once_how_many_texts_differ(
    tmp_path: Path, method: str, kinds: int, warns: bool
) -> None:
    observer = Warned()
    tune(tmp_path / "run", method, of_kinds(kinds), observer)
    assert [
        f"of 8 public texts that were asked for {kinds} differ" in said for said in observer.warnings
    ] == ([True] if warns else [])


def test_the_report_says_how_many_texts_differ(tmp_path: Path) -> None:
    tune(tmp_path / "run", "pe-sgd-fix", of_kinds(5))
    rows = dict(method_table(read_report(RunFolder(tmp_path / "run").report)))
    assert rows["Public texts"] == "8 by a function of the user's, of which 5 differ"


@quickly
def test_fresh_texts_that_become_the_same_end_the_run_before_the_next_charge(tmp_path: Path) -> None:
    class Tires:
        def __init__(self) -> None:
            self.calls = 0

        def random(self, count: int) -> list[str]:
            self.calls += 1
            return of_kinds(8 if self.calls == 1 else 1)([""] * count)

        def vary(self, texts: Sequence[str]) -> list[str]:
            raise AssertionError("fresh texts are asked for")

    with pytest.raises(GeneratorError, match="gave 1 distinct"):
        tune(tmp_path / "run", "pe-sgd", Tires(), evolution="fresh")
    assert read_ledger(RunFolder(tmp_path / "run").ledger).charges == 1
