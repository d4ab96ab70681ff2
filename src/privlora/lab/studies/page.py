"""study.html: one self-contained page, a pure function of the summary."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from markupsafe import Markup

from privlora.lab.studies import figures
from privlora.lab.studies.summary import Summary
from privlora.lab.studies.tables import REPEATABLE, Element, Figure, Table, elements
from privlora.pages.template import fill

_DRAWN = {"utility": figures.utility_figure, "rate": figures.rate_figure}


def render(summary: Summary) -> str:
    """No script, no resource from elsewhere; every text of a user is escaped."""
    return fill(
        "study.html.j2",
        "privlora.lab.studies",
        title=f"{summary['name']} · comparison of methods",
        banner=("NOT PRIVATE", REPEATABLE) if summary["insecure_noise"] else None,
        parts=Markup("\n").join(_html(each, summary) for each in elements(summary)),
        summary=summary,
        ran=_table([["of the study", ""], *_ran(summary)]),
    )


def _html(element: Element, summary: Summary) -> Markup:
    if isinstance(element, Figure):
        drawn = _DRAWN[element.of](summary, element.rule, element.rank)
        return Markup() if drawn is None else Markup('<figure class="wide">{}</figure>').format(drawn)
    if isinstance(element, list):
        return _table(element)
    marks, _, words = element.partition(" ")
    if set(marks) == {"#"}:
        return Markup("<h{0}>{1}</h{0}>").format(len(marks), words)
    found = Markup()
    for item, lines in groupby(element.split("\n"), key=lambda line: line.startswith("- ")):
        texts = [line.removeprefix("- ").replace("**", "") for line in lines]
        kind = '<ul class="notes">{}</ul>' if item else "{}"
        within = "<li>{}</li>" if item else "<p>{}</p>"
        found += Markup(kind).format(Markup().join(Markup(within).format(text) for text in texts))
    return found


def _table(table: Table) -> Markup:
    heads = Markup().join(Markup("<th>{}</th>").format(cell) for cell in table[0])
    rows = (Markup().join(Markup("<td>{}</td>").format(cell) for cell in row) for row in table[1:])
    body = Markup().join(Markup("<tr>{}</tr>\n").format(row) for row in (heads, *rows))
    return Markup('<div class="scroll"><table>{}</table></div>').format(body)


def _ran(summary: Summary) -> Iterator[list[str]]:
    """How much was run, with what and where."""
    runs = summary["runs"]
    yield ["Runs", f"{runs['finished']} finished, {runs['failed']} of them failed"]
    yield ["Processor time", f"{runs['cpu_seconds'] / 3600:.2g} hours"]
    yield ["Machine", "; ".join(runs["machines"]) or "–"]
    yield from (["Versions", " · ".join(f"{k} {v}" for k, v in one.items())] for one in runs["versions"])
    kept = "repeatable" if summary["insecure_noise"] else "fresh from the operating system in every run"
    yield ["Noise", kept]
    if runs["outdated"]:
        yield ["Not used", f"{runs['outdated']} finished runs of other settings, kept in the results"]
    for method in summary["methods"]:
        yield [method["label"], f"method {method['method']}{'' if method['private'] else ', NOT PRIVATE'}"]
