"""What the tables and the page say, and that they are functions of the results."""

from __future__ import annotations

import json
import math
import re

import pytest
from study_cases import invented, paper

from privlora.accounting import PoissonSampling, StepEvent
from privlora.accounting.selection import tuning_cost
from privlora.lab.studies.choice import Progress
from privlora.lab.studies.settings import Cell
from privlora.lab.studies.summary import Summary, summarise
from privlora.lab.studies.tables import markdown, render

pytestmark = pytest.mark.usefixtures("drawn")

OFFSET = {"prism": 0.0, "dp-adamw": 0.3, "adamw": -0.5}


def loss(cell: Cell) -> float:
    off = (
        abs(math.log10(cell.learning_rate / 0.02))
        if cell.method != "dp-adamw"
        else -math.log10(cell.learning_rate)
    )
    return 3.0 + OFFSET[cell.method] - 0.1 * cell.epsilon + 0.2 * off + 0.01 * cell.seed


@pytest.fixture(scope="module")
def summary() -> Summary:
    study = paper(epsilon=[1, 3], rank=[2, 4], selection={"seeds": [100, 101], "by": "both"})
    return summarise(invented(study, loss), name="my <study>")


@pytest.fixture(scope="module")
def page(summary: Summary) -> str:
    return render(summary)


def test_cells(summary: Summary) -> None:
    text = markdown(summary)
    section = text.split("### one, rank 4")[1].split("###")[0]
    assert "held-out loss, nats per token, lower is better; 4.000 before training" in section
    rows = dict(re.findall(r"^\| ([\w-]+) \| (.*) \|$", section, re.MULTILINE))
    assert rows["method"] == "ε = 1 | ε = 3 | no noise"
    assert rows["prism"] == "2.905 ± 0.007 (0.02) | 2.705 ± 0.007 (0.02) | –"
    assert rows["dp-adamw"] == "3.345 ± 0.007 (0.2*) | 3.145 ± 0.007 (0.2*) | –"
    assert rows["adamw"] == "– | – | 2.505 ± 0.007 (0.02)"


def test_means_and_verdicts(summary: Summary) -> None:
    """Each task: prism gains 1.095 from 4 on average, in all runs 0.44 more than dp-adamw."""
    lines = summary["rules"][0]["overall"]
    first = next(line for line in lines if (line["epsilon"], line["rank"], line["place"]) == (1, 2, 1))
    assert first["method"] == "prism"
    assert first["mean_score"] == pytest.approx(1.0)
    assert first["lead"]["lead"] == pytest.approx((0.3 - 0.2 * math.log10(0.2)) / 1.095)
    assert "ε = 1, rank 2: prism is best in the mean, 0.402 ahead of dp-adamw" in markdown(summary)


def test_the_table_is_a_function_of_the_results(summary: Summary) -> None:
    slower = {**summary, "runs": {**summary["runs"], "cpu_seconds": 9.0}}
    assert markdown(slower) == markdown(summary)


def test_json(summary: Summary) -> None:
    assert json.loads(json.dumps(summary, allow_nan=False))["schema_version"] == 1


def test_the_page_stands_alone(page: str) -> None:
    for word in ("<script", "http://", "https://", "src=", "@import"):
        assert word not in page.replace("http://www.w3.org", "")
    assert set(re.findall(r"url\(.", page)) <= {"url(#"}
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert "my &lt;study&gt;" in page
    assert "<study>" not in page


def test_the_page_holds_everything(page: str, summary: Summary) -> None:
    assert page.count("<svg") == 2 * 2  # two rules with two ranks
    assert "stroke: var(--accent)" in page
    for word in (
        "Each method at its own best learning rate for each task",
        "Each method at one learning rate for all tasks",
        "seeds 100, 101 on every second evaluation record; the others are reported",
        "prism is best in the mean",
        "2.905 ± 0.007 (0.02)",
        "0.2*",
        "What tuning would cost",
        "NOT PRIVATE",
        "summary.json",
    ):
        assert word in page
    assert "banner" not in page.split("<body>")[1]


def test_what_tuning_costs(summary: Summary) -> None:
    assert [(line["epsilon"], line["runs"], line["tasks"]) for line in summary["tuning_cost"]] == [
        (1, 6, ["one", "two"]),
        (3, 6, ["one", "two"]),
    ]
    cost = tuning_cost(StepEvent(PoissonSampling(0.1), 2.0), 3, 6, 1e-3)
    assert summary["tuning_cost"][0]["smallest"] == cost.smallest


def test_failures_are_told() -> None:
    study = paper()
    found = summarise(invented(study, loss, fails=lambda c: c.method == "prism" and c.seed == 1), name="x")
    text, page = markdown(found), render(found)
    assert "**2 runs failed**, listed at the end" in text
    assert "1 of 2 runs failed" in text
    assert "Not in the means, because runs failed or are missing: prism at ε = 3, rank 2." in text
    assert "- one, prism, ε 3, rank 2, rate 0.02, seed 1: it <broke>" in text
    assert "2 runs failed" in page
    assert "it &lt;broke&gt;" in page


def test_repeatable_noise_is_stamped() -> None:
    found = summarise(invented(paper(insecure_noise_seed="paired"), loss), name="x")
    assert "**NOT PRIVATE: the noise of every run is repeatable" in markdown(found)
    assert 'role="alert"' in render(found)


def test_a_study_that_has_not_begun() -> None:
    found = summarise(Progress(paper(), []), name="x")
    assert "| prism | … | – |" in markdown(found)
    assert "No private method has all its runs yet." in markdown(found)
    assert "<svg" not in render(found)


def test_a_grid_of_its_own_is_told() -> None:
    study = paper(methods=["prism", {"name": "dp-sgd", "learning_rate": [1.0, 2.0]}])
    text = markdown(summarise(Progress(study, []), name="x"))
    assert "Learning rates: 0.002, 0.02, 0.2. dp-sgd has a grid of its own: 1, 2." in text


def test_a_tie_is_called_one() -> None:
    found = summarise(
        invented(paper(), lambda c: 3.0 + 0.1 * (c.seed if c.method == "prism" else 1 - c.seed)), name="x"
    )
    assert "a tie" in markdown(found)


def test_only_methods_without_noise() -> None:
    study = paper(methods=["adamw"], epsilon=[])
    found = summarise(invented(study, loss), name="x")
    assert "| adamw | 2.505 ± 0.007 (0.02) |" in markdown(found)
    assert "What tuning would cost" not in markdown(found)
