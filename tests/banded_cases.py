"""A tiny run with correlated noise, and what its steps drew, noted beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_cases import PRIVACY, RECORDS
from safetensors import safe_open

from privlora.data.sampling import CyclicPoissonSampler
from privlora.mechanisms import CorrelatedNoise

BANDS = 3
BANDED = {**PRIVACY, "bands": BANDS}
FLAT = "dp-adamw"  # whose coordinates never turn


@dataclass
class Seen:
    """Of one step, as the ledger numbers it: whose turn it was, and its noise, all entries in one row."""

    step: int
    drawn: list[int]
    white: torch.Tensor
    noise: torch.Tensor


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Write what each step drew into ``folder``, before it is released."""
    folder.mkdir(exist_ok=True)
    draw, follow = CyclicPoissonSampler.draw, CorrelatedNoise.next
    drawn: list[list[int]] = [[]]

    def noted_draw(self: CyclicPoissonSampler) -> np.ndarray:
        found = draw(self)
        drawn[0] = found.tolist()
        return found

    def flat(vector: Any) -> torch.Tensor:
        return torch.cat([t.flatten() for parts in vector for t in parts]).clone()

    def noted_next(self: CorrelatedNoise, step: int, white: Any) -> Any:
        given = white()
        made = follow(self, step, lambda: given)
        half = folder / f"{step}.half"
        torch.save(vars(Seen(step, drawn[0], flat(given), flat(made))), half)
        os.replace(half, folder / f"{step}.pt")
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CyclicPoissonSampler, "draw", noted_draw)
        patch.setattr(CorrelatedNoise, "next", noted_next)
        yield


def seen(folder: Path) -> dict[int, Seen]:
    found = [Seen(**torch.load(path, weights_only=True)) for path in folder.glob("*.pt")]
    return {each.step: each for each in found}


def check_turns(run: Path, steps: dict[int, Seen]) -> None:
    """Every unit is drawn in steps of one class alone, that of its place under the run's key."""
    key = int(json.loads((run / "private/cycles.json").read_text())["key"], 16)
    for step, each in steps.items():
        members = CyclicPoissonSampler(len(RECORDS), 1.0, BANDS, key=key, charged=lambda s=step: s - 1).draw()
        assert set(each.drawn) <= set(members.tolist())


def begins(run: Path, steps: dict[int, Seen]) -> list[int]:
    """Steps whose noise takes nothing back. Of all others it has to be the row of C^-1 since the last of them."""
    c = json.loads((run / "private/cycles.json").read_text())["coefficients"]
    anew: list[int] = []
    for step in sorted(steps):
        each = steps[step]
        if torch.allclose(each.noise * c[0], each.white, rtol=0, atol=1e-12):
            anew.append(step)
            continue
        past = [k for k in range(1, BANDS) if step - k >= anew[-1]]
        total = c[0] * each.noise + sum(c[k] * steps[step - k].noise for k in past)
        assert torch.allclose(total, each.white, rtol=0, atol=1e-9)
    return anew


def kept_noise(run: Path) -> list[str]:
    with safe_open(run / "private/checkpoint.safetensors", framework="pt") as file:
        return [name for name in file.keys() if name.startswith("noise/")]  # noqa: SIM118 - not a dict


def begins_where_known(run: Path, steps: dict[int, Seen]) -> list[int]:
    """``begins``, of the parts between steps that a kill let nobody see."""
    found: list[int] = []
    part: dict[int, Seen] = {}
    for step in sorted(steps):
        if part and step - 1 not in part:
            found, part = found + begins(run, part), {}
        part[step] = steps[step]
    return found + begins(run, part)
