"""Callbacks of a run: plain functions, or those of transformers' Trainer. They are told public numbers alone.

Nothing private can be asked of what they are given: no loss of training, no norm of a gradient, no size of a batch, no
example, no seconds, and not the model, whose hooks would see private batches.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Literal

from privlora.accounting import Plan
from privlora.config import Settings
from privlora.errors import ConfigError, PrivloraError, RunError, reason_of
from privlora.training.loggers import Logger, spent
from privlora.training.loop import Interrupted
from privlora.training.observer import Observer, StepReport

_log = logging.getLogger(__name__)

CALLED: Final = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_train_end")
"""Those of a TrainerCallback's methods that a private run calls."""
_NEVER_CALLED: Final = "a private run has no epochs, and when it saves follows from a clock"
_NOT_GIVEN: Final = (
    "callbacks are not given the model (its hooks would see private batches), loaders or optimizers: let it take "
    "args, state, control and **kwargs"
)


@dataclass(frozen=True)
class PublicEvent:
    """What a plain function is called with: public numbers, each of which may be logged and published.

    kind: "begin", "step", "evaluation" or "end". step: of training, from 1 on; 0 before the first.
    learning_rate: of that step; None before the first one and in rounds that train nothing.
    clip_norm: as it stands after that step, also where it is learnt; None without clipping.
    held_out_loss: of an "evaluation", on public records: mean over records of nats per token, or on a label.
    """

    kind: Literal["begin", "step", "evaluation", "end"]
    step: int
    steps: int
    learning_rate: float | None = None
    clip_norm: float | None = None
    held_out_loss: float | None = None
    plan: Plan | None = field(default=None, repr=False)
    stop: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """Ends the run after this step as Ctrl-C does: all is saved, `Interrupted` is raised, `resume_run` goes on."""

    @property
    def epsilon(self) -> float | None:
        """What the steps so far cost; None where nothing is promised."""
        return spent(self.plan, self.step)


def checked_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks of a call, before anything is charged; a class of TrainerCallback becomes an object.

    Raises ConfigError for what is neither a function of one argument nor a TrainerCallback, for one that asks for what
    callbacks are not given, and for those of transformers that send more than public numbers.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, str | bytes | Mapping) or not isinstance(callbacks, Sequence):
        what = f"callbacks is of type {type(callbacks).__name__}"
        raise ConfigError(what, fix="give a list, as callbacks=[f]")
    return [_checked(one, number) for number, one in enumerate(callbacks)]


def _checked(callback: Any, number: int) -> Any:
    name = f"callbacks[{number}]"
    trainer = getattr(sys.modules.get("transformers.trainer_callback"), "TrainerCallback", None)
    if trainer is not None and isinstance(callback, type) and issubclass(callback, trainer):
        _refuse_integrations(name, callback)
        try:
            callback = callback()
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be made: {callback.__name__}() raises {type(error).__name__}: {reason_of(error)}",
                fix="make it yourself, and give the object",
            ) from error
    if trainer is None or not isinstance(callback, trainer):
        if not callable(callback) or isinstance(callback, type):
            is_class = isinstance(callback, type)
            shown = f"the class {callback.__name__}" if is_class else f"of type {type(callback).__name__}"
            fix = "give a function of one argument (an event), or a transformers.TrainerCallback"
            raise ConfigError(f"{name} is {shown}", fix=fix)
        if not _takes(callback, 1):
            fix = "let it take one: an event with public numbers"
            raise ConfigError(f"{name} cannot be called with one argument", fix=fix)
        return callback
    kind = type(callback)
    _refuse_integrations(name, kind)
    for method in CALLED:
        more: dict[str, Any] = {"on_log": {"logs": {}}, "on_evaluate": {"metrics": {}}}.get(method, {})
        if not _takes(getattr(callback, method), 3, **more):
            raise ConfigError(f"{name}: {kind.__name__}.{method} cannot be called", fix=_NOT_GIVEN)
    others = (method for method in dir(trainer) if method.startswith("on_") and method not in CALLED)
    idle = [each for each in others if getattr(kind, each, None) is not getattr(trainer, each)]
    if idle:
        _log.warning("%s: %s is never called: %s", name, ", ".join(idle), _NEVER_CALLED)
    return callback


def _refuse_integrations(name: str, kind: type) -> None:
    """Also what is made from one: its methods are theirs where it has none of its own."""
    for base in kind.__mro__:
        if base.__module__.startswith("transformers.integrations"):
            raise ConfigError(
                f"{name} is transformers' {base.__name__}" + ("" if base is kind else ", in part"),
                why="it sends settings of the machine and the model, and the time of each step, which follows from the "
                "batch that was drawn",
                fix="use run.report_to, which logs public numbers alone",
            )


def _takes(function: Any, arguments: int, **named: Any) -> bool:
    try:
        inspect.signature(function).bind(*[None] * arguments, **named)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True


class _Callbacks(Observer):
    """An observer that tells callbacks and loggers.

    An error in one of them loses no step: the run stops as by Ctrl-C, and ``failed`` says why.

    plan: None in the non-private mode.
    """

    def __init__(
        self, callbacks: Sequence[Any], loggers: Sequence[Logger], plan: Plan | None, settings: Settings
    ) -> None:
        self._callbacks, self._loggers, self._plan = callbacks, loggers, plan
        self._steps, self._run = settings.privacy.steps, settings.run
        self._stop_run: Callable[[], None] = lambda: None
        self._told = self._stopping = False
        self._asked = list[bool]()  # by functions
        self._step = 0
        self._rate: float | None = None
        self._clip_norm: float | None = None
        self._logs = list[dict[str, Any]]()
        self._early: list[tuple[int, dict[str, float]]] | None = []
        self._control: Any = None
        self.failed: RunError | None = None
        """What a callback or a logger raised."""
        self.begun = False
        """Whether this process took the run up."""

    def on_start(self, done: int, stop: Callable[[], None]) -> None:
        """Training begins after ``done`` steps; what was found until here is raised before another one is charged."""
        self._begin(done)
        if self.failed is not None:
            raise self.failed
        if self._stopping:
            raise Interrupted(done)
        self._stop_run, self.begun = stop, True

    def on_step(self, report: StepReport) -> None:
        self._log_early()
        self._step = report.step
        self._rate, self._clip_norm = report.learning_rate, report.clip_norm
        self._tell("step", "on_step_end")
        if report.step in (1, self._steps) or report.step % self._run.log_every == 0:
            numbers = {"learning_rate": self._rate, "clip_norm": self._clip_norm}
            self._to_log({"epsilon": spent(self._plan, report.step), **numbers})

    def on_evaluation(self, step: int, loss: float) -> None:
        self._begin(step)  # what a run starts from is evaluated first
        self._step = step
        numbers = {"epsilon": spent(self._plan, step), "held_out_loss": loss}
        self._to_log(numbers)
        self._tell("evaluation", "on_evaluate", loss)

    def on_end(self) -> None:
        """Training is over, or was stopped and is saved."""
        if self.begun:
            self._log_early()
        if self._told:
            self._tell("end", "on_train_end")

    def _begin(self, step: int) -> None:
        if not self._told:
            self._step, self._told = step, True
            self._tell("begin", "on_train_begin")

    def _stop(self) -> None:
        self._stopping = True
        self._stop_run()

    def _to_log(self, numbers: Mapping[str, float | None]) -> None:
        values = {name: v for name, v in numbers.items() if v is not None and math.isfinite(v)}
        if self._early is None:
            self._log(self._step, values)
        else:  # a start that charges nothing may be taken over, and leaves no files
            self._early.append((self._step, values))
        shown = {_OF_TRAINER.get(name, name): value for name, value in values.items()}
        self._logs.append({**shown, "step": self._step})
        for callback in self._callbacks:
            if hasattr(callback, "on_log"):
                self._call(callback, "on_log", logs=dict(shown))

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            self._guarded(f"report_to={logger.name}", logger.log, step, values)

    def _log_early(self) -> None:
        """What was kept until a step was charged."""
        early, self._early = self._early, None
        for step, values in early or ():
            self._log(step, values)

    def _tell(
        self, kind: Literal["begin", "step", "evaluation", "end"], method: str, loss: float | None = None
    ) -> None:
        asked = self._asked

        def stop() -> None:  # holds nothing of the run that a callback could read
            asked.append(True)

        numbers = (self._step, self._steps, self._rate, self._clip_norm, loss, self._plan, stop)
        for callback in self._callbacks:
            if hasattr(callback, method):
                evaluated = {"metrics": {"eval_loss": loss, "step": self._step}}
                self._call(callback, method, **(evaluated if method == "on_evaluate" else {}))
                continue
            name = getattr(callback, "__name__", type(callback).__name__)
            self._guarded(f"callback {name}", callback, PublicEvent(kind, *numbers))
            if asked:
                self._stop()

    def _call(self, callback: Any, method: str, **more: Any) -> None:
        """One method of a TrainerCallback; what it does to its arguments reaches nobody but its control."""
        from transformers import TrainerControl, TrainerState

        self._control = self._control or TrainerControl()
        run, every = self._run, self._run.evaluation_interval(self._steps)
        shown = {"max_steps": self._steps, "logging_steps": run.log_every, "eval_steps": every}
        history = [dict(row) for row in self._logs]
        state = TrainerState(global_step=self._step, log_history=history, **shown)
        # Public numbers in the names of TrainingArguments, and no path.
        words = {"seed": run.seed, "run_name": run.label, "report_to": list(run.report_to)}
        args = SimpleNamespace(**shown, **words, disable_tqdm=False)
        name, heard = f"callback {type(callback).__name__}.{method}", getattr(callback, method)
        given = self._guarded(name, heard, args, state, self._control, **more)
        if given is not None:
            self._control = given
        if getattr(self._control, "should_training_stop", False):
            self._stop()

    def _guarded(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What the function gives. The first error stops the run; after it nothing of the user's is called any more."""
        if self.failed is not None:
            return None
        try:
            return function(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - code of others raises anything
            said = error.what if isinstance(error, PrivloraError) else reason_of(error)
            self.failed = RunError(
                f"{name} failed at step {self._step}, up to which all is saved: {type(error).__name__}: {said}",
                fix="mend it, or leave it out, and go on with resume_run",
            )
            self.failed.__cause__ = error
            self._stop()
            return None


_OF_TRAINER: Final = {"held_out_loss": "eval_loss"}


class Several(Observer):
    """An observer that gives others all that it hears, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        def hear(method: str, *arguments: Any) -> None:
            for observer in observers:
                getattr(observer, method)(*arguments)

        for method in vars(Observer):
            if method.startswith("on_"):
                setattr(self, method, partial(hear, method))


@contextmanager
def watching(
    observer: Observer,
    callbacks: Sequence[Any],
    loggers: Sequence[Logger],
    plan: Plan | None,
    settings: Settings,
) -> Iterator[tuple[Observer, _Callbacks]]:
    """An observer for the steps that are taken inside, which tells all of these, and what tells callbacks and loggers.

    Raises RunError in the place of Interrupted where an error in one of them is why the run stopped.
    """
    heard = _Callbacks(callbacks, loggers, plan, settings)
    try:
        yield Several((observer, heard)) if callbacks or loggers else observer, heard
    except Interrupted:
        heard.on_end()
        if heard.failed is not None:
            raise heard.failed from heard.failed.__cause__
        raise
    heard.on_end()
    if heard.failed is not None:
        _log.warning("the run is complete, but %s", heard.failed.what)
