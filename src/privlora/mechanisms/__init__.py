"""Bound each privacy unit, sum, add noise once per logical batch: the only way out of the private side."""

from privlora.mechanisms.gaussian import CLIPPING, GaussianMechanism
from privlora.mechanisms.noise import NoiseSource
from privlora.mechanisms.nonprivate import MeanMechanism
from privlora.mechanisms.release import Mechanism, Release

__all__ = ["CLIPPING", "GaussianMechanism", "MeanMechanism", "Mechanism", "NoiseSource", "Release"]
