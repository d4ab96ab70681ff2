"""Baselines against independent references in float64: libraries on a real PEFT model, torch, and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_cases import RANK, SCALE, Problem
from tiny_models import tiny_model, with_lora
from torch import Tensor

from privlora.coordinates import FactorCoordinates
from privlora.mechanisms import Release
from privlora.methods import SPACES, make_optimizer

STEPS, TAU = 20, 0.3


def releases(coordinates: FactorCoordinates) -> Iterator[tuple[Release, float]]:
    """Random releases and learning rates, the same for ours and for the reference."""
    generator = torch.Generator().manual_seed(5)
    for step in range(1, STEPS + 1):
        vector = coordinates.standard_normal(
            lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
        )
        yield Release([tuple(0.5 * t + 0.1 for t in ts) for ts in vector], TAU, step), 0.01 * (1 + step % 3)


def problem(space: str, optimizer: str, **settings: float) -> Any:
    made: Any = Problem(space, optimizer, dtype=torch.float64)
    defaults = SPACES[space].optimizers[optimizer].settings
    made.optimizer = make_optimizer(space, optimizer, made.coordinates, {**defaults, **settings})
    return made


def check_stacks(
    ours: Any, make: Callable[[list[Tensor]], torch.optim.Optimizer], divide: float = 1.0
) -> None:
    """Against a torch optimizer on copies of the factors."""
    coordinates = ours.coordinates
    theirs = [t.clone().requires_grad_(True) for ts in coordinates.trained for t in ts]
    reference = make(theirs)
    for release, rate in releases(coordinates):
        gradients = [t for ts in release.vector for t in ts]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient / divide
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        ours.optimizer.step(release, rate)
        for mine, other in zip((t for ts in coordinates.trained for t in ts), theirs, strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("space", ["factors", "one-factor"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_adamw_is_torchs(space: str, decay: float) -> None:
    ours = problem(space, "adamw", weight_decay=decay, beta1=0.8)
    check_stacks(ours, lambda ts: torch.optim.AdamW(ts, betas=(0.8, 0.999), weight_decay=decay))


@pytest.mark.parametrize("space", ["factors", "one-factor"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_in_units_of_the_noise(space: str, momentum: float) -> None:
    ours = problem(space, "sgd", beta1=momentum)
    check_stacks(ours, lambda ts: torch.optim.SGD(ts, lr=1.0, momentum=momentum), divide=TAU)


def peft_model(coordinates: FactorCoordinates) -> tuple[Any, list[tuple[Any, int, int]]]:
    """The tiny model under peft's own LoRA with the coordinates' factors, and (layer, group, site) of each module."""
    base, targets = tiny_model(dtype=torch.float64), ["q_proj", "down_proj"]
    model = with_lora(base, RANK, lora_alpha=SCALE * RANK, target_modules=targets, lora_dropout=0.0)
    layers = []
    for g, group in enumerate(coordinates.adapter.groups):
        for k, site in enumerate(group.sites):
            layer = model.base_model.model.get_submodule(site.name)
            layer.lora_B["default"].weight.data = coordinates.left[g][k].clone()
            layer.lora_A["default"].weight.data = coordinates.right[g][k].mT.clone()
            layers.append((layer, g, k))
    return model, layers


def check_peft(ours: Any, make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Against an optimizer that peft makes for its own model; learning rates keep the ratios of its groups."""
    from peft.optimizers.lorafa import LoraFAOptimizer

    coordinates = ours.coordinates
    model, layers = peft_model(coordinates)
    reference = make(model)
    ratios = [group["lr"] for group in reference.param_groups]
    for release, rate in releases(coordinates):
        for layer, g, k in layers:
            gradients = release.vector[g]
            layer.lora_B["default"].weight.grad = gradients[0][k].clone()
            if len(gradients) == 2:
                layer.lora_A["default"].weight.grad = gradients[1][k].mT.clone()
        for group, ratio in zip(reference.param_groups, ratios, strict=True):
            group["lr"] = ratio * rate
            if isinstance(reference, LoraFAOptimizer):  # torch adds epsilon after its bias correction
                group["eps"] = 1e-8 * math.sqrt(1 - 0.999**release.step)
        reference.step()
        ours.optimizer.step(release, rate)
        for layer, g, k in layers:
            left, right = (layer.lora_B["default"].weight, layer.lora_A["default"].weight.mT)
            torch.testing.assert_close(coordinates.left[g][k], left.detach(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(coordinates.right[g][k], right.detach(), rtol=1e-6, atol=1e-6)
    return reference


@pytest.mark.parametrize("ratio", [1.0, 6.0])
def test_lora_plus_is_pefts(ratio: float) -> None:
    from peft.optimizers import create_loraplus_optimizer

    ours = problem("factors", "lora+", learning_rate_ratio=ratio)
    check_peft(
        ours, lambda m: create_loraplus_optimizer(m, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=ratio)
    )


def test_lora_plus_moves_the_left_factor_six_times_faster() -> None:
    ours = problem("factors", "lora+")
    before = [(a.clone(), b.clone()) for a, b in ours.coordinates.trained]
    release, _ = next(releases(ours.coordinates))
    ours.optimizer.step(release, 0.01)  # the first step of Adam is the sign of the gradient
    for (a0, b0), (a, b) in zip(before, ours.coordinates.trained, strict=True):
        torch.testing.assert_close((a - a0).abs(), torch.full_like(a, 0.06), rtol=1e-5, atol=0)
        torch.testing.assert_close((b - b0).abs(), torch.full_like(b, 0.01), rtol=1e-5, atol=0)


def test_riemannian_is_pefts() -> None:
    from peft.optimizers import create_riemannian_optimizer

    check_peft(
        problem("factors", "riemannian"),
        lambda m: create_riemannian_optimizer(m, torch.optim.AdamW, lr=1.0, weight_decay=0.0),
    )


def test_riemannian_preconditions_by_the_other_factors_gram_matrix() -> None:
    """The formula of Zhang and Pilanci 2024 with damping, and AdamW on it, without peft."""
    ours = problem("factors", "riemannian")
    left, right = (t.clone() for t in ours.coordinates.trained[0])
    copies = [left.clone().requires_grad_(True), right.clone().requires_grad_(True)]
    adamw = torch.optim.AdamW(copies, lr=0.0, weight_decay=0.0)
    eye = 0.01 * torch.eye(RANK, dtype=torch.float64)
    for release, rate in releases(ours.coordinates):
        a, b = (t.detach() for t in copies)
        copies[0].grad = release.vector[0][0] @ torch.linalg.inv(b.mT @ b + eye)
        copies[1].grad = release.vector[0][1] @ torch.linalg.inv(a.mT @ a + eye)
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        ours.optimizer.step(release, rate)
    for mine, other in zip(ours.coordinates.trained[0], copies, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-6, atol=1e-6)


def test_lora_fa_is_pefts(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.optimizers import create_lorafa_optimizer

    # peft multiplies in bfloat16 where it can; the rule is compared without that rounding.
    monkeypatch.setattr("peft.optimizers.lorafa.is_bf16_available", lambda: False)
    check_peft(
        problem("one-factor", "lora-fa"),
        lambda m: create_lorafa_optimizer(m, r=RANK, lora_alpha=int(SCALE * RANK), lr=1.0),
    )


def test_lora_fa_takes_the_nearest_reachable_direction_to_the_dense_gradient() -> None:
    """s (its left gradient) right^T is the dense gradient projected on right's row space."""
    ours = problem("one-factor", "lora-fa")
    generator = torch.Generator().manual_seed(0)
    right = ours.coordinates.right[0]
    g = torch.randn(len(right), 16, right.shape[1], generator=generator, dtype=torch.float64)
    left_gradient = SCALE * g @ right
    others = [tuple(torch.zeros_like(t) for t in ts) for ts in ours.coordinates.trained[1:]]
    (mapped,) = ours.optimizer._gradients(Release([(left_gradient,), *others], 0.0, 1))[0]
    projector = right @ torch.linalg.pinv(right)
    torch.testing.assert_close(SCALE * mapped @ right.mT, g @ projector, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_lamb_is_that_of_pytorch_optimizer(decay: float) -> None:
    from pytorch_optimizer import Lamb

    ours = problem("factors", "lamb", weight_decay=decay)
    theirs = [
        (part, g, k, t[k].clone().requires_grad_(True))
        for g, ts in enumerate(ours.coordinates.trained)
        for part, t in enumerate(ts)
        for k in range(len(t))
    ]
    reference = Lamb([t for *_, t in theirs], lr=1.0, weight_decay=decay, adam_debias=True)
    for release, rate in releases(ours.coordinates):
        for part, g, k, parameter in theirs:
            parameter.grad = release.vector[g][part][k].clone()
        reference.param_groups[0]["lr"] = rate
        reference.step()
        ours.optimizer.step(release, rate)
        for part, g, k, parameter in theirs:
            mine = ours.coordinates.trained[g][part][k]
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_lamb_is_the_papers_formula() -> None:
    """You et al. 2020, Algorithm 2 without bias correction and decay: one matrix, in numpy."""
    ours = problem("factors", "lamb")
    x = ours.coordinates.left[0][0].numpy().copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    for release, rate in releases(ours.coordinates):
        g = release.vector[0][0][0].numpy()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        r = m / (np.sqrt(v) + 1e-6)
        x = x - rate * min(np.linalg.norm(x), 10.0) / (np.linalg.norm(r) + 1e-6) * r
        ours.optimizer.step(release, rate)
        np.testing.assert_allclose(ours.coordinates.left[0][0].numpy(), x, rtol=1e-6, atol=1e-6)


def adam_loop(ours: Any, noise: float, floor: float, epsilon: float) -> None:
    """Tang et al. 2024, Algorithm 1, entry by entry in numpy."""
    coordinates = ours.coordinates
    theta = [t.numpy().copy() for ts in coordinates.trained for t in ts]
    m, v = [np.zeros_like(t) for t in theta], [np.zeros_like(t) for t in theta]
    for release, rate in releases(coordinates):
        release = Release(release.vector, noise, release.step)
        t = release.step
        for i, gradient in enumerate(g.numpy() for gs in release.vector for g in gs):
            m[i] = 0.9 * m[i] + 0.1 * gradient
            v[i] = 0.99 * v[i] + 0.01 * gradient**2
            m_hat, v_hat = m[i] / (1 - 0.9**t), v[i] / (1 - 0.99**t)
            theta[i] = theta[i] - rate * m_hat / np.sqrt(
                np.maximum(v_hat - noise**2, max(floor * noise**2, epsilon))
            )
        ours.optimizer.step(release, rate)
    for mine, other in zip((t for ts in coordinates.trained for t in ts), theta, strict=True):
        np.testing.assert_allclose(mine.numpy(), other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("floor", [0.1, 1.0])
def test_adambc_is_the_papers_formula(noise: float, floor: float) -> None:
    adam_loop(problem("factors", "adambc", beta2=0.99, floor=floor), noise, floor, 1e-16)


def test_adambc_without_noise_is_adam() -> None:
    ours = problem("factors", "adambc")
    adamw = problem("factors", "adamw")
    for release, rate in releases(ours.coordinates):
        for one in (ours, adamw):
            one.optimizer.step(Release(release.vector, 0.0, release.step), rate)
    for mine, other in zip(ours.coordinates.left, adamw.coordinates.left, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_adambc_takes_the_noise_out_of_the_second_moment() -> None:
    """Gradients of constant size under noise twice as large: steps become those of the clean sign, as without noise."""
    ours = problem("factors", "adambc", beta1=0.999, beta2=0.999, floor=0.1)
    start = [t.clone() for t in ours.coordinates.left]
    generator = torch.Generator().manual_seed(1)
    steps = 3000
    for step in range(1, steps + 1):
        vector = [
            tuple(0.1 + 0.2 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in ts)
            for ts in ours.coordinates.trained
        ]
        ours.optimizer.step(Release(vector, 0.2, step), 0.0 if step < steps else 1.0)
    moved = torch.cat([(a - b).flatten() for a, b in zip(start, ours.coordinates.left, strict=True)])
    assert float(moved.mean()) == pytest.approx(1.0, abs=0.1)
    # DP-Adam divides by the noise as well: sqrt(0.1^2 + 0.2^2) makes it 0.45.
