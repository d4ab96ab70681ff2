"""What the privacy statement does not cover, in plain sentences: of a report, and the risks that its annex names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from privlora.names import PUBLIC_GRADIENT, RANDOM, SPECTRAL_SPLIT, W0_SUBSPACE
from privlora.pages.template import fill_lines
from privlora.reporting.wording import FLOAT32_KEEPS, Report, any_projected, kinds


def not_protected(
    statement: Mapping[str, Any] | None,
    start: str,
    federation: Mapping[str, Any] | None = None,
    *,
    discrete: bool | None = None,
    written: bool = False,
    unchecked: bool = False,
    released: Literal["adapter", "texts"] = "adapter",
) -> list[str]:
    """Sentences for a report; ``statement``, ``start`` (adapter.init) and ``federation`` as in its JSON.

    written: whether texts were generated for the run. unchecked: data.unchecked. released: what the statement is
    about. discrete: whether noise is integers; None: whether clients of ``federation`` share it.
    """
    texts = released == "texts"
    if statement is None or statement["epsilon"] is None:
        what = "these texts as if they" if texts else "this adapter as if it"
        return [f"Any training record. Handle {what} were the training records themselves."]
    if discrete is None:
        discrete = federation is not None and federation["noise_by"] == "shares"
    found = {**_content(statement, start, federation, written), "unchecked": unchecked}
    return fill_lines("limits.txt.j2", "privlora.reporting", discrete=discrete, texts=texts, **found)


def limits_of(report: Report) -> list[str]:
    """Of an ended run, as its report says."""
    return not_protected(
        report["statement"],
        report["adapter"]["init"],
        report.get("federation"),
        written=_written(report),
        unchecked=_unchecked(report),
        released="texts" if "texts" in report else "adapter",
    )


def risks_of(report: Report) -> list[dict[str, str]]:
    """Risks that remain for those whose data a private run was trained on, JSON-ready; the most severe first. Then all
    else that its report does not protect. edge: the first cell of a row of docs/sharp-edges.md, if there is one."""
    found = _content(
        report["statement"], report["adapter"]["init"], report.get("federation"), _written(report)
    )
    found |= {
        "report": report,
        "unchecked": _unchecked(report),
        "evaluated": bool(report["evaluation"]),
        "FLOAT32_KEEPS": FLOAT32_KEEPS,
    }
    rows = (line.partition(" | ") for line in fill_lines("risks.txt.j2", "privlora.reporting", **found))
    risks = [{"edge": edge, "risk": risk} for edge, _, risk in rows]
    others = (text for text in limits_of(report) if not any(each["risk"] in text for each in risks))
    return [*risks, *({"edge": "", "risk": text} for text in others)]


def _unchecked(report: Report) -> bool:
    """Whether data.unchecked was set."""
    return bool(report["method"].get("unchecked"))


def _written(report: Report) -> bool:
    return "texts" in report or "public_texts" in report["method"]


def _content(
    statement: Mapping[str, Any], start: str, federation: Mapping[str, Any] | None, written: bool
) -> dict[str, Any]:
    return {
        "s": statement,
        "kinds": kinds(statement),
        "projected": any_projected(statement),
        "start": start,
        "other_adapter": start not in (RANDOM, W0_SUBSPACE, SPECTRAL_SPLIT, PUBLIC_GRADIENT),
        "federation": federation or {},
        "written": written,
    }
