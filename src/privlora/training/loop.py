"""The private training loop, and resuming it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Protocol

import torch

from privlora.accounting import Ledger, Plan, read_ledger
from privlora.accounting.events import StepEvent
from privlora.data.batching import micro_batches
from privlora.data.sampling import PoissonSampler
from privlora.errors import PrivacyError, RunError
from privlora.evaluation import evaluate_next_token
from privlora.mechanisms import GaussianMechanism, MeanMechanism, Mechanism, NoiseSource
from privlora.randomness import private_generator
from privlora.training.assembly import Parts
from privlora.training.checkpoint import Mark, load_checkpoint, save_checkpoint
from privlora.training.evidence import refuse_lost_charges
from privlora.training.files import RunFolder, append_line, read_lines
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients
from privlora.training.inputs import Data, sampler

# A non-private run has no ledger; its checkpoints belong to it all the same.
_NO_RUN = "non-private"


@dataclass(frozen=True)
class StepReport:
    """What is shown to whoever trains while a run goes on: no loss, no count."""

    step: int
    steps: int
    learning_rate: float
    seconds: float
    """PRIVATE, unlike the rest: a step takes as long as the batch that was drawn is large. Never publish it."""


class Observer(Protocol):
    """Whoever wants to see a run go on."""

    def on_step(self, report: StepReport) -> None: ...

    def on_evaluation(self, step: int, loss: float) -> None: ...

    def on_private_loss(self, step: int, loss: float) -> None:
        """Only called when run.show_private_loss is set; ``loss`` is private data."""


class Interrupted(Exception):
    """The user stopped the run; everything up to ``step`` is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"interrupted after step {step}")
        self.step = step


def train(
    parts: Parts,
    data: Data,
    folder: RunFolder,
    *,
    pad_token_id: int,
    ledger: Ledger | None,
    observer: Observer | None = None,
    instrument: Callable[[Mechanism], Mechanism] | None = None,
) -> int:
    """Run the remaining steps of the plan; returns the number of the last step. ``ledger`` None: non-private mode.

    instrument: for audits; what the loop is to use in the place of its mechanism.

    Takes up the run's checkpoint if there is one. A step that was charged but lost in a crash stays charged, so the
    number of releases never exceeds the plan. Raises Interrupted (after saving) on SIGINT or SIGTERM.
    """
    settings = parts.settings
    privacy, run = settings.privacy, settings.run
    run_id = _NO_RUN
    if ledger is not None:
        run_id = ledger.summary.run_id
        # Where a kill hit the last checkpoint, no later one replaces what it left.
        folder.remove_leftovers()
    saved = load(parts, folder, run_id)
    done = ledger.charges if ledger is not None else saved
    draws = sampler(privacy, len(data.units))
    mechanism = _mechanism(parts, ledger, done, draws)
    if instrument is not None:
        mechanism = instrument(mechanism)
    model = parts.adapter.model
    if done == 0 or (run.evaluate_every and done % run.evaluate_every == 0):
        # Also that of a step which a crash lost: a gap would publish where the run broke.
        _evaluate(parts, data, folder, done, pad_token_id, observer)
    masks = private_generator(privacy.insecure_noise_seed)
    with _stop_on_signal() as stop:
        for step in range(done + 1, privacy.steps + 1):
            started = time.perf_counter()
            records = data.units.draw_records(draws.draw(), draws.generator)
            losses = []
            with training_passes(model, masks, dropout=settings.model.dropout):
                for batch in micro_batches(
                    records, data.examples, max_tokens=run.tokens_per_micro_batch, pad_token_id=pad_token_id
                ):
                    captured, unit_losses = micro_batch_gradients(
                        model, parts.adapter, batch, summed=not mechanism.needs_examples
                    )
                    mechanism.accumulate(captured)
                    losses.append(unit_losses)
            release = mechanism.release()  # the ledger is charged in here, before noise is drawn
            parts.optimizer.step(release, parts.learning_rate(step))
            if parts.average is not None:
                parts.average.update()
            parts.coordinates.advance()
            charge = None if ledger is None else ledger.summary.charge_hashes[step - 1]
            _keep_private_loss(folder, run.show_private_loss, step, charge, losses, observer)
            if observer is not None:
                seconds = time.perf_counter() - started
                observer.on_step(StepReport(step, privacy.steps, parts.learning_rate(step), seconds))
            last, stopping = step == privacy.steps, stop.is_set()
            if last or stopping or step % run.checkpoint_every == 0:
                save(parts, folder, Mark(step, run_id, charge))
            if run.evaluate_every and step % run.evaluate_every == 0 and not last:
                _evaluate(parts, data, folder, step, pad_token_id, observer)
            if stopping and not last:
                raise Interrupted(step)
    _evaluate(parts, data, folder, privacy.steps, pad_token_id, observer)
    return privacy.steps


def finish_training(
    parts: Parts,
    data: Data,
    folder: RunFolder,
    plan: Plan | None,
    *,
    pad_token_id: int,
    observer: Observer | None = None,
    instrument: Callable[[Mechanism], Mechanism] | None = None,
) -> None:
    """Take all steps that are left and close the ledger; a run that is over is only loaded.

    plan: of a new ledger; None goes on with the folder's. Without effect in non-private mode. For the rest see
    ``train``. Raises PrivacyError, with nothing charged, if the run's files prove more releases than its ledger shows.
    """
    take_steps = partial(
        train, parts, data, folder, pad_token_id=pad_token_id, observer=observer, instrument=instrument
    )
    if not parts.settings.privacy.private:
        take_steps(ledger=None)
        return
    if plan is None:
        written = read_ledger(folder.ledger)
        if written.closed:  # crashed while the release was written, or resumed once more
            refuse_lost_charges(folder, written)
            load(parts, folder, written.run_id)
            return
    else:
        refuse_lost_charges(folder, None)
    with Ledger.open(folder.ledger) if plan is None else Ledger.create(folder.ledger, plan) as ledger:
        refuse_lost_charges(folder, ledger.summary)
        take_steps(ledger=ledger)
        ledger.finish()


def save(parts: Parts, folder: RunFolder, mark: Mark) -> None:
    """Checkpoint the public state after the mark's step."""
    states = {"coordinates": parts.coordinates.state_dict(), "optimizer": parts.optimizer.state_dict()}
    if parts.average is not None:
        states["average"] = parts.average.state_dict()
    if parts.adaptive is not None:
        states["clip_norm"] = parts.adaptive.state_dict()
    save_checkpoint(folder.checkpoint, states, mark)


def load(parts: Parts, folder: RunFolder, run_id: str) -> int:
    """Take up the checkpoint, if any; returns its step or 0. Raises RunError if it does not fit."""
    if not folder.checkpoint.exists():
        return 0
    step, states = load_checkpoint(folder.checkpoint, run_id=run_id)
    try:
        parts.coordinates.load_state_dict(states["coordinates"])
        parts.optimizer.load_state_dict(states["optimizer"])
        if parts.average is not None:
            parts.average.load_state_dict(states["average"])
        if parts.adaptive is not None:
            parts.adaptive.load_state_dict(states["clip_norm"])
    except KeyError as missing:
        raise RunError(
            f"checkpoint {str(folder.checkpoint)!r} holds no {missing}, which the run's method needs",
            why="other settings, or a version of privlora with other defaults, wrote it; the charges stay",
            fix="resume with the version that began the run, or set in config.resolved.yaml what it had",
        ) from None
    return step


def _mechanism(parts: Parts, ledger: Ledger | None, done: int, draws: PoissonSampler) -> Mechanism:
    privacy = parts.settings.privacy
    if ledger is None:
        return MeanMechanism(parts.coordinates, expected_batch_size=privacy.b, steps=privacy.steps, done=done)
    plan = ledger.plan
    if (plan.unit, plan.insecure_noise) != (privacy.unit, privacy.insecure_noise_seed is not None):
        raise PrivacyError(
            f"{ledger.summary.path}: the privacy unit or the kind of noise is not what was planned",
            why="the stated epsilon holds for the plan only",
            fix="resume with the settings of the first run",
        )
    return GaussianMechanism(
        parts.coordinates,
        clip_norm=plan.clip_norm,
        # What is charged is what is sampled; the ledger refuses it if it is not what was planned.
        event=StepEvent(draws.sampling, plan.event.noise_multiplier, parts.coordinates.event_layers),
        expected_batch_size=plan.expected_batch_size,
        ledger=ledger,
        noise=NoiseSource(privacy.insecure_noise_seed),
        clipping=parts.hyper.clipping,
        adaptive=parts.adaptive,
    )


def _evaluate(
    parts: Parts, data: Data, folder: RunFolder, step: int, pad_token_id: int, observer: Observer | None
) -> None:
    """Held-out loss of what would be exported now, on public records, into release/."""
    if not len(data.evaluation) or any(row["step"] == step for row in read_lines(folder.evaluations)):
        return
    if step:
        parts.install_result()
    result = evaluate_next_token(parts.adapter.model, data.evaluation, pad_token_id=pad_token_id)
    parts.coordinates.install()
    append_line(folder.evaluations, {"step": step, **result.to_dict()})
    if observer is not None:
        observer.on_evaluation(step, result.loss_per_example)


def _keep_private_loss(
    folder: RunFolder,
    show: bool,
    step: int,
    charge: str | None,
    losses: list[torch.Tensor],
    observer: Observer | None,
) -> None:
    values = torch.cat(losses) if losses else torch.zeros(0)
    loss = float(values.mean()) if len(values) else None
    append_line(folder.private_losses, {"step": step, "units": len(values), "loss": loss, "charge": charge})
    if show and observer is not None and loss is not None:
        observer.on_private_loss(step, loss)


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGINT or SIGTERM sets; a second signal acts as usual. Only the main thread may do this."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, old[signal.Signals(number)])

    for number in old:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
