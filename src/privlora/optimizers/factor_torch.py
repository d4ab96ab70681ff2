"""Optimizers of torch and peft, and LAMB, on factors: the rule is a torch optimizer's, fed with releases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from privlora.coordinates import FactorCoordinates, ProjectedCoordinates, Vector
from privlora.errors import ConfigError
from privlora.mechanisms import Release
from privlora.optimizers.base import Optimizer
from privlora.optimizers.rate_units import scaled

_EPSILON = 1e-6
_LARGEST = 10.0  # phi of the paper: norms of matrices count up to here


class Lamb(torch.optim.Optimizer):
    """LAMB, Algorithm 2 of version 3 of You et al. 2020, which corrects nothing for moments that started at zero.

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


# What LoraFAOptimizer of peft adds to the diagonal of right^T right before it inverts it.
_DAMPING = 1e-8


class _Slot(NamedTuple):
    """One parameter, and where its gradient stands in a release; site is None for a whole group at once."""

    parameter: torch.nn.Parameter
    group: int
    part: int  # 0: left = lora_B, 1: right = lora_A^T
    site: int | None

    def gradient(self, vector: Vector) -> Tensor:
        stacked = vector[self.group][self.part]
        if self.site is None:
            return stacked
        one = stacked[self.site]
        # A copy, because peft's preconditioner writes into gradients, and a release is not to be changed.
        return (one.mT if self.part else one).clone()


class TorchOptimizer(Optimizer):
    """A torch.optim.Optimizer that works on views of what the coordinates train.

    make: from a module that holds them under peft's names <k>.lora_B.weight and <k>.lora_A.weight, built at learning
    rate 1, so that the rate of each of its parameter groups is that group's multiple of the run's rate. per_site: one
    pair of matrices a module, lora_B (m, r) and lora_A (r, n), as rules on whole matrices need; else one pair of
    stacks a group of equal modules, left (L, m, r) and right (L, n, r), which is faster for rules on single entries.
    """

    per_site: ClassVar[bool] = False
    takes_weight_units: ClassVar[bool] = True

    def __init__(
        self,
        coordinates: FactorCoordinates | ProjectedCoordinates,
        make: Callable[[torch.nn.Module], torch.optim.Optimizer],
    ) -> None:
        self.coordinates: FactorCoordinates | ProjectedCoordinates = coordinates
        module, self._slots = _module_of_views(coordinates, self.per_site)
        self._inner = make(module)
        self._rates = [group["lr"] for group in self._inner.param_groups]
        self._count = 0

    def _gradients(self, release: Release) -> Vector:
        """What the library's rule gets."""
        return release.vector

    def _update(self, release: Release, learning_rate: float) -> None:
        self._count += 1
        vector = self._gradients(release)
        for slot in self._slots:
            slot.parameter.grad = slot.gradient(vector)
        for group, rate in zip(self._inner.param_groups, self._rates, strict=True):
            group["lr"] = rate * learning_rate
        before = (
            [] if self.weight_units is None else [slot.parameter.detach().clone() for slot in self._slots]
        )
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)
        if before:
            self._in_units(before)
        self.coordinates.install()

    @torch.no_grad()
    def _in_units(self, before: list[Tensor]) -> None:
        """Let the library's step, decay included, count in the units of the modules."""
        assert self.weight_units is not None
        for slot, old in zip(self._slots, before, strict=True):
            step, unit = slot.parameter - old, self.weight_units[slot.group]
            step = (
                scaled(step, self.weight_units, slot.group) if slot.site is None else step * unit[slot.site]
            )
            slot.parameter.copy_(old + step)

    def state_dict(self) -> dict[str, Tensor]:
        # The count is there because plain SGD has nothing else, and a checkpoint has no empty parts.
        tensors = {"count": torch.tensor(self._count)} | {
            f"{i}.{name}": torch.as_tensor(value)
            for i, slot in enumerate(self._slots)
            for name, value in self._inner.state.get(slot.parameter, {}).items()
        }
        groups = enumerate(self._inner.param_groups)
        return tensors | {
            f"group{g}.step": torch.tensor(group["step"]) for g, group in groups if "step" in group
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self._inner.state.clear()
        self._count = int(tensors["count"])
        for key, tensor in tensors.items():
            owner, _, name = key.partition(".")
            if not name:
                continue
            if owner.startswith("group"):
                self._inner.param_groups[int(owner.removeprefix("group"))][name] = int(tensor)
                continue
            parameter = self._slots[int(owner)].parameter
            # Moments get the parameter's memory layout back, in which rounding is the same as without a checkpoint.
            like = (
                torch.empty_like(parameter) if tensor.shape == parameter.shape else torch.empty_like(tensor)
            )
            self._inner.state[parameter][name] = like.detach().copy_(tensor)


class AdamOptimizer(TorchOptimizer):
    """A rule with the arguments of Adam."""

    def __init__(
        self,
        coordinates: FactorCoordinates | ProjectedCoordinates,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
    ) -> None:
        arguments = {"lr": 1.0, "betas": (beta1, beta2), "weight_decay": weight_decay}
        super().__init__(coordinates, lambda module: self._rule(module, **arguments))

    @staticmethod
    @abstractmethod
    def _rule(module: torch.nn.Module, **arguments: Any) -> torch.optim.Optimizer:
        """The rule itself."""


class FactorAdamW(AdamOptimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019): DP-AdamW, and FFA-LoRA on one factor."""

    @staticmethod
    def _rule(module: torch.nn.Module, **arguments: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), **arguments)


class FactorSGD(TorchOptimizer):
    """torch.optim.SGD with momentum beta1, in units of the noise: DP-SGD (Abadi et al. 2016).

    The gradient is divided by tau = sigma C / b where there is noise, so that one grid of learning rates serves it and
    the adaptive rules: learning_rate / tau is the rate of the plain rule.
    """

    def __init__(self, coordinates: FactorCoordinates, *, beta1: float = 0.0) -> None:
        super().__init__(
            coordinates, lambda module: torch.optim.SGD(module.parameters(), lr=1.0, momentum=beta1)
        )

    def _gradients(self, release: Release) -> Vector:
        tau = release.noise_std
        return [tuple(t / tau for t in parts) for parts in release.vector] if tau else release.vector


class FactorLoraPlus(TorchOptimizer):
    """LoRA+ (Hayou et al. 2024) of peft: AdamW whose rate for left (lora_B) is a multiple of that for right (lora_A).

    learning_rate is the rate of right; left's is learning_rate_ratio times it.
    """

    def __init__(
        self,
        coordinates: FactorCoordinates,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
        learning_rate_ratio: float = 6.0,
    ) -> None:
        from peft.optimizers import create_loraplus_optimizer

        super().__init__(
            coordinates,
            lambda module: create_loraplus_optimizer(
                module,
                torch.optim.AdamW,
                lr=1.0,
                loraplus_lr_ratio=learning_rate_ratio,
                loraplus_weight_decay=weight_decay,
                betas=(beta1, beta2),
            ),
        )


class FactorLamb(AdamOptimizer):
    """LAMB (see `Lamb`). A matrix that is zero, as left is at the start, takes the unscaled step."""

    per_site = True

    @staticmethod
    def _rule(module: torch.nn.Module, **arguments: Any) -> torch.optim.Optimizer:
        return Lamb(module.parameters(), **arguments)


class FactorRiemannian(AdamOptimizer):
    """Preconditioned LoRA (Zhang and Pilanci 2024) of peft, before AdamW.

    Gradients become grad_left (right^T right + 0.01 I)^-1 and (left^T left + 0.01 I)^-1 grad_right; the damping is
    peft's default.
    """

    per_site = True

    @staticmethod
    def _rule(module: torch.nn.Module, **arguments: Any) -> torch.optim.Optimizer:
        from peft.optimizers import create_riemannian_optimizer

        return create_riemannian_optimizer(module, torch.optim.AdamW, **arguments)


class FactorLoraFA(FactorAdamW):
    """LoRA-FA (Zhang et al. 2023) as in peft: AdamW on grad_left (right^T right)^-1 / s^2, with right frozen.

    That is the gradient of left whose effect on W is nearest to the dense gradient. peft's own class multiplies in
    bfloat16 wherever the hardware can; here it is done in the dtype of the factors, and AdamW's epsilon is torch's.
    """

    coordinates: FactorCoordinates

    def __init__(self, coordinates: FactorCoordinates, *, beta1: float = 0.9, beta2: float = 0.999) -> None:
        if coordinates.sides != (0,):
            raise ConfigError(
                "the optimizer 'lora-fa' trains the left factor alone",
                why="it divides by the Gram matrix of a frozen right factor",
                fix="use adamw, or coordinates of the left factor",
            )
        super().__init__(coordinates, beta1=beta1, beta2=beta2)

    def _gradients(self, release: Release) -> Vector:
        return [
            (left @ self._inverse_gram(right) / self.coordinates.scale**2,)
            for (left,), right in zip(release.vector, self.coordinates.right, strict=True)
        ]

    @staticmethod
    def _inverse_gram(right: Tensor) -> Tensor:
        eye = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
        return torch.linalg.pinv(right.mT @ right + _DAMPING * eye)


def _module_of_views(
    coordinates: FactorCoordinates | ProjectedCoordinates, per_site: bool
) -> tuple[torch.nn.Module, list[_Slot]]:
    """Parameters that share the memory of what is trained, so that what is written there is the state."""
    module, slots = torch.nn.Module(), []
    for g, tensors in enumerate(coordinates.trained):
        for site in range(len(tensors[0])) if per_site else (None,):
            pair = torch.nn.Module()
            for part, (name, stacked) in enumerate(zip(("lora_B", "lora_A"), tensors, strict=False)):
                view = stacked if site is None else stacked[site].mT if part else stacked[site]
                slot = _Slot(torch.nn.Parameter(view), g, part, site)
                pair.add_module(name, torch.nn.ParameterDict({"weight": slot.parameter}))
                slots.append(slot)
            module.add_module(str(len(slots)), pair)
    return module, slots
