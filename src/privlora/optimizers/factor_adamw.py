"""AdamW on the two factors: the baseline that most DP-LoRA work uses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from privlora.coordinates import FactorCoordinates
from privlora.mechanisms import Release
from privlora.optimizers.base import Optimizer


class FactorAdamW(Optimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019) fed with releases of factor gradients."""

    def __init__(
        self,
        coordinates: FactorCoordinates,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        self.coordinates = coordinates
        self._params = [torch.nn.Parameter(t) for t in (*coordinates.left, *coordinates.right)]
        groups = len(coordinates.left)
        coordinates.left, coordinates.right = list(self._params[:groups]), list(self._params[groups:])
        self._adamw = torch.optim.AdamW(self._params, lr=0.0, betas=betas, weight_decay=weight_decay)

    def _update(self, release: Release, learning_rate: float) -> None:
        gradients = [left for left, _ in release.vector] + [right for _, right in release.vector]
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.coordinates.install()

    def state_dict(self) -> dict[str, Tensor]:
        states = self._adamw.state_dict()["state"]
        return {f"{i}.{name}": t for i, state in states.items() for name, t in state.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        states: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            i, name = key.split(".")
            states.setdefault(int(i), {})[name] = tensor
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": states})
