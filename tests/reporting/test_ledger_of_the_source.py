"""Texts of a finished run's adapter come with that run's ledger, and of that run's weights, or not at all."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from run_cases import PRIVACY, Bench

from privlora.adapters.peft_files import WEIGHTS_NAME
from privlora.api import start_synthesis
from privlora.config import load_settings, settings_from
from privlora.errors import PrivacyError, RunError
from privlora.training.files import RunFolder


def test_another_ledger_than_the_reports_is_refused(tmp_path: Path) -> None:
    bench = Bench()
    for name, steps in (("one", 2), ("other", 1)):
        bench.start(tmp_path / name, privacy={**PRIVACY, "steps": steps})
    source = RunFolder(tmp_path / "one")
    given = load_settings(source.settings)
    synthesis = {
        "source": str(source.root),
        "publish": True,
        "max_new_tokens": 4,
        "seeds": 2,
        "variations": 0,
    }
    content = {
        **given.model_dump(exclude={"synthesis", "federation", "run", "method"}),
        "synthesis": synthesis,
    }
    content["run"] = {"output": str(tmp_path / "texts")}
    settings = settings_from(content, source="test")
    whole = source.ledger.read_bytes()
    cut = b"".join(whole.splitlines(keepends=True)[:2])
    for written in ((tmp_path / "other/release/ledger.jsonl").read_bytes(), cut):
        source.ledger.write_bytes(written)
        with pytest.raises((PrivacyError, RunError), match=r"another run than its report|never loses"):
            start_synthesis(settings, nullcontext, model=bench.model, tokenizer=bench.tokenizer)
        assert not (tmp_path / "texts").exists()
    source.ledger.write_bytes(whole)
    shutil.copyfile(tmp_path / "other/release" / WEIGHTS_NAME, source.release / WEIGHTS_NAME)
    with pytest.raises(PrivacyError, match=f"{WEIGHTS_NAME} in .* is not as the run wrote it"):
        start_synthesis(settings, nullcontext, model=bench.model, tokenizer=bench.tokenizer)
    assert not (tmp_path / "texts").exists()
