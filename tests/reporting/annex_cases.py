"""Releases with an annex, and ways to change them as somebody would who has the folder alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from privlora.reporting.annex import JSON_NAME, annex_text
from privlora.reporting.annex_page import render_annex
from privlora.reporting.seals import sealed
from privlora.reporting.verifying import Verified, verify


def failed(found: Verified) -> list[str]:
    """Names of the checks that failed."""
    return [check.name for check in found.checks if check.passed is False]


def said(release: Path) -> dict[str, Any]:
    """What annex.json says."""
    loaded = json.loads((release / JSON_NAME).read_text())
    return loaded


def told(value: Any, path: str, new: Any) -> None:
    """Let nested JSON say ``new`` at ``path``, keys and places in lists with slashes between them."""
    *way, last = (int(part) if part.isdecimal() else part for part in path.split("/"))
    for part in way:
        value = value[part]
    value[last] = new


def leaves(value: Any, path: str = "") -> list[str]:
    """Paths of all values of nested JSON that hold no others, as `told` takes them; of empty containers, too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, one in inner for leaf in leaves(one, f"{path}/{key}" if path else str(key))]
    return found or [path]


def forged(release: Path, change: Callable[[dict[str, Any]], None], *, anew: bool = True) -> Verified:
    """As the release is judged after somebody changed annex.json and made its page anew, and, if ``anew``, its hash."""
    annex = said(release)
    change(annex)
    annex = sealed(annex) if anew else annex
    (release / JSON_NAME).write_text(annex_text(annex))
    with suppress(Exception):  # of some things no page can be made
        (release / "annex.html").write_text(render_annex(annex))
    return verify(release)
