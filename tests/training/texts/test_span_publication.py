"""What a run on public texts publishes, prints and lets its generator see follows from its releases alone."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from test_generating_crashes import RECORDS, SETTINGS
from test_publication import PUBLIC, everything
from tiny_models import tiny_model, tiny_tokenizer

from privlora.adapters import Captured
from privlora.api import fine_tune
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.synthesis.writers import ModelWriter
from privlora.training import assembly
from privlora.training.files import RunFolder
from privlora.training.progress import RichObserver

# Nothing of these is as in RECORDS: their number, their length, their words.
OTHERS = [{"text": f"{'a long story, ' * (i % 3)}{chr(97 + i)}."} for i in range(11)]
SECONDS = re.compile(r"\S+ s/step  ETA \S+")


def published(
    root: Path,
    records: list[dict[str, str]],
    method: str,
    caplog: pytest.LogCaptureFixture,
    *,
    without_units: bool = True,
) -> tuple[Any, ...]:
    """Files of the release, lines on the screen, log and prompts of a run that repeats its noise.

    without_units: private sums are made, and thrown away, so that releases are noise.
    """
    asked: list[list[str]] = []
    accumulate, write = GaussianMechanism.accumulate, ModelWriter.write

    def summed(self: GaussianMechanism, captured: Captured) -> None:
        accumulate(self, captured)
        if without_units:
            self.discard()

    def written(self: ModelWriter, prompts: list[str], key: int) -> Any:
        asked.append(list(prompts))
        return write(self, prompts, key)

    console = Console(file=io.StringIO(), width=200)
    noise = NoiseSource(7)
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("DEBUG"):
        patch.setattr(GaussianMechanism, "accumulate", summed)
        patch.setattr(ModelWriter, "write", written)
        patch.setattr(assembly, "NoiseSource", lambda seed: noise)
        with RichObserver(console) as observer:
            fine_tune(
                tiny_model(),
                records,
                tokenizer=tiny_tokenizer(),
                output=root,
                evaluation=PUBLIC,
                observer=observer,
                **{**SETTINGS, "method": {"name": method, "learning_rate": 0.05}},
            )
    folder = RunFolder(root)
    files = {name: content for name, (_, content) in everything(folder).items()}
    texts = load_file(folder.checkpoint)["texts/population.utf8"].tolist()
    shown = SECONDS.sub("", console.file.getvalue())
    log = [f"{r.name} {r.getMessage()}" for r in caplog.records if not r.name.startswith("matplotlib")]
    return files, shown, log, asked, texts


def test_it_does_not_differ_where_the_releases_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (
        published(tmp_path / name, records, "pe-sgd", caplog)
        for name, records in (("one", RECORDS), ("other", OTHERS))
    )
    assert one[0].keys() == other[0].keys()
    assert len(one[0]) == 8
    assert [name for name in one[0] if one[0][name] != other[0][name]] == []
    assert one[1:] == other[1:]
    assert "gradients of public texts: " in one[1]


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("method", ["span-prism", "gep"])
def test_nor_in_other_spaces_beside_the_report(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (
        published(tmp_path / name, records, method, caplog)
        for name, records in (("one", RECORDS), ("other", RECORDS[1:]))
    )
    assert one == other


@pytest.mark.usefixtures("quick_reports")
def test_the_comparison_would_see_a_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (
        published(tmp_path / name, records, "pe-sgd", caplog, without_units=False)
        for name, records in (("one", RECORDS), ("other", RECORDS[1:]))
    )
    differ = [name for name in one[0] if one[0][name] != other[0][name]]
    assert differ == ["release/adapter_model.safetensors", "release/evaluations.jsonl"]
