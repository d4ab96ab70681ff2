"""The setting of a span, chosen before each step on public gradients: how much ridge, how many directions, which noise.

Some public gradients are held out as if they were private, and what the mechanism would release of them is worked out
in expectation: everything follows from the Gram matrix, so nothing is drawn and no private unit is read. The choice is
a function of the public gradients and of the plan, and so costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from privlora.coordinates.base import ReleaseLaw

ALPHAS = (0.0, 0.5, 1.0)
RIDGES = (1e-6, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_NEGLIGIBLE = 1e-12  # as in public_span
# How much two private units' gradients have in common, as a part of their mean square norm. Held-out public gradients
# cannot tell: after a warm start on their own texts it is 0.001 to 0.05 of them, and 0.009 to 0.5 of private ones
# (docs/few-records.md). The choice hardly depends on it.
AGREEMENT = 0.03


@dataclass(frozen=True)
class SpanSetting:
    """alpha, ridge (relative) and top_k (0: all), see SpanCoordinates."""

    alpha: float
    ridge: float
    top_k: int


@dataclass(frozen=True)
class Chosen:
    """A setting, and why. All public.

    directions: k. texts: N. cosine: expected, of a decoded release with the mean gradient of its batch. kappa: about
    that cosine as a multiple of what it is if whole gradients are bounded and noised and then projected on the same
    span, where noise is much: (|h| / |z|) |P| / |D| in the median of held-out gradients h, z as they are encoded, D the
    decoder and P the projection (Frobenius norms).
    """

    alpha: float
    ridge: float
    directions: int
    texts: int
    cosine: float
    kappa: float

    @property
    def setting(self) -> SpanSetting:
        return SpanSetting(self.alpha, self.ridge, self.directions if self.directions < self.texts else 0)


# Where there is nothing to choose by: the paper's.
_PLAIN = SpanSetting(alpha=1.0, ridge=1e-6, top_k=0)


@dataclass(frozen=True)
class HeldOut:
    """Public gradients that are held out, as the span of the others sees them.

    values: the leading eigenvalues of the others' Gram matrix, (K,). seen: orthonormal coordinates of those held out,
    (K, held out). squares: their squared norms, (held out,). All float64.
    """

    values: Tensor
    seen: Tensor
    squares: Tensor


def hold_out_each(gram: Tensor, part: float) -> list[HeldOut]:
    """Every public gradient is held out once, about ``part`` of them at a time. gram: K (N, N) float64.

    Every so-many-th text at a time: a text and its variations together, where their seeds are a multiple of the times.
    """
    count = len(gram)
    times = min(max(2, round(1 / part)), count)
    directions = count - -(-count // times)  # the same each time
    index = torch.arange(count)
    found = []
    for time in range(times):
        held, rest = index[time::times], index[index % times != time]
        values, vectors = torch.linalg.eigh(gram[rest][:, rest])
        values, vectors = values.flip(0)[:directions].clamp_min(0), vectors.flip(1)[:, :directions]
        roots = torch.where(values > _NEGLIGIBLE * values[0], values, torch.inf).rsqrt()
        found.append(
            HeldOut(values, roots[:, None] * (vectors.mT @ gram[rest][:, held]), gram.diagonal()[held])
        )
    return found


def expected_cosines(
    held_out: Sequence[HeldOut],
    law: ReleaseLaw,
    *,
    alpha: float,
    ridge: float,
    agreement: float = AGREEMENT,
) -> Tensor:
    """About E[cos(decoded release, mean gradient of its batch)] with 1, 2, …, K directions: (K,) float64, 0 if none.

    With h a held-out gradient, u as it is encoded and clipped, D the decoder and E the mean over those held out, it is

        a E<D u, h> / sqrt((a E|D u|^2 + (sigma C / b)^2 |D|_F^2) a E|h|^2),  a = 1 / b + agreement:

    the part of a unit's mean square norm that is left in the mean of b units. So a batch of b is forecast from fewer
    texts, and what units have in common is taken to lie in all directions as units do.
    """
    sums = []
    for part in held_out:
        encode, decode = _codec(part.values, alpha, ridge)
        columns = encode[:, None] * part.seen  # of which the leading k are used
        norms = columns.square().cumsum(dim=0).sqrt()
        bounded = torch.where(norms > 0, _clipped(norms, law) / norms, 0.0)
        decoded = decode[:, None] * columns
        signal = ((decoded * part.seen).cumsum(dim=0) * bounded).mean(dim=1)
        energy = (decoded.square().cumsum(dim=0) * bounded.square()).mean(dim=1)
        noise = decode.square().cumsum(dim=0) * law.noise_std**2
        sums.append(torch.stack([signal, energy, noise, part.squares.mean().expand_as(signal)]))
    signal, energy, noise, length = torch.stack(sums).mean(dim=0)
    in_common = 1 / law.expected_batch_size + agreement
    found = in_common * signal / ((in_common * energy + noise) * in_common * length).sqrt()
    return torch.nan_to_num(found, nan=0.0)


def choose_setting(
    gram: Tensor,
    law: ReleaseLaw,
    *,
    hold_out: float = 0.25,
    alpha: float | None = None,
    ridge: float | None = None,
    top_k: int | None = None,
) -> Chosen | None:
    """The setting with the largest of ``expected_cosines``; None where none sees anything.

    gram: K (N, N) float64 of the public gradients. hold_out: which part is held out at a time. alpha, ridge, top_k:
    given ones are not chosen.
    """
    if len(gram) < 2:
        return None
    held_out = hold_out_each(gram, hold_out)
    pairs = [
        (a, r)
        for a in (ALPHAS if alpha is None else (alpha,))
        for r in (RIDGES if ridge is None else (ridge,))
    ]
    cosines = torch.stack([expected_cosines(held_out, law, alpha=a, ridge=r) for a, r in pairs])
    most, count = cosines.shape[1], len(gram)
    if top_k is not None:
        cosines[:, torch.arange(most) != min(top_k or most, most) - 1] = 0.0
    best, last = divmod(int(cosines.argmax()), most)
    cosine = float(cosines[best, last])
    if not cosine > 0:
        return None
    directions = last + 1 if last + 1 < most else count  # all that there were: all that there are
    if top_k is not None:
        directions = min(top_k or count, count)
    a, r = pairs[best]
    return Chosen(a, r, directions, count, cosine, _kappa(held_out, a, r, last + 1))


def _codec(values: Tensor, alpha: float, ridge: float) -> tuple[Tensor, Tensor]:
    """Weights (K,) of orthonormal coordinates as they are encoded and decoded; 0 where no gradient lies."""
    seen = values > _NEGLIGIBLE * values[0]
    shifted = torch.where(seen, values + ridge * values.mean(), 1.0)
    roots = torch.where(seen, values.sqrt(), 0.0)
    return roots * shifted**-alpha, roots * shifted ** (alpha - 1)


def _clipped(norms: Tensor, law: ReleaseLaw) -> Tensor:
    """The norms that units of these norms are brought to."""
    return norms.clamp_max(law.clip_norm) if law.clipping == "flat" else torch.full_like(norms, law.clip_norm)


def _kappa(held_out: Sequence[HeldOut], alpha: float, ridge: float, directions: int) -> float:
    ratios = []
    for part in held_out:
        encode, decode = _codec(part.values, alpha, ridge)
        encode, decode = encode[:directions], decode[:directions]
        sizes = (encode[:, None] * part.seen[:directions]).norm(dim=0)
        # encode * decode is the projection, which is what noise on whole gradients goes through.
        ratios.append(part.squares.sqrt() / sizes * (encode * decode).norm() / decode.norm())
    return float(torch.cat(ratios).nanmedian())


class SpanChoice:
    """Chooses before each step, and remembers what the steps took: in checkpoints, for the report. Public.

    law: of the releases to come; without one nothing is chosen. The rest as in ``choose_setting``.
    """

    def __init__(
        self, *, hold_out: float, alpha: float | None, ridge: float | None, top_k: int | None
    ) -> None:
        self.hold_out, self.alpha, self.ridge, self.top_k = hold_out, alpha, ridge, top_k
        self.law: ReleaseLaw | None = None
        self._next: Chosen | None = None
        self._rows: list[tuple[float, ...]] = []  # a Chosen each

    @property
    def history(self) -> list[Chosen]:
        """Of each release, in order, without those that a crash lost."""
        return [Chosen(a, r, int(k), int(n), cosine, kappa) for a, r, k, n, cosine, kappa in self._rows]

    def choose(self, gram: Tensor) -> SpanSetting:
        """For the step to come; without a law that of the last one, as in a run that is only reported."""
        if self.law is not None:
            self._next = choose_setting(
                gram,
                self.law,
                hold_out=self.hold_out,
                alpha=self.alpha,
                ridge=self.ridge,
                top_k=self.top_k,
            )
            found = self._next
        else:
            found = self.history[-1] if self._rows else None
        setting = _PLAIN if found is None else found.setting
        return SpanSetting(
            setting.alpha if self.alpha is None else self.alpha,
            setting.ridge if self.ridge is None else self.ridge,
            setting.top_k if self.top_k is None else self.top_k,
        )

    def record(self) -> None:
        """What was chosen last was released."""
        if self._next is not None:
            self._rows.append(astuple(self._next))

    def state_dict(self) -> dict[str, Tensor]:
        return {"rows": torch.tensor(self._rows, dtype=torch.float64).reshape(-1, 6)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self._rows = [tuple(row) for row in tensors["rows"].tolist()]
