"""Low-rank terms beside the frozen linear layers of a model, and their per-example gradients."""

from privlora.adapters.captured import Captured
from privlora.adapters.lowrank import Group, LowRankAdapter, Site
from privlora.adapters.peft_files import read_adapter, write_adapter

__all__ = ["Captured", "Group", "LowRankAdapter", "Site", "read_adapter", "write_adapter"]
