"""Writing an audit: JSON and one self-contained page with one picture, into the run's private folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, NullLocator

from privlora.accounting.accountants import Events
from privlora.accounting.events import describe_events
from privlora.accounting.meaning import in_words, meaning
from privlora.auditing.bounds import Floats, floor_of
from privlora.auditing.membership import roc_curve
from privlora.errors import RunError
from privlora.pages.figures import ACCENT, GRID, INK, MUTED, SECOND, grid, in_style, inline_svg
from privlora.pages.numbers import finite, number
from privlora.pages.template import fill
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder, write_atomically
from privlora.version import __version__

if TYPE_CHECKING:
    from privlora.auditing.canary_scores import OneRunAudit
    from privlora.auditing.federation import FederationAudit
    from privlora.auditing.finished_run import FinishedAudit, Leakage
    from privlora.auditing.released_texts import TextAudit
    from privlora.auditing.shadows import ShadowAudit

    Audit = FinishedAudit | OneRunAudit | ShadowAudit | TextAudit | FederationAudit

PAGE, JSON = "audit.html", "audit.json"
_COLOURS = {"before": MUTED, "after": ACCENT, "canaries": ACCENT}
_PRIVATE = ("PRIVATE", "This page holds facts about private records. Keep it where the records are")


def write_audit(audit: Audit, root: Path, **more: Any) -> tuple[Path, Path]:
    """The page and the JSON of an audit, in the private folder of ``root``. more: other facts, JSON-ready.

    Of a federation nothing is a fact about private records, and earlier audits of the folder stay. Raises RunError if
    nothing can be written.
    """
    folder, private = RunFolder(root), audit.page != "federation"
    facts, events, scores = audit.to_dict() | more, audit.events, audit.curves
    claimed, leakage = audit.epsilon_claimed, getattr(audit, "leakage", None)
    claims = events if claimed is not None else None
    by = " · ".join([*(str(facts[name]) for name in ("model", "method", "rule") if name in facts), str(root)])
    page = fill(
        "audit.html.j2",
        "privlora.auditing",
        title=f"Audit · {by}",
        banner=_PRIVATE if private else None,
        page=audit.page,
        by=by,
        facts=facts,
        verdict=_verdict_of_secrets(**leakage) if leakage and not scores else verdict_of(audit),
        figure=_roc_picture(scores, claims, claimed, audit.epsilon_lower) if scores else None,
        bounded=audit.epsilon_lower > 0,
        inside=len(scores["canaries"][0]) if "canaries" in scores else 0,
        secrets=_secrets_picture(**leakage) if leakage else None,
        means=in_words(meaning(claims), "unit", claimed) if claims else [],
        claimed=_claimed_of(audit),
        audited=describe_events(events) if events else None,
        version=__version__,
    )
    if audit.page in ("shadows", "federation"):  # which trained nothing in this folder
        folder.create(releases=False)
    try:
        folder.private.mkdir(exist_ok=True)
        folder.private.chmod(0o700)
    except OSError as error:
        what = f"cannot write into {str(folder.private)!r}: {error.strerror}"
        raise RunError(what, fix="mend its permissions") from None
    written = (folder.private / PAGE, folder.private / JSON) if private else _free(folder.private)
    write_atomically(written[1], json.dumps(finite(facts), indent=1, allow_nan=False) + "\n")
    write_atomically(written[0], page)
    return written


def _free(folder: Path) -> tuple[Path, Path]:
    """audit.html and audit.json, or the first of audit-2, audit-3, … of which there is neither."""
    stems = itertools.chain(["audit"], (f"audit-{count}" for count in itertools.count(2)))
    names = ((folder / f"{stem}.html", folder / f"{stem}.json") for stem in stems)
    return next(pair for pair in names if not any(path.exists() for path in pair))


def _claimed_of(audit: Audit) -> str:
    if audit.epsilon_claimed is None:
        return "nothing: this run is not private"
    return f"ε = {rounded_up(audit.epsilon_claimed)} at δ = {number(audit.delta)}"


def at_most(audit: Audit) -> str:
    """A sentence of pages and commands: what so few guesses could have shown. Empty where they could have refuted the
    claim, or nothing is claimed."""
    most = audit.epsilon_most
    if most is None:
        return ""
    signals = "; the bound is that of the signals" if audit.epsilon_lower > most else ""
    return (
        f"Even if all guesses on {audit.guessed} were right, they would show only ε ≥ {rounded_up(most)}: too few to "
        f"refute the claim{signals}."
    )


def verdict_of(audit: Audit) -> str:
    """The sentence at the top of the page: the claim and the bound, and whether they agree."""
    bound = f"at {audit.confidence:.0%} confidence ε is at least {number(audit.epsilon_lower)}"
    if audit.epsilon_claimed is None:
        return f"Nothing is claimed; {bound}."
    claimed = f"the claimed ε = {rounded_up(audit.epsilon_claimed)} (δ = {number(audit.delta)})"
    if audit.violated:
        return f"The attack refutes {claimed}: {bound}. Do not publish anything of this configuration."
    return (
        f"The attack does not refute {claimed}: {bound}, which proves no privacy. {at_most(audit)}".rstrip()
    )


def _verdict_of_secrets(before: Leakage, after: Leakage) -> str:
    """The same where planted secrets are all that was looked for."""
    found = (
        f"{after.extracted} of {after.secrets} planted secrets are recited after training ({before.extracted} before), "
        f"and their mean exposure is {after.exposure:.2f} bits, where chance is {after.chance:.2f} and "
        f"{after.ceiling:.0f} is memorised"
    )
    leaks = after.extracted > before.extracted or after.exposure > max(before.exposure, after.chance) + 1
    if leaks:
        return f"The adapter gives planted secrets away: {found}."
    return f"This attack finds nothing that training gave away: {found}. A stronger one may."


@in_style
def _roc_picture(
    scores: Mapping[str, tuple[Floats, Floats]],
    claims: Events | None,
    claimed: float | None,
    epsilon_lower: float,
) -> Markup:
    """ROC curves (members, non-members) on logarithmic axes, the region that the claim forbids, and the lower bound."""
    smallest = min(1 / max(len(other), len(member)) for member, other in scores.values()) / 2
    rates = np.geomspace(smallest, 1, 200)
    figure, (axes,) = grid(1, 1, 6.4, 4.6)
    axes.plot(rates, rates, color=GRID, linewidth=1)
    if claims and claimed is not None:
        floor = floor_of(tuple(claims))
        most = [1 - floor(1 - rate) for rate in rates]
        axes.fill_between(rates, most, 1, color=SECOND, alpha=0.14, linewidth=0)
        axes.plot(rates, most, color=SECOND, linewidth=1.4, label=f"claimed: ε = {rounded_up(claimed)}")
    if epsilon_lower > 0:
        bound, label = (
            np.minimum(1, np.exp(epsilon_lower) * rates),
            f"lower bound: ε ≥ {number(epsilon_lower)}",
        )
        axes.plot(rates, bound, color=INK, linewidth=1, linestyle=(0, (4, 3)), label=label)
    for name, (members, others) in scores.items():
        curve = roc_curve(members, others)
        both = (curve.false_positive_rates, curve.true_positive_rates)
        wrong, right = (np.maximum(each, smallest) for each in both)
        axes.step(wrong, right, where="post", color=_COLOURS[name], linewidth=1.8, label=name)
    axes.set(xscale="log", yscale="log", xlim=(smallest, 1), ylim=(smallest, 1))
    axes.set(xlabel="false positives", ylabel="true positives")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda rate, _: number(rate)))
        axis.set_minor_locator(NullLocator())
    axes.legend(loc="lower right", labelcolor=MUTED)
    return inline_svg(figure, "true against false positives of the attack, and what the claim allows")


@in_style
def _secrets_picture(before: Leakage, after: Leakage) -> Markup:
    """Mean exposure of planted secrets before and after training, between chance and what is memorised, in bits."""
    figure, (axes,) = grid(1, 1, 6.4, 1.9)
    for lane, (name, found) in enumerate((("after", after), ("before", before))):
        axes.barh(lane, found.exposure, 0.55, color=_COLOURS[name])
        short = found.exposure < 0.6 * found.ceiling
        axes.annotate(
            f"{found.exposure:.2f} bits, {found.extracted} of {found.secrets} recited",
            (max(found.exposure, found.chance) if short else 0.1, lane),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=INK if short else "white",
        )
    for level, word in ((after.chance, "chance"), (after.ceiling, "memorised")):
        axes.axvline(level, color=SECOND, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(word, (level, 1.5), (3, 0), textcoords="offset points", color=SECOND, va="bottom")
    axes.set(xlim=(0, 1.12 * after.ceiling), ylim=(-0.5, 1.75), xlabel="mean exposure (bits)")
    axes.set_yticks([0, 1], ["after", "before"])
    axes.grid(axis="y", visible=False)
    return inline_svg(figure, "Exposure of planted secrets before and after training")
