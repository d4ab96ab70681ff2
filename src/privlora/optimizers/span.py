"""Optimizers behind a span of public gradients: decode the release, then an optimizer of the space within."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from privlora.coordinates import SpanSpace
from privlora.mechanisms import Release
from privlora.optimizers.base import Optimizer

_INNER, _SCORES = "inner.", "scores"


class SpanOptimizer(Optimizer):
    """Gives an optimizer of the inner space the gradient that a release stands for.

    Its noise is not white there: the standard deviation that goes with it is the root mean square over coordinates.
    Also keeps how much each public text had to do with the last release, until the texts of the next step are chosen.
    """

    inner_kind: ClassVar[type[Optimizer]]

    def __init_subclass__(cls) -> None:
        cls.settings, cls.takes_weight_units = cls.inner_kind.settings, cls.inner_kind.takes_weight_units

    def __init__(self, coordinates: SpanSpace, **settings: float) -> None:
        self.coordinates = coordinates
        make: Callable[..., Optimizer] = self.inner_kind
        self.inner = make(coordinates.inner, **settings)
        self._scores: Tensor | None = None

    def take_scores(self) -> Tensor | None:
        """(N,) >= 0 of the last release, once; None if none waits. Public."""
        found, self._scores = self._scores, None
        return found if found is not None and bool(found.any()) else None

    def _update(self, release: Release, learning_rate: float) -> None:
        space = self.coordinates
        self._scores = space.scores(release.vector).to("cpu", space.dtype)
        space.record()
        gradient, noise_std = space.decode(release.vector), space.decoded_std(release.noise_std)
        self.inner.weight_units = self.weight_units
        self.inner.step(replace(release, vector=gradient, noise_std=noise_std), learning_rate)

    def transport(self, before: Mapping[str, Tensor], noise_std: float) -> None:
        self.inner.transport(before, self.coordinates.decoded_std(noise_std))

    def state_dict(self) -> dict[str, Tensor]:
        tensors = {_INNER + name: t for name, t in self.inner.state_dict().items()}
        return tensors if self._scores is None else tensors | {_SCORES: self._scores}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        inner = {name.removeprefix(_INNER): t for name, t in tensors.items() if name.startswith(_INNER)}
        self.inner.load_state_dict(inner)
        self._scores = tensors[_SCORES].clone() if _SCORES in tensors else None


def span_optimizers(
    kind: type[SpanSpace], inner: Mapping[str, type[Optimizer]]
) -> dict[str, type[Optimizer]]:
    """An optimizer of spaces ``kind`` for each of the inner space; settings of ``kind`` are its space_settings."""
    arguments = inspect.signature(kind).parameters.values()
    of_space = {a.name: a.default for a in arguments if a.kind is a.KEYWORD_ONLY}
    made: dict[str, type[Optimizer]] = {}
    for name, rule in inner.items():
        own: dict[str, Any] = {"inner_kind": rule, "space_settings": of_space, "__doc__": rule.__doc__}
        made[name] = type(f"Span{rule.__name__}", (SpanOptimizer,), own)
    return made
