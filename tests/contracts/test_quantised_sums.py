"""On a packed base, too, nobody moves the released sum by more than C, whatever company rounds alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from method_cases import Case
from quantised_models import INT8, NF4, packed_model
from tiny_models import random_example

from privlora.adapters import LowRankAdapter
from privlora.methods import METHODS, build


@pytest.mark.parametrize(("compute", "slack"), [("float32", 3e-4), ("bfloat16", 0.02)])
def test_one_record_moves_the_sum_of_a_packed_model_by_at_most_c(compute: str, slack: float) -> None:
    """Beside 47 copies of one record, which are all rounded alike, the longest leaves."""
    model = packed_model({**NF4, "bnb_4bit_compute_dtype": compute}, louder=4.0)
    change, part = _moved_by_the_longest(model, slack)
    assert 0.9 < change <= 1
    assert part < (0.01 if compute == "float32" else 0.1)


def test_one_record_moves_the_sum_of_an_8_bit_model_by_at_most_c() -> None:
    model = packed_model({**INT8, "llm_int8_threshold": 1.0}, louder=8.0)
    change, part = _moved_by_the_longest(model, 0.02)
    assert 0.9 < change <= 1
    assert part < 1e-4


def _moved_by_the_longest(model: Any, slack: float) -> tuple[float, float]:
    """How far the clipped sum moves, in units of C, and how far the part of those that stay."""
    rng = np.random.default_rng(64)
    copy = random_example(rng, 17)
    adapter = LowRankAdapter(model, rank=3).attach()
    case = Case(METHODS["prism"], adapter, *build(METHODS["prism"], adapter, init="random"))
    assert case.mechanism().slack == slack
    examples = [random_example(rng, 60), *[copy] * 47]
    whole, stay, own = (
        case.clipped_sum(e, clip_norm=1e-3) / 1e-3 for e in (examples, examples[1:], examples[:1])
    )
    adapter.detach()
    return float((whole - stay).norm()), float((whole - stay - own).norm())
