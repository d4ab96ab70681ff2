"""One cell: train, score on the records of its role, keep its ledger alone. Model and tokens stay for the next cell."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privlora.accounting import read_ledger
from privlora.config import AT_CLIENTS, Settings
from privlora.data.examples import Examples
from privlora.data.records import load_records
from privlora.data.tasks import find_task
from privlora.errors import DataError, PrivloraError, RunError
from privlora.evaluation import ClassResult, evaluate_classes, evaluate_next_token, evaluate_task
from privlora.federated.history import Round, RoundObserver
from privlora.lab.studies.results import Role, Row
from privlora.lab.studies.settings import Cell
from privlora.methods import find_row
from privlora.reporting.statement import versions
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.base_weights import with_adapter
from privlora.training.classifier import head_of, padded_as
from privlora.training.files import RunFolder, set_times
from privlora.training.fitting import with_micro_batches
from privlora.training.footprint import free_bytes
from privlora.training.inputs import Data, fitted, load_data, tokenise
from privlora.training.loop import Interrupted, finish_training
from privlora.training.models import check_model, load_model, unchanged_afterwards
from privlora.training.promise import plan_privacy


@dataclass(frozen=True)
class Job:
    """A cell to run. ``shared``: whether its role sees one half of the evaluation records."""

    cell: Cell
    role: Role
    fingerprint: str
    settings: Settings
    shared: bool
    folder: Path


@dataclass
class _Loaded:
    """What cells of a task share."""

    key: str
    data: Data | None
    """None for federations, whose clients read ``records``."""
    records: Sequence[Mapping[str, Any]] | None
    """To be cut into clients; None where there is nothing to cut."""
    evaluation: Examples
    raw: list[dict[str, Any]]
    """Evaluation records as they were read, for a task's metric."""
    before: dict[tuple[int, ...], dict[str, Any]]


class _EveryRound(RoundObserver):
    """Ends a federation of which a round came to nothing: others took more steps at the same epsilon."""

    def on_round(self, done: Round, rounds: int) -> None:
        if done.void is not None:
            raise RunError(f"round {done.step} is void: {done.void}", fix="mend it, then --retry-failed")


class Runner:
    """Runs cells one after the other in this process and keeps the model and data that the last one used.

    workers: processes like this one, which share the machine's memory, and ``gpus`` if it has any.
    """

    def __init__(self, workers: int = 1, gpus: int = 1) -> None:
        self._workers, self._gpus = workers, gpus
        self._free = 0.0
        self._model_key: str | None = None
        self._model: Any = None
        self._tokenizer: Any = None
        self._start = PublicStart(None)
        self._loaded: _Loaded | None = None

    def run(self, job: Job) -> Row:
        """The finished run's row; what fails in training is recorded in it.

        Raises PrivloraError if the task cannot be loaded or scored, so that no cell of it can run; Interrupted on a
        signal.
        """
        loaded = self._load(job)
        share = _share(job, len(loaded.raw))
        if share not in loaded.before:
            loaded.before[share] = self._score(loaded, job, share)
        cpu = time.process_time()
        facts: dict[str, Any] = {"delta": job.settings.privacy.delta, "steps": job.settings.privacy.steps}
        scores: dict[str, Any] = {}
        failure = None
        try:
            train = self._train if job.settings.federation is None else self._federate
            scores, more = train(loaded, job, share)
            facts |= more
        except Interrupted:
            raise
        except Exception as problem:  # noqa: BLE001 - one failed run must not end a study of thousands
            text = " ".join(str(problem).split())[:300]
            failure = text if isinstance(problem, PrivloraError) else f"{type(problem).__name__}: {text}"
        facts |= {"cpu_seconds": round(time.process_time() - cpu, 2), "versions": versions()}
        return Row(job.cell, job.role, job.fingerprint, failure, scores, loaded.before[share], facts)

    def _load(self, job: Job) -> _Loaded:
        settings = job.settings
        head = head_of(settings)
        model_key = f"{settings.model.model_dump_json()} {head}"
        privacy = settings.privacy.model_dump(
            include={"unit", "user_column", "max_records_per_user", "delta", "private"}
        )
        votes = find_row(settings.method.name).releases == "votes"  # who vote need their texts
        federated = settings.federation is not None
        key = f"{model_key} {settings.data.model_dump_json()} {privacy} {votes} {federated}"
        if self._model_key != model_key:
            self._model_key = self._loaded = self._model = None  # the old one's memory first
            self._model, self._tokenizer = load_model(settings.model, head)
            if head is not None:
                padded_as(self._model, self._tokenizer)
            self._free = free_bytes(self._model.device)  # before records are read
            self._model_key, self._start = model_key, PublicStart(self._tokenizer)
        if self._loaded is None or self._loaded.key != key:
            evaluation = settings.data.evaluation
            assert evaluation is not None
            raw = load_records(evaluation, format=settings.data.format)
            given = fitted(settings, self._model)
            if federated:
                records, own = None, given.data
                if own.path != AT_CLIENTS:
                    records = load_records(own.path, format=own.format)
                self._loaded = _Loaded(key, None, records, tokenise(raw, own, self._tokenizer), raw, {})
            else:
                data = load_data(given, self._tokenizer, evaluation=raw, model=self._model, all_public=True)
                self._loaded = _Loaded(key, data, None, data.evaluation, raw, {})
        return self._loaded

    def _score(self, loaded: _Loaded, job: Job, share: tuple[int, ...]) -> dict[str, Any]:
        """Of the model as it stands now, on these evaluation records."""
        chosen = loaded.evaluation.like(loaded.evaluation[i] for i in share)
        data = job.settings.data
        if chosen.answers is not None:
            scores = _of_classes(evaluate_classes(self._model, chosen), data.task)
        else:
            found = evaluate_next_token(self._model, chosen)
            scores = {"loss": found.loss_per_example, "accuracy": found.accuracy, "records": len(share)}
        if chosen.answers is None and data.task is not None:
            records = [loaded.raw[i] for i in share]
            of = (self._model, self._tokenizer, data.task, records)
            result = evaluate_task(*of, max_length=data.max_length, resamples=100)
            scores |= {"task": result.metric, "task_metric": result.metric_name}
        if not all(math.isfinite(value) for value in scores.values() if isinstance(value, float)):
            raise RunError("a score is not finite", fix="lower the learning rate, or check the records")
        return scores

    def _train(
        self, loaded: _Loaded, job: Job, share: tuple[int, ...]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Scores and facts of the run; leaves the model as it was, and nothing private."""
        folder = RunFolder(job.folder)
        _clear(folder)
        settings = fitted(job.settings, self._model)
        plan = plan_privacy(settings, self._model) if settings.privacy.private else None
        assert loaded.data is not None
        data = replace(loaded.data, evaluation=loaded.evaluation[:0])  # scored here, on the role's share
        check_model(settings, self._model, self._tokenizer)
        device = self._model.device
        sharing = self._workers if device.type == "cpu" else math.ceil(self._workers / self._gpus)
        settings, _ = with_micro_batches(settings, self._model, device, sharing=sharing, free=self._free)
        try:
            with unchanged_afterwards(self._model):
                parts = build_parts(settings, self._model, self._start)
                with parts.adapter:
                    folder.create(protects=settings.privacy.protects)
                    finish_training(parts, data, folder, plan)
                    parts.install_result()
                    scores = self._score(loaded, job, share)
        finally:
            _remove(folder.private)  # checkpoints and losses
        if plan is None:
            return scores, {"noise_multiplier": None, "ledger": None}
        set_times(folder.release, read_ledger(folder.ledger).created)
        facts = {"noise_multiplier": plan.event.noise_multiplier, "event": plan.event.to_dict()}
        study = job.folder.parents[3]
        return scores, {**facts, "ledger": folder.ledger.relative_to(study).as_posix()}

    def _federate(
        self, loaded: _Loaded, job: Job, share: tuple[int, ...]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As `_train`, of a federation whose clients are all here; every client's ledger stays."""
        from privlora.federated.run import federate  # needs the packages of secure sums

        folder = RunFolder(job.folder)
        _clear(folder)
        own = job.settings.data.model_copy(update={"evaluation": None})  # scored here, on the role's share
        settings = job.settings.model_copy(update={"data": own})
        log = logging.getLogger("privlora.federated")
        level = log.level
        log.setLevel(logging.ERROR)  # without advice on adapters that nobody keeps
        try:
            given = {"model": self._model, "tokenizer": self._tokenizer, "records": loaded.records}
            found = federate(settings, **given, observer=_EveryRound())
            with unchanged_afterwards(self._model):
                tuned = with_adapter(self._model, found.release)
                try:
                    scores = self._score(loaded, job, share)
                finally:
                    tuned.unload()
            _remove(folder.root / "clients")  # their ledgers are in the release
        finally:
            log.setLevel(level)
            _keep_ledgers(folder)
        if not folder.ledger.exists():
            return scores, {"noise_multiplier": None, "ledger": None}
        ledger = read_ledger(folder.ledger)
        set_times(folder.release, ledger.created)
        sigma = ledger.plan.phases[0][0].noise_multiplier  # one for all phases
        facts: dict[str, Any] = {"noise_multiplier": sigma, "steps": ledger.plan.steps}
        facts |= {"epsilon": found.epsilon, "epsilon_against_a_client": found.epsilon_against_a_client}
        if len(ledger.plan.phases) == 1:
            facts["event"] = ledger.plan.event.to_dict()
        return scores, {**facts, "ledger": folder.ledger.relative_to(job.folder.parents[3]).as_posix()}


def _share(job: Job, count: int) -> tuple[int, ...]:
    """Indices of the evaluation records that the role may see. Raises DataError if there are too few for both."""
    if count < 1 + job.shared:
        what = f"task {job.cell.task!r} has {count} evaluation records, too few to choose on some and report on others"
        raise DataError(what, fix="give more")
    share = tuple(range(count))
    return share[job.role == "report" :: 2] if job.shared else share


def _clear(folder: RunFolder) -> None:
    """Make room for a run; ledgers of an earlier, unfinished or outdated one are put aside, never removed."""
    for ledger in sorted(folder.root.rglob("ledger*.jsonl")):
        _put_aside(folder, ledger)
    for place in (folder.release, folder.private, folder.root / "clients"):
        _remove(place)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _keep_ledgers(folder: RunFolder) -> None:
    """Of a federation, also of one that failed; nothing else."""
    for path in sorted(folder.root.rglob("*"), reverse=True):  # what is in a folder before it
        if path.is_dir():
            if not any(path.iterdir()) and path != folder.release:
                path.rmdir()
        elif not re.fullmatch(r"(earlier-)?ledger.*\.jsonl", path.name):
            path.unlink()


def _put_aside(folder: RunFolder, ledger: Path) -> None:
    """Name the ledger earlier-ledger-N.jsonl, N behind the largest that is there."""
    names = [re.fullmatch(r"earlier-ledger-([0-9]{1,9})\.jsonl", path.name) for path in folder.root.iterdir()]
    numbers = [int(found[1]) for found in names if found]
    # Unlike a rename a link replaces nothing.
    os.link(ledger, folder.root / f"earlier-ledger-{max(numbers, default=0) + 1}.jsonl")
    ledger.unlink()


def _of_classes(found: ClassResult, task: str | None) -> dict[str, Any]:
    """Of a classifier; its task's metric is the mean of those that GLUE names."""
    scores: dict[str, Any] = {"loss": found.loss_per_example, "records": found.examples}
    scores |= {name: value for name, value in found.metrics.items() if name == "accuracy"}
    if task is not None:
        names = find_task(task).metrics
        mean = sum(found.metrics[name] for name in names) / len(names)
        scores |= {"task": mean, "task_metric": " and ".join(names)}
    return scores
