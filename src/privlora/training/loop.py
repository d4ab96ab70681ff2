"""The private training loop, and resuming it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite, log
from typing import Final

import torch

from privlora.accounting import Ledger, Plan, read_ledger
from privlora.config import Settings
from privlora.errors import ConfigError, PrivacyError, RunError
from privlora.evaluation import evaluate_held_out
from privlora.mechanisms import CorrelatedNoise, Mechanism
from privlora.pages.numbers import finite
from privlora.stages import CHECKPOINT, EVALUATION, PROCESSES, listener, stage
from privlora.training.assembly import Parts, build_step
from privlora.training.checkpoint import NO_RUN, Mark, load_checkpoint, refuse_lost_charges, save_checkpoint
from privlora.training.files import RunFolder, append_line, read_lines
from privlora.training.inputs import Data
from privlora.training.observer import Observer, StepReport
from privlora.training.promise import kept_cycles
from privlora.training.ranks import Ranks, RankStopped
from privlora.training.shared_step import SharedStep
from privlora.training.stopping import stop_on_signal
from privlora.training.texts.voting import take_votes, warm_start

_log = logging.getLogger(__name__)

_LATEST: Final = 600.0  # s from one checkpoint to the next, where steps take long
_NOISE: Final = "noise"  # PRIVATE part of a checkpoint, of runs with privacy.bands


class Interrupted(Exception):
    """The user stopped the run; everything up to ``step`` is saved. counted: what it counts, if no steps."""

    def __init__(self, step: int, counted: str | None = None) -> None:
        super().__init__(f"interrupted after {counted or 'step'} {step}")
        self.step, self.counted = step, counted


def train(
    parts: Parts,
    data: Data,
    folder: RunFolder,
    *,
    ledger: Ledger | None,
    observer: Observer | None = None,
    instrument: Callable[[Mechanism], Mechanism] | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Run the remaining steps of the plan; returns the number of the last step. ``ledger`` None: non-private mode.

    instrument: for audits; what the loop is to use in the place of its mechanism. ranks: whose first process this is,
    while the others are in ``train_beside``.

    Takes up the run's checkpoint if there is one, and with it correlated noise, if no step was charged after it; else
    that begins anew, which costs nothing (mechanisms.banded). A step that was charged but lost in a crash stays
    charged, so the number of releases never exceeds the plan. Raises Interrupted (after saving) on a signal.
    """
    privacy, run = parts.settings.privacy, parts.settings.run
    ranks = ranks or Ranks()
    run_id, observer = NO_RUN, Observer() if observer is None else observer
    if parts.texts is not None:
        parts.texts.tell, parts.texts.warn = observer.on_public_work, observer.on_warning
    if ledger is not None:
        run_id = ledger.run_id
        # Where a kill hit the last checkpoint, no later one replaces what it left.
        folder.remove_leftovers()
    saved = load(parts, folder, run_id)
    before = 0 if ledger is None else ledger.plan.before_training
    done = saved if ledger is None else ledger.charges - before
    if done < 0:
        raise PrivacyError(
            f"{folder.ledger}: training is to begin, and the phases before it lack {-done} of their releases",
            why="the ledger accepts the plan's events in their order only",
            fix="make the releases of the earlier phases first",
        )
    if done > saved and parts.ballot is None:
        lost = f"step {done} was" if done == saved + 1 else f"steps {saved + 1} to {done} were"
        observer.on_warning(
            f"{lost} charged and not saved when the run broke off: they count for epsilon and train "
            "nothing. run.checkpoint_every bounds how many that may be"
        )
    if not saved:
        warm_start(parts)  # also where a crash lost all steps, which stay charged
    if parts.ballot is not None and ledger is not None:
        return _vote(parts, data, folder, ledger, observer)
    cycles = None if ledger is None else kept_cycles(folder, ledger, data, privacy.insecure_noise_seed)
    correlated = cycles is not None and cycles.coefficients
    noise = CorrelatedNoise(correlated, parts.coordinates) if correlated else None
    if noise is not None and 0 < saved == done:
        noise.load_state_dict(load_checkpoint(folder.checkpoint, run_id=run_id)[1].get(_NOISE, {}))
    one = build_step(parts, data, ledger, done=done, instrument=instrument, cycles=cycles, correlated=noise)
    ranks.same(lambda: _Begun(done, None if ledger is None else ledger.plan))
    shared = SharedStep(one, ranks) if ranks.size > 1 else None
    take = (lambda: one.take().losses) if shared is None else shared.take

    def evaluate(step: int) -> None:
        with stage(EVALUATION), nullcontext() if shared is None else shared.waiting():
            _evaluate(parts, data, folder, step, observer)

    if _evaluated(parts.settings, done):
        # Also that of a step which a crash lost: a gap would publish where the run broke.
        evaluate(done)
    kept, saved_at = done, time.monotonic()  # nothing that this process did is missing in the checkpoint

    def mark(step: int) -> Mark:
        charge = None if ledger is None or not step else ledger.charge_hash(before + step)
        return Mark(before + step, run_id, charge)

    def save(step: int) -> None:
        nonlocal kept, saved_at
        with stage(CHECKPOINT):
            over = privacy.steps in (step, done)
            kept_noise = {} if noise is None or over else {_NOISE: noise.state_dict()}
            save_checkpoint(folder.checkpoint, parts.present() | kept_noise, mark(step))
        kept, saved_at = step, time.monotonic()

    if noise is not None and 0 < saved < done == privacy.steps:
        # The last step was lost, and no later checkpoint drops what earlier ones kept of the noise.
        save(saved)
    with stop_on_signal() as stop:

        def agree(step: int) -> bool:
            """Whether any process was asked to stop."""
            try:
                with stage(PROCESSES):
                    return ranks.any(stop.is_set())
            except RankStopped:
                if kept < step:
                    save(step)
                raise

        observer.on_start(done, stop.set)
        for step in range(done + 1, privacy.steps + 1):
            started = time.perf_counter()
            if (heard := listener()) is not None:
                heard.step_begins()
            try:
                with _stops_among_texts(parts, stop, step - 1 if kept == step - 1 else None):
                    losses = take()
            except RankStopped:
                if kept < step - 1:
                    save(step - 1)  # of this step nothing is released
                raise
            _keep_private_loss(folder, mark(step), losses, one.halved)
            seconds = time.perf_counter() - started
            clip_norm = privacy.clip_norm if parts.adaptive is None else parts.adaptive.value
            rate, shown_norm = parts.learning_rate(step), clip_norm if privacy.private else None
            observer.on_step(StepReport(step, privacy.steps, rate, seconds, shown_norm))
            last = step == privacy.steps
            stopping = agree(step)
            late = time.monotonic() - saved_at >= _LATEST
            if last or stopping or late or step % run.checkpoint_every == 0:
                save(step)
            if _evaluated(parts.settings, step) and not last:
                evaluate(step)
                stopping = agree(step)  # a loss may be why somebody wants to stop
            if stopping and not last:
                if kept < step:
                    save(step)
                raise Interrupted(step)
    evaluate(privacy.steps)
    return privacy.steps


def train_beside(parts: Parts, data: Data, ranks: Ranks) -> None:
    """What the other processes of a run do while the first one is in ``train``: their share of every batch.

    They write nothing, and can charge nothing: their parts have neither ledger nor noise. Raises Interrupted with the
    first process, RankStopped where it is gone.
    """
    begun = ranks.same(_Begun)
    if begun is None:
        return
    steps = parts.settings.privacy.steps
    shared = SharedStep(build_step(parts, data, begun.plan, done=begun.done), ranks)

    def wait() -> None:
        with shared.waiting():
            pass

    if _evaluated(parts.settings, begun.done):
        wait()
    with stop_on_signal("") as stop:
        for step in range(begun.done + 1, steps + 1):
            shared.take()
            stopping = ranks.any(stop.is_set())
            if _evaluated(parts.settings, step) and step < steps:
                wait()
                stopping = ranks.any(stop.is_set())
            if stopping and step < steps:
                raise Interrupted(step)
    wait()


def _evaluated(settings: Settings, step: int) -> bool:
    """Whether what stands after ``step`` steps is evaluated, beside the last one."""
    every = settings.run.evaluation_interval(settings.privacy.steps)
    return step == 0 or bool(every and step % every == 0)


@dataclass(frozen=True)
class _Begun:
    """Where a run's first process is: steps that are done, and the plan of its ledger, if it has one."""

    done: int = 0
    plan: Plan | None = None


@contextmanager
def _stops_among_texts(parts: Parts, stop: threading.Event, kept: int | None) -> Iterator[None]:
    """Public texts take most of a step, and stopping among them costs nothing.

    Within it their work raises Interrupted where ``stop`` is set and ``kept`` steps, which a checkpoint has, are all
    there are; None: some would be lost.
    """
    if parts.texts is None or kept is None:
        yield
        return
    heard = parts.texts.tell

    def tell(what: str, done: int, total: int) -> None:
        if stop.is_set():
            raise Interrupted(kept)
        heard(what, done, total)

    parts.texts.tell = tell
    try:
        yield
    finally:
        parts.texts.tell = heard


def _vote(parts: Parts, data: Data, folder: RunFolder, ledger: Ledger, observer: Observer) -> int:
    """``train`` of a row that releases votes: each round is a step of the ledger."""
    steps = parts.settings.privacy.steps
    publish = parts.settings.synthesis is not None and parts.settings.synthesis.publish
    begun = time.perf_counter()
    if ledger.charges == 0 and not publish:
        _evaluate(parts, data, folder, 0, observer)
    with stop_on_signal(_AFTER_ROUND) as stop:
        observer.on_start(ledger.charges, stop.set)

        def save() -> None:
            nonlocal begun
            assert parts.ballot is not None
            charges = ledger.charges
            charge = ledger.charge_hash(charges) if charges else None
            save_checkpoint(folder.checkpoint, parts.present(), Mark(charges, ledger.run_id, charge))
            if parts.ballot.over:
                return
            if not parts.ballot.waiting:
                observer.on_step(StepReport(charges, steps, None, time.perf_counter() - begun))
            begun = time.perf_counter()
            if stop.is_set():
                raise Interrupted(charges, "round")

        take_votes(parts, data, ledger, save)
    if not publish:
        _evaluate(parts, data, folder, steps, observer)
    return steps


def finish_training(
    parts: Parts,
    data: Data,
    folder: RunFolder,
    plan: Plan | None,
    *,
    observer: Observer | None = None,
    instrument: Callable[[Mechanism], Mechanism] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Take all steps that are left and close the ledger; a run that is over is only loaded.

    plan: of a new ledger; None goes on with the folder's. Without effect in non-private mode. For the rest see
    ``train``. Raises PrivacyError, with nothing charged, if the run's files prove more releases than its ledger shows.
    """
    take_steps = partial(train, parts, data, folder, observer=observer, instrument=instrument, ranks=ranks)
    if not parts.settings.privacy.private:
        take_steps(ledger=None)
        return
    if plan is None:
        written = read_ledger(folder.ledger)
        planned, asked = written.plan.phases[-1][1], parts.settings.privacy.steps
        if planned != asked:  # epsilon is the ledger's, and a report must not speak of other steps
            raise PrivacyError(
                f"privacy.steps={asked}, and {planned} were planned",
                why="the stated epsilon holds for the plan only",
                fix=f"write privacy.steps: {planned} again, in {folder.settings}",
            )
        if written.closed:  # crashed while the release was written, or resumed once more
            refuse_lost_charges(folder, written)
            if not folder.checkpoint.exists():
                raise RunError(
                    f"the run in {str(folder.root)!r} is finished, and its checkpoint is gone",
                    why="what it began with would be published in the place of what was trained",
                    fix="restore private/checkpoint.safetensors, or leave release/ as it is: it is complete; or begin "
                    "a new run, at a cost of its own",
                )
            load(parts, folder, written.run_id)
            if ranks is not None:
                ranks.same(lambda: None)  # there is no step for the others
            return
    else:
        refuse_lost_charges(folder, None)
    with Ledger.open(folder.ledger) if plan is None else Ledger.create(folder.ledger, plan) as ledger:
        refuse_lost_charges(folder, ledger.summary)
        take_steps(ledger=ledger)
        ledger.finish()


def load(parts: Parts, folder: RunFolder, run_id: str) -> int:
    """Take up the checkpoint, if any; returns its step or 0. Raises RunError if it does not fit."""
    if not folder.checkpoint.exists():
        return 0
    step, states = load_checkpoint(folder.checkpoint, run_id=run_id)
    try:
        parts.take_states(states)
    except ConfigError as misfit:
        raise RunError(
            f"checkpoint {str(folder.checkpoint)!r}: {misfit.what}",
            why="other settings, or a version of privlora with other defaults, wrote it; the charges stay",
            fix="resume with the version that began the run, or set in config.resolved.yaml what it had",
        ) from None
    return step


def _evaluate(parts: Parts, data: Data, folder: RunFolder, step: int, observer: Observer) -> None:
    """Held-out loss of what would be exported now, on public records, into release/."""
    before = read_lines(folder.evaluations)
    if not len(data.evaluation) or any(row["step"] == step for row in before):
        return
    if step:
        parts.install_result()
    result = evaluate_held_out(parts.adapter.model, data.evaluation, parts.adapter.without_terms)
    parts.coordinates.install()
    append_line(folder.evaluations, {"step": step, **finite(result.to_dict())})
    observer.on_evaluation(step, result.loss_per_example)
    if not isfinite(result.loss_per_example) and all(row["loss_per_example"] is not None for row in before):
        mend = (
            "stop, and begin a new run at a smaller method.learning_rate" if step else "check the base model"
        )
        observer.on_warning(
            f"the public held-out loss after step {step} is not a finite number, so the model answers nothing of use; "
            f"steps go on, and each costs its epsilon. Fix: {mend}"
        )
    if not step and (what := _worse_than_guessing(parts, result.loss_per_example)):
        observer.on_warning(what)


def _worse_than_guessing(parts: Parts, loss: float) -> str | None:
    """What to say of a base model that finds every token of the vocabulary as likely as the right one, or likelier."""
    data, tokens = parts.settings.data, getattr(parts.adapter.model.config, "vocab_size", None)
    if data.label is not None or data.chosen is not None or not isinstance(tokens, int) or tokens < 2:
        return None
    if not loss > log(tokens) + _CLEARLY:
        return None
    return (
        f"the base model answers the public records worse than guessing does ({loss:.2f} nats a token; one of {tokens} "
        f"tokens at random has {log(tokens):.2f}), as with a tokenizer of another model; steps go on, and each costs "
        "its epsilon. Fix: stop, and check model.name, its tokenizer files and the records"
    )


_CLEARLY: Final = 0.5  # nats, by which small and untrained models may be worse


def _keep_private_loss(folder: RunFolder, mark: Mark, losses: torch.Tensor, halved: int | None) -> None:
    loss = float(losses.mean()) if len(losses) else None
    row = {"step": mark.step, "units": len(losses), "loss": loss, "charge": mark.charge}
    if halved is not None:
        row["tokens_per_micro_batch"] = halved
    append_line(folder.private_losses, row)


_AFTER_ROUND: Final = (
    "stopping after this round, and saving. A second Ctrl-C or SIGTERM stops at once: a round that "
    "is not saved by then is lost, and its epsilon is spent"
)
