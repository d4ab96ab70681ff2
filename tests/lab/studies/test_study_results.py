"""The file of results: whole lines only, one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from privlora.errors import RunError
from privlora.lab.studies.leases import Lease
from privlora.lab.studies.results import Results, Row, all_finite, read_results
from privlora.lab.studies.settings import Cell
from privlora.lab.studies.shares import WHOLE


class Held(Lease):
    """A lease that nobody takes."""

    def __init__(self) -> None: ...

    def check(self) -> None: ...


HELD = Held()


def row(seed: int) -> Row:
    cell = Cell("é", "prism", 1.0, 4, 1e-3, seed)
    return Row(cell, "report", "abc", None, {"loss": 1.5}, {"loss": 2.0}, {"machine": "x"})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "study" / "results.jsonl"
    assert read_results(path) == []
    with Results(path, HELD) as results:
        for seed in range(3):
            results.append(row(seed))
            assert results.rows() == [row(s) for s in range(seed + 1)]
    assert read_results(path) == [row(seed) for seed in range(3)]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_repaired(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    with Results(path, HELD) as results:
        for seed in range(2):
            results.append(row(seed))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert read_results(path) == [row(0)]
    with Results(path, HELD) as results:
        results.append(row(1))
    assert path.read_bytes() == whole


def test_files_of_others_count_as_well(tmp_path: Path) -> None:
    path, other = tmp_path / "results.jsonl", tmp_path / "other.jsonl"
    other.write_bytes(row(7).to_line() + row(8).to_line()[:20])
    with Results(path, HELD, lambda: [other, path]) as results:
        results.append(row(0))
        assert results.rows() == [row(7), row(0)]


def test_nothing_is_written_without_the_lease(tmp_path: Path) -> None:
    lease = Lease(tmp_path, WHOLE, "content")
    with lease, Results(tmp_path / "results.jsonl", lease) as results:
        results.append(row(0))
        lease._path.unlink()
        with pytest.raises(RunError, match="no longer this process'"):
            results.append(row(1))
    assert read_results(tmp_path / "results.jsonl") == [row(0)]


def test_rows_are_not_written_into_a_file_that_was_folded_into_another(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Results(path, HELD) as results:
        for replaced in (False, True):
            path.unlink()
            if replaced:
                path.touch()
            with pytest.raises(RunError, match=r"no longer the file that this process opened.*would be lost"):
                results.append(row(0))
            path.touch()
    assert read_results(path) == []


def test_a_line_that_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(row(0).to_line() + b'{"cell": {}}\n')
    with pytest.raises(RunError, match="line 2 is no result"):
        read_results(path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        Results(tmp_path / "file" / "results.jsonl", HELD)


def test_finite() -> None:
    assert all_finite({"loss": 1.0, "records": 3, "task_metric": "accuracy"})
    assert not all_finite({"loss": float("nan")})
    assert not all_finite({"loss": 1.0, "accuracy": float("inf")})
