"""Post-processing of releases. No optimizer ever sees data."""

from privlora.optimizers.averaging import IterateAverage
from privlora.optimizers.base import Optimizer
from privlora.optimizers.factor_adambc import FactorAdamBC
from privlora.optimizers.factor_rite import FactorRite
from privlora.optimizers.factor_torch import (
    FactorAdamW,
    FactorLamb,
    FactorLoraFA,
    FactorLoraPlus,
    FactorRiemannian,
    FactorSGD,
)
from privlora.optimizers.headed import HeadedAverage, HeadedOptimizer
from privlora.optimizers.paper import PAPER_OPTIMIZERS
from privlora.optimizers.projected import DirectionAdamW, DirectionSGD, ProjectedAdamW, ProjectedSGD
from privlora.optimizers.rate_units import weight_units
from privlora.optimizers.span import SpanOptimizer, span_optimizers
from privlora.optimizers.tangent import TANGENT_OPTIMIZERS, TangentOptimizer

__all__ = [
    "PAPER_OPTIMIZERS",
    "TANGENT_OPTIMIZERS",
    "DirectionAdamW",
    "DirectionSGD",
    "FactorAdamBC",
    "FactorAdamW",
    "FactorLamb",
    "FactorLoraFA",
    "FactorLoraPlus",
    "FactorRiemannian",
    "FactorRite",
    "FactorSGD",
    "HeadedAverage",
    "HeadedOptimizer",
    "IterateAverage",
    "Optimizer",
    "ProjectedAdamW",
    "ProjectedSGD",
    "SpanOptimizer",
    "TangentOptimizer",
    "span_optimizers",
    "weight_units",
]
