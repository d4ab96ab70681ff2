"""What the paper's bounds say of the projection mechanism, beside the exact numbers: Figures 1 and 2 as curves.

    python benchmarks/projection/bounds.py --out benchmarks/results/projection/bounds.json --figures docs/figures

Vector: epsilon of one release M v at delta = 0.01, d = 400, against the alignment rho, for several ranks: Theorem 1,
its improvement, the exact integral, and the quantile of the loss that the paper's figure calls exact. Matrix: sigma of
one M2 release at (1, 1e-5), d = 2048, against the rank, over that of the plain Gaussian mechanism: Theorem 5 as printed
and sharpened, exact, rank-free, project-then-clip, and M1 with a public M (at delta = 1e-3, d = 64). Half a minute on
one core; nothing is random.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from scipy.optimize import brentq

from privlora.accounting.projection.composition import rank_free_delta
from privlora.errors import PrivacyError
from privlora.lab.wishart.bounds.gaussian import gaussian_noise_multiplier
from privlora.lab.wishart.bounds.matrix import public_m1_delta
from privlora.lab.wishart.bounds.noisy import rank_one_delta, theorem_5_noise_multiplier
from privlora.lab.wishart.bounds.vector import VectorQuery, exact_epsilon, theorem_1_at
from privlora.pages.figures import ACCENT, FOURTH, MUTED, SECOND, THIRD, grid, in_style, png

DIMENSION, RANKS, DELTA = 400, (100, 200, 300, 400), 0.01
SLACKS = tuple(float(f"{x:.6g}") for x in np.geomspace(0.5, 1e-6, 25))  # 1 - rho
M2_DIMENSION, M2_RANKS = 2048, (4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 1843, 2048)
M2_EPSILON, M2_DELTA = 1.0, 1e-5
M1_DIMENSION, M1_RANKS, M1_DELTA = 64, (16, 64, 256, 1024), 1e-3
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
DASHED = (0, (4, 3))
TITLES = {
    "theorem_5_printed": "Theorem 5 as printed, k = 1",
    "theorem_5_any_rank": "Theorem 5, sharpened, any rank",
    "rank_free": "rank-free accounting",
    "project_then_clip": "project, then clip",
}


def vector_curves(rank: int) -> list[dict[str, float | None]]:
    """One row an alignment; None where Theorem 1's condition fails."""
    rows: list[dict[str, float | None]] = []
    for slack in SLACKS:
        query = VectorQuery(DIMENSION, rank, 1 - slack)
        rows.append(
            {
                "one_minus_rho": slack,
                "theorem_1": bound_or_none(query, improved=False),
                "improved": bound_or_none(query, improved=True),
                "exact": exact_epsilon(DELTA, query),
                "loss_quantile": exact_epsilon(DELTA, query, quantile_of_loss=True),
            }
        )
    return rows


def bound_or_none(query: VectorQuery, *, improved: bool) -> float | None:
    try:
        return theorem_1_at(query, DELTA, improved=improved).epsilon
    except PrivacyError:
        return None


def matrix_row(rank: int, plain: float) -> dict[str, float]:
    """Ratios of sigma to that of the plain mechanism, at one rank of M2."""
    d = M2_DIMENSION
    square = rank == d
    curves: dict[str, Callable[[float], float]] = {
        "rank_free": lambda s: float(rank_free_delta(np.array([M2_EPSILON]), s, ((rank, d),))[0]),
        "rank_one_exact": lambda s: float(rank_one_delta(np.array([M2_EPSILON]), s, rank, d)[0]),
    }
    row = {"rank": float(rank)}
    for name, form, k in (
        ("printed", "two-sided", 1),
        ("printed_k128", "two-sided", 128),
        ("any_rank", "exact", None),
    ):
        sigma = theorem_5_noise_multiplier(M2_EPSILON, M2_DELTA, rank, d, k, form=form)
        row[f"theorem_5_{name}"] = sigma / plain
    for name, curve in curves.items():
        row[name] = 1.0 if square else smallest_sigma(curve, M2_DELTA, plain * math.sqrt(rank / d)) / plain
    row["project_then_clip"] = math.sqrt(rank / d)
    return row


def smallest_sigma(curve: Callable[[float], float], delta: float, low: float) -> float:
    high = 2 * low
    while curve(high) > delta:
        high *= 2
    return float(brentq(lambda s: math.log(max(curve(s), 1e-300) / delta), low / 2, high, xtol=1e-9))


def public_m1_row(rank: int, plain: float) -> dict[str, float]:
    sigma = smallest_sigma(lambda s: public_m1_delta(M2_EPSILON, s, rank, M1_DIMENSION), M1_DELTA, plain)
    return {"rank": float(rank), "ratio": sigma / plain}


@in_style
def draw_vector(result: dict[str, Any]) -> Figure:
    """Epsilon against the alignment, on the scale of 1 - rho, a panel a rank."""
    figure, panels = grid(1, 2, 10.2, 3.6)
    styles = {
        "theorem_1": (SECOND, "-", "Theorem 1"),
        "improved": (THIRD, DASHED, "Theorem 1, improved"),
        "exact": (ACCENT, "-", "exact"),
    }
    for axes, rank in zip(panels, (RANKS[0], RANKS[-1]), strict=True):
        rows = result["vector"]["ranks"][str(rank)]
        for name, (colour, dashes, label) in styles.items():
            points = [(row["one_minus_rho"], row[name]) for row in rows if row[name]]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, linewidth=2, linestyle=dashes, label=label)
        axes.set(xscale="log", yscale="log", xlabel="alignment ρ", ylabel="ε at δ = 0.01")
        axes.set_xlim(0.7, 8e-7)
        axes.set_ylim(5e-3, 2e3)
        slacks = (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
        axes.set_xticks(slacks, [f"{1 - slack:.9g}" for slack in slacks], fontsize=8)
        axes.yaxis.set_major_formatter(PLAIN)
        axes.minorticks_off()
        axes.set_title(f"one release of M v, d = {DIMENSION}, r = {rank}")
    panels[0].legend()
    return figure


@in_style
def draw_matrix(result: dict[str, Any]) -> Figure:
    """sigma over plain sigma against the rank, and the same over sqrt(r/d)."""
    figure, panels = grid(1, 2, 10.2, 3.6)
    rows = result["matrix"]["rows"]
    ranks = np.array([row["rank"] for row in rows])
    for (name, label), colour in zip(TITLES.items(), (SECOND, THIRD, ACCENT, FOURTH), strict=True):
        values = np.array([row[name] for row in rows])
        dashes = DASHED if name == "project_then_clip" else "-"
        for axes, shown in zip(panels, (values, values / np.sqrt(ranks / M2_DIMENSION)), strict=True):
            axes.plot(ranks, shown, color=colour, linewidth=2, linestyle=dashes, label=label)
    for axes in panels:
        axes.set(xscale="log", xlabel=f"rank r of the projection, d = {M2_DIMENSION}")
        axes.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1024"])
        axes.axhline(1, color=MUTED, linewidth=1)
    panels[0].set(yscale="log", ylabel="σ over σ without projection")
    panels[0].set_yticks([0.05, 0.1, 0.2, 0.5, 1])
    panels[0].yaxis.set_major_formatter(PLAIN)
    panels[0].set_title("one release, ε = 1, δ = 1e-5")
    panels[1].set(ylabel="the same, over √(r/d)")
    panels[1].set_title("beside projecting first and clipping then")
    for axes in panels:
        axes.minorticks_off()
    panels[0].legend()
    return figure


def compute() -> dict[str, Any]:
    plain = gaussian_noise_multiplier(M2_EPSILON, M2_DELTA)
    m1_plain = gaussian_noise_multiplier(M2_EPSILON, M1_DELTA)
    return {
        "versions": {name: version(name) for name in ("numpy", "scipy")},
        "vector": {
            "dimension": DIMENSION,
            "delta": DELTA,
            "ranks": {str(rank): vector_curves(rank) for rank in RANKS},
        },
        "matrix": {
            "dimension": M2_DIMENSION,
            "epsilon": M2_EPSILON,
            "delta": M2_DELTA,
            "plain_noise_multiplier": plain,
            "rows": [matrix_row(rank, plain) for rank in M2_RANKS],
        },
        "public_m1": {
            "dimension": M1_DIMENSION,
            "epsilon": M2_EPSILON,
            "delta": M1_DELTA,
            "rows": [public_m1_row(rank, m1_plain) for rank in M1_RANKS],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    parser.add_argument(
        "--figures", type=Path, help="write projection-vector.png and projection-noise.png here"
    )
    chosen = parser.parse_args()
    result = compute()
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if chosen.figures is not None:
        (chosen.figures / "projection-vector.png").write_bytes(png(draw_vector(result)))
        (chosen.figures / "projection-noise.png").write_bytes(png(draw_matrix(result)))
    for row in result["matrix"]["rows"]:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
