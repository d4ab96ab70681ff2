"""How torch computes in a private run, whatever its caller has set: whole products of float32, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

_MIXED: Final = ("cpu", "cuda", "xpu", "mps")  # where autocasts may be on


@contextmanager
def own_context() -> Iterator[None]:
    """Inside there is no autocast, no_grad, inference_mode or search for anomalies, and tensors are made in float32 on
    the CPU; what the caller has set comes back. As a decorator it holds for all of a function.

    No float32 product is taken in TF32 or bfloat16. Coarse rounding depends on who else is in the micro-batch, in the
    same way for similar records, so it adds up.
    """
    product, cudnn = (
        _known(torch.get_float32_matmul_precision),
        _known(lambda: torch.backends.cudnn.allow_tf32),
    )
    before = [(each, each.fp32_precision) for each in _backends()]
    with ExitStack() as undo:
        for kind in filter(torch.is_autocast_enabled, _MIXED):
            undo.enter_context(torch.autocast(kind, enabled=False))
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(torch.autograd.set_detect_anomaly(False))
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            undo.enter_context(torch.device("cpu"))
        try:
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
            for each in _backends():
                each.fp32_precision = "ieee"
            yield
        finally:
            if product is not None:
                torch.set_float32_matmul_precision(product)
            if cudnn is not None:
                torch.backends.cudnn.allow_tf32 = cudnn
            for each, precision in before:
                each.fp32_precision = precision


def _known(read: Callable[[], Any]) -> Any:
    """A setting of torch's older interface; None where the newer one was used so that the older has no word for it."""
    try:
        return read()
    except RuntimeError:
        return None


def _backends() -> list[Any]:
    """Whatever has a precision of its own in torch's newer interface; nothing before torch 2.9."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    owners = [torch.backends, torch.backends.cuda.matmul, cudnn, mkldnn]
    owners += [getattr(each, kind, None) for each in (cudnn, mkldnn) for kind in ("matmul", "conv", "rnn")]
    return [each for each in owners if hasattr(each, "fp32_precision")]
