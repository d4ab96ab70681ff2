"""Which base model an adapter belongs to: a hash of the weights that it was trained on, and whether a loaded model is
the one of its name. In whatever dtype weights are held, their values are compared in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from privlora.adapters.quantised import bits
from privlora.errors import ModelError, reason_of
from privlora.names import ADAPTER_FILES
from privlora.training.classifier import Head
from privlora.training.preflight import files_of

_PIECE: Final = 2**22  # entries at once


def weights_of(model: torch.nn.Module, *, classifies: bool = False) -> str | None:
    """SHA-256, in hexadecimal, of all names, shapes and values of a base model's parameters, each of which is read
    once. None where layers are packed: how, depends on the machine.

    classifies: leaves out what lies behind the text model, which a release holds itself.
    """
    if model in _REMEMBERED:
        return _REMEMBERED[model]
    if _is_packed(model):
        return None
    whole = sha256()
    for name, tensor in _parameters(model, classifies).items():
        own = sha256()
        for piece in _pieces(tensor):
            own.update(piece.contiguous().view(torch.uint8).numpy().data)
        whole.update(f"{name} {tuple(tensor.shape)} {own.hexdigest()}\n".encode())
    return whole.hexdigest()


# Of models whose weights no longer lie here as a whole.
_REMEMBERED: Final = WeakKeyDictionary[torch.nn.Module, str | None]()


def remember_weights(model: torch.nn.Module) -> None:
    """Call it before the weights are spread over processes."""
    _REMEMBERED[model] = weights_of(model)


def refuse_another_base(adapter: Mapping[str, Any], model: torch.nn.Module, *, classifies: bool) -> None:
    """Raise ModelError for another base model than that of a release. adapter: of its report, by that name."""
    expected = adapter.get("base_sha256")
    found = None if expected is None else weights_of(model, classifies=classifies)
    if found is not None and found != expected:
        raise ModelError(
            "this is not the base model that the adapter was trained on",
            why=f"its weights have SHA-256 {found}, and the report names {expected}",
            fix=f"give {adapter['base_model']!r} as it was when the adapter was trained",
        )


def refuse_other_weights(name: str, revision: str | None, model: Any, *, classifies: bool) -> None:
    """Raise ModelError for a loaded model with other weights than the files of its name: an adapter was merged into
    it, say, or tokens were added. Where this machine has no safetensors files of that name, nothing is compared; of
    packed layers only the shapes of what lies beside them."""
    revision = getattr(getattr(model, "config", None), "_commit_hash", None) or revision
    files = files_of(name, revision)
    if files is None or not files.weights or not all(file.is_file() for file in files.weights):
        return
    from safetensors import safe_open
    from transformers.core_model_loading import revert_weight_conversion

    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    packed, own = _is_packed(model), _parameters(model, classifies)
    saved = revert_weight_conversion(model, own) if hasattr(model, "config") else own
    named = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    others: list[str] = []
    for file in files.weights:
        with safe_open(file, "pt") as stored:
            pairs = ((name, named.get(name.removeprefix(prefix))) for name in stored.keys())  # noqa: SIM118
            others += [n for n, t in pairs if t is not None and not _same(t, stored.get_tensor(n), packed)]
    if others:
        raise ModelError(
            f"the loaded model is not the one of its name, {name!r}: {len(others)} of its weights are others, "
            f"such as {others[0]}",
            why="the release would name a base model beside which its adapter is another model",
            fix="give the folder that model.save_pretrained('my-base') and tokenizer.save_pretrained('my-base') write",
        )


def with_adapter(model: Any, adapter: Path, head: Head | None = None) -> Any:
    """The model under an adapter's files, as peft loads them. head: of a classifier.

    Raises ModelError, also for another base model than that of the report which lies there.
    """
    from peft import PeftModel  # takes seconds

    for name in ADAPTER_FILES:  # peft would ask the hub for a file that is missing
        if not (adapter / name).exists():
            raise ModelError(f"the adapter in {str(adapter)!r} lacks {name}", fix="restore its files")
    report: Any = {}
    with suppress(OSError, ValueError):
        report = json.loads((adapter / "privacy_report.json").read_text(encoding="utf-8"))
    if isinstance(report, dict):
        refuse_another_base(report.get("adapter", {}), model, classifies=head is not None)
    try:
        return PeftModel.from_pretrained(model, str(adapter))
    except Exception as error:  # noqa: BLE001 - loaders raise anything; the user needs the cause, not a traceback
        what = f"the adapter in {str(adapter)!r} does not load on this base model: {reason_of(error)}"
        raise ModelError(what, fix="give the base model it was trained on, or restore its files") from None


def _is_packed(model: torch.nn.Module) -> bool:
    return any(bits(module) is not None for module in model.modules())


def _parameters(model: torch.nn.Module, classifies: bool) -> dict[str, Tensor]:
    """By name, without those of packed layers."""
    packed = tuple(f"{name}." for name, module in model.named_modules() if bits(module) is not None)
    body = f"{getattr(model, 'base_model_prefix', '')}." if classifies else ""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.startswith(body) and not name.startswith(packed)
    }


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    for piece in tensor.reshape(-1).split(_PIECE):
        yield (piece.bfloat16() if piece.is_floating_point() else piece).cpu()


def _same(one: Tensor, other: Tensor, packed: bool) -> bool:
    if packed or one.shape != other.shape:
        return one.shape == other.shape
    return all(map(torch.equal, _pieces(one), _pieces(other)))
