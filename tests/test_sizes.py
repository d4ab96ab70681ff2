"""Sizes of memory in words."""

from __future__ import annotations

import pytest

from privlora.pages.numbers import in_one_unit

MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "written"),
    [
        ([0.4 * MIB, 154 * MIB], ["0.4 MiB", "154 MiB"]),
        ([300 * 1024], ["300 KiB"]),
        ([20 * 1024, 3000 * MIB], ["0.0195 MiB", "3,000 MiB"]),
        ([5.07 * MIB, 16 * 1024 * MIB], ["5.07 MiB", "16,384 MiB"]),
        ([15 * 1024 * MIB, 1.2 * 1024 * MIB], ["15 GiB", "1.2 GiB"]),
        ([1, 1024 * MIB], ["less than 0.01 MiB", "1,024 MiB"]),
        ([], []),
    ],
)
def test_one_unit_shows_all(sizes: list[float], written: list[str]) -> None:
    say = in_one_unit(*sizes)
    assert [say(size) for size in sizes] == written
    assert say(0).startswith("0 ")
