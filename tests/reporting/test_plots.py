from __future__ import annotations

import copy
from typing import Any

import pytest

from privlora.reporting.plots import by_kind, epsilon_plot, labels, loss_plot, noise_plot, spectrum_plot

pytestmark = pytest.mark.usefixtures("drawn")

PLOTS = (epsilon_plot, loss_plot, noise_plot, spectrum_plot)


@pytest.mark.parametrize("plot", PLOTS)
def test_the_same_report_gives_the_same_picture(plot: Any, report: dict[str, Any]) -> None:
    picture = plot(report)
    assert picture == plot(copy.deepcopy(report))
    assert picture.startswith('<svg role="img" aria-label="')
    assert "var(--" in picture
    assert "http" not in picture


@pytest.mark.parametrize("plot", PLOTS)
def test_nothing_to_draw_gives_no_picture(plot: Any, report: dict[str, Any]) -> None:
    empty = {**report, "epsilon_over_steps": [], "evaluation": [], "noise": None}
    zeros = [{**module, "singular_values": [0.0, None, 0.0]} for module in report["adapter"]["modules"]]
    empty["adapter"] = {**report["adapter"], "modules": zeros}
    assert plot(empty) is None


def test_noise_without_a_closed_form_is_shown_as_it_was_measured(report: dict[str, Any]) -> None:
    assert "closed form" in noise_plot(report)
    for module in report["noise"]["modules"]:
        module["closed_form"] = None
    picture = noise_plot(report)
    assert picture is not None
    assert "closed form" not in picture


def test_equal_singular_values_and_one_evaluation_are_drawn(report: dict[str, Any]) -> None:
    for module in report["adapter"]["modules"]:
        module["singular_values"] = [0.5, 0.5, 0.5]
    report["evaluation"] = report["evaluation"][:1]
    report["evaluation"][0]["standard_error"] = None
    assert spectrum_plot(report) is not None
    assert loss_plot(report) is not None


def test_modules_are_sorted_by_kind_and_layer() -> None:
    names = ["m.layers.10.a", "m.layers.2.b", "m.layers.2.a", "head"]
    assert by_kind(names) == {"a": [2, 0], "b": [1], "head": [3]}


def test_labels_are_short_and_differ() -> None:
    assert labels(["attn.q", "mlp"]) == ["attn.q", "mlp"]
    long = [f"{'x' * 40}.{name}.{'y' * 40}" for name in ("q", "k")]
    assert labels(long) == ["q", "k"]
    assert len(labels(["z" * 90])[0]) == 34
    assert labels(["a" * 50, "a" * 50 + ".b"])[1].endswith("b")
    assert labels(["bell\x07"]) == ["bell\N{REPLACEMENT CHARACTER}"]
