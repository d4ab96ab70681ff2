"""What studies of many cells share: a file of the finished ones, a search for a learning rate, means over seeds."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Rows = list[dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """The finished cells, without what was said of the machine."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "cell" in row]


class Finished:
    """The lines of a file, by their cells. What is there is not run again."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.rows = {json.dumps(row["cell"]): row for row in read_rows(out)}

    def find(self, cell: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The line of ``cell``, made of what ``run`` returns and of the time that it took where there is none."""
        key = json.dumps(cell)
        if key not in self.rows:
            started, cpu = time.perf_counter(), time.process_time()
            found = run()
            spent = {
                "seconds": round(time.perf_counter() - started, 2),
                "cpu_seconds": round(time.process_time() - cpu, 2),
            }
            self.rows[key] = {"cell": cell, **found, **spent}
            self.append(self.rows[key])
            print(*cell.values(), found.get("loss", ""), flush=True)
        return self.rows[key]

    def append(self, row: dict[str, Any]) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with open(self.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def tell_machine(self) -> None:
        from machine import describe_machine

        self.append({"machine": describe_machine()})


def best_along(
    rates: Sequence[float], first: int, loss: Callable[[float], float], astray: float = math.inf
) -> float:
    """Of ascending ``rates``: from the ``first`` on the next one is tried as long as it is better, up or else down.

    Losses from ``astray`` on are no better than each other, and smaller rates are tried until one is not.
    """

    def of(number: int) -> float:
        found = loss(rates[number])
        return found if found < astray else math.inf

    best = first
    while best + 1 < len(rates) and of(best + 1) < of(best):
        best += 1
    if best == first:
        while best > 0 and (of(best - 1) < of(best) or of(best) == math.inf):
            best -= 1
    return rates[best]


def finite_or_inf(loss: float) -> float:
    """inf for a run that diverged."""
    return float(loss) if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class Value:
    """Of one cell over seeds. digits: of what is printed."""

    values: tuple[float, ...]
    digits: int = 4

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for one seed."""
        return stdev(self.values) / len(self.values) ** 0.5 if len(self.values) > 1 else None

    def __str__(self) -> str:
        found = f"{self.mean:.{self.digits}f}"
        return found if self.error is None else f"{found} ± {self.error:.{self.digits}f}"

    def minus(self, other: Value) -> str:
        """How much larger than ``other``, also in standard errors of the difference."""
        gap = self.mean - other.mean
        if self.error is None or other.error is None:
            return f"{gap:+.{self.digits}f}"
        return f"{gap:+.{self.digits}f} ({gap / max(math.hypot(self.error, other.error), 1e-12):+.1f} SE)"


def epsilon_of(text: str) -> float | None:
    return None if text == "none" else float(text)


def study_parser(description: str | None, out: Path) -> argparse.ArgumentParser:
    """With --assets and --out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=out)
    return parser


def exit_without_models(assets: Path) -> None:
    if not (assets / "models").is_dir():
        print(f"skipped: there are no models in {assets}")
        sys.exit()
