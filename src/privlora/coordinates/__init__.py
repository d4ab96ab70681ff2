"""In which Euclidean space one privacy unit's gradient is measured."""

from privlora.coordinates.base import Coordinates, Sums, Vector, add_vectors, float64_device
from privlora.coordinates.factors import FactorCoordinates
from privlora.coordinates.fixed_tangent import FixedTangentCoordinates
from privlora.coordinates.one_factor import OneFactorCoordinates
from privlora.coordinates.projected import ProjectedCoordinates, WishartCoordinates
from privlora.coordinates.tangent import TangentCoordinates

__all__ = [
    "Coordinates",
    "FactorCoordinates",
    "FixedTangentCoordinates",
    "OneFactorCoordinates",
    "ProjectedCoordinates",
    "Sums",
    "TangentCoordinates",
    "Vector",
    "WishartCoordinates",
    "add_vectors",
    "float64_device",
]
