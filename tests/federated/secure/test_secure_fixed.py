"""Tensors become integers and come back within half a grid step; what would wrap around is refused."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from privlora.errors import ConfigError, RunError
from privlora.federated.secure import FixedPoint, Layout, decode, digest_of, encode


def tensors(seed=0, scale=1.0):
    draws = torch.Generator().manual_seed(seed)
    shapes = {"b.right": (2, 3, 2), "a.left": (2, 5, 2), "weight": ()}
    return {name: scale * (2 * torch.rand(shape, generator=draws) - 1) for name, shape in shapes.items()}


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_comes_back_within_the_stated_error(bits):
    point, clients = FixedPoint(bits, 1.5, 7), [tensors(seed, 1.5) for seed in range(7)]
    layout = Layout.of(clients[0])
    total = np.zeros(layout.length, np.uint32 if bits == 32 else np.uint64)
    for client in clients:
        total += encode(client, layout, point)
    assert point.error < (1e-6 if bits == 32 else 1e-14)
    for name, tensor in decode(total, layout, point).items():
        right = sum(client[name].double() for client in clients)
        assert tensor.dtype == torch.float64
        assert tensor.shape == right.shape
        assert (tensor - right).abs().max() <= point.error + 1e-14


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("limit", [1e-3, 1.0, 1.5, 8.0, 1e6, 2.0**20, 2.0**31 - 0.25])
@pytest.mark.parametrize("clients", [1, 2, 10, 12])
def test_no_sum_wraps_around_and_no_bit_is_wasted(bits, limit, clients):
    point = FixedPoint(bits, limit, clients)

    def largest(fraction):
        return clients * (Fraction(limit) * Fraction(2) ** fraction + Fraction(1, 2))

    assert largest(point.fraction) < 2 ** (bits - 1)
    assert point.fraction == 52 or largest(point.fraction + 1) >= 2 ** (bits - 1)
    for edge in (limit, -limit):
        one = {"x": torch.full((3,), edge, dtype=torch.float64)}
        layout = Layout.of(one)
        total = encode(one, layout, point) * np.array(clients, encode(one, layout, point).dtype)
        assert (decode(total, layout, point)["x"] - clients * edge).abs().max() <= point.error + 1e-15 * abs(
            edge
        ) * 12


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), -float("inf"), 1.0000001, -2.0])
def test_entries_that_cannot_be_summed_are_refused(entry):
    values = {"x": torch.tensor([0.0, entry], dtype=torch.float64)}
    with pytest.raises(RunError, match="not a number, or is beyond 1") as caught:
        encode(values, Layout.of(values), FixedPoint(32, 1.0, 3))
    assert "1.0000001" not in str(caught.value)


def test_tensors_of_another_layout_are_refused():
    layout, point = Layout.of(tensors()), FixedPoint(32, 1.0, 3)
    for changed in (
        tensors() | {"more": torch.zeros(1)},
        {"weight": torch.zeros(())},
        tensors() | {"a.left": torch.zeros(2, 2, 5)},
    ):
        with pytest.raises(RunError, match="names and shapes"):
            encode(changed, layout, point)
    with pytest.raises(RunError):
        decode(np.zeros(layout.length + 1, np.uint32), layout, point)


def test_the_order_does_not_depend_on_the_order_of_names():
    values, point = tensors(), FixedPoint(64, 1.0, 3)
    turned = dict(reversed(values.items()))
    layout = Layout.of(values)
    assert Layout.of(turned) == layout
    np.testing.assert_array_equal(encode(values, layout, point), encode(turned, layout, point))
    assert layout.length == 12 + 20 + 1


@pytest.mark.parametrize(
    ("limit", "clients"), [(0.0, 3), (-1.0, 3), (float("nan"), 3), (float("inf"), 3), (1.0, 0)]
)
def test_bounds_that_bound_nothing(limit, clients):
    with pytest.raises(ConfigError):
        FixedPoint(32, limit, clients)


def test_the_digest_sees_every_bit_that_was_sent():
    sent = {"Q": torch.arange(6.0).reshape(2, 3)}
    changed = sent["Q"].clone()
    changed.view(torch.int32)[1, 2] ^= 1
    others = [
        digest_of({"Q": changed}),
        digest_of({"Q": sent["Q"].double()}),
        digest_of({"Q": sent["Q"].reshape(3, 2)}),
        digest_of({"Q": sent["Q"].t()}),
        digest_of({"P": sent["Q"]}),
        digest_of(sent | {"R": torch.zeros(0)}),
        digest_of({}),
        digest_of(sent, {"seed": 1}),
        digest_of(sent, {"seed": 2}),
        digest_of(sent, {"seed": 1.0}),
    ]
    assert len({digest_of(sent), *others}) == len(others) + 1
    assert digest_of(sent) == digest_of({"Q": sent["Q"].clone()}, {})
    assert digest_of({"h": torch.ones(3, dtype=torch.bfloat16), "s": torch.tensor(1)})
