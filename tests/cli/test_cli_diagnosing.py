"""privlora lab diagnose, from YAML to page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_cases import Call, run_settings, write_config

from privlora.lab import cli
from privlora.lab.diagnostics.choosing import FIGURES

pytestmark = pytest.mark.usefixtures("drawn")

QUICK = ("--figures", "noise-ratio,gauge-sweep", "--steps", "3")


@pytest.mark.long
def test_everything_on_public_records(model: Path, folder: Path, call: Call) -> None:
    config = write_config(folder, run_settings(model, folder))
    out = folder / "found"
    ended = call("lab", "diagnose", config, "--steps", 3, "--public-data", "--output", out, "--json")
    assert ended.code == 0
    assert ended.json["public"] is True
    assert ended.json["page"] == str(out / "diagnostics.html")
    assert [Path(p).stem for p in ended.json["pictures"]] == list(FIGURES)
    series = json.loads((out / "diagnostics.json").read_text())
    assert series["facts"]["steps"] == 3
    assert series["facts"]["noise_multiplier"] == 2.0
    assert series["figures"]["gauge-sweep"]["factor_decades"] >= 3
    assert series["figures"]["gauge-sweep"]["prism_variation"] < 1e-6
    assert not (folder / "run").exists()  # it trains nothing to keep


def test_records_are_private_unless_asserted_otherwise(model: Path, folder: Path, call: Call) -> None:
    config = write_config(folder, run_settings(model, folder))
    ended = call("lab", "diagnose", config, "adapter.r=3", *QUICK, "--output", folder / "found")
    assert ended.code == 0
    assert "PRIVATE: computed from the records" in ended.out
    assert "--public-data is for records that everybody may read" in ended.out
    assert [path.name for path in (folder / "found").iterdir()] == ["private"]
    private = folder / "found" / "private"
    assert f"page:    {private / 'diagnostics.html'}" in ended.out
    assert sorted(p.name for p in private.iterdir()) == [
        "diagnostics.html",
        "diagnostics.json",
        "gauge-sweep.png",
        "noise-ratio.png",
    ]
    assert json.loads((private / "diagnostics.json").read_text())["facts"]["rank"] == 3


def test_without_a_file_it_takes_generated_records(
    model: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, records = cli.embedded_inputs()
    small = settings.changed(
        model={"name": str(model)}, adapter={"r": 2}, data={"max_length": 128}
    )  # of bytes
    monkeypatch.setattr(cli, "embedded_inputs", lambda: (small, records))
    monkeypatch.chdir(folder)
    ended = call("lab", "diagnose", *QUICK)
    assert ended.code == 0
    assert "PRIVATE" not in ended.out
    series = json.loads((folder / "runs" / "diagnose" / "diagnostics.json").read_text())
    assert series["facts"]["model"] == "(embedded)"


def test_embedded_inputs_have_the_papers_settings() -> None:
    settings, records = cli.embedded_inputs()
    assert (settings.adapter.r, settings.adapter.lora_alpha, settings.privacy.clip_norm) == (16, 16, 1)
    assert settings.privacy.public_dataset_size == len(records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--figures", "sweep"], "unknown figure 'sweep'"),
        (["--also", "ffa"], "'ffa' is not a private method on both factors"),
        (["--steps", "2"], "'--steps'"),
        (["privacy.stepz=3"], "unknown setting 'privacy.stepz'"),
        (["privacy.private=false", "privacy.noise_multiplier=null"], "no noise to diagnose"),
        (["--burn-in", "20"], "burn_in=20 leaves no step"),
        (["data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["model.name=nowhere"], "cannot load model"),
        (["--output", "records.jsonl/x"], "cannot create"),
    ],
)
def test_one_line_refusals(
    arguments: list[str], message: str, model: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # or it asks the hub again and again
    config = write_config(folder, run_settings(model, folder))
    ended = call("lab", "diagnose", config, *arguments, "--public-data")
    assert ended.code == 2
    assert ended.out == ""
    line = ended.err.splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line


def test_an_interruption(model: Path, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("privlora.lab.diagnostics.experiments.diagnose", interrupted)
    config = write_config(folder, run_settings(model, folder))
    ended = call("lab", "diagnose", config, "--output", folder / "found")
    assert ended.code == 130
    assert "nothing was written" in ended.err
