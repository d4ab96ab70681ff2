"""Federated regression: its clipped sums are those of plain gradients, and its rules come where theory puts them."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

STUDY = Path(__file__).parents[2] / "benchmarks" / "federated"
K, B, M, N, R = 2, 7, 6, 5, 2


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STUDY)


@pytest.fixture
def local() -> Any:
    return importlib.import_module("local_steps")


@pytest.fixture
def regression() -> Any:
    return importlib.import_module("regression")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(rows: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(K, rows, R, seed=seed))[0]


def weight(moving: dict[str, Tensor], fixed: dict[str, Tensor], k: int) -> Tensor:
    parts = {name: value[k] for name, value in (fixed | moving).items()}
    if "left" in parts:
        return parts["left"] @ parts["right"].mT
    U, V = parts["U"], parts["V"]
    return U @ (parts["S"].diag() + parts["M"]) @ V.mT + parts["Up"] @ V.mT + U @ parts["Vp"].mT


def cases() -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    left, right = normal(K, M, R, seed=1), normal(K, N, R, seed=2)
    base = {"U": orthonormal(M, 3), "S": normal(K, R, seed=4).abs(), "V": orthonormal(N, 5)}
    off_U, off_V = normal(K, M, R, seed=6), normal(K, N, R, seed=7)
    tangent = {
        "M": normal(K, R, R, seed=8),
        "Up": off_U - base["U"] @ base["U"].mT @ off_U,
        "Vp": off_V - base["V"] @ base["V"].mT @ off_V,
    }
    return {
        "both": ({"left": left, "right": right}, {}),
        "left": ({"left": left}, {"right": right}),
        "right": ({"right": right}, {"left": left}),
        "tangent": (tangent, base),
    }


@pytest.mark.parametrize("trained", ["both", "left", "right", "tangent"])
@pytest.mark.parametrize("clip_norm", [math.inf, 9.0])
def test_clipped_sums_are_those_of_each_records_gradient(local: Any, trained: str, clip_norm: float) -> None:
    moving, fixed = cases()[trained]
    x, y = normal(K, B, N, seed=9), normal(K, B, M, seed=10)
    present = torch.ones(K, B, dtype=torch.float64)
    present[1, 4:] = 0
    sums = local.clipped_sum(moving, fixed, local.Batch(x, y, present), clip_norm)
    clipped = []
    for k in range(K):
        total = {name: torch.zeros_like(value[k]) for name, value in moving.items()}
        for i in range(B if k == 0 else 4):
            W = weight(moving, fixed, k)
            G = torch.outer(W @ x[k, i] - y[k, i], x[k, i])
            gradient = of_parts(G, trained, {n: v[k] for n, v in (fixed | moving).items()})
            norm = math.sqrt(sum(float(part.square().sum()) for part in gradient.values()))
            clipped.append(norm > clip_norm)
            for name, part in gradient.items():
                total[name] += part * min(1.0, clip_norm / norm)
        for name, value in total.items():
            torch.testing.assert_close(sums[name][k], value)
    assert {True, False} == set(clipped) if math.isfinite(clip_norm) else not any(clipped)


def of_parts(G: Tensor, trained: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of one record with respect to what is trained, from that of W."""
    if trained == "tangent":
        U, V = parts["U"], parts["V"]
        core = U.mT @ G @ V
        return {"M": core, "Up": G @ V - U @ core, "Vp": G.mT @ U - V @ core.mT}
    found = {"left": G @ parts["right"], "right": G.mT @ parts["left"]}
    return {side: found[side] for side in (("left", "right") if trained == "both" else (trained,))}


def test_noise_is_of_the_stated_size_and_tangent(local: Any) -> None:
    _, base = cases()["tangent"]
    count = 4000
    state = {name: value[:1].expand(count, *value.shape[1:]) for name, value in base.items()}
    x, y = torch.zeros(count, 4, N, dtype=torch.float64), torch.zeros(count, 4, M, dtype=torch.float64)
    steps = local.Steps(count=1, sample_rate=0.5, clip_norm=3.0, noise=2.0, learning_rate=0.1)
    end = local.train(state, "tangent", x, y, steps, torch.Generator().manual_seed(0))
    energy = sum(part.square().flatten(1).sum(dim=1) for part in end.values())
    tau, dimension = 0.1 * 3.0 * 2.0 / (0.5 * 4), R * (M + N - R)
    assert float(energy.mean()) == pytest.approx(tau**2 * dimension, rel=6 * math.sqrt(2 / dimension / count))
    assert float((state["U"].mT @ end["Up"]).abs().max()) < 1e-12
    assert float((state["V"].mT @ end["Vp"]).abs().max()) < 1e-12


def test_samples_hold_each_record_at_most_once_and_at_the_rate(local: Any) -> None:
    x = torch.arange(1, 301, dtype=torch.float64).reshape(1, 300, 1).expand(3, -1, -1)
    generator, total, rounds = torch.Generator().manual_seed(0), 0, 60
    for _ in range(rounds):
        batch = local.draw(x, x, 0.1, generator)
        for k in range(3):
            found = batch.x[k, batch.present[k] == 1, 0].tolist()
            assert len(set(found)) == len(found)
            total += len(found)
    trials = 300 * 3 * rounds
    assert abs(total - 0.1 * trials) < 6 * math.sqrt(0.09 * trials)


def small(regression: Any, **more: Any) -> Any:
    return regression.Problem(size=10, rank=2, clients=3, records=150, label_noise=0.05, **more)


def error(regression: Any, method: Any, problem: Any, noise: float = 0.0) -> float:
    steps = regression.Steps(
        count=method.local_steps,
        sample_rate=0.2,
        clip_norm=2.0 if noise else math.inf,
        noise=noise,
        learning_rate=0.1,
    )
    return regression.run(method, regression.make_data(problem, 0), steps, 0)


@pytest.mark.parametrize("rule", ["fedavg", "fedask", "tan", "alt"])
def test_two_sided_training_finds_the_matrix(regression: Any, rule: str) -> None:
    assert error(regression, regression.Method(rule), small(regression)) < 0.1


@pytest.mark.parametrize("rule", ["ffa", "fedsvd", "fedask"])
def test_one_sided_training_finds_it_where_the_start_has_its_rows(regression: Any, rule: str) -> None:
    # A little noise makes FedASK train as it does in private runs.
    method = regression.Method(rule)
    assert error(regression, method, small(regression, inside=True), noise=1e-3) < 0.1
    data = regression.make_data(small(regression), 0)
    reached = data.target @ data.right @ data.right.mT
    least = float((data.target - reached).norm() / data.target.norm())
    assert error(regression, method, small(regression), noise=1e-3) > least > 0.5


def test_noise_together_is_less_than_apart(regression: Any) -> None:
    together = regression.Method("tan", together=True, rounds=120, local_steps=1)
    apart = regression.Method("tan", rounds=24)
    assert error(regression, together, small(regression), noise=8.0) < 0.8 * error(
        regression, apart, small(regression), noise=8.0
    )


def test_divergence_is_an_error_of_ten(regression: Any) -> None:
    steps = regression.Steps(count=5, sample_rate=0.2, clip_norm=math.inf, noise=0.0, learning_rate=1e4)
    data = regression.make_data(small(regression), 0)
    assert regression.run(regression.Method("tan"), data, steps, 0) == 10.0


def test_noise_is_calibrated_to_the_steps_that_are_taken(
    regression: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrated(sampling: Any, steps: int, epsilon: float, delta: float) -> Any:
        return SimpleNamespace(noise_multiplier=(sampling.sample_rate, steps, epsilon, delta))

    monkeypatch.setattr(regression, "calibrate_noise_multiplier", calibrated)
    for name, steps in (("tan", 200), ("joint", 200), ("joint, 40 rounds", 40)):
        assert regression.noise_multiplier(3.0, regression.METHODS[name]) == (0.1, steps, 3.0, 1e-4)
    assert regression.noise_multiplier(math.inf, regression.METHODS["tan"]) == 0.0


def test_the_data_are_as_stated(regression: Any) -> None:
    plain, shifted, inside = (
        regression.make_data(regression.Problem(**more), 0) for more in ({}, {"shift": 2.0}, {"inside": True})
    )
    for data in (plain, shifted, inside):
        torch.testing.assert_close(
            torch.linalg.svdvals(data.target)[:5], torch.tensor([2.0] * 4 + [0.0]).double()
        )
        torch.testing.assert_close(data.right.mT @ data.right, torch.eye(4).double())
        noise = data.y - data.x @ data.target.mT
        assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    means = shifted.x.mean(dim=1) - plain.x.mean(dim=1)
    torch.testing.assert_close(means.norm(dim=-1), torch.full((10,), 2.0).double())
    assert float((inside.target @ inside.right).norm()) == pytest.approx(4.0)
    assert float((plain.target @ plain.right).norm()) < 2.0


def test_tuning_starts_where_a_neighbouring_cell_ended(
    regression: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(regression, "noise_multiplier", lambda *_: 1.0)
    monkeypatch.setattr(regression, "run", lambda method, data, steps, seed: tried.append(steps) or 0.5)
    near = {"learning_rate": 0.75, "clip_norm": 3.0}
    found = regression.cell(regression.METHODS["alt"], regression.Column(1.0, small(regression)), near)
    assert (tried[0].learning_rate, tried[0].clip_norm) == (0.75, 3.0)
    assert (found["learning_rate"], found["clip_norm"], found["trials"]) == (0.75, 3.0, 7)


def test_tuning_walks_to_the_least_error(regression: Any) -> None:
    first = regression.Steps(count=1, sample_rate=0.1, clip_norm=4.0, noise=1.0, learning_rate=0.25)

    def bowl(steps: Any) -> float:
        rate, clip = math.log2(steps.learning_rate), math.log2(steps.clip_norm)
        return 10.0 if rate > -1 else (rate + 6) ** 2 + (clip + 1) ** 2 + (rate + clip + 7) ** 2

    best, trials = regression.tuned(bowl, first)
    assert (best.learning_rate, best.clip_norm) == (2.0**-6, 0.5)
    assert trials <= 40


def test_the_script_writes_what_it_shows(
    regression: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = regression.Problem(size=6, rank=1, clients=2, records=40)
    monkeypatch.setattr(regression, "COLUMNS", {"no DP": regression.Column(math.inf, tiny)})
    monkeypatch.setattr(
        regression,
        "METHODS",
        {"alt": regression.Method("alt", rounds=3), "tan": regression.Method("tan", rounds=3)},
    )
    out = tmp_path / "new" / "result.json"
    monkeypatch.setattr(sys, "argv", ["regression", "--out", str(out)])
    regression.main()
    result = json.loads(out.read_text())
    assert [row["method"] for row in result["rows"]] == ["alt", "tan"]
    assert result["machine"]["versions"]["privlora"]
    assert all(len(row["errors"]) == 3 and row["clip_norm"] is None for row in result["rows"])
    shown = capsys.readouterr().out
    assert f"| tan | {result['rows'][1]['error']:.3f} ± " in shown
