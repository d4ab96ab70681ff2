"""A row that releases votes, compared with one that releases gradients, at equal privacy."""

from __future__ import annotations

from pathlib import Path

from cli_cases import write_records
from study_cases import on_disk

from privlora.lab.studies.settings import study_from
from privlora.lab.studies.study import run_study


def test_votes_and_gradients_stand_in_one_table(tmp_path: Path) -> None:
    content = on_disk(
        tmp_path / "study", methods=["pe-sgd", "aug-pe"], learning_rate=[0.02], seeds=[0], tasks={"one": None}
    )
    texts = write_records(
        tmp_path / "public.jsonl", 60, make=lambda i: {"text": f"visitor {i} left on day {i * 7}."}
    )
    content["base"]["synthesis"] = {"file": str(texts), "seeds": 3, "epochs": 1}
    content.pop("selection")
    found = run_study(study_from(content, "tiny.yaml"), tmp_path / "results")
    table = found.table.read_text()
    assert "| aug-pe" in table
    assert "failed" not in table.lower(), table
