"""Bound each privacy unit, sum, add noise once per logical batch: the only way out of the private side."""

from privlora.accounting.bands import (
    band_coefficients,
    noise_in_sums,
    prefix_error,
    row_norms,
    split_noise_multiplier,
)
from privlora.mechanisms.banded import CorrelatedNoise, Frames
from privlora.mechanisms.distributed import PlainSums, ShareMechanism, SumMechanism
from privlora.mechanisms.gaussian import (
    CLIPPING,
    MOST_RAISED,
    UNADAPTED,
    AdaptiveClipNorm,
    GaussianMechanism,
    clipping_slack,
    takes_units_alone,
)
from privlora.mechanisms.lattice import Lattice, lattice_for
from privlora.mechanisms.layout import Layout
from privlora.mechanisms.noise import NoiseSource
from privlora.mechanisms.noising import Noising
from privlora.mechanisms.nonprivate import MeanMechanism
from privlora.mechanisms.release import Instrument, Mechanism, PrivateSum, Release
from privlora.mechanisms.updates import ClippedUpdate
from privlora.mechanisms.votes import VOTE_NORM, VoteMechanism

__all__ = [
    "CLIPPING",
    "MOST_RAISED",
    "UNADAPTED",
    "VOTE_NORM",
    "AdaptiveClipNorm",
    "ClippedUpdate",
    "CorrelatedNoise",
    "Frames",
    "GaussianMechanism",
    "Instrument",
    "Lattice",
    "Layout",
    "MeanMechanism",
    "Mechanism",
    "NoiseSource",
    "Noising",
    "PlainSums",
    "PrivateSum",
    "Release",
    "ShareMechanism",
    "SumMechanism",
    "VoteMechanism",
    "band_coefficients",
    "clipping_slack",
    "lattice_for",
    "noise_in_sums",
    "prefix_error",
    "row_norms",
    "split_noise_multiplier",
    "takes_units_alone",
]
