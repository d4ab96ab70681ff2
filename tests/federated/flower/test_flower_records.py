"""What goes into Flower's records comes out of them, bit for bit, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.flower.records import DTYPES, message_type, packed, read_reply, read_request
from privlora.federated.messages import KINDS, Number, Reply, Request

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any dtype, from any bits, of 0 to 3 dimensions, which may be 0 long, and not always in row order."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(torch.tensor(shape).prod()) * dtype.itemsize
    bits = draw(st.binary(min_size=size, max_size=size))
    empty = torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(bits), dtype=dtype).reshape(shape) if size else empty
    return tensor.T if len(shape) == 2 and draw(st.booleans()) else tensor


def enveloped(content: RecordDict, kind: str = "train", number: int = 1) -> Message:
    metadata = Metadata(1, "", 1, 2, "", str(number), 0.0, 60.0, message_type(kind))
    return Message(metadata=metadata, content=content)  # type: ignore[call-overload]


def carried(content: RecordDict) -> RecordDict:
    """As it is after Flower took it apart, sent it and put it together."""
    parts = {number: part.deflate() for number, part in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, parts)  # type: ignore[return-value]


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, whatever is no number."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8).tolist() for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and bits[0] == bits[1]


def equal(left: Number, right: Number) -> bool:
    return type(left) is type(right) and (left == right or left != left)


@settings(max_examples=150, deadline=None)
@given(
    client=NAMES,
    kind=st.sampled_from(KINDS),
    number=st.integers(0, 10**6),
    arrays=st.dictionaries(NAMES, tensors(), max_size=4),
    values=st.dictionaries(NAMES, NUMBERS, max_size=4),
    refused=st.none() | NAMES,
)
def test_round_trip(
    client: str,
    kind: str,
    number: int,
    arrays: dict[str, Tensor],
    values: dict[str, Number],
    refused: str | None,
) -> None:
    reply = Reply(client, kind, number, arrays, values, refused)
    back = read_reply(enveloped(carried(packed(reply)), kind, number))
    assert (back.client, back.kind, back.round, back.refused) == (client, kind, number, refused)
    assert back.tensors.keys() == arrays.keys()
    assert back.values.keys() == values.keys()
    assert all(same(back.tensors[name], arrays[name]) for name in arrays)
    assert all(equal(back.values[name], values[name]) for name in values)
    request = read_request(
        enveloped(carried(packed(Request(client, kind, number, arrays, values))), kind, number)
    )
    assert (request.client, request.kind, request.round) == (client, kind, number)
    assert all(same(request.tensors[name], arrays[name]) for name in arrays)
    turned = Request(client, kind, number, dict(reversed(arrays.items())), dict(reversed(values.items())))
    assert packed(turned).object_id == packed(request).object_id


def test_what_is_read_has_no_tie_to_what_was_sent() -> None:
    sent = torch.zeros(3, requires_grad=True)
    content = packed(Request("a", "train", 1, {"x": sent}, {"k": True}))
    first = read_request(enveloped(content))
    assert not first.tensors["x"].requires_grad
    assert type(first.values["k"]) is int
    first.tensors["x"].add_(1)
    assert read_request(enveloped(content)).tensors["x"].tolist() == [0, 0, 0] == sent.tolist()


@pytest.mark.parametrize(
    "value", [2**63, [1], None, *(torch.zeros(2, dtype=t) for t in (torch.bool, torch.cfloat))]
)
def test_what_no_message_carries_is_not_written(value: Any) -> None:
    name = "tensors" if isinstance(value, Tensor) else "values"
    with pytest.raises(RunError):
        packed(Request("a", "train", 1, **{name: {"x": value}}))
    with pytest.raises(RunError):
        message_type("evaluate")


def altered(change: Callable[[RecordDict], None]) -> Message:
    reply = Reply("a", "train", 1, {"x": torch.ones(2, 3)}, {"k": 1})
    content = packed(reply)
    change(content)
    return enveloped(content)


def array(
    dtype: str = "float32", shape: tuple[int, ...] = (2, 3), stype: str = "privlora.numbers", size: int = 24
):
    def change(content: RecordDict) -> None:
        content["tensors"] = ArrayRecord({"x": Array(dtype, shape, stype, bytes(size))})

    return change


def put(name: str, record: ArrayRecord | ConfigRecord | MetricRecord) -> Callable[[RecordDict], None]:
    return lambda content: content.__setitem__(name, record)


def about(**changed: object) -> Callable[[RecordDict], None]:
    values = {"format": 1, "client": "a", "kind": "train", "round": 1, **changed}
    return put("about", ConfigRecord({name: value for name, value in values.items() if value is not None}))  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        put("metrics", MetricRecord({"loss": 0.5})),
        put("more", ArrayRecord()),
        put("values", ArrayRecord()),
        put("tensors", ConfigRecord()),
        put("values", MetricRecord({"loss": 0.5})),
        lambda content: content.__delitem__("values"),
        put("values", ConfigRecord({"k": [1, 2]})),
        put("values", ConfigRecord({"k": True})),
        about(loss=0.25),
        about(client=None),
        about(client=3),
        about(round=True),
        about(round="1"),
        about(format=2),
        about(kind="sketch"),
        about(kind="elsewhere"),
        about(round=2),
        about(refused=1),
        array(dtype="bool", size=6),
        array(dtype="object"),
        array(stype="numpy.ndarray"),
        array(size=23),
        array(size=25),
        array(shape=(2**40, 2**40)),
        array(shape=(-2, -3)),
        array(shape=(-1, 0), size=0),
        array(dtype="float64"),
    ],
)
def test_anything_unexpected_is_refused(change: Callable[[RecordDict], None]) -> None:
    read_reply(altered(lambda content: None))
    with pytest.raises(RunError, match="dropped"):
        read_reply(altered(change))


def test_an_error_is_no_reply_and_a_refusal_no_request() -> None:
    metadata = Metadata(1, "", 1, 2, "", "1", 0.0, 60.0, "train.train")
    with pytest.raises(RunError, match="no content"):
        read_reply(Message(metadata=metadata, error=Error(1, "a record")))  # type: ignore[call-overload]
    with pytest.raises(RunError, match="no request"):
        read_request(enveloped(packed(Reply("a", "train", 1, refused="no"))))
