"""The table of methods: one row = a space of gradients, an optimizer, its defaults. A new method is a new row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from privlora.adapters import LowRankAdapter
from privlora.adapters.peft_files import lora_scaling
from privlora.config import MethodSettings
from privlora.coordinates import Coordinates, FactorCoordinates, TangentCoordinates
from privlora.coordinates.starts import factor_start, tangent_start
from privlora.errors import ConfigError
from privlora.optimizers import TANGENT_OPTIMIZERS, FactorAdamW, Optimizer


@dataclass(frozen=True)
class Method:
    """One row. ``private`` is False for baselines that never clip or add noise."""

    name: str
    summary: str
    reference: str
    space: Literal["tangent", "factors"]
    optimizers: tuple[str, ...]
    private: bool
    learning_rate: float
    init: str = "random"
    schedule: str = "constant"
    warmup_fraction: float = 0.0
    averaging: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999

    @property
    def optimizer(self) -> str:
        """The default optimizer."""
        return self.optimizers[0]

    def choose_optimizer(self, name: str | None) -> str:
        """``name``, or the default for None. Raises ConfigError for one that the row does not have."""
        chosen = name or self.optimizer
        if chosen not in self.optimizers:
            raise ConfigError(
                f"method {self.name!r} has no optimizer {chosen!r}",
                fix=f"one of {', '.join(self.optimizers)}",
            )
        return chosen

    def resolve(self, chosen: MethodSettings, init: str | None, steps: int) -> Hyperparameters:
        """The settings that a run uses: what was chosen, else this row's defaults."""
        given = {name: value for name, value in chosen.model_dump().items() if value is not None}
        names = ("learning_rate", "schedule", "averaging", "beta1", "beta2")
        return Hyperparameters(
            optimizer=self.choose_optimizer(chosen.optimizer),
            init=init or self.init,
            warmup_steps=given.get("warmup_steps", round(self.warmup_fraction * steps)),
            **{name: given.get(name, getattr(self, name)) for name in names},
        )


@dataclass(frozen=True)
class Hyperparameters:
    """A method's settings with nothing left open. All public."""

    optimizer: str
    init: str
    learning_rate: float
    schedule: str
    warmup_steps: int
    averaging: float
    beta1: float
    beta2: float


METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            name="prism",
            summary="clip and noise in the tangent space of the rank-r update; no factor plays a part",
            reference="Wang and Zhang 2026 (PRISM)",
            space="tangent",
            optimizers=("rank", "scalar", "sgd", "paper"),
            private=True,
            learning_rate=3e-3,
            init="w0-subspace",
            beta2=0.99,
        ),
        Method(
            name="dp-adamw",
            summary="clip and noise the gradients of both LoRA factors, then AdamW",
            reference="Yu et al. 2022; Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            private=True,
            learning_rate=3e-3,
        ),
        Method(
            name="adamw",
            summary="plain LoRA with AdamW: NOT PRIVATE, for comparison and public data",
            reference="Hu et al. 2022; Loshchilov and Hutter 2019",
            space="factors",
            optimizers=("adamw",),
            private=False,
            learning_rate=3e-3,
        ),
    )
}


def find_method(name: str) -> Method:
    """The row called ``name``. Raises ConfigError."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}", fix=f"one of {', '.join(METHODS)} (privlora methods)")
    return METHODS[name]


def build(
    method: Method,
    adapter: LowRankAdapter,
    *,
    optimizer: str | None = None,
    init: str | None = None,
    seed: int = 0,
    lora_alpha: float = 16.0,
    use_rslora: bool = False,
    betas: tuple[float, float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Coordinates, Optimizer]:
    """The coordinates and the optimizer of a row on an adapter; ``None`` takes the row's default.

    Raises ConfigError for an optimizer that the row does not have.
    """
    chosen = method.choose_optimizer(optimizer)
    betas = betas or (method.beta1, method.beta2)
    init = init or method.init
    coordinates: TangentCoordinates | FactorCoordinates
    if method.space == "tangent":
        coordinates = tangent_start(adapter, init, seed=seed, dtype=dtype)
        return coordinates, TANGENT_OPTIMIZERS[chosen](coordinates, betas=betas)
    scale = lora_scaling(lora_alpha, adapter.rank, use_rslora)
    coordinates = factor_start(adapter, init, seed=seed, scale=scale, dtype=dtype)
    return coordinates, FactorAdamW(coordinates, betas=betas)
