"""A space that is registered from outside goes through everything that the product does with one of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from method_cases import Case, make_case
from peft import PeftModel
from run_cases import in_a_child
from scipy.stats import kstest
from span_space import Span, span
from test_sensitivity import check_remove_one, hard_batch
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import read_ledger
from privlora.adapters import Captured, LowRankAdapter
from privlora.api import fine_tune, resume_run
from privlora.cli.memory import estimate_memory
from privlora.config import settings_from
from privlora.errors import ConfigError
from privlora.mechanisms import Release
from privlora.methods import Method, find_method
from privlora.optimizers import IterateAverage
from privlora.reporting.noise import noise_on_weights
from privlora.reporting.publication import rewrite_report
from privlora.reporting.verifying import verify
from privlora.stacked.parts import stack_parts
from privlora.training.assembly import build_parts
from privlora.training.checkpoint import load_checkpoint
from privlora.training.files import RunFolder
from privlora.training.observer import Observer

pytestmark = pytest.mark.usefixtures("span")
assert span  # the fixture

RECORDS = [{"text": f"patient {i} came in at {i % 7} with a cold."} for i in range(30)]
PRIVACY = {"steps": 4, "expected_batch_size": 6, "public_dataset_size": 30}
PRIVACY = {**PRIVACY, "noise_multiplier": 1.0, "delta": 1e-3}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case(("span", "sgd"), tmp_path, "zero")


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_one_record_moves_the_sum_by_c_at_most(clipping: str, case: Case) -> None:
    examples = hard_batch()
    changes = check_remove_one(case, examples, list(range(len(examples))), clip_norm=1e-4, clipping=clipping)
    assert min(changes[:6]) > 0.9
    assert max(changes[6:]) < 1e-6


def test_the_noise_has_its_law(case: Case) -> None:
    releases = case.releases(case.mechanism(sigma=0.8, clip_norm=0.5, batch=4.0, seed=5), 400) / 0.1
    assert releases.shape == (400, Span.directions)
    assert kstest(releases.flatten().numpy(), "norm").pvalue > 0.01


def test_what_a_step_does_to_w_is_its_effect(case: Case) -> None:
    coordinates, before = case.coordinates, case.weights()
    assert isinstance(coordinates, Span)
    vector = coordinates.standard_normal(torch.randn)
    effect = coordinates.weight_effect(vector)
    case.optimizer.step(Release(vector, 1.0, 1), 1.0)
    moved = torch.cat([(left.double() @ right.double().mT).flatten() for left, right in effect])
    torch.testing.assert_close(before - case.weights(), moved, rtol=1e-5, atol=1e-6)


def test_the_noise_on_weights_is_measured(case: Case) -> None:
    assert isinstance(case.coordinates, Span)
    found = noise_on_weights(case.coordinates, 0.5)["modules"]
    squares = case.coordinates.cores.double().square().sum(dim=(0, 2, 3))
    for site, expected in zip(case.adapter.sites, squares, strict=True):
        assert found[site.name]["closed_form"] is None
        assert found[site.name]["measured"] == pytest.approx(0.5 * float(expected) ** 0.5, rel=0.5)


class DiesAfterTwo(Observer):
    def on_step(self, report: Any) -> None:
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_is_killed_goes_on_and_is_reported_and_exported(tmp_path: Path) -> None:
    model = tiny_model()
    before = model(input_ids=torch.arange(3, 23)[None]).logits
    settings: dict[str, Any] = {
        "tokenizer": tiny_tokenizer(),
        "method": "span",
        "output": tmp_path,
        "privacy": PRIVACY,
        "adapter": {"r": 2},
        "data": {"max_length": 40},
        "run": {"checkpoint_every": 1},
    }
    died = in_a_child(lambda: fine_tune(model, RECORDS, observer=DiesAfterTwo(), **settings))
    assert died == -signal.SIGKILL
    folder = RunFolder(tmp_path)
    assert read_ledger(folder.ledger).charges == 2
    result = resume_run(tmp_path, model=model, tokenizer=settings["tokenizer"], records=RECORDS)
    assert (result.steps, read_ledger(folder.ledger).charges) == (4, 4)

    run_id = read_ledger(folder.ledger).run_id
    adapter = LowRankAdapter(model, rank=2)
    trained = Span(adapter, seed=0)
    trained.load_state_dict(load_checkpoint(folder.checkpoint, run_id=run_id)[1]["coordinates"])
    assert float(trained.coefficients.abs().min()) > 0
    with adapter, torch.no_grad():
        expected = model(input_ids=torch.arange(3, 23)[None]).logits
    adapted = PeftModel.from_pretrained(model, str(result.release))
    with torch.no_grad():
        found = adapted(input_ids=torch.arange(3, 23)[None]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-2)

    report = json.loads(folder.report.read_text())
    assert all(module["closed_form"] is None for module in report["noise"]["modules"])
    assert all(module["measured"] > 0 for module in report["noise"]["modules"])
    pages = [folder.release / name for name in ("report.html", "README.md")]
    for page in pages:
        assert Span.described in page.read_text()
    shown = pages[0].read_text()
    assert "No closed form is known." in shown
    rewrite_report(folder)
    assert pages[0].read_text() == shown
    [said] = [check.found for check in verify(result.release).checks if check.name == "epsilon"]
    assert said.endswith("the method 'span' is not privlora's, and describes itself")


def settings(**method: Any) -> Any:
    return settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"path": "(in memory)"},
            "adapter": {"r": 2},
            "privacy": PRIVACY,
            "method": {"name": "span", **method},
        },
        source="test",
    )


def test_it_is_planned() -> None:
    memory = estimate_memory(settings(), find_method("span"), tiny_model())
    assert (memory["trained_numbers"], memory["update_bytes"]) == (Span.directions, 0)


def test_its_iterates_are_averaged() -> None:
    parts = build_parts(settings(averaging=0.9), tiny_model())
    assert isinstance(parts.average, IterateAverage)
    assert isinstance(parts.coordinates, Span)
    parts.coordinates.coefficients += 1.0
    parts.average.update()
    for (a, b), (left, right) in zip(parts.average.factors(), parts.coordinates.factors(), strict=True):
        torch.testing.assert_close(a @ b.mT, left @ right.mT, rtol=1e-4, atol=1e-5)


def test_what_it_says_nothing_of_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"Span cannot be trained side by side.*does not say how"):
        stack_parts(build_parts(settings(), tiny_model()), 2, torch.arange(2))
    with pytest.raises(ConfigError, match="cannot clip as clipping='spectral' does"):
        build_parts(settings(clipping="spectral"), tiny_model())
    with pytest.raises(ConfigError, match="Span cannot clip spectrally"):
        Span(LowRankAdapter(tiny_model(), rank=2), seed=0).evened(Captured([], []))


def test_a_method_of_a_space_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown space 'spam'"):
        Method("x", "", "", "spam", ("sgd",), private=True, learning_rate=1.0)
