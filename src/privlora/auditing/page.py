"""Writing an audit: JSON and one self-contained page with one picture, into the run's private folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, NullLocator

from privlora.accounting.accountants import Events, delta_curve, merged, rough_epsilon
from privlora.accounting.events import describe_events
from privlora.accounting.meaning import in_words, meaning
from privlora.auditing.bounds import Floats, curve_floor
from privlora.auditing.exposure import ExposureReport, exposure_of_scores
from privlora.auditing.membership import Area, roc_curve
from privlora.errors import RunError
from privlora.pages.figures import ACCENT, GRID, INK, MUTED, SECOND, grid, in_style, inline_svg
from privlora.pages.numbers import finite, number
from privlora.pages.template import fill
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder, write_atomically
from privlora.version import __version__

if TYPE_CHECKING:
    from privlora.auditing.canary_scores import CanaryState, OneRunAudit
    from privlora.auditing.federation import FederationAudit
    from privlora.auditing.finished_run import FinishedAudit, Leakage
    from privlora.auditing.released_texts import TextAudit
    from privlora.auditing.shadows import ShadowAudit

    Audit = FinishedAudit | OneRunAudit | ShadowAudit | TextAudit | FederationAudit

PAGE, JSON = "audit.html", "audit.json"
_COLOURS = {"before": MUTED, "after": ACCENT, "canaries": ACCENT}
_PRIVATE = ("PRIVATE", "This page holds facts about private records. Keep it where the records are")

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # title, names of columns (empty: none), rows


@dataclass(frozen=True)
class Claim:
    """What a run's plan allows any attack: its releases, and epsilon at delta."""

    events: Events
    epsilon: float

    def most(self, false_positive_rates: Floats) -> Floats:
        """The highest TPR at each FPR, by the plan's whole privacy curve."""
        epsilons = np.linspace(0, max(4.0, min(100.0, rough_epsilon(merged(self.events)))), 96)
        floor = curve_floor(epsilons, np.array(delta_curve(self.events, list(epsilons), grid=5e-3)))
        return np.array([1 - floor(1 - rate) for rate in false_positive_rates])


def write_finished(audit: FinishedAudit) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora audit RUN``. Raises RunError if nothing can be written."""
    members, leakage = audit.membership or {}, audit.leakage
    return _write(
        audit,
        Path(audit.run),
        None if audit.summary is None else audit.summary.events(),
        heading="What the run gives away",
        by=f"{audit.model} · {audit.method} · {audit.run}",
        verdict=verdict_of_secrets(**leakage) if leakage and not members else None,
        scores={stage: (each.members, each.non_members) for stage, each in members.items()},
        secrets=secrets_picture(**leakage) if leakage else None,
        tables=_tables(audit),
        notes="run",
    )


def write_one_run(
    audit: OneRunAudit,
    state: CanaryState,
    events: Events,
    root: Path,
    kind: str,
    temperature: float | None = None,
    *,
    public: bool = False,
) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora audit CONFIG --one-run``. public: whether canaries begin as public records.

    Raises RunError if nothing can be written.
    """
    written = kind if temperature is None else f"{kind}, temperature {temperature:g}"
    written += ", behind the beginnings of public records" if public else ""
    members, others = state.scores[state.included], state.scores[~state.included]
    exposure = exposure_of_scores(members, others)
    rows: list[tuple[str, ...]] = []
    if audit.epsilon_signals is not None:
        rows.append(("by the signals of all canaries together", f"ε ≥ {number(audit.epsilon_signals)}"))
    rows += [
        ("guesses", f"{audit.correct} right of {audit.guesses}, on {audit.canaries} canaries ({written})"),
        ("AUC of the scores", number(audit.area)),
        *_exposure(exposure.mean, exposure.chance, exposure.ceiling, len(members)),
    ]
    more = {"kind": kind, "temperature": temperature, "public_prefixes": public, **bits_of(exposure)}
    return _write(
        audit,
        root,
        events,
        more,
        heading="Audit of one run by its canaries",
        by=str(root),
        scores={"canaries": (members, others)},
        tables=_numbers(audit, rows, events),
        notes="canaries",
        kind=kind,
    )


def bits_of(exposure: ExposureReport) -> dict[str, float]:
    """JSON-ready."""
    return {"exposure": exposure.mean, "chance": exposure.chance, "ceiling": exposure.ceiling}


def write_shadows(audit: ShadowAudit, root: Path) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora audit CONFIG --shadows N``. Raises RunError if nothing can be written."""
    adapters = audit.result.members + audit.result.non_members
    events = None if audit.event is None else [(audit.event, audit.steps)]
    rows: list[tuple[str, ...]] = [
        ("guesses", f"{audit.correct} right of {audit.judged}"),
        ("AUC", _interval(audit.result.area)),
        ("adapters", f"{adapters}, half of them with the canary ({audit.kind})"),
    ]
    RunFolder(root).create(releases=False)
    return _write(
        audit,
        root,
        events,
        heading="Audit of one configuration by shadow adapters",
        by=f"{audit.method} · {root}",
        scores={"canaries": (audit.members, audit.non_members)},
        tables=_numbers(audit, rows, events),
        notes="shadows",
    )


def write_texts_audit(
    audit: TextAudit, state: CanaryState, events: Events | None, root: Path
) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora synthesize CONFIG --audit``. events: of the claim, None without one.

    Raises RunError if nothing can be written.
    """
    inside, outside = audit.included, audit.canaries - audit.included
    recited = f"{audit.recited[0]} of {inside} in, {audit.recited[1]} of {outside} out"
    rows: list[tuple[str, ...]] = [
        ("guesses", f"{audit.correct} right of {audit.guesses}, on {audit.canaries} canaries"),
        ("AUC of the scores", _interval(audit.area)),
        *_exposure(audit.exposure, audit.chance, audit.ceiling, inside),
        ("recited, five words in a row", recited),
        ("texts", str(audit.texts)),
    ]
    return _write(
        audit,
        root,
        events,
        heading="What the texts give away about canaries",
        by=str(root),
        scores={"canaries": (state.scores[state.included], state.scores[~state.included])},
        tables=_numbers(audit, rows, events),
        notes="texts",
    )


def write_federation(audit: FederationAudit, root: Path) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora audit CONFIG`` for a federation. Raises RunError if it cannot be written.

    Earlier audits in this folder stay. Nothing in it is a fact about private records.
    """
    attackers: list[tuple[str, ...]] = [
        (
            each.attacker,
            each.view,
            number(each.epsilon_lower),
            each.statistic,
            f"{each.correct} of {each.judged}",
        )
        for each in audit.views
    ]
    numbers: list[tuple[str, ...]] = [
        ("claimed of one round", _claimed(audit)),
        ("a round, by the ledger", describe_events(audit.events) if audit.events else "nothing was charged"),
        ("whose presence is hidden", f"one {audit.unit}"),
        ("noise that the claim counts on", audit.noise),
        ("rounds of a victim in each world", str(audit.trials)),
    ]
    RunFolder(root).create(releases=False)
    return _write(
        audit,
        root,
        audit.events,
        heading="Audit of one round of a federation",
        by=f"{audit.rule} · {root}",
        scores={"canaries": audit.strongest.scores[::-1]},
        private=False,
        tables=[
            ("Attackers", ("attacker", "sees", "ε at least", "statistic", "right guesses"), attackers),
            ("Numbers", (), numbers),
        ],
        notes="federation",
    )


def _claimed(audit: Audit) -> str:
    if audit.epsilon_claimed is None:
        return "nothing: this run is not private"
    return f"ε = {rounded_up(audit.epsilon_claimed)} at δ = {number(audit.delta)}"


def _numbers(
    audit: OneRunAudit | ShadowAudit | TextAudit, rows: list[tuple[str, ...]], events: Events | None
) -> list[Table]:
    bounds: list[tuple[str, ...]] = [
        ("claimed by the plan", _claimed(audit)),
        (f"lower bound, {audit.confidence:.0%} confidence", f"ε ≥ {number(audit.epsilon_lower)}"),
        ("the same without assuming the plan's kind of release", f"ε ≥ {number(audit.epsilon_lower_plain)}"),
    ]
    audited = [] if events is None else [("audited", describe_events(events))]
    return [("Numbers", (), [*bounds, *rows, *audited])]


def _exposure(mean: float, chance: float, ceiling: float, inside: int) -> list[tuple[str, str]]:
    return [
        ("mean exposure", f"{mean:.2f} bits of the {inside} canaries that were in"),
        ("what chance gives, and what is most", f"{chance:.2f} and {ceiling:.2f} bits"),
    ]


def _interval(area: Area) -> str:
    return f"{number(area.value)} ({number(area.low)} to {number(area.high)})"


def _tables(audit: FinishedAudit) -> list[Table]:
    tables: list[Table] = []
    if audit.membership is not None:
        head: tuple[str, ...] = ("", "AUC", "balanced accuracy", "TPR at FPR", "right guesses", "ε at least")
        rows: list[tuple[str, ...]] = [
            (
                stage,
                _interval(m.result.area),
                number(m.result.held_out_balanced_accuracy),
                ", ".join(f"{number(tpr)} at {number(fpr)}" for fpr, tpr in m.result.true_positive_rates),
                f"{m.correct} of {m.guesses}",
                number(m.epsilon_lower),
            )
            for stage, m in audit.membership.items()
        ]
        first = audit.membership["before"].result
        tables.append((f"{first.members} members, {first.non_members} non-members", head, rows))
    if audit.leakage is not None:
        head = ("", "mean exposure", "chance", "memorised", "recited")
        rows = []
        for stage, x in audit.leakage.items():
            bits, recited = f"{x.exposure:.2f} bits", f"{x.extracted} of {x.secrets}"
            rows.append((stage, bits, f"{x.chance:.2f}", f"{x.ceiling:.2f}", recited))
        tables.append(("Planted secrets", head, rows))
    return tables


def at_most(audit: Audit) -> str:
    """A sentence of pages and commands: what so few guesses could have shown. Empty where they could have refuted the
    claim, or nothing is claimed."""
    most = audit.epsilon_most
    if most is None:
        return ""
    signals = "; the bound is that of the signals" if audit.epsilon_lower > most else ""
    return (
        f"Guesses on {audit.guessed} could show no more than ε ≥ {rounded_up(most)}, had all been right: by them alone "
        f"the claim could not be refuted{signals}."
    )


def verdict_of(audit: Audit) -> str:
    """The sentence at the top of the page: the claim and the bound, and whether they agree."""
    bound = f"at {audit.confidence:.0%} confidence ε is at least {number(audit.epsilon_lower)}"
    if audit.epsilon_claimed is None:
        return f"Nothing is claimed; {bound}."
    claimed = f"the claimed ε = {rounded_up(audit.epsilon_claimed)} (δ = {number(audit.delta)})"
    if audit.violated:
        return f"The attack refutes {claimed}: {bound}. Do not publish anything of this configuration."
    return f"The attack agrees with {claimed}: {bound}. {at_most(audit)}".rstrip()


def verdict_of_secrets(before: Leakage, after: Leakage) -> str:
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
def roc_picture(
    scores: Mapping[str, tuple[Floats, Floats]], claim: Claim | None, epsilon_lower: float
) -> Markup:
    """ROC curves (members, non-members) on logarithmic axes, the region that the claim forbids, and the lower bound."""
    smallest = min(1 / max(len(other), len(member)) for member, other in scores.values()) / 2
    rates = np.geomspace(smallest, 1, 200)
    figure, (axes,) = grid(1, 1, 6.4, 4.6)
    axes.plot(rates, rates, color=GRID, linewidth=1)
    if claim is not None:
        most = claim.most(rates)
        axes.fill_between(rates, most, 1, color=SECOND, alpha=0.14, linewidth=0)
        axes.plot(rates, most, color=SECOND, linewidth=1.4, label=f"claimed: ε = {rounded_up(claim.epsilon)}")
    if epsilon_lower > 0:
        bound, label = (
            np.minimum(1, np.exp(epsilon_lower) * rates),
            f"lower bound: ε ≥ {number(epsilon_lower)}",
        )
        axes.plot(rates, bound, color=INK, linewidth=1, linestyle=(0, (4, 3)), label=label)
    for name, (members, others) in scores.items():
        curve = roc_curve(members, others)
        wrong, right = (
            np.maximum(each, smallest) for each in (curve.false_positive_rates, curve.true_positive_rates)
        )
        axes.step(wrong, right, where="post", color=_COLOURS[name], linewidth=1.8, label=name)
    axes.set(xscale="log", yscale="log", xlim=(smallest, 1), ylim=(smallest, 1))
    axes.set(xlabel="false positives", ylabel="true positives")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda rate, _: number(rate)))
        axis.set_minor_locator(NullLocator())
    axes.legend(loc="lower right", labelcolor=MUTED)
    return inline_svg(figure, "true against false positives of the attack, and what the claim allows")


@in_style
def secrets_picture(before: Leakage, after: Leakage) -> Markup:
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


def _write(
    audit: Audit,
    root: Path,
    events: Events | None,
    more: Mapping[str, Any] | None = None,
    *,
    scores: Mapping[str, tuple[Floats, Floats]],
    verdict: str | None = None,
    private: bool = True,
    **shown: Any,
) -> tuple[Path, Path]:
    """events: what the claim is of. more: of the JSON. scores: of the picture; without them there is none. verdict: in
    place of ``verdict_of``. private: whether it holds facts about private records; else earlier audits of the folder
    stay. shown: what else audit.html.j2 needs.
    """
    folder = RunFolder(root)
    claim = Claim(events, audit.epsilon_claimed) if events and audit.epsilon_claimed is not None else None
    page = fill(
        "audit.html.j2",
        "privlora.auditing",
        title=f"Audit · {shown['by']}",
        banner=_PRIVATE if private else None,
        verdict=verdict or verdict_of(audit),
        violated=audit.violated,
        figure=roc_picture(scores, claim, audit.epsilon_lower) if scores else None,
        bounded=audit.epsilon_lower > 0,
        means=[] if claim is None else in_words(meaning(claim.events), "unit"),
        claimed=None if claim is None else rounded_up(claim.epsilon),
        version=__version__,
        **{"secrets": None, "kind": None, **shown},
    )
    try:
        folder.private.mkdir(exist_ok=True)
        folder.private.chmod(0o700)
    except OSError as error:
        raise RunError(
            f"cannot write into {str(folder.private)!r}: {error.strerror}", fix="mend its permissions"
        ) from None
    written = (folder.private / PAGE, folder.private / JSON) if private else _free(folder.private)
    content = finite({**audit.to_dict(), **(more or {})})
    write_atomically(written[1], json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_atomically(written[0], page)
    return written


def _free(folder: Path) -> tuple[Path, Path]:
    """audit.html and audit.json, or the first of audit-2, audit-3, … of which there is neither."""
    stems = itertools.chain(["audit"], (f"audit-{count}" for count in itertools.count(2)))
    names = ((folder / f"{stem}.html", folder / f"{stem}.json") for stem in stems)
    return next(pair for pair in names if not any(path.exists() for path in pair))
