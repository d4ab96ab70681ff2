"""The benchmarks of speed run from end to end, on tiny models."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privlora

ROOM = Path(__file__).parents[2] / "benchmarks" / "speed"


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    monkeypatch.syspath_prepend(ROOM)


@pytest.mark.long
def test_every_case_of_real_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "lengths.png"
    real_lengths: Any = importlib.import_module("real_lengths")
    real_lengths.main(["--smoke", "--no-memory", "--figure", str(figure)])
    found = capsys.readouterr().out
    for case in real_lengths.CASES:
        for step in real_lengths.STEPS:
            assert f"| {case} | {step} |" in found
    assert figure.stat().st_size > 1000


@pytest.mark.long
def test_memory_of_fresh_processes() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "real_lengths.py", "--smoke", "--only", "SST-2 64 8k"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOM, env=environment)
    for row in done.stdout.splitlines()[2:]:
        assert float(row.split("|")[-3]) > 0, row


@pytest.mark.long
def test_launches_of_the_smaller_model(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("launches").main(["--modules", "40"])
    assert "| 40 | 4 | privlora prism |" in capsys.readouterr().out


@pytest.mark.slow
def test_packing_records_into_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("untaken").main(["--smoke", "--only", "packed"])
    found = capsys.readouterr().out
    assert all(f"| packed: {data} 4 |" in found for data in ("SST-2", "GSM8K"))
    assert "one record's NaN reaches: 0 ->" in found


@pytest.mark.slow
def test_a_packed_record_has_the_states_that_it_has_alone() -> None:
    untaken: Any = importlib.import_module("untaken")
    real_lengths: Any = importlib.import_module("real_lengths")
    setting = real_lengths.Setting(((5, 2), (9, 3), (4, 4)), 3, real_lengths.TINY)
    passes = untaken.Passes(setting, packed=True)
    body = passes.model.base_model.model.model
    ((given, used),) = passes.batches(range(3))
    together = body(**given).last_hidden_state[used]
    alone = [
        body(input_ids=torch.tensor(passes.records[k].input_ids[None])).last_hidden_state[0]
        for k in (1, 0, 2)
    ]
    torch.testing.assert_close(together, torch.cat(alone).to(together), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_batches_have_the_lengths_of_the_records() -> None:
    real_lengths: Any = importlib.import_module("real_lengths")
    lengths = {"SST-2": [[5, 2, 3], [9, 2, 1]]}
    setting = real_lengths.Case("SST-2", 64, "8k").setting(lengths, smoke=False)
    tokens = np.array([tokens for tokens, _ in setting.lengths])
    assert set(setting.lengths) == {(5, 2), (9, 2)}
    assert abs((tokens == 5).mean() - 0.75) < 6 * (0.75 * 0.25 / len(tokens)) ** 0.5


@pytest.mark.slow
def test_peers_pad_each_micro_batch_to_its_longest_record() -> None:
    steps: Any = importlib.import_module("speed_steps")
    setting = steps.Setting(((3, 1), (7, 7), (2, 2), (5, 1)), 4, rows=2, grouped=True)
    records = steps.build_records(setting)
    plain = object.__new__(steps.Plain)
    plain.setting, plain.records = setting, records
    parts = plain._parts([0, 1, 2, 3])
    assert parts == [[1, 3], [0, 2]]
    batch = steps.Padded.of(records, parts[1], "cpu")
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert (batch.labels != -100).tolist() == [[False, False, True], [True, True, False]]


@pytest.mark.long
def test_several_processes_beside_one() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "processes.py", "--smoke"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOM, env=environment)
    rows = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert len(rows) == 6
    assert len(done.stdout.splitlines()) == 8
    for row in rows:
        assert row["sum_bytes"] >= 8 * row["numbers"]
        assert row["state_bytes"] > 0


@pytest.mark.long
def test_a_measured_peak_and_its_prediction() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(privlora.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "memory.py", "--smoke"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOM, env=environment)
    assert done.stdout.splitlines()[-1].startswith("| prism, 32 x 1, 100k, length 16, r 2, 64 | ")
