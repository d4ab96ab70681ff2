"""All diagnostics of one run: which experiments a choice of figures needs, and their results as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from privlora.config import Settings
from privlora.coordinates import FactorCoordinates
from privlora.errors import ConfigError
from privlora.lab.diagnostics.bench import FactorPairs, Workbench, copied, open_workbench
from privlora.lab.diagnostics.choosing import BASELINE, chosen_figures, chosen_rows
from privlora.lab.diagnostics.gauges import (
    GAUGES,
    clipping,
    gauge_sensitivity,
    gauge_study,
    noise_energy,
    noise_ratio,
)
from privlora.lab.diagnostics.preconditioning import EPSILONS, OPTIMIZERS, preconditioning_study
from privlora.lab.diagnostics.sweep import GaugeSweep, factor_statistic, gauge_sweep
from privlora.methods import METHODS
from privlora.names import SPECTRAL_SPLIT
from privlora.pages.numbers import finite

SCHEMA_VERSION: Final = 1
_OF_GAUGES = {"noise-ratio", "gauge-sensitivity", "noise-energy", "clipping"}
_OF_PRECONDITIONERS = {"preconditioning", "gram-stress"}


@dataclass(frozen=True)
class Diagnostics:
    """facts: what was run. figures: name -> one result, or a list of them for each method."""

    public: bool
    facts: dict[str, Any]
    figures: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Every series, for JSON; numbers that JSON does not have become None."""
        about = {"schema_version": SCHEMA_VERSION, "kind": "privlora diagnostics"}
        found: dict[str, Any] = finite({**about, **asdict(self)})
        return found


def diagnose(
    settings: Settings,
    *,
    public: bool,
    figures: str | Iterable[str] | None = None,
    also: str | Iterable[str] | None = None,
    steps: int = 20,
    burn_in: int | None = None,
    seed: int = 0,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    model_name: str | None = None,
    records: Sequence[Mapping[str, Any]] | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnostics:
    """Run the experiments that ``figures`` need, ``steps`` steps each (at least 3), on the records of
    ``settings``.

    public: whether the records are public; if not, so is nothing of the result: it is computed from the records with
    seeded noise. also: further methods on factors, for gauge-sensitivity and clipping. burn_in: as in
    ``preconditioning_study``. seed: of batches, noise and draws. model_name: of the model in the facts; None: as in
    ``settings``. on_step: given the steps done and those in all.

    Raises ConfigError, DataError and what loading a model and records raises.
    """
    wanted, others = chosen_figures(figures), chosen_rows(also)
    total, done = _total_steps(wanted, len(others), steps), 0
    if burn_in is not None and not 1 <= burn_in < steps:
        raise ConfigError(f"burn_in={burn_in} leaves no step of {steps}", fix=f"give 1 to {steps - 1}")

    def advance() -> None:
        nonlocal done
        done += 1
        on_step(done, total)

    results: dict[str, Any] = {}
    with open_workbench(
        settings, model=model, tokenizer=tokenizer, records=records, seed=seed, on_step=advance
    ) as bench:
        if _OF_GAUGES & set(wanted):
            study = gauge_study(bench, steps=steps, also=others)
            results |= {"noise-ratio": noise_ratio(study), "gauge-sensitivity": gauge_sensitivity(study)}
            results |= {
                "noise-energy": noise_energy(study),
                "clipping": clipping(study, bench.plan.clip_norm),
            }
        if set(wanted) - _OF_GAUGES:
            whole = settings.adapter.init == SPECTRAL_SPLIT  # a Z of full rank, from where the paper runs
            trained = bench.start if whole else _train_baseline(bench, steps)
            if "gauge-sweep" in wanted:
                results["gauge-sweep"] = _sweep(bench, trained)
            if _OF_PRECONDITIONERS & set(wanted):
                found = preconditioning_study(bench, trained, steps=steps, burn_in=burn_in)
                results |= {"preconditioning": found, "gram-stress": found.runs}
        facts = _facts(bench, steps, model_name)
    return Diagnostics(public, facts, {name: results[name] for name in wanted})


def _train_baseline(bench: Workbench, steps: int) -> FactorPairs:
    """The factors that the baseline reaches from the bench's start: a Z that is not zero."""
    contender = bench.factor_contender(bench.start)
    sigma = bench.plan.event.noise_multiplier
    bench.run(contender, steps=steps, noise_multiplier=sigma)
    assert isinstance(contender.coordinates, FactorCoordinates)
    return copied(zip(contender.coordinates.left, contender.coordinates.right, strict=True))


def _sweep(bench: Workbench, trained: FactorPairs) -> GaugeSweep:
    """On the module of the largest S, as the paper does."""
    found = [factor_statistic(left, right, bench.scale) for left, right in trained]
    g = max(range(len(found)), key=lambda g: float(found[g].max()))
    k = int(found[g].argmax())
    left, right = (t[k] for t in trained[g])
    noise_std = bench.plan.event.noise_multiplier * bench.plan.clip_norm / bench.plan.expected_batch_size
    module = bench.adapter.groups[g].sites[k].name
    return gauge_sweep(left, right, scale=bench.scale, noise_std=noise_std, seed=bench.seed, module=module)


def _total_steps(wanted: Sequence[str], others: int, steps: int) -> int:
    """Of all runs that the figures need. others: how many methods are added. steps: of each run."""
    runs = (2 + others) * len(GAUGES) if _OF_GAUGES & set(wanted) else 0
    runs += 1 if set(wanted) - _OF_GAUGES else 0
    runs += (1 + len(OPTIMIZERS)) * len(EPSILONS) if _OF_PRECONDITIONERS & set(wanted) else 0
    return runs * steps


def _facts(bench: Workbench, steps: int, model_name: str | None) -> dict[str, Any]:
    settings, plan = bench.settings, bench.plan
    return {
        "model": model_name or settings.model.name,
        "data": settings.data.path,
        "steps": steps,
        "rank": bench.adapter.rank,
        "modules": len(bench.adapter.sites),
        "lora_scale": bench.scale,
        "init": settings.adapter.init or METHODS[BASELINE].init,
        "noise_multiplier": plan.event.noise_multiplier,
        "clip_norm": plan.clip_norm,
        "expected_batch_size": plan.expected_batch_size,
        "sample_rate": settings.privacy.q,
        "planned_steps": plan.steps,
        "planned_target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "seed": bench.seed,
    }
