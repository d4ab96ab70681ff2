"""What every optimizer offers to the training loop."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from privlora.coordinates import Vector
from privlora.errors import PrivacyError
from privlora.mechanisms import Release
from privlora.optimizers.rate_units import WeightUnits


class Optimizer(ABC):
    """Moves the state of some coordinates along releases, and nothing else."""

    # Its settings besides the learning rate, with their defaults: the keyword-only arguments of its constructor.
    # A setting that is not here is refused, not ignored.
    settings: ClassVar[Mapping[str, float]]
    # Those of its coordinates' start that go with it, likewise.
    space_settings: ClassVar[Mapping[str, float]] = {}

    # What steps of each module are multiplied by, where the learning rate is in the size of the frozen weights
    # (rate_units); None: it is in entries. Set it on the object, of a rule that takes it.
    takes_weight_units: ClassVar[bool] = False
    weight_units: WeightUnits = None

    # Whether it can leave Z = 0, where LoRA starts.
    leaves_zero: ClassVar[bool] = True

    # A PUBLIC gradient that is added to each release before the rule sees it, asked for once a step, in the release's
    # coordinates and units: FedProx's mu (theta - theta_0), SCAFFOLD's c - c_k. Set it on the object. Added before
    # clipping or noise it would be lost or bounded with the units; added here it is post-processing and costs nothing.
    drift: Callable[[], Vector] | None = None

    def __init_subclass__(cls) -> None:
        arguments = inspect.signature(cls).parameters.values()
        cls.settings = {a.name: a.default for a in arguments if a.kind is a.KEYWORD_ONLY}

    def step(self, release: Release, learning_rate: float) -> None:
        """One update. Raises PrivacyError for anything but a Release."""
        if not isinstance(release, Release):
            raise PrivacyError(
                f"an optimizer got a {type(release).__name__}, not a Release",
                why="only a mechanism's release carries noise in every coordinate",
                fix="pass what mechanism.release() returned",
            )
        self._update(release if self.drift is None else release.plus(self.drift()), learning_rate)

    @abstractmethod
    def _update(self, release: Release, learning_rate: float) -> None:
        """Move the coordinates' state and install it."""

    def transport(self, before: Mapping[str, Tensor], noise_std: float) -> None:  # noqa: B027 - of flat spaces
        """Bring what is remembered to the coordinates' present point, to which something else than a step led.

        before: ``coordinates.state_dict()`` of the point that it was kept at. noise_std: tau of the releases so far.
        Where the coordinates of two points are the same space there is nothing to do.
        """

    def reset(self) -> None:
        """Forget all releases: the next step is that of a new optimizer at the present point."""
        self.load_state_dict({name: torch.zeros_like(t) for name, t in self.state_dict().items()})

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold, as named tensors."""

    @abstractmethod
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of ``state_dict``."""
