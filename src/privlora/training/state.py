"""What moves when an adapter is trained: given out, taken in, and carried to another point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.coordinates import Coordinates
from privlora.errors import ConfigError
from privlora.mechanisms import AdaptiveClipNorm, Release
from privlora.optimizers import IterateAverage, Optimizer
from privlora.precision import own_context
from privlora.stages import AVERAGING, INSTALL, OPTIMIZER, stage

Memory = Literal["transported", "reset"]
# Part -> name -> tensor. A function of releases and public numbers alone, so it may be sent and stored.
States = dict[str, dict[str, Tensor]]


class Part(Protocol):
    """What a state is made of, and a checkpoint holds."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, tensors: Mapping[str, Tensor], /) -> None: ...


@dataclass(kw_only=True)
class TrainState:
    """The point and what is remembered of the way to it. All public.

    average: of the iterates, where method.averaging is on. adaptive: where privacy.clip_quantile is set.
    """

    coordinates: Coordinates
    optimizer: Optimizer
    average: IterateAverage | None = None
    adaptive: AdaptiveClipNorm | None = None

    def __post_init__(self) -> None:
        if getattr(self.optimizer, "coordinates", None) is not self.coordinates:
            raise ConfigError(
                "the optimizer works on other coordinates than the state's",
                why="steps would be charged, and what they train would not be this adapter",
                fix="give what methods.build made together",
            )

    @property
    def adapter(self) -> LowRankAdapter:
        return self.coordinates.adapter

    def move(self, release: Release, learning_rate: float) -> None:
        """What follows from a release: the optimizer's step, the average, the next projection."""
        with stage(OPTIMIZER):
            self.optimizer.step(release, learning_rate)
        if self.average is not None:
            with stage(AVERAGING):
                self.average.update()
        with stage(INSTALL):
            self.coordinates.advance()

    def states(self) -> States:
        """Everything that training goes on from. Copies, which later steps do not change."""
        return {
            part: {name: tensor.clone() for name, tensor in tensors.items()}
            for part, tensors in self.present().items()
        }

    def present(self) -> States:
        """The same without copies, to be read before the next step."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def take_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what ``states`` gave, here or elsewhere. Raises ConfigError if it was given by another method."""
        try:
            given = [(part, states[name]) for name, part in self._parts().items()]
            self._refuse_others(states["coordinates"])
            for part, tensors in given:
                part.load_state_dict(tensors)
        except KeyError as missing:
            raise ConfigError(
                f"the state holds no {missing}, which the method needs", fix="give states of the same method"
            ) from None

    @own_context()
    def move_to(
        self, point: Mapping[str, Tensor], *, memory: Memory = "transported", noise_std: float = 0.0
    ) -> None:
        """Go on from another point, such as an average over clients: ``point`` is ``coordinates.state_dict()`` there.

        Raises ConfigError for a point of another space or shape, or one that is not finite.

        memory: what becomes of momentum, residuals and second moments. "transported" brings them to the new point as
        after a step; "reset" forgets them, and the average starts afresh. noise_std: tau of the releases so far, which
        second moments hold.
        """
        if memory not in get_args(Memory):
            raise ConfigError(f"memory={memory!r} is unknown", fix=f"one of {', '.join(get_args(Memory))}")
        self._refuse_others(point)
        before = self.states()["coordinates"]
        self.coordinates.load_state_dict(point)
        if memory == "transported":
            self.optimizer.transport(before, noise_std)
            return
        self.optimizer.reset()
        if self.average is not None:
            self.average.restart()

    def _refuse_others(self, point: Mapping[str, Tensor]) -> None:
        for name, own in self.coordinates.state_dict().items():
            if name not in point or point[name].shape != own.shape or not bool(point[name].isfinite().all()):
                raise ConfigError(
                    f"the point's {name!r} is missing, of another shape than {tuple(own.shape)}, or not finite",
                    fix="give the state_dict of coordinates of the same method, model and rank",
                )

    def _parts(self) -> dict[str, Part]:
        parts: dict[str, Part | None] = {
            "coordinates": self.coordinates,
            "optimizer": self.optimizer,
            "average": self.average,
            "clip_norm": self.adaptive,
            "memory": self.coordinates.memory,
        }
        return {name: part for name, part in parts.items() if part is not None}
