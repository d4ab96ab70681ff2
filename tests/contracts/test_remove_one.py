"""Remove-one sensitivity by brute force: rows of the table x families x dtypes x starts x ways to clip x company.

The whole product would be thousands of cases. Tested are all that it takes for every pair of values of two of them to
meet (``all_pairs``), and every start of every space in both dtypes, on two families by turns. A mechanism sees a space
and never an optimizer: where a pair meets again in another row of the same space, the long tests look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from method_cases import (
    INF_TOKEN,
    NAN_TOKEN,
    RANK,
    Case,
    flat,
    lean_once,
    measure_whole_gradients_alone,
    with_token,
    write_factors,
)
from tiny_models import random_example, tiny_model
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.adapters.targets import ALL_LINEAR, feature_sizes, find_targets
from privlora.coordinates.starts import Subspaces
from privlora.data.examples import Examples
from privlora.methods import METHODS, build
from privlora.names import PUBLIC_GRADIENT, RANDOM, SPECTRAL_SPLIT, W0_SUBSPACE
from privlora.training.texts.public_gradients import mean_gradient_subspaces

ADAPTER = "adapter"  # the folder of one that was trained before
STARTS = {
    "tangent-lifted": (SPECTRAL_SPLIT, ADAPTER),
    "tangent": (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT, SPECTRAL_SPLIT, ADAPTER),
    "factors": (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT, SPECTRAL_SPLIT, ADAPTER),
    "one-factor": (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT, SPECTRAL_SPLIT, ADAPTER),
    "direction": (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT, SPECTRAL_SPLIT, ADAPTER),
    "projected": (RANDOM, ADAPTER),
    "wishart": (RANDOM, ADAPTER),
    **dict.fromkeys(
        ("coefficients", "projected-span", "span-and-residual"),
        (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT, SPECTRAL_SPLIT, ADAPTER),
    ),
    **dict.fromkeys(
        ("tangent-coefficients", "tangent-projected-span"),
        (RANDOM, W0_SUBSPACE, PUBLIC_GRADIENT, SPECTRAL_SPLIT, ADAPTER),
    ),
}
FAMILIES = ("llama", "gpt2", "gpt-neox", "gemma", "qwen3", "phi", "mistral", "mixtral")
DTYPES = ("float32", "bfloat16")
CLIP_NORM = 1e-3  # below all norms: everybody is clipped
WIDTH = 16  # of the tiny models


class Cell(NamedTuple):
    row: str
    start: str
    family: str
    dtype: str
    clipping: str


ROWS = [row for row in METHODS.values() if row.private]
POSSIBLE = [
    Cell(row.name, start, family, dtype, clipping)
    for row in ROWS
    for start in STARTS[row.space]
    for family, dtype, clipping in product(FAMILIES, DTYPES, row.clippings)
    if not (row.space == "wishart" and dtype == "bfloat16")  # refused
]


def pairs_of(cell: Cell) -> set[tuple[int, int, str, str]]:
    return {(i, j, cell[i], cell[j]) for i, j in combinations(range(len(cell)), 2)}


def space_pairs_of(cell: Cell) -> set[tuple[int, int, str, str]]:
    """The same with the row's space in its place, and that the row is there."""
    return pairs_of(cell._replace(row=METHODS[cell.row].space)) | {(0, 0, cell.row, cell.row)}


def all_pairs(possible: list[Cell], pairs: Callable[[Cell], set[Any]] = pairs_of) -> list[Cell]:
    """Cells in which every pair of values that is possible occurs, chosen greedily."""
    by_cell = [(cell, pairs(cell)) for cell in possible]
    missing = set().union(*(found for _, found in by_cell))
    chosen = []
    for least in range(11, 0, -1):
        for cell, found in by_cell:
            if len(found & missing) >= least:
                chosen.append(cell)
                missing -= found
    return chosen


def every_start(families: tuple[str, ...]) -> list[Cell]:
    """One row of each space from each of its starts; families and ways to clip take turns. Spans start as what they
    span."""
    rows = {row.space: row for row in reversed(ROWS) if not row.public_texts}.values()
    starts = [(row, start, dtype) for row in rows for start, dtype in product(STARTS[row.space], DTYPES)]
    cells = [
        (row, start, families[(i + i // 2) % len(families)], dtype)
        for i, (row, start, dtype) in enumerate(starts)
    ]
    turns = [
        Cell(row.name, start, family, dtype, row.clippings[i % len(row.clippings)])
        for i, (row, start, family, dtype) in enumerate(cells)
    ]
    return [cell for cell in turns if cell in POSSIBLE]


CELLS = list(dict.fromkeys([*all_pairs(POSSIBLE), *every_start(("llama", "gpt2"))]))
SHORT = all_pairs(CELLS, space_pairs_of)
MARKED = [pytest.param(cell, marks=() if cell in SHORT else pytest.mark.long) for cell in CELLS]


def batch() -> tuple[list[Any], list[Any]]:
    """Records and units: a user of two records, short, half without labels, very long, NaN, infinite, empty."""
    rng = np.random.default_rng(5)
    records = [random_example(rng, n, labelled) for n, labelled in ((9, None), (5, 2), (2, None), (14, 4))]
    records += [random_example(rng, 58)]
    records += [with_token(random_example(rng, 8), token) for token in (NAN_TOKEN, INF_TOKEN)]
    records += [random_example(rng, 0)]
    return records, [np.array([0, 1]), 2, 3, 4, 5, 6, 7]


USER, LONG, ORDINARY = 0, 3, range(4)
BAD = (4, 5)
FINITE = (*ORDINARY, 6)


@cache
def model_of(family: str, dtype: str) -> Any:
    model = tiny_model(family, dtype=getattr(torch, dtype), layers=1)
    # Where embeddings are tied to the head, a NaN among them would be in every record's loss.
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    embeddings = model.get_input_embeddings().weight.data
    embeddings[NAN_TOKEN], embeddings[INF_TOKEN] = float("nan"), float("inf")
    return model


@cache
def subspaces_of(family: str, dtype: str) -> Subspaces:
    rng = np.random.default_rng(8)
    adapter = LowRankAdapter(model_of(family, dtype), rank=RANK)
    texts = Examples([random_example(rng, 6) for _ in range(2)], pad_token_id=0)
    return mean_gradient_subspaces(adapter, texts, seed=0, max_tokens=10**6)


def modules_seen_whole(model: Any) -> str:
    """Those of n = r: what a projection leaves of their gradients is as long as they are."""
    sizes = {name: feature_sizes(model.get_submodule(name)) for name in find_targets(model, ALL_LINEAR)}
    return "|".join(name.replace(".", r"\.") for name, (m, n) in sizes.items() if n == WIDTH <= m)


@contextmanager
def case_of(cell: Cell, folder: Path) -> Iterator[Case]:
    row, model = METHODS[cell.row], model_of(cell.family, cell.dtype)
    dense = row.space == "wishart"
    rank = WIDTH if dense else RANK
    with LowRankAdapter(model, rank, modules_seen_whole(model) if dense else ALL_LINEAR) as adapter:
        init = cell.start
        if init == ADAPTER:
            init = str(folder / ADAPTER)
            write_factors(Path(init), adapter, 0.2)
        coordinates, optimizer = build(
            row,
            adapter,
            init=init,
            lora_alpha=2.0 * rank,
            subspaces=subspaces_of(cell.family, cell.dtype) if init == PUBLIC_GRADIENT else None,
        )
        lean_once(coordinates, optimizer)
        yield Case(row, adapter, coordinates, optimizer)


def least(cell: Cell, unit: int) -> float:
    """Of C: what an ordinary unit moves. Less by bfloat16's slack, and by automatic clipping of small gradients."""
    if METHODS[cell.row].space == "wishart" and unit == USER:
        return 0.5  # the norms of a user's records are added up
    if METHODS[cell.row].space == "span-and-residual":
        return 0.2  # few units reach the bounds of both parts
    if cell.clipping == "per-module":
        return 0.6  # some modules have no gradient of a short record, or a weak one
    return 0.94 if cell.clipping == "automatic" else 0.95


def clipped(
    case: Case, records: list[Any], units: list[Any], clipping: str, tokens: int | None = None
) -> Tensor:
    """What noise would be added to, in units of C."""
    mechanism = case.mechanism(clip_norm=CLIP_NORM, clipping=clipping)
    case.feed(mechanism, records, units, max_tokens=tokens)
    return flat(mechanism.clipped_sum()) / CLIP_NORM


@pytest.mark.parametrize(
    "cell",
    MARKED,
    ids="-".join,
)
def test_no_unit_moves_the_sum_by_more_than_c(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, units = batch()
    if METHODS[cell.row].space == "wishart":
        measure_whole_gradients_alone(monkeypatch)
    with case_of(cell, tmp_path) as case:
        # Beside a unit that is not finite each is computed by itself, which takes long, so only some leave those.
        for present, leaving in ((FINITE, FINITE), ((*ORDINARY[:2], *BAD), (USER, *BAD))):
            whole = clipped(case, records, [units[k] for k in present], cell.clipping)
            for k in leaving:
                rest = [units[i] for i in present if i != k]
                # Another company, and another split: everybody at once, two at a time, or each alone.
                split = (None, 40, 1)[k % 3]
                moved = float((whole - clipped(case, records, rest, cell.clipping, split)).norm())
                assert moved <= 1, (k, moved)
                assert moved > least(cell, k) if k in ORDINARY else moved < 0.1, (k, moved)
        case.step(case.mechanism(seed=7), [records[i] for i in (0, 3)])
        ordinary = [units[k] for k in ORDINARY]
        whole = clipped(case, records, ordinary, cell.clipping)
        for k in (USER, LONG):
            rest = ordinary[:k] + ordinary[k + 1 :]
            moved = float((whole - clipped(case, records, rest, cell.clipping)).norm())
            assert least(cell, k) < moved <= 1, (k, moved)


def test_every_row_start_family_dtype_and_clipping_is_in_it() -> None:
    assert set().union(*map(pairs_of, CELLS)) == set().union(*map(pairs_of, POSSIBLE))
    assert {cell.row for cell in CELLS} == {row.name for row in METHODS.values() if row.private}
    assert set().union(*map(space_pairs_of, SHORT)) == set().union(*map(space_pairs_of, POSSIBLE))
