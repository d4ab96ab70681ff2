"""The web page: one self-contained file, a pure function of the report."""

from __future__ import annotations

from typing import Any

from privlora.pages.template import fill
from privlora.reporting import parties, plots, tables, wording
from privlora.reporting.wording import Report, is_private, quoted

PACKAGE = "privlora.reporting"


def render(report: Report) -> str:
    """report.html: no script, no resource from elsewhere; every text of a user is escaped."""
    template = "texts.html.j2" if "texts" in report else "report.html.j2"
    stamp, found = report["stamp"], content(report)
    banner = None if found["private"] else (stamp["text"], stamp["reason"])
    title = f"{stamp['text']} · {found['heading']}"
    return fill(template, PACKAGE, title=title, banner=banner, plots=plots, **found)


def content(report: Report) -> dict[str, Any]:
    """What card and page are made from: the report, and functions that say it in words."""
    return {
        "report": report,
        "private": is_private(report),
        "heading": wording.heading(report),
        "quoted": quoted,
        "words": wording,
        "parties": parties,
        "tables": tables,
    }
