"""A run from its settings to its release: what `privlora.train_run` and `privlora.resume_run` do once they have read
their arguments."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from privlora.accounting import LedgerSummary, Plan, read_ledger
from privlora.calling import Given, of_memory
from privlora.config import Settings
from privlora.config.one_place import MICRO_BATCH
from privlora.consoles import err, is_wanted
from privlora.methods import find_row
from privlora.precision import own_context
from privlora.profiling import profiled
from privlora.rehearsals.kept import (
    Chosen,
    because,
    cost_on_private,
    keep_choice,
    measuring,
    read_choice,
)
from privlora.rehearsals.settling import settle
from privlora.reporting import publish
from privlora.reporting.answers import answers
from privlora.reporting.facts import gather
from privlora.reporting.finished import texts_of_finished_run
from privlora.reporting.texts import publish_texts
from privlora.reporting.wording import MEND, coverage_in_words, faults
from privlora.result import Result
from privlora.synthesis.embeddings import base_alone
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.callbacks import watching
from privlora.training.checkpoint import NO_RUN
from privlora.training.classifier import head_of, padded_as
from privlora.training.files import RunFolder, read_lines, write_atomically
from privlora.training.fitting import Fitted, in_micro_batches, with_micro_batches
from privlora.training.footprint import free_but_for_own
from privlora.training.identity import (
    Identity,
    fixed,
    identify,
    keep_identity,
    proof_of,
    refuse_others,
    refuse_unlike_processes,
)
from privlora.training.inputs import Data, fitted, load_all
from privlora.training.loggers import Service, loggers, public_rows, steps_shown
from privlora.training.loop import Interrupted, finish_training, train_beside
from privlora.training.model_checks import refuse_unknown_tokens
from privlora.training.models import (
    check_model,
    given_or_loaded,
    look_at_model,
    refuse_missing,
    refuse_other_logits,
    unchanged_afterwards,
)
from privlora.training.observer import Observer
from privlora.training.progress import WRITING, RichObserver
from privlora.training.ranks import Ranks
from privlora.training.reach import coverage
from privlora.training.sharding import load_sharded, refuse_in_several
from privlora.training.takeover import is_over, make_room
from privlora.training.texts.final_texts import final_texts

_DEFAULT_RATE: Final = (
    "learning_rate, the method's default. `learning_rate: auto` finds your model's own before the first step, at no "
    "epsilon"
)


class _Screen(RichObserver):
    """What a call in Python shows of its run. A terminal shows what `privlora train` shows there. Anything else may be
    kept and passed on, as notebooks and logs of jobs are: it gets no phases, whose times would tell how long reading
    took."""

    def on_phase(self, what: str) -> None:
        """On a terminal; elsewhere the last one alone."""
        if self._console.is_terminal or what == WRITING:
            super().on_phase(what)


@contextmanager
def _without_bars() -> Iterator[None]:
    """No bars of transformers and of the hub inside, as they show while a model is loaded; afterwards as before."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    of_models, of_the_hub = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the environment may have the last word on bars of the hub
        logging.disable_progress_bar()  # both kinds
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if of_models:
                logging.enable_progress_bar()
            (enable_progress_bars if of_the_hub else disable_progress_bars)()


@contextmanager
def shown(asked: bool | None, observer: Observer | None) -> Iterator[Observer | None]:
    """The caller's observer; without one, one that shows the run, unless the caller wants nothing shown."""
    if observer is not None or not is_wanted(asked):
        with nullcontext() if is_wanted(asked) else _without_bars():
            yield observer
        return
    with _Screen(err()) as screen:
        yield screen


@own_context()
def train_and_publish(
    settings: Settings, plan: Plan | None, given: Given, ranks: Ranks, *, fresh: bool
) -> Result:
    """All of a run in its first process; the others of ``ranks`` take their share of every batch."""
    observer = given.observer
    begins = observer.on_phase
    if ranks.size > 1:
        refuse_in_several(settings, given=given.model is not None)
    sources = given.records, given.evaluation

    early, tokenizer = None, given.tokenizer
    # Before the weights, which take longest; of several processes after them, since all hold copies, and what memory is
    # free would tell of the records.
    if fresh and given.model is None and ranks.size == 1:
        begins("looking at the model's files")
        refuse_missing(settings.model)
        settings, _, tokenizer = look_at_model(settings, tokenizer)
        begins("reading the records")
        early = load_all(settings, tokenizer, *sources)
    begins("loading the model")
    if settings.model.fully_shard and ranks.size > 1:
        model, own = load_sharded(settings.model, ranks)
        tokenizer = own if tokenizer is None else tokenizer
    else:
        own = tokenizer
        model, tokenizer = ranks.each(
            lambda: given_or_loaded(settings.model, given.model, own, head_of(settings))
        )
    refuse_unlike_processes(model, ranks)
    settings = fitted(settings, model)
    folder = RunFolder(Path(settings.run.output))
    adapter = ranks.each(lambda: check_model(settings, model, tokenizer))
    refuse_other_logits(settings, model, ranks)
    reached = coverage(adapter)
    if reached["left_out"] or reached["experts"]:
        observer.on_choice(f"target_modules, {coverage_in_words(reached)}")
    weighed = find_row(settings.method.name).weighed
    has_auto = weighed and settings.data.label is None and settings.data.chosen is None
    by_default = settings.method.learning_rate is None and not (settings.auto and settings.auto.choose)
    if fresh and settings.privacy.private and by_default and has_auto:
        observer.on_choice(_DEFAULT_RATE)
    asked = settings.run.tokens_per_micro_batch
    told = observer.on_public_work
    over = not fresh and is_over(folder)

    def split() -> tuple[Settings, Fitted | None]:
        device = next(model.parameters()).device
        if asked != "auto" or over:  # there is no step to cut into micro-batches
            return settings, None
        if device.type != "cpu":
            return with_micro_batches(settings, model, device)
        # Processes share the machine's memory.
        room: dict[str, Any] = {"sharing": ranks.size, "loaded": False, "free": free_but_for_own()}
        return with_micro_batches(settings, model, device, **room)

    settings, micro_batches = ranks.same(split)
    if micro_batches is not None:
        observer.on_choice(micro_batches.why)

    def prepare() -> tuple[Settings, Plan | None, Data, Chosen | None, Identity]:
        if early is None:
            begins("reading the records")
            whose = None if fresh else lambda data: refuse_others(folder, identify(data, model))
            data = load_all(settings, tokenizer, *sources, model=model, whose=whose)
        else:
            data = early
            refuse_unknown_tokens(model, data.examples, data.evaluation)
        observer.on_data(data.summary, settings)
        identity = identify(data, model)
        if not (fresh and plan is not None and settings.auto is not None and settings.auto.choose):
            return settings, plan, data, None, identity
        # Whoever reads their losses learns nothing of how much memory was free here.
        tokens = settings.run.max_tokens
        rehearsed = settings if asked != "auto" else in_micro_batches(settings, min(tokens, MICRO_BATCH))
        bound = rehearsed, plan, identity, torch.__version__, next(model.parameters()).device
        with measuring(folder, *bound) as measured:
            chosen = settle(rehearsed, plan, model, tokenizer, told, measured)
        facts = {**chosen.facts, **cost_on_private(plan, len(chosen.facts["rows"]))}
        chosen = Chosen(in_micro_batches(chosen.settings, tokens), facts)
        observer.on_choice(because(chosen.facts))
        settled = replace(plan, clip_norm=chosen.settings.privacy.clip_norm)
        return chosen.settings, settled, data, chosen, identity

    settings, plan, data, chosen, identity = ranks.same(prepare)
    with unchanged_afterwards(model):
        if settings.data.label is not None:
            padded_as(model, tokenizer)
        begins(f"preparing the {'release' if over else 'first step' if fresh else 'next step'}")
        # In all of them before the folder exists.
        parts = ranks.each(lambda: build_parts(settings, model, PublicStart(tokenizer, given.generator)))
        with parts.adapter:
            if not ranks.first:
                train_beside(parts, data, ranks)
                return ranks.same(_by_the_first)
            if fresh:
                make_room(folder)
                folder.create(protects=settings.privacy.protects)
                # First: whatever can be resumed has it.
                planned = fixed(settings, parts.hyper.to_dict())
                choice = "" if chosen is None else proof_of(chosen.text)
                keep_identity(folder, replace(identity, settings=planned, choice=choice))
                keep_choice(folder, chosen)
                folder.measured.unlink(missing_ok=True)
                # What a resumed run reads: ``auto`` where it was asked for, since it may be on another machine; and in
                # what the learning rate is, which another version's default must not change.
                rate_in = {"relative_rate": parts.hyper.relative_rate}
                kept = settings.changed(run={"tokens_per_micro_batch": asked}, method=rate_in)
                write_atomically(folder.settings, parts.hyper.in_comments(kept) + kept.to_yaml())
                write_atomically(folder.data_summary, json.dumps(data.summary.to_dict()) + "\n")
            known = plan
            if settings.privacy.private and known is None:
                known = read_ledger(folder.ledger).plan
            reported = loggers(settings.run.report_to, folder, settings.run.label)
            observer.on_run(known, settings)
            warn = observer.on_warning
            if fresh and (Path(settings.model.name) / folder.report.name).is_file():
                warn(
                    "the base model comes from a run of privlora. For records in both runs, the epsilons add up: "
                    "`privlora budget` says to what"
                )
            tell = observer.on_profile if given.profile else None
            with (
                _resumable(settings, given),
                watching(observer, given.callbacks, reported, known, settings) as (all_of_them, heard),
                profiled(folder, parts.adapter.device, settings.privacy.steps, tell) as traces,
            ):
                finish_training(parts, data, folder, plan, observer=all_of_them, ranks=ranks)
            rows = _rows(parts, folder, known) if reported else []
            services = [one for one in reported if isinstance(one, Service)]
            for logger in reported:
                if logger not in services:
                    logger.end(rows)
            summary = read_ledger(folder.ledger) if settings.privacy.private else None
            if settings.synthesis is not None and settings.synthesis.publish:
                run_id = NO_RUN if summary is None else summary.run_id
                texts = final_texts(parts, folder, run_id, observer.on_texts)
                report = gather(parts, summary, read_lines(folder.evaluations), choice=read_choice(folder))
                begins(WRITING)
                with base_alone(model, parts.adapter) as base:
                    publish_texts(folder, report, texts, settings, base, tokenizer, summary)
            else:
                begins("asking the model")
                with parts.exported() as told_model:
                    said = answers(told_model, tokenizer, settings.data, data.public, parts.adapter)
                for odd in faults(said):
                    warn(f"{odd}. {MEND}")
                begins(WRITING)
                publish(folder, parts, summary, answers=said)
            for service in services if heard.begun else ():
                service.end(rows)
    was_given = given.model is not None
    found = ranks.same(lambda: _result_of(folder, summary, settings.privacy.steps, base_was_given=was_given))
    return replace(found, profile=traces[0]) if traces else found


@contextmanager
def _resumable(settings: Settings, given: Given) -> Iterator[None]:
    """Whoever stops what is inside reads how to go on."""
    try:
        yield
    except Interrupted as stop:
        names = [name for name in ("model", "tokenizer") if getattr(given, name) is not None]
        names += [name for name, was_there in of_memory(settings).items() if was_there]
        more = "".join(f", {name}=..." for name in names)
        stop.add_note(f"All is saved. Go on with privlora.resume_run({settings.run.output!r}{more})")
        raise


def _rows(parts: Parts, folder: RunFolder, plan: Plan | None) -> list[dict[str, Any]]:
    """Of all of a run that is over."""
    evaluations, run = read_lines(folder.evaluations), parts.settings.run
    steps = parts.settings.privacy.steps
    shown = steps_shown(steps, run.log_every, [row["step"] for row in evaluations])
    return public_rows(plan, shown, (lambda _: None) if parts.ballot else parts.learning_rate, evaluations)


def _by_the_first() -> Result:
    raise AssertionError("only the first process knows")


@own_context()
def ask_finished_run(settings: Settings, *, fresh: bool = True, **given: Any) -> Result:
    """Texts of the adapter of the run in synthesis.source, at no further cost. given: model, tokenizer, observer."""
    folder, summary = texts_of_finished_run(settings, fresh=fresh, **given)
    return _result_of(folder, summary, 0 if summary is None else summary.charges)


def _result_of(
    folder: RunFolder, summary: LedgerSummary | None, steps: int, *, base_was_given: bool = False
) -> Result:
    promise: tuple[float | None, float | None] = (None, None)
    if summary is not None and not summary.plan.insecure_noise:
        promise = summary.epsilon(), summary.plan.delta
    return Result(folder.release, steps, *promise, base_was_given=base_was_given)
