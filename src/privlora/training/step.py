"""The private step, once: everything that trains takes it from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from privlora.data.batching import micro_batches
from privlora.data.examples import Examples
from privlora.errors import ConfigError, PrivacyError
from privlora.mechanisms import Mechanism, PrivateSum, Release
from privlora.precision import own_context
from privlora.randomness import private_generator
from privlora.stages import ACCUMULATE, PREPARE, stage
from privlora.training.footprint import row_tokens
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients
from privlora.training.model_checks import own_width
from privlora.training.state import TrainState

# A logical batch: for each drawn unit the index of its record, or the (k,) array of its drawn records.
Drawn = Sequence[int | np.ndarray]


@dataclass(frozen=True)
class _Taken:
    """What a step leaves: its release, public, and the loss of each unit that was drawn (units,), PRIVATE."""

    release: Release
    losses: Tensor


def _asks_late(device: torch.device) -> bool:
    """Whether gradients on ``device`` are asked once a batch, and not in each micro-batch, if all are finite."""
    return device.type != "cpu"


@dataclass(kw_only=True)
class Step:
    """draw -> gradients of each unit -> bound and sum -> charge and noise -> optimizer -> average -> next projection.

    The order is the guarantee: units are drawn afresh for each step, the ledger is charged before noise is drawn, and
    nothing but the release reaches what is trained.

    state: what moves. mechanism: on ``state.coordinates``. examples: all tokenised records. draw: a fresh logical batch
    by the sampling that the mechanism's event states; None for steps that are always given theirs. learning_rate:
    public; a number, or a function of the ledger's step 1, 2, …. max_tokens: of a micro-batch, in which short rows
    count for their gradients (training.footprint). dropout: whether the base model's own is on. masks: keys all that is
    random in forward passes; private. prepare: in the place of ``state.coordinates.prepare``, see SharedStep.

    Raises ConfigError for parts that do not belong together, PrivacyError for a sampler other than the event's.
    """

    state: TrainState
    mechanism: Mechanism
    examples: Examples
    learning_rate: float | Callable[[int], float]
    draw: Callable[[], Drawn] | None = None
    max_tokens: int = 4096
    dropout: bool = False
    masks: np.random.Generator = field(default_factory=private_generator)
    prepare: Callable[[], None] | None = None
    halved: int | None = field(default=None, init=False)
    """PRIVATE, since it follows from lengths: what max_tokens was lowered to where a device's memory was short."""
    # Of the micro-batch under way, private.
    _units: int = field(default=0, init=False, repr=False)
    _tokens: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        own = self.mechanism.coordinates is self.state.coordinates
        draws = self.draw is None or callable(self.draw)
        for what, fits, fix in (
            ("the mechanism", own, "make it on state.coordinates"),
            ("examples", isinstance(self.examples, Examples), "give what build_examples returned"),
            ("draw", draws, "give a function, such as sampler.draw"),
        ):
            if not fits:
                raise ConfigError(f"{what} of a step is not what it needs", fix=fix)
        sampler, event = getattr(self.draw, "__self__", None), getattr(self.mechanism, "event", None)
        drawn_by = getattr(sampler, "sampling", None)
        if drawn_by is not None and event is not None and drawn_by != event.sampling:
            raise PrivacyError(
                f"the sampler draws by {drawn_by.describe()}, charged is {event.sampling.describe()}",
                why="the stated epsilon holds for what is charged",
                fix="make the event from sampler.sampling",
            )

    def take(self, drawn: Drawn | None = None) -> _Taken:
        """One step on a fresh draw, or on ``drawn``, an empty one included. Errors leave no unit behind in the sum."""
        if drawn is None:
            if self.draw is None:
                raise ConfigError("this step has no sampler", fix="give it `draw`, or a batch to take")
            drawn = self.draw()
        losses = self.accumulate(drawn)
        return _Taken(self.release(), losses)

    def take_many(self, count: int, tick: Callable[[], None] = lambda: None) -> list[Release]:
        """So many steps from the present state. tick: called after each."""
        releases = []
        for _ in range(count):
            releases.append(self.take().release)
            tick()
        return releases

    @own_context()
    def accumulate(self, drawn: Drawn) -> Tensor:
        """PRIVATE. The first half: gradients into the mechanism's sum; gives the losses of the units (units,).

        Once a release: one draw is one batch. Where a device has no memory for a micro-batch, what was summed is
        forgotten and the same batch is taken again in smaller ones, from here on. Raises PrivacyError while units of
        another batch stand in the sum, torch.OutOfMemoryError where a unit by itself does not fit.
        """
        if self.mechanism.pending:
            raise PrivacyError(
                "units of another batch stand in the sum",
                why="they would count twice, or be released with a draw that is not theirs",
                fix="release them, take() their sum, or discard() it first",
            )
        with stage(PREPARE):
            (self.prepare or self.state.coordinates.prepare)()
        while True:
            try:
                return self._accumulate(drawn)
            except torch.OutOfMemoryError:
                # Nothing of the batch stands in the sum, and nothing is charged yet: it is taken again, all of it.
                if not self._halve():
                    raise
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _halve(self) -> bool:
        """Make micro-batches smaller than the one under way; False where it holds a single unit."""
        if self._units < 2:
            return False
        self.max_tokens = max(1, min(self.max_tokens, self._tokens) // 2)
        self.halved = self.max_tokens
        return True

    def _accumulate(self, drawn: Drawn) -> Tensor:
        # To ask a GPU is to wait for it: it is done once a batch, which is taken again if some unit spoils it.
        sound: list[Tensor] | None = [] if _asks_late(self.state.adapter.device) else None
        losses = self._gathered(drawn, sound)
        if sound and not bool(torch.stack(sound).all()):
            self.mechanism.discard()
            losses = self._gathered(drawn, None)
        return losses

    def _gathered(self, drawn: Drawn, sound: list[Tensor] | None) -> Tensor:
        adapter = self.state.adapter
        least = row_tokens(adapter) if self.mechanism.needs_examples else 0
        losses = []
        self._units = 0
        try:
            with training_passes(adapter.model, self.masks, dropout=self.dropout):
                rows = self.state.coordinates.rows_at_once()
                for batch in micro_batches(
                    drawn,
                    self.examples,
                    max_tokens=self.max_tokens,
                    max_rows=rows,
                    row_tokens=least,
                    device=adapter.device,
                    own_width=own_width(adapter),
                ):
                    count, width = batch.input_ids.shape
                    self._units, self._tokens = batch.unit_count, count * max(width, least)
                    captured, unit_losses = micro_batch_gradients(
                        adapter, batch, summed=not self.mechanism.needs_examples, sound=sound
                    )
                    with stage(ACCUMULATE):
                        self.mechanism.accumulate(captured)
                    del captured  # before the next ones are made
                    losses.append(unit_losses)
        except BaseException:
            self.mechanism.discard()
            raise
        return torch.cat(losses) if losses else torch.zeros(0)

    @own_context()
    def release(self, total: PrivateSum | None = None) -> Release:
        """The second half: charge, noise, and the moves that follow from the release alone.

        total: of a batch that is spread over several processes or clients, see `Mechanism.release`.
        """
        release = self.mechanism.release(total)
        rate = self.learning_rate(release.step) if callable(self.learning_rate) else self.learning_rate
        if not (isinstance(rate, int | float) and 0 <= rate < float("inf")):
            raise ConfigError(
                f"the learning rate of step {release.step} is {rate}, not a number >= 0",
                why="the step is charged, and moves nothing",
                fix="give a number, or a function of the step that returns one",
            )
        self.state.move(release, rate)
        return release
