"""Spans of whole weights: from sketches of their gradients, and by adapters whose rank is the layers' smaller side.

For engines.py, whose options and results these are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cosine
import numpy as np
import step_cost
import torch
from step_cost import TEXTS, UNITS
from torch import Tensor

from privlora.accounting.calibration import calibrate_noise_multiplier
from privlora.accounting.events import PoissonSampling
from privlora.adapters import LowRankAdapter
from privlora.coordinates import PublicGradients, ReleaseLaw
from privlora.coordinates.public_span import Span
from privlora.coordinates.span_choice import choose_setting
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.data.sampling import PoissonSampler
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.gradients import micro_batch_gradients
from privlora.training.inputs import tokenise
from privlora.training.models import load_model
from privlora.training.texts.voting import warm_start

SKETCHES = (256, 1024, 4096, 16384)
DRAWS = 5  # of projections
SETTINGS = ("as in the paper", "chosen")
# Linear layers of this model have one smaller side, so that one adapter.r reaches all of each.
SMALLER_SIDE = 128
PAIRS = tuple(name for name, pair in cosine.PAIRS.items() if pair.model == "reviews1M")


def noise_multiplier() -> float:
    """Of epsilon 1, as cosine.py has it."""
    sampling = PoissonSampling(cosine.RATE)
    return calibrate_noise_multiplier(sampling, cosine.STEPS, 1.0, cosine.DELTA).noise_multiplier


@contextmanager
def warm(assets: Path, name: str, row: cosine.Row, **adapter: Any) -> Iterator[tuple[Any, Examples, Any]]:
    """A run's parts after its warm start, its private records and its public texts."""
    pair = cosine.PAIRS[name]
    folder = assets / "models" / pair.model
    with tempfile.TemporaryDirectory() as temporary:
        public = Path(temporary) / "public.jsonl"
        records = cosine.texts_of(assets, pair.public, TEXTS)
        public.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
        settings = cosine.settings_of(row, folder, public)
        settings = settings.model_copy(update={"adapter": settings.adapter.model_copy(update=adapter)})
        model, tokenizer = load_model(settings.model)
        parts = build_parts(settings, model, PublicStart(tokenizer))
        private = tokenise(cosine.texts_of(assets, pair.private, cosine.RECORDS), settings.data, tokenizer)
        with parts.adapter:
            warm_start(parts)
            yield parts, private, parts.texts.examples()


def whole_gradients(parts: Any, *sets: Examples) -> tuple[Tensor, list[tuple[int, int]]]:
    """Of all weights of linear layers, (records of all sets, entries) float32, and the shapes of these layers."""
    looking = LowRankAdapter(parts.adapter.model, rank=SMALLER_SIDE)
    for group in looking.groups:
        # Terms of nothing, that keep P = G or Q = G^T.
        left, right = (
            torch.eye(n, SMALLER_SIDE).expand(len(group.sites), -1, -1) for n in (group.m, group.n)
        )
        looking.install(group, left, torch.zeros(len(group.sites), SMALLER_SIDE), right)
    shapes = [(site.m, site.n) for site in looking.sites]
    rows = torch.empty(sum(map(len, sets)), sum(m * n for m, n in shapes))
    done = 0
    with looking:
        for examples in sets:
            for batch in sequential_batches(examples, max_tokens=4096):
                with parts.adapter.capture(batch.record_index):
                    captured, _ = micro_batch_gradients(looking, batch, public=True)
                found = [
                    (p if n == SMALLER_SIDE else q.mT).flatten(1)
                    for p, q, (_, n) in zip(captured.p, captured.q, shapes, strict=True)
                ]
                rows[done + batch.record_index] = torch.cat(found, dim=1)
            done += len(examples)
    return rows, shapes


def layer_sketch(rows: Tensor, shapes: list[tuple[int, int]], numbers: int, seed: int) -> Tensor:
    """P_out G P_in^T of each layer, end to end: inner products are those of ``rows`` in expectation."""
    generator = torch.Generator().manual_seed(seed)
    side = int((numbers / len(shapes)) ** 0.5)
    found = []
    for piece, (m, n) in zip(rows.split([m * n for m, n in shapes], dim=1), shapes, strict=True):
        out, within = (torch.randn(side, size, generator=generator) / side**0.5 for size in (m, n))
        found.append((out @ piece.view(-1, m, n) @ within.mT).flatten(1))
    return torch.cat(found, dim=1)


def gaussian_sketch(root: Tensor, numbers: int, seed: int) -> Tensor:
    """S x / sqrt(s) for a Gaussian S and vectors x whose Gram matrix is root root^T: its law needs no more of them."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(root.shape[1], numbers, generator=generator, dtype=torch.float64)
    return root @ normal / numbers**0.5


class Releases:
    """Decoded releases of the same batches and noise, of any Gram matrix and products; gram: of all gradients."""

    def __init__(self, gram: Tensor, sigma: float) -> None:
        self.gram, self.sigma = gram, sigma
        generator = torch.Generator().manual_seed(0)
        units = len(gram) - TEXTS
        self.batches = (torch.rand(cosine.BATCHES, units, generator=generator) < cosine.RATE).double()
        self.noise = sigma * torch.randn(cosine.BATCHES, TEXTS, generator=generator, dtype=torch.float64)
        self.sums = self.batches @ gram[TEXTS:]  # of the batch's true gradients with all
        self.lengths = (self.sums[:, TEXTS:] * self.batches).sum(dim=1).sqrt()

    def coefficients(self, seen: Tensor, setting: str) -> tuple[Tensor, Tensor]:
        """Of the public texts, without noise and with it, (batches, N) each; seen: the Gram matrix as estimated."""
        gram, products = seen[:TEXTS, :TEXTS], seen[:TEXTS, TEXTS:]
        alpha, ridge, top_k = 1.0, 1e-6, 0
        if setting == "chosen":
            law = ReleaseLaw(self.sigma, 1.0, cosine.RATE * cosine.RECORDS, "normalized")
            chosen = choose_setting(gram, law)
            assert chosen is not None
            alpha, ridge, top_k = chosen.alpha, chosen.ridge, chosen.directions
        span = Span(None, ridge=ridge, top_k=top_k, gram=gram)  # type: ignore[arg-type]
        columns = span.power(-alpha)[:, None] * (span.vectors.mT @ products)
        summed = self.batches @ (columns / columns.norm(dim=0)).mT

        def decoded(y: Tensor) -> Tensor:
            return (y * span.power(alpha - 1)) @ span.vectors.mT

        return decoded(summed), decoded(summed + self.noise[:, : span.size])

    def with_truth(self, z: Tensor) -> float:
        """Mean cosine of G^T z with the mean gradients of the batches."""
        return float(((z * self.sums[:, :TEXTS]).sum(dim=1) / self._norms(z) / self.lengths).mean())

    def between(self, z: Tensor, other: Tensor) -> float:
        among = (z @ self.gram[:TEXTS, :TEXTS] * other).sum(dim=1)
        return float((among / self._norms(z) / self._norms(other)).mean())

    def _norms(self, z: Tensor) -> Tensor:
        return (z @ self.gram[:TEXTS, :TEXTS] * z).sum(dim=1).sqrt()


def sketches(assets: Path, name: str, sigma: float) -> dict[str, Any]:
    """Cosines of decoded mean gradients, by how many numbers stand for a gradient."""
    with warm(assets, name, cosine.ROWS["pe-sgd as in the paper"]) as (parts, private, public):
        rows, shapes = whole_gradients(parts, public, private)
    gram = PublicGradients(rows).gram()
    values, vectors = torch.linalg.eigh(gram)
    root = vectors * values.clamp_min(0).sqrt()
    releases = Releases(gram, sigma)
    found: dict[str, Any] = {"entries": rows.shape[1], "layers": len(shapes), "settings": {}}
    exact = {setting: releases.coefficients(gram, setting) for setting in SETTINGS}
    for setting, (still, noisy) in exact.items():
        found["settings"][setting] = {
            "exact": {"without_noise": releases.with_truth(still), "noisy": releases.with_truth(noisy)},
            "sketches": [],
        }
    kinds: dict[str, Callable[[int, int], Tensor]] = {
        "layers": lambda numbers, seed: layer_sketch(rows, shapes, numbers, seed).double(),
        "Gaussian": lambda numbers, seed: gaussian_sketch(root, numbers, seed),
    }
    for kind, sketch in kinds.items():
        for numbers in SKETCHES:
            each: dict[str, list[list[float]]] = {setting: [] for setting in SETTINGS}
            for seed in range(DRAWS):
                short = sketch(numbers, seed)
                seen = short @ short.mT
                for setting in SETTINGS:
                    still, noisy = releases.coefficients(seen, setting)
                    each[setting].append(
                        [
                            releases.between(still, exact[setting][0]),
                            releases.with_truth(still),
                            releases.with_truth(noisy),
                        ]
                    )
            for setting in SETTINGS:
                names = ("with_exact", "without_noise", "noisy")
                row = {"kind": kind, "asked": numbers, "numbers": short.shape[1]}
                row |= dict(zip(names, np.mean(each[setting], axis=0).tolist(), strict=True))
                row["noisy_deviation"] = float(np.std([one[2] for one in each[setting]], ddof=1))
                found["settings"][setting]["sketches"].append(row)
                print(name, setting, row, flush=True)
    return found


def whole(assets: Path, name: str, sigma: float) -> list[dict[str, Any]]:
    """Steps at adapter.r = 8 and at the layers' smaller side, on all linear layers."""
    found = []
    for method, rank in (
        ("pe-sgd-fix", 8),
        ("pe-sgd-fix", SMALLER_SIDE),
        ("span-prism", 8),
        ("span-prism", SMALLER_SIDE),
    ):
        with warm(assets, name, cosine.Row(method), r=rank, target_modules="all-linear") as (
            parts,
            private,
            _,
        ):
            step = cosine.step_of(parts, private, sigma)
            spent = []
            for _ in range(step_cost.REPEATS):
                drawn = PoissonSampler(len(private), cosine.RATE).draw()[:UNITS].tolist()
                spent.append(step_cost.seconds(partial(step.take, drawn)))
            matrix = parts.coordinates.span.gradients.matrix
            weights = sum(site.m * site.n for site in parts.adapter.sites)
            found.append(
                {
                    "method": method,
                    "rank": rank,
                    "weights": weights,
                    "entries": matrix.shape[1],
                    "dimension": parts.coordinates.inner.dimension,
                    "bytes": matrix.nbytes,
                    "cpu": float(np.median(spent)),
                }
            )
        print(name, found[-1], flush=True)
    return found
