"""Bound each privacy unit, sum, add noise once per logical batch: the only way out of the private side."""

from privlora.mechanisms.clip_norm import AdaptiveClipNorm, split_noise_multiplier
from privlora.mechanisms.gaussian import CLIPPING, GaussianMechanism, clipping_slack
from privlora.mechanisms.noise import NoiseSource
from privlora.mechanisms.noising import Noising
from privlora.mechanisms.nonprivate import MeanMechanism
from privlora.mechanisms.release import Instrument, Mechanism, PrivateSum, Release

__all__ = [
    "CLIPPING",
    "AdaptiveClipNorm",
    "GaussianMechanism",
    "Instrument",
    "MeanMechanism",
    "Mechanism",
    "NoiseSource",
    "Noising",
    "PrivateSum",
    "Release",
    "clipping_slack",
    "split_noise_multiplier",
]
