"""In which Euclidean space one privacy unit's gradient is measured."""

from privlora.coordinates.base import Coordinates, Vector, add_vectors
from privlora.coordinates.factors import FactorCoordinates
from privlora.coordinates.one_factor import OneFactorCoordinates
from privlora.coordinates.tangent import TangentCoordinates

__all__ = [
    "Coordinates",
    "FactorCoordinates",
    "OneFactorCoordinates",
    "TangentCoordinates",
    "Vector",
    "add_vectors",
]
