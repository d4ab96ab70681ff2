"""In which Euclidean space one privacy unit's gradient is measured."""

from privlora.coordinates.base import Coordinates, Vector, add_vectors
from privlora.coordinates.factors import FactorCoordinates
from privlora.coordinates.tangent import TangentCoordinates

__all__ = ["Coordinates", "FactorCoordinates", "TangentCoordinates", "Vector", "add_vectors"]
