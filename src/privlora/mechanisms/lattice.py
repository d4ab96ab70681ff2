"""The public lattice on which clients' shares of a secure sum lie, and the ring in which they are added."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from privlora.accounting import secure_sums
from privlora.errors import ConfigError
from privlora.mechanisms.discrete import MAX_STD

# Of the noise of all clients together, that fit into the ring: one entry in 10^32 goes beyond.
_DEVIATIONS = 12
# A sum may be so many times its expected size before it wraps around.
_LARGEST_BATCH = 2
# float64 holds every integer up to here, and to spare.
_EXACT = 2.0**52
# Before the cast to int64, which is undefined beyond 2^63; noise is added to it. Cutting off moves nobody farther.
_CUT = 2.0**62
# Of the reach of a unit: how much rounding may add to it.
_MAX_OVERHEAD = 0.01
_DTYPES: dict[int, type[np.uint32] | type[np.uint64]] = {32: np.uint32, 64: np.uint64}


@dataclass(frozen=True)
class Lattice:
    """How a vector of sums becomes integers that hide it. Public, and the same for server and clients.

    Attributes:
        width: g, a power of two; entries are rounded to multiples of it.
        share_std: s, of the discrete Gaussian noise that each client adds, in units of ``width``.
        entries: d, of one client's vector.
        survivors: t, the honest clients whose noise is in every sum that is opened, at least.
        bits: 32 or 64; integers are added modulo 2^bits.

    Raises ConfigError where a number is outside of what the accounting is made for.
    """

    width: float
    share_std: float
    entries: int
    survivors: int
    bits: int = 32

    def __post_init__(self) -> None:
        if not (0 < self.width < float("inf") and math.frexp(self.width)[0] == 0.5):
            raise ConfigError(f"width={self.width:g} is not a power of two", fix="let lattice_for choose it")
        if not secure_sums.MIN_SHARE_STD <= self.share_std <= MAX_STD:
            raise ConfigError(
                f"the noise of one client has a standard deviation of {self.share_std:g} lattice units",
                why="from 5 on the sum of several is a discrete Gaussian, and up to 2^40 one can be drawn",
                fix="set bits=64, or raise the noise multiplier",
            )
        for name in ("entries", "survivors"):
            _positive_integer(name, getattr(self, name))
        if self.bits not in _DTYPES:
            raise ConfigError(f"bits={self.bits} is no width of a ring", fix="32 or 64")

    @property
    def dtype(self) -> np.dtype:
        """Of integers modulo 2^bits."""
        return np.dtype(_DTYPES[self.bits])

    def noise_multiplier(self, clip_norm: float) -> float:
        """sigma of the Gaussian mechanism that a sum costs as much as, if no unit exceeds ``clip_norm``."""
        return secure_sums.noise_multiplier(
            width=self.width,
            share_std=self.share_std,
            survivors=self.survivors,
            clip_norm=clip_norm,
            entries=self.entries,
        )

    def noise_std(self, shares: int) -> float:
        """Standard deviation of the noise in each entry of the sum of so many shares, in the sum's own units."""
        return self.width * self.share_std * math.sqrt(shares)

    def rounded(self, values: Tensor) -> np.ndarray:
        """PRIVATE, as ``values``: the nearest integers to values / width, int64, at most 2^62 in size."""
        units = values.detach().cpu().double().numpy() / self.width
        return np.clip(np.rint(units), -_CUT, _CUT).astype(np.int64)

    def reduced(self, integers: np.ndarray) -> np.ndarray:
        """int64 -> the same modulo 2^bits."""
        return integers.view(np.uint64).astype(self.dtype, copy=False)

    def opened(self, total: np.ndarray) -> np.ndarray:
        """Sums modulo 2^bits -> float64 sums in [-g 2^(bits - 1), g 2^(bits - 1))."""
        signed = np.int32 if self.bits == 32 else np.int64
        return total.view(signed).astype(np.float64) * self.width


def lattice_for(
    *,
    clip_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    entries: int,
    clients: int,
    survivors: int,
    bits: int = 32,
) -> Lattice:
    """The finest lattice on which no sum wraps around, with the noise that ``noise_multiplier`` asks of each client.

    A sum fits while it has at most twice the expected number of units, all of them along one axis, and 12 standard
    deviations of the noise of all clients. With ``survivors`` honest clients the noise multiplier is as asked for.

    Args:
        clip_norm: C, of one unit.
        noise_multiplier: sigma of the event that each release is charged with.
        expected_batch_size: b, of all clients together; the number of clients where the unit is a client.
        entries: d, of one client's vector.
        clients: how many shares a sum has at most.
        survivors: t, how many honest ones it has at least; below it nothing may be opened.
        bits: 32 or 64.

    Raises:
        ConfigError: a number is not usable; or the ring is too narrow for rounding to cost less than 1 %.
    """
    for name, value in (
        ("clip_norm", clip_norm),
        ("noise_multiplier", noise_multiplier),
        ("expected_batch_size", expected_batch_size),
    ):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value} is not positive and finite", fix=f"set privacy.{name}")
    for name, number in (("entries", entries), ("clients", clients), ("survivors", survivors)):
        _positive_integer(name, number)
    if survivors > clients:
        raise ConfigError(f"{survivors} survivors of {clients} clients", fix="ask for as many as there are")
    if bits not in _DTYPES:
        raise ConfigError(f"bits={bits} is no width of a ring", fix="32 or 64")

    def share_std(width: float) -> float:
        exact = secure_sums.share_std(
            width=width,
            noise_multiplier=noise_multiplier,
            survivors=survivors,
            clip_norm=clip_norm,
            entries=entries,
        )
        return exact * (1 + 2.0**-50)  # rounding may not take from the noise

    def fits(width: float) -> bool:
        std = share_std(width)
        signal = _LARGEST_BATCH * expected_batch_size * clip_norm / width + clients / 2
        room = min(2.0 ** (bits - 1) - 1, _EXACT)
        return std <= MAX_STD and signal + _DEVIATIONS * math.sqrt(clients) * std <= room

    width = math.ldexp(1.0, math.frexp(clip_norm)[1] - 52)
    while not fits(width):
        width *= 2
        if secure_sums.rounded_reach(0.0, width, entries) > _MAX_OVERHEAD * clip_norm:
            raise ConfigError(
                f"a lattice of {entries} entries in {bits} bits is so coarse that rounding costs more than 1 %",
                why="each entry's rounding can add to what one unit moves, and noise has to cover it",
                fix="set bits=64" if bits == 32 else "lower expected_batch_size, or the number of entries",
            )
    return Lattice(width, share_std(width), entries, survivors, bits)


def _positive_integer(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}={value} is not a positive integer", fix=f"give {name} as 1, 2, …")
