"""Post-processing of releases. No optimizer ever sees data."""

from privlora.optimizers.averaging import IterateAverage
from privlora.optimizers.base import Optimizer
from privlora.optimizers.factor_adamw import FactorAdamW
from privlora.optimizers.schedules import SCHEDULES, learning_rate_at
from privlora.optimizers.tangent import TANGENT_OPTIMIZERS, TangentOptimizer

__all__ = [
    "SCHEDULES",
    "TANGENT_OPTIMIZERS",
    "FactorAdamW",
    "IterateAverage",
    "Optimizer",
    "TangentOptimizer",
    "learning_rate_at",
]
