"""What moves when an adapter is trained: given out, taken in, and carried to another point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.coordinates import Coordinates
from privlora.mechanisms import AdaptiveClipNorm
from privlora.optimizers import IterateAverage, Optimizer

# Part -> name -> tensor. A function of releases and public numbers alone, so it may be sent and stored.
States = dict[str, dict[str, Tensor]]


@dataclass(kw_only=True)
class TrainState:
    """The point and what is remembered of the way to it. All public.

    average: of the iterates, where method.averaging is on. adaptive: where privacy.clip_quantile is set.
    """

    coordinates: Coordinates
    optimizer: Optimizer
    average: IterateAverage | None = None
    adaptive: AdaptiveClipNorm | None = None

    @property
    def adapter(self) -> LowRankAdapter:
        return self.coordinates.adapter

    def states(self) -> States:
        """Everything that training goes on from. Copies, which later steps do not change."""
        return {
            name: {key: tensor.clone() for key, tensor in part.state_dict().items()}
            for name, part in self._parts().items()
        }

    def take_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what ``states`` gave, here or elsewhere. Raises KeyError if a part or a tensor is missing."""
        for name, part in self._parts().items():
            part.load_state_dict(states[name])

    def move_to(
        self,
        point: Mapping[str, Tensor],
        *,
        memory: Literal["transported", "reset"] = "transported",
        noise_std: float = 0.0,
    ) -> None:
        """Go on from another point, such as an average over clients: ``point`` is ``coordinates.state_dict()`` there.

        memory: what becomes of momentum, residuals and second moments. "transported" brings them to the new point as
        after a step; "reset" forgets them, and the average starts afresh. noise_std: tau of the releases so far, which
        second moments hold.
        """
        before = self.states()["coordinates"]
        self.coordinates.load_state_dict(point)
        if memory == "transported":
            self.optimizer.transport(before, noise_std)
            return
        self.optimizer.reset()
        if self.average is not None:
            self.average.restart()

    def _parts(self) -> dict[str, Coordinates | Optimizer | IterateAverage | AdaptiveClipNorm]:
        parts = {
            "coordinates": self.coordinates,
            "optimizer": self.optimizer,
            "average": self.average,
            "clip_norm": self.adaptive,
        }
        return {name: part for name, part in parts.items() if part is not None}
