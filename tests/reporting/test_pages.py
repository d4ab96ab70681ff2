from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml
from jinja2 import UndefinedError
from reporting_cases import Run
from test_facts import load

from privlora.reporting.card import card
from privlora.reporting.page import render
from privlora.training.files import RunFolder

pytestmark = pytest.mark.usefixtures("drawn")

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(1)> | ``` $x$ {{ 7*7 }} &amp;\n---\n# heading'
LOADING = {"script", "link", "iframe", "object", "embed", "img", "audio", "video", "source", "base", "form"}


class Tags(HTMLParser):
    """All tags and attributes of a page, and whether every tag was closed."""

    VOID = ("meta", "br", "!doctype")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def hostile(report: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(report)
    changed["adapter"]["base_model"] = changed["statement"]["dataset"] = HOSTILE
    changed["adapter"]["target_modules"] = [HOSTILE]
    for modules in (changed["adapter"]["modules"], changed["noise"]["modules"]):
        for i, module in enumerate(modules):
            module["name"] = f"{HOSTILE}\x07{i}"
    return changed


@pytest.mark.parametrize("kind", ["private_run", "public_run", "insecure_run"])
def test_the_page_needs_nothing_else(kind: str, request: pytest.FixtureRequest) -> None:
    page = render(load(request.getfixturevalue(kind)))
    tags = Tags(page).seen
    assert not {tag for tag, _ in tags} & LOADING
    for _, attributes in tags:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"https?:|@import|url\((?!#)", page)


def test_hostile_names_stay_text(report: dict[str, Any]) -> None:
    page = render(hostile(report))
    known = {tag for tag, _ in Tags(render(report)).seen}
    assert {tag for tag, _ in Tags(page).seen} == known
    assert "&lt;script&gt;alert(1)" in page
    assert "{{ 7*7 }}" in page
    text = card(hostile(report))
    text = text.replace(text.split("```python\n")[1].split("\n```\n")[0], "")  # code is shown as it is
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("\n---\n") == 1  # the end of the front matter
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| ")}
    assert widths <= {3, 4}


def test_long_names_are_told_apart_and_cut(report: dict[str, Any]) -> None:
    for modules in (report["adapter"]["modules"], report["noise"]["modules"]):
        for i, module in enumerate(modules):
            module["name"] = f"layers.0.{'block' * 12}.number_{i}.{'projection' * 9}"
    page = render(report)
    assert ">number_0<" in page
    assert ">number_13<" in page


def test_not_private_is_unmistakable(public_run: Run, insecure_run: Run, private_run: Run) -> None:
    for run in (public_run, insecure_run):
        report = load(run)
        page, text = render(report), card(report)
        assert '<div class="banner" role="alert">' in page
        assert text.split("---\n")[2].lstrip().startswith("# NOT PRIVATE")
        assert "DIFFERENTIALLY PRIVATE" not in page + text
        assert "differentially private" not in page + text
        assert yaml.safe_load(text.split("---\n")[1])["tags"][-1] == "not-private"
    report = load(private_run)
    assert "NOT PRIVATE" not in render(report) + card(report)


def test_without_public_evaluation_nothing_is_invented(report: dict[str, Any]) -> None:
    report["evaluation"] = []
    assert "Not measured" in render(report)
    assert "in nats" not in card(report)


def test_front_matter_names_the_base_only_where_a_hub_accepts_it(report: dict[str, Any]) -> None:
    front = yaml.safe_load(card(report).split("---\n")[1])
    assert front["base_model"] == "acme/tiny"
    assert front["library_name"] == "peft"
    assert {"lora", "privlora", "differential-privacy"} == set(front["tags"])
    for path in ("/models/tiny", "./tiny", "a/b/c", "name with space", "~/tiny"):
        report["adapter"]["base_model"] = path
        assert "base_model" not in yaml.safe_load(card(report).split("---\n")[1])


def test_a_local_base_is_not_taken_for_one_of_the_hub(report: dict[str, Any]) -> None:
    report["adapter"] |= {"base_model": "gpt2", "base_is_local": True, "base_revision": None}
    text = card(report)
    assert "base_model" not in yaml.safe_load(text.split("---\n")[1])
    assert "AutoModelForCausalLM.from_pretrained('path/to/gpt2')" in text


def _strings(value: Any, *way: Any) -> Iterator[tuple[Any, ...]]:
    """Where nested JSON holds a text."""
    if isinstance(value, str):
        yield way
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(inner, *way, key)


@pytest.mark.parametrize("kind", ["adapter", "texts"])
def test_no_text_of_a_report_acts_in_a_card(kind: str, filed: RunFolder) -> None:
    """Whichever it is: code alone is shown as it is, and no line of it ends the block of code."""
    report: dict[str, Any] = {
        **json.loads(filed.report.read_text()),
        "classes": {"num_labels": 2, "names": ["a", "b"]},
    }
    report["answers"]["shown"][0]["adapter"]["fault"] = "says nothing"
    if kind == "texts":
        report["texts"] = dict.fromkeys(("column", "words", "temperature"), "text") | {"file": "a.jsonl"}
        report["texts"] |= {"from": "adapter", "generator": "file", "of_a_finished_run": False}
        report["texts"] |= {"count": 2, "asked_for": 2}
        report["quality"] = {"tokens_per_text": [3.0], "perplexity": 2.0, "distinct": {}, "near_copies": 0.5}
        report["quality"] |= {"near_public": {}, "near_copy": "alike"}
    changed = 0
    for way in _strings(report):
        forged = copy.deepcopy(report)
        place: Any = forged
        for key in way[:-1]:
            place = place[key]
        place[way[-1]] = HOSTILE
        if way[0] == "stamp":  # which verify holds against the ledger
            continue
        with suppress(KeyError, ValueError, TypeError, UndefinedError):
            text = card(forged)
            head, code, rest = text.partition("```python\n")
            code, _, rest = rest.partition("\n```\n")
            changed += text != card(report)
            front, body = head.removeprefix("---\n").split("\n---\n", 1)
            yaml.safe_load(front)
            assert "<script" not in body + rest, way
            assert "\n# heading" not in body + rest + code, way
    assert changed > 10


def test_the_cards_code_is_python(report: dict[str, Any]) -> None:
    report["adapter"]["base_model"], report["adapter"]["base_revision"] = HOSTILE, "main"
    code = card(report).split("```python\n")[1].split("\n```\n")[0]
    compile(code, "card", "exec")
    assert len(code.splitlines()) == 4
