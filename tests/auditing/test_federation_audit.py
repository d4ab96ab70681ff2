"""The audit of federations agrees with the pipeline as it is, and convicts every way to break it that is named here.

Noise is seeded, so each test comes out alike whenever it is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama, tiny_tokenizer
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.auditing.bounds import Errors
from privlora.auditing.federation import (
    FederationAudit,
    Scores,
    _bound_of,
    _judge,
    _worlds_of,
    audit_federation,
)
from privlora.auditing.page import at_most, write_audit
from privlora.auditing.rehearsal import Mark, Rehearsal, _loud, _opposites, rehearsed, stage_of
from privlora.config import Settings, settings_from
from privlora.coordinates import FixedTangentCoordinates
from privlora.data.sampling import PoissonSampler
from privlora.errors import ConfigError
from privlora.federated.plans import federation_of, lattice_of, with_local_method
from privlora.federated.rules.factors import FedSa, Scaffold
from privlora.federated.server import RuleServer
from privlora.federated.workplace import Workplace
from privlora.mechanisms import ClippedUpdate, GaussianMechanism, NoiseSource
from privlora.rounding import rounded_up

SIGMA = 0.5


def federation(rule: str, *, q: float | None = None, private: bool = True, **group: Any) -> Settings:
    noise: dict[str, Any] = {"noise_multiplier": SIGMA, "delta": 1e-5, "insecure_noise_seed": 7}
    size = {"public_dataset_size": 100} if q is None else {"sample_rate": q}
    content = {
        "model": {"name": "tiny"},
        "data": {"path": "(in memory)"},
        "adapter": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        "privacy": {**(noise if private else {"private": False}), "expected_batch_size": 8, **size},
        "federation": {"clients": 2, "rounds": 3, "rule": rule, **group},
    }
    return settings_from(content)


def audited(settings: Settings, trials: int, **options: Any) -> FederationAudit:
    model = tiny_llama(num_hidden_layers=1, vocab_size=61)
    return audit_federation(settings, trials=trials, model=model, tokenizer=tiny_tokenizer(), **options)


@pytest.mark.parametrize(
    ("rule", "trials", "group"),
    [
        ("tan", 200, {}),
        pytest.param("fedavg", 300, {}, marks=pytest.mark.long),
        pytest.param("joint", 100, {"clients": 4, "survivors": 3}, marks=pytest.mark.long),
        pytest.param(
            "tan", 100, {"privacy_model": "client", "clients": 4, "survivors": 3}, marks=pytest.mark.long
        ),
    ],
)
def test_an_honest_federation_is_within_its_claim_and_the_bound_is_tight(
    rule: str, trials: int, group: dict[str, Any]
) -> None:
    # At 95 % an honest one is accused in one of twenty: which ones these are, rounding decides.
    found = audited(federation(rule, **group), trials, confidence=0.999)
    assert not found.violated
    assert found.releases == 1
    assert found.strongest.statistic == "alignment"
    # What a hundred trials can show at this confidence; chance decides how much of it.
    assert 0.15 * found.epsilon_claimed <= found.epsilon_lower <= found.epsilon_claimed
    assert found.unit == group.get("privacy_model", "record")


@pytest.mark.usefixtures("drawn")
def test_the_page_says_whose_noise_is_counted_on_and_keeps_earlier_audits(tmp_path: Path) -> None:
    """Nothing in it is a fact about records, so nothing says that it is; what the caption names is in the picture."""
    found = audited(federation("joint"), 40)
    assert 0 < found.epsilon_lower <= found.epsilon_claimed
    assert found.epsilon_lower <= found.strongest.epsilon_most
    pages = [write_audit(found, tmp_path / "audit")[0] for _ in range(2)]
    assert [page.name for page in pages] == ["audit.html", "audit-2.html"]
    assert "facts about private records" not in pages[0].read_text()
    assert "shares of all 2 clients, of which the attacker knows none" in pages[0].read_text()
    few = replace(found.strongest, epsilon_most=found.epsilon_claimed / 2)
    weak = replace(found, views=(few,))
    assert weak.epsilon_most == weak.to_dict()["epsilon_most"] == found.epsilon_claimed / 2
    # Of the statistic that could have shown most, whichever gave the bound.
    other = replace(few, epsilon_lower=0.0, epsilon_most=0.6 * found.epsilon_claimed, most_judged=34)
    both = replace(found, views=(few, other))
    assert (both.strongest, both.epsilon_most) == (few, other.epsilon_most)
    said = f"on 34 rounds were right, they would show only ε ≥ {rounded_up(other.epsilon_most)}"
    assert said in at_most(both)
    assert said in write_audit(both, tmp_path / "audit")[0].read_text()
    able = replace(weak, views=(few, replace(few, epsilon_most=2 * found.epsilon_claimed)))
    assert able.epsilon_most is None
    assert [path.name for path in (tmp_path / "audit").iterdir()] == ["private"]  # nothing is to be released


def test_each_local_step_is_a_release_of_its_own() -> None:
    one, two = (audited(federation("tan", local_steps=steps), 40) for steps in (1, 2))
    assert two.releases == 2
    assert two.epsilon_claimed > 1.4 * one.epsilon_claimed
    assert not two.violated


def test_another_client_sees_less_than_the_server() -> None:
    found = audited(federation("tan"), 60, attacker="client")
    assert [view.view for view in found.views] == ["broadcasts"]
    assert 0 < found.epsilon_lower <= found.epsilon_claimed


def test_the_worst_case_of_a_statement_is_played() -> None:
    joint = stage_of(federation("joint", clients=7, survivors=5))
    assert (len(joint.names), len(joint.victims), len(joint.silent)) == (7, 1, 2)
    assert list(joint.attackers.values()) == ["the server and 2 other clients", "2 other clients"]
    clear = stage_of(federation("tan", clients=5))
    assert len(clear.victims) == len(clear.names) == 16
    assert list(clear.attackers.values()) == ["the server"]
    # A secure sum of releases counts on no noise but the victim's.
    assert len(stage_of(federation("tan", clients=5, secure_aggregation=True)).silent) == 1


@contextmanager
def rehearsal(settings: Settings, folder: Path, present: bool, rounds: int = 10) -> Iterator[Rehearsal]:
    stage = stage_of(settings)
    chosen = rehearsed(settings, stage, rounds=rounds)
    workplace = Workplace(chosen, tiny_llama(num_hidden_layers=1, vocab_size=61), tiny_tokenizer())
    yield Rehearsal(chosen, stage, folder, workplace, dict.fromkeys(stage.victims, present))


def test_colluding_clients_add_no_noise(tmp_path: Path) -> None:
    settings = with_local_method(federation("joint", clients=4, survivors=3))
    with rehearsal(settings, tmp_path, False, rounds=40) as played:
        opened = [played.play()[0].messages["sum of train sum"] for _ in range(20)]
        plan = played.statement().plan
    spread = torch.stack(opened).var(dim=0).mean().sqrt().item()
    lattice = lattice_of(federation_of(played.settings), plan, {"sum": (len(opened[0]),)})
    assert spread == pytest.approx(lattice.share_std * 3**0.5, rel=0.07)  # of three shares, not of four


def test_worlds_have_noise_of_their_own(tmp_path: Path) -> None:
    settings = with_local_method(federation("joint"))
    stage = stage_of(settings)
    chosen = rehearsed(settings, stage, rounds=10)
    workplace = Workplace(chosen, tiny_llama(num_hidden_layers=1, vocab_size=61), tiny_tokenizer())
    worlds = _worlds_of(chosen, stage, tmp_path, workplace)
    one, other = (world.play()[0] for world in worlds)
    assert (one.present, other.present) == (False, True)
    moved = other.messages["sum of train sum"] - one.messages["sum of train sum"]
    noise = one.messages["sum of train sum"]
    assert float(moved.norm()) > float(noise.norm())


def test_bounds_are_for_the_kind_of_release_that_is_claimed() -> None:
    errors = Errors(100, 1000, 100, 1000)
    known, sampled = (
        _bound_of(StepEvent(PoissonSampling(q), 0.5), 1, errors, 1e-5, 0.95) for q in (1.0, 0.9)
    )
    # As many right guesses are harder where the canary is not in each batch.
    assert 5 < known < sampled
    assert _bound_of(StepEvent(PoissonSampling(1.0), 0.5), 4, errors, 1e-5, 0.95) == known


def test_what_could_have_been_shown_counts_the_guesses_of_its_own_statistic() -> None:
    """Few guesses that are all right give the bound; many that are chance could have shown more."""
    chance = np.arange(400) % 2 - 0.5
    few = (-np.ones(30), np.ones(30), 10)
    kept: Any = SimpleNamespace(
        middle=0.0, worlds=lambda: {"alignment": few, "learnt": (chance, chance, 0), "energy": few}
    )
    stage: Any = SimpleNamespace(attackers={"messages": "the server"})
    found = _judge(kept, stage, "messages", StepEvent(PoissonSampling(1.0), 1.0), 1, 1e-5, 0.95)
    assert (found.statistic, found.judged, found.most_judged) == ("alignment", 40, 800)
    assert found.epsilon_lower < found.epsilon_most


def test_the_fitted_rule_is_judged_on_other_trials() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = Scores({"x": torch.ones(50, dtype=torch.float64)}, pilot=10)
    for _ in range(60):
        for present in (False, True):
            seen = {"x": torch.randn(50, generator=generator, dtype=torch.float64)}
            scores.take(seen, present=present)
    absent, present_scores, pilot = scores.worlds()["learnt"]
    assert (len(absent), len(present_scores), pilot) == (50, 50, 0)


# --- pipelines that are broken ---


def scaled_noise(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    normal, discrete = NoiseSource.standard_normal, NoiseSource.discrete_gaussian
    monkeypatch.setattr(NoiseSource, "standard_normal", lambda self, shape: normal(self, shape) * factor)
    monkeypatch.setattr(
        NoiseSource, "discrete_gaussian", lambda self, shape, std: discrete(self, shape, std * factor)
    )


@pytest.mark.parametrize(
    ("rule", "factor", "trials", "group"),
    [
        ("tan", 0.25, 60, {}),
        ("fedavg", 0.25, 100, {}),
        pytest.param("joint", 0.5, 80, {"clients": 4, "survivors": 3}, marks=pytest.mark.long),
        pytest.param("fedavg", 0.25, 40, {"privacy_model": "client"}, marks=pytest.mark.long),
    ],
)
def test_too_little_noise_is_convicted(
    rule: str, factor: float, trials: int, group: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled_noise(monkeypatch, factor)
    assert audited(federation(rule, **group), trials).violated


@pytest.mark.parametrize(("rule", "trials"), [("tan", 60), ("joint", 40)])
def test_noise_that_is_used_again_is_convicted(
    rule: str, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal, discrete = NoiseSource.standard_normal, NoiseSource.discrete_gaussian
    drawn: dict[Any, Any] = {}

    def normal_once(self: NoiseSource, shape: tuple[int, ...]) -> Tensor:
        if shape not in drawn:
            drawn[shape] = normal(self, shape)
        return drawn[shape].clone()

    def discrete_once(self: NoiseSource, shape: tuple[int, ...], std: float) -> np.ndarray:
        if (shape, std) not in drawn:
            drawn[shape, std] = discrete(self, shape, std)
        return drawn[shape, std].copy()

    monkeypatch.setattr(NoiseSource, "standard_normal", normal_once)
    monkeypatch.setattr(NoiseSource, "discrete_gaussian", discrete_once)
    assert audited(federation(rule), trials).violated


def test_a_tensor_without_noise_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FixedTangentCoordinates.standard_normal

    def partly(self: FixedTangentCoordinates, draw: Any) -> Any:
        vector = whole(self, draw)
        vector[0] = (vector[0][0], torch.zeros_like(vector[0][1]), *vector[0][2:])
        return vector

    monkeypatch.setattr(FixedTangentCoordinates, "standard_normal", partly)
    assert audited(federation("tan"), 60).violated


@pytest.mark.parametrize(
    ("rule", "trials"), [("tan", 120), pytest.param("joint", 80, marks=pytest.mark.long)]
)
def test_clipping_twice_too_loosely_is_convicted(
    rule: str, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = GaussianMechanism._clip_weights
    monkeypatch.setattr(GaussianMechanism, "_clip_weights", lambda self, *given: 2 * weights(self, *given))
    assert audited(federation(rule), trials).violated


@pytest.mark.long
def test_updates_that_are_clipped_twice_too_loosely_are_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped = ClippedUpdate.clipped
    monkeypatch.setattr(ClippedUpdate, "clipped", lambda self, update: 2 * clipped(self, update))
    assert audited(federation("tan", privacy_model="client"), 80).violated


def test_a_broadcast_that_shows_a_client_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped, tensors = ClippedUpdate.clipped, RuleServer.tensors
    last: list[Tensor] = []

    def kept(self: ClippedUpdate, update: Mapping[str, Tensor]) -> Tensor:
        found = clipped(self, update)
        if bool(found.any()):  # the other client colludes and sends zeros
            last[:] = [found]
        return found

    def shown(self: RuleServer, stage: str) -> dict[str, Tensor]:
        found = dict(tensors(self, stage))
        name = min(found)
        if last:
            flat = last.pop()[: found[name].numel()]
            found[name] = found[name] + 1e3 * flat.reshape(found[name].shape).to(found[name])
        return found

    monkeypatch.setattr(ClippedUpdate, "clipped", kept)
    monkeypatch.setattr(RuleServer, "tensors", shown)
    settings = federation("fedavg", privacy_model="client", trusted_server=True)
    assert audited(settings, 60, attacker="client").violated


def test_units_that_are_drawn_more_often_than_charged_are_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = federation("tan", q=0.5)
    assert not audited(settings, 60, sampled=True).violated
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: np.arange(self._units))
    assert audited(settings, 200, sampled=True).violated


@pytest.mark.parametrize(("rule", "side"), [(Scaffold, 0), (FedSa, 0)])
def test_an_answer_that_holds_a_sum_without_noise_is_convicted(
    rule: Any, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends SCAFFOLD's control variate, or FedSA's own left factor, from before the noise."""
    release, answer = GaussianMechanism.release, rule.answer
    waiting: list[Tensor] = []

    def watched(self: GaussianMechanism, total: Any = None) -> Any:
        total = self._given(total)
        clipped = total.vector[0][side]
        waiting[:] = list(clipped.unflatten(0, (-1, len(self.coordinates.adapter.groups[0].sites))))
        return release(self, total)

    def leaking(*given: Any, **named: Any) -> Any:
        message, keep = answer(*given, **named)
        own = waiting.pop(0)
        name = next(n for n in message if n.endswith("_control") or rule is FedSa)
        message[name] = own.reshape(message[name].shape).to(message[name])
        return message, keep

    monkeypatch.setattr(GaussianMechanism, "release", watched)
    monkeypatch.setattr(rule, "answer", leaking)
    assert audited(federation(rule.name), 40).violated


# --- records that are loud ---


def gradient(model: torch.nn.Module, ids: list[int], marks: list[Mark]) -> Tensor:
    weight = model.model.layers[0].self_attn.q_proj.weight  # type: ignore[union-attr, index]
    tokens = torch.tensor([ids])
    with _loud(model, marks):
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")
        return torch.autograd.grad(loss, weight)[0]  # type: ignore[arg-type]


def test_marked_records_have_the_gradient_that_is_asked_for_and_others_their_own() -> None:
    model = tiny_llama(num_hidden_layers=1, vocab_size=61)
    one, other, plain = [5, 9, 3, 7, 11], [5, 9, 3, 8, 4, 4], [6, 6, 9, 2]
    marks = list(_opposites(one, other, 100.0))
    assert [mark.positions for mark in marks] == [2, 2]
    there, back = gradient(model, one, marks), gradient(model, other, marks)
    assert float(there.norm()) > 0
    torch.testing.assert_close(there, -back, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient(model, plain, marks), gradient(model, plain, []))
    quiet = [Mark(tuple(one), 0.0, 0)]
    assert not gradient(model, one, quiet).any()
    assert not model._forward_pre_hooks


def test_texts_that_a_tokenizer_does_not_tell_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="told apart"):
        _opposites([1, 2, 3, 4], [1, 2, 3, 4], 1.0)
    with pytest.raises(ConfigError, match="told apart"):
        _opposites([1, 2, 3, 4], [1, 3, 3, 4], 1.0)


# --- what cannot be audited ---


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        audited(federation("tan"), 10)
    with pytest.raises(ConfigError, match="unknown attacker"):
        audited(federation("tan"), 40, attacker="nobody")
    with pytest.raises(ConfigError, match="server sees all"):
        audited(federation("tan", privacy_model="client", trusted_server=True), 40)
    with pytest.raises(ConfigError, match="without noise"):
        audited(federation("tan", private=False), 40)


def test_a_rehearsal_keeps_what_a_release_costs_and_nothing_of_the_records() -> None:
    settings = with_local_method(federation("joint", clients=4, survivors=3))
    found = rehearsed(settings, stage_of(settings), rounds=50)
    assert found.privacy.noise_multiplier == SIGMA
    assert (found.privacy.q, found.privacy.clip_norm) == (1.0, settings.privacy.clip_norm)
    assert (found.federation.threshold, found.federation.rounds) == (3, 50)
    assert found.data.path == "(at the clients)"
    sampled = rehearsed(settings, stage_of(settings), rounds=50, sampled=True)
    assert sampled.privacy.q == settings.privacy.q
