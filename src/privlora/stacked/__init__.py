"""Many low-rank adapters of one frozen causal LM, trained side by side: shadow models for membership attacks."""

from privlora.stacked.teams import TrainedAdapters, train_adapters

__all__ = ["TrainedAdapters", "train_adapters"]
