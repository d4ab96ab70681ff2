"""study.html: one self-contained page, a pure function of the summary."""

from __future__ import annotations

from typing import Any

from privlora.lab.studies import figures, wording
from privlora.lab.studies.summary import Summary
from privlora.pages.numbers import number
from privlora.pages.template import fill


def render(summary: Summary) -> str:
    """No script, no resource from elsewhere; every text of a user is escaped."""
    return fill(
        "study.html.j2",
        "privlora.lab.studies",
        title=f"{summary['name']} · comparison of methods",
        banner=("NOT PRIVATE", wording.REPEATABLE) if summary["insecure_noise"] else None,
        summary=summary,
        wording=wording,
        sections=[_section(summary, rule) for rule in summary["rules"]],
        rate_figures=[
            (rank, figure)
            for rank in summary["rank"]
            if (figure := figures.rate_figure(summary, rank)) is not None
        ],
        ran=_ran(summary),
    )


def _section(summary: Summary, rule: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of one rule of choosing."""
    return {
        "rule": rule,
        "title": wording.title(rule, summary),
        "ranks": [
            {
                "rank": rank,
                "standings": [line for line in rule["overall"] if line["rank"] == rank],
                "verdicts": wording.verdicts({"overall": [x for x in rule["overall"] if x["rank"] == rank]}),
                "left_out": wording.left_out(rule, {**summary, "rank": [rank]}),
                "figure": figures.utility_figure(summary, rule, rank),
                "tasks": [_task(summary, rule, task, rank) for task in summary["tasks"]],
            }
            for rank in summary["rank"]
        ],
        "rank_figure": figures.rank_figure(summary, rule),
    }


def _task(summary: Summary, rule: dict[str, Any], task: dict[str, Any], rank: int) -> dict[str, Any]:
    """A table: heads, and for each method its cells and whether one is the best private one of its column."""
    cells = {
        (cell["method"], cell["epsilon"]): cell
        for cell in rule["cells"]
        if (cell["task"], cell["rank"]) == (task["name"], rank)
    }
    columns: list[float | None] = [*summary["epsilon"]]
    if any(not method["private"] for method in summary["methods"]):
        columns.append(None)
    sign = 1 if task["lower_is_better"] else -1
    best = {}
    for epsilon in summary["epsilon"]:
        known = [
            c for (_, e), c in cells.items() if e == epsilon and c["mean"] is not None and not c["failed"]
        ]
        if known:
            best[epsilon] = min(known, key=lambda cell: sign * cell["mean"])["method"]
    rows = []
    for method in summary["methods"]:
        label = method["label"]
        texts = [wording.score(cells[label, e]) if (label, e) in cells else "–" for e in columns]
        marks = [epsilon is not None and best.get(epsilon) == label for epsilon in columns]
        rows.append((label, list(zip(texts, marks, strict=True))))
    heads = ["no noise" if epsilon is None else f"ε = {number(epsilon)}" for epsilon in columns]
    return {"task": task, "heads": heads, "rows": rows}


def _ran(summary: Summary) -> list[tuple[str, str]]:
    """(name, value) rows: how much was run, with what and where."""
    runs = summary["runs"]
    seconds = runs["cpu_seconds"]
    took = f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.1f} minutes"
    rows = [
        ("Runs", f"{runs['finished']} finished, {runs['failed']} of them failed"),
        ("Processor time", took),
        ("Machine", "; ".join(runs["machines"]) or "–"),
        *(("Versions", " · ".join(f"{k} {v}" for k, v in one.items())) for one in runs["versions"]),
        (
            "Noise",
            "repeatable" if summary["insecure_noise"] else "fresh from the operating system in every run",
        ),
    ]
    if runs["outdated"]:
        rows.append(
            ("Not used", f"{runs['outdated']} finished runs of other settings, kept in results.jsonl")
        )
    return rows
