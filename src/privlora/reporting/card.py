"""The model card: README.md with the front matter that model hubs read. A pure function of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from markupsafe import Markup

from privlora.config.groups import PACKINGS
from privlora.names import HUB_NAME, base_to_load
from privlora.pages.template import fill_markdown
from privlora.reporting.page import PACKAGE, content
from privlora.reporting.seals import TEXTS
from privlora.reporting.wording import Report, is_private


def card(report: Report, *, merged: bool = False) -> str:
    """README.md, as Markdown. merged: of the whole model that base and adapter make, without the page of figures."""
    texts = "texts" in report
    front = _front_of_texts(report) if texts else _front_matter(report, merged)
    shown = content(report)
    if merged:
        shown["heading"] = (
            shown["heading"].removeprefix("LoRA adapter for ") + " with a LoRA adapter merged in"
        )
    return fill_markdown(
        "texts.md.j2" if texts else "card.md.j2",
        PACKAGE,
        merged=merged,
        front_matter=Markup(yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()),
        # code is shown as it is, and no line of it ends its block
        code=Markup("\n".join(" ".join(line.splitlines()) for line in _code(report, merged))),
        **shown,
    )


def _code(report: Report, merged: bool) -> list[str]:
    """Python that loads what is released."""
    if "texts" in report:
        return [
            "from datasets import load_dataset",
            f'texts = load_dataset("json", data_files="{TEXTS}", split="train")  # in this folder',
        ]
    adapter, classes = report["adapter"], report.get("classes")
    kind = "AutoModelForCausalLM" if classes is None else "AutoModelForSequenceClassification"
    if merged:
        return [f"from transformers import {kind}", f'model = {kind}.from_pretrained(".")  # this folder']
    name, revision = adapter["base_model"], adapter["base_revision"]
    given = repr(base_to_load(name, local=adapter["base_is_local"]))
    given += f", revision={revision!r}" if revision else ""
    imported, packing = f"from transformers import {kind}", list[str]()
    if packed := adapter.get("base_quantization"):
        arguments = ", ".join(f"{key}={value!r}" for key, value in PACKINGS[packed].items())
        imported += ", BitsAndBytesConfig"
        packing = [f"packed = BitsAndBytesConfig({arguments})  # as in training"]
        given += ", quantization_config=packed"
    if classes is not None:
        given += f", num_labels={classes['num_labels']}"
        given += f", id2label={dict(enumerate(classes['names']))!r}" if classes["names"] else ""
    return [
        "from peft import PeftModel",
        imported,
        *packing,
        f"base = {kind}.from_pretrained({given})",
        'model = PeftModel.from_pretrained(base, ".")  # this folder',
    ]


def _front_matter(report: Report, merged: bool) -> Mapping[str, Any]:
    name, local = report["adapter"]["base_model"], report["adapter"]["base_is_local"]
    on_a_hub = not local and HUB_NAME.fullmatch(name)  # hubs take this for one of their models
    return {
        **({"base_model": name} if on_a_hub else {}),
        "library_name": "transformers" if merged else "peft",
        "pipeline_tag": "text-generation" if "classes" not in report else "text-classification",
        "tags": ["lora", "privlora", _tag(report)],
    }


def _front_of_texts(report: Report) -> Mapping[str, Any]:
    return {
        "task_categories": ["text-generation"],
        "tags": ["synthetic", "privlora", _tag(report)],
        "configs": [{"config_name": "default", "data_files": TEXTS}],
    }


def _tag(report: Report) -> str:
    return "differential-privacy" if is_private(report) else "not-private"
