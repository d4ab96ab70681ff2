"""Whole private steps of every method on a device that has no values: nothing meets the CPU, and no value is read back
or computed in float64 but where the two tables below say so."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from paper import DEVICE, Paper, paper_device
from tiny_models import FAMILIES, PUBLIC_TEXTS, VOCAB, uneven_examples

from privlora.accounting import Ledger
from privlora.config import settings_from
from privlora.data.examples import Examples
from privlora.data.units import Units
from privlora.evaluation import evaluate_next_token
from privlora.methods import METHODS, SPACES
from privlora.training.assembly import Parts, build_parts, build_step
from privlora.training.inputs import Data
from privlora.training.promise import plan_privacy

# Where a step may read a value of the device back, so that the host waits for all that was launched. A key is a file of
# the package, or a function in it; a value says how often.
READ_BACKS: Mapping[str, str] = {
    "losses.py:_Run.logits": "in the model's own code: whether anything is masked",
    "geometry/bases.py:joint_bases": "once a step: whether products made bases",
    "training/step.py:Step._accumulate": "once a batch: whether all gradients are finite",
    "training/gradients.py:micro_batch_gradients": "once a micro-batch of public texts",
    "mechanisms/nonprivate.py:MeanMechanism.accumulate": "once a micro-batch, without privacy",
    "mechanisms/gaussian.py:GaussianMechanism._take": "once a step, of adaptive clipping",
    # Spans of public gradients.
    "coordinates/public_span.py": "a few times a step",
    "coordinates/span.py:EncodedSpace.partial_sum": "once a micro-batch",
    "coordinates/span.py:SpanCoordinates.decoded_std": "once a step",
    "coordinates/span_choice.py": "a few times a step",
    "coordinates/span_placements.py": "once a step",
    "optimizers/span.py:SpanOptimizer._update": "once a step",
}
# Where a step may compute in float64 on the device, as above; GPUs are slow at it.
DOUBLES: Mapping[str, str] = {
    "adapters/lowrank.py:dense_norms": "norms",
    "adapters/lowrank.py:LowRankAdapter.captured": "norms of whole gradients",
    "coordinates/base.py:Coordinates.weighted_sum": "sums of thousands of units",
    "coordinates/base.py:_in_float64": "sums of thousands of units",
    "coordinates/base.py:_summed": "the same",
    "coordinates/direction.py:DirectionCoordinates.norms_squared": "one number a unit",
    "coordinates/direction.py:DirectionCoordinates.partial_sum": "the same",
    "coordinates/base.py:squares_of_sides": "norms",
    "coordinates/factors.py:FactorCoordinates.module_norms_squared": "norms",
    "coordinates/factors.py:FactorCoordinates.norms_squared": "norms",
    "coordinates/factors.py:FactorCoordinates.to_vector": "of the sum, once a step",
    "coordinates/projected.py:ProjectedCoordinates._squares": "norms",
    "coordinates/projected.py:ProjectedCoordinates.norms_squared": "norms",
    "coordinates/projected.py:ProjectedCoordinates.to_vector": "of the sum, once a step",
    "coordinates/projected.py:WishartCoordinates.norms_squared": "norms",
    "coordinates/public_span.py": "inner products of nearly equal texts",
    "coordinates/span.py": "the same",
    "coordinates/span_choice.py": "the same",
    "coordinates/span_placements.py": "the same",
    "adapters/captured.py:Captured.finite": "one number a module and unit",
    "coordinates/evened.py": "r x r matrices and numbers of units",
    "coordinates/evened.py:root_factors": "roots of r x r matrices",
    "coordinates/tangent.py:TangentCoordinates.module_norms_squared": "norms",
    "coordinates/tangent.py:TangentCoordinates.norms_squared": "norms",
    "coordinates/tangent.py:TangentCoordinates.to_vector": "of the sum, once a step",
    "geometry/bases.py:decomposed": "r x r matrices, in spectral clipping",
    "geometry/fixed_rank.py": "the projection of the sum and of the noise",
    "mechanisms/gaussian.py:GaussianMechanism._clip_weights": "one number a unit",
    "mechanisms/gaussian.py:GaussianMechanism._counted": "one number a unit",
    "mechanisms/gaussian.py:GaussianMechanism._module_weights": "one number a module and unit",
    "mechanisms/gaussian.py:GaussianMechanism._norms": "one number a unit",
    "mechanisms/gaussian.py:GaussianMechanism.accumulate": "one number a unit",
    "mechanisms/noising.py": "noise, until it is in",
    "mechanisms/nonprivate.py:MeanMechanism.release": "of the sum, once a step",
    "training/gradients.py:_differences": "of two losses, one number a unit",
    "optimizers/factor_rite.py:_inverse": "torch's own tolerance, one number",
}
# Where a step may decompose matrices that are too large for CUDA's batched kernels, at rank 16 and 512 features.
LOOPS: Mapping[str, str] = {
    "geometry/bases.py:singular_values": "on the CPU instead, one batch a shape",
    "coordinates/projected.py:ProjectedCoordinates._draw_projections": "QR of drawn columns, a matrix a module",
    "optimizers/factor_rite.py:FactorRite._update": "QR of both factors, a matrix a module",
}
# What read-backs find, where it is not True, 1 or 1.0.
ANSWERS: Mapping[str, Any] = {
    "coordinates/tangent.py:TangentCoordinates._orthonormal": 0.0,
}
FEW = ("q_proj", "o_proj", "up_proj")  # two of one shape, and one
RECORDS = Examples(uneven_examples()[:4], pad_token_id=0)


@pytest.fixture(autouse=True, scope="module")
def _one_block() -> Iterator[None]:
    """Products take public gradients in blocks that suit a cache, each of which would be noted like the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlora.coordinates.public_span._BLOCK", 2**24)
        yield


UNITS = ((0, 1), (2,))


@dataclass(frozen=True)
class Case:
    """A run on paper. units: the records of each one of the batch."""

    row: str = "prism"
    family: str = "llama"
    dtype: torch.dtype = torch.float32
    layers: int = 1
    targets: str | tuple[str, ...] = FEW
    checkpointing: str = "none"
    quantile: float | None = None
    clipping: str | None = None
    units: tuple[tuple[int, ...], ...] = UNITS
    wide: bool = False
    relative: bool = False

    def parts(self) -> Parts:
        method = METHODS[self.row]
        privacy: dict[str, Any] = {"steps": 3, "expected_batch_size": 4, "public_dataset_size": 20}
        privacy |= {"noise_multiplier": 1.0, "delta": 1e-3} if method.private else {"private": False}
        if self.quantile is not None:
            privacy["clip_quantile"] = self.quantile
        given = {
            "model": {"name": "random", "gradient_checkpointing": self.checkpointing},
            "data": {"path": "(in memory)"},
            "adapter": {
                "r": 16 if self.wide else 2,
                "target_modules": self.targets if isinstance(self.targets, str) else list(self.targets),
            },
            "method": {"name": self.row, "relative_rate": self.relative}
            | ({"clipping": self.clipping} if self.clipping else {}),
            "privacy": privacy,
        }
        config = FAMILIES[self.family]()
        config.num_hidden_layers = self.layers
        if self.wide:
            config = hf.LlamaConfig(vocab_size=VOCAB, hidden_size=512, num_hidden_layers=1)
        with DEVICE:
            model = hf.AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        public = Examples(list(PUBLIC_TEXTS)[:3], pad_token_id=0)
        texts = (lambda _: public) if method.public_texts else None
        return build_parts(settings_from(given, source="test"), model, texts=texts)

    def steps(self, paper: Paper, folder: Path) -> Parts:
        """Two steps, from the first batch on noted."""
        parts = self.parts()
        ledger = None
        if METHODS[self.row].private:
            plan = plan_privacy(parts.settings, model=parts.adapter.model)
            ledger = Ledger.create(folder / "ledger.jsonl", plan)
        data = Data(RECORDS, Units(np.arange(len(RECORDS))), Examples([], pad_token_id=0))
        step = build_step(parts, data, ledger)
        paper.forget()
        for _ in range(2):
            step.take([np.array(unit) for unit in self.units])
        return parts


@dataclass(frozen=True)
class Noted:
    """place -> how often, or how many matrices: of two steps; of a state given out and taken in; of an evaluation.

    large: part -> the devices of what it then remembers, numbers of r x r left out.
    """

    read_backs: Mapping[str, int]
    doubles: Mapping[str, int]
    looped: Mapping[str, int]
    resumed: Mapping[str, int]
    evaluated: Mapping[str, int]
    large: Mapping[str, set[torch.device]]


@cache
def noted(case: Case, **answers: Any) -> Noted:
    """Two steps, a state given out and taken in, and an evaluation of what would be exported."""
    with tempfile.TemporaryDirectory() as folder, paper_device({**ANSWERS, **answers}) as paper:
        parts = case.steps(paper, Path(folder))
        read_backs, doubles, looped = dict(paper.read_backs), dict(paper.doubles), dict(paper.looped)
        paper.forget()
        parts.take_states(parts.states())
        resumed = dict(paper.read_backs)
        large = {
            part: {t.device for t in tensors.values() if t.numel() >= 16 * 512}
            for part, tensors in parts.present().items()
        }
        paper.forget()
        parts.install_result()
        evaluate_next_token(parts.adapter.model, RECORDS, max_tokens=16)
        parts.coordinates.install()
        return Noted(read_backs, doubles, looped, resumed, dict(paper.read_backs), large)


BF16: Mapping[str, Any] = {"dtype": torch.bfloat16, "targets": "all-linear"}
ROWS = [Case(row) for row in METHODS]
MODELS = [Case(family=family, targets="all-linear") for family in FAMILIES]
# bfloat16 and checkpointing have to do with no family.
BOTH = [Case(family=family, checkpointing="reentrant", **BF16) for family in FAMILIES]
MORE = [*MODELS[2::2], *BOTH[1:]]
MODELS += BOTH
OTHERS = [
    Case("dp-adamw", checkpointing="non-reentrant", **BF16),
    Case("dp-adamw", quantile=0.5),
    Case("prism", quantile=0.5),
    Case("prism", clipping="per-module"),
    Case("prism", units=()),
    *(Case(row, relative=True) for row in METHODS if SPACES[METHODS[row].space].weight_unit is not None),
]
CASES = [*ROWS, *MODELS, *OTHERS]
WIDE = [Case(row, wide=True) for row in METHODS]


def label(case: Case) -> str:
    given = [f"{getattr(case, f.name)}" for f in fields(case) if getattr(case, f.name) != f.default]
    return "-".join(given) or case.row


def among(table: Mapping[str, str], found: Mapping[str, int]) -> tuple[set[str], set[str]]:
    """Places that the table does not allow, and entries that allowed one."""
    used = {key for key in table for place in found if place == key or place.startswith(f"{key}:")}
    strange = {
        place for place in found if not any(place == key or place.startswith(f"{key}:") for key in used)
    }
    return strange, used


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long) if case in MORE else case for case in CASES],
    ids=label,
)
def test_no_step_reads_back_or_computes_in_float64_where_no_table_says_so(case: Case) -> None:
    found = noted(case)
    assert among(READ_BACKS, found.read_backs)[0] == set()
    assert among(DOUBLES, found.doubles)[0] == set()


def test_no_table_allows_what_nothing_does() -> None:
    found = [noted(case) for case in CASES if case not in MORE]
    for table, places in (
        (READ_BACKS, [each.read_backs for each in found]),
        (DOUBLES, [each.doubles for each in found]),
        (LOOPS, [noted(case).looped for case in WIDE]),
    ):
        assert set(table) == set().union(*(among(table, each)[1] for each in places))


@pytest.mark.parametrize("row", ["prism", "dp-adamw"])
def test_read_backs_are_as_many_whatever_the_modules_and_units(row: str) -> None:
    few = noted(Case(row)).read_backs
    assert few == noted(Case(row, targets="all-linear", layers=2)).read_backs
    assert few == noted(Case(row, units=((0, 1), (2,), (3,)))).read_backs


@pytest.mark.parametrize("case", WIDE, ids=label)
def test_nothing_is_decomposed_one_by_one_where_no_table_says_so(case: Case) -> None:
    assert among(LOOPS, noted(case).looped)[0] == set()


@pytest.mark.parametrize("case", [Case("prism"), Case("dp-adamw")], ids=label)
def test_an_evaluation_reads_back_at_its_end_beside_the_losses_labels(case: Case) -> None:
    found = noted(case).evaluated
    assert {place: count for place, count in found.items() if not place.startswith("losses.py:")} == {
        "evaluation/next_token.py:evaluate_next_token": 2
    }


@pytest.mark.parametrize("case", WIDE, ids=label)
def test_what_is_remembered_lies_on_the_device(case: Case) -> None:
    """Its moments of r x r numbers may stay, and the last release's scores are the CPU's anyway."""
    large = noted(case).large
    assert large["coordinates"] == {DEVICE}
    assert large.get("optimizer", set()) <= {DEVICE}
    assert large.get("average", set()) <= {DEVICE}


def test_a_mix_of_devices_is_found() -> None:
    with paper_device({}):
        there, here = torch.ones(2, 3, device=DEVICE), torch.ones(2, 3)
        for mixed in (
            lambda: there + here,
            lambda: here.add_(there),
            lambda: there @ here.T,
            lambda: torch.cat([there, here]),
            lambda: torch.bmm(there[None], here.T[None]),
        ):
            with pytest.raises((AssertionError, RuntimeError), match="device"):
                mixed()


def test_read_backs_and_float64_are_found() -> None:
    with paper_device({"elsewhere": False}) as paper:
        t = torch.ones(2, 3, device=DEVICE)
        assert not bool(t.any())
        assert t[t > 0].shape == (6,)
        assert (t > 0).nonzero().shape == (6, 2)
        assert torch.equal(t, t)
        assert t.cpu().shape == (2, 3)
        torch.empty(2, 3).copy_(t)
        assert sum(paper.read_backs.values()) == 6
        t[t > 0] = 0.0  # filled, so that nobody has to count
        t.double()
        assert sum(paper.read_backs.values()) == 6
        assert sum(paper.doubles.values()) == 1
