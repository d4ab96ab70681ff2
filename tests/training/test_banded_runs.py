"""Runs with correlated noise, from start to end: what is kept, what follows from the ledger, and crashes."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from banded_cases import (
    BANDED,
    BANDS,
    FLAT,
    begins,
    begins_where_known,
    check_turns,
    kept_noise,
    seen,
    watched,
)
from promises import promise, small_settings
from rank_cases import together
from run_cases import (
    PRIVACY,
    RECORDS,
    STEPS,
    Bench,
    check_after_crash,
    check_finished,
    edit_settings,
    failing,
    in_a_child,
    no_space_at,
    side_log,
)

from privlora.accounting import CyclicPoissonSampling, calibrate_noise_multiplier, epsilon, read_ledger
from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.config import PrivacySettings, Settings, checked
from privlora.data.sampling import CyclicPoissonSampler
from privlora.errors import ConfigError, PrivacyError
from privlora.rehearsals.choosing import rows_to_advise_on
from privlora.training.promise import noise_of_bands, plan_privacy, planned_sampling

pytestmark = pytest.mark.usefixtures("quick_reports")


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Warm, as in test_crashes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    q = BANDS * (PRIVACY["expected_batch_size"] / PRIVACY["public_dataset_size"])
    tempfile.gettempdir()
    calibrate_noise_multiplier(
        CyclicPoissonSampling(q, BANDS), STEPS, PRIVACY["target_epsilon"], PRIVACY["delta"]
    )
    return Bench()


def stopped(bench: Bench, folder: Path) -> None:
    """After its fifth step."""
    bench.stopped(folder, 5, method=FLAT, privacy=BANDED)


@pytest.mark.parametrize("method", [FLAT, "prism", "ffa"])
def test_a_run_from_start_to_end(method: str, bench: Bench, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with side_log(log), watched(tmp_path / "seen"):
        result = bench.start(folder, method=method, privacy=BANDED)
    check_finished(folder, log, result)
    steps = seen(tmp_path / "seen")
    assert sorted(steps) == list(range(1, STEPS + 1))
    check_turns(folder, steps)
    summary = read_ledger(folder / "release/ledger.jsonl")
    event = summary.plan.event
    assert event.sampling == CyclicPoissonSampling(BANDS * (6 / 30), BANDS)
    plain = StepEvent(PoissonSampling(event.sampling.sample_rate), event.noise_multiplier)
    assert result.epsilon == pytest.approx(epsilon([(plain, STEPS // BANDS)], PRIVACY["delta"]))
    if method != "prism":
        assert begins(folder, steps) == [1]


def test_an_interrupted_run_takes_back_the_same_noise(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with watched(tmp_path / "seen"):
        stopped(bench, folder)
        bench.resume(folder)
    steps = seen(tmp_path / "seen")
    assert begins(folder, steps) == [1]
    check_turns(folder, steps)


def test_noise_of_turning_coordinates_goes_on_as_well(bench: Bench, tmp_path: Path) -> None:
    """PRISM's tangent spaces turn from step to step; the noise that was kept says at which point."""
    folder = tmp_path / "run"
    with watched(tmp_path / "seen"):
        bench.stopped(folder, 5, privacy=BANDED)
        assert any("frame" in name for name in kept_noise(folder))
        bench.resume(folder)
    c = json.loads((folder / "private/cycles.json").read_text())["coefficients"]
    steps = seen(tmp_path / "seen")
    sixth = (steps[6].noise * c[0] - steps[6].white).norm() / steps[6].white.norm()
    others = [(steps[s].noise * c[0] - steps[s].white).norm() / steps[s].white.norm() for s in (5, 7)]
    assert sixth > 0.5 * min(others)


def test_a_step_that_was_charged_and_lost_begins_the_noise_anew(bench: Bench, tmp_path: Path) -> None:
    """And shifts nobody's turn."""
    folder = tmp_path / "run"
    with watched(tmp_path / "seen"):
        with no_space_at(6):
            bench.start(folder, method=FLAT, privacy=BANDED)
        bench.resume(folder)
    steps = seen(tmp_path / "seen")
    assert begins(folder, steps) == [1, 7]
    check_turns(folder, steps)


def test_kill_9_at_random_moments(bench: Bench, tmp_path: Path) -> None:
    rng = random.Random(7)
    kills = ended = crashes = 0

    def places() -> tuple[Path, Path, Path]:
        return tmp_path / f"{ended}", tmp_path / f"{ended}.log", tmp_path / f"{ended}.seen"

    def work() -> None:
        folder, log, noted = places()
        with side_log(log), watched(noted):
            bench.continue_or_start(folder, method=FLAT, privacy=BANDED)

    def check() -> None:
        folder, _, noted = places()
        if (folder / "private/cycles.json").exists() and noted.exists():
            steps = seen(noted)
            check_turns(folder, steps)
            assert set(begins_where_known(folder, steps)) <= set(steps)

    while kills < 5:
        code = in_a_child(work, kill_after=rng.uniform(0.05, 0.5))
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            check()
            ended, crashes = ended + 1, 0
            continue
        kills, crashes = kills + 1, crashes + 1
        folder, log, _ = places()
        check_after_crash(folder, log, crashes)
        check()
    folder, log, noted = places()
    with side_log(log), watched(noted):
        check_finished(folder, log, bench.continue_or_start(folder, method=FLAT, privacy=BANDED))
    check()


@pytest.mark.parametrize("damage", ["gone", "torn", "other"])
def test_without_its_classes_a_run_does_not_go_on(damage: str, bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped(bench, folder)
    path = folder / "private/cycles.json"
    content = json.loads(path.read_text())
    text = path.read_text()
    other = json.dumps({**content, "coefficients": content["coefficients"][:2]})
    path.write_text({"gone": "", "torn": text[:20], "other": other}[damage])
    if damage == "gone":
        path.unlink()
    with pytest.raises(PrivacyError, match="gone or damaged"):
        bench.resume(folder)
    assert read_ledger(folder / "release/ledger.jsonl").charges == 5


def test_coefficients_that_were_changed_are_refused(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped(bench, folder)
    path = folder / "private/cycles.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "coefficients": [1.0, 0.9, 0.8]}))
    with pytest.raises(PrivacyError, match="norm"):
        bench.resume(folder)


def test_other_bands_than_the_plans_are_refused(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped(bench, folder)
    edit_settings(folder, "privacy", {"bands": 4}, unseen=True)
    with pytest.raises(PrivacyError, match="the plan has 3"):
        bench.resume(folder)


def test_records_in_another_order_are_refused(bench: Bench, tmp_path: Path) -> None:
    """A unit's class follows from its place: in another one it could join twice within a cycle."""
    folder = tmp_path / "run"
    stopped(bench, folder)
    with pytest.raises(PrivacyError, match="another order"):
        bench.resume(folder, records=[*RECORDS[1:], RECORDS[0]])
    assert bench.resume(folder).steps == STEPS
    assert RECORDS[0]["text"] not in (folder / "private/cycles.json").read_text()


def test_no_noise_is_kept_of_a_run_that_is_over(bench: Bench, tmp_path: Path) -> None:
    """Its last step was charged and lost: the noise that was kept, of the step before, is in what is released."""
    folder = tmp_path / "run"
    with no_space_at(STEPS):
        bench.start(folder, method=FLAT, privacy=BANDED, run={"checkpoint_every": 1})
    assert kept_noise(folder)
    bench.resume(folder)
    assert (folder / "release/adapter_model.safetensors").exists()
    assert kept_noise(folder) == []


def test_classes_of_another_run_are_refused(bench: Bench, tmp_path: Path) -> None:
    for name in ("one", "other"):
        stopped(bench, tmp_path / name)
    other = (tmp_path / "other/private/cycles.json").read_bytes()
    (tmp_path / "one/private/cycles.json").write_bytes(other)
    with pytest.raises(PrivacyError, match="gone or damaged"):
        bench.resume(tmp_path / "one")


def test_a_start_that_failed_makes_room(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CyclicPoissonSampler, "draw", failing(CyclicPoissonSampler.draw, 1, after=False))
        with pytest.raises(OSError, match="No space"):
            bench.start(folder, method=FLAT, privacy=BANDED)
    first = json.loads((folder / "private/cycles.json").read_text())["key"]
    bench.start(folder, method=FLAT, privacy=BANDED)
    assert json.loads((folder / "private/cycles.json").read_text())["key"] != first


def test_two_processes_draw_charge_and_take_back_in_the_first(bench: Bench, tmp_path: Path) -> None:
    folder, noted = tmp_path / "run", tmp_path / "seen"

    def work(rank: int) -> None:
        with watched(noted if rank == 0 else tmp_path / "other"):
            bench.start(folder, method=FLAT, privacy=BANDED)

    assert together(2, work) == [0, 0]
    assert not list((tmp_path / "other").iterdir())
    steps = seen(noted)
    assert begins(folder, steps) == [1]
    check_turns(folder, steps)


def test_users_are_dealt_whole(bench: Bench, tmp_path: Path) -> None:
    """A class holds users, with all that is theirs."""
    folder = tmp_path / "run"
    privacy = {**BANDED, "unit": "user", "user_column": "text", "max_records_per_user": 2}
    with watched(tmp_path / "seen"):
        bench.start(folder, method=FLAT, privacy=privacy)
    check_turns(folder, seen(tmp_path / "seen"))


def privacy(**given: Any) -> PrivacySettings:
    numbers = {"delta": 1e-5, "steps": 100, "expected_batch_size": 50, "public_dataset_size": 10_000}
    return checked(PrivacySettings, {**numbers, "target_epsilon": 2.0, **given}, "test")


def test_auto_takes_the_bands_with_least_noise_in_sums() -> None:
    """At a small rate sampling is nearly free, and more bands are better; where it is large, none are."""
    plain = PoissonSampling(50 / 10_000)
    found = planned_sampling(privacy(bands="auto"), plain)
    assert isinstance(found, CyclicPoissonSampling)
    assert found.sample_rate == found.classes * plain.sample_rate
    few = privacy(bands="auto", expected_batch_size=6_000)
    assert planned_sampling(few, PoissonSampling(0.6)) == PoissonSampling(0.6)
    assert planned_sampling(privacy(bands=4), plain) == CyclicPoissonSampling(0.02, 4)
    assert planned_sampling(privacy(), plain) is plain


def test_auto_takes_no_bands_for_a_twentieth_of_the_noise() -> None:
    """Few steps on large parts of the records: 2 bands would save 4 % of the noise in sums at the same epsilon."""
    given = {"target_epsilon": 3.0, "steps": 19, "expected_batch_size": 211, "public_dataset_size": 2000}
    little, plain = privacy(**given, bands="auto"), PoissonSampling(211 / 2000)
    saved = noise_of_bands(little, plain, 2)["noise_in_sums_at_equal_epsilon"]
    assert 0.95 < saved < 1
    assert planned_sampling(little, plain) is plain
    more = privacy(**{**given, "target_epsilon": 6.0}, bands="auto")
    assert isinstance(planned_sampling(more, plain), CyclicPoissonSampling)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bands": 0}, "bands"),
        ({"bands": "many"}, "bands"),
        ({"bands": 101}, "above steps"),
        ({"bands": 8, "expected_batch_size": 2_000}, "at most 5"),
        ({"bands": 2, "clip_quantile": 0.5}, "clip_quantile"),
        ({"bands": 2, "max_batch_size": 200}, "max_batch_size"),
        ({"bands": 2, "private": False, "target_epsilon": None}, "adds no noise"),
        ({"bands": "auto", "target_epsilon": None, "noise_multiplier": 1.0}, "bands=auto"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        privacy(**given)


NUMBERS = promise(steps=6, batch=6, records=30, target_epsilon=4.0, bands=3)


def settings_of(tmp_path: Path, **groups: Any) -> Settings:
    records = tmp_path / "records.jsonl"
    records.write_text('{"text": "one"}\n')
    given = {"data": {"path": str(records)}, "privacy": NUMBERS, "run": {"output": str(tmp_path / "run")}}
    return small_settings(**{**given, **groups})


@pytest.mark.parametrize(
    ("what", "groups"),
    [
        (rows_to_advise_on, {}),
        (plan_privacy, {"method": {"name": "aug-pe"}, "synthesis": {}}),
        (plan_privacy, {"method": {"name": "projected"}}),
        (plan_privacy, {"method": {"name": "dp-zo"}}),
        (plan_privacy, {"method": {"name": "prism", "metric_power": 1.0}}),
    ],
    ids=["advice", "votes", "projections", "direction", "metric"],
)
def test_what_has_independent_noise_alone_refuses_bands(
    what: Callable[[Settings], Any], groups: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.bands"):
        what(settings_of(tmp_path, **groups))
    assert not (tmp_path / "run").exists()


def test_federations_refuse_bands(tmp_path: Path) -> None:
    federation = {"rule": "tan", "rounds": 2, "local_steps": 2, "clients": 2}
    numbers = {name: value for name, value in NUMBERS.items() if name != "steps"}
    with pytest.raises(ConfigError, match=r"privacy\.bands does not go with a federation"):
        settings_of(tmp_path, privacy=numbers, federation=federation)
