"""The privacy statement in words and numbers, shared by the card and the web page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from privlora.accounting.meaning import Meaning, in_words
from privlora.errors import in_one_line
from privlora.names import is_seen
from privlora.pages.numbers import number

Report = Mapping[str, Any]

# What is kept back in float32 is not worth a word; more is.
FLOAT32_KEEPS = 0.01
_WORD = re.compile(r"[A-Za-z0-9.^(][\w./:@+~*|()$^?\\-]{0,99}", re.ASCII)
_LINE = 100  # characters of an answer on a screen

_ADJACENCY = {
    "add-or-remove-one": "adding or removing one {unit}",
    "replace-one": "replacing one {unit} by another",
}


def is_private(report: Report) -> bool:
    """Whether any epsilon may be stated."""
    return bool(report["stamp"]["reason"] is None)


def phases(statement: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What was released, in order. A statement of one phase says it itself, by the same names."""
    found: Sequence[Mapping[str, Any]] = statement.get("phases", [statement])
    return found


def kinds(statement: Mapping[str, Any]) -> set[str]:
    """Of sampling in all phases: truncated_poisson, whose batches are capped; cyclic_poisson, whose steps draw from
    classes of units in turn, with correlated noise; balls_in_bins, with each unit in one step of a pass; poisson."""
    return {phase["sampling"]["kind"] for phase in phases(statement)}


def any_projected(statement: Mapping[str, Any]) -> bool:
    """Whether a phase projects gradients."""
    return any(phase["projections"] for phase in phases(statement))


def heading(report: Report) -> str:
    """What is released."""
    if "texts" not in report:
        return f"LoRA adapter for {quoted(report['adapter']['base_model'])}"
    chosen = report["texts"]["generator"] == "file"
    kind = "public texts that were chosen privately" if chosen else "synthetic texts"
    return f"{report['texts']['count']} {kind}"


def means(report: Report) -> list[str]:
    """What the statement means to one person; nothing in reports that do not say it."""
    found, s = report.get("means"), report["statement"]
    return [] if found is None else in_words(Meaning(**found), s["unit"], s["epsilon"])


MEND = "Fix: see what one record becomes, by `privlora plan`, and whether data.max_length cuts it"


def faults(said: Mapping[str, Any] | None) -> list[str]:
    """What is odd about an adapter's answers, in words. said: what ``answers`` gave."""
    if said is None:
        return []
    shown, ends = said["shown"], said["ends_at_once"]
    told = [("ends at once", said["begun"], ends["adapter"], ends["base"])]
    for fault in ("says nothing", "repeats itself", "repeats the prompt"):
        own, base = (sum(each[who]["fault"] == fault for each in shown) for who in ("adapter", "base"))
        told.append((fault, len(shown), own, base))
    return [
        f"on {own} of {asked} public prompts the adapter's answer {fault}; the base model's does on {base}"
        for fault, asked, own, base in told
        if own > base * fault.startswith("repeats")  # which small models often do by themselves
    ]


def spoken(said: Mapping[str, Any] | None) -> Iterator[str]:
    """The same answers as lines of a screen."""
    for each in [] if said is None else said["shown"]:
        cut = "…" if len(each["prompt"]) > _LINE else ""
        yield f"{'asked:':<10}{cut}{in_one_line(each['prompt'][-_LINE:])}"
        for who in ("base", "adapter"):
            fault = each[who]["fault"]
            odd = f" ({fault})" if fault else ""
            yield f"{'  ' + who + ':':<12}{in_one_line(each[who]['text'], _LINE)}{odd}"


def against_a_client(report: Report) -> float | None:
    """Epsilon against one of a federation's clients, where it is larger than the stated one; else None."""
    colluding = report.get("federation", {}).get("colluding")
    return colluding[0]["epsilon"] if colluding else None


def against_readers(report: Report) -> str:
    """What has to be added to the stated epsilon where it does not hold against everybody."""
    return "" if against_a_client(report) is None else ", against the server and whoever gets the adapter"


def releases_votes(report: Report) -> bool:
    """Whether records voted on public texts, in the place of gradients."""
    return bool(report["method"].get("releases") == "votes")


def _compares_losses(report: Report) -> bool:
    """Whether what was clipped are differences of losses, and no gradients."""
    return bool(report["method"].get("compares") == "losses")


def cast(report: Report) -> str:
    """What records gave to public texts, by the method's own name."""
    return "preference scores" if "answers" in report["method"]["public_texts"]["votes"] else "votes"


def clip_norm(report: Report) -> str:
    """C, and what became of it where it was adapted, or where the model's rounding takes a part of it."""
    first, noise = number(report["statement"]["clip_norm"]), report["noise"]
    if noise["clipping_slack"] > FLOAT32_KEEPS:
        part = f"{1 - noise['clipping_slack']:.0%}"
        clipped = "differences of losses" if _compares_losses(report) else "gradients"
        first += f" ({clipped} are clipped to {part} of it, since the model rounds them)"
    if noise["clip_quantile"] is None:
        return first
    return (
        f"{first} at first, {number(noise['last_clip_norm'])} at last (led by noisy counts to the "
        f"{number(noise['clip_quantile'])} quantile of norms)"
    )


def quoted(name: str) -> str:
    """A name of a user's as it stands in a sentence: with quotation marks, if it is more than one word of ASCII.
    Characters that no reader sees, or that turn others round, are spelled out.

    >>> quoted("org/model-1"), quoted("two words")
    ('org/model-1', '"two words"')
    """
    if _WORD.fullmatch(name):
        return name
    shown = json.dumps(name, ensure_ascii=False)
    return "".join(each if is_seen(each) else json.dumps(each)[1:-1] for each in shown)


def adjacency(statement: Mapping[str, Any]) -> str:
    """Which data sets count as neighbours."""
    text = _ADJACENCY[statement["adjacency"]].format(unit=statement["unit"])
    if "truncated_poisson" in kinds(statement) and statement["adjacency"] == "add-or-remove-one":
        text += " (an empty one stands in for it)"
    if "cyclic_poisson" in kinds(statement):
        text += f" (each {statement['unit']} has its class whoever else is there)"
    return text


def unit(statement: Mapping[str, Any]) -> str:
    """Whose presence is hidden."""
    if statement["unit"] == "record":
        return "one record"
    if statement["unit"] == "client":
        return "one client: all that it sends"
    return f"one user: all of a user's records, at most {statement['records_per_user']} of them in a step"


def rate(sampling: Mapping[str, Any]) -> float:
    """In how many of all steps a unit is on average. sampling: of an event."""
    if sampling["kind"] == "balls_in_bins":
        return 1 / float(sampling["bins"])
    classes = float(sampling.get("classes", 1))  # a class has so many of all units
    return float(sampling["sample_rate"]) / classes


def mechanism(report: Report) -> str:
    """What was noised, in the last phase if there are several."""
    s = report["statement"]
    projections = phases(s)[-1]["projections"]
    if projections:
        layers = ", ".join(f"{r} of {d}" for r, d in projections)
        return (
            f"M2: whole per-{s['unit']} gradients clipped, then a fresh random projection ({layers} input "
            "dimensions), Gaussian noise in it"
        )
    if s["unit"] == "client":
        return "Gaussian mechanism on the clipped updates of whole clients"
    if releases_votes(report):
        return f"Gaussian mechanism on one vector of {cast(report)} per {s['unit']}, one entry a public text"
    banded = ""
    if "cyclic_poisson" in kinds(s):
        before = s["sampling"]["classes"] - 1
        of = "the step" if before == 1 else f"the {before} steps"
        banded = f", each step's noise taking back a part of that of {of} before it"
    what = f"clipped per-{s['unit']} gradients, {report['method']['described']}"
    if _compares_losses(report):
        what = f"one clipped number per {s['unit']}, {report['method']['described']}; no gradient is taken"
    return f"Gaussian mechanism on {what}{banded}"


def loss_unit(report: Report) -> str:
    """Of the held-out loss."""
    if "preferences" in report:
        return "in nats per preference"
    classes = report.get("classes")
    if classes is None:
        return "in nats per token"
    return "in nats" if classes["num_labels"] > 1 else "squared"


def astray(report: Report) -> str | None:
    """Of a run whose model broke, by its held-out loss; None of others."""
    broken = [row["step"] for row in report["evaluation"] if row["loss_per_example"] is None]
    if not broken:
        return None
    return f"The held-out loss was not a finite number after step {broken[0]}: the model broke, or was broken before."


def metrics(report: Report) -> list[str]:
    """Names of what held-out records were measured by beside the loss: of a classifier, and of preferences."""
    if not {"classes", "preferences"} & set(report) or not report["evaluation"]:
        return []
    beside = {"step", "loss_per_example", "standard_error", "examples"}
    return [name for name in report["evaluation"][-1] if name not in beside]


def targets_in_words(adapter: Mapping[str, Any]) -> str:
    """Which layers, by target_modules and what is left out of them (exclude_modules; older reports do not say)."""
    targets, without = adapter["target_modules"], adapter.get("exclude_modules")
    words, left = (
        quoted(each) if isinstance(each, str) else ", ".join(map(quoted, each))
        for each in (targets, without or ())
    )
    return f"{words} without {left}" if left else words


def coverage_in_words(coverage: Mapping[str, Any]) -> str:
    """Which part of the weights is adapted, and why layers are left out that target_modules stands for.

    >>> coverage_in_words({"share": 0.021, "experts": 0.96, "left_out": {"not called": ["fc1", "fc2"]}})
    '2.1 % of the weights; experts (96 %) stay as they are; left out: fc1, fc2 (not called)'
    """
    share, experts = (
        f"{100 * s:.{0 if s >= 0.1 else 1}f} %" for s in (coverage["share"], coverage["experts"])
    )
    parts = [f"{share} of the weights", f"experts ({experts}) stay as they are"][
        : 2 if coverage["experts"] else 1
    ]
    left_out = (f"{', '.join(map(quoted, names))} ({why})" for why, names in coverage["left_out"].items())
    return "; ".join([*parts, *(f"left out: {each}" for each in left_out)])
