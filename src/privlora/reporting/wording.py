"""The privacy statement in words and numbers, shared by the card and the web page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from privlora.accounting.meaning import Meaning, in_words
from privlora.config import OPTIMIZER_SETTINGS
from privlora.errors import in_one_line
from privlora.names import is_seen
from privlora.pages.numbers import number
from privlora.rehearsals.kept import because
from privlora.reporting.parties import against
from privlora.rounding import rounded_up

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


def any_truncated(statement: Mapping[str, Any]) -> bool:
    """Whether a phase caps its batches."""
    return any(phase["sampling"]["kind"] == "truncated_poisson" for phase in phases(statement))


def any_cyclic(statement: Mapping[str, Any]) -> bool:
    """Whether steps draw from classes of units in turn, with noise that is correlated between them."""
    return any(phase["sampling"]["kind"] == "cyclic_poisson" for phase in phases(statement))


def any_in_bins(statement: Mapping[str, Any]) -> bool:
    """Whether each unit is in exactly one of the steps of a pass."""
    return any(phase["sampling"]["kind"] == "balls_in_bins" for phase in phases(statement))


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


def sentence(report: Report) -> str:
    """The statement that an auditor would sign, or why there is none."""
    s = report["statement"]
    if not is_private(report):
        what = "These texts are" if "texts" in report else "This adapter is"
        return f"{what} NOT PRIVATE: {report['stamp']['reason']}. No epsilon can be stated."
    clipped = "" if "phases" in s else f" and clipping norm {clip_norm(report)}"
    if releases_votes(report):
        clipped = f", on {_cast(report)} of norm {clip_norm(report)} at most"
    what = (
        "The texts and every file beside them"
        if "texts" in report
        else "The adapter and every file beside it"
    )
    federation = report.get("federation")
    whose = "" if federation is None else f" {from_whom(federation)}"
    releases = ", and ".join(_releases(phase, clipped, s["unit"]) for phase in phases(s))
    return (
        f"{what} are ({rounded_up(s['epsilon'])}, {number(s['delta'])})-"
        f"differentially private under {adjacency(s)}.{whose} They derive from "
        f"{releases}; epsilon is an upper bound by the PLD accountant of dp-accounting "
        f"{report['versions']['dp-accounting']}."
    )


def software(report: Report) -> str:
    """What made the statement, in its versions."""
    return "Versions: " + ", ".join(f"{name} {found}" for name, found in report["versions"].items()) + "."


def means(report: Report) -> list[str]:
    """What the statement means to one person; nothing in reports that do not say it."""
    found = report.get("means")
    return [] if found is None else in_words(Meaning(**found), report["statement"]["unit"])


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
            yield f"{'  ' + who + ':':<12}{in_one_line(each[who]['text'], _LINE)}" + (
                f" ({fault})" if fault else ""
            )


def from_whom(federation: Mapping[str, Any]) -> str:
    """Against whom the statement of a federation holds, and whose budget it is."""
    text = f"This holds against {against(federation)}."
    if federation["noise_by"] == "client":
        text += f" Each client has a budget of its own; stated is the largest, that of {federation['statement_of']}."
    if federation["colluding"]:
        known = rounded_up(federation["colluding"][0]["epsilon"])
        text += f" Against one of these clients, which knows its own share, epsilon is {known}, also with the server."
    return text


def against_a_client(report: Report) -> str | None:
    """Epsilon against one of a federation's clients, where it is larger than the stated one; else None."""
    federation = report.get("federation")
    if federation is None or not federation["colluding"]:
        return None
    return rounded_up(federation["colluding"][0]["epsilon"])


def against_readers(report: Report) -> str:
    """What has to be added to the stated epsilon where it does not hold against everybody."""
    return "" if against_a_client(report) is None else ", against the server and whoever gets the adapter"


def _releases(phase: Mapping[str, Any], clipped: str = "", unit: str = "unit") -> str:
    projected = " on fresh random projections of clipped gradients" if phase["projections"] else ""
    count = phase["steps_charged"]
    multiplier = f"with noise multiplier {number(phase['noise_multiplier'])}{clipped}"
    if phase["sampling"]["kind"] == "cyclic_poisson":
        bands = phase["sampling"]["classes"]
        cycles = -(-count // bands)
        return (
            f"{count} release{'s' * (count != 1)} whose noise is correlated in {bands} bands, which cost what {cycles} "
            f"release{'s' * (cycles != 1)} of the Gaussian mechanism {multiplier} would, on batches drawn by "
            f"{sampling(phase, unit)}"
        )
    return (
        f"{count} release{'s' * (count != 1)} of the Gaussian mechanism{projected} {multiplier}, on batches drawn by "
        f"{sampling(phase, unit)}"
    )


def releases_votes(report: Report) -> bool:
    """Whether records voted on public texts, in the place of gradients."""
    return bool(report["method"].get("releases") == "votes")


def compares_losses(report: Report) -> bool:
    """Whether what was clipped are differences of losses, and no gradients."""
    return bool(report["method"].get("compares") == "losses")


def _cast(report: Report) -> str:
    """What records gave to public texts, by the row's own name."""
    return "preference scores" if "answers" in report["method"]["public_texts"]["votes"] else "votes"


def _clipped(report: Report) -> str:
    return "differences of losses" if compares_losses(report) else "gradients"


def clip_norm(report: Report) -> str:
    """C, and what became of it where it was adapted, or where the model's rounding takes a part of it."""
    first, noise = number(report["statement"]["clip_norm"]), report["noise"]
    if noise["clipping_slack"] > FLOAT32_KEEPS:
        part = f"{1 - noise['clipping_slack']:.0%}"
        first += f" ({_clipped(report)} are clipped to {part} of it, since the model rounds them)"
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
    if any_truncated(statement) and statement["adjacency"] == "add-or-remove-one":
        text += " (an empty one stands in for it)"
    if any_cyclic(statement):
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
    return float(sampling["sample_rate"]) / float(
        sampling.get("classes", 1)
    )  # a class has so many of all units


def sampling(phase: Mapping[str, Any], unit: str = "unit") -> str:
    """How a batch was drawn."""
    s = phase["sampling"]
    if s["kind"] == "balls_in_bins":
        return (
            f"balls in bins: in each pass of {s['bins']} steps each {unit} is in exactly one, dealt by itself and anew "
            "in every pass"
        )
    if s["kind"] == "cyclic_poisson":
        return (
            f"cyclic Poisson sampling: each {unit} is dealt to one of {s['classes']} classes, once and by itself, and "
            f"steps draw from one class after the other, with rate {number(s['sample_rate'])} of a class"
        )
    text = f"Poisson sampling with rate {number(s['sample_rate'])}"
    if s["kind"] == "truncated_poisson":
        text += f", cut to {s['max_batch_size']} of at most {s['dataset_size']} units"
    return text


def privacy_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows of the privacy block."""
    s, versions = report["statement"], report["versions"]
    if s is None:
        return [
            ("Mechanism", "none: gradients were neither clipped nor noised"),
            ("Steps T", str(report["method"]["steps"])),
        ]
    target = report["target_epsilon"]
    rows = [
        ("Mechanism", mechanism(report)),
        ("Privacy unit", unit(s)),
        ("Adjacency", adjacency(s)),
    ]
    if is_private(report):
        rows += [
            (
                "Guarantee (ε, δ)",
                f"({rounded_up(s['epsilon'])}, {number(s['delta'])}){against_readers(report)}",
            ),
            ("Target ε", "none: the noise was given" if target is None else number(target)),
            ("ε if one unit is replaced", _replaced(s)),
            ("Accountant", f"PLD of dp-accounting {versions['dp-accounting']}, an upper bound"),
        ]
    else:
        rows.append(("Guarantee (ε, δ)", "none"))
    known = against_a_client(report) if is_private(report) else None
    if known is not None:
        text = f"({known}, {number(s['delta'])}): it knows its own share of the noise"
        rows.insert(4, ("Guarantee against another client", text))
    if "phases" in s:
        for place, phase in enumerate(s["phases"], start=1):
            rows.append((f"Phase {place}", f"{_releases(phase)}; {phase['steps_planned']} planned"))
    else:
        rows += [
            ("Sampling rate q", number(rate(s["sampling"]), 6)),
            ("Sampling", sampling(s, s["unit"])),
            ("Noise multiplier σ", number(s["noise_multiplier"], 6)),
        ]
    of_last = " in the last phase" if "phases" in s else ""
    rows += [
        ("Clipping norm C", clip_norm(report)),
        (f"Expected batch size b{of_last}", number(s["expected_batch_size"])),
        (_noise_name(report) + of_last, number(report["noise"]["noise_std"])),
        ("Steps T", f"{s['steps_charged']} charged of {s['steps_planned']} planned{_passes(s)}"),
        ("Seeds", seeds(report)),
        ("Data set", quoted(s["dataset"])),
        ("Run", f"{s['run_id']}, {s['created']}"),
    ]
    return rows


def _passes(s: Mapping[str, Any]) -> str:
    """How often a unit takes part, which is what auto sizes follow from."""
    if "phases" in s or any_truncated(s):
        return ""
    often = s["steps_planned"] * rate(s["sampling"])
    return f": each {s['unit']} takes part in {number(often, 3)} of them on average"


def _noise_name(report: Report) -> str:
    if "bands" in report["noise"]:
        return "Noise per coordinate, of the noisiest step: τ = σC/b by the longest row of the correlation"
    if report["noise"]["clip_quantile"] is None:
        return "Noise per coordinate τ = σC/b"
    return "Noise per coordinate τ, for the first C; the counts make it 0.5 % larger than σC/b"


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
        return f"Gaussian mechanism on one vector of {_cast(report)} per {s['unit']}, one entry a public text"
    banded = ""
    if any_cyclic(s):
        before = s["sampling"]["classes"] - 1
        of = "the step" if before == 1 else f"the {before} steps"
        banded = f", each step's noise taking back a part of that of {of} before it"
    what = f"clipped per-{s['unit']} gradients, {report['method']['described']}"
    if compares_losses(report):
        what = f"one clipped number per {s['unit']}, {report['method']['described']}; no gradient is taken"
    return f"Gaussian mechanism on {what}{banded}"


def _replaced(s: Mapping[str, Any]) -> str:
    unknown = any_projected(s) or any_in_bins(s)
    return "not known for this mechanism" if unknown else rounded_up(s["epsilon_replace_one"])


def seeds(report: Report) -> str:
    """Where randomness came from."""
    start = f"the adapter's start uses the public seed {report['adapter']['public_seed']}"
    if not is_private(report):
        return f"noise and sampling were repeatable; {start}"
    dealt = (
        "; who is drawn when follows from another, which stays in private/"
        if any_cyclic(report["statement"]) or any_in_bins(report["statement"])
        else ""
    )
    return f"noise and sampling use keys of the operating system, never stored{dealt}; {start}"


def _learnt(report: Report) -> str:
    """On what the loss is."""
    if "preferences" in report:
        return f"the preference of one answer to another (DPO, β {number(report['preferences']['beta'])})"
    return "the label" if "classes" in report else str(report["method"]["loss_on"])


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


def _predicted(report: Report) -> list[tuple[str, str]]:
    classes = report.get("classes")
    if classes is None:
        return []
    names = ", ".join(map(quoted, classes["names"]))
    return [("Predicts", f"{classes['num_labels']} classes: {names}" if names else "a score")]


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


def method_table(report: Report) -> list[tuple[str, str]]:
    """(name, value) rows of how the adapter was trained."""
    method, adapter = report["method"], report["adapter"]
    revision = f" at {quoted(adapter['base_revision'])}" if adapter["base_revision"] else ""
    warmup = f"{method['warmup_steps']} steps of warm-up"
    unit = " (relative)" if method.get("relative_rate") else ""  # older reports do not say
    decay = f", decay {number(method['averaging'])}" if method["averaging"] else ""
    scale = "α/√r" if adapter["use_rslora"] else "α/r"
    lora = f"rank {adapter['rank']}, α {number(adapter['lora_alpha'])}, scale {scale}"
    settings = [
        f"{title} {number(method[name])}" for name, title in OPTIMIZER_SETTINGS.items() if name in method
    ]
    rows = [
        ("Base model", quoted(adapter["base_model"]) + revision),
        *([("Its weights", f"SHA-256 {adapter['base_sha256']}")] if adapter.get("base_sha256") else []),
        ("Method", f"{method['name']}: {method['summary']} ({method['reference']})"),
        *([("Chosen", because(method["choice"]))] if "choice" in method else []),
        ("Optimizer", ", ".join([quoted(method["optimizer"]), *settings])),
        *_public_texts(method.get("public_texts")),
        *_span(method.get("span")),
        ("Clipping", method["clipping"]),
        ("Learning rate", f"{number(method['learning_rate'])}{unit}, {method['schedule']}, {warmup}"),
        ("Exported", adapter["exported"] + decay),
        ("Adapter", f"{lora}, start {quoted(adapter['init'])}"),
        ("Targets", targets_in_words(adapter)),
        *([("Adapts", coverage_in_words(adapter["coverage"]))] if "coverage" in adapter else []),
        *_predicted(report),
        (
            "Text",
            f"at most {method['max_length']} tokens, loss on " + _learnt(report),
        ),
    ]
    if "form" in method:
        prompt, completion = (json.dumps(method["form"][name]) for name in ("prompt", "completion"))
        template = method["form"].get("template", "none")
        rows.append(
            ("Form", f"prompt {prompt}, answer {completion}, {_MET[template]}: ask it in the same form")
        )
    rows += _chat(method)
    if "dropout" in method:  # older reports do not say
        rows.append(("Dropout", _dropout(method)))
    return rows


_MET: Final = {
    "auto": "a user's and an assistant's turn where the tokenizer has a chat template (apply_chat_template), else text",
    "chat": "a user's and an assistant's turn of the chat template (apply_chat_template)",
    "none": "text without a chat template",
}


def _chat(method: Report) -> list[tuple[str, str]]:
    """What renders messages, where it is not the tokenizer's template as it is."""
    words = []
    if "chat_template_sha256" in method:
        words.append(f"not the base model's; SHA-256 {method['chat_template_sha256']}")
    if "chat_template_kwargs" in method:
        given = method["chat_template_kwargs"].items()
        words += [f"{name}={json.dumps(v) if isinstance(v, str) else v}" for name, v in given]
    return [("Chat template", ", ".join(words))] if words else []


_WRITERS = {
    "model": "the model itself",
    "file": "a public file",
    "endpoint": "another model",
    "callable": "a function of the user's",
}


def _public_texts(facts: Report | None) -> list[tuple[str, str]]:
    if facts is None:
        return []
    every, epochs, votes = facts["evolve_every"], facts["warm_start_epochs"], facts.get("votes")
    word = "step" if votes is None else "round"
    evolve = f"chosen anew after every {word if every == 1 else f'{every} {word}s'}" if every else ""
    start = f"{epochs} × ordinary training on the first of them, before the private {word}s" if epochs else ""
    whose = f"{facts['count']} by {_WRITERS[facts['generator']]}"
    if facts.get("distinct", facts["count"]) != facts["count"]:
        whose += f", of which {facts['distinct']} differ{' at the end' if evolve else ''}"
    rows = [("Public texts", "; ".join(part for part in (whose, evolve, start) if part))]
    if votes is not None:
        near = "the base model's hidden states" if votes["embedding"] is None else quoted(votes["embedding"])
        rows.append(
            ("Preference scores", _scores(votes, near))
            if "answers" in votes
            else ("Votes", _counts(votes, near))
        )
        if votes["epochs"]:
            rows.append(("Then", f"{votes['epochs']} × ordinary training on the last texts, at no cost"))
    return rows


def _counts(votes: Report, near: str) -> str:
    counted = (
        f"of each record for the {votes['nearest']} nearest by {near}; {votes['keep']} texts are kept by "
        f"{votes['selection']}"
    )
    if votes["lookahead"]:
        counted += f", each where {votes['lookahead']} variations of it are"
    return counted


def _scores(votes: Report, near: str) -> str:
    return (
        f"of each record, by {near}, on {votes['answers']} texts of the model for each of "
        f"{votes['requests']} requests. "
        f"DPO of the adapter on the best over the middle one, at learning rate {number(votes['dpo_learning_rate'])}"
    )


_PLACES = {0.0: "inner products", 0.5: "orthonormal coordinates", 1.0: "coefficients"}


def _span(bounds: Report | None) -> list[tuple[str, str]]:
    if bounds is None:
        return []
    places = dict.fromkeys(_PLACES.get(alpha, f"α {number(alpha)}") for alpha in bounds["alpha"])
    said = {name: _between(bounds[name], 2) for name in ("cosine", "kappa")}
    directions, texts = bounds["directions"], bounds["texts"]
    if texts[0] < texts[1]:
        along = f"{_between(directions)} directions of texts whose number varied, {_between(texts)}"
    elif directions == texts:
        along = f"all {number(texts[0])} directions"
    else:
        along = f"{_between(directions)} of {number(texts[0])} directions"
    return [
        (
            "Span",
            f"chosen before each step on public gradients: noise on {' to '.join(places)}, ridge "
            f"{_between(bounds['ridge'])}, {along}; expected cosine {said['cosine']}, κ {said['kappa']} (about so many "
            "times the cosine that noise on whole gradients, projected afterwards, would leave)",
        )
    ]


def _between(bounds: list[float], digits: int = 4) -> str:
    return " to ".join(dict.fromkeys(number(end, digits) for end in bounds))


def _dropout(method: Report) -> str:
    of_model = "the base model's own is on" if method["dropout"] else "the base model's own is off"
    return f"{of_model}, the adapter's is {number(method['lora_dropout'])}"
