"""Whole clients: what is clipped, what noise is added, who is drawn, and what each ledger shows."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated_cases import SIGMA, Federation, drawing, everyone, owners, settings_of
from scipy import stats
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.data.sampling import PoissonSampler
from privlora.federated import server as servers
from privlora.federated.plans import hides_clients, secret_participants
from privlora.federated.rules import RULES
from privlora.mechanisms.noising import Charged
from privlora.mechanisms.updates import ClippedUpdate

NAMES = [f"owner-{k}" for k in range(4)]
C = 0.01
TRUSTED = {"privacy_model": "client", "trusted_server": True}
DISTRIBUTED = {"privacy_model": "client"}


def made(folder: Path, federation: dict[str, Any], rule: str = "tan", **adapter: Any) -> Federation:
    chosen = settings_of(rule, NAMES, federation=federation, privacy={"clip_norm": C}, adapter=adapter)
    return Federation(folder, chosen, owners(4))


WHOLE = [rule.name for rule in RULES.values() if hides_clients(rule)]


class Totals:
    """The private sums of updates that met noise, and what was released in their place."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sums: list[Tensor] = []
        self.scales: list[float] = []
        self.divisors: list[float] = []
        tensor, integers, kept = Charged.tensor, Charged.integers, self

        def seen(self: Charged, total: Tensor, **options: Any) -> Tensor:
            kept.sums.append(total.clone())
            kept.scales.append(options["scale"])
            kept.divisors.append(options["divisor"])
            return tensor(self, total, **options)

        def shared(self: Charged, total: Tensor, **options: Any) -> np.ndarray:
            kept.sums.append(total.clone())
            return integers(self, total, **options)

        patch.setattr(Charged, "tensor", seen)
        patch.setattr(Charged, "integers", shared)


@pytest.mark.parametrize("rule", ["tan", "fedavg", "alt"])
def test_a_clients_update_is_clipped_before_it_meets_its_share_of_noise(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Totals(monkeypatch)
    one = made(tmp_path, DISTRIBUTED, rule).run()
    norms = [float(total.norm()) for total in kept.sums]
    assert len(norms) == 8  # four clients, two rounds
    assert max(norms) <= C
    assert max(norms) > C * (1 - 1e-6)
    for name in NAMES:
        ledger = one.ledger_of(name)
        assert ledger.events() == [(StepEvent(PoissonSampling(1.0), SIGMA), 2)]
        assert ledger.plan.unit == "client"


def test_a_trusted_server_clips_again_and_adds_all_of_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Totals(monkeypatch)
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: np.arange(self._units))
    one = made(tmp_path, {**TRUSTED, "clients_per_round": 2})
    # Clients clip as well, so only those that do not show whether the server does.
    one.exchange.change = lambda reply: replace(reply, tensors={n: 100 * t for n, t in reply.tensors.items()})
    one.run()
    assert len(kept.sums) == 2
    assert all(float(total.norm()) <= 4 * C for total in kept.sums)
    assert kept.scales == pytest.approx([SIGMA * C] * 2)
    assert kept.divisors == [2.0, 2.0]  # as expected, however many were drawn
    assert one.ledger is not None
    assert one.ledger.summary.events() == [(StepEvent(PoissonSampling(0.5), SIGMA), 2)]
    assert one.ledger.plan.expected_batch_size == 2.0
    assert not (one.clients["owner-0"].folder / one.history.run / "ledger.jsonl").exists()


def released(one: Federation) -> list[Tensor]:
    """What the server takes in of each round."""
    means: list[Tensor] = []
    add = one.server.add

    def kept(stage: str, message: dict[str, Tensor], weight: float) -> None:
        means.append(torch.cat([message[name].double().flatten() for name in sorted(message)]))
        add(stage, message, weight)

    one.server.add = kept  # type: ignore[method-assign]
    one.run()
    return means


@pytest.mark.parametrize("federation", [TRUSTED, DISTRIBUTED])
def test_noise_follows_from_nothing_that_is_public(
    federation: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two servers on the same terms, under the same name of the run, and of their rounds."""
    monkeypatch.setattr(
        ClippedUpdate, "clipped", lambda self, update: torch.zeros(self.entries, dtype=torch.float64)
    )
    monkeypatch.setattr(secrets, "token_hex", lambda size: "ab" * size)
    noise = [mean for name in ("a", "b") for mean in released(made(tmp_path / name, federation))]
    assert len(noise) == 4
    together = torch.corrcoef(torch.stack(noise)) - torch.eye(4, dtype=torch.float64)
    # Six standard deviations, six pairs: a wrong alarm in 8e7.
    assert float(together.abs().max()) < 6 / len(noise[0]) ** 0.5 < 0.5


@pytest.mark.parametrize("federation", [TRUSTED, DISTRIBUTED])
def test_a_round_without_updates_releases_the_stated_noise(
    federation: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ClippedUpdate, "clipped", lambda self, update: torch.zeros(self.entries, dtype=torch.float64)
    )
    everywhere = ["q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "down_proj"]
    one = made(tmp_path, {**federation, "rounds": 8}, r=4, target_modules=everywhere)
    found = torch.cat(released(one)) / (SIGMA * C / 4)
    assert len(found) > 14_000
    # Rounding to the lattice and its cover are below 1 %.
    square, n = float(found.square().sum()), len(found)
    assert stats.chi2.cdf(square / 1.02, n) < 1 - 1e-6
    assert stats.chi2.cdf(square, n) > 1e-6
    assert stats.kstest(found.numpy(), "norm").pvalue > 1e-6


def test_a_trusted_server_draws_clients_in_secret_at_the_rate_that_it_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of: list[tuple[int, float, bool]] = []

    class Watched(PoissonSampler):
        def __init__(self, units: int, sample_rate: float, **options: Any) -> None:
            super().__init__(units, sample_rate, **options)
            made_of.append((units, sample_rate, self.insecure))

    monkeypatch.setattr(servers, "PoissonSampler", Watched)
    one = made(tmp_path, {**TRUSTED, "clients_per_round": 1, "rounds": 12}).run()
    assert made_of == [(4, 0.25, False)]
    asked = [done.asked for done in one.done()]
    assert len({len(names) for names in asked}) > 1 or len(set(asked)) > 1  # 1e-8 otherwise
    assert one.ledger is not None
    assert one.ledger.charges == 12


def test_no_schedule_tells_who_is_drawn() -> None:
    """Each client by a coin of its own, anew: the law of the accountant."""
    sampler = PoissonSampler(4, 0.25)
    drawn = list(secret_participants(NAMES, sampler, 4000))
    together = np.array([[name in names for name in NAMES] for names in drawn], dtype=float)
    assert all(names == sorted(names) for names in drawn)
    for share in together.mean(axis=0):
        assert abs(share - 0.25) < 6 * (0.25 * 0.75 / 4000) ** 0.5
    pairs = np.corrcoef(together.T) - np.eye(4)
    assert np.abs(pairs).max() < 6 / 4000**0.5
    assert abs((together.sum(axis=1) == 0).mean() - 0.75**4) < 6 * (0.75**4 / 4000) ** 0.5


def test_a_round_of_nobody_is_noised_and_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: np.zeros(0, dtype=np.int64))
    one = made(tmp_path, TRUSTED).run()
    assert one.ledger is not None
    assert [done.asked for done in one.done()] == [(), ()]
    assert [done.void for done in one.done()] == [None, None]
    assert one.ledger.charges == 2
    assert not one.exchange.requests("train")
    assert all(float(update.norm()) > 0 for update in one.updates())


PULLS: list[dict[str, Any]] = [
    {"learning_rate": 1e-2},
    {"learning_rate": 1e-3, "weight_decay": 10.0},
    {"learning_rate": 1e-1, "weight_decay": 30.0},
]


# Each rule is pulled in one way at once, and each way by some rule; the rest by the long tests.
@pytest.mark.parametrize(
    ("rule", "method"),
    [
        pytest.param(rule, pull, marks=() if (number - at) % len(PULLS) == 0 else pytest.mark.long)
        for number, rule in enumerate(WHOLE)
        for at, pull in enumerate(PULLS)
    ],
)
def test_a_client_without_records_moves_nothing(
    rule: str, method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all its records one client has, and without any, updates differ by C at most: one of them is zero."""
    if rule == "tan" and len(method) > 1:  # PRISM's optimizers do not decay
        method = {"learning_rate": method["learning_rate"], "right_weight": 3.0}
    pull = {"proximal": 50.0} if rule == "fedprox" else {}
    updates = Totals(monkeypatch)
    drawing(monkeypatch, everyone)
    for number, chosen in enumerate((TRUSTED, DISTRIBUTED)):
        settings = settings_of(
            rule, NAMES, federation={**chosen, **pull}, privacy={"clip_norm": C}, method=method
        )
        one = Federation(
            tmp_path / str(number), settings, {**owners(4), NAMES[0]: [], NAMES[1]: [{"text": 3}]}
        )  # type: ignore[list-item]
        one.run()
        assert [done.void for done in one.done()] == [None, None]
        for reply in one.exchange.replies("train") if number == 0 else ():
            norm = sum(float(t.double().square().sum()) for t in reply.tensors.values()) ** 0.5
            assert norm == 0 if reply.client in NAMES[:2] else 0 < norm <= C * (1 + 1e-6)
    norms = [float(total.norm()) for total in updates.sums]
    assert len(norms) == 2 + 8  # a trusted server's sums, and each client's part of the shares
    assert [norm == 0 for norm in norms[2:]] == [True, True, False, False] * 2


@pytest.mark.parametrize("federation", [TRUSTED, DISTRIBUTED])
def test_a_gradient_that_is_not_a_number_is_an_update_of_zero(
    federation: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of its own client alone: a refusal would tell of its records, and of those of others in the process."""
    updates = Totals(monkeypatch)
    one = made(tmp_path, federation, "fedavg")
    token = one.workplace.tokenizer("Z", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        one.model.get_input_embeddings().weight[token] = torch.nan
    one.clients[NAMES[0]].records = [*owners(1)[NAMES[0]], {"text": "abZcd"}]
    drawing(monkeypatch, everyone)
    with caplog.at_level(logging.ERROR):
        one.run()
    assert [done.void for done in one.done()] == [None, None]
    assert f"{NAMES[0]} sends an update of zero" in caplog.text
    replies = one.exchange.replies("train")
    assert [reply.refused for reply in replies] == [None] * 8
    if federation is DISTRIBUTED:
        assert [float(total.norm()) == 0 for total in updates.sums] == [True, False, False, False] * 2
    else:
        moved = [any(t.any() for t in r.tensors.values()) for r in replies]
        assert moved == [False, True, True, True] * 2


def test_records_of_one_client_move_no_update_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: steps without noise enlarge whatever rounding carries over, and clipping bounds one's own alone."""
    drawing(monkeypatch, everyone)
    sent = []
    for number, own in enumerate(
        ([], [{"text": "a much longer record than those of others"}, {"text": "b"}])
    ):
        settings = settings_of(
            "fedavg",
            NAMES,
            federation={**TRUSTED, "local_steps": 8},
            privacy={"clip_norm": C},
            method={"learning_rate": 0.5},
        )
        one = Federation(tmp_path / str(number), settings, {**owners(4), NAMES[0]: own})
        one.run()
        first = {reply.client: reply.tensors for reply in one.exchange.replies("train")[: len(NAMES)]}
        sent.append({name: first[name] for name in NAMES[1:]})
    for name in NAMES[1:]:
        assert all(torch.equal(sent[0][name][key], sent[1][name][key]) for key in sent[0][name]), name


def test_a_rate_that_no_float_holds_is_an_update_of_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drawing(monkeypatch, everyone)
    settings = settings_of(
        "fedavg", NAMES, federation=TRUSTED, privacy={"clip_norm": C}, method={"learning_rate": 1e38}
    )
    one = Federation(tmp_path, settings, owners(4))
    with caplog.at_level(logging.ERROR):
        one.run()
    assert [reply.refused for reply in one.exchange.replies("train")] == [None] * 8
