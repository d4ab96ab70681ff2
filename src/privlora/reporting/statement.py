"""What a ledger and rows of evaluations make of a report: whoever verifies a release makes it again, without torch."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final

from privlora.accounting import LedgerSummary, Plan, StepEvent, epsilon
from privlora.accounting.accountants import DEFAULT_GRID, merged, pld_epsilon
from privlora.accounting.bands import row_norms, split_noise_multiplier
from privlora.accounting.meaning import meaning
from privlora.pages.numbers import finite
from privlora.version import __version__, version_of

SCHEMA_VERSION = 3
PRIVATE, NOT_PRIVATE = "DIFFERENTIALLY PRIVATE", "NOT PRIVATE"
REASONS: Final = (
    "the run used the non-private mode, without clipping and without noise",
    "the noise was repeatable (insecure_noise_seed), so whoever knows the seed can subtract it",
)
"""Why a run states no epsilon."""
_CURVE_POINTS = 20
# For the curve of a large epsilon: ten times faster, less than 0.01 % above the default grid.
_COARSE_GRID = 1e-3


def privacy_facts(summary: LedgerSummary | None) -> dict[str, Any]:
    """What the ledger alone decides: the stamp, the statement, and epsilon over steps."""
    if summary is None:
        return {
            "stamp": {"text": NOT_PRIVATE, "reason": REASONS[0]},
            "statement": None,
            "epsilon_over_steps": [],
        }
    if summary.plan.insecure_noise:
        return {
            "stamp": {"text": NOT_PRIVATE, "reason": REASONS[1]},
            "statement": _statement(summary, None, None),
            "epsilon_over_steps": [],
        }
    total = summary.epsilon()
    replace_one = None
    if all(event.bounds_replacing for event, _ in summary.plan.phases):
        replace_one = finite(epsilon(summary.events(), summary.plan.delta, adjacency="replace-one"))
    return {
        "stamp": {"text": PRIVATE, "reason": None},
        "statement": _statement(summary, finite(total), replace_one),
        "means": meaning(summary.events(), summary.plan.adjacency).to_dict(),
        "epsilon_over_steps": _curve(summary, total),
    }


def _curve(summary: LedgerSummary, total: float) -> list[dict[str, float | None]]:
    """Upper bounds after about 20 numbers of steps; the last is the statement's."""
    plan, charges = summary.plan, summary.charges
    parts = {math.ceil(charges * i / _CURVE_POINTS) for i in range(_CURVE_POINTS)}
    steps = sorted({min(1, charges), *parts} - {0, charges})
    grid = _COARSE_GRID if total >= 1 else DEFAULT_GRID
    curve: list[dict[str, float | None]] = []
    for step in steps:
        # epsilon never falls with more steps, so the total bounds every earlier one too
        bound = min(pld_epsilon(merged(plan.events(step)), plan.delta, plan.adjacency, grid), total)
        curve.append({"step": step, "epsilon": finite(bound)})
    return [*curve, {"step": charges, "epsilon": finite(total)}]


def evaluation_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Held-out results on public records, by step; numbers that are not finite become None."""
    found = {row["step"]: {name: finite(value) for name, value in row.items()} for row in rows}
    return [found[step] for step in sorted(found)]


def _statement(
    summary: LedgerSummary, epsilon_now: float | None, epsilon_replace_one: float | None
) -> dict[str, Any]:
    plan = summary.plan
    charged = [count for _, count in summary.events()] + [0] * len(plan.phases)
    phases = [_phase(*phase, done) for phase, done in zip(plan.phases, charged, strict=False)]
    return {
        "epsilon": epsilon_now,
        "delta": plan.delta,
        "unit": plan.unit,
        "records_per_user": plan.records_per_user,
        "adjacency": plan.adjacency,
        "epsilon_replace_one": epsilon_replace_one,
        **(phases[0] if len(phases) == 1 else {"phases": phases}),
        "clip_norm": plan.clip_norm,
        "expected_batch_size": plan.expected_batch_size,
        "steps_planned": plan.steps,
        "steps_charged": summary.charges,
        "accountant": "pld",
        "dataset": plan.dataset,
        "run_id": summary.run_id,
        "created": summary.created,
    }


def _phase(event: StepEvent, planned: int, charged: int) -> dict[str, Any]:
    """Of one phase, what the statement of a run of one phase says by the same names."""
    return {
        "sampling": event.to_dict()["sampling"],
        "noise_multiplier": event.noise_multiplier,
        "projections": [list(pair) for pair in event.projections],
        "steps_planned": planned,
        "steps_charged": charged,
    }


def noise_facts(plan: Plan, *, adaptive: bool, coefficients: Sequence[float]) -> dict[str, Any]:
    """How much noise a step adds to each coordinate. adaptive: whether C follows noisy counts, which take a part of the
    noise multiplier. coefficients: of correlated noise; none where steps are independent."""
    sigma = plan.phases[-1][0].noise_multiplier  # the last phase trains
    if adaptive:
        sigma, _ = split_noise_multiplier(sigma)
    std = sigma * plan.clip_norm / plan.expected_batch_size
    if not coefficients:
        return {"noise_std": std}
    rows = row_norms(coefficients, plan.steps)
    bands = {"coefficients": list(coefficients), "noise_std_of_first_step": std * float(rows[0])}
    return {"noise_std": std * float(rows.max()), "bands": bands}


def versions() -> dict[str, str]:
    """Of the software that made the statement."""
    packages = ("dp-accounting", "torch", "transformers", "peft")
    return {
        "privlora": __version__,
        **{name: version_of(name) for name in packages},
        "python": platform.python_version().partition("+")[0],
    }
