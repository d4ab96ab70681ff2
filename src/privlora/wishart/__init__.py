"""The studies of one paper, Hu et al. (2026), on Wishart projections: mechanism, bounds, heads and their canaries.

No run of `privlora train` needs any of it: there the paper's M2 is the method `wishart-m2`.
"""

from privlora.wishart.canaries import static_poison
from privlora.wishart.heads.descent import HeadData, TrainedHeads, train_heads
from privlora.wishart.heads.settings import HeadSettings
from privlora.wishart.mechanism import WishartProjection

__all__ = ["HeadData", "HeadSettings", "TrainedHeads", "WishartProjection", "static_poison", "train_heads"]
