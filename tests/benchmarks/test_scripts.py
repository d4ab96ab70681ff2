"""Every script of benchmarks/ answers, and those of speed that no other test runs do what they say, once."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(
    path.relative_to(ROOM) for path in ROOM.rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")
)
WITHOUT = {Path("federated/cost_clients.py"), Path("federated/cost_server.py"), Path("speed/scaling.py")}
"""They take nothing, the first two but from another script, on standard input."""


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts of several folders have modules of one name."""
    pytest.importorskip("opacus")
    own = {path.stem for path in ROOM.rglob("*.py")}
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in own & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield
    for name in (set(sys.modules) - before) & own:
        del sys.modules[name]


def run(script: Path, *words: str) -> str:
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(written):
        patch.setattr(sys, "argv", [str(script), *words])
        patch.syspath_prepend(str((ROOM / script).parent))
        runpy.run_path(str(ROOM / script), run_name="__main__")
    return written.getvalue()


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path not in WITHOUT], ids=str)
def test_a_script_says_what_it_takes(script: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(script, "--help")
    assert ended.value.code == 0


@pytest.mark.long
def test_equal_lengths() -> None:
    steps = ["privlora prism"]
    found = run(
        Path("speed/equal_lengths.py"), "--runs", "8x1", "--minutes", "0", "--no-memory", "--only", *steps
    )
    assert all(f"| {name} |" in found for name in steps)


@pytest.mark.long
def test_an_update_at_several_sizes() -> None:
    assert "| ms an update |" in run(Path("update_scaling.py"), "--repetitions", "1")


def test_steps_on_many_devices() -> None:
    assert "| 70B |" in run(Path("speed/scaling.py"))
