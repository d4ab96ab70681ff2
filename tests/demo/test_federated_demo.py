"""The demo of five clinics, in a size that takes seconds: what it returns, and that what it prints can be pasted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from privlora.demo import federated
from privlora.demo.corpus import CLINICS
from privlora.demo.federated import Seen, Sizes, uniformity
from privlora.errors import RunError
from privlora.federated.messages import Reply
from privlora.reporting import rewrite_report
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder

SMALL = Sizes(notes=12, patients=6, held_out=2, steps=2, batch=15)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """What a small demo returns and prints, and its folder. Tests must not change it."""
    root = tmp_path_factory.mktemp("federated") / "demo"
    console = Console(record=True, width=160, file=io.StringIO())
    return federated.main(root, console, SMALL), console.export_text(), root


@pytest.mark.long
def test_alone_and_together_have_the_same_budget(shown: tuple[dict[str, Any], str, Path]) -> None:
    result, _, root = shown
    statements = [
        json.loads((root / place / "release" / "privacy_report.json").read_text())["statement"]
        for place in ("together", *(f"alone/{clinic.name}" for clinic in CLINICS))
    ]
    assert result["epsilon"] == statements[0]["epsilon"] <= 3
    for statement in statements:
        assert statement["unit"] == "user"
        assert statement["steps_charged"] == SMALL.steps
        for name in ("sampling", "noise_multiplier", "epsilon", "delta"):
            assert statement[name] == statements[0][name]


def test_no_epsilon_is_shown_without_whom_it_is_against(shown: tuple[dict[str, Any], str, Path]) -> None:
    result, text, _ = shown
    clinic = rounded_up(result["epsilon_against_another_clinic"])
    assert result["epsilon_against_another_clinic"] > result["epsilon"]
    assert "ε = 3 against everybody else" in text
    assert f"against the server and readers, {clinic} against another clinic" in text
    assert f"a clinic     {clinic}" in text
    assert "ε = 3 for every patient (" not in text


def test_every_number_of_the_table_is_returned(shown: tuple[dict[str, Any], str, Path]) -> None:
    result, text, _ = shown
    assert list(result["losses"]) == [clinic.name for clinic in CLINICS]
    for row in result["losses"].values():
        for name in ("before", "others", "alone", "together"):
            assert f"{row[name]:.3f}" in text


def test_the_server_got_masks_where_it_would_have_got_gradients(
    shown: tuple[dict[str, Any], str, Path],
) -> None:
    """By chance a p below 1e-9 comes once in 10^9 demos; an unmasked vector's is 0 to any number of digits."""
    result, text, _ = shown
    assert len(result["server"]) == len(CLINICS)
    for row in result["server"]:
        assert row["p_uniform"] > 1e-9
        assert all(0 <= value < 2**32 for value in row["masked"])
        assert all(abs(value) < 1e3 for value in row["plain"])
        assert f"{row['masked'][0]:08x}" in text


def test_noise_alone_would_not_pass_for_a_mask() -> None:
    small = np.random.default_rng(1).normal(0, 1e6, 20_000).astype(np.int64).astype(np.uint32)
    assert uniformity(small) < 1e-100
    assert uniformity(np.arange(0, 2**32, 2**14, dtype=np.uint64).astype(np.uint32)) > 0.99


def test_the_first_vector_of_each_clinic_is_kept() -> None:
    import torch

    seen = Seen()
    for value in (1, 2):
        seen([Reply("a", "train", value, tensors={"sum": torch.tensor([value])}), Reply("b", "share", value)])
    assert {name: list(vector) for name, vector in seen.vectors.items()} == {"a": [1]}


def test_what_is_published_of_the_clinics_is_whole(shown: tuple[dict[str, Any], str, Path]) -> None:
    _, _, root = shown
    folder = RunFolder(root / "together")
    before = (folder.release / "report.html").read_bytes()
    rewrite_report(folder)  # the command that the demo ends with
    assert (folder.release / "report.html").read_bytes() == before
    assert (root / "plain" / "not-private").is_dir()


def test_the_last_lines_name_what_lies_there(shown: tuple[dict[str, Any], str, Path]) -> None:
    _, text, root = shown
    for name in ("report.html", "README.md"):
        path = root / "together" / "release" / name
        assert str(path) in text
        assert path.is_file()
    assert text.rstrip().endswith(f"privlora report {root / 'together'}")


def test_a_folder_in_use_is_refused(shown: tuple[dict[str, Any], str, Path]) -> None:
    with pytest.raises(RunError, match="not empty"):
        federated.main(shown[2], Console(file=io.StringIO()), SMALL)
