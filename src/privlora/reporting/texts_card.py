"""Card and page of a synthetic data set. Pure functions of the report."""

from __future__ import annotations

import numpy as np
import yaml
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from privlora.pages.figures import ACCENT, INK, SECOND, WIDTH, grid, in_style, inline_svg
from privlora.pages.numbers import number
from privlora.pages.template import fill
from privlora.ranges import NEAR_COPY_RUN
from privlora.reporting import plots, wording
from privlora.reporting.card import fenced, plain, table
from privlora.reporting.seals import TEXTS
from privlora.reporting.wording import Report, is_private, quoted
from privlora.rounding import rounded_up

_BINS = 24
_WHAT = (
    "All of them are written by a machine; none is a record.",
    "All of them are texts of the public file, word for word: what was released chose them, and none is a record.",
)
_OF_VOTES = ("Base model", "Method", "Public texts", "Votes", "Preference scores", "Text")
_COST = (
    "Every figure is a function of the released texts, of the base model and of public texts, so none costs privacy. "
    "None compares with a private record: that would release what it says without noise."
)


def texts_card(report: Report) -> str:
    """README.md, as Markdown with the front matter that hubs read."""
    stamp, facts = report["stamp"]["text"], report["texts"]
    tags = ["synthetic", "privlora", "differential-privacy" if is_private(report) else "not-private"]
    front = {
        "task_categories": ["text-generation"],
        "tags": tags,
        "configs": [{"config_name": "default", "data_files": TEXTS}],
    }
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {stamp}: {plain(_titled(facts))}",
        "",
        f"**{plain(wording.sentence(report))}**",
        "",
        _WHAT[facts["generator"] == "file"],
        "",
        "## Privacy",
        "",
        *table(wording.privacy_table(report)),
        "",
        "`privacy_report.json` says the same to machines, `report.html` shows it with figures.",
        "",
        "### What is not protected",
        "",
        *(f"- {plain(text)}" for text in report["not_protected"]),
        "",
        "## Use",
        "",
        f"One JSON object a line, with the text in {plain(quoted(facts['column']))}. "
        "Training on it costs no more privacy:",
        "",
        *fenced(
            [
                "from datasets import load_dataset",
                f'texts = load_dataset("json", data_files="{TEXTS}", split="train")  # in this folder',
            ]
        ),
        "",
        "## How they were made",
        "",
        *table(_made(report)),
        "",
        "## Figures",
        "",
        _COST,
        "",
        *table(_quality(report)),
        "",
        plain(wording.software(report)),
        "",
    ]
    return "\n".join(lines)


def _titled(facts: Report) -> str:
    kind = "public texts that were chosen privately" if facts["generator"] == "file" else "synthetic texts"
    return f"{facts['count']} {kind}"


def texts_page(report: Report) -> str:
    """report.html of texts: no script, no resource from elsewhere; every text of a user is escaped."""
    stamp, private = report["stamp"], is_private(report)
    return fill(
        "texts.html.j2",
        "privlora.reporting",
        title=f"{stamp['text']} · {_titled(report['texts'])}",
        heading=_titled(report["texts"]),
        quoted=quoted,
        banner=None if private else (stamp["text"], stamp["reason"]),
        report=report,
        private=private,
        sentence=wording.sentence(report),
        means=wording.means(report),
        key_figures=_key_figures(report),
        privacy_table=wording.privacy_table(report),
        made=_made(report),
        quality=_quality(report),
        cost=_COST,
        texts_plot=texts_plot(report),
        epsilon_plot=plots.epsilon_plot(report),
    )


def _made(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows: where the texts come from, then how what wrote them was trained."""
    facts = report["texts"]
    origin = {
        "population": "the population that the private run ended with, chosen by what was released",
        "adapter": "written by the privately trained adapter",
    }[facts["from"]]
    if facts["of_a_finished_run"]:
        origin += "; the run was finished before, and asking its adapter cost nothing more"
    rows = [("Texts", origin), ("Asked for in the words of", quoted(facts["words"]))]
    if facts["generator"] in ("model", "endpoint"):
        rows.append(("Sampling", f"temperature {number(facts['temperature'])}"))
    trained = wording.method_table(report)
    if wording.releases_votes(report):  # and no adapter was trained
        trained = [row for row in trained if row[0] in _OF_VOTES]
    return [*rows, *trained]


def _quality(report: Report) -> list[tuple[str, str]]:
    facts, quality = report["texts"], report["quality"]
    count = str(facts["count"])
    if facts["count"] < facts["asked_for"]:
        count += f" of the {facts['asked_for']} asked for: no more that differ were written"
    rows = [
        ("Texts", count),
        (
            "Tokens of a text",
            f"{number(float(np.median(quality['tokens_per_text'])))} (median){_cut(report)}",
        ),
        ("Perplexity under the base model", f"{number(quality['perplexity'])}{_cut(report)}"),
    ]
    for n, share in quality["distinct"].items():
        rows.append((f"Distinct {n}-grams of words", number(share, 3)))
    rows.append(("Near copies of an earlier text", _percent(quality["near_copies"])))
    for name, share in quality["near_public"].items():
        rows.append((f"Near copies of public texts ({name})", _percent(share)))
    alike = f"at least half of its runs of {NEAR_COPY_RUN} words stand in one other text, in their order"
    return [*rows, ("A near copy", alike)]


def _cut(report: Report) -> str:
    """Where figures are of the beginnings of texts alone."""
    longest = report["method"]["max_length"]
    whole = max(report["quality"]["tokens_per_text"], default=0) < longest - 1
    return "" if whole else f", each cut at {longest} tokens"


def _key_figures(report: Report) -> list[tuple[str, str, str]]:
    """(value, name, detail) of the numbers that are read first."""
    figures, s, quality = [], report["statement"], report["quality"]
    if is_private(report):
        figures += [
            (rounded_up(s["epsilon"]), "ε", f"at δ = {number(s['delta'])}"),
            (f"one {s['unit']}", "privacy unit", wording.adjacency(s)),
        ]
    figures += [
        (number(report["texts"]["count"]), "texts", f"by {report['method']['name']}"),
        (number(quality["perplexity"]), "perplexity", "under the base model"),
        (_percent(quality["near_copies"]), "near copies", "of an earlier text"),
    ]
    return figures


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _short(value: float) -> str:
    """For a figure: 26.5, 1 300, 2.3e5."""
    if value >= 1e5:
        return f"{value:.2g}".replace("e+0", "e")
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


@in_style
def texts_plot(report: Report) -> Markup:
    """How long the texts are, and how probable to the base model."""
    quality = report["quality"]
    figure, (length, odds) = grid(1, 2, WIDTH, 3.1, sharey=False)
    tokens = np.array(quality["tokens_per_text"], dtype=float)
    perplexity = np.array([p for p in quality["perplexity_per_text"] if p is not None], dtype=float)
    low, high = tokens.min(initial=1.0), tokens.max(initial=1.0)
    width = max(1.0, np.ceil((high - low + 1) / _BINS))
    _bars(length, tokens, np.arange(low - 0.5, high + width + 0.5, width), ACCENT)
    length.set(xlabel="tokens of a text", ylabel="texts")
    if len(perplexity):
        first, last = np.log(perplexity.min()), np.log(perplexity.max())
        if last - first < 1e-3:
            first, last = first - 0.1, last + 0.1
        odds.set_xscale("log")
        _bars(odds, perplexity, np.exp(np.linspace(first, last, _BINS + 1)), SECOND)
        near = last - first < 2 * np.log(10)
        odds.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if near else (1.0,), numticks=8))
        odds.xaxis.set_minor_locator(NullLocator())
        odds.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    odds.set(xlabel="perplexity of a text under the base model")
    return inline_svg(figure, f"lengths and perplexities of {len(tokens)} texts")


def _bars(axes: Axes, values: np.ndarray, edges: np.ndarray, colour: str) -> None:
    """A histogram with its median."""
    counts, _ = np.histogram(values, edges)
    axes.bar(
        edges[:-1],
        counts,
        np.diff(edges),
        align="edge",
        color=colour,
        alpha=0.85,
        linewidth=0.6,
        edgecolor="white",
    )
    middle = float(np.median(values))
    axes.axvline(middle, color=INK, linewidth=1)
    axes.annotate(
        f"median {_short(middle)}",
        (middle, 1),
        (4, 2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=INK,
        va="bottom",
    )
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylim(bottom=0)
