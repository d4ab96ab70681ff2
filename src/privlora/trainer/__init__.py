"""A trainer in the shape of TRL's SFTTrainer: its arguments where they mean the same, refusals where they do not."""

from privlora.trainer.arguments import PrivateConfig
from privlora.trainer.trainer import PrivateTrainer, PrivateTrainOutput

__all__ = ["PrivateConfig", "PrivateTrainOutput", "PrivateTrainer"]
