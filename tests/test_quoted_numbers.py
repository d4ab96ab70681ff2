"""The numbers that the pages quote are those of the committed results."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlora.lab.studies import summary
from privlora.lab.studies.tables import markdown
from privlora.rehearsals.noise_alone import AIM

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
AUDITS = "benchmarks/results/auditing/README.md"
STUDIES = sorted(path.stem for path in (RESULTS / "studies").glob("*.jsonl"))


Script = Callable[[str], Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """A module of benchmarks/, or of a folder in it."""

    def imported(name: str) -> Any:
        folder, _, module = name.rpartition("/")
        for room in ("", folder):
            monkeypatch.syspath_prepend(ROOT / "benchmarks" / room)
        return importlib.import_module(module)

    return imported


@pytest.fixture
def findings(script: Script) -> Any:
    return script("studies/findings")


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def test_tables_of_the_studies_are_made_of_their_runs(findings: Any) -> None:
    text = page("benchmarks/results/studies/README.md")
    for title, table in findings.tables().items():
        assert table in text, title


@pytest.mark.parametrize(("name", "least"), [("results", 6)])
def test_rows_on_a_page_stand_beside_the_data(name: str, least: int) -> None:
    """Tables there are held to the data; a page quotes some of their rows."""
    beside = {
        line for path in RESULTS.rglob("*.md") for line in path.read_text(encoding="utf-8").splitlines()
    }
    text = re.sub(r"<!-- fair begins -->.*<!-- fair ends -->", "", page(f"docs/{name}.md"), flags=re.DOTALL)
    rows = re.findall(r"^\|.*\| [\d.]*\d\.\d+.*\|$", text, re.MULTILINE)
    assert len(rows) >= least
    assert [row for row in rows if row not in beside] == []


def test_the_fair_table_is_made_of_its_runs(script: Script) -> None:
    made = script("fair/tables")
    found = made.read(RESULTS / "fair.jsonl")
    text, tables = page("benchmarks/results/fair.md"), dict(made.tables(found))
    assert len(tables) == 8
    for title, table in tables.items():
        assert f"**{title}**\n\n{table}\n" in text
    (short,) = re.findall(r"<!-- fair begins -->\n(.*)<!-- fair ends -->", page("docs/results.md"), re.DOTALL)
    rows = short.splitlines()[2:]
    assert len(rows) == 6
    for row in rows:
        title, *cells = row.strip("| ").split(" | ")
        for cell in cells:
            assert cell.strip("`| ") in tables[title], (title, cell)


def test_gauges_of_a_start_are_quoted(script: Script) -> None:
    made = "\n".join(script("fair/geometry").table(RESULTS / "geometry.jsonl"))
    _, continued, _, *ranks = made.strip().split("\n\n")
    text = page("benchmarks/results/geometry.md")
    assert continued in text
    found = re.findall(r"^\| (prism|dp-sgd \+ free, relative rates) \|(.*)$", "\n".join(ranks), re.MULTILINE)
    cells = [cell.strip() for _, row in found for cell in row.split("|")]
    assert len([cell for cell in cells if cell]) == 14
    assert all(cell in text for cell in cells)


def test_layers_are_quoted(script: Script) -> None:
    made, sizes = script("fair/layers"), script("sizes")
    text = page("benchmarks/results/layers.md")
    of = (made.trials, made.reported, made.standing)
    for table in (*(each(RESULTS) for each in of), sizes.tables_of_layers(lines("sizes.jsonl"))):
        assert "\n".join(table) in text
    assert made.others(RESULTS) in text
    long = [line for line in lines("layers.jsonl") if line["cell"]["steps"] == 96]
    for task in ("math-questions", "pubmed"):
        of = [each for line in long if line["cell"]["task"] == task for each in line["choosing"]]
        assert f" {min(sum(each) / len(each) for each in of):.3f} for " in text
    pairs = [made.gain(of) for of in made.read(RESULTS).values()]
    assert (len(pairs), sum(gain > 0 for gain in pairs)) == (21, 19)


@pytest.mark.parametrize(
    ("made", "function", "results", "where"),
    [
        ("fair/norms", "table_of", "norms", "docs/clipping.md"),
        ("fair/metrics", "table_of", "fair_trials", "benchmarks/results/fair.md"),
        ("few_records/first_runs", "table", "few_records/first_runs", "benchmarks/results/sizes.md"),
        ("fair/answers", "table", "answers", "benchmarks/results/fair.md"),
    ],
)
def test_tables_are_quoted(made: str, function: str, results: str, where: str, script: Script) -> None:
    rows = getattr(script(made), function)(lines(f"{results}.jsonl"))
    assert "\n".join(rows) in page(where)


def test_what_leaves_no_less_noise_is_quoted(script: Script) -> None:
    made = "\n".join(script("denoising").tables(lines("denoising.jsonl")))
    tables = made.strip().split("\n\n")
    assert len(tables) == 2
    assert all(table in page("benchmarks/results/denoising.md") for table in tables)


def test_rates_by_noise_alone_are_quoted(script: Script) -> None:
    noise, zero = script("fair/noise_alone"), script("zero_trials")
    names = ("noise_alone", "fair", "sizes", "zero_trials")
    of, fair, sizes, runs = (lines(f"{name}.jsonl") for name in names)
    text = page("benchmarks/results/sizes.md")
    assert "\n".join(noise.table(of, fair)) in text
    assert "\n".join(noise.table_of_sizes(of, sizes)) in text
    assert "\n".join(zero.table(runs)) in text
    shares = noise.kept(of, fair)
    means = {place: sum(each) / len(each) for place, each in shares.items()}
    at = {place: mean for place, mean in means.items() if place[2] == AIM}
    assert round(min(at.values()), 3) == 0.991
    for (row, epsilon, _), mean in at.items():
        others = [means[row, epsilon, aim] for aim in noise.AIMS if (row, epsilon, aim) in means]
        assert mean > max(others) - 0.0035, row


def test_steps_on_a_gpu_are_quoted(script: Script) -> None:
    pytest.importorskip("opacus")
    made = script("speed/gpu").markdown(result("gpu.json"))
    assert made.strip() in page("docs/performance.md")


def test_leads_of_clipping_module_by_module_are_quoted(findings: Any) -> None:
    of = findings.scores("other_rows", 3.0)
    own, flat = (f"prism with {clipping} clipping" for clipping in ("per-module", "flat"))
    ahead, behind = findings.lead_over(of, own, flat), findings.lead_over(of, "prism", own)
    tie = findings.lead_over(of, "dp-adamw with per-module clipping", "dp-adamw")
    quoted = [f"{lead.lead:.3f} ({lead.in_errors:.1f} SE)" for lead in (ahead, behind)]
    book = page("benchmarks/results/README.md")
    assert all(words in book for words in quoted)
    assert f"a tie ({tie.lead:.3f}, {tie.in_errors:.1f} SE)" in book


@pytest.mark.parametrize("name", STUDIES)
def test_tables_beside_the_runs_are_made_of_them(
    findings: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_tuning", lambda progress: [])  # half a minute of accounting
    progress = findings.progress(name)
    made = markdown(summary.summarise(progress, name=name)).rstrip("\n")
    committed = (RESULTS / "studies" / f"{name}.md").read_text(encoding="utf-8")
    assert committed.partition("## What tuning would cost")[0].rstrip("\n") == made


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_a_study_is_there(findings: Any, name: str) -> None:
    progress = findings.progress(name)
    for rule in progress.study.rules:
        chosen = progress.chosen(rule)
        for place in progress.study.places:
            values = progress.values(place, chosen[place].rate)
            assert list(values) == progress.study.settings.seeds, place


def test_speed_page_quotes_its_runs(script: Script) -> None:
    pytest.importorskip("opacus")
    speed = script("speed/equal_lengths")
    measured = result("speed.json")
    text = page("benchmarks/results/speed.md")
    for line in speed.markdown(measured).splitlines():
        assert line in text
    quoted = re.findall(r"^\| [^|]+ \| [\d.]+ \| \*\*.*$", page("docs/benchmarks.md"), re.MULTILINE)
    assert len(quoted) == 11
    assert all(row in text for row in quoted)
    ratios = [timing["variants"]["privlora prism"]["cpu"]["ratio"] for timing in measured["timings"]]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in page("docs/benchmarks.md")


PERFORMANCE = "benchmarks/results/performance.md"


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("speed_models", "real_lengths"),
        ("real_lengths", "real_lengths"),
        ("launches", "launches"),
        ("untaken", "untaken"),
    ],
)
def test_tables_of_performance_are_made_of_their_runs(name: str, made: str, script: Script) -> None:
    pytest.importorskip("opacus")
    assert script(f"speed/{made}").markdown(result(f"{name}.json")) in page(PERFORMANCE)


def test_short_tables_of_steps_are_those_of_the_runs() -> None:
    rows = []
    for name in ("speed_models", "real_lengths"):
        for case in result(f"{name}.json")["cases"]:
            steps, cells = case["variants"], [case["case"].removeprefix("smollm2-135m-instruct ")]
            for step in ("Opacus", "dp-adamw", "prism"):
                cpu = steps[step]["cpu"]
                cells.append(
                    f"{cpu['ratio']:.2f} ({cpu['ratio_quartiles'][0]:.2f}-{cpu['ratio_quartiles'][1]:.2f})"
                )
            if "memory" in steps["prism"]:
                rows.append(f"| {' | '.join(cells)} | {steps['prism']['memory']['over_model_ratio']:.2f} |")
    rows = [row.replace(" x 1 |", " |") for row in rows]
    quoted = re.findall(r"^\| [^|]+ \| [\d.]+ \(.*$", page("docs/performance.md"), re.MULTILINE)
    assert len(quoted) == 6
    assert [row for row in quoted if row not in rows] == []


def test_what_a_step_launches_is_quoted() -> None:
    ratios: dict[str, list[float]] = {}
    for case in result("launches.json")["cases"]:
        plain = case["steps"]["plain peft"]["total"]["kernels"]
        for name, row in case["steps"].items():
            ratios.setdefault(name, []).append(row["total"]["kernels"] / plain)
    *rest, most = sorted(ratios["privlora prism"])
    opacus = ratios["Opacus DP-AdamW, hooks"]
    text = page(PERFORMANCE)
    assert f"{rest[0]:.2f} to {rest[-1]:.2f} times the kernels of plain peft" in text
    assert f"one micro-batch ({most:.2f})" in text
    assert f"Opacus launches {min(opacus):.2f} to {max(opacus):.2f} times" in text


def test_data_and_accounting_are_quoted() -> None:
    measured, table = result("scale.json"), page(PERFORMANCE).split("## Data and accounting")[1]
    before, now = measured["before"], measured["now"]
    for case, unit, cells in (
        ("ε, first", "s", [f"{run['ledger']['epsilon_first_s']:.2f}" for run in (before, now)]),
        ("a record", "µs", [f"{run['tokenising']['us_per_record']:.0f}" for run in (before, now)]),
        ("before it trains", "s", [f"{run['loading']['s']:.0f}" for run in (before, now)]),
    ):
        assert f"{case} | {cells[0]} {unit} | {cells[1]} {unit} |" in table, case
    text = page("docs/performance.md")
    calibrated = now["calibrate"]["q 0.01, T 200, epsilon 3"]["s"]
    for said in (
        f"100,000 steps takes {now['ledger']['epsilon_first_s']:.2f} s",
        f"ε = 3 takes {calibrated:.2g} s",
        f"takes {now['tokenising']['us_per_record']:.0f} µs for a short sentence",
        f"such records in {now['loading']['s']:.0f} s",
    ):
        assert said in text


def test_ratios_on_real_lengths_are_quoted() -> None:
    steps = [
        case["variants"]
        for case in result("real_lengths.json")["cases"]
        if not case["case"].startswith("equal")
    ]
    ratios = [each["prism"]["cpu"]["ratio"] for each in steps]
    said = f"{min(ratios):.2f} to {max(ratios):.2f}"
    assert f"{said} of the length-sorted plain step's time" in page("docs/performance.md")
    opacus = [each["Opacus"]["cpu"]["ratio"] / each["prism"]["cpu"]["ratio"] for each in steps]
    assert f"Opacus takes {min(opacus):.1f} to {max(opacus):.1f} times PRISM's" in page("docs/performance.md")


def test_scaling_of_the_update_is_quoted() -> None:
    text = page("docs/benchmarks.md")
    measured = result("update_scaling.json")
    for axis in ("size", "rank"):
        found = measured[axis]
        cells = [f"{1000 * seconds:.1f}" for seconds in found["seconds"]]
        row = ["ms an update", *cells, f"**{found['exponent']:.2f}**", f"{found['last_exponent']:.2f}"]
        assert "| " + " | ".join(row) + " |" in text, axis


def test_moves_after_a_release_are_quoted() -> None:
    text = page("docs/benchmarks.md")
    measured = result("moves.json")
    for place, moves in measured["milliseconds"].items():
        for move, found in moves.items():
            cells = [f"{found[way]:.1f}" for way in ("reflections", "products")]
            assert f"| {place}, {move} | {' | '.join(cells)} | **{found['times faster']:.2f}** |" in text
    for worst in measured["errors_float32"].values():
        assert all(f"{worst[name]:.1e}" in text for name in ("Z", "orthonormality"))
    for threads, words in (("1", "million float64 normals a CPU second"), ("2", "in two threads together")):
        assert f"{measured['million_normals'][threads]['a CPU second']:.0f} {words}" in text


def test_planted_texts_are_quoted() -> None:
    text, rows = page(AUDITS), result("auditing/text_canaries.json")["rows"]
    for kind, temperature in {(row["kind"], row["temperature"]) for row in rows}:
        cells = [f"`{kind}`" + (f", temperature {temperature:g}" if temperature else "")]
        for noise in (1.0, 0.25, 0.0):
            cell = (kind, temperature, noise)
            found = [row for row in rows if (row["kind"], row["temperature"], row["noise"]) == cell]
            areas = sorted(row["area"] for row in found)
            low, middle, high = areas[0], statistics.median(areas), areas[-1]
            bound = statistics.median(row["epsilon_lower"] for row in found)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f}), ε ≥ {bound:.2f}")
        assert f"| {' | '.join(cells)} |" in text, kind
    assert not any(row["violated"] for row in rows)


def test_audits_are_quoted() -> None:
    text, short = page(AUDITS), page("docs/audit.md")
    mutations = result("auditing/mutations.json")
    caught = [row["caught"] for row in mutations["broken"]]
    flagged = [row["flagged"] for row in mutations["correct"]]
    assert f"**{sum(caught)} of {len(caught)} caught**" in text
    assert f"**{sum(flagged)} of {len(flagged)} flagged**" in text
    assert (
        f"{sum(caught)} of {len(caught)} were caught, and {sum(flagged)} of {len(flagged)} correct ones accused"
        in short
    )
    kinds = ("dp-adamw", "prism", "wishart-m2")
    steps, signals = (result(f"auditing/{name}.json")["rows"] for name in ("one_step", "one_run_signals"))
    one = [
        row["share"] for kind in kinds for row in steps if (row["method"], row["target_epsilon"]) == (kind, 3)
    ]
    assert (
        "{:.0f} % of the claim for DP-AdamW, {:.0f} % for PRISM and {:.0f} %".format(*(100 * s for s in one))
        in short
    )
    many = [
        100 * row["share"]
        for kind in kinds
        for row in signals
        if (row["method"], row["target_epsilon"], row["noise"]) == (kind, 3, 1)
    ]
    assert "ε = 3 the bound is {:.0f}, {:.0f} and {:.0f} %".format(*many) in short
    for row in result("auditing/shadows.json")["speed"]:
        cells = [f"{row[key]:.1f}" for key in ("ordinary", "together_8", "together_16")]
        assert f"| {row['modules']} | " + " | ".join(cells) in text, row
    for row in result("auditing/shadows.json")["attack"]:
        area, lower = row["area"], row["epsilon_lower"]
        quoted = f"{area['value']:.2f} ({area['low']:.2f} to {area['high']:.2f})"
        assert f"{quoted} | {row['correct']} of {row['judged']} | {lower:.2f} |" in text, row["method"]
    few = result("auditing/few_records.json")
    for target in (1.0, 3.0, 8.0):
        rows = [row for row in few["one_step"] if round(row["epsilon_claimed"], 6) == target]
        cells = [
            f"{target:g}",
            f"{rows[0]['trials']:,}",
            *(f"{row['share']:.0%}".replace("%", " %") for row in rows),
        ]
        assert f"| {' | '.join(cells)} |" in text
    for row in few["whole_runs"]:
        assert f"{row['share']:.0%} for `{row['method']}` ({row['trials']:,} runs)".replace("%", " %") in text
    runs = result("auditing/one_run.json")["rows"]
    seconds = [row["cpu_seconds"] for row in runs if row["noise"] == 1.0]
    quoted = f"({len(seconds)} audits; {min(seconds):.0f} to {max(seconds):.0f} CPU seconds each)"
    assert quoted in text


def test_projection_studies_are_quoted() -> None:
    text = page("benchmarks/results/projection/README.md")
    short = [line for line in page("docs/projection-studies.md").splitlines() if re.search(r"[±\]] ", line)]
    assert all(line in text for line in short if line.startswith("| "))
    heads = result("projection/heads.json")
    lines = (RESULTS / "projection" / "heads-images.jsonl").read_text(encoding="utf-8").splitlines()
    images = [row for row in map(json.loads, lines) if "test_mean" in row]
    for row in heads["against_epsilon"] + heads["against_rank"] + images:
        assert f"{row['test_mean']:.3f} ± {row['test_deviation']:.3f}" in text, row["cell"]
    for rows in result("projection/attacks.json")["tables"].values():
        for row in rows:
            low, high = row["auc_interval"]
            assert f"{row['auc']:.3f} [{low:.3f}, {high:.3f}]" in text or row["cell"]["table"] == "one update"


def test_noise_of_projected_steps_is_quoted() -> None:
    quoted = [line for line in page("docs/projection-accounting.md").splitlines() if line.startswith("| ")]
    made = set()
    for row in result("projection/accounting.json")["many_steps"]:
        ratios = (row[key] for key in ("rank_free", "rank_one"))
        cells = [f"{found:.4f} ({found / row['plain']:.4f})" for found in (*ratios, row["theorem_5"]["1"])]
        after = f"{row['project_then_clip']:.4f} ({row['project_then_clip'] / row['plain']:.4f})"
        noise = " | ".join([*cells, f"{row['plain']:.4f}", after])
        made.add(f"{row['dimension']} | {row['rank']} | {row['epsilon']:g} | {noise}")
    rows = [
        line.strip("| ").split(" | ")
        for line in quoted
        if line[2:].partition(" ")[0] in ("768", "2048", "4096")
    ]
    assert rows
    for dimension, rank, _, *rest in rows:
        assert " | ".join([dimension, rank, *rest]) in made


def test_results_page_says_where_prism_does_not_win(findings: Any) -> None:
    at_3 = findings.scores("private_methods", 3.0)
    solutions = {"math-solutions": at_3["math-solutions"]}
    older, borrowed = findings.SHOWN[1], findings.SHOWN[3]
    assert findings.behind(solutions, older).in_errors < -2
    assert findings.behind(solutions, borrowed).in_errors < -2
    assert findings.behind(at_3, borrowed).in_errors < 2
    assert findings.behind(findings.scores("private_methods", 6.0), findings.SHOWN[2]).in_errors < 2
    larger = findings.scores("second_model", 3.0)
    assert all(abs(findings.behind(larger, m).in_errors) < 2 for m in (borrowed, findings.SHOWN[2], "dp-sgd"))
    edges = findings.progress("second_model").chosen("own-best").values()
    assert all(choice.at_edge for choice in edges)


def test_the_nearest_method_is_quoted(findings: Any) -> None:
    text = page("docs/results.md")
    nearest = "dp-sgd with spectral clipping and averaging"
    for rule in ("shared", "own-best"):
        lead = findings.behind(findings.scores("nearest", 3.0, rule=rule), nearest)
        assert f"{lead.lead:.3f} ({lead.in_errors:.1f} SE)" in text, rule


REAL = "benchmarks/results/real_models.md"


@pytest.mark.parametrize(("made", "name"), [("grid", "real_models"), ("once", "once")])
def test_the_page_on_real_models_quotes_its_runs(made: str, name: str, script: Script) -> None:
    assert script(f"real_models/{made}").table(lines(f"{name}.jsonl")) in page(REAL)


def test_the_short_tables_on_real_models_are_those_of_the_runs() -> None:
    """Of one task three seeds each; of half a day's commands some cases."""
    text = page("docs/real-models.md")
    seeds: dict[tuple[float, str], list[dict[str, float]]] = {}
    for line in lines("real_models.jsonl"):
        if (line["task"], line["rate"]) == ("sst2", 1.0) and line["epsilon"] in (0.0, 3.0):
            seeds.setdefault((line["epsilon"], line["method"]), []).append(line["trained"])
    for (epsilon, method), found in seeds.items():
        losses = [one["loss"] for one in found]
        cells = [
            sum(losses) / len(losses),
            min(losses),
            max(losses),
            sum(one["accuracy"] for one in found) / len(found),
        ]
        quoted = " | ".join(f"{cell:.3f}" for cell in cells)
        assert f"| {f'{epsilon:g}' if epsilon else 'none'} | {method} | {quoted} |" in text
    for line in lines("real_models.jsonl"):
        if line["task"] != "sst2":
            epsilon = f"{line['epsilon']:g}" if line["epsilon"] else "none"
            cells = (line["task"], epsilon, line["method"], f"{line['trained']['loss']:.3f}")
            assert f"| {' | '.join(cells)} |" in text
    once = [row.split(" | ", 1)[1] for row in page(REAL).split("| case |")[1].splitlines()[2:]]
    shown = [row for row in text.splitlines() if row.count(" to ") == 2 and row.startswith("| ")]
    assert len(shown) == 5
    for row in shown:
        of, at, loss, accuracy = row.strip("| ").split(" | ")[1:]
        assert any(
            each.startswith(f"{of} | {at} | ") and f"| {loss} | {accuracy} |" in each for each in once
        ), row


def test_the_readme_quotes_its_runs() -> None:
    """One task, means over seeds, each method at its own rate."""
    runs: dict[tuple[str, Any], list[Any]] = {}
    for line in lines("real_models.jsonl"):
        if (line["task"], line["rate"]) == ("sst2", 1.0):
            runs.setdefault((line["method"], line["epsilon"]), []).append(line)
    kinds = (("adamw, not private", 0.0), ("prism", 3.0), ("dp-sgd + free", 3.0), ("dp-adamw + free", 3.0))
    found = [runs[kind] for kind in (*kinds, ("dp-sgd", 3.0))]
    assert {len(seeds) for seeds in found} == {3}
    for seeds, row in zip(
        found, page("README.md").split("| untrained | – | 3.18 | 0.52 |")[1].splitlines()[1:], strict=False
    ):
        loss, accuracy = (sum(line["trained"][name] for line in seeds) / 3 for name in ("loss", "accuracy"))
        assert row.endswith(f"| {loss:.2f} | {accuracy:.2f} |"), row


def test_the_page_on_performance_quotes_the_peaks(script: Script) -> None:
    found = result("memory.json")
    assert script("speed/memory").markdown(found) in page(PERFORMANCE)
    assert f"[{len(found['cases'])} cases](../{PERFORMANCE}#memory-predicted)" in page("docs/performance.md")
    ratios = [row["predicted_mib"] / row["measured_mib"] for row in found["cases"]]
    assert min(ratios) >= 1
    most = f"{100 * (max(ratios) - 1):.0f} %"
    assert f"**Never below what was measured, and at most {most} above it.**" in page("docs/performance.md")


def test_steps_of_several_processes_are_quoted(script: Script) -> None:
    pytest.importorskip("opacus")
    table = script("speed/processes").markdown(result("processes.json"))
    assert table in page("docs/many-devices.md")
    scaling: Any = script("speed/scaling")
    assert scaling.page() + "\n" == page("benchmarks/scaling.md")


def test_sizes_are_quoted(script: Script) -> None:
    *tables, bands, _, metric = "\n".join(script("sizes").tables(lines("sizes.jsonl"))).split("\n\n")
    assert len(tables) == 3
    text = page("benchmarks/results/sizes.md")
    assert all(table.strip() in text for table in (*tables, metric)), bands
