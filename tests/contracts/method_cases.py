"""Every row of the table of methods with each of its optimizers, on a tiny model, for the contract tests.

A new row is tested by being in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from counting_ledger import CountingLedger
from tiny_models import PUBLIC_TEXTS, VOCAB, one_batch, tiny_model, uneven_examples
from torch import Tensor

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured, LowRankAdapter, write_adapter
from privlora.coordinates import (
    Coordinates,
    DirectionCoordinates,
    ProjectedCoordinates,
    PublicGradients,
    SpectralMetricCoordinates,
    Vector,
    WishartCoordinates,
)
from privlora.coordinates.span import SpanSpace
from privlora.data.batching import micro_batches
from privlora.data.examples import Example, Examples
from privlora.mechanisms import (
    AdaptiveClipNorm,
    GaussianMechanism,
    MeanMechanism,
    Mechanism,
    NoiseSource,
    PrivateSum,
    Release,
)
from privlora.mechanisms.charges import Charges
from privlora.methods import METHODS, Method, build
from privlora.optimizers import Optimizer, SpanOptimizer
from privlora.training.assembly import _lean_on
from privlora.training.gradients import micro_batch_gradients
from privlora.training.model_checks import own_width
from privlora.training.state import TrainState
from privlora.training.step import Step

RANK = 3
SPECTRAL = 0.9899
"""Of C that a unit reaches after spectral clipping, at least."""
NAN_TOKEN, INF_TOKEN = VOCAB - 1, VOCAB - 2
# What the algorithm is without one of its ingredients is tests/optimizers/test_paper.py's.
VARIANTS = [
    (row.name, optimizer)
    for row in METHODS.values()
    for optimizer in row.optimizers
    if row.name != "prism-paper" or optimizer == "paper"
]
# Tangent coordinates that are weighed by the singular values are a space of their own, by a setting.
IN_METRIC = ("prism", "rank in metric 1")
PRIVATE = [*[(name, optimizer) for name, optimizer in VARIANTS if METHODS[name].private], IN_METRIC]
# Eq. 24-26 need Z != 0.
NEEDS_FACTORS = {("prism-paper", "paper")}
STATES = ["zero", "factors", "ill-conditioned", "moved"]
# A mechanism sees coordinates and never an optimizer. So what concerns it alone is tested once a space, and from where
# each optimizer leads to.
ONE_A_SPACE = [
    *{METHODS[name].space: (name, optimizer) for name, optimizer in reversed(PRIVATE)}.values(),
    IN_METRIC,
]
CASES = [(v, state) for state in STATES for v in (PRIVATE if state == "moved" else ONE_A_SPACE)]


def label(value: tuple[str, str] | str) -> str:
    return value if isinstance(value, str) else "-".join(value)


# Spans of public texts are dear, and what moves in them are optimizers that other rows have, too: one a row is looked
# at at once, and the others by the long tests.
DEAR = [
    (row.name, optimizer) for row in METHODS.values() if row.public_texts for optimizer in row.optimizers[1:]
]


def each(variants: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(v, marks=pytest.mark.long if v in DEAR else ()) for v in variants]


by_variant = pytest.mark.parametrize("variant", each(PRIVATE), ids=label)
by_any_variant = pytest.mark.parametrize("variant", each([*VARIANTS, IN_METRIC]), ids=label)
by_space = pytest.mark.parametrize("variant", ONE_A_SPACE, ids=label)
# Where a row's further optimizers lead to is looked at, too, but by the long tests.
FIRST = dict(reversed(PRIVATE))  # row -> its first optimizer
FURTHER = [(v, "moved") for v in PRIVATE if v not in ONE_A_SPACE and v[1] != FIRST[v[0]]]
by_case = pytest.mark.parametrize(
    ("variant", "state"),
    [pytest.param(*case, marks=pytest.mark.long if case in FURTHER else ()) for case in CASES],
    ids=label,
)
# What follows from the state alone: other rows of a space lead to states of the same kind, where the long tests look.
by_space_and_state = pytest.mark.parametrize(
    ("variant", "state"),
    [pytest.param(*case, marks=() if case[0] in ONE_A_SPACE else pytest.mark.long) for case in CASES],
    ids=label,
)


@dataclass
class Case:
    """A method on a model, ready for a step."""

    row: Method
    adapter: LowRankAdapter
    coordinates: Coordinates
    optimizer: Optimizer

    def mechanism(
        self,
        *,
        sigma: float = 1.0,
        clip_norm: float = 1.0,
        batch: float = 4.0,
        seed: int | None = None,
        ledger: Charges | None = None,
        steps: int = 10**6,
        clipping: str = "flat",
        adaptive: AdaptiveClipNorm | None = None,
    ) -> Mechanism:
        if not self.row.private:
            return MeanMechanism(self.coordinates, expected_batch_size=batch, steps=steps)
        before = copy(self.coordinates)
        mechanism = GaussianMechanism(
            self.coordinates,
            clip_norm=clip_norm,
            event=StepEvent(PoissonSampling(0.01), sigma, self.coordinates.event_layers),
            expected_batch_size=batch,
            ledger=ledger or CountingLedger(),
            noise=NoiseSource(seed),
            clipping=clipping,
            adaptive=adaptive,
        )
        share_projections(before, self.coordinates)
        if (
            self.coordinates.draws is not None
        ):  # keeps its projections and uses them again, which a run would not
            release = mechanism.release

            def upon_any(total: PrivateSum | None = None) -> Release:
                self.coordinates.released_on = None
                return release(total)

            mechanism.release = upon_any  # type: ignore[method-assign]
        return mechanism

    def feed(
        self,
        mechanism: Mechanism,
        examples: Sequence[Example],
        units: Sequence[Any] | None = None,
        max_tokens: int | None = None,
    ) -> int:
        """Accumulate one logical batch; returns the number of micro-batches. max_tokens: None for as few as a step
        takes, where everybody's company is largest."""
        self.coordinates.prepare()
        chosen = range(len(examples)) if units is None else units
        count = 0
        alike = own_width(self.adapter)
        if max_tokens is None and alike is None:
            batches = [one_batch(examples, chosen)] if len(chosen) else []
        else:
            padded, most = Examples(examples, pad_token_id=0), max_tokens or 2**30
            batches = list(micro_batches(chosen, padded, max_tokens=most, own_width=alike))
        for batch in batches:
            captured, _ = micro_batch_gradients(self.adapter, batch, summed=not mechanism.needs_examples)
            mechanism.accumulate(captured)
            count += 1
        return count

    def clipped_sum(
        self, examples: Sequence[Example], units: Sequence[Any] | None = None, **options: Any
    ) -> Tensor:
        """What a release would be without its noise, before the division."""
        mechanism = self.mechanism(sigma=0.0, batch=1.0, **options)
        self.feed(mechanism, examples, units)
        return flat(mechanism.release().vector)

    def step(self, mechanism: Mechanism, examples: Sequence[Example], learning_rate: float = 0.05) -> Release:
        step = Step(
            state=TrainState(coordinates=self.coordinates, optimizer=self.optimizer),
            mechanism=mechanism,
            examples=Examples(examples, pad_token_id=0),
            learning_rate=lambda _: learning_rate,
        )
        return step.take(range(len(examples))).release

    def same_again(self, examples: Sequence[Example], count: int, **options: Any) -> list[Release]:
        """Releases of ``count`` mechanisms, each of the same batch, whose gradients are taken once."""
        mechanism = self.mechanism(**options)
        self.coordinates.prepare()
        captured = None
        if examples:
            batch = one_batch(examples, range(len(examples)))
            captured, _ = micro_batch_gradients(self.adapter, batch, summed=not mechanism.needs_examples)
        found = []
        for number in range(count):
            mechanism = self.mechanism(**options) if number else mechanism
            if captured is not None:
                mechanism.accumulate(captured)
            found.append(mechanism.release())
        return found

    def releases(self, mechanism: Mechanism, count: int) -> Tensor:
        """(count, coordinates): releases of empty batches, without a step in between."""
        found = []
        for _ in range(count):
            found.append(flat(mechanism.release().vector))
            self.coordinates.advance()
        return torch.stack(found)

    def gradients(self, p: list[Tensor], q: list[Tensor]) -> Captured:
        """Gradients from nowhere, as the adapter would give them."""
        squares = torch.stack([t.square().sum(dim=(-2, -1)).double() for t in p]).sum(dim=0)
        return Captured(p, q, 2 * squares if self.adapter.dense_norms else None)

    def reached(self, usual: float) -> float:
        """The least of C by which a clipped unit moves the sum: less of it where a projection comes after the clip, or
        where C bounds two parts together, of which few units reach both bounds. In the metric of singular values the
        two sides are evened each by itself, and what is along no tangent vector is measured and not released."""
        if isinstance(self.coordinates, SpectralMetricCoordinates) and usual == SPECTRAL:
            return 0.98
        return 0.2 if self.coordinates.event_layers or self.row.space == "span-and-residual" else usual

    def weights(self) -> Tensor:
        """All dense updates Z, end to end."""
        return torch.cat([(a.double() @ b.double().mT).flatten() for a, b in self.coordinates.factors()])


def lean_once(coordinates: Coordinates, optimizer: Optimizer) -> None:
    """Lean on public texts, whose gradients are taken once at each state, however often a test prepares there."""
    _lean_on(lambda _: PUBLIC_TEXTS, coordinates, optimizer, 10**6)
    if not isinstance(coordinates, SpanSpace):
        return
    assert coordinates.refresh is not None
    assert isinstance(optimizer, SpanOptimizer)
    take, kept, forget = coordinates.refresh, dict[bytes, PublicGradients](), optimizer.take_scores

    def refresh() -> PublicGradients:
        key = b"".join(tensor.numpy().tobytes() for tensor in coordinates.state_dict().values())
        if key in kept:
            forget()
        else:
            kept.clear()
            kept[key] = take()
        return kept[key]

    coordinates.refresh = refresh


def share_projections(of: Coordinates, to: Coordinates) -> None:
    """Let ``to`` go on with the projections of ``of``, which no run would: its own are secret, and used once; or with
    the directions, which are new in each run."""
    if isinstance(to, DirectionCoordinates):
        assert isinstance(of, DirectionCoordinates)
        to._key, to._count = of._key, of._count
        to._draw()
    if isinstance(to, WishartCoordinates):
        assert isinstance(of, WishartCoordinates)
        to._key, to._count, to.released_on = of._key, of._count, None
        to._draw_projections()


def make_case(
    variant: tuple[str, str],
    folder: Path,
    state: str = "factors",
    *,
    model: Any = None,
    dtype: torch.dtype = torch.float32,
    targets: str = "all-linear",
    **settings: float,
) -> Case:
    """state: zero (a random start, Z = 0), factors (from an adapter), ill-conditioned (singular values 1 to 1e-6),
    or moved (a few private steps after the start). settings: of the optimizer.
    """
    row = METHODS[variant[0]]
    rule, _, power = variant[1].partition(" in metric ")
    if power:
        settings |= {"metric_power": float(power)}
    adapter = LowRankAdapter(
        model if model is not None else poisoned_model(), rank=RANK, target_modules=targets
    ).attach()
    init = "random"
    if state in ("factors", "ill-conditioned") or variant in NEEDS_FACTORS:
        init = str(folder / state)
        write_factors(Path(init), adapter, 1e-6 if state == "ill-conditioned" else 0.2)
    coordinates, optimizer = build(
        row, adapter, optimizer=rule, init=init, lora_alpha=2.0 * RANK, dtype=dtype, settings=settings
    )
    lean_once(coordinates, optimizer)
    coordinates.prepare()
    case = Case(row, adapter, coordinates, optimizer)
    if state == "moved":
        mechanism = case.mechanism(seed=7)
        for seed in (1, 2, 3):
            case.step(mechanism, uneven_examples(seed)[:3])
    return case


def poisoned_model(dtype: torch.dtype = torch.float32, layers: int = 1) -> Any:
    """A tiny Llama two of whose tokens have a NaN and an infinite embedding. One layer has groups of two modules."""
    model = tiny_model("llama", dtype=dtype, layers=layers)
    embeddings = model.get_input_embeddings().weight.data
    embeddings[NAN_TOKEN], embeddings[INF_TOKEN] = float("nan"), float("inf")
    return model


def with_token(example: Example, token: int) -> Example:
    """The example with ``token`` in second place."""
    ids = example.input_ids.copy()
    ids[1] = token
    return Example(ids, example.labels)


def write_factors(folder: Path, adapter: LowRankAdapter, smallest: float) -> None:
    generator = torch.Generator().manual_seed(3)
    rank = adapter.rank
    spectrum = torch.logspace(0, float(torch.tensor(smallest).log10()), rank, dtype=torch.float64)
    factors = {}
    for site in adapter.sites:
        left, right = (
            torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q
            for size in (site.m, site.n)
        )
        factors[site.name] = (left * spectrum.sqrt(), right * spectrum.sqrt())
    write_adapter(folder, adapter, factors, base_model="tiny", lora_alpha=2.0 * rank)


def measure_whole_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let wishart-m2 clip by the norms of whole gradients only, not by those of what is left at r = n as well."""
    monkeypatch.setattr(
        ProjectedCoordinates, "norms_squared", lambda _, captured: torch.zeros(captured.units).double()
    )


def flat(vector: Vector) -> Tensor:
    """All coordinates, end to end, in float64."""
    return torch.cat([t.double().flatten() for parts in vector for t in parts])
