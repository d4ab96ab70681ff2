"""Here, where composition itself is tested, nothing is kept from one test to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from privlora.accounting import accountants


@pytest.fixture(autouse=True)
def _composed_anew(composed_once: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountants, "_compose", composed_once)
