"""The file of results: whole lines only, one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from privlora.errors import RunError
from privlora.lab.studies.results import Results, Row, read_folder, read_results
from privlora.lab.studies.settings import Cell


def row(seed: int) -> Row:
    cell = Cell("é", "prism", 1.0, 4, 1e-3, seed)
    return Row(cell, "report", "abc", None, {"loss": 1.5}, {"loss": 2.0}, {"machine": "x"})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "study" / "results.jsonl"
    assert read_results(path) == []
    with Results(tmp_path / "study") as results:
        for seed in range(3):
            results.append(row(seed))
            assert read_results(path) == [row(s) for s in range(seed + 1)]
    assert read_results(path) == [row(seed) for seed in range(3)]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_repaired(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    with Results(tmp_path) as results:
        for seed in range(2):
            results.append(row(seed))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert read_results(path) == [row(0)]
    with Results(tmp_path) as results:
        results.append(row(1))
    assert path.read_bytes() == whole


def test_files_of_others_count_as_well(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(row(7).to_line() + row(8).to_line()[:20])
    with Results(tmp_path, (2, 5)) as results:
        results.append(row(0))
    assert results.path.name == "results-2-of-5.jsonl"
    assert read_folder(tmp_path) == [row(0), row(7)]


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    with Results(tmp_path), Results(tmp_path, (1, 2)), pytest.raises(RunError, match="another process runs"):
        Results(tmp_path)
    Results(tmp_path)


def test_a_line_that_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(row(0).to_line() + b'{"cell": {}}\n')
    with pytest.raises(RunError, match="line 2 is no result"):
        read_results(path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        Results(tmp_path / "file")
