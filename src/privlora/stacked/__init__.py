"""Many low-rank adapters of one frozen causal LM, trained side by side: shadow models, clients of a federation."""

from privlora.stacked.adapter import JointAdapter
from privlora.stacked.parts import joined, slices, stack_parts
from privlora.stacked.team import Member, Team
from privlora.stacked.teams import TrainedAdapters, train_adapters

__all__ = [
    "JointAdapter",
    "Member",
    "Team",
    "TrainedAdapters",
    "joined",
    "slices",
    "stack_parts",
    "train_adapters",
]
