"""Canaries in one run: their scores, the judgement on simulated runs, and whole audits of the product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_cases import SPACES, SPANS, read_state, setting
from run_cases import StopAt
from tiny_models import tiny_model, tiny_tokenizer

from privlora.accounting import read_ledger
from privlora.accounting.events import PoissonSampling, StepEvent, TruncatedPoissonSampling
from privlora.adapters import LowRankAdapter
from privlora.auditing import canary_run, rerun
from privlora.auditing.canary_run import audit_run
from privlora.auditing.canary_scores import (
    CanaryMechanism,
    CanaryState,
    OneRunAudit,
    _Game,
    _most,
    judge_canaries,
)
from privlora.auditing.canary_signals import Signals, log_ratio
from privlora.auditing.gradient_canaries import alignments, draw_canaries
from privlora.auditing.text_canaries import add_records, record_losses, text_canaries
from privlora.config import settings_from
from privlora.config.groups import MICRO_BATCH
from privlora.data.examples import Examples
from privlora.data.units import Units
from privlora.errors import ConfigError, RunError
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.mechanisms.charges import Uncharged
from privlora.methods import METHODS, build
from privlora.rehearsals import noise_alone
from privlora.rehearsals.settling import settled
from privlora.training.files import AUDIT_MARK, RunFolder
from privlora.training.inputs import load_data
from privlora.training.loop import Interrupted, finish_training
from privlora.training.takeover import refuse_if_spent

RECORDS = [{"text": f"case {n} came in."} for n in range(20)]


def settings(
    output: Path,
    *,
    name: str = "dp-adamw",
    rate: Any = None,
    steps: int = 3,
    tokens: Any = 4096,
    **privacy: Any,
) -> Any:
    chosen = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": steps, "expected_batch_size": 4}
    # The modules are small: few canaries find room in them without getting into each other's way.
    return settings_from(
        {
            "model": {"name": "tiny"},
            "data": {"path": "(in memory)", "max_length": 24},
            "adapter": {"r": 2},
            "privacy": {**chosen, "public_dataset_size": 20, **privacy},
            "method": {"name": name, "learning_rate": rate},
            "run": {"output": str(output), "tokens_per_micro_batch": tokens},
        },
        source="test",
    )


def audited(output: Path, **choices: Any) -> OneRunAudit:
    own = ("canaries", "kind", "observer", "temperature", "prefixes", "records", "confidence")
    given = {"canaries": 40, "records": RECORDS} | {k: choices.pop(k) for k in own if k in choices}
    return audit_run(settings(output, **choices), model=tiny_model(), tokenizer=tiny_tokenizer(), **given)


@pytest.mark.parametrize("name", [*SPACES, *SPANS])
def test_a_canary_is_aligned_with_its_own_noise_free_release(name: str) -> None:
    mechanism = setting(name, 0.0)[0]
    canaries = draw_canaries(mechanism.coordinates.adapter, 5, torch.Generator().manual_seed(0))
    mechanism.accumulate(canaries.captured(mechanism.coordinates.adapter, torch.tensor([3])))
    x, size = alignments(mechanism, canaries, mechanism.release().vector)
    assert float(x[3]) == pytest.approx(float(size[3]) * (1 - mechanism.slack), rel=1e-3)
    assert torch.allclose(size, torch.ones(5).double(), rtol=1e-4) or name == "wishart-m2"
    assert (size <= 1 + 1e-4).all()


@pytest.mark.parametrize("name", SPACES)
def test_canary_gradients_are_those_of_a_fixed_weight_gradient(name: str) -> None:
    mechanism = setting(name, 1.0)[0]
    adapter = mechanism.coordinates.adapter
    canaries = draw_canaries(adapter, 4, torch.Generator().manual_seed(0), norm=3.0, spread=False)
    captured = canaries.captured(adapter, torch.tensor([2, 0]))
    for s, site in enumerate(adapter.sites):
        dense = torch.zeros(4, site.m, site.n)
        for row, k in enumerate(canaries.members[s].tolist()):
            dense[k] = 3.0 * torch.outer(canaries.left[s][row], canaries.right[s][row])
        torch.testing.assert_close(captured.p[s], dense[[2, 0]] @ site.right.float())
        torch.testing.assert_close(captured.q[s], dense[[2, 0]].mT @ site.left.float())
    if captured.dense_squares is not None:
        assert captured.dense_squares.tolist() == pytest.approx([9.0, 9.0])


@pytest.mark.parametrize("count", [50, 3])
def test_a_single_module_takes_every_canary_in_turn(count: int) -> None:
    adapter = LowRankAdapter(tiny_model(), rank=2)
    assert 3 < len(adapter.sites) < 50
    members = draw_canaries(adapter, count, torch.Generator().manual_seed(0), spread=False).members
    assert sorted(torch.cat(members).tolist()) == list(range(count))
    assert max(map(len, members)) - min(map(len, members)) <= 1


def test_the_log_ratio_is_that_of_two_densities() -> None:
    x, size = np.linspace(-2, 3, 9), np.full(9, 0.4)
    rate, sigma = 0.3, 0.8
    spread = sigma * np.sqrt(size)
    absent = np.exp(-((x / spread) ** 2) / 2)
    present = (1 - rate) * absent + rate * np.exp(-(((x - size) / spread) ** 2) / 2)
    np.testing.assert_allclose(log_ratio(x, size, rate, sigma), np.log(present / absent))
    np.testing.assert_allclose(log_ratio(x, size, 1.0, sigma), (2 * x - size) / (2 * sigma**2))


def simulated(event: StepEvent, steps: int, canaries: int, seed: int, *, noise: float = 1.0) -> CanaryState:
    """Scores of a run whose noise is ``noise`` times what is claimed."""
    generator = np.random.default_rng(seed)
    state = CanaryState(0, generator.random(canaries) < 0.5, np.zeros(canaries))
    rate, sigma = event.sampling.sample_rate, event.noise_multiplier
    for _ in range(steps):
        drawn = state.included & (generator.random(canaries) < rate)
        x = drawn + noise * sigma * generator.standard_normal(canaries)
        state.scores += log_ratio(x, np.ones(canaries), rate, sigma)
    return state


def test_simulated_runs_are_judged_rightly() -> None:
    sampling, steps, delta = PoissonSampling(0.2), 20, 1e-3
    event = StepEvent(sampling, 1.4)
    found = [judge_canaries(simulated(event, steps, 2000, seed), event, steps, delta) for seed in range(2)]
    for each in found:
        assert not each.violated
        assert each.epsilon_lower_plain <= each.epsilon_lower <= each.epsilon_claimed
    assert np.mean([each.epsilon_lower / each.epsilon_claimed for each in found]) > 0.25
    broken = judge_canaries(simulated(event, steps, 400, 0, noise=0.25), event, steps, delta)
    assert broken.violated
    assert broken.epsilon_lower > broken.epsilon_claimed


def test_few_canaries_say_what_they_could_have_shown() -> None:
    """What is most is what all guesses right show; where that is no less than the claim, nothing is said."""
    sampling, steps, delta = PoissonSampling(0.2), 20, 1e-3
    event = StepEvent(sampling, 1.0)
    few = judge_canaries(simulated(event, steps, 40, 0), event, steps, delta)
    ideal = CanaryState(0, np.arange(40) < 20, -np.arange(40.0))
    best = judge_canaries(ideal, event, steps, delta)
    assert best.correct == best.guesses
    assert best.epsilon_most == few.epsilon_most == best.epsilon_lower
    assert few.epsilon_lower <= best.epsilon_lower < few.epsilon_claimed
    assert not best.violated
    many = judge_canaries(simulated(event, steps, 400, 0), event, steps, delta)
    assert many.epsilon_most is None


def test_what_is_most_is_of_the_game_that_could_show_most() -> None:
    event = StepEvent(PoissonSampling(0.2), 1.0)
    games = [
        _Game(guesses, 40, confidence, event, 20)
        for guesses, confidence in ((8, 0.95), (20, 0.95), (10, 0.9))
    ]
    alone = [_most([game]) for game in games]
    assert None not in alone
    assert len(set(alone)) == 3
    assert _most(games) == _most(games[::-1]) == max(alone)  # type: ignore[type-var]
    ideal = judge_canaries(CanaryState(0, np.arange(20) < 10, -np.arange(20.0)), event, 20, 1e-3)  # plays two
    assert ideal.epsilon_most == ideal.epsilon_lower > 0
    able = _Game(200, 400, 0.95, event, 20)
    assert _most([able]) is _most([able, _Game(2, 400, 0.95, event, 20)]) is None


def test_signals_that_convict_leave_nothing_that_could_not_have_been_shown() -> None:
    class Convicting(Signals):
        def largest_mu(self, *_: object) -> float:
            return 2.0

    event = StepEvent(PoissonSampling(0.2), 1.0)
    state = simulated(event, 20, 40, 0)
    assert judge_canaries(state, event, 20, 1e-3).epsilon_most is not None
    state.signals = Convicting(dimensions=1)
    found = judge_canaries(state, event, 20, 1e-3)
    assert found.violated
    assert found.epsilon_most is None


def test_a_run_with_too_little_noise_is_convicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = NoiseSource.standard_normal
    monkeypatch.setattr(NoiseSource, "standard_normal", lambda self, shape: draw(self, shape) / 32)
    found = audited(tmp_path / "a", canaries=100, steps=12, noise_multiplier=4.0, expected_batch_size=8)
    assert found.violated
    assert found.area > 0.8  # the canaries of a model this small are not quite orthogonal


def test_nothing_of_an_audit_looks_like_a_release(tmp_path: Path) -> None:
    audited(tmp_path / "a")
    left = {path.name for path in (tmp_path / "a" / "release").iterdir()}
    assert left == {AUDIT_MARK, "ledger.jsonl"}
    assert "AUDIT, not for release" in (tmp_path / "a" / "release" / "ledger.jsonl").read_text()
    state = read_state(tmp_path / "a")
    assert state.releases == 3
    assert 5 < state.included.sum() < 35


def test_an_interrupted_audit_goes_on_with_its_canaries(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        audited(tmp_path / "a", observer=StopAt(2))
    before = read_state(tmp_path / "a")
    assert before.releases == 2
    result = audited(tmp_path / "a")
    after = read_state(tmp_path / "a")
    assert after.releases == 3
    assert (after.included == before.included).all()
    assert audited(tmp_path / "a").correct == result.correct  # only judged again
    with pytest.raises(RunError, match="another run"):
        audited(tmp_path / "a", canaries=41)


def test_tokens_are_chosen_before_records_are_read_and_the_audit_goes_on_with_other_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gradients in the place of texts the canaries would come on top, so a number is asked for."""
    order, chosen = list[str](), iter((70, 90))

    def choose(given: Any, model: torch.nn.Module, device: torch.device) -> tuple[Any, None]:
        assert given.run.tokens_per_micro_batch == "auto"
        order.append("choice")
        run = given.run.model_copy(update={"tokens_per_micro_batch": next(chosen)})
        return given.model_copy(update={"run": run}), None

    def read(given: Any, *args: Any, **options: Any) -> Any:
        order.append(f"records, {given.run.tokens_per_micro_batch}")
        return load_data(given, *args, **options)

    monkeypatch.setattr(rerun, "with_micro_batches", choose)
    monkeypatch.setattr(canary_run, "load_data", read)
    for _ in range(2):
        audited(tmp_path / "a", kind="codes", steps=1, tokens="auto")
    assert order == ["choice", "records, 70", "choice", "records, 90"]
    assert "tokens_per_micro_batch: auto\n" in (tmp_path / "a/private/config.resolved.yaml").read_text()
    # Gradients as canaries take memory that is not counted.
    audited(tmp_path / "b", steps=1, tokens="auto")
    assert order[4:] == [f"records, {MICRO_BATCH}"]


@pytest.mark.parametrize("kind", ["gradient", "codes"])
def test_an_audit_takes_the_rate_that_the_run_would(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of settings as `privlora init` writes them; found again, the same, where an audit goes on."""
    rates = []

    def seen(parts: Any, *args: Any, **options: Any) -> None:
        rates.append(parts.hyper.learning_rate)
        finish_training(parts, *args, **options)

    monkeypatch.setattr(rerun, "finish_training", seen)
    monkeypatch.setattr(noise_alone, "AIM", 0.01)  # which is far from the row's own rate
    for _ in range(2):
        audited(tmp_path / "a", kind=kind, rate="auto", steps=1)
    chosen = settings(tmp_path / "b", rate="auto", steps=1)
    own = settled(chosen, tiny_model(), tiny_tokenizer()).method.learning_rate
    assert rates == [own] * 2
    assert own != METHODS["dp-adamw"].rate_of(1)
    kept = (tmp_path / "a/private/config.resolved.yaml").read_text()
    assert "  choose:\n  - learning_rate\n" in kept


def test_text_canaries_are_units_of_their_own() -> None:
    tokenizer = tiny_tokenizer()
    texts = text_canaries("random-tokens", 5, 12, tokenizer, seed=3)
    again = text_canaries("random-tokens", 5, 12, tokenizer, seed=3)
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(texts, again, strict=True))
    examples, units = add_records(Examples(texts[:3], pad_token_id=0), Units(np.array([0, 1, 0])), texts[3:])
    assert [units[u].tolist() for u in range(len(units))] == [[0, 2], [1], [3], [4]]
    losses = record_losses(tiny_model(), examples)
    alone = record_losses(tiny_model(), examples.like([texts[4]]))
    assert losses[4] == pytest.approx(alone[0], abs=1e-5)


def test_runs_that_cannot_be_audited_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="claims nothing"):
        audited(tmp_path / "a", noise_multiplier=None, private=False, name="adamw")
    with pytest.raises(ConfigError, match="plain Poisson"):
        audited(tmp_path / "a", max_batch_size=10)
    with pytest.raises(ConfigError, match="unknown canaries"):
        audited(tmp_path / "a", kind="yellow")
    with pytest.raises(ConfigError, match="can show nothing"):
        audited(tmp_path / "a", canaries=3)
    with pytest.raises(ConfigError, match=r"'dp-zo' cannot be audited by gradients.*--kind random-tokens"):
        audited(tmp_path / "a", name="dp-zo")
    assert not (tmp_path / "a").exists()
    coordinates, _ = build(METHODS["dp-adamw"], LowRankAdapter(tiny_model(), rank=2))
    truncated = GaussianMechanism(
        coordinates,
        clip_norm=1.0,
        event=StepEvent(TruncatedPoissonSampling(0.1, 5, 20), 1.0),
        expected_batch_size=2.0,
        ledger=Uncharged(),
        noise=NoiseSource(1),
    )
    canaries = draw_canaries(coordinates.adapter, 20, torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="plain Poisson"):
        CanaryMechanism(truncated, canaries, CanaryState.draw(20))


def test_a_damaged_state_is_an_error(tmp_path: Path) -> None:
    audited(tmp_path / "a")
    (tmp_path / "a" / "private" / "canaries.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RunError, match="cannot be read"):
        read_state(tmp_path / "a")


def test_an_audit_that_failed_before_it_charged_anything_is_replaced(tmp_path: Path) -> None:
    """Its canaries were in no release; new settings draw new ones. With a charge it stays as it is."""

    def fail(*_: object, **__: object) -> None:
        raise RunError("the device is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlora.training.loop.build_step", fail)
        with pytest.raises(RunError, match="the device is gone"):
            audited(tmp_path)
    seed = read_state(tmp_path).seed
    with pytest.raises(RunError, match="holds a run already"):
        RunFolder(tmp_path).refuse_if_used()
    with pytest.raises(RunError, match="is not left by a start"):  # of no ordinary run
        refuse_if_spent(RunFolder(tmp_path))
    audited(tmp_path, steps=2)
    again = read_state(tmp_path)
    assert (again.seed != seed, again.releases) == (True, 2)
    with pytest.raises(RunError, match=r"holds another run.*give the settings and canaries of that audit"):
        audited(tmp_path)
    assert read_ledger(tmp_path / "release/ledger.jsonl").charges == 2


def test_canaries_that_were_scored_keep_the_folder_under_an_older_ledger(tmp_path: Path) -> None:
    audited(tmp_path)
    folder = RunFolder(tmp_path)
    folder.ledger.write_bytes(folder.ledger.read_bytes().splitlines(keepends=True)[0])
    for path in (folder.checkpoint, folder.private_losses):
        path.unlink()
    with pytest.raises(RunError, match="scored on releases"):
        audited(tmp_path, steps=2)


def test_an_audit_takes_no_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/config.resolved.yaml").write_text("x: 1")
    with pytest.raises(RunError, match="holds another run"):
        audited(tmp_path)
