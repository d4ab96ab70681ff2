"""Requests and replies as the records of Flower's messages, and back.

A message holds three records: ``about`` (format, client, kind, round, and why a client refused), ``tensors`` and
``values``. Names are sorted, so equal content has equal bytes. Tensors travel as their numbers alone, little-endian and
in row order, which nothing has to parse. What is read may come from anybody: records, types, shapes and lengths are
checked before memory is taken for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from privlora.errors import RunError
from privlora.federated.messages import KINDS, TRAINING, Number, Reply, Request, wrong

NAME: Final = "name"
"""The kind of message by which the server asks a node for its client's public name."""

FORMAT: Final = 1
STYPE: Final = "privlora.numbers"
"""Flower's word for how an array is written. Flower's own mods know it not, and so cannot change tensors unseen."""

_DTYPES = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _DTYPES.split()}


Arrays = dict[int, Array]


_TYPES: Final = {"format": int, "client": str, "kind": str, "round": int, "refused": str}
_ROUTES: Final = {kind: f"{'train' if kind in TRAINING else 'query'}.{kind}" for kind in (NAME, *KINDS)}
_KINDS: Final = {route: kind for kind, route in _ROUTES.items()}


def message_type(kind: str) -> str:
    """How Flower routes messages of one kind: "train.…" where the model is used, else "query.…".

    Raises:
        RunError: ``kind`` is not known.
    """
    if kind not in _ROUTES:
        raise RunError(f"there are no messages of kind {kind!r}", fix=f"kinds: {', '.join(_ROUTES)}")
    return _ROUTES[kind]


def read_request(message: Message) -> Request:
    """Raises RunError where anything but a request is inside."""
    about, tensors, values = _read(message)
    if "refused" in about:
        raise wrong("a request that refuses is no request")
    return Request(about["client"], about["kind"], about["round"], tensors, values)


def read_reply(message: Message) -> Reply:
    """Raises RunError where anything but a reply is inside."""
    about, tensors, values = _read(message)
    return Reply(about["client"], about["kind"], about["round"], tensors, values, about.get("refused"))


def packed(message: Request | Reply, arrays: Arrays | None = None) -> RecordDict:
    """arrays: of tensors that were written before, by `id`; they must still be alive. Raises RunError for what no
    message can carry."""
    message_type(message.kind)
    given = {name: getattr(message, name, None) for name in _TYPES if name != "format"}
    about = {"format": FORMAT} | {name: value for name, value in given.items() if value is not None}
    written: Arrays = {} if arrays is None else arrays
    tensors = {}
    for name in sorted(message.tensors):
        tensor = message.tensors[name]
        if id(tensor) not in written:
            written[id(tensor)] = _array(name, tensor)
        tensors[name] = written[id(tensor)]
    values = _config(message.values)
    return RecordDict({"about": _config(about), "tensors": ArrayRecord(tensors), "values": values})


def _config(values: Mapping[str, Number]) -> ConfigRecord:
    return ConfigRecord({name: _number(name, values[name]) for name in sorted(values)})


def _number(name: str, value: Number) -> Number:
    """One of the four types exactly: a bool travels as 0 or 1."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RunError(f"{name!r} does not fit into 64 bits", fix="send it as bytes")
    for kind in (int, float, str, bytes):
        if isinstance(value, kind):
            exact: Number = kind(value)  # type: ignore[arg-type]
            return exact
    raise RunError(f"{name!r} is a {type(value).__name__}", fix="send an int, a float, a str or bytes")


def _array(name: str, tensor: Tensor) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise RunError(f"no message can carry {name!r} as {dtype}", fix="send float32, or whole numbers")
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Array(dtype=dtype, shape=tuple(tensor.shape), stype=STYPE, data=numbers.numpy().tobytes())


def _read(message: Message) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Number]]:
    if not message.has_content():
        raise wrong("a message has no content")
    content = message.content
    if set(content) != {"about", "tensors", "values"}:
        raise wrong("a message holds other records than about, tensors and values")
    about, tensors, values = content["about"], content["tensors"], content["values"]
    if not (
        isinstance(about, ConfigRecord)
        and isinstance(tensors, ArrayRecord)
        and isinstance(values, ConfigRecord)
    ):
        raise wrong("a message holds records of other types")
    read = _about(about, message)
    for name, value in values.items():
        if type(value) not in (int, float, str, bytes):
            raise wrong(f"value {name!r} of a message is a {type(value).__name__}")
    arrays = {name: _tensor(name, array) for name, array in tensors.items()}
    return read, arrays, cast(dict[str, Number], dict(values))


def _about(record: ConfigRecord, message: Message) -> dict[str, Any]:
    names = set(record)
    known = set(_TYPES) >= names >= set(_TYPES) - {"refused"}
    if not known or any(type(value) is not _TYPES[name] for name, value in record.items()):
        raise wrong("a message does not say what it is about")
    about: dict[str, Any] = dict(record)
    if about["format"] != FORMAT:
        raise wrong(f"a message has format {about['format']}, not {FORMAT}: its sender has another version")
    envelope = _KINDS.get(message.metadata.message_type), message.metadata.group_id
    if envelope != (about["kind"], str(about["round"])):
        raise wrong("a message is about another kind or round than its envelope says")
    return about


def _tensor(name: str, array: Array) -> Tensor:
    dtype, shape = DTYPES.get(array.dtype), tuple(array.shape)
    if array.stype != STYPE or dtype is None or any(size < 0 for size in shape):
        raise wrong(f"tensor {name!r} of a message cannot be read")
    if len(array.data) != math.prod(shape) * dtype.itemsize:
        raise wrong(f"tensor {name!r} of a message is not as long as its shape says")
    if not array.data:  # torch takes no empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(shape)
