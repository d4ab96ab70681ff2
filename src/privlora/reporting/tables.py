"""The report as a sentence and as rows of names and values, which card and page show. Pure functions of the report."""

from __future__ import annotations

import json
from math import frexp, nan
from statistics import median
from typing import Final

from privlora.config import OPTIMIZER_SETTINGS
from privlora.pages.template import fill_lines
from privlora.ranges import NEAR_COPY_RUN
from privlora.rehearsals.kept import because
from privlora.reporting import parties, wording
from privlora.reporting.wording import Report, is_private, quoted

COST: Final = (
    "Every figure is a function of the released texts, of the base model and of public texts, so none costs privacy. "
    "None compares with a private record: that would release what it says without noise."
)
_OF_VOTES: Final = ("Base model", "Method", "Public texts", "Votes", "Preference scores", "Text")


def sentence(report: Report) -> str:
    """The statement that an auditor would sign, or why there is none."""
    return _lines("sentence", report)[0]


def privacy_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows of the privacy block."""
    return _rows("privacy", report)


def method_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows of how the adapter was trained."""
    return _rows("method", report)


def federation_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows of what several trained together."""
    return _rows("federation", report)


def made_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows: where texts come from, then how what wrote them was trained."""
    votes = wording.releases_votes(report)  # and no adapter was trained
    trained = [row for row in method_table(report) if not votes or row[0] in _OF_VOTES]
    return _rows("made", report) + trained


def quality_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows of the figures that are measured of released texts."""
    return _rows("quality", report)


def _rows(template: str, report: Report) -> list[tuple[str, str]]:
    split = (line.partition(" | ") for line in _lines(template, report))
    return [(name, value) for name, _, value in split]


def _lines(template: str, report: Report) -> list[str]:
    return fill_lines(
        f"{template}.txt.j2",
        "privlora.reporting",
        report=report,
        s=report["statement"],
        private="stamp" in report and is_private(report),
        words=wording,
        parties=parties,
        quoted=quoted,
        because=because,
        dumps=json.dumps,
        frexp=frexp,
        median=lambda values: median(values or [nan]),
        OPTIMIZER_SETTINGS=OPTIMIZER_SETTINGS,
        NEAR_COPY_RUN=NEAR_COPY_RUN,
    )
