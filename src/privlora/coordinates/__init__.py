"""In which Euclidean space one privacy unit's gradient is measured."""

from privlora.coordinates.base import Coordinates, ReleaseLaw, Sums, Vector, add_vectors, float64_device
from privlora.coordinates.direction import DirectionCoordinates
from privlora.coordinates.factors import FactorCoordinates, OneFactorCoordinates
from privlora.coordinates.fixed_tangent import FixedTangentCoordinates
from privlora.coordinates.projected import ProjectedCoordinates, WishartCoordinates
from privlora.coordinates.public_span import PublicGradients
from privlora.coordinates.span import SpanCoordinates, SpanSpace, TangentSpanCoordinates
from privlora.coordinates.span_placements import (
    ProjectedSpanCoordinates,
    ResidualSpanCoordinates,
    TangentProjectedSpanCoordinates,
)
from privlora.coordinates.spectral_metric import SpectralMetricCoordinates
from privlora.coordinates.tangent import TangentCoordinates

__all__ = [
    "Coordinates",
    "DirectionCoordinates",
    "FactorCoordinates",
    "FixedTangentCoordinates",
    "OneFactorCoordinates",
    "ProjectedCoordinates",
    "ProjectedSpanCoordinates",
    "PublicGradients",
    "ReleaseLaw",
    "ResidualSpanCoordinates",
    "SpanCoordinates",
    "SpanSpace",
    "SpectralMetricCoordinates",
    "Sums",
    "TangentCoordinates",
    "TangentProjectedSpanCoordinates",
    "TangentSpanCoordinates",
    "Vector",
    "WishartCoordinates",
    "add_vectors",
    "float64_device",
]
