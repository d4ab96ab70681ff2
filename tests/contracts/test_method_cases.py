"""What `make test` keeps of the contracts' cases."""

from __future__ import annotations

from method_cases import CASES, FURTHER, PRIVATE, STATES

from privlora.methods import METHODS


def test_every_row_and_every_state_is_looked_at() -> None:
    kept = [case for case in CASES if case not in FURTHER]
    assert {row for (row, _), _ in kept} == {row.name for row in METHODS.values() if row.private}
    assert {state for _, state in kept} == set(STATES)
    for state in STATES:
        assert {METHODS[row].space for (row, _), of in kept if of == state} == {
            METHODS[row].space for row, _ in PRIVATE
        }
