"""A base that is spread over processes gives what a whole one gives, whoever has how many units."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import save_tiny_model
from rank_cases import found_together, together
from run_cases import PUBLIC, RECORDS
from test_ranks import REPEATABLE, adapter_of, farthest

from privlora.accounting import read_ledger
from privlora.adapters import LowRankAdapter
from privlora.api import Result, fine_tune, resume_run
from privlora.config import ModelSettings
from privlora.coordinates.starts import tangent_start
from privlora.training.checkpoint import read_mark
from privlora.training.identity import identify
from privlora.training.models import load_model
from privlora.training.ranks import Ranks
from privlora.training.sharding import Passes, is_sharded, load_sharded
from privlora.training.step import Step

pytestmark = pytest.mark.usefixtures("quick_reports")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"))


def start(base: Any, folder: Path, shard: bool, **groups: Any) -> Result:
    loading = {"fully_shard": shard, "device": "cpu", **groups.pop("loading", {})}
    return fine_tune(
        str(base),
        groups.pop("records", RECORDS),
        evaluation=PUBLIC,
        privacy={**REPEATABLE, **groups.pop("privacy", {})},
        loading=loading,
        data={"max_length": 40},
        # Singular vectors of the weights may come out turned, and with them the noise of a public seed.
        adapter={"r": 2, "init": "random"},
        run={"tokens_per_micro_batch": 120, "evaluate_every": 1},
        output=folder,
        **groups,
    )


@pytest.mark.parametrize(
    "groups",
    [
        {"method": {"name": "prism", "averaging": 0.9, "clipping": "automatic"}},  # each unit by itself
        {"method": "dp-adamw", "loading": {"gradient_checkpointing": "non-reentrant"}},
        {"privacy": {"expected_batch_size": 0.5}},  # hardly any unit, or one process has none
    ],
    ids=["one-by-one", "checkpointing", "few"],
)
def test_a_spread_base_gives_what_a_whole_one_gives(
    groups: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    start(base, tmp_path / "one", False, **json.loads(json.dumps(groups)))
    spread = partial(start, base, tmp_path / "three", True, **groups)
    assert together(3, lambda _: spread()) == [0, 0, 0]
    assert farthest(adapter_of(tmp_path / "one"), adapter_of(tmp_path / "three")) < 1e-4
    losses = [
        [
            json.loads(line)["loss_per_example"]
            for line in (tmp_path / n / "not-private/evaluations.jsonl").open()
        ]
        for n in ("one", "three")
    ]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    # One process holds all of it, and takes up what several began.
    resumed = resume_run(tmp_path / "three", records=RECORDS, evaluation=PUBLIC)
    assert resumed.steps == REPEATABLE["steps"]


def test_the_subspaces_of_spread_weights_are_those_of_whole_ones(base: Path, tmp_path: Path) -> None:
    settings = ModelSettings(name=str(base), device="cpu")

    def subspaces(ranks: Ranks) -> list[torch.Tensor]:
        whole, spread = load_model(settings)[0], load_sharded(settings, ranks)[0]
        assert is_sharded(spread)
        assert not is_sharded(whole)
        assert identify(None, spread) == identify(None, whole)
        found = []
        for model in (whole, spread):
            adapter = LowRankAdapter(model, rank=2, target_modules="all-linear")
            points = tangent_start(adapter, "w0-subspace", seed=0).as_points()
            found.append(torch.cat([(p.U @ p.U.mT).flatten() for p in points]))
        return found

    for whole, spread in found_together(2, tmp_path, subspaces):
        torch.testing.assert_close(whole, spread, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"method": "projected"}, "changes whole weights"),
        ({"method": "pe-sgd", "synthesis": {"seeds": 2}}, "public texts"),
        ({"loading": {"quantization": "4bit"}}, "packed weights are not taken apart"),
        ({"loading": {"device_map": "auto", "device": "auto"}}, "each takes those of the others"),
    ],
    ids=["dense", "texts", "packed", "map"],
)
def test_what_a_spread_base_cannot_do(
    groups: dict[str, Any], said: str, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert together(2, lambda _: start(base, tmp_path / "run", True, **groups)) == [1, 1]
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_process_that_is_lost_in_a_pass_loses_no_step(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulate, begun = Step.accumulate, list[int]()

    def until_the_third(self: Step, drawn: Any) -> torch.Tensor:
        begun.append(1)
        if len(begun) == 3 and os.environ["RANK"] == "1":
            layer = self.state.adapter.model.model.layers[1]
            layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL), prepend=True)
        return accumulate(self, drawn)

    monkeypatch.setattr(Step, "accumulate", until_the_third)
    folder = tmp_path / "run"
    assert together(2, lambda _: start(base, folder, True)) == [1, -signal.SIGKILL]
    saved = read_mark(folder / "private/checkpoint.safetensors").step
    assert saved == read_ledger(folder / "not-private/ledger.jsonl").charges == 2


def test_passes_wait_for_one_another(tmp_path: Path) -> None:
    """Whatever their numbers, all processes make as many."""

    def count(ranks: Ranks) -> list[tuple[int, int]]:
        model, idle = torch.nn.Linear(1, 1), list[bool]()
        passes, found = Passes(model, ranks, idle.append), []
        for own in ((3, 0, 1), (0, 0, 0), (1, 1, 1)):
            idle.clear()
            with passes.in_step(backward=True):
                for _ in range(own[ranks.rank]):
                    model(torch.ones(1))
            found.append((own[ranks.rank], len(idle)))
        return found

    assert found_together(3, tmp_path, count) == [
        [(3, 0), (0, 0), (1, 0)],
        [(0, 3), (0, 0), (1, 0)],
        [(1, 2), (0, 0), (1, 0)],
    ]
