"""Private steps of linear regression for many clients at once, on the tensors that aggregation rules hand out.

Record i asks that W x_i be y_i, with loss |W x_i - y_i|^2 / 2. Its gradient with respect to W is e x^T, e = W x - y, of
rank one, so what clipping needs is known in closed form, and no gradient of one record is ever made. K clients train
side by side in float64; the data are generated and public, so noise comes from a seeded generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from privlora.geometry.fixed_rank import Point, Tangent, standard_normal_tangent

State = dict[str, Tensor]
Trained = Literal["both", "left", "right", "tangent"]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """count: steps between two messages. clip_norm: C, inf for none. noise: standard deviation over clip_norm of what
    is added to a sum; 0 without privacy. learning_rate: in units of the mean gradient.
    """

    count: int
    sample_rate: float
    clip_norm: float
    noise: float
    learning_rate: float


@dataclass(frozen=True)
class Batch:
    """x (K, b, n) and y (K, b, m), padded; present (K, b) is 1 for records and 0 for padding."""

    x: Tensor
    y: Tensor
    present: Tensor


def draw(x: Tensor, y: Tensor, sample_rate: float, generator: torch.Generator) -> Batch:
    """A Poisson sample of each client's records, x (K, N, n) and y (K, N, m), padded to the largest one."""
    joins = torch.rand(x.shape[:2], generator=generator) < sample_rate
    size = max(int(joins.sum(dim=1).max()), 1)
    present, chosen = joins.to(x).topk(size, dim=1)
    rows = chosen[:, :, None]
    return Batch(x.take_along_dim(rows, 1), y.take_along_dim(rows, 1), present)


def train(
    state: State, trained: Trained, x: Tensor, y: Tensor, steps: Steps, generator: torch.Generator
) -> State:
    """``steps.count`` private steps of every client from ``state``.

    state: "left" (K, m, r) and "right" (K, n, r) with W = left right^T; or, for "tangent", "U", "S" (K, r), "V" of a
    base that stays, where what is trained starts at zero. Returns where training ended, of the same names; for
    "tangent" "M", "Up", "Vp".
    """
    if trained == "tangent":
        base = Point(state["U"], state["S"], state["V"])
        zero = Tangent.zero(base)
        moving = {"M": zero.M, "Up": zero.Up, "Vp": zero.Vp}
        fixed: State = dict(state)
    else:
        sides = ("left", "right") if trained == "both" else (trained,)
        moving = {side: state[side] for side in sides}
        fixed = {side: value for side, value in state.items() if side not in sides}
    expected = steps.sample_rate * x.shape[1]
    for _ in range(steps.count):
        batch = draw(x, y, steps.sample_rate, generator)
        total = clipped_sum(moving, fixed, batch, steps.clip_norm)
        noise = _noise(total, fixed, generator) if steps.noise > 0 else {}
        for name, value in moving.items():
            release = total[name]
            if noise:
                release = release + steps.noise * steps.clip_norm * noise[name]
            moving[name] = value - steps.learning_rate / expected * release
    return moving if trained == "tangent" else fixed | moving


def clipped_sum(
    moving: Mapping[str, Tensor], fixed: Mapping[str, Tensor], batch: Batch, clip_norm: float
) -> State:
    """Each client's sum of gradients with respect to ``moving``, of each record clipped to ``clip_norm`` in all."""
    if "M" in moving:
        return _tangent_sum(moving, fixed, batch, clip_norm)
    left, right = (moving[side] if side in moving else fixed[side] for side in ("left", "right"))
    x_right = batch.x @ right
    error = x_right @ left.mT - batch.y
    error_left = error @ left
    squared = torch.zeros_like(batch.present)
    if "left" in moving:
        squared = squared + _squared(error) * _squared(x_right)
    if "right" in moving:
        squared = squared + _squared(batch.x) * _squared(error_left)
    weights = _weights(squared, batch.present, clip_norm)
    sums = {}
    if "left" in moving:
        sums["left"] = (error * weights).mT @ x_right
    if "right" in moving:
        sums["right"] = (batch.x * weights).mT @ error_left
    return sums


def _tangent_sum(
    moving: Mapping[str, Tensor], fixed: Mapping[str, Tensor], batch: Batch, clip_norm: float
) -> State:
    """Of gradients at W = U S V^T + U M V^T + Up V^T + U Vp^T, projected on the tangents at the base U S V^T."""
    U, S, V = fixed["U"], fixed["S"], fixed["V"]
    x_V = batch.x @ V
    core = torch.diag_embed(S) + moving["M"]
    error = (x_V @ core.mT + batch.x @ moving["Vp"]) @ U.mT + x_V @ moving["Up"].mT - batch.y
    error_U = error @ U
    # |U^T e x^T V|^2 + |(1 - U U^T) e x^T V|^2 + |(1 - V V^T) x e^T U|^2
    squared = _squared(error) * _squared(x_V) + (_squared(batch.x) - _squared(x_V)) * _squared(error_U)
    weights = _weights(squared, batch.present, clip_norm)
    left, right = (error * weights).mT @ x_V, (batch.x * weights).mT @ error_U
    M = U.mT @ left
    return {"M": M, "Up": left - U @ M, "Vp": right - V @ (V.mT @ right)}


def _squared(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=-1)


def _weights(squared: Tensor, present: Tensor, clip_norm: float) -> Tensor:
    """(K, b, 1): what each record's gradient is multiplied by."""
    factors = (clip_norm / squared.clamp_min(1e-300).sqrt()).clamp_max(1.0)
    return (factors * present)[:, :, None]


def _noise(total: State, fixed: Mapping[str, Tensor], generator: torch.Generator) -> State:
    """Standard normal in the coordinates of ``total``; of tangents, in the tangent space."""

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if "M" not in total:
        return {name: normal(tuple(value.shape)) for name, value in total.items()}
    drawn = standard_normal_tangent(Point(fixed["U"], fixed["S"], fixed["V"]), normal)
    return {"M": drawn.M, "Up": drawn.Up, "Vp": drawn.Vp}
