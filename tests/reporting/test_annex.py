"""What is filed of a release: every number computed again by other means, and nothing that is not published."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from annex_cases import said
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from push_cases import BASE, Hub, sealed_again
from reporting_cases import Run
from test_pages import HOSTILE, LOADING, Tags

from privlora.accounting.ledger_format import read_ledger
from privlora.accounting.meaning import posterior, share_in_words
from privlora.errors import PrivacyError, RunError
from privlora.reporting import annex, rewrite_report
from privlora.reporting.annex import OF_RECORDS, annex_of, read_book, size_of, to_fill
from privlora.reporting.annex_page import render_annex
from privlora.reporting.filing import file_annex
from privlora.reporting.pushing import push
from privlora.reporting.seals import ANNEX
from privlora.reporting.verifying import verify
from privlora.reporting.wording import against_a_client
from privlora.training.files import RunFolder

ROOT = Path(__file__).parents[2]


def made(report: dict[str, Any], run: Run) -> dict[str, Any]:
    """The annex of a report as if its ledger were closed."""
    folder = run.folder
    return annex_of(report, read_book(folder.ledger, folder.ledger.read_bytes()), {"report.html": "0" * 64})


def test_every_number_follows_from_the_ledger(filed: RunFolder) -> None:
    """By dp_accounting's own losses, and by the lines of the file."""
    annex = said(filed.release)
    lines = filed.ledger.read_bytes().splitlines(keepends=True)
    plan = json.loads(lines[0])["plan"]
    (phase,) = plan["phases"]
    rate, sigma = phase["event"]["sampling"]["sample_rate"], phase["event"]["noise_multiplier"]
    charges = sum(json.loads(line)["type"] == "charge" for line in lines)
    loss = from_gaussian_mechanism(sigma, sampling_prob=rate, value_discretization_interval=1e-4)
    loss = loss.self_compose(charges)

    statement, means, ledger = annex["statement"], annex["means"], annex["ledger"]
    epsilon = loss.get_epsilon_for_delta(plan["delta"])
    assert statement["epsilon"] == pytest.approx(epsilon, rel=1e-3)
    assert (statement["delta"], statement["unit"]) == (1e-4, "record")
    assert means["prior"] == 0.5
    assert means["posterior_at_most"] == pytest.approx(math.exp(epsilon) / (1 + math.exp(epsilon)), rel=1e-3)
    assert means["right_guesses"] == pytest.approx((1 + loss.get_delta_for_epsilon(0.0)) / 2, abs=2e-3)
    for name, false in (("found_at_1_percent", 0.01), ("found_at_1_permille", 0.001)):
        curve = [(e / 50, loss.get_delta_for_epsilon(e / 50)) for e in range(250)]
        best = min(math.exp(e) * false + delta for e, delta in curve)
        assert means[name] == pytest.approx(best, rel=0.05)
        assert means[name] >= best * (1 - 1e-3)
    assert annex["size"] == {
        "units": round(plan["expected_batch_size"] / rate),
        "unit": "record",
        "of": "all data",
    }
    assert ledger["head"] == hashlib.sha256(lines[-1]).hexdigest()
    assert (ledger["steps_charged"], ledger["steps_planned"], ledger["closed"]) == (
        charges,
        phase["steps"],
        True,
    )
    others = {path.name: path.read_bytes() for path in filed.release.iterdir() if path.name not in ANNEX}
    assert annex["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in others.items()}
    assert [row["file"] for row in annex["public"]] == sorted(others)
    report = json.loads(filed.report.read_text())
    assert annex["versions"] == report["versions"]
    del annex["sha256"]
    assert (
        said(filed.release)["sha256"]
        == hashlib.sha256(json.dumps(annex, sort_keys=True).encode()).hexdigest()
    )


def test_what_another_client_can_learn_is_its_own_bound() -> None:
    """Which knows its own share of the noise, so the stated epsilon would be too small."""
    names = ("right_guesses", "found_at_1_percent", "found_at_1_permille")
    known = annex._means(dict.fromkeys(names, 0.5), 1.0, 2.0)
    assert known["posterior_of_another_client_at_most"] == posterior(2.0) > known["posterior_at_most"]
    rows = [{"clients": 1, "noise_multiplier": 1.0, "epsilon": 2.0}, {"clients": 2, "epsilon": 5.0}]
    assert against_a_client({"federation": {"colluding": rows}}) == 2.0


def test_posterior_is_bayes_rule_on_randomised_response() -> None:
    for epsilon in (0.0, 0.1, 3.0, 40.0):
        truth = math.exp(epsilon) / (1 + math.exp(epsilon))
        assert posterior(epsilon) == pytest.approx(0.5 * truth / (0.5 * truth + 0.5 * (1 - truth)))
    assert posterior(1000.0) == 1.0


def test_bounds_are_never_rounded_down() -> None:
    assert [share_in_words(value) for value in (0.5, 0.9001, 0.9, 0.99999, 1.0)] == [
        "50.0 %",
        "90.1 %",
        "90.0 %",
        "100.0 %",
        "100.0 %",
    ]


def test_the_page_says_what_the_json_says(filed: RunFolder) -> None:
    annex, page = said(filed.release), (filed.release / "annex.html").read_text()
    assert page == render_annex(annex)
    shown = f"{math.ceil(1000 * annex['statement']['epsilon']) / 1000:.3f}"
    for words in (
        f"({shown}, 0.0001)",
        f"50 % → {share_in_words(annex['means']['posterior_at_most'])}",
        f"privlora verify release --hash {annex['sha256']}",
        *(row["risk"].split("'")[0] for row in annex["risks"]),
        *annex["to_fill"][:-2],
    ):
        assert words in page, words
    assert page.count('contenteditable="true"') == len(annex["to_fill"])
    assert to_fill("user") == [name for name in annex["to_fill"] if name != OF_RECORDS]


def test_the_page_needs_nothing_else(filed: RunFolder) -> None:
    page = (filed.release / "annex.html").read_text()
    tags = Tags(page).seen
    assert not {tag for tag, _ in tags} & LOADING
    assert not [
        name
        for _, attributes in tags
        for name in attributes
        if name.startswith("on") or name in ("src", "href")
    ]
    assert not re.search(r"https?:|@import|url\(", page)


def test_hostile_names_stay_text(report: dict[str, Any], private_run: Run) -> None:
    known = {tag for tag, _ in Tags(render_annex(made(report, private_run))).seen}
    report["adapter"]["base_model"] = report["statement"]["dataset"] = HOSTILE
    page = render_annex(made(report, private_run))
    assert {tag for tag, _ in Tags(page).seen} == known
    assert "{{ 7*7 }}" in page


def _fields(report: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *way, last = path.split("/")
    inner = report
    for name in way:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return report


RECORD = "One person has several records, unit = record"
FEDERATION = {"noise_by": "shares", "secure_sums": True, "colluding": [], "rule": {"name": "tan"}}
FEDERATION |= {"clients": [{}] * 3, "threshold": 2}


@pytest.mark.parametrize(
    ("path", "value", "more", "less"),
    [
        ("evaluation", [], set(), {"Evaluation records are private"}),
        ("statement/unit", "user", {"One person is several users, unit = user"}, {RECORD}),
        ("adapter/init", "public-gradient", {"`adapter.public_text` holds private texts"}, set()),
        ("adapter/init", "elsewhere", {"Training starts from another adapter"}, set()),
        ("noise/clipping_slack", 0.02, {"bfloat16 models"}, set()),
        ("method/lora_dropout", 0.1, {"Dropout (`model.dropout`, `adapter.lora_dropout`)"}, set()),
        ("method/clipping", "flat", set(), {"`method.clipping: spectral` (PRISM's default)"}),
        (
            "method/clipping",
            "automatic",
            {"`method.clipping: automatic` or `normalized`"},
            {"`method.clipping: spectral` (PRISM's default)"},
        ),
        (
            "method/public_texts",
            {},
            {"Texts of `synthesis`, or its prompts, follow from private records"},
            set(),
        ),
        (
            "statement/sampling",
            {"kind": "truncated_poisson", "sample_rate": 0.1, "max_batch_size": 9, "dataset_size": 60},
            {"`max_batch_size` cuts oversized batches"},
            set(),
        ),
        ("statement/projections", [[1, 2]], {"`method: wishart-m2` (clip, then project)"}, set()),
        (
            "federation",
            FEDERATION,
            {
                "A federation's `survivors` counts clients that tell the server their noise",
                "Clients of one federation do not know one another",
            },
            {"Noise is a floating-point Gaussian"},
        ),
        (
            "federation",
            {**FEDERATION, "noise_by": "client", "secure_sums": False},
            {"One person has records with several clients of a federation"},
            set(),
        ),
        (
            "federation",
            {**FEDERATION, "noise_by": "server", "secure_sums": False},
            {"When a trusted server's lines appear"},
            set(),
        ),
        ("method/unchecked", True, {"`data.unchecked: true`"}, set()),
    ],
)
def test_risks_are_those_of_the_run(
    path: str, value: Any, more: set[str], less: set[str], report: dict[str, Any], private_run: Run
) -> None:
    before = {row["edge"] for row in made(report, private_run)["risks"]}
    after = {row["edge"] for row in made(_fields(report, path, value), private_run)["risks"]}
    assert (after - before, before - after) == (more, less)


def test_risks_are_rows_of_the_page_on_sharp_edges() -> None:
    page = (ROOT / "docs/sharp-edges.md").read_text(encoding="utf-8")
    edges = {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")}
    source = Path(annex.__file__).parent / "templates" / "risks.txt.j2"
    risks = {
        line.split(" | ")[0] for line in source.read_text(encoding="utf-8").splitlines() if " | " in line
    }
    assert len(risks) > 20
    assert risks - edges == set()


def test_how_many_units_there_are(report: dict[str, Any]) -> None:
    assert size_of(report) == {"units": 60, "unit": "record", "of": "all data"}
    client = {**FEDERATION, "noise_by": "client"}
    assert size_of({**report, "federation": client}) == {
        "units": 60,
        "unit": "record",
        "of": "each of 3 clients",
    }
    assert size_of({**report, "federation": FEDERATION})["of"] == "all data"
    whole = {**report, "statement": {**report["statement"], "unit": "client"}, "federation": FEDERATION}
    assert size_of(whole) == {"units": 3, "unit": "client", "of": "the federation"}


def test_what_protects_nobody_is_not_filed(public_run: Run, insecure_run: Run, tmp_path: Path) -> None:
    for run in (public_run, insecure_run):
        before = sorted(run.folder.release.iterdir())
        with pytest.raises(PrivacyError, match=r"nothing to file: the release .* is NOT PRIVATE") as raised:
            file_annex(run.folder)
        assert "\n" not in str(raised.value)
        assert sorted(run.folder.release.iterdir()) == before


def test_an_infinite_epsilon_is_not_filed(report: dict[str, Any], private_run: Run) -> None:
    report["statement"]["epsilon"] = None
    with pytest.raises(PrivacyError, match="nothing to file"):
        made(report, private_run)


def test_only_finished_whole_runs_are_filed(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run in"):
        file_annex(RunFolder(tmp_path / "nowhere"))
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    kept = run.ledger.read_bytes()
    run.ledger.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RunError, match="is not finished"):
        file_annex(run)
    run.ledger.write_bytes(kept)
    metrics = run.metrics.read_bytes()
    run.metrics.unlink()
    with pytest.raises(RunError, match=r"lacks metrics.jsonl, which its report names"):
        file_annex(run)
    run.metrics.write_bytes(metrics)
    (run.release / "adapter_config.json").write_text("{}")
    with pytest.raises(PrivacyError, match="is not as the run wrote it"):
        file_annex(run)
    assert not [name for name in ANNEX if (run.release / name).exists()]


def test_a_report_that_verify_rejects_is_not_filed(run: RunFolder) -> None:
    written = run.report.read_text()
    run.report.write_text(json.dumps(json.loads(written)))
    with pytest.raises(PrivacyError, match=r"in another form.*`privlora report .*` writes it again"):
        file_annex(run)
    rewrite_report(run)
    assert run.report.read_text() == written
    file_annex(run)


def test_an_edited_card_is_made_anew_before_it_is_sealed(run: RunFolder) -> None:
    true = (run.release / "README.md").read_bytes()
    (run.release / "README.md").write_text("a patient")
    file_annex(run)
    assert (run.release / "README.md").read_bytes() == true


def test_the_release_shows_no_time_of_the_annex(run: RunFolder) -> None:
    times = {path.stat().st_mtime_ns for path in (run.release, *run.release.iterdir())}
    assert len(times) == 1
    file_annex(run)
    assert {path.stat().st_mtime_ns for path in (run.release, *run.release.iterdir())} == times
    assert all((run.release / name).stat().st_mode == run.report.stat().st_mode for name in ANNEX)


def test_nothing_of_the_private_folder_is_read(run: RunFolder) -> None:
    """But for the note of the report's hash: without private/ the annex is the same."""
    file_annex(run)
    whole = [(run.release / name).read_bytes() for name in ANNEX]
    shutil.rmtree(run.private)
    file_annex(run)
    assert [(run.release / name).read_bytes() for name in ANNEX] == whole


def test_a_push_takes_the_annex_along_and_makes_it_anew(run: RunFolder, tmp_path: Path) -> None:
    file_annex(run)
    page = (run.release / "annex.html").read_bytes()
    (run.release / "annex.html").write_text("a patient")
    hub = Hub()
    push(run, "me/notes", base_model=BASE, api=hub)
    assert hub.files["annex.html"] != page  # which names another base
    annex = json.loads(hub.files["annex.json"])
    assert annex["subject"]["base_model"] == BASE
    assert annex["files"]["README.md"] == hashlib.sha256(hub.files["README.md"]).hexdigest()
    assert hub.files["annex.html"].decode() == render_annex(annex)
    assert set(annex["files"]) | set(ANNEX) == set(hub.files)
    (tmp_path / "downloaded").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "downloaded" / name).write_bytes(content)
    assert verify(tmp_path / "downloaded", annex_hash=annex["sha256"]).passed


def test_the_annex_follows_a_report_that_is_written_again(run: RunFolder) -> None:
    file_annex(run)
    whole = [(run.release / name).read_bytes() for name in ANNEX]
    for name in ANNEX:
        (run.release / name).write_text("old")
    rewrite_report(run)
    assert [(run.release / name).read_bytes() for name in ANNEX] == whole


def test_an_annex_of_a_run_that_goes_on_is_removed(run: RunFolder) -> None:
    file_annex(run)
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    assert read_ledger(run.ledger).closed
    run.ledger.write_bytes(b"".join(lines[:-1]))
    sealed_again(run)
    rewrite_report(run)
    assert not [name for name in ANNEX if (run.release / name).exists()]
