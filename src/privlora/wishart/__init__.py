"""The studies of one paper, Hu et al. (2026), on Wishart projections: mechanism, bounds, heads and their canaries.

No run of `privlora train` needs any of it: there the paper's M2 is the method `wishart-m2`.
"""

from privlora.wishart.canaries import StaticPoison, static_poison
from privlora.wishart.heads import HEAD_METHODS, HeadData, HeadSettings, TrainedHeads, train_heads
from privlora.wishart.mechanism import WishartProjection

__all__ = [
    "HEAD_METHODS",
    "HeadData",
    "HeadSettings",
    "StaticPoison",
    "TrainedHeads",
    "WishartProjection",
    "static_poison",
    "train_heads",
]
