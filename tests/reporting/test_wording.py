from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

import privlora
from privlora.reporting.card import card
from privlora.reporting.limits import not_protected
from privlora.reporting.page import render
from privlora.reporting.tables import method_table, privacy_table, sentence


@pytest.mark.parametrize("unit", ["record", "user"])
def test_a_cap_on_the_batch_is_said(report: dict[str, Any], unit: str) -> None:
    cap = {"kind": "truncated_poisson", "sample_rate": 0.1, "max_batch_size": 14, "dataset_size": 60}
    statement = {**report["statement"], "unit": unit, "sampling": cap, "records_per_user": 4}
    changed = {**report, "statement": statement}
    assert "cut to 14 of at most 60 units" in sentence(changed)
    assert "an empty one stands in" in sentence(changed)
    assert f"How many {unit}s there are" in not_protected(statement, "random")[-1]
    table = dict(privacy_table(changed))
    assert table["Privacy unit"].startswith(f"one {unit}")


def test_what_rounding_takes_of_the_clipping_norm_is_said(report: dict[str, Any]) -> None:
    assert "clipped to" not in sentence(report)
    report["noise"]["clipping_slack"] = 1e-3  # of spectral clipping in float32
    assert "clipped to" not in sentence(report)
    report["noise"]["clipping_slack"] = 0.02
    assert "gradients are clipped to 98% of it" in sentence(report)


def test_an_adapter_to_start_from_is_said(report: dict[str, Any]) -> None:
    starts = ("random", "w0-subspace", "spectral-split", "runs/old/release", "public-gradient")
    said = [not_protected(report["statement"], start) for start in starts]
    assert said[0] == said[1] == said[2]
    assert said[0] == [text for text in said[3] if "started from" not in text] != said[3]
    assert said[0] == [text for text in said[4] if "adapter.public_text" not in text] != said[4]


def test_the_held_out_loss_has_one_name() -> None:
    """The mean over records, wherever a number is shown with its unit."""
    source = Path(privlora.__file__).parent
    shown = [path for pattern in ("**/*.py", "**/*.j2") for path in source.glob(pattern)]
    text = {path: path.read_text(encoding="utf-8") for path in shown}
    others = [
        path for path, said in text.items() if re.search(r"(?<!\")\"[Ll]oss per (record|example)", said)
    ]
    assert others == []
    for name in ("reporting/templates/card.md.j2", "reporting/templates/report.html.j2", "cli/evaluation.py"):
        assert "(mean over records)" in text[source / name]


def test_names_of_several_words_are_quoted(report: dict[str, Any]) -> None:
    said = "an outside audit found 0.1"
    adapter = {**report["adapter"], "base_model": said, "base_revision": said, "init": said}
    adapter |= {"target_modules": [said, "q_proj"], "exclude_modules": ["a\u3164b"]}
    rows = dict(method_table({**report, "adapter": adapter}))
    assert rows["Base model"] == f'"{said}" at "{said}"'
    assert rows["Targets"] == f'"{said}", q_proj without "a\u3164b"'
    assert rows["Adapter"].endswith(f'start "{said}"')
    assert f'"{said}"' in card({**report, "adapter": adapter}).replace("&quot;", '"')


def test_a_data_set_is_named_in_quotation_marks(report: dict[str, Any]) -> None:
    """A ledger is anybody's, and what it calls its data set stands next to our numbers."""
    said = "notes”. It protects patients with ε = 0.1, \u202eas shown"
    shown = '"notes”. It protects patients with ε = 0.1, \\u202eas shown"'
    found = {**report, "statement": {**report["statement"], "dataset": said}}
    assert dict(privacy_table(found))["Data set"] == shown
    assert f"on the data set {shown}" in html.unescape(render(found))


def test_no_text_of_a_report_adds_a_row(report: dict[str, Any]) -> None:
    said = "x\nGuarantee (ε, δ) | (0.1, 0)\u2028Run | another\r\x0b| y"
    names = [name for name, _ in method_table(report)]
    forged = {**report, "method": {**report["method"], "summary": said, "clipping": said}}
    rows = method_table(forged)
    assert [name for name, _ in rows] == names
    assert dict(rows)["Clipping"] == "x Guarantee (ε, δ) | (0.1, 0) Run | another | y"
