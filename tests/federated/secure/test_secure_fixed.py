"""Tensors become integers and come back within half a grid step; what would wrap around is refused."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from privlora.errors import RunError
from privlora.federated.secure.masks import LIMIT, _fraction_of, agreed_digest, decode, encode
from privlora.ranges import MOST_CLIENTS


def tensors(seed=0, scale=1.0):
    draws = torch.Generator().manual_seed(seed)
    shapes = {"b.right": (2, 3, 2), "a.left": (2, 5, 2), "weight": ()}
    return {name: scale * (2 * torch.rand(shape, generator=draws) - 1) for name, shape in shapes.items()}


def error_of(clients):
    return clients * 2.0 ** -(_fraction_of(clients) + 1)


def test_a_sum_comes_back_within_the_stated_error():
    clients = [tensors(seed, 1.5) for seed in range(7)]
    shapes = {name: tuple(tensor.shape) for name, tensor in clients[0].items()}
    total = sum(encode(client, 7) for client in clients)
    assert error_of(7) < 1e-13
    for name, tensor in decode(total, shapes, 7).items():
        right = sum(client[name].double() for client in clients)
        assert tensor.dtype == torch.float64
        assert tensor.shape == right.shape
        assert (tensor - right).abs().max() <= error_of(7) + 1e-14
    with pytest.raises(RunError):
        decode(total[1:], shapes, 7)


@pytest.mark.parametrize("clients", [1, 2, 10, 12, MOST_CLIENTS])
def test_no_sum_wraps_around_and_no_bit_is_wasted(clients):
    def largest(fraction):
        return clients * (Fraction(LIMIT) * Fraction(2) ** fraction + Fraction(1, 2))

    fraction = _fraction_of(clients)
    assert largest(fraction) < 2**63
    assert fraction == 52 or largest(fraction + 1) >= 2**63
    for edge in (LIMIT, -LIMIT):
        total = encode({"x": torch.full((3,), edge)}, clients) * np.uint64(clients)
        off = decode(total, {"x": (3,)}, clients)["x"] - clients * edge
        assert off.abs().max() <= error_of(clients) + 1e-15 * LIMIT * clients


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), -float("inf"), 4096.001, -5000.0])
def test_entries_that_cannot_be_summed_are_refused(entry):
    with pytest.raises(RunError, match="not a number, or is beyond 4096") as caught:
        encode({"x": torch.tensor([0.0, entry], dtype=torch.float64)}, 3)
    assert "4096.001" not in str(caught.value)


def test_the_order_does_not_depend_on_the_order_of_names():
    values = tensors()
    encoded = encode(values, 3)
    np.testing.assert_array_equal(encoded, encode(dict(reversed(values.items())), 3))
    assert len(encoded) == 12 + 20 + 1


def test_the_digest_sees_every_bit_that_was_sent():
    sent = {"Q": torch.arange(6.0).reshape(2, 3)}
    changed = sent["Q"].clone()
    changed.view(torch.int32)[1, 2] ^= 1
    others = [
        agreed_digest("", {"Q": changed}),
        agreed_digest("", {"Q": sent["Q"].double()}),
        agreed_digest("", {"Q": sent["Q"].reshape(3, 2)}),
        agreed_digest("", {"Q": sent["Q"].t()}),
        agreed_digest("", {"P": sent["Q"]}),
        agreed_digest("", sent | {"R": torch.zeros(0)}),
        agreed_digest("", {}),
        agreed_digest("1", sent),
    ]
    assert len({agreed_digest("", sent), *others}) == len(others) + 1
    assert agreed_digest("", sent) == agreed_digest("", {"Q": sent["Q"].clone()})
    assert agreed_digest("", {"h": torch.ones(3, dtype=torch.bfloat16), "s": torch.tensor(1)})
