"""The rate at which noise alone moves the model by a set amount: found by its law, without a record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from promises import promise
from test_settling import RECORDS, settings
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import CyclicPoissonSampling, PoissonSampling, StepEvent, epsilon, read_ledger
from privlora.adapters import Captured
from privlora.api import fine_tune
from privlora.config import Settings
from privlora.coordinates import TangentCoordinates
from privlora.data.batching import collate
from privlora.data.examples import Examples
from privlora.errors import ConfigError, ModelError
from privlora.mechanisms import GaussianMechanism
from privlora.rehearsals import noise_alone, settling
from privlora.rehearsals.kept import because, cost_on_private, read_choice, right_weight_of
from privlora.rehearsals.noise_alone import (
    AIM,
    MOST_RATES,
    _find_rate,
    noise_trials,
    own_texts,
    rate_by_noise,
)
from privlora.rehearsals.settling import settle
from privlora.rehearsals.trials import Bench, Noise, trial_step
from privlora.reporting.rows import _is_priced
from privlora.reporting.verifying import verify
from privlora.training.assembly import PublicStart, build_parts, plan_run
from privlora.training.files import RunFolder
from privlora.training.gradients import micro_batch_gradients
from privlora.training.promise import plan_privacy


def texts_of(model: torch.nn.Module, seed: int = 0) -> Examples:
    return own_texts(Bench(model, tiny_tokenizer()), seed)


@pytest.mark.parametrize(
    "rise",
    [
        lambda rate: 3 * rate**2,
        lambda rate: 1e-4 * rate**2,
        lambda rate: 1e6 * rate**2,
        lambda rate: 0.02 * (math.exp(min(rate, 50)) - 1),
        lambda rate: rate**2 if rate < 0.5 else math.inf,
        lambda rate: rate**2 if rate > 0.1 else -0.001,
        lambda rate: 2 * rate**0.7,
    ],
)
def test_a_rate_near_the_aim_is_found_whatever_the_law(rise: Callable[[float], float]) -> None:
    for start in (0.003, 0.3, 30):
        asked: list[float] = []

        def counted(rate: float, asked: list[float] = asked) -> float:
            asked.append(rate)
            return rise(rate)

        taken = _find_rate(start, counted)
        assert 0.5 < rise(taken) / AIM < 2
        assert taken in asked
        assert len(asked) == len(set(asked)) <= MOST_RATES


def test_no_rate_is_made_up_where_noise_does_nothing_or_everything() -> None:
    assert _find_rate(0.2, lambda rate: 0.0) == 0.2  # the row's own
    assert _find_rate(0.2, lambda rate: 1.0 if rate > 0.1 else 0.001) <= 0.1
    for rise in (lambda rate: math.inf, lambda rate: 7.0):
        with pytest.raises(ModelError, match="no learning rate was found"):
            _find_rate(0.2, rise)


def test_texts_are_of_the_models_own_law() -> None:
    """Their mean loss is the model's own entropy; what is drawn at another temperature has another."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # some tokens are likelier than others
    texts = texts_of(model)
    assert len(texts) == noise_alone.TEXTS
    differences = []
    for text in texts:
        ids = torch.from_numpy(text.input_ids)[None].long()
        assert text.labels[0] == -100
        assert np.array_equal(text.labels[1:], text.input_ids[1:])
        with torch.no_grad():
            p = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        entropy = -(p.exp() * p).sum(-1)
        differences.append((-p.gather(1, ids[0, 1:, None])[:, 0] - entropy).numpy())
    apart = np.concatenate(differences)
    assert abs(apart.mean()) < 5 * apart.std() / len(apart) ** 0.5
    again, other = texts_of(model), texts_of(model, seed=1)
    assert [t.digest for t in texts] == [t.digest for t in again] != [t.digest for t in other]


def divergence(model: torch.nn.Module, chosen: Settings, rate: float, texts: Examples) -> float:
    """KL(p0 || p) per token after all steps of noise, over whole distributions and not over what was drawn."""
    plan = plan_privacy(chosen, model)
    parts = build_parts(chosen, model, PublicStart(tiny_tokenizer()))
    rows = [torch.from_numpy(text.input_ids)[None].long() for text in texts]
    with torch.no_grad():
        before = [model(input_ids=ids).logits[0, :-1].double().log_softmax(-1) for ids in rows]
        found = []
        for draw in range(2):
            with parts.adapter:
                states = parts.states()
                parts.hyper = replace(parts.hyper, learning_rate=rate)
                step = trial_step(
                    parts, texts, Noise(plan.event.noise_multiplier, chosen.privacy, chosen.privacy.n), draw
                )
                for _ in range(chosen.privacy.steps):
                    step.take([])
                parts.install_result()
                for ids, p in zip(rows, before, strict=True):
                    q = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
                    found.append((p.exp() * (p - q)).sum(-1))
                parts.take_states(states)
        return float(torch.cat(found).mean())


@pytest.mark.parametrize("row", ["prism", "dp-adamw"])
def test_the_rate_moves_the_model_by_the_aim(row: str) -> None:
    chosen = settings(None, method={"name": row}, privacy={"steps": 3})
    model = tiny_model()
    found = settle(chosen, plan_privacy(chosen, model), model, tiny_tokenizer())
    rate = found.settings.method.learning_rate
    assert rate is not None
    open_ = chosen.model_copy(update={"auto": None})
    assert divergence(model, open_, rate, texts_of(model)) == pytest.approx(AIM, rel=0.5)
    assert found.facts["rows"][0]["learning_rate"] == rate
    assert found.settings.auto is None


def test_a_model_that_broke_is_infinitely_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its logits are no numbers, or a matrix of the method has no decomposition."""
    chosen = settings(None, method={"name": "prism"}, privacy={"steps": 1}).model_copy(update={"auto": None})
    model = tiny_model()
    texts = texts_of(model)
    with noise_trials(chosen, plan_privacy(chosen, model), Bench(model, tiny_tokenizer()), texts) as trials:
        assert trials.losses(1e-3).isfinite().all()
        for value in (math.nan, math.inf):
            with monkeypatch.context() as changed:
                changed.setattr(
                    noise_alone, "divergences", lambda p, q, value=value: p[:, 0].float() * 0 + value
                )
                assert trials.losses(1e-3).isposinf().all()

        def fails(*_: Any) -> None:
            raise torch.linalg.LinAlgError

        monkeypatch.setattr("privlora.training.step.Step.take", fails)
        assert trials.losses(1e-3).isposinf().all()


@pytest.mark.parametrize("row", ["dp-sgd", "projected", "ffa"])
def test_other_rows_have_one_too_and_the_model_is_given_back(row: str) -> None:
    chosen = settings(None, method={"name": row}, privacy={"steps": 1})
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = settle(chosen, plan_privacy(chosen, model), model, tiny_tokenizer())
    taken, untrained = found.facts["rows"][0], found.facts["untrained"]
    assert 0.5 < (taken["loss"] - untrained) / AIM < 2
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_no_gradient_takes_part_and_noise_is_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty batch a step, all steps of the run, sigma C / b in each coordinate of the mean."""
    stds: list[float] = []
    release = GaussianMechanism.release

    def noted(self: GaussianMechanism, *total: Any) -> Any:
        event: Any = self.event
        stds.append(event.noise_multiplier * self.clip_norm / self.expected_batch_size)
        return release(self, *total)

    def no_gradient(*_: Any, **__: Any) -> None:
        raise AssertionError("a record took part")

    monkeypatch.setattr(GaussianMechanism, "release", noted)
    monkeypatch.setattr("privlora.training.step.micro_batch_gradients", no_gradient)
    chosen = settings(None, privacy={"noise_multiplier": 1.5, "clip_norm": 0.3, "steps": 4})
    model = tiny_model()
    told = list[tuple[str, int, int]]()
    _, facts = rate_by_noise(
        chosen.model_copy(update={"auto": None}),
        plan_privacy(chosen, model),
        Bench(model, tiny_tokenizer(), lambda *what: told.append(what)),
        texts_of(model),
    )
    assert stds == pytest.approx([1.5 * 0.3 / 12] * len(stds))
    assert len(stds) == 4 * noise_alone.DRAWS * len(facts["losses"])
    rates = [(done, total) for what, done, total in told if what.startswith("steps of noise")]
    assert {done for done, _ in rates} >= set(range(len(stds)))  # it moves with every step
    assert rates == sorted(rates)
    assert rates[-1][0] == rates[-1][1] >= len(stds)


@pytest.mark.parametrize("row", ["prism", "dp-sgd", "projected"])
def test_a_clip_norm_is_a_quarter_of_the_median_norm_of_its_own_texts(row: str) -> None:
    """In the coordinates of the row; whatever clip norm stood there, and whether a rate is found beside it or not."""
    model = tiny_model()
    chosen = settings(None, privacy={"clip_norm": "auto"}, method={"name": row, "learning_rate": 0.1})
    plan = plan_privacy(chosen, model)
    found = settle(chosen, plan, model, tiny_tokenizer())
    parts = build_parts(chosen.model_copy(update={"auto": None}), model, PublicStart(tiny_tokenizer()))
    norms, texts = [], texts_of(model)
    with parts.adapter:
        for number in range(len(texts)):
            batch = collate([np.array([number])], texts)
            captured, _ = micro_batch_gradients(parts.adapter, batch, public=True)
            squared = parts.coordinates.norms_squared(parts.coordinates.encode(captured))
            norms.append(float(squared.sqrt()))
    middle = float(np.quantile(norms, 0.5, method="lower"))  # as torch.median has it
    assert found.facts["median_norm"] == pytest.approx(middle, rel=2e-3)
    assert found.settings.privacy.clip_norm == float(f"{found.facts['median_norm'] / 4:.2g}")
    assert (found.facts["rows"], found.facts["of_its_own"]) == ([], len(norms))
    assert "a quarter of the median norm of gradients of 16 texts that it wrote itself" in because(
        found.facts
    )
    both = settings(None, privacy={"clip_norm": "auto"}, method={"name": row})
    told = list[str]()
    again = settle(both, plan, model, tiny_tokenizer(), lambda *what: told.append(what[0]))
    assert again.facts["clip_norm"] == again.settings.privacy.clip_norm
    assert again.facts["median_norm"] == pytest.approx(found.facts["median_norm"], rel=1e-3)
    assert again.settings.method.learning_rate == again.facts["rows"][0]["learning_rate"]
    assert told.index("measuring gradient norms of its own texts") > 0
    assert again.settings.auto is None


@pytest.mark.parametrize("clipping", ["spectral", "flat"])
@pytest.mark.parametrize("init", ["w0-subspace", "random"])
def test_a_right_weight_is_how_long_gradients_are_where_v_turns(init: str, clipping: str) -> None:
    """Of its own texts' gradients, each brought to one length as it is clipped; dense projections say the same."""
    model = tiny_model()
    method = {"right_weight": "auto", "learning_rate": 0.1, "clipping": clipping, "metric_power": 1.0}
    chosen = settings(None, method=method, adapter={"init": init})
    plan = plan_privacy(chosen, model)
    told = list[str]()
    found = settle(chosen, plan, model, tiny_tokenizer(), lambda *what: told.append(what[0]))
    plain = settings(
        None, method={"learning_rate": 0.1, "clipping": clipping, "metric_power": 0.0}, adapter={"init": init}
    )
    parts = build_parts(plain, model, PublicStart(tiny_tokenizer()))
    space, texts = parts.coordinates, texts_of(model)
    assert isinstance(space, TangentCoordinates)
    core = turning = 0.0
    with parts.adapter:
        for number in range(len(texts)):
            batch = collate([np.array([number])], texts)
            captured, _ = micro_batch_gradients(parts.adapter, batch, public=True)
            one = torch.ones(1, dtype=torch.float64)
            if clipping == "spectral":
                vector = space.to_vector(space.evened_sum(space.evened(captured), one))
            else:
                vector = space.to_vector(space.weighted_sum(captured, one))
            squares = [[float(t.square().sum()) for t in of_group] for of_group in vector]
            whole = sum(map(sum, squares))
            core += sum(of_group[0] for of_group in squares) / whole
            turning += sum(of_group[2] for of_group in squares) / whole
    rank, sites = parts.adapter.rank, parts.adapter.sites
    ratio = turning / sum(site.n - rank for site in sites) / (core / (rank * len(sites)))
    assert found.facts["turning"] == pytest.approx(ratio**0.5, rel=2e-3)
    weight = found.facts["right_weight"]
    assert found.settings.method.right_weight == weight == right_weight_of(found.facts["turning"])
    assert (found.settings.method.metric_power, found.settings.method.clipping) == (1.0, clipping)
    assert f"right weight {weight:g}, since gradients of 16 texts that it wrote itself are" in because(
        found.facts
    )
    assert told[-1] == "measuring where gradients point of its own texts"
    if init == "random" and clipping == "flat":
        assert 0.7 < ratio < 1.4  # chance


def test_the_clip_norm_is_that_of_gradients_in_the_right_weight_that_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling, "turning_share", lambda *_: 0.3)
    model, taken = tiny_model(), list[dict[str, Any]]()
    for weight in ("auto", None):
        chosen = settings(
            None, method={"right_weight": weight, "learning_rate": 0.1}, privacy={"clip_norm": "auto"}
        )
        found = settle(chosen, plan_privacy(chosen, model), model, tiny_tokenizer())
        taken.append(dict(found.facts))
    found_weight = taken[0]["right_weight"]
    assert found_weight == 0.3
    chosen = settings(
        None, method={"right_weight": found_weight, "learning_rate": 0.1}, privacy={"clip_norm": "auto"}
    )
    found = settle(chosen, plan_privacy(chosen, model), model, tiny_tokenizer())
    assert taken[0]["median_norm"] == found.facts["median_norm"] < taken[1]["median_norm"]


def test_only_tangent_vectors_have_parts_that_turn() -> None:
    chosen = settings(None, method={"name": "dp-adamw", "learning_rate": 0.1})
    parts = build_parts(chosen, tiny_model(), PublicStart(tiny_tokenizer()))
    with pytest.raises(ConfigError, match="has no right weight"):
        parts.coordinates.parts_squared(Captured([], []))


@pytest.mark.parametrize("method", [{"name": "dp-adamw"}, {"name": "guided-prism"}, {"name": "prism-paper"}])
def test_a_row_without_a_right_weight_has_none_to_find(method: dict[str, Any]) -> None:
    chosen = settings(None, method={**method, "right_weight": "auto", "learning_rate": 0.1})
    with pytest.raises(ConfigError, match="right_weight"):
        plan_run(chosen)


def test_the_rate_is_the_same_whatever_the_clip_norm() -> None:
    """Noise is in proportion to it, and rules divide by the noise."""
    model, taken = tiny_model(), list[float]()
    for norm in ("auto", 0.01, 30.0):
        chosen = settings(None, privacy={"clip_norm": norm})
        found = settle(chosen, plan_privacy(chosen, model), model, tiny_tokenizer())
        assert found.settings.method.learning_rate is not None
        taken.append(found.settings.method.learning_rate)
    assert max(taken) < 1.02 * min(taken)


@pytest.mark.parametrize(
    ("choose", "whole"),
    [
        ({"method": {"learning_rate": "auto"}}, "method.learning_rate"),
        ({"method": {"learning_rate": 0.1}, "privacy": {"clip_norm": "auto"}}, "privacy.clip_norm"),
        ({"privacy": {"clip_norm": "auto"}}, "privacy.clip_norm and method.learning_rate"),
    ],
)
def test_a_model_that_writes_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, choose: dict[str, Any], whole: str
) -> None:
    monkeypatch.setattr(
        noise_alone, "generate_tokens", lambda model, tokenizer, prompts, **_: [[]] * len(prompts)
    )
    chosen, model = settings(None, **choose), tiny_model()
    with pytest.raises(ModelError, match="the model writes no text from nothing") as found:
        settle(chosen, plan_privacy(chosen, model), model, tiny_tokenizer())
    assert f"give {whole} as a number" in str(found.value)


_SETTLED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rate": ({"learning_rate": "auto", "relative_rate": False}, {}, "noise alone, without a record"),
    "norm": (
        {"learning_rate": "auto", "relative_rate": False},
        {"clip_norm": "auto"},
        "a quarter of the median norm",
    ),
    "weight": (
        {"learning_rate": 0.1, "right_weight": "auto"},
        {},
        "since gradients of 16 texts that it wrote itself",
    ),
}


@pytest.mark.parametrize("name", _SETTLED)
def test_a_run_takes_it_keeps_why_and_verifies(name: str, tmp_path: Path) -> None:
    """Whatever the records are: nothing of them has a part in it."""
    method, privacy, words = _SETTLED[name]
    found = []
    for place, records in (("run", RECORDS), ("other", [{"text": f"other {i * i}"} for i in range(31)])):
        result = fine_tune(
            tiny_model(),
            records,
            tokenizer=tiny_tokenizer(),
            output=tmp_path / place,
            data={"max_length": 16},
            privacy={**promise(steps=2, batch=12, records=24, delta=1e-4, noise_multiplier=1.0), **privacy},
            adapter={"r": 2},
            method=method,
        )
        found.append(read_choice(RunFolder(tmp_path / place)))
    facts, folder = found[0], RunFolder(tmp_path / "run")
    assert facts == found[1] == result.report["method"]["choice"]
    page = " ".join((folder.release / "report.html").read_text("utf-8").split())
    assert words in page
    assert all(check.passed is not False for check in verify(folder.root).checks)
    assert read_ledger(folder.ledger).plan.clip_norm == facts.get("clip_norm", 1)
    taken = result.report["method"]
    if name == "weight":
        assert list(facts) == ["row", "rows", "of_its_own", "turning", "right_weight"]
        assert taken["right_weight"] == facts["right_weight"]
        return
    assert taken["learning_rate"] == facts["rows"][0]["learning_rate"]
    assert facts["private_runs"] == len(facts["rows"]) > 1
    spent = facts["private_epsilon"]
    assert f"would cost ε = {spent:.2f} together" in page
    planted = [{"private_epsilon": each} for each in (spent + 0.02, None, spent + 0.0012345)]
    for change in (*planted, {"private_runs": facts["private_runs"] + 1}):
        assert not _is_priced({**facts, **change}, folder.ledger), change
    assert _is_priced(facts, folder.ledger)
    unpriced = {key: value for key, value in facts.items() if not key.startswith("private")}
    assert not _is_priced(unpriced, folder.ledger)


def test_what_a_choice_would_have_cost_on_private_records() -> None:
    event = StepEvent(PoissonSampling(0.1), 1.2)
    known = plan_privacy(settings(None, method={"learning_rate": 0.1}), tiny_model())
    plan = replace(known, phases=((event, 20),), delta=1e-5)
    true = epsilon([(event, 60)], 1e-5)  # three runs of 20 steps
    found = cost_on_private(plan, 3)
    assert found["private_runs"] == 3
    assert true <= found["private_epsilon"] < true + 0.01
    assert found["private_epsilon"] > epsilon([(event, 20)], 1e-5)
    assert cost_on_private(plan, 1) == cost_on_private(plan, 0) == {}
    assert cost_on_private(replace(plan, insecure_noise=True), 3) == {}
    loud = replace(plan, phases=((StepEvent(PoissonSampling(1.0), 0.01), 20),))
    assert cost_on_private(loud, 2) == {"private_runs": 2, "private_epsilon": None}
    # Classes that a run leaves half way are begun anew by the next; a third decimal of 3 is rounded up, too.
    turns = StepEvent(CyclicPoissonSampling(0.8, 8), 2.0)
    true = epsilon([(turns, 9)] * 8, 1e-5)
    found = cost_on_private(replace(plan, phases=((turns, 9),)), 8)
    assert true <= found["private_epsilon"] < true + 0.01
    assert true > epsilon([(turns, 72)], 1e-5) + 1
    few = replace(plan, phases=((StepEvent(PoissonSampling(1.0), 0.25), 10),))
    assert 200 < cost_on_private(few, 2)["private_epsilon"] < 480
    row = {"name": "prism", "learning_rate": 0.02, "loss": 1.5, "spread": None, "draws": 2}
    facts = {"row": "prism", "rows": [row], "aim": AIM, "of_its_own": 16, "untrained": 1.35}
    assert "on the private records" not in because(facts)
    assert because({**facts, "private_runs": 2, "private_epsilon": None}).endswith(
        "an ε of some 500 or more together"
    )
