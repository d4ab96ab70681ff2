"""What adaptive preconditioning does to the noise (PRISM Eq. 10 and Figures 4 and 14-20).

P_t holds the second moments after t releases, and is applied to the noise of release t + 1, which it has not seen: the
norms say what the operator P_t^(-1/2) does, without the correlation of a preconditioner with the noise that shaped it.
All norms are of the effect on Z, of all modules together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from privlora.accounting.calibration import calibrate_noise_multiplier
from privlora.coordinates import FactorCoordinates, TangentCoordinates, Vector
from privlora.geometry.fixed_rank import Point, Tangent, factors
from privlora.lab.diagnostics.bench import Contender, FactorPairs, Workbench
from privlora.lab.diagnostics.sweep import energy, gram_stress, product_energy
from privlora.optimizers import FactorAdamW
from privlora.optimizers.paper import PrismPaper
from privlora.optimizers.tangent import TangentMomentum

EPSILONS, STEPWISE = (1.5, 3.0, 6.0, 12.0), 3.0
OPTIMIZERS: Final = ("rank", "scalar", "paper")
_ADAM_EPSILON = 1e-8  # torch's default, which FactorAdamW keeps


@dataclass(frozen=True)
class Preconditioned:
    """One run; values at steps 2, 3, … (before the first release there is no P).

    raw: ||xi||_F. preconditioned: ||P^(-1/2) xi||_F. amplification: the second over the first. aggressiveness: largest
    factor by which P^(-1/2) scales a coordinate. stress: largest ||G^(-1/2)||_2 over modules of the Gram matrices that
    the method's state rests on, which are those of A and B for factor methods and for `paper` (balanced factors), and
    of U and V otherwise. bound: of `paper`, what Theorem 3.5 bounds its scaling by, the floor^(-1/2).
    """

    method: str
    noise_multiplier: float
    steps: list[int] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    preconditioned: list[float] = field(default_factory=list)
    amplification: list[float] = field(default_factory=list)
    aggressiveness: list[float] = field(default_factory=list)
    stress: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SigmaCurve:
    """Means over the steps after the burn-in, one value for each noise multiplier (Figures 4, 14 and 15)."""

    method: str
    noise_multipliers: list[float]
    raw: list[float]
    preconditioned: list[float]
    amplification: list[float]


@dataclass(frozen=True)
class PreconditioningStudy:
    """curves: one for each method. runs: those at ``stepwise_epsilon``, step by step (Figures 16-20)."""

    epsilons: list[float]
    burn_in: int
    curves: list[SigmaCurve]
    stepwise_epsilon: float
    stepwise_noise_multiplier: float
    runs: list[Preconditioned]


def preconditioning_study(
    bench: Workbench,
    start: FactorPairs,
    *,
    steps: int,
    epsilons: tuple[float, ...] = EPSILONS,
    burn_in: int | None = None,
) -> PreconditioningStudy:
    """Run the baseline and PRISM's optimizers from ``start`` at the noise that each epsilon of the run's plan needs.

    start: factors of full rank (`paper` cannot leave zero). epsilons: STEPWISE among them. burn_in: steps that
    means leave out; None: a third, at least one. Early on, the mean of 1 over a root of few squares has heavy tails.
    """
    plan = bench.plan
    sigmas = [
        calibrate_noise_multiplier(
            plan.event.sampling, plan.steps, epsilon, plan.delta, adjacency=plan.adjacency
        ).noise_multiplier
        for epsilon in epsilons
    ]
    burn_in = max(1, steps // 3) if burn_in is None else burn_in
    curves, stepwise_runs = [], []
    for optimizer in (None, *OPTIMIZERS):
        runs = []
        for sigma in sigmas:
            if optimizer is None:
                contender = bench.factor_contender(start)
            else:
                contender = bench.tangent_contender(start, optimizer)
            found = Preconditioned(contender.name, sigma)
            bench.run(contender, steps=steps, noise_multiplier=sigma, watcher=_watcher(found))
            runs.append(found)
        curves.append(_curve(runs, burn_in))
        stepwise_runs.append(runs[epsilons.index(STEPWISE)])
    sigma = sigmas[epsilons.index(STEPWISE)]
    return PreconditioningStudy(list(epsilons), burn_in, curves, STEPWISE, sigma, stepwise_runs)


def apply_preconditioner(contender: Contender, vector: Vector, noise_std: float) -> Vector:
    """P^(-1/2) ``vector`` with the contender's second moments as they are; linear in ``vector``.

    `paper` returns its factor directions (U_A, U_B) in balanced factors; the others, their own coordinates.
    """
    optimizer = contender.optimizer
    if isinstance(optimizer, FactorAdamW):
        scales = _adam_scales(contender)
        pairs = zip(vector, scales, strict=True)
        return [tuple(t * s for t, s in zip(parts, scale, strict=True)) for parts, scale in pairs]
    assert isinstance(contender.coordinates, TangentCoordinates)
    points = contender.coordinates.points
    if isinstance(optimizer, PrismPaper):
        roots = _paper_roots(contender, noise_std)
        applied: Vector = []
        for point, parts, (right, left) in zip(points, vector, roots, strict=True):
            da, db = optimizer.lift(point, Tangent(*parts))
            applied.append((da @ right, db @ left))
        return applied
    assert isinstance(optimizer, TangentMomentum)
    directions = optimizer._directions([Tangent(*parts) for parts in vector], noise_std)
    return [(d.M, d.Up, d.Vp) for d in directions]


def aggressiveness(contender: Contender, noise_std: float) -> float:
    """Largest singular value of P^(-1/2) over all modules, in the coordinates that it acts on."""
    optimizer = contender.optimizer
    if isinstance(optimizer, FactorAdamW):
        return max(float(t.max()) for scales in _adam_scales(contender) for t in scales)
    assert isinstance(contender.coordinates, TangentCoordinates)
    if isinstance(optimizer, PrismPaper):
        matrices = [root for roots in _paper_roots(contender, noise_std) for root in roots]
    else:
        # Up and Vp are multiplied from the right by r x r matrices, which unit rows read off; M, by their roots.
        probes: Vector = [
            (torch.zeros_like(_eye(p, p.U)[:, : p.rank]), _eye(p, p.U), _eye(p, p.V))
            for p in contender.coordinates.points
        ]
        r = contender.coordinates.points[0].rank
        found = apply_preconditioner(contender, probes, noise_std)
        matrices = [side[:, :r] for _, up, vp in found for side in (up, vp)]
    return max(float(torch.linalg.matrix_norm(m.double(), ord=2).max()) for m in matrices)


def effect_energy(contender: Contender, vector: Vector) -> float:
    """||first-order effect of ``vector`` on Z||_F^2 over all modules; for `paper`, of factor directions."""
    coordinates = contender.coordinates
    if isinstance(coordinates, FactorCoordinates):
        pairs = list(zip(coordinates.left, coordinates.right, strict=True))
        scale = coordinates.scale
    elif isinstance(contender.optimizer, PrismPaper):
        assert isinstance(coordinates, TangentCoordinates)
        pairs, scale = [factors(point) for point in coordinates.points], 1.0
    else:
        return energy(vector)
    total = 0.0
    for (a, b), (da, db) in zip(pairs, vector, strict=True):
        total += float(product_energy(torch.cat([da, a], dim=-1), torch.cat([b, db], dim=-1)).sum())
    return scale**2 * total


def stress(contender: Contender) -> float:
    """Largest ||G^(-1/2)||_2 over modules; see `Preconditioned`."""
    coordinates = contender.coordinates
    if isinstance(coordinates, TangentCoordinates) and not isinstance(contender.optimizer, PrismPaper):
        sides = [(point.U, point.V) for point in coordinates.points]
    else:
        sides = coordinates.factors()
    return max(float(gram_stress(side).max()) for pair in sides for side in pair)


def _watcher(found: Preconditioned) -> Callable[[Contender, Vector, float], None]:
    step = 0

    @torch.no_grad()
    def watch(contender: Contender, noise: Vector, noise_std: float) -> None:
        nonlocal step
        step += 1
        if step == 1:
            return
        paper = isinstance(contender.optimizer, PrismPaper)  # whose own vectors are factor directions
        raw = (energy(noise) if paper else effect_energy(contender, noise)) ** 0.5
        preconditioned = effect_energy(contender, apply_preconditioner(contender, noise, noise_std)) ** 0.5
        found.steps.append(step)
        found.raw.append(raw)
        found.preconditioned.append(preconditioned)
        found.amplification.append(preconditioned / raw)
        found.aggressiveness.append(aggressiveness(contender, noise_std))
        found.stress.append(stress(contender))
        if paper:
            floors = [
                noise_std**2 * (1 / p.S).mean(dim=-1) for p in contender.coordinates.as_points()
            ]  # Eq. 26
            found.bound.append(max(float(floor.rsqrt().max()) for floor in floors))

    return watch


def _curve(runs: list[Preconditioned], burn_in: int) -> SigmaCurve:
    def means(name: str) -> list[float]:
        rows = [[v for t, v in zip(r.steps, getattr(r, name), strict=True) if t > burn_in] for r in runs]
        return [sum(row) / len(row) for row in rows]

    sigmas = [run.noise_multiplier for run in runs]
    return SigmaCurve(runs[0].method, sigmas, means("raw"), means("preconditioned"), means("amplification"))


def _adam_scales(contender: Contender) -> Vector:
    """1 / (sqrt(v / (1 - beta2^t)) + 1e-8) for each group's left and right, which the state holds in this order."""
    state = contender.optimizer.state_dict()
    beta2 = contender.hyper.settings["beta2"]

    def scale(i: int) -> Tensor:
        moment = state[f"{i}.exp_avg_sq"] / (1 - beta2 ** float(state[f"{i}.step"]))
        return 1.0 / (moment.sqrt() + _ADAM_EPSILON)

    return [(scale(2 * g), scale(2 * g + 1)) for g in range(len(contender.coordinates.factors()))]


def _paper_roots(contender: Contender, noise_std: float) -> list[tuple[Tensor, Tensor]]:
    """(V_A + lambda_A I)^(-1/2) and (V_B + lambda_B I)^(-1/2) of Eq. 25-26, (L, r, r) each."""
    optimizer, coordinates = contender.optimizer, contender.coordinates
    assert isinstance(optimizer, PrismPaper)
    assert isinstance(coordinates, TangentCoordinates)
    return [optimizer.inverse_roots(g, point, noise_std) for g, point in enumerate(coordinates.points)]


def _eye(point: Point, side: Tensor) -> Tensor:
    """(L, rows of side, r) with ones on the diagonal."""
    rows = side.shape[-2]
    return torch.eye(rows, point.rank, dtype=side.dtype, device=side.device).expand(
        len(side), rows, point.rank
    )
