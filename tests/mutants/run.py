"""Break the package in every way that tests/mutants lists, one at a time: the tests must find each (docs/testing.md).

    python tests/mutants/run.py --jobs 2                    # all
    python tests/mutants/run.py clipping noise/reused-*     # themes and globs
    python tests/mutants/run.py --sample 0.1 [--seed 7]     # a random tenth
    python tests/mutants/run.py --audit                     # the one-step audit in the place of the tests

Ends with 1 unless every mutant that was tried is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mutant_registry import FOLDER, Mutant, MutantError, StaleError, chosen, load_mutants, mutate
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

ROOT = FOLDER.parents[1]
Verdict = Literal["killed", "survived", "stale", "broken", "timeout"]
# Of a mutant that does not run at all: it shows nothing about the tests.
_CRASHES = {"ImportError", "SyntaxError", "NameError", "AttributeError", "TypeError"}
_SECONDS = 300  # of wall clock, for one mutant on a busy machine


@dataclass(frozen=True)
class Outcome:
    """killed: a test failed. survived: none did. stale: an edit does not fit the source. broken: the mutant does not
    run, or its tests do not. detail: the test that failed, or the reason. seconds: of CPU."""

    mutant: str
    verdict: Verdict
    detail: str
    seconds: float


class Runner:
    """Tries mutants of the package in ``source`` with tests below ``root``."""

    def __init__(self, root: Path = ROOT, source: Path | None = None, *, timeout: float = _SECONDS) -> None:
        self.root, self.timeout = root, timeout
        self.source = root / "src" if source is None else source

    def test(self, mutant: Mutant) -> Outcome:
        """Run the mutant's tests on it."""
        modules = ",".join(dict.fromkeys(edit.module for edit in mutant.edits))
        return self._try(mutant, lambda result: self._pytest(result, modules, mutant.tests, "-x"), _by_tests)

    def audit(self, mutant: Mutant) -> Outcome:
        """Audit one step of the mutant's method."""
        return self._try(
            mutant, lambda result: [str(FOLDER / "mutant_audit.py"), result, str(mutant.audit)], _by_audit
        )

    def failing(self, tests: Sequence[str]) -> list[str]:
        """Those of the tests that fail on the package as it is; they could not convict anything."""
        found = self._run(self.source, lambda result: self._pytest(result, "", tests))
        if isinstance(found, str):
            return [found]
        failures = [failure["test"] for failure in found["failures"]]
        return failures or ([] if found["code"] == 0 else [f"pytest ended with {found['code']}"])

    def _pytest(self, result: str, modules: str, tests: Sequence[str], *options: str) -> list[str]:
        child = [str(FOLDER / "mutant_child.py"), result, modules]
        return [*child, "-q", *options, "-p", "no:cacheprovider", *tests]

    def _try(
        self,
        mutant: Mutant,
        command: Callable[[str], list[str]],
        judge: Callable[[dict[str, Any]], tuple[Verdict, str]],
    ) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="privlora-mutant-") as folder:
            copy = Path(folder, "src")
            try:
                mutate(mutant, self.source, copy)
            except StaleError as error:
                return Outcome(mutant.name, "stale", str(error), 0.0)
            try:
                found = self._run(copy, command)
            except subprocess.TimeoutExpired:
                return Outcome(mutant.name, "timeout", f"no verdict in {self.timeout:g} s", self.timeout)
        if isinstance(found, str):
            return Outcome(mutant.name, "broken", found, 0.0)
        return Outcome(mutant.name, *judge(found), found["seconds"])

    def _run(self, source: Path, command: Callable[[str], list[str]]) -> dict[str, Any] | str:
        """What the child process wrote, or its last words where it wrote nothing."""
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory(prefix="privlora-mutant-") as folder:
            result = Path(folder, "result.json")
            done = subprocess.run(
                [sys.executable, *command(str(result))],
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=self.timeout if source != self.source else None,
            )
            if not result.exists():
                words = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
                return words[-1]
            found: dict[str, Any] = json.loads(result.read_text())
        if found["package"] is None or not Path(found["package"]).is_relative_to(source):
            return f"tested was {found['package']}, not the copy"
        return found


def _by_tests(found: dict[str, Any]) -> tuple[Verdict, str]:
    if found["code"] == 0:
        return "survived", "no test failed"
    if found["code"] != 1 or not found["failures"]:
        return "broken", f"pytest ended with {found['code']}"
    failure = found["failures"][0]
    detail = f"{failure['test']} ({failure['kinds'][0]})"
    crashed = failure["phase"] != "call" or not _CRASHES.isdisjoint(failure["kinds"])
    return ("broken" if crashed else "killed"), detail


def _by_audit(found: dict[str, Any]) -> tuple[Verdict, str]:
    detail = f"{found['epsilon_lower']:.2f} of {found['epsilon_claimed']:.2f} by {found['statistic']}"
    return ("killed" if found["violated"] else "survived"), detail


def run_all(
    mutants: Sequence[Mutant], work: Callable[[Mutant], Outcome], jobs: int, console: Console
) -> list[Outcome]:
    """The outcomes, in the order of the mutants."""
    outcomes: dict[str, Outcome] = {}
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("", total=len(mutants))
        for future in as_completed([pool.submit(work, mutant) for mutant in mutants]):
            outcome = future.result()
            outcomes[outcome.mutant] = outcome
            progress.update(task, advance=1, description=f"{outcome.verdict} {outcome.mutant}")
            if outcome.verdict != "killed":
                progress.console.print(f"{outcome.verdict} {outcome.mutant}: {outcome.detail}", markup=False)
    return [outcomes[mutant.name] for mutant in mutants]


def failing_tests(runner: Runner, mutants: Sequence[Mutant], jobs: int) -> list[str]:
    """Of the mutants' tests, those that fail on the package as it is."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    parts = [tests[k::jobs] for k in range(jobs) if tests[k::jobs]]
    with ThreadPoolExecutor(jobs) as pool:
        return [test for found in pool.map(runner.failing, parts) for test in found]


def innocent_convicted(runner: Runner, mutants: Sequence[Mutant], jobs: int) -> list[str]:
    """Of the mutants' methods, those that the audit convicts, or cannot play, as they are."""
    methods = sorted({str(mutant.audit) for mutant in mutants})
    unbroken = [Mutant(f"unbroken {method}", "nothing", (), (), method) for method in methods]
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(runner.audit, unbroken)
        return [f"{each.mutant}: {each.detail}" for each in found if each.verdict != "survived"]


def sampled(mutants: Sequence[Mutant], share: float, seed: int) -> list[Mutant]:
    """A random share of the mutants, at least one, in their order."""
    places = random.Random(seed).sample(range(len(mutants)), max(1, round(share * len(mutants))))
    return [mutants[place] for place in sorted(places)]


def table_of(outcomes: Iterable[Outcome]) -> Table:
    table = Table(Column("mutant", no_wrap=True), "verdict", "by", "CPU s", box=None, pad_edge=False)
    for each in outcomes:
        verdict = f"[{'green' if each.verdict == 'killed' else 'bold red'}]{each.verdict}[/]"
        table.add_row(each.mutant, verdict, escape(each.detail.split("/")[-1]), f"{each.seconds:.0f}")
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="themes, names or globs; all if none is given")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--sample", type=float, default=1.0, help="share of the mutants, chosen at random")
    parser.add_argument("--seed", type=int, help="of --sample; else the operating system's, and printed")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes there")
    parser.add_argument("--audit", action="store_true", help="those that the one-step audit must convict")
    return parser.parse_args()


def main() -> int:
    arguments, console = _arguments(), Console(width=None if sys.stdout.isatty() else 130)
    try:
        mutants = chosen(load_mutants(), arguments.names)
    except MutantError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    if arguments.audit:
        mutants = [mutant for mutant in mutants if mutant.audit is not None]
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    if arguments.sample < 1:
        mutants = sampled(mutants, arguments.sample, seed)
        console.print(f"{len(mutants)} mutants, drawn with --sample {arguments.sample:g} --seed {seed}")
    if arguments.list:
        for mutant in mutants:
            console.print(f"{mutant.name}: {mutant.breaks}", markup=False)
        return 0
    runner = Runner()
    failing = (innocent_convicted if arguments.audit else failing_tests)(runner, mutants, arguments.jobs)
    if failing:
        console.print("these fail without any mutant:", *failing, sep="\n", style="red", markup=False)
        return 1
    outcomes = run_all(mutants, runner.audit if arguments.audit else runner.test, arguments.jobs, console)
    console.print(table_of(outcomes))
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    for outcome in outcomes:  # last: the end of a long log is what is kept
        if outcome.verdict != "killed":
            console.print(f"{outcome.verdict} {outcome.mutant}: {outcome.detail}", markup=False)
    console.print(f"{killed} of {len(outcomes)} killed, {seconds:.0f} s of CPU")
    if arguments.json is not None:
        content = {"seed": seed, "sample": arguments.sample, "outcomes": [asdict(each) for each in outcomes]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
