"""What card and page say of a synthetic data set. Pure functions of the report."""

from __future__ import annotations

from statistics import median
from typing import Final

from privlora.pages.numbers import number
from privlora.ranges import NEAR_COPY_RUN
from privlora.reporting import wording
from privlora.reporting.wording import Report, quoted

COST: Final = (
    "Every figure is a function of the released texts, of the base model and of public texts, so none costs privacy. "
    "None compares with a private record: that would release what it says without noise."
)
_ORIGINS: Final = {
    "population": "the population that the private run ended with, chosen by what was released",
    "adapter": "written by the privately trained adapter",
}
_OF_VOTES: Final = ("Base model", "Method", "Public texts", "Votes", "Preference scores", "Text")


def made_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows: where the texts come from, then how what wrote them was trained."""
    facts, trained = report["texts"], wording.method_table(report)
    origin = _ORIGINS[facts["from"]]
    if facts["of_a_finished_run"]:
        origin += "; the run was finished before, and asking its adapter cost nothing more"
    rows = [("Texts", origin), ("Asked for in the words of", quoted(facts["words"]))]
    if facts["generator"] in ("model", "endpoint"):
        rows.append(("Sampling", f"temperature {number(facts['temperature'])}"))
    votes = wording.releases_votes(report)  # and no adapter was trained
    return [*rows, *(row for row in trained if not votes or row[0] in _OF_VOTES)]


def quality_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows of the figures that are measured."""
    facts, quality = report["texts"], report["quality"]
    count, tokens, longest = str(facts["count"]), quality["tokens_per_text"], report["method"]["max_length"]
    if facts["count"] < facts["asked_for"]:
        count += f" of the {facts['asked_for']} asked for: no more that differ were written"
    cut = "" if max(tokens, default=0) < longest - 1 else f", each cut at {longest} tokens"
    return [
        ("Texts", count),
        ("Tokens of a text", f"{number(median(tokens))} (median){cut}"),
        ("Perplexity under the base model", f"{number(quality['perplexity'])}{cut}"),
        *((f"Distinct {n}-grams of words", number(share, 3)) for n, share in quality["distinct"].items()),
        ("Near copies of an earlier text", percent(quality["near_copies"])),
        *(
            (f"Near copies of public texts ({name})", percent(share))
            for name, share in quality["near_public"].items()
        ),
        (
            "A near copy",
            f"at least half of its runs of {NEAR_COPY_RUN} words stand in one other text, in their order",
        ),
    ]


def percent(share: float) -> str:
    """Of texts, for reading."""
    return f"{share:.1%}".replace("%", " %")
