"""How far one round's update is from the mean of the clients' updates, against K, rank and FedASK's oversampling.

    python benchmarks/federated/aggregation.py --out benchmarks/results/federated/aggregation.json \\
        --figure docs/figures/federated-aggregation.png

No training: one module in float64, whose clients end where a scenario says, aggregated by the product's own rules.
Values are ||W - mean M_k||_F / ||mean M_k||_F with M_k = left_k right_k^T, medians over seeds. For tan M_k is what a
client can move, the tangent part of the same update, and its error is what cutting the exact mean to rank r loses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from privlora.federated.rules import RULES, Asked, Pairs, RuleSettings, Tensors
from privlora.geometry.fixed_rank import Point, project_dense
from privlora.pages.figures import ACCENT, FOURTH, MUTED, SECOND, THIRD, grid, in_style, png

M, N, RANK, CLIENTS = 384, 320, 8, 10
SEEDS = range(5)
DRIFTS = {
    "clients alike": 0.1,
    "clients drift": 0.3,
    "clients drift far": 1.0,
    "clients unrelated": float("inf"),
}
"""Of a client's two factors: its own part beside the common one, entry by entry."""
SHARED = "right shared"
"""As under privacy: right is frozen and the same for all, and left drifts as in "clients drift"."""
OVERSAMPLING = (0, 2, 4, 8, 16, 32, 64, 72)
COUNTS, RANKS = (2, 5, 10, 20, 50), (2, 4, 8, 16, 32)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "flexlora": ("flexlora", {}),
    "fedex": ("fedex", {}),
    "fedask, p = 0": ("fedask", {"warm": False}),
    "fedask, p = 4": ("fedask", {"warm": False, "oversampling": 4}),
    "fedask, warm, p = 0": ("fedask", {"warm": True}),
    "tan": ("tan", {}),
}


def ends(scenario: str, clients: int, start: Pairs, seed: int) -> list[Pairs]:
    """Each client's factors after training; one module."""
    generator = torch.Generator().manual_seed(seed)
    (left, right) = start[0]
    drift = DRIFTS["clients drift" if scenario == SHARED else scenario]

    def own(of: Tensor) -> Tensor:
        noise = torch.randn(of.shape, generator=generator, dtype=of.dtype) * of.std()
        return noise if drift == float("inf") else of + drift * noise

    return [[(own(left), right if scenario == SHARED else own(right))] for _ in range(clients)]


def start_of(rank: int, seed: int) -> Pairs:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [
        (
            torch.randn(1, M, rank, generator=generator, dtype=torch.float64) / M**0.5,
            torch.randn(1, N, rank, generator=generator, dtype=torch.float64) / N**0.5,
        )
    ]


def error(row: str, scenario: str, clients: int, rank: int, seed: int, **more: Any) -> float:
    """Of one aggregation. more: settings beside the row's own."""
    name, given = ROWS[row]
    start = start_of(rank, seed)
    settings = RuleSettings(**{"rank": rank, "private": scenario == SHARED, "seed": seed, **given, **more})
    rule = RULES[name](start, settings)
    kept: list[Tensors] = [{} for _ in range(clients)]
    updates: list[Tensor] = []
    for stage in rule.stages:
        sent = rule.broadcast(stage)
        for k, pairs in enumerate(ends(scenario, clients, start, seed)):
            left, right = pairs[0]
            end = {"0.left": left, "0.right": right}
            if name == "tan":
                base = Point(*(sent[f"0.{part}"] for part in "USV"))
                xi = project_dense(base, left @ right.mT - base.embedding())
                end = {"0.M": xi.M, "0.Up": xi.Up, "0.Vp": xi.Vp}
                updates.append(base.embedding() + xi.embedding(base))
            elif stage == "train":
                updates.append(left @ right.mT)
            message, kept[k] = rule.answer(stage, Asked(1, sent, kept[k], settings), end)
            rule.add(stage, message, 1.0)
        rule.close(stage)
    mean = torch.stack(updates).mean(dim=0)
    a, b = rule.factors()[0]
    return float((a @ b.mT - mean).norm() / mean.norm())


def over_seeds(row: str, scenario: str, clients: int = CLIENTS, rank: int = RANK, **more: Any) -> float:
    return median(error(row, scenario, clients, rank, seed, **more) for seed in SEEDS)


def measure() -> dict[str, Any]:
    """All tables: scenario -> row -> error, and against oversampling, clients and rank."""
    scenarios = [*DRIFTS, SHARED]
    return {
        "sizes": {"m": M, "n": N, "rank": RANK, "clients": CLIENTS, "seeds": len(SEEDS)},
        "scenarios": {s: {row: over_seeds(row, s) for row in ROWS} for s in scenarios},
        "oversampling": {
            s: {
                str(warm): {
                    str(p): over_seeds("fedask, p = 0", s, warm=warm, oversampling=p) for p in OVERSAMPLING
                }
                for warm in (False, True)
            }
            for s in scenarios
        },
        "clients": {
            s: {row: {str(k): over_seeds(row, s, clients=k) for k in COUNTS} for row in ROWS} for s in DRIFTS
        },
        "rank": {
            s: {row: {str(r): over_seeds(row, s, rank=r) for r in RANKS} for row in ROWS} for s in DRIFTS
        },
    }


def table(found: dict[str, Any]) -> str:
    """Scenarios by rows, as the page quotes it."""
    scenarios = found["scenarios"]
    lines = ["| rule | " + " | ".join(scenarios) + " |", "|---" * (len(scenarios) + 1) + "|"]
    for row in ROWS:
        cells = [_shown(scenarios[s][row]) for s in scenarios]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return "0" if value < 1e-9 else f"{value:.3f}"


@in_style
def draw(found: dict[str, Any]) -> Figure:
    """FedASK against its oversampling; rules against the number of clients and the rank, where clients drift."""
    scenario, colours = "clients drift", (ACCENT, SECOND, THIRD, FOURTH, MUTED)
    figure, (first, second, third) = grid(1, 3, 14.4, 5.4)
    for colour, name in zip(colours, ("clients alike", scenario, "clients drift far"), strict=False):
        lines = found["oversampling"][name]
        for warm, style in (("False", "--"), ("True", "-")):
            y, label = list(lines[warm].values()), f"{name}{', warm' if warm == 'True' else ''}"
            first.plot(y, linestyle=style, marker="o", markersize=3, color=colour, label=label)
        first.axhline(found["scenarios"][name]["fedavg"], color=colour, linewidth=0.8, linestyle=":")
    first.set_xticks(range(len(OVERSAMPLING)), list(map(str, OVERSAMPLING)))
    first.set_xlabel("p: columns of a sketch beyond the rank of 8")
    first.set_title("FedASK, one round of 10 clients (dotted: FedAvg)")
    for axes, of, label in ((second, "clients", "clients"), (third, "rank", "rank")):
        rows: Sequence[str] = [row for row in reversed(ROWS) if row != "fedex"]
        for colour, row in zip((*colours, "#6f7d12"), rows, strict=True):
            x, y = zip(*((int(k), value) for k, value in found[of][scenario][row].items()), strict=True)
            dashes = (0, (4, 4)) if row == "flexlora" else "-"  # on the line of the warm sketch
            axes.plot(x, y, marker="o", markersize=3, color=colour, label=row, linestyle=dashes, zorder=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(v) for v in x])
        axes.set_xlabel(label)
        axes.set_title(f"one round, {scenario}")
    for axes in (first, second, third):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    first.legend(fontsize=7.5, loc="lower right", bbox_to_anchor=(1.0, 0.55))
    second.legend(fontsize=7.5, loc="lower left")
    third.legend(fontsize=7.5, loc="upper left")
    first.set_ylabel("error, relative to the mean of updates")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = measure()
    print(table(found))
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if chosen.figure is not None:
        chosen.figure.write_bytes(png(draw(found)))


if __name__ == "__main__":
    main()
