"""LAMB (You et al. 2020) as a torch optimizer: Adam's step of each matrix, scaled to the matrix's norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_EPSILON = 1e-6
_LARGEST = 10.0  # phi of the paper: norms of matrices count up to here


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of version 3 of the paper, which corrects nothing for moments that started at zero.

    x <- (1 - lr weight_decay) x;  r = m / (sqrt(v) + eps);  x <- x - lr min(|x|, 10) / (|r| + eps) r

    The ratio is 1 where x or r is zero. Weight decay is AdamW's, outside the ratio.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step by the gradients that the parameters hold."""
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for x in group["params"]:
                state = self.state[x]
                if not state:
                    state.update(exp_avg=torch.zeros_like(x), exp_avg_sq=torch.zeros_like(x))
                m = state["exp_avg"].mul_(beta1).add_(x.grad, alpha=1 - beta1)
                v = state["exp_avg_sq"].mul_(beta2).addcmul_(x.grad, x.grad, value=1 - beta2)
                x.mul_(1 - rate * group["weight_decay"])
                r = m / v.sqrt().add_(_EPSILON)
                of_x, of_r = x.norm().clamp(max=_LARGEST), r.norm()
                ratio = torch.where((of_x != 0) & (of_r != 0), of_x / (of_r + _EPSILON), 1.0)
                x.sub_(rate * ratio * r)
