"""Rule joint is one central run whose sums are taken elsewhere: its steps, its noise, its accounting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated_cases import SIGMA, Federation, drawing, nobody, owners, settings_of
from scipy import stats
from tiny_models import VOCAB, everything_in_double, tiny_llama, tiny_model, tiny_tokenizer
from torch import Tensor

from privlora.accounting.events import StepEvent
from privlora.data.sampling import PoissonSampler
from privlora.federated.server import JointServer
from privlora.mechanisms import NoiseSource, Release, SumMechanism
from privlora.training.assembly import build_parts, build_step
from privlora.training.inputs import load_data

OWN = owners(3)
ROUNDS = 4


class Alternate:
    """Each owner draws every other of its records, those with even numbers in odd rounds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.round = 0
        drawing(patch, self._of)

    def _of(self, units: int) -> list[int]:
        return [i for i in range(units) if (i + self.round) % 2]

    def of_all(self) -> list[int]:
        firsts = np.cumsum([0, *map(len, OWN.values())])
        return [
            first + i
            for first, found in zip(firsts, OWN.values(), strict=False)
            for i in self._of(len(found))
        ]


def federated(folder: Path, patch: pytest.MonkeyPatch, **groups: Any) -> list[Tensor]:
    chosen = settings_of("joint", list(OWN), **groups)
    made = Federation(folder, chosen, OWN, model=tiny_model(dtype=torch.float64))
    turns, take = Alternate(patch), JointServer.tensors

    def counted(self: JointServer, stage: str) -> Any:
        turns.round += 1
        return take(self, stage)

    patch.setattr(JointServer, "tensors", counted)
    made.run()
    assert [one.void for one in made.done()] == [None] * ROUNDS
    return made.updates()


def central(patch: pytest.MonkeyPatch, **groups: Any) -> list[Tensor]:
    """The same steps of one run on all records, by the step that all runs take."""
    alone = settings_of("joint", list(OWN), **groups)
    alone = alone.model_copy(
        update={"federation": None, "data": alone.data.model_copy(update={"path": "(in memory)"})}
    )
    model, union = tiny_model(dtype=torch.float64), [record for found in OWN.values() for record in found]
    data = load_data(
        alone.model_copy(update={"data": alone.data.model_copy(update={"unchecked": True})}),
        tiny_tokenizer(),
        union,
        model=model,
    )
    parts, turns = build_parts(alone, model), Alternate(patch)
    if not alone.privacy.private:
        step = build_step(parts, data, None)
    else:
        step = _clipping_step(parts, data)
    for turns.round in range(1, ROUNDS + 1):
        step.mechanism.expected_batch_size = 6.0
        step.take([data.units[i] for i in turns.of_all()])
    return [(a.double() @ b.double().mT).clone() for a, b in parts.coordinates.factors()]


def _clipping_step(parts: Any, data: Any) -> Any:
    from privlora.mechanisms import GaussianMechanism
    from privlora.mechanisms.charges import Uncharged
    from privlora.training.step import Step

    privacy = parts.settings.privacy
    mechanism = GaussianMechanism(
        parts.coordinates,
        clip_norm=privacy.clip_norm,
        event=StepEvent(PoissonSampler(1, privacy.q).sampling, SIGMA),
        expected_batch_size=privacy.b,
        ledger=Uncharged(),
        noise=NoiseSource(0),
        clipping=parts.hyper.clipping,
    )
    return Step(state=parts, mechanism=mechanism, examples=data.examples, learning_rate=parts.learning_rate)


@pytest.mark.parametrize(
    "method", [{"name": "prism"}, {"name": "prism", "metric_power": 1.0}, {"name": "dp-adamw"}]
)
@pytest.mark.parametrize("secure", [False, True])
def test_without_noise_clients_take_the_steps_of_one_run(
    method: dict[str, Any], secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: dict[str, Any] = {
        "privacy": {"private": False},
        "method": {**method, "schedule": "cosine"},
        "federation": {"rounds": ROUNDS, "secure_aggregation": secure},
    }
    with everything_in_double():
        there = federated(tmp_path, monkeypatch, **groups)
        here = central(monkeypatch, **groups)
    for a, b in zip(there, here, strict=True):
        assert float(b.norm()) > 1e-3
        assert float((a - b).norm()) <= 1e-6 * float(b.norm())


RELEASE = SumMechanism.release


class Releases:
    """Keeps what the server's mechanism releases, and where the point was."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: list[Release] = []
        self.points: list[Any] = []
        kept = self

        def keep(self: SumMechanism, *args: Any, **options: Any) -> Release:
            release = RELEASE(self, *args, **options)
            kept.found.append(release)
            kept.points.append([point.to(point.U.double()) for point in self.coordinates.points])
            return release

        patch.setattr(SumMechanism, "release", keep)


@pytest.mark.parametrize(("survivors", "lost"), [(None, 0), (4, 1)])
def test_empty_batches_release_the_central_noise_and_nothing_beside_it(
    survivors: int | None, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variance, its law, its space; with the fewest shares that may be opened, too."""
    drawing(monkeypatch, nobody)
    kept = Releases(monkeypatch)
    chosen = settings_of(
        "joint",
        [f"owner-{k}" for k in range(5)],
        privacy={"clip_norm": 0.5},
        federation={"rounds": 20, "survivors": survivors},
        adapter={
            "r": 4,
            "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "down_proj"],
        },
    )
    wide = tiny_llama(vocab_size=VOCAB, hidden_size=64, intermediate_size=96).double()
    made = Federation(tmp_path, chosen, owners(5), model=wide)
    made.exchange.drop = lambda request: (
        bool(lost) and request.client == "owner-4" and request.kind == "train"
    )
    made.run()
    assert all(len(one.answered) == 5 - lost and one.void is None for one in made.done())
    tau = SIGMA * 0.5 / 6.0
    entries, normals = 0, []
    for release, points in zip(kept.found, kept.points, strict=True):
        assert release.noise_std == pytest.approx(tau, rel=0.01)
        for (M, up, vp), point in zip(release.vector, points, strict=True):
            # Nothing outside of the tangent space: it would be noise that nobody asked for.
            assert float((point.U.mT @ up).abs().max()) < 1e-12 * M.shape[-1]
            assert float((point.V.mT @ vp).abs().max()) < 1e-12 * M.shape[-1]
            L, m, r = up.shape
            entries += L * (r * r + (m - r) * r + (vp.shape[1] - r) * r)
            normals += [M.flatten(), *(_reduced(basis, t) for basis, t in ((point.U, up), (point.V, vp)))]
    found = torch.cat(normals) / tau
    assert len(found) == entries > 125_000  # 2 % are five standard deviations
    square = float(found.square().sum())
    assert square / entries == pytest.approx(1.0, abs=0.02)
    assert 1e-6 < stats.chi2.cdf(square, entries) < 1 - 1e-6
    assert stats.kstest(found.numpy(), "norm").pvalue > 1e-6
    assert abs(float(found.sum())) / entries**0.5 < 6


def _reduced(basis: Tensor, t: Tensor) -> Tensor:
    """What remains of (L, m, r) in an orthonormal basis of the complement of ``basis``."""
    complement = torch.linalg.qr(basis, mode="complete").Q[..., basis.shape[-1] :]
    return (complement.mT @ t).flatten()


def test_schedules_run_over_all_rounds_where_clients_take_turns(tmp_path: Path) -> None:
    """A client is in half of the rounds, and the server moves in each."""
    names = [f"owner-{k}" for k in range(4)]
    chosen = settings_of(
        "joint",
        names,
        method={"name": "prism", "schedule": "linear", "learning_rate": 1.0},
        federation={"rounds": 4, "clients_per_round": 2},
    )
    made = Federation(tmp_path, chosen, owners(4))
    rates: list[float] = []
    move = made.parts.move
    made.parts.move = lambda release, rate: (rates.append(rate), move(release, rate))[1]  # type: ignore[method-assign]
    made.run()
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])
