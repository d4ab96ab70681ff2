from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from privlora.rounding import rounded_up


@given(st.floats(0, 1e4))
def test_an_upper_bound_is_never_rounded_down(value: float) -> None:
    assert value * (1 - 1e-11) <= float(rounded_up(value)) <= value + 0.001 + 1e-9


def test_exact_decimals_stay() -> None:
    assert [rounded_up(v) for v in (3.0, 4.963, 0.0, 2.0001)] == ["3.000", "4.963", "0.000", "2.001"]
    assert [rounded_up(None), rounded_up(math.inf)] == ["–", "∞"]
