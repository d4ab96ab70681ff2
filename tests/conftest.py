"""One thread (the models are tiny), and a seed for whatever a test does not seed itself."""

import gc
import signal
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from privlora.accounting import accountants

torch.set_num_threads(1)
gc.disable()  # until pytest_collection_finish: it would take a third of the time that importing takes
# Whoever starts the tests in the background may have ctrl-C ignored, which they and their child processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is imported stays, so the collector need not walk through it again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


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


@pytest.fixture
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the report and its plots, which take seconds; the adapter is still written."""
    monkeypatch.setattr("privlora.reporting.release.gather", lambda *_: {})
    monkeypatch.setattr("privlora.reporting.release._write_report", lambda folder, report: None)
