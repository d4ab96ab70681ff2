"""A finished run whose checkpoint is gone: what it released is not written over by what it began with."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_cases import PRIVACY, Bench

from privlora.errors import RunError
from privlora.training.files import RunFolder

pytestmark = pytest.mark.usefixtures("quick_reports")


def test_a_release_is_not_replaced_by_an_untrained_adapter(tmp_path: Path) -> None:
    bench = Bench()
    bench.start(tmp_path / "run", privacy={**PRIVACY, "steps": 2})
    folder = RunFolder(tmp_path / "run")
    trained = (folder.release / "adapter_model.safetensors").read_bytes()
    folder.checkpoint.unlink()
    with pytest.raises(RunError, match=r"finished, and its checkpoint is gone"):
        bench.resume(tmp_path / "run")
    assert (folder.release / "adapter_model.safetensors").read_bytes() == trained
