from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reporting_cases import Run, make_run

from privlora.reporting.noise import noise_on_weights

STD = 0.25


def test_tangent_noise_has_its_closed_form(private_run: Run) -> None:
    coordinates = private_run.parts.coordinates
    modules = noise_on_weights(coordinates, STD)["modules"]
    assert set(modules) == {site.name for site in coordinates.adapter.sites}
    for site in coordinates.adapter.sites:
        assert modules[site.name]["closed_form"] == pytest.approx(STD * (3 * (site.m + site.n - 3)) ** 0.5)
        # 32 draws of a chi-square with >= 63 degrees of freedom: their root mean square varies by <= 1.6 %.
        assert modules[site.name]["measured"] == pytest.approx(modules[site.name]["closed_form"], rel=0.1)


def test_a_right_weight_takes_noise_off_the_part_that_turns_v(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        "prism",
        privacy={"noise_multiplier": 1.0, "insecure_noise_seed": 5},
        settings_of_method={"right_weight": 0.25},
    )
    coordinates = run.parts.coordinates
    page = (run.folder.release / "report.html").read_text()
    assert "right weight w = 0.25" in page
    assert "m + n" not in page  # the law of another weight
    modules = noise_on_weights(coordinates, STD)["modules"]
    for site in coordinates.adapter.sites:
        assert modules[site.name]["closed_form"] == pytest.approx(
            STD * (3 * (site.m + (site.n - 3) / 16)) ** 0.5
        )
        assert modules[site.name]["measured"] == pytest.approx(modules[site.name]["closed_form"], rel=0.1)


def test_factor_noise_equals_the_norm_of_dense_updates(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 1.0, "insecure_noise_seed": 5}
    coordinates = make_run(tmp_path / "run", "dp-adamw", privacy=privacy).parts.coordinates
    modules = noise_on_weights(coordinates, STD)["modules"]
    generator = torch.Generator().manual_seed(0)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    for group, left, right in zip(
        coordinates.adapter.groups, coordinates.left, coordinates.right, strict=True
    ):
        draws = [normal(left) @ right.mT + left @ normal(right).mT for _ in range(400)]
        squares = torch.stack([d.detach().square().sum(dim=(-2, -1)) for d in draws]).mean(dim=0)
        for k, site in enumerate(group.sites):
            dense = STD * coordinates.scale * float(squares[k]) ** 0.5
            assert modules[site.name]["closed_form"] == pytest.approx(dense, rel=0.05)
            assert modules[site.name]["measured"] == pytest.approx(dense, rel=0.15)


def test_noise_on_one_factor_equals_the_norm_of_dense_updates(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 1.0, "insecure_noise_seed": 5}
    coordinates = make_run(tmp_path / "run", "ffa", privacy=privacy).parts.coordinates
    modules = noise_on_weights(coordinates, STD)["modules"]
    for group, right in zip(coordinates.adapter.groups, coordinates.right, strict=True):
        for k, site in enumerate(group.sites):
            dense = torch.randn(400, site.m, right.shape[-1]) @ right[k].mT
            expected = STD * coordinates.scale * float(dense.square().sum(dim=(-2, -1)).mean()) ** 0.5
            assert modules[site.name]["closed_form"] == pytest.approx(expected, rel=0.05)
            assert modules[site.name]["measured"] == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("method", ["projected", "wishart-m2"])
def test_noise_through_a_projection_equals_the_norm_of_estimates(method: str, tmp_path: Path) -> None:
    coordinates = make_run(tmp_path / "run", method, privacy={"noise_multiplier": 1.0}).parts.coordinates
    modules = noise_on_weights(coordinates, STD)["modules"]
    estimates = [coordinates.gradients(coordinates.standard_normal(torch.randn)) for _ in range(100)]
    for g, group in enumerate(coordinates.adapter.groups):
        squares = torch.stack([e[g].square().sum(dim=(-2, -1)) for e in estimates]).mean(dim=0)
        for k, site in enumerate(group.sites):
            dense = STD * float(squares[k]) ** 0.5
            assert modules[site.name]["closed_form"] == pytest.approx(dense, rel=0.1)
            assert modules[site.name]["measured"] == pytest.approx(dense, rel=0.2)


def test_a_report_that_is_made_anew_says_the_same(private_run: Run) -> None:
    """A filed annex is known by the hash of what it says."""
    first, second = (noise_on_weights(private_run.parts.coordinates, STD) for _ in range(2))
    assert first == second
