"""Which experiments run, what the JSON holds, and where files go."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from diagnostics_cases import RECORDS, tiny_settings
from tiny_models import tiny_model, tiny_tokenizer

from privlora.errors import ConfigError, RunError
from privlora.lab.diagnostics.choosing import FIGURES, chosen_figures, chosen_rows
from privlora.lab.diagnostics.experiments import Diagnostics, diagnose
from privlora.lab.diagnostics.page import render, write

STEPS = 3
PNG = b"\x89PNG\r\n\x1a\n"


def _diagnose(
    *, public: bool = True, figures: Any = None, also: Any = None, seed: int = 0, **groups: Any
) -> Diagnostics:
    return diagnose(
        tiny_settings(**groups),
        public=public,
        figures=figures,
        also=also,
        steps=STEPS,
        seed=seed,
        model=tiny_model(),
        tokenizer=tiny_tokenizer(),
        records=RECORDS,
    )


@pytest.fixture(scope="module")
def whole() -> Diagnostics:
    return _diagnose()


def test_json_has_every_series(whole: Diagnostics) -> None:
    content = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
    assert set(content) == {"schema_version", "kind", "public", "facts", "figures"}
    assert (content["schema_version"], content["public"]) == (1, True)
    found = content["figures"]
    assert tuple(found) == FIGURES
    assert found["noise-ratio"]["steps"] == [1, 2, 3]
    assert {"ratio", "moving_average", "by_law", "window"} < set(found["noise-ratio"])
    for one in found["gauge-sensitivity"]:
        assert set(one) == {"method", "gauges", "values", "spread"}
        assert (len(one["values"]), len(one["spread"])) == (5, STEPS)
    for name in ("gauge", "factor_statistic", "factors", "law", "prism", "prism_law"):
        assert len(found["noise-energy"][name]) == 5 * STEPS
    assert [one["method"] for one in found["clipping"]["fraction"]] == ["dp-adamw", "prism rank"]
    sweep = found["gauge-sweep"]
    for name in ("gauges", "factor_law_energy", "prism_law_energy", "point_distance", "amplification"):
        assert len(sweep[name]) == 61
    for name in ("first_order", "bilinear", "factors", "prism"):
        assert [len(sweep[name][level]) for level in ("p10", "median", "p90")] == [61] * 3
    for row in found["preconditioning"]["runs"]:
        assert len(row["amplification"]) == len(row["steps"]) == STEPS - 1
    assert found["gram-stress"] == found["preconditioning"]["runs"]


def test_the_sweep_of_a_trained_layer_meets_its_requirement(whole: Diagnostics) -> None:
    sweep = whole.to_dict()["figures"]["gauge-sweep"]
    assert sweep["factor_decades"] >= 3
    assert sweep["prism_variation"] < 1e-6
    tau = whole.facts["noise_multiplier"] * whole.facts["clip_norm"] / whole.facts["expected_batch_size"]
    dimension = sweep["r"] * (sweep["m"] + sweep["n"] - sweep["r"])
    assert sweep["prism_law_energy"][0] == pytest.approx(tau**2 * dimension)
    assert sweep["module"]


def test_only_what_a_figure_needs_is_run() -> None:
    steps: list[tuple[int, int]] = []

    def seen(done: int, total: int) -> None:
        steps.append((done, total))

    for figures, runs in (("gauge-sweep", 1), (["noise-ratio"], 10)):
        steps.clear()
        found = diagnose(
            tiny_settings(),
            public=True,
            figures=figures,
            steps=STEPS,
            model=tiny_model(),
            tokenizer=tiny_tokenizer(),
            records=RECORDS,
            on_step=seen,
        )
        assert len(found.figures) == 1
        assert [done for done, _ in steps] == list(range(1, runs * STEPS + 1))
        assert {total for _, total in steps} == {runs * STEPS}


@pytest.mark.long
def test_a_seed_repeats_everything() -> None:
    first, again, other = (_diagnose(figures="noise-ratio,gauge-sweep", seed=s) for s in (3, 3, 4))
    assert first == again
    assert first.figures["noise-ratio"] != other.figures["noise-ratio"]


def test_names_of_figures() -> None:
    assert chosen_figures(None) == FIGURES
    assert chosen_figures("gauge-sweep, noise-ratio") == ("noise-ratio", "gauge-sweep")
    assert chosen_figures(["clipping"]) == ("clipping",)
    with pytest.raises(ConfigError, match=r"unknown figure 'gauge-swep'.*did you mean 'gauge-sweep'"):
        chosen_figures("gauge-swep")
    with pytest.raises(ConfigError, match="unknown figure ''"):
        chosen_figures("")
    with pytest.raises(ConfigError, match="no figure"):
        chosen_figures([])


def test_names_of_further_methods() -> None:
    assert chosen_rows(None) == ()
    assert chosen_rows("lora-rite,dp-sgd") == ("dp-sgd", "lora-rite")
    for name in ("dp-adamw", "adamw", "prism", "ffa", "lora-rit"):
        with pytest.raises(ConfigError, match="not a private method on both factors"):
            chosen_rows(name)


def test_further_methods_are_run_from_every_gauge() -> None:
    found = _diagnose(figures="gauge-sensitivity,clipping", also="dp-sgd,lora-rite")
    names = ["dp-adamw", "prism rank", "dp-sgd", "lora-rite"]
    sensitivity, clipping = found.figures["gauge-sensitivity"], found.figures["clipping"]
    for sets in (sensitivity, clipping.fraction, clipping.coefficient):
        assert [one.method for one in sets] == names
    # At the first step all factor methods clip alike: the mechanism is the same, whatever the optimizer.
    first = [[row[0] for row in one.values] for one in clipping.coefficient]
    assert first[0] == first[2] == first[3] != first[1]
    # LoRA-RITE's rule does not depend on the gauge, but the noise that it is fed does.
    assert min(sensitivity[3].spread) > 100 * max(sensitivity[1].spread)


@pytest.mark.long
def test_public_files(whole: Diagnostics, tmp_path: Path) -> None:
    page_path, series, *pictures = write(whole, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["diagnostics.html", "diagnostics.json", *(f"{name}.png" for name in FIGURES)]
    )
    assert json.loads(series.read_text()) == json.loads(json.dumps(whole.to_dict()))
    for path in pictures:
        assert path.read_bytes().startswith(PNG)
        assert path.stat().st_size > 10_000
    page = page_path.read_text()
    assert "PRIVATE</strong>" not in page
    assert page.count("<svg") == len(FIGURES)
    assert "In the paper" in page


def test_the_same_result_gives_the_same_bytes(whole: Diagnostics, tmp_path: Path) -> None:
    one = Diagnostics(True, whole.facts, {"noise-ratio": whole.figures["noise-ratio"]})
    for name in ("first", "again"):
        write(one, tmp_path / name)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_private_files(whole: Diagnostics, tmp_path: Path) -> None:
    page, series, _ = write(
        Diagnostics(False, whole.facts, {"clipping": whole.figures["clipping"]}), tmp_path
    )
    assert [path.name for path in tmp_path.iterdir()] == ["private"]
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700
    assert page.parent == tmp_path / "private"
    assert "PRIVATE</strong>" in page.read_text()
    assert json.loads(series.read_text())["public"] is False


def test_the_page_is_self_contained_and_escaped(whole: Diagnostics) -> None:
    facts = {**whole.facts, "model": "<script>alert(1)</script>", "data": ["a&b.jsonl", "c"]}
    page = render(Diagnostics(True, facts, whole.figures))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "a&amp;b.jsonl, c" in page
    assert not re.search(r'(src|href)="[^#]|url\([^#]|@import', page)
    assert "NOT PRIVATE" in page
    assert not re.search(r": #\w{6}", page.split("</style>")[1])  # all colours follow the theme


def test_empty_batches_are_drawn(tmp_path: Path) -> None:
    found = _diagnose(figures="clipping", privacy={"expected_batch_size": 1e-4})
    assert found.to_dict()["figures"]["clipping"]["fraction"][0]["spread"] == [None] * STEPS
    write(found, tmp_path)


def test_a_folder_that_cannot_be_made(whole: Diagnostics, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot create"):
        write(whole, tmp_path / "file" / "below")
