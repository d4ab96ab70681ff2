"""The tables of benchmarks/results/studies/README.md and the picture of docs/results.md, from the runs there.

    python benchmarks/studies/findings.py --figures docs/figures

Nothing is trained. The tables are printed; tests/test_quoted_numbers.py holds the page to them.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from privlora.lab.studies.choice import Progress
from privlora.lab.studies.results import read_results
from privlora.lab.studies.settings import Rule, load_study
from privlora.lab.studies.statistics import Lead, Values, lead_over, spread, standardise, standings
from privlora.pages.figures import ACCENT, MUTED, SECOND, THIRD, grid, in_style, png

ROOT = Path(__file__).parents[2]
STUDIES, RESULTS = ROOT / "benchmarks" / "studies", ROOT / "benchmarks" / "results" / "studies"
BEST = "prism"
EPSILONS = (1.0, 3.0, 6.0)
# The rows of the first table; the picture and private_methods.md have all.
SHOWN = (
    "prism",
    "prism, β₁ 0.5, no error feedback or averaging",
    "dp-adamw with spectral clipping, β₁ 0, averaging",
    "dp-adamw with spectral clipping and β₁ 0.5",
    "projected with spectral clipping",
    "dp-sgd",
    "dp-adamw",
    "dp-adambc",
    "lora+",
)
# Of the setting, the file's name, epsilon and rank.
ELSEWHERE = (
    ("ten seeds", "closest", 3.0, 8),
    ("rank 4", "ranks", 3.0, 4),
    ("rank 16", "ranks", 3.0, 16),
    ("rank 32", "ranks", 3.0, 32),
    ("dense updates through random projections", "projected", 1.0, 8),
    ("dense updates through random projections", "projected", 3.0, 8),
    ("DP-SGD with PRISM's clipping and averaging, two rates", "nearest", 3.0, 8),
    ("a start from public text", "public_start", 1.0, 8),
    ("a model of 1.3 million parameters", "second_model", 3.0, 8),
)


# Of other_rows: what a row is compared with.
BESIDE = {
    "prism with per-module clipping": "prism with flat clipping",
    "dp-adamw with per-module clipping": "dp-adamw",
    "dp-zo": "dp-sgd",
}


@cache
def progress(name: str) -> Progress:
    """The study's runs. Raises PrivloraError."""
    return Progress(load_study(STUDIES / f"{name}.yaml"), read_results(RESULTS / f"{name}.jsonl"))


def values(name: str, epsilon: float, rank: int = 8, rule: Rule = "own-best") -> Values:
    """Held-out losses of the report runs at the chosen rates, by task, method and seed."""
    found = progress(name)
    chosen = found.chosen(rule)
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for place in found.study.places:
        task, method, *of_place = place
        rate = chosen[place].rate
        if of_place == [epsilon, rank] and rate is not None:
            losses.setdefault(task, {})[method] = found.values(place, rate)
    return losses


def scores(name: str, epsilon: float, rank: int = 8, rule: Rule = "own-best") -> Values:
    """The same as shares of the best method's gain on the task."""
    found = {}
    for task, of_task in values(name, epsilon, rank, rule).items():
        untouched = progress(name).untouched(task, "report")
        assert untouched is not None  # there are report runs
        found[task] = standardise(of_task, untouched, lower_is_better=True)
    return found


def behind(of: Values, method: str) -> Lead:
    """How far the method is behind PRISM, in the mean over tasks."""
    return lead_over(of, BEST, method)


def table_of_methods(name: str, rule: Rule, epsilons: tuple[float, ...]) -> str:
    """A row for each method that is shown: mean score, and how far behind PRISM, for each epsilon."""
    by_epsilon = [scores(name, epsilon, rule=rule) for epsilon in epsilons]
    means = [{line.method: line.mean_score for line in standings(of)} for of in by_epsilon]
    rows = []
    for method in (method for method in SHOWN if method in means[0]):
        cells = [f"`{method}`" if method.islower() and " " not in method else method]
        for of, mean in zip(by_epsilon, means, strict=True):
            cells.append(
                f"{mean[method]:.3f}" + ("" if method == BEST else f" ({words(behind(of, method))})")
            )
        rows.append(cells)
    return markdown(["method", *(f"ε = {epsilon:g}" for epsilon in epsilons)], rows)


def table_elsewhere() -> str:
    """A row for each other setting: the method that comes nearest to PRISM, and how near."""
    rows = []
    for setting, name, epsilon, rank in ELSEWHERE:
        of = scores(name, epsilon, rank)
        first, second = (line.method for line in standings(of)[:2])
        assert first == BEST
        rows.append([setting, f"{epsilon:g}", second, words(behind(of, second)), f"`{name}.jsonl`"])
    return markdown(["setting", "ε", "the nearest method", "behind PRISM by", "file"], rows)


def table_without_privacy() -> str:
    """Held-out loss of each method on each task without noise."""
    losses = values("without_privacy", 0.0)
    rows = []
    for method in next(iter(losses.values())):
        spreads = [spread(list(of_task[method].values())) for of_task in losses.values()]
        rows.append([f"`{method}`", *(f"{s.mean:.3f} ± {s.standard_deviation:.3f}" for s in spreads)])
    return markdown(["method", *losses], rows)


def bands_of(task: str, method: str, epsilon: float) -> int:
    """How many bands ``auto`` took in the runs of a cell; 1 where noise is independent."""
    for row in read_results(RESULTS / "banded.jsonl"):
        if (row.cell.task, row.cell.method, row.cell.epsilon) == (task, method, epsilon):
            return int(row.facts["event"]["sampling"].get("classes", 1))
    raise KeyError(task)


def table_of_bands() -> str:
    """Held-out loss with independent and with correlated noise, at each one's own best rate."""
    rows = []
    for epsilon in EPSILONS[:2]:
        for task, of_task in values("banded", epsilon).items():
            cells = [f"{96 if task.endswith('96') else 24}", f"{epsilon:g}"]
            for method, by_seed in of_task.items():
                found, bands = spread(list(by_seed.values())), bands_of(task, method, epsilon)
                chosen = f" ({bands} bands)" if bands > 1 else ""
                cells.append(f"{found.mean:.3f} ± {found.standard_deviation:.3f}{chosen}")
            rows.append(cells)
    return markdown(["steps", "ε", *of_task], rows)


def table_of_other_rows() -> str:
    """A row for each method of other_rows: mean score, how far behind PRISM, and losses; and its lead over itself with
    flat clipping, or of DP-ZO over DP-SGD."""
    of, losses = scores("other_rows", 3.0), values("other_rows", 3.0)
    rows = []
    for line in standings(of):
        method = line.method
        other = BESIDE.get(method)
        spreads = [spread(list(of_task[method].values())) for of_task in losses.values()]
        rows.append(
            [
                f"`{method}`" if " " not in method else method,
                f"{line.mean_score:.3f}" + ("" if method == BEST else f" ({words(behind(of, method))})"),
                "" if other is None else f"{words(lead_over(of, method, other))}, over {other}",
                *(f"{s.mean:.3f} ± {s.standard_deviation:.3f}" for s in spreads),
            ]
        )
    return markdown(["method", "score", "ahead by", *losses], rows)


def words(lead: Lead) -> str:
    """Of a method behind PRISM; negative where it is ahead.

    >>> words(Lead("x", 0.0461, 0.0015, 0.04, 0.05))
    '0.046, 31 SE'
    """
    errors = f"{lead.in_errors:.1f}" if abs(lead.in_errors) < 10 else f"{lead.in_errors:.0f}"
    return f"{lead.lead:.3f}, {errors} SE".replace("-", "−")


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables() -> dict[str, str]:
    """Every table of benchmarks/results/studies/README.md, by what it is of."""
    return {
        "own rates": table_of_methods("private_methods", "own-best", EPSILONS),
        "one rate": table_of_methods("shared_rate", "shared", EPSILONS[:2]),
        "elsewhere": table_elsewhere(),
        "without privacy": table_without_privacy(),
        "bands": table_of_bands(),
        "other rows": table_of_other_rows(),
    }


@in_style
def draw(by_epsilon: dict[float, dict[str, Lead]]) -> Figure:
    """A row for each method: how far it is behind PRISM at each epsilon, with two standard errors."""
    figure, (axes,) = grid(1, 1, 10.2, 5.4)
    methods = list(next(iter(by_epsilon.values())))
    looks = zip(by_epsilon.items(), (SECOND, ACCENT, THIRD), "so^", strict=True)
    for number, ((epsilon, leads), colour, marker) in enumerate(looks):
        axes.errorbar(
            [leads[method].lead for method in methods],
            np.arange(len(methods)) + 0.22 * (number - 1),
            xerr=[2 * leads[method].standard_error for method in methods],
            color=colour,
            label=f"ε = {epsilon:g}",
            marker=marker,
            linestyle="none",
            markersize=4,
            elinewidth=1,
        )
    axes.axvline(0, color=MUTED, linewidth=1)
    axes.set_yticks(np.arange(len(methods)), methods)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(
        "behind prism, as a share of the best method's gain (bars: two standard errors over seeds)"
    )
    axes.legend(frameon=False, loc="upper right")
    return figure


def leads_behind(name: str) -> dict[float, dict[str, Lead]]:
    """Every method's distance to PRISM by epsilon, the nearest first."""
    by_epsilon = {epsilon: scores(name, epsilon) for epsilon in EPSILONS}
    methods = [arm.label for arm in progress(name).study.arms if arm.label != BEST]
    found = {e: {method: behind(of, method) for method in methods} for e, of in by_epsilon.items()}
    order = sorted(methods, key=lambda method: sum(leads[method].lead for leads in found.values()))
    return {e: {method: leads[method] for method in order} for e, leads in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", type=Path, help="write results.png into this folder")
    args = parser.parse_args()
    if args.figures is not None:
        (args.figures / "results.png").write_bytes(png(draw(leads_behind("private_methods"))))
    for title, table in tables().items():
        print(f"{title}\n\n{table}\n")


if __name__ == "__main__":
    main()
