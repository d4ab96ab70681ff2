"""Whether a space of gradients keeps its word: computed to rounding, without records and without releases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from privlora.adapters import Captured, LowRankAdapter
from privlora.auditing.gradient_canaries import GradientCanaries, draw_canaries
from privlora.coordinates import Coordinates, Vector
from privlora.errors import ConfigError, PrivacyError
from privlora.mechanisms import clipping_slack
from privlora.precision import own_context

LARGEST = 1000  # entries of a noise vector: so many are made, and a decomposition of that size


@own_context()
def check_space(coordinates: Coordinates) -> None:
    """Compare what ``coordinates`` say of themselves with what they do to random gradients, at their present state.

    to_vector is linear; standard_normal is linear in its draws, with variance 1 or more in every direction that
    gradients reach, and of the stated dimension; norms_squared is no less than what a unit adds to a release, and where
    event_layers are stated no less than the whole gradient's; so are those of ``evened``, and those of modules by
    themselves, where there are any.

    Raises PrivacyError for the first duty that is broken, ConfigError if a noise vector takes over ``LARGEST`` draws.
    """
    adapter, generator = coordinates.adapter, torch.Generator().manual_seed(0)
    noise = _noise_matrix(coordinates)
    drawn = draw_canaries(adapter, len(noise) + 10, generator, norm=1.0)
    # Those without P show what Q reaches where the left factor is small.
    units = Captured.cat([own.captured(adapter) for own in (drawn, _away(drawn, adapter, "right"))])
    vectors = _vectors(coordinates, units, torch.eye(units.units))
    lengths = vectors.norm(dim=0).clamp_min(1e-12)
    weights = torch.randn(30, units.units, generator=generator, dtype=torch.float64)
    for scale in (1e-6, 1.0, 1e6):
        off = _vectors(coordinates, units, scale * weights) / scale - vectors @ weights.mT
        error = float(off.norm() / (vectors @ weights.mT).norm())
        _hold(error < 1e-6, f"to_vector is not linear, by {error:.2g} of a sum", "let the mechanism clip")
    left, sizes, right = torch.linalg.svd(vectors / lengths, full_matrices=False)
    reached = left[:, sizes > 1e-4 * sizes[0]]  # the rest is rounding, of gradients and of bases in float32
    least = abs(float(torch.linalg.eigvalsh(reached.mT @ noise @ noise.mT @ reached)[0]))
    found = f"standard_normal has the variance {least:.3f} in a direction that gradients reach, not 1"
    _hold(least > 1 - 1e-4, found, "draw one entry for each coordinate in an orthonormal basis")
    energy = float(noise.square().sum())
    found = f"the mean square of standard_normal is {energy:.6g}, dimension is {coordinates.dimension}"
    _hold(abs(energy / coordinates.dimension - 1) < 1e-4, found, "count in dimension_of what is noised")
    unseen = (weights - weights @ right.mT @ right) / lengths
    for which, mixes in (("of full rank", weights), ("that is hardly seen", unseen)):
        p, q = ([torch.einsum("ki,iab->kab", mixes.to(t), t) for t in ts] for ts in (units.p, units.q))
        squares = mixes.abs().sum(dim=1).square() if adapter.dense_norms else None  # at least
        _check_norms(coordinates, Captured(p, q, squares), which)
    for site in (None, *range(len(adapter.sites))):
        where = "in all modules" if site is None else f"in {adapter.sites[site].name}"
        for norm in (1e-3, 1.0, 1e3):
            drawn = draw_canaries(adapter, 2, generator, norm=norm, site=site)
            beside_p, beside_q = (_away(drawn, adapter, side) for side in ("right", "left"))
            for kind, own in (("of rank one", drawn), ("with P = 0", beside_p), ("with Q = 0", beside_q)):
                _check_norms(coordinates, own.captured(adapter), f"{kind} {where}", site)


def _check_norms(coordinates: Coordinates, units: Captured, which: str, site: int | None = None) -> None:
    said, share = coordinates.norms_squared(units).cpu(), coordinates.released_share(units).cpu()
    moved = _vectors(coordinates, units, torch.eye(units.units)).square().sum(dim=0)
    due = moved / share.clamp(1e-300, 1.0)
    if coordinates.event_layers and units.dense_squares is not None:  # they are what is accounted for
        due = torch.maximum(due, units.dense_squares.cpu())
    slack = clipping_slack(coordinates.adapter, "flat")
    fix = "measure all of to_vector, in float64 where it may vanish"
    _check_enough("norms_squared", said, due, slack, which, fix)
    _check_evened(coordinates, units, which)
    _check_modules(coordinates, units, which, site)


def _check_evened(coordinates: Coordinates, units: Captured, which: str) -> None:
    """The same after step one of spectral clipping, where there is one."""
    try:
        evened = coordinates.evened(units)
    except ConfigError:
        return
    alone = torch.eye(units.units, dtype=torch.float64).to(evened.norms_squared.device)
    vectors = (coordinates.from_partial(coordinates.evened_sum(evened, one)) for one in alone)
    due = torch.stack([_flat(vector).square().sum() for vector in vectors])
    slack = clipping_slack(coordinates.adapter, "spectral")
    said = evened.norms_squared.cpu()
    _check_enough("evened.norms_squared", said, due, slack, which, "measure what evened_sum adds")


def _check_modules(coordinates: Coordinates, units: Captured, which: str, site: int | None) -> None:
    """Modules that are scaled each by itself add up to no more than their norms, where each has one.

    site: the one module in which the units are not zero, which then is scaled alone.
    """
    try:
        squares = coordinates.module_norms_squared(units)
    except ConfigError:
        return
    slack, modules = clipping_slack(coordinates.adapter, "per-module"), len(squares)
    units = _stacked(coordinates, units)
    generator = torch.Generator().manual_seed(1)
    # Each module alone, and all of them in other proportions than they came in.
    mixes = torch.eye(modules, dtype=torch.float64)
    if site is None:
        mixes = torch.cat([mixes, torch.rand(4, modules, generator=generator).double()])
    else:
        mixes = mixes[site : site + 1]
    for mix in mixes.to(squares):
        weights = mix[:, None, None] * torch.eye(units.units, dtype=torch.float64).to(squares)
        vectors = (coordinates.from_partial(coordinates.partial_sum(units, one)) for one in weights.unbind(1))
        due = torch.stack([_flat(vector).square().sum() for vector in vectors])
        said = (mix[:, None].square() * squares).sum(dim=0).cpu()
        fix = "measure what to_vector makes of each module, or leave module_norms_squared out"
        _check_enough("module_norms_squared", said, due, slack, which, fix)


def _check_enough(what: str, said: Tensor, due: Tensor, slack: float, which: str, fix: str) -> None:
    missing = due * (1 - slack) ** 2 - said
    worst = int(missing.argmax())
    found = f"{what} is {float(said[worst]):.4g} for a gradient {which}, and {float(due[worst]):.4g} is due"
    _hold(float(missing[worst]) <= 0, found, fix)


def _hold(holds: bool, what: str, fix: str) -> None:
    if not holds:
        raise PrivacyError(what, why="epsilon is stated for every possible gradient", fix=fix)


def _noise_matrix(coordinates: Coordinates) -> Tensor:
    """N (coordinates, k) float64: standard_normal is N z for the k entries z that it draws."""
    shapes: list[tuple[int, ...]] = []

    def note(shape: tuple[int, ...]) -> Tensor:
        shapes.append(shape)
        return torch.zeros(shape, dtype=torch.float64)

    def noise(z: Tensor) -> Tensor:
        parts = iter(z.split([math.prod(shape) for shape in shapes]))
        return _flat(coordinates.standard_normal(lambda shape: next(parts).reshape(shape)))

    coordinates.standard_normal(note)
    unit = torch.eye(sum(map(math.prod, shapes)), dtype=torch.float64)
    if len(unit) > LARGEST:
        raise ConfigError(f"noise takes {len(unit)} draws", fix=f"check fewer modules: {LARGEST} at most")
    matrix = torch.stack([noise(z) for z in unit], dim=1)
    error = float((noise(-3 * unit.sum(dim=0)) + 3 * matrix.sum(dim=1)).norm() / matrix.norm())
    _hold(
        error < 1e-6, f"standard_normal is not linear in its draws, by {error:.2g}", "only add and multiply"
    )
    return matrix


def _stacked(coordinates: Coordinates, units: Captured) -> Captured:
    """The same with its copies by group, which else each sum would make anew."""
    return replace(units, stacks=units.stacked(coordinates.adapter.sizes)) if units.p else units


def _vectors(coordinates: Coordinates, units: Captured, weights: Tensor) -> Tensor:
    """What mechanisms make of each weighted sum of the units, (coordinates, sums); weights: (sums, units)."""
    units = _stacked(coordinates, coordinates.measured(units))  # once, not once a sum
    sums = (coordinates.partial_sum(units, w) for w in weights)
    return torch.stack([_flat(coordinates.from_partial(each)) for each in sums], dim=1)


def _flat(vector: Vector) -> Tensor:
    return torch.cat([t.double().flatten().cpu() for parts in vector for t in parts])


def _away(canaries: GradientCanaries, adapter: LowRankAdapter, side: str) -> GradientCanaries:
    """The same against the operands of one side: P = 0 against the right ones, Q = 0 against the left ones."""
    number = ("left", "right").index(side)
    rows, operands = getattr(canaries, side), (adapter.met_at(site)[number] for site in adapter.sites)
    pairs = [(r, t.to(r)) for r, t in zip(rows, operands, strict=True)]
    moved: dict[str, Any] = {side: [r - (r @ t) @ torch.linalg.pinv(t) for r, t in pairs]}
    return replace(canaries, **moved)
