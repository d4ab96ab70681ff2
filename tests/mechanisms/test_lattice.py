"""Lattices: as fine as the ring allows, with exactly the noise that is asked for, and no wrapping around."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from privlora.errors import ConfigError, PrivacyError
from privlora.mechanisms import Lattice, Layout, lattice_for

PLAN: dict[str, Any] = {
    "clip_norm": 0.7,
    "noise_multiplier": 0.9,
    "expected_batch_size": 64.0,
    "entries": 5000,
    "clients": 10,
    "survivors": 6,
}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"noise_multiplier": 30.0},
        {"survivors": 1},
        {"entries": 1},
        {"clip_norm": 1e-8},
        {"clients": 2000},
    ],
)
def test_the_noise_is_what_is_asked_for(change: dict[str, Any], bits: int) -> None:
    plan = {**PLAN, **change}
    lattice = lattice_for(**plan, bits=bits)
    reach = plan["clip_norm"] + lattice.width * math.sqrt(plan["entries"])
    usable = plan["survivors"] * lattice.share_std**2 - 9
    assert lattice.width * math.sqrt(usable) / reach == pytest.approx(plan["noise_multiplier"], rel=1e-12)
    assert lattice.noise_multiplier(plan["clip_norm"]) >= plan["noise_multiplier"] * (1 - 1e-15)
    assert math.frexp(lattice.width)[0] == 0.5
    assert reach <= 1.01 * plan["clip_norm"]


def demand(lattice: Lattice, width: float) -> float:
    """Largest entry that has to fit, in units of ``width``: 2 b units at C and 12 deviations of all clients' noise."""
    signal = 2 * PLAN["expected_batch_size"] * PLAN["clip_norm"]
    return (signal + 12 * lattice.noise_std(PLAN["clients"])) / width


def test_32_bits_are_used_but_for_one() -> None:
    lattice = lattice_for(**PLAN)
    assert lattice.bits == 32
    assert lattice.dtype == np.uint32
    assert 2**30 * 0.99 < demand(lattice, lattice.width) < 2**31


def test_64_bits_go_as_far_as_float64_and_the_sampler() -> None:
    lattice = lattice_for(**PLAN, bits=64)
    assert lattice.dtype == np.uint64
    assert 2**51 * 0.99 < demand(lattice, lattice.width) < 2**52 or 2**39 < lattice.share_std <= 2**40
    assert lattice_for(**{**PLAN, "noise_multiplier": 1e4}, bits=64).share_std <= 2**40


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [32, 64])
def test_the_largest_sum_that_is_planned_for_does_not_wrap_around(bits: int, sign: int) -> None:
    lattice = lattice_for(**PLAN, bits=bits)
    each = sign * 2 * PLAN["expected_batch_size"] * PLAN["clip_norm"] / PLAN["clients"]
    noise = sign * round(12 * lattice.share_std / math.sqrt(PLAN["clients"]))
    share = lattice.reduced(lattice.rounded(torch.full((3,), each, dtype=torch.float64)) + noise)
    total = np.sum([share] * PLAN["clients"], axis=0, dtype=lattice.dtype)
    exact = PLAN["clients"] * (each + noise * lattice.width)
    assert lattice.opened(total) == pytest.approx([exact] * 3, abs=lattice.width * PLAN["clients"])


@pytest.mark.parametrize("bits", [32, 64])
def test_ring_integers_are_the_integers_modulo_their_number(bits: int) -> None:
    lattice = Lattice(0.25, 8.0, 5, 1, bits)
    integers = np.array([0, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), 5], dtype=np.int64)
    ring = lattice.reduced(integers.copy())
    assert [int(x) for x in ring] == [int(x) % 2**bits for x in integers]
    assert lattice.opened(ring).tolist() == (integers * 0.25).tolist()
    if bits == 32:
        assert lattice.opened(lattice.reduced(np.array([2**31 + 3]))).tolist() == [(3 - 2**31) * 0.25]


def test_rounding_is_to_the_nearest_and_huge_sums_are_cut_off() -> None:
    lattice = Lattice(0.25, 8.0, 6, 1)
    values = torch.tensor([0.1, -0.13, 0.375, 1e30, -1e300, 7.0], dtype=torch.float64)
    assert lattice.rounded(values).tolist() == [0, -1, 2, 2**62, -(2**62), 28]


@pytest.mark.parametrize("name", ["clip_norm", "noise_multiplier", "expected_batch_size"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_unusable_numbers_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        lattice_for(**{**PLAN, name: value})


@pytest.mark.parametrize("name", ["entries", "clients", "survivors"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_unusable_counts_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        lattice_for(**{**PLAN, name: value})


def test_what_cannot_be_done_says_how_it_can() -> None:
    with pytest.raises(ConfigError, match="bits=64"):
        lattice_for(**{**PLAN, "entries": 40_000_000, "expected_batch_size": 1e5})
    assert lattice_for(**{**PLAN, "entries": 40_000_000, "expected_batch_size": 1e5}, bits=64)
    with pytest.raises(ConfigError, match="survivors of 10 clients"):
        lattice_for(**{**PLAN, "survivors": 11})
    with pytest.raises(ConfigError, match="32 or 64"):
        lattice_for(**PLAN, bits=16)
    with pytest.raises(ConfigError, match="lattice units"):
        lattice_for(**{**PLAN, "noise_multiplier": 1e-9})


@pytest.mark.parametrize(
    "change",
    [{"width": 0.3}, {"width": 0.0}, {"share_std": 4.9}, {"share_std": 2.0**41}, {"bits": 8}, {"entries": 0}],
)
def test_a_lattice_outside_of_the_accounting_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Lattice(**{"width": 0.5, "share_std": 8.0, "entries": 3, "survivors": 2, **change})


# --- the order of entries ---


def test_a_client_of_several_at_one_point_has_the_vector_it_would_have_alone() -> None:
    clients, generator = 3, torch.Generator().manual_seed(1)
    shapes = (((2, 3, 3), (2, 4, 3)), ((1, 5),))
    vectors = [
        [tuple(torch.randn(s, generator=generator) for s in parts) for parts in shapes]
        for _ in range(clients)
    ]
    pairs = zip(*vectors, strict=True)
    stacked = [tuple(torch.cat(ts) for ts in zip(*parts, strict=True)) for parts in pairs]
    layout = Layout(shapes)
    flat = layout.flat(stacked, clients)
    assert layout.entries == 2 * 9 + 2 * 12 + 5
    assert flat.dtype == torch.float64
    assert torch.equal(flat, torch.cat([layout.flat(vector) for vector in vectors]))
    for some, others in zip(layout.vector(flat[1]), vectors[1], strict=True):
        assert all(torch.equal(a, b.double()) for a, b in zip(some, others, strict=True))
    # Groups, then tensors, then rows.
    assert flat[0][:9].tolist() == vectors[0][0][0][0].flatten().double().tolist()
    assert flat[0][18:30].tolist() == vectors[0][0][1][0].flatten().double().tolist()


def test_other_shapes_have_no_place() -> None:
    with pytest.raises(PrivacyError, match="shapes"):
        Layout((((2, 3),),)).flat([(torch.zeros(3, 2),)])
