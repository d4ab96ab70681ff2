"""What the fair table rests on: each member of a team moves at its own rate, and choices count in the errors."""

from __future__ import annotations

import importlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from privlora.adapters import LowRankAdapter
from privlora.data.examples import Example, Examples
from privlora.mechanisms import Release
from privlora.methods import build, find_method, make_optimizer
from privlora.stacked.adapter import StackedAdapter

ROOM = Path(__file__).parents[2] / "benchmarks" / "fair"


@pytest.fixture
def fair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOM)
    return importlib.import_module


METHODS = ["prism", "dp-sgd", "dp-adamw", "dp-adambc", "lora+", "lora-rite", "ffa", "lora-fa", "lamb"]


@pytest.mark.parametrize("method", METHODS)
def test_each_adapter_of_a_team_moves_at_its_own_rate(fair: Any, method: str) -> None:
    rates, row = (0.03, 0.003), find_method(method)
    model = tiny_model()

    def fresh(adapter: LowRankAdapter) -> tuple[Any, Any]:
        return build(row, adapter, dtype=torch.float64)

    def made() -> LowRankAdapter:
        return LowRankAdapter(model, rank=2, target_modules="all-linear")

    adapter = made()
    joint = StackedAdapter.like(adapter, len(rates), torch.arange(len(rates)))
    together = fresh(adapter)[0].stacked(joint, len(rates))
    rule = make_optimizer(row.space, row.optimizer, together, row.optimizer_settings(row.optimizer, {}))
    sizes = [len(group.sites) for group in adapter.groups]
    by_group = [torch.tensor(rates, dtype=torch.float64).repeat_interleave(size) for size in sizes]
    rated = fair("teams").Rated(rule, by_group)
    apart = [fresh(made()) for _ in rates]
    for step in (1, 2, 3):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        vectors = [coordinates.standard_normal(draw) for coordinates, _ in apart]
        joined = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*vectors, strict=True)]
        rated.step(Release(joined, 0.5, step), 1.0)
        for (_, optimizer), vector, rate in zip(apart, vectors, rates, strict=True):
            optimizer.step(Release(vector, 0.5, step), rate)
    for k, (coordinates, _) in enumerate(apart):
        found = zip(together.factors(), coordinates.factors(), sizes, strict=True)
        for (a, b), (alone_a, alone_b), size in found:
            mine, expected = slice(k * size, (k + 1) * size), alone_a @ alone_b.mT
            assert expected.abs().max() > 1e-5
            torch.testing.assert_close(a[mine] @ b[mine].mT, expected, rtol=1e-6, atol=1e-9)


def test_records_are_repeated_in_their_order(fair: Any) -> None:
    records = Examples(
        (Example(np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32)) for n in (3, 1, 4)),
        pad_token_id=0,
    )
    copies = fair("teams").tiled(records, 3)
    assert len(copies) == 9
    for k, example in enumerate(copies):
        assert np.array_equal(example.input_ids, records[k % 3].input_ids)
        assert np.array_equal(example.labels, records[k % 3].labels)


def test_rates_go_on_where_the_best_is_the_last(fair: Any) -> None:
    module = fair("fair")
    assert module.next_powers({}) == list(range(-2, 4))
    assert module.next_powers({-1: 3.0, 0: 2.0, 1: 2.5}) == []
    assert module.next_powers({-1: 1.0, 0: 2.0, 1: 2.5}) == [-4, -3, -2]
    assert module.next_powers({-1: 3.0, 0: 2.0, 1: 1.5}) == [2, 3, 4]
    assert module.next_powers({0: math.inf, 1: math.inf}) == [-3, -2, -1]


def _line(row: str, task: str, choosing: list[list[float]], report: list[list[float]]) -> dict[str, Any]:
    return {
        "cell": {"model": "m", "steps": 24, "epsilon": 3.0, "task": task, "row": row},
        "powers": list(range(len(report))),
        "rates": [1.0] * len(report),
        "seeds": [100, 101, 102, 0, 1, 2, 3, 4],
        "before": [3.0, 3.0],
        "choosing": [one * 3 + [9.0] * 5 for one in choosing],
        "report": [[9.0] * 3 + one for one in report],
    }


def test_choosing_seeds_choose_and_the_others_are_reported(fair: Any, tmp_path: Path) -> None:
    spread = [-0.02, -0.01, 0.0, 0.01, 0.02]
    lines = [
        _line(row, task, [[loss] for loss in choosing], [[loss + s for s in spread] for loss in report])
        for task in ("a", "b")
        for row, choosing, report in (
            ("first", [2.5, 1.9, 2.2], [2.4, 2.0, 1.5]),  # 1.5 is what the choosing seeds do not choose
            ("second", [2.5, 2.3, 2.6], [2.4, 2.2, 2.3]),
        )
    ]
    path = tmp_path / "fair.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    module = fair("tables")
    tasks = module.read(path)["m", 24, 3.0]
    first, second = module.standings(tasks, ["second", "first"])
    assert (first.row, first.score, first.behind) == ("first", 1.0, 0.0)
    assert second.score == pytest.approx(0.8)  # gains of 0.8 and 1.0
    assert second.behind == pytest.approx(0.2)
    assert (first.default, second.default) == (pytest.approx(0.6), pytest.approx(0.6))
    # All choose alike and draw alike, so nothing is by chance.
    assert second.error == pytest.approx(0.0, abs=1e-9)


def test_a_rate_that_chance_chose_makes_the_error_larger(fair: Any, tmp_path: Path) -> None:
    module = fair("tables")

    def error(torn: bool) -> float:
        second = _line("second", "a", [[2.2], [2.2]], [[2.2] * 5, [1.8] * 5])
        if torn:  # which of the two rates is better depends on the seed
            second["choosing"] = [[2.2, 2.0, 2.4] + [9.0] * 5, [2.0, 2.3, 2.1] + [9.0] * 5]
        lines = [_line("first", "a", [[2.0], [2.2]], [[1.5] * 5, [1.6] * 5]), second]
        path = tmp_path / f"{torn}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return float(module.standings(module.read(path)["m", 24, 3.0], ["first", "second"])[1].error)

    assert error(torn=False) == pytest.approx(0.0, abs=1e-9)
    assert error(torn=True) > 0.05
