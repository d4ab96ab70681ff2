"""Writing an audit: JSON and one self-contained page with one picture, into the run's private folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, NullLocator

from privlora.accounting.accountants import Events, delta_curve, merged, rough_epsilon
from privlora.accounting.events import describe_events
from privlora.accounting.meaning import in_words, meaning
from privlora.auditing.bounds import Floats, curve_floor
from privlora.auditing.canary_scores import CanaryState, OneRunAudit
from privlora.auditing.exposure import ExposureReport, exposure_of_scores
from privlora.auditing.finished_run import FinishedAudit, Leakage
from privlora.auditing.membership import roc_curve
from privlora.auditing.released_texts import TextAudit
from privlora.auditing.shadows import ShadowAudit
from privlora.errors import RunError
from privlora.pages.figures import ACCENT, GRID, INK, MUTED, SECOND, grid, in_style, inline_svg
from privlora.pages.numbers import finite, number
from privlora.pages.template import fill
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder, write_atomically
from privlora.version import __version__

PAGE, JSON = "audit.html", "audit.json"
_COLOURS = {"before": MUTED, "after": ACCENT, "canaries": ACCENT}


@dataclass(frozen=True)
class Claim:
    """What a run's plan allows any attack: its releases, and epsilon at delta."""

    events: Events
    epsilon: float
    delta: float

    def most(self, false_positive_rates: Floats) -> Floats:
        """The highest TPR at each FPR, by the plan's whole privacy curve."""
        epsilons = np.linspace(0, max(4.0, min(100.0, rough_epsilon(merged(self.events)))), 96)
        floor = curve_floor(epsilons, np.array(delta_curve(self.events, list(epsilons), grid=5e-3)))
        return np.array([1 - floor(1 - rate) for rate in false_positive_rates])


def write_finished(audit: FinishedAudit) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora audit RUN``. Raises RunError if nothing can be written."""
    claim = None
    if audit.summary is not None and audit.epsilon is not None:
        claim = Claim(audit.summary.events(), audit.epsilon, audit.delta)
    scores, bound = None, 0.0
    if audit.membership is not None:
        bound = audit.membership[1].epsilon_lower
        scores = {
            stage: (found.members, found.non_members)
            for stage, found in zip(("before", "after"), audit.membership, strict=True)
        }
    return write_page(
        RunFolder(Path(audit.run)),
        audit.to_dict(),
        heading="What the run gives away",
        by=f"{audit.model} · {audit.method} · {audit.run}",
        verdict=_verdict_of_run(audit),
        violated=audit.violated,
        claim=claim,
        epsilon_lower=bound,
        scores=scores,
        secrets=None if audit.leakage is None else secrets_picture(*audit.leakage),
        tables=_tables(audit),
        notes=_NOTES_OF_RUN,
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
    claim = Claim(events, audit.epsilon_claimed, audit.delta)
    members, others = state.scores[state.included], state.scores[~state.included]
    exposure = exposure_of_scores(members, others)
    rows = [
        ("claimed by the plan", f"ε = {rounded_up(audit.epsilon_claimed)} at δ = {number(audit.delta)}"),
        (f"lower bound, {audit.confidence:.0%} confidence", f"ε ≥ {number(audit.epsilon_lower)}"),
        ("the same without assuming the plan's kind of release", f"ε ≥ {number(audit.epsilon_lower_plain)}"),
        *(
            [("by the signals of all canaries together", f"ε ≥ {number(audit.epsilon_signals)}")]
            if audit.epsilon_signals is not None
            else []
        ),
        ("guesses", f"{audit.correct} right of {audit.guesses}, on {audit.canaries} canaries ({written})"),
        ("AUC of the scores", number(audit.area)),
        ("mean exposure", f"{exposure.mean:.2f} bits of the {len(members)} canaries that were in"),
        ("what chance gives, and what is most", f"{exposure.chance:.2f} and {exposure.ceiling:.2f} bits"),
        ("audited", describe_events(events)),
    ]
    return write_page(
        RunFolder(root),
        {
            **audit.to_dict(),
            "kind": kind,
            "temperature": temperature,
            "public_prefixes": public,
            **bits_of(exposure),
        },
        heading="Audit of one run by its canaries",
        by=str(root),
        verdict=_verdict_of_canaries(audit),
        violated=audit.violated,
        claim=claim,
        epsilon_lower=audit.epsilon_lower,
        scores={"canaries": (members, others)},
        tables=[("Numbers", ("", ""), rows)],
        notes=(_CANARIES[kind], *_NOTES_OF_CANARIES),
    )


def bits_of(exposure: ExposureReport) -> dict[str, float]:
    """JSON-ready."""
    return {"exposure": exposure.mean, "chance": exposure.chance, "ceiling": exposure.ceiling}


def write_shadows(audit: ShadowAudit, root: Path) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora audit CONFIG --shadows N``. Raises RunError if nothing can be written."""
    claim = None
    claimed = "nothing: this run is not private"
    if audit.event is not None and audit.epsilon_claimed is not None:
        claim = Claim([(audit.event, audit.steps)], audit.epsilon_claimed, audit.delta)
        claimed = f"ε = {rounded_up(audit.epsilon_claimed)} at δ = {number(audit.delta)}"
    area, adapters = audit.result.area, audit.result.members + audit.result.non_members
    rows = [
        ("claimed by the plan", claimed),
        (f"lower bound, {audit.confidence:.0%} confidence", f"ε ≥ {number(audit.epsilon_lower)}"),
        ("the same without assuming the plan's kind of release", f"ε ≥ {number(audit.epsilon_lower_plain)}"),
        ("guesses", f"{audit.correct} right of {audit.judged}"),
        ("AUC", f"{number(area.value)} ({number(area.low)} to {number(area.high)})"),
        ("adapters", f"{adapters}, half of them with the canary ({audit.kind})"),
    ]
    folder = RunFolder(root)
    folder.create(releases=False)
    return write_page(
        folder,
        audit.to_dict(),
        heading="Audit of one configuration by shadow adapters",
        by=f"{audit.method} · {root}",
        verdict=_verdict_of_shadows(audit),
        violated=audit.violated,
        claim=claim,
        epsilon_lower=audit.epsilon_lower,
        scores={"canaries": (audit.members, audit.non_members)},
        tables=[("Numbers", ("", ""), rows)],
        notes=_NOTES_OF_SHADOWS,
    )


def write_texts_audit(
    audit: TextAudit, state: CanaryState, events: Events | None, root: Path
) -> tuple[Path, Path]:
    """The page and the JSON of ``privlora synthesize CONFIG --audit``. events: of the claim, None without one.

    Raises RunError if nothing can be written.
    """
    claim, claimed = None, "nothing: this run is not private"
    if events is not None and audit.epsilon_claimed is not None:
        claim = Claim(events, audit.epsilon_claimed, audit.delta)
        claimed = f"ε = {rounded_up(audit.epsilon_claimed)} at δ = {number(audit.delta)}"
    inside, outside = audit.included, audit.canaries - audit.included
    area = audit.area
    rows = [
        ("claimed by the plan", claimed),
        (f"lower bound, {audit.confidence:.0%} confidence", f"ε ≥ {number(audit.epsilon_lower)}"),
        ("the same without assuming the plan's kind of release", f"ε ≥ {number(audit.epsilon_lower_plain)}"),
        ("guesses", f"{audit.correct} right of {audit.guesses}, on {audit.canaries} canaries"),
        ("AUC of the scores", f"{number(area.value)} ({number(area.low)} to {number(area.high)})"),
        ("mean exposure", f"{audit.exposure:.2f} bits of the {inside} canaries that were in"),
        ("what chance gives, and what is most", f"{audit.chance:.2f} and {audit.ceiling:.2f} bits"),
        (
            "recited, five words in a row",
            f"{audit.recited[0]} of {inside} in, {audit.recited[1]} of {outside} out",
        ),
        ("texts", str(audit.texts)),
        *([("audited", describe_events(events))] if events is not None else []),
    ]
    return write_page(
        RunFolder(root),
        audit.to_dict(),
        heading="What the texts give away about canaries",
        by=str(root),
        verdict=_verdict_of_texts(audit),
        violated=audit.violated,
        claim=claim,
        epsilon_lower=audit.epsilon_lower,
        scores={"canaries": (state.scores[state.included], state.scores[~state.included])},
        tables=[("Numbers", ("", ""), rows)],
        notes=_NOTES_OF_TEXTS,
    )


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
        bound = np.minimum(1, np.exp(epsilon_lower) * rates)
        axes.plot(
            rates,
            bound,
            color=INK,
            linewidth=1,
            linestyle=(0, (4, 3)),
            label=f"lower bound: ε ≥ {number(epsilon_lower)}",
        )
    for name, (members, others) in scores.items():
        curve = roc_curve(members, others)
        axes.step(
            np.maximum(curve.false_positive_rates, smallest),
            np.maximum(curve.true_positive_rates, smallest),
            where="post",
            color=_COLOURS[name],
            linewidth=1.8,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlim=(smallest, 1), ylim=(smallest, 1))
    axes.set(xlabel="false positives", ylabel="true positives")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda rate, _: number(rate)))
        axis.set_minor_locator(NullLocator())
    axes.legend(loc="lower right", labelcolor=MUTED)
    return inline_svg(figure, "true against false positives of the attack, and what the claim allows")


_PRIVATE = ("PRIVATE", "This page holds facts about private records. Keep it where the records are")


@in_style
def secrets_picture(before: Leakage, after: Leakage) -> Markup:
    """Mean exposure of planted secrets before and after training, between chance and what is memorised, in bits."""
    figure, (axes,) = grid(1, 1, 6.4, 1.9)
    for lane, (name, found) in enumerate((("after", after), ("before", before))):
        axes.barh(lane, found.exposure, 0.55, color=_COLOURS[name])
        axes.annotate(
            f"{found.exposure:.2f} bits, {found.extracted} of {found.secrets} recited",
            (max(found.exposure, found.chance) if found.exposure < 0.6 * found.ceiling else 0.1, lane),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=INK if found.exposure < 0.6 * found.ceiling else "white",
        )
    for level, word in ((after.chance, "chance"), (after.ceiling, "memorised")):
        axes.axvline(level, color=SECOND, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(word, (level, 1.5), (3, 0), textcoords="offset points", color=SECOND, va="bottom")
    axes.set(xlim=(0, 1.12 * after.ceiling), ylim=(-0.5, 1.75), xlabel="mean exposure (bits)")
    axes.set_yticks([0, 1], ["after", "before"])
    axes.grid(axis="y", visible=False)
    return inline_svg(figure, "Exposure of planted secrets before and after training")


def roc_caption(claim: Claim | None, epsilon_lower: float) -> str:
    """What is in `roc_picture`, and nothing that is not."""
    text = "True positives against false positives of the attack, at every threshold."
    if claim is not None:
        text += " The shaded region is what the claim's privacy curve rules out for any attack."
    if epsilon_lower > 0:
        text += " The dashed line has the slope e^ε of the lower bound."
    return f"{text} Single curves wander: only the bound is a statement."


_NOTES_OF_RUN = (
    "A weak attack proves nothing: a stronger one may exist. The claimed ε holds against all of them.",
    "The lower bound holds if a fair coin decided for each record of both files whether it was trained on, and each "
    "record is a privacy unit of its own. Files that differ in anything else are told apart by that, as the row "
    "“before” shows.",
    "Exposure: the secret's rank among its references, in bits; what a model that never saw it has is given as chance.",
)
_FALL = "Its score is how much the loss fell"
_CANARIES = {
    "gradient": "A canary is a gradient in one module, far longer than the clipping norm. Its score is the likelihood "
    "ratio of what was released, with it and without it. The signals add up how far all of them moved the releases, "
    "beside how far the noise did; they know which were in each batch, so they test the noise and are no attack.",
    "random-tokens": f"A canary is a record of tokens that were drawn one by one. {_FALL} on all of them.",
    "codes": f"A canary is a sentence with a random code. {_FALL} on all of it.",
    "sampled": f"A canary is a text that the base model wrote before it was trained. {_FALL} on all of it.",
    "prefix-suffix": "A canary is a text that the base model wrote, with tokens behind it that hardly follow. It is "
    f"trained on these alone. {_FALL} on them.",
    "new-token": "A canary is a text that the base model wrote, with a token behind it that no record can hold and no "
    f"other canary has. It is trained on this one alone. {_FALL} on it. The model knows such tokens in an audit alone.",
}
_NOTES_OF_CANARIES = (
    "The canaries are privacy units like any other: sampled, clipped and noised. Those in gradient space are the worst "
    "records that the guarantee allows for; real records leak less.",
    "An attack sees all releases, as the guarantee allows; whoever has the adapter alone sees less.",
    "One run, one draw of the noise: by guesses the bound is more often far below the truth than near it. More "
    "canaries bring it nearer.",
    "Nothing of this run may be published. Its ledger counts what its releases would cost.",
)

_NOTES_OF_SHADOWS = (
    "One record decides: half of the adapters were trained with it, half without. Everything else is drawn anew for "
    "each of them: batches and noise.",
    "An adapter is judged by how much its loss on that record fell. The guarantee allows for attacks that see all "
    "releases, and for worse records: this bound is far below what they would show.",
    "More adapters bring the bound nearer to what the attack shows, and no nearer than that.",
    "No adapter was kept. What is written here is a fact about private records.",
)

_NOTES_OF_TEXTS = (
    "The attacker has the released texts, the public texts and the list of canaries, and does not know which of them "
    "were records. Whoever has every release, or the adapter, sees more: this bound is below what they would show.",
    "A canary is a record that is nobody's: a public text, and behind it words that nobody would write. "
    "Its score is how much more probable its words are under the released texts than under public ones (bigrams).",
    "Exposure: a canary's rank among those that were not in, in bits. Recited: five words of its end stand in a text.",
    "A bound of 0 proves nothing, and neither does exposure as chance gives it: only that this attack found nothing in "
    "these texts. Audit the same settings with privacy.private=false to learn what it can find.",
    "Nothing of this run may be published. Its ledger counts what its releases would cost.",
)


def at_most(most: float | None, bound: float, judged: str) -> str:
    """A sentence of pages and commands: what so few guesses could have shown. Empty for None, where they could have
    refuted the claim.

    bound: epsilon_lower, which signals may have raised above what guesses show. judged: on how many what.
    """
    if most is None:
        return ""
    signals = "; the bound is that of the signals" if bound > most else ""
    return (
        f"Guesses on {judged} could show no more than ε ≥ {rounded_up(most)}, had all been right: by them alone the "
        f"claim could not be refuted{signals}."
    )


def at_most_of_finished(audit: FinishedAudit) -> str:
    """``at_most`` of guesses about members; empty without any."""
    if audit.membership is None:
        return ""
    after = audit.membership[1]
    records = 2 * min(after.result.members, after.result.non_members)
    return at_most(audit.epsilon_most, after.epsilon_lower, f"{records} records")


def at_most_of_canaries(audit: OneRunAudit | TextAudit) -> str:
    """``at_most`` of guesses about canaries."""
    return at_most(audit.epsilon_most, audit.epsilon_lower, f"{audit.canaries} canaries")


def at_most_of_shadows(audit: ShadowAudit) -> str:
    """``at_most`` of guesses about adapters."""
    return at_most(audit.epsilon_most, audit.epsilon_lower, f"{audit.judged} adapters")


def _verdict_of_run(audit: FinishedAudit) -> str:
    if audit.membership is None:
        assert audit.leakage is not None
        return _verdict_of_secrets(*audit.leakage)
    after = audit.membership[1]
    bound = f"at {audit.confidence:.0%} confidence its ε is at least {number(after.epsilon_lower)}"
    if audit.epsilon is None:
        return f"The run claims nothing; {bound}."
    claimed = f"the claimed {rounded_up(audit.epsilon)} (δ = {number(audit.delta)})"
    if audit.violated:
        return f"The attack refutes {claimed}: {bound}."
    return f"Within {claimed}: {bound}. {at_most_of_finished(audit)}".rstrip()


def _verdict_of_secrets(before: Leakage, after: Leakage) -> str:
    found = (
        f"{after.extracted} of {after.secrets} planted secrets are recited after training ({before.extracted} before), "
        f"and their mean exposure is {after.exposure:.2f} bits, where chance is {after.chance:.2f} and "
        f"{after.ceiling:.0f} is memorised"
    )
    leaks = after.extracted > before.extracted or after.exposure > max(before.exposure, after.chance) + 1
    if leaks:
        return f"The adapter gives planted secrets away: {found}."
    return f"This attack finds nothing that training gave away: {found}. A stronger one may."


def _verdict_of_canaries(audit: OneRunAudit) -> str:
    claimed = f"ε = {rounded_up(audit.epsilon_claimed)} (δ = {number(audit.delta)})"
    bound = f"at {audit.confidence:.0%} confidence the run's ε is at least {number(audit.epsilon_lower)}"
    if audit.violated:
        return (
            f"The canaries refute the claimed {claimed}: {bound}. Do not publish runs of this configuration."
        )
    return f"The canaries agree with the claimed {claimed}: {bound}. {at_most_of_canaries(audit)}".rstrip()


def _verdict_of_texts(audit: TextAudit) -> str:
    bound = f"at {audit.confidence:.0%} confidence its ε is at least {number(audit.epsilon_lower)}"
    if audit.epsilon_claimed is None:
        return f"The run claims nothing; {bound}."
    claimed = f"ε = {rounded_up(audit.epsilon_claimed)} (δ = {number(audit.delta)})"
    if audit.violated:
        return f"The texts refute the claimed {claimed}: {bound}. Do not publish texts of this configuration."
    return f"The texts agree with the claimed {claimed}: {bound}. {at_most_of_canaries(audit)}".rstrip()


def _verdict_of_shadows(audit: ShadowAudit) -> str:
    bound = f"at {audit.confidence:.0%} confidence its ε is at least {number(audit.epsilon_lower)}"
    if audit.epsilon_claimed is None:
        return f"The configuration claims nothing; {bound}."
    claimed = f"ε = {rounded_up(audit.epsilon_claimed)} (δ = {number(audit.delta)})"
    if audit.violated:
        return (
            f"The canary refutes the claimed {claimed}: {bound}. Do not publish runs of this configuration."
        )
    return f"The canary agrees with the claimed {claimed}: {bound}. {at_most_of_shadows(audit)}".rstrip()


def _tables(audit: FinishedAudit) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    rows: list[tuple[str, ...]]
    if audit.membership is not None:
        rows = [
            (
                stage,
                f"{number(m.result.area.value)} ({number(m.result.area.low)} to {number(m.result.area.high)})",
                number(m.result.held_out_balanced_accuracy),
                ", ".join(f"{number(tpr)} at {number(fpr)}" for fpr, tpr in m.result.true_positive_rates),
                f"{m.correct} of {m.guesses}",
                number(m.epsilon_lower),
            )
            for stage, m in zip(("before", "after"), audit.membership, strict=True)
        ]
        head = ("", "AUC", "balanced accuracy", "TPR at FPR", "right guesses", "ε at least")
        first = audit.membership[0].result
        tables.append((f"{first.members} members, {first.non_members} non-members", head, rows))
    if audit.leakage is not None:
        rows = [
            (
                stage,
                f"{x.exposure:.2f} bits",
                f"{x.chance:.2f}",
                f"{x.ceiling:.2f}",
                f"{x.extracted} of {x.secrets}",
            )
            for stage, x in zip(("before", "after"), audit.leakage, strict=True)
        ]
        tables.append(("Planted secrets", ("", "mean exposure", "chance", "memorised", "recited"), rows))
    return tables


def write_page(
    folder: RunFolder,
    content: Mapping[str, Any],
    *,
    claim: Claim | None,
    epsilon_lower: float,
    scores: Mapping[str, tuple[Floats, Floats]] | None,
    private: bool = True,
    keep: bool = False,
    **shown: Any,
) -> tuple[Path, Path]:
    """content: of the JSON. claim, epsilon_lower, scores: of the picture; without scores there is none. private:
    whether it holds facts about private records. keep: leave earlier audits of the folder, and number this one. shown:
    what else audit.html.j2 needs.
    """
    page = fill(
        "audit.html.j2",
        "privlora.auditing",
        title=f"Audit · {shown['by']}",
        banner=_PRIVATE if private else None,
        figure=None if scores is None else roc_picture(scores, claim, epsilon_lower),
        caption=roc_caption(claim, epsilon_lower),
        means=[] if claim is None else in_words(meaning(claim.events), "unit"),
        claimed=None if claim is None else rounded_up(claim.epsilon),
        version=__version__,
        **{"secrets": None, **shown},
    )
    try:
        folder.private.mkdir(exist_ok=True)
        folder.private.chmod(0o700)
    except OSError as error:
        raise RunError(
            f"cannot write into {str(folder.private)!r}: {error.strerror}", fix="mend its permissions"
        ) from None
    written = _free(folder.private) if keep else (folder.private / PAGE, folder.private / JSON)
    write_atomically(written[1], json.dumps(finite(content), indent=1, allow_nan=False) + "\n")
    write_atomically(written[0], page)
    return written


def _free(folder: Path) -> tuple[Path, Path]:
    """audit.html and audit.json, or the first of audit-2, audit-3, … of which there is neither."""
    for count in itertools.count(1):
        stem = "audit" if count == 1 else f"audit-{count}"
        names = folder / f"{stem}.html", folder / f"{stem}.json"
        if not any(path.exists() for path in names):
            return names
    raise AssertionError
