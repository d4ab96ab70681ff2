"""Whatever the system: nothing of POSIX is needed, and Windows' rules for files are minded (as_windows.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has open is read from /proc")
@pytest.mark.long
def test_every_module_is_imported_and_a_run_is_trained_and_resumed(tmp_path: Path) -> None:
    script = [str(HERE / "as_windows.py"), str(HERE / "trained_as_windows.py"), str(tmp_path / "runs")]
    paths = [str(HERE / "accounting"), *sys.path]
    ended = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", *script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        text=True,
        encoding="cp1252",
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
