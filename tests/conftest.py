"""One thread (the models are tiny), and a seed for whatever a test does not seed itself."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick import is_quick

from privlora.accounting import accountants
from privlora.reporting.fields import strange

torch.set_num_threads(1)
gc.disable()  # until pytest_collection_finish: it would take a third of the time that importing takes
# Whoever starts the tests in the background may have ctrl-C ignored, which they and their child processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):  # as by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="no test that trains, runs commands or is marked slow"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and config.getoption("quick") and not is_quick(collection_path) else None


# They wait for other processes, so they begin first: at the end one worker would wait with them.
_FIRST = {"test_engines.py", "test_ranks.py", "test_study_parts.py", "test_study_runs.py", "test_crashes.py"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _FIRST)
    if config.getoption("quick"):
        slow = [i for i in items if i.get_closest_marker("slow") or i.get_closest_marker("long")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_collection_finish() -> None:
    """What is imported stays, so the collector need not walk through it again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep calibrations for this session only: those of a broken copy (tests/mutants) must not reach real runs."""
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVLORA_CACHE", str(shared / "cache"))
        patch.setenv("PRIVLORA_PROGRESS", "0")  # hundreds of short runs
        yield


@pytest.fixture(autouse=True, scope="session")
def _unsynced() -> Iterator[None]:
    """No test takes the machine's power away, and a sixth of a short federation's time is waiting for a disk."""

    def fsync(file: Any) -> None:
        os.fstat(
            file if isinstance(file, int) else file.fileno()
        )  # it raises as fsync does where nothing is open

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(autouse=True)
def _known_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's report holds what the table of fields lacks."""
    if (publication := sys.modules.get("privlora.reporting.publication")) is None:
        return
    sealed = publication.sealed

    def checked(report: Any) -> Any:
        assert list(strange(report)) == []
        return sealed(report)

    monkeypatch.setattr(publication, "sealed", checked)


@pytest.fixture(autouse=True, scope="session")
def composed_once() -> Iterator[Callable[..., Any]]:
    """Keep what composed plans cost, for hundreds of tests train by a few of them; yields what composes anew."""
    composed = accountants._compose

    @lru_cache(maxsize=64)
    def kept(events: tuple[Any, ...], *rest: Any) -> Any:
        return composed(dict(events), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accountants, "_compose", lambda events, *rest: kept(tuple(events.items()), *rest))
        yield composed


_UNDRAWN = {
    "auditing",
    "cli",
    "demo",
    "federated",
    "rehearsals",
    "reporting",
    "studies",
    "training",
}
_UNDRAWN |= {
    f"test_{name}.py" for name in ("api", "api_federated", "configs", "docs", "profile", "screen", "trainer")
}


_now: dict[str, Any] = {"drawn": True, "room": ""}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Plots are not laid out nor drawn where hardly a test looks at them: that takes half the time of a tiny run."""
    parts = item.path.relative_to(Path(__file__).parent).parts
    room = _now["room"] = parts[1] if parts[0] == "lab" else parts[0]
    _now["drawn"] = room not in _UNDRAWN or "drawn" in getattr(item, "fixturenames", ())
    if not _now["drawn"]:
        _replace_drawing()
    # A report's noise is measured on few draws where nobody compares it with anything.
    if (noise := sys.modules.get("privlora.reporting.noise")) is not None:
        noise._MOST_DRAWS = 32 if room == "reporting" or _now["drawn"] else 4
    # Nor do many tests read what an adapter answers, or try another base model than the last hundred did.
    if (answers := sys.modules.get("privlora.reporting.answers")) is not None:
        answers._NEW = 4 if room in ("auditing", "federated", "rehearsals", "training") else 40
    if (models := sys.modules.get("privlora.training.models")) is not None:
        if not hasattr(models.refuse_unloadable, "once"):
            models.refuse_unloadable = _once(models.refuse_unloadable)
        models.refuse_unloadable.once = item.path.name != "test_families.py"


def _once(refuse: Callable[..., None]) -> Any:
    """Load an empty adapter by peft once a session for each model and its targets, where that is no error."""
    fine = set[tuple[Any, ...]]()

    def refused(adapter: Any) -> None:
        whole, sites = repr(adapter.model), [site.name for part in adapter.parts for site in part.sites]
        key = (whole, repr(getattr(adapter.model, "config", None)), *sites)
        if not refused.once or key not in fine:  # type: ignore[attr-defined]
            refuse(adapter)
            fine.add(key)

    refused.once = True  # type: ignore[attr-defined]
    return refused


@lru_cache(maxsize=1)
def _replace_drawing() -> None:
    from matplotlib.figure import Figure  # takes a second, which quick rooms should not wait for

    draw, panels, bar = Figure.savefig, Figure.subplots, Figure.colorbar

    def subplots(self: Figure, nrows: int = 1, ncols: int = 1, **options: Any) -> Any:
        if _now["drawn"] or _now["room"] == "demo":  # which makes PNG
            return panels(self, nrows, ncols, **options)
        return np.full((nrows, ncols), _Nothing(), dtype=object)

    def colorbar(self: Figure, image: Any, **options: Any) -> Any:
        return image if isinstance(image, _Nothing) else bar(self, image, **options)

    def savefig(self: Figure, to: Any, **options: Any) -> None:
        if _now["drawn"] or options.get("format") != "svg":
            draw(self, to, **options)
        else:
            to.write('<svg viewBox="0 0 1 1"></svg>')

    Figure.savefig = savefig  # type: ignore[method-assign]
    Figure.subplots = subplots  # type: ignore[method-assign, assignment]
    Figure.colorbar = colorbar  # type: ignore[method-assign]


class _Nothing:
    """In the place of axes and of all that they give."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def get_ylim(self) -> tuple[float, float]:
        return 0.0, 1.0

    def __iter__(self) -> Iterator[Any]:
        return iter((self,))


@pytest.fixture
def drawn() -> None:
    """Draw plots after all."""


@contextmanager
def _with_plots() -> Iterator[None]:
    before, _now["drawn"] = _now["drawn"], True
    yield
    _now["drawn"] = before


@pytest.fixture(scope="session")
def with_plots() -> Callable[[], AbstractContextManager[None]]:
    """For what many tests share: plots are drawn inside, whichever test comes first."""
    return _with_plots


@pytest.fixture
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the report and its plots, which take seconds; the adapter is still written."""
    import privlora.running  # noqa: F401 - what is imported first while the patch stands would keep it

    monkeypatch.setattr("privlora.reporting.facts.gather", lambda *_, **__: {})
    monkeypatch.setattr("privlora.reporting.publication.write_report", lambda folder, report: None)


@pytest.fixture
def public_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give fine_tune and resume_run a few texts for methods that lean on public ones."""
    from tiny_models import PUBLIC_TEXTS

    from privlora.training.assembly import build_parts

    monkeypatch.setattr("privlora.running.build_parts", partial(build_parts, texts=lambda _: PUBLIC_TEXTS))
    monkeypatch.setattr("privlora.training.assembly.refuse_other_texts", lambda settings, method: None)
