"""The model card: README.md with the front matter that model hubs read. A pure function of the report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import yaml

from privlora.config.groups import PACKINGS
from privlora.names import HUB_NAME, base_to_load
from privlora.pages.numbers import nats, number
from privlora.reporting.federation import card_paragraph, federation_table
from privlora.reporting.parties import parties, warnings
from privlora.reporting.wording import (
    Report,
    astray,
    faults,
    is_private,
    loss_unit,
    method_table,
    metrics,
    privacy_table,
    quoted,
    sentence,
    software,
)

_LINKED = re.compile(r"(://|(?<=www)\.|@)", re.IGNORECASE)
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")


def plain(text: object) -> str:
    """Text on one line in which Markdown and HTML have no effect, and no address becomes a link."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(r"\\\1", line)
    return _LINKED.sub(r"\\\1", line)


def fenced(lines: Iterable[str]) -> list[str]:
    """A block of Python that no line of it ends."""
    return ["```python", *(" ".join(line.splitlines()) for line in lines), "```"]


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a table without a head: a name and a value in each."""
    return ["| | |", "|---|---|", *(f"| {plain(name)} | {plain(value)} |" for name, value in rows)]


def card(report: Report, *, merged: bool = False) -> str:
    """README.md, as Markdown. merged: of the whole model that base and adapter make, without the page of figures."""
    stamp, base = report["stamp"]["text"], plain(quoted(report["adapter"]["base_model"]))
    lines = [
        "---",
        yaml.safe_dump(_front_matter(report, merged), sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {stamp}: {base} with a LoRA adapter merged in"
        if merged
        else f"# {stamp}: LoRA adapter for {base}",
        "",
        f"**{plain(sentence(report))}**",
        "",
        "## Privacy",
        "",
        *table(privacy_table(report)),
        "",
        "`privacy_report.json` says the same to machines"
        + ("." if merged else ", `report.html` shows it with figures."),
        "",
        *_federation(report),
        "### What is not protected",
        "",
        *(f"- {plain(text)}" for text in report["not_protected"]),
        "",
        "## Use",
        "",
        *fenced(_use_merged(report) if merged else _use(report)),
        "",
        *([] if merged else _which_base(report)),
        "## Training",
        "",
        *table(method_table(report)),
        "",
        *_evaluation(report),
        *_answers(report),
        plain(software(report)),
        "",
    ]
    return "\n".join(lines)


def _federation(report: Report) -> list[str]:
    facts = report.get("federation")
    if facts is None:
        return []
    return [
        "### Trained together",
        "",
        plain(card_paragraph(facts)),
        "",
        *(
            line
            for text in warnings(facts, report["adapter"]["rank"])
            for line in (f"**Warning: {plain(text)}.**", "")
        ),
        *table(federation_table(report)),
        "",
        "| who | sees | is trusted with |",
        "|---|---|---|",
        *(f"| {' | '.join(map(plain, row))} |" for row in parties(facts)),
        "",
    ]


def _use_merged(report: Report) -> list[str]:
    kind = _kind(report)
    return [f"from transformers import {kind}", f'model = {kind}.from_pretrained(".")  # this folder']


def _kind(report: Report) -> str:
    return "AutoModelForCausalLM" if "classes" not in report else "AutoModelForSequenceClassification"


def _use(report: Report) -> list[str]:
    packed, classes = report["adapter"].get("base_quantization"), report.get("classes")
    kind = _kind(report)
    more = "" if packed is None else ", quantization_config=packed"
    if classes is not None:
        names = dict(enumerate(classes["names"]))
        more += f", num_labels={classes['num_labels']}" + (f", id2label={names!r}" if names else "")
    return [
        "from peft import PeftModel",
        f"from transformers import {kind}" + ("" if packed is None else ", BitsAndBytesConfig"),
        *(
            []
            if packed is None
            else [f"packed = BitsAndBytesConfig({_arguments(PACKINGS[packed])})  # as in training"]
        ),
        f"base = {kind}.from_pretrained({_base(report)}{more})",
        'model = PeftModel.from_pretrained(base, ".")  # this folder',
    ]


def _which_base(report: Report) -> list[str]:
    found = report["adapter"].get("base_sha256")
    if not found:
        return []
    alone = "The base model was a folder: hand it on, too. " if report["adapter"]["base_is_local"] else ""
    return [
        f"{alone}The base model's weights have SHA-256 `{plain(found)}`: `privlora verify . --base MODEL` compares.",
        "",
    ]


def _arguments(given: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _front_matter(report: Report, merged: bool) -> dict[str, object]:
    name, local = report["adapter"]["base_model"], report["adapter"]["base_is_local"]
    tags = ["lora", "privlora", "differential-privacy" if is_private(report) else "not-private"]
    library = "transformers" if merged else "peft"
    pipeline = "text-generation" if "classes" not in report else "text-classification"
    front: dict[str, object] = {"library_name": library, "pipeline_tag": pipeline, "tags": tags}
    if not local and HUB_NAME.fullmatch(name):  # hubs take this for one of their models
        front = {"base_model": name, **front}
    return front


def _base(report: Report) -> str:
    adapter = report["adapter"]
    revision = adapter["base_revision"]
    base = base_to_load(adapter["base_model"], local=adapter["base_is_local"])
    return repr(base) + (f", revision={revision!r}" if revision else "")


def _answers(report: Report) -> list[str]:
    said = report.get("answers")
    if said is None:
        return []
    both = [(each["prompt"], each["base"], each["adapter"]) for each in said["shown"]]
    return [
        f"The most probable answers to public prompts, in {plain(said['max_new_tokens'])} tokens at most:",
        "",
        *(line for words in faults(said) for line in (f"**Warning: {plain(words)}.**", "")),
        "| prompt | base model | with the adapter |",
        "|---|---|---|",
        *(f"| {plain(asked)} | {' | '.join(map(_said, rows))} |" for asked, *rows in both),
        "",
    ]


def _said(answer: Mapping[str, str | None]) -> str:
    fault = answer["fault"]
    return plain(answer["text"]) + ("" if fault is None else f" *({plain(fault)})*")


def _evaluation(report: Report) -> list[str]:
    rows = report["evaluation"]
    if not rows:
        return []
    shown = metrics(report)
    head = ["step", "loss", "standard error", *(name.replace("_", " ") for name in shown)]
    lines = [
        f"Held-out loss on public evaluation records, {loss_unit(report)} (mean over records):",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
    for row in ends:
        cells = [plain(row["step"]), nats(row["loss_per_example"]), number(row["standard_error"], 2)]
        lines.append(f"| {' | '.join([*cells, *(number(row[name], 3) for name in shown)])} |")
    broken = astray(report)
    return [*lines, "", *([] if broken is None else [plain(broken), ""])]
