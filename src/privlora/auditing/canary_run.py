"""Training a run once more with canaries in it, to find out what its releases give away."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from privlora.accounting import Plan, read_ledger
from privlora.auditing.asked import refuse_few
from privlora.auditing.canary_scores import (
    CanaryMechanism,
    CanaryState,
    OneRunAudit,
    judge_canaries,
    unreadable,
)
from privlora.auditing.gradient_canaries import draw_canaries
from privlora.auditing.kinds import GRADIENT, NEW_TOKEN, OF_ONE_RUN, check_kind
from privlora.auditing.text_canaries import (
    add_records,
    record_losses,
    room_for,
    text_canaries,
)
from privlora.config import IN_MEMORY, Settings
from privlora.data.examples import Example
from privlora.data.records import refuse_missing
from privlora.errors import ConfigError, DataError, PrivacyError, RunError
from privlora.mechanisms import GaussianMechanism, Mechanism
from privlora.methods import find_method
from privlora.precision import own_context
from privlora.rehearsals.settling import settled
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.files import AUDIT_MARK as MARK
from privlora.training.files import AUDITED, RunFolder, write_atomically
from privlora.training.fitting import in_default_micro_batches, with_micro_batches
from privlora.training.inputs import Data, SharedRecordsError, check_sources, fitted, load_data
from privlora.training.loop import finish_training
from privlora.training.models import check_model, given_or_loaded, unchanged_afterwards
from privlora.training.observer import Observer
from privlora.training.promise import plan_privacy
from privlora.training.sources import check_columns
from privlora.training.takeover import make_room, refuse_if_spent

_TEXTS = "canaries.json"  # what the canaries are, whether they are in or not
_GO_ON = "give the settings and canaries of that audit, or another folder"
_TEXT_TOKENS = 32  # the loss is a mean over tokens: more of them dilute what each gives away
_WARNING = """This run was trained with canaries, to audit the training. Publish nothing of it.

Its ledger counts what its releases would cost: they were computed from the private records.
"""


@own_context()
def audit_run(
    settings: Settings,
    *,
    canaries: int = 500,
    kind: str = GRADIENT,
    confidence: float = 0.95,
    temperature: float | None = None,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Sequence[Mapping[str, Any]] | None = None,
    prefixes: str | Sequence[Mapping[str, Any]] | None = None,
    observer: Observer | None = None,
) -> OneRunAudit:
    """Train as ``settings`` say with about half of ``canaries`` among the records, and bound epsilon from below.

    Everything goes to run.output, a folder of its own with its own ledger; no adapter is exported. A second call with
    the same settings goes on where an interrupted audit stopped, or only judges again. kind: "gradient" (white box,
    the strongest), or texts that are scored by how much their loss fell (those of ``text_canaries``, which also says
    what the ``temperature`` is). prefixes: PUBLIC records in the columns of the private ones, or their file: canaries
    of the kinds prefix-suffix and new-token begin as they do.

    Raises ConfigError for runs without noise or with truncated sampling, RunError where the folder holds another run.
    """
    refuse_few(canaries)
    _refuse(settings, kind, temperature, prefixes=prefixes is not None)
    public = None if isinstance(prefixes, str) else prefixes
    reading = {"evaluation": IN_MEMORY if public is not None else prefixes}
    check_sources(settings, records)
    if isinstance(prefixes, str):
        _refuse_unfit(settings, prefixes)
    folder = RunFolder(Path(settings.run.output))
    model, tokenizer = given_or_loaded(settings.model, model, tokenizer)
    settings = fitted(settings, model)
    check_model(settings, model, tokenizer)
    # The audit goes on with what was asked for; how many tokens that is may differ.
    asked = settings
    settings = settled(settings, model, tokenizer)
    if kind in (GRADIENT, NEW_TOKEN):  # whose canaries take memory that is not counted
        settings = in_default_micro_batches(settings)
    else:
        settings, _ = with_micro_batches(settings, model, next(model.parameters()).device)
    try:
        data = load_data(_with_data(settings, reading), tokenizer, records, public, model=model)
    except SharedRecordsError as error:
        if error.named != "data.evaluation":
            raise
        raise PrivacyError(
            "some records of --prefixes are private ones",
            why="canaries begin as they do, and lie in a file of the audit, for whoever judges it",
            fix="give records that are public, and no copies of private ones",
        ) from None
    begins = [example.input_ids for example in data.evaluation]
    data = replace(data, evaluation=data.evaluation.like([]))
    planted = kind if temperature is None else f"{kind} at temperature {temperature:g}"
    if begins:
        planted += (
            f" behind public prefixes {sha256(repr([ids.tolist() for ids in begins]).encode()).hexdigest()}"
        )
    state = open_audit(folder, asked, planted, canaries, [folder.private / _TEXTS])
    train_with = _with_gradients if kind == GRADIENT else _with_texts
    with unchanged_afterwards(model):
        train_with(
            _Audit(settings, folder, state, kind, temperature, begins, model, tokenizer, observer), data
        )
    plan = read_ledger(folder.ledger).plan
    return judge_canaries(state, plan.event, plan.steps, plan.delta, confidence=confidence)


@dataclass(frozen=True)
class _Audit:
    settings: Settings
    folder: RunFolder
    state: CanaryState
    kind: str
    temperature: float | None
    prefixes: Sequence[np.ndarray]
    model: torch.nn.Module
    tokenizer: Any
    observer: Observer | None

    def save(self) -> None:
        save_state(self.state, self.folder)

    def train(
        self, parts: Parts, data: Data, instrument: Callable[[Mechanism], Mechanism] | None = None
    ) -> None:
        """Take the steps that are left, if any."""
        plan = plan_of_audit(self.settings, self.folder, self.model)
        finish_training(parts, data, self.folder, plan, observer=self.observer, instrument=instrument)


def _with_gradients(audit: _Audit, data: Data) -> None:
    parts = build_parts(audit.settings, audit.model, PublicStart(audit.tokenizer))
    generator = torch.Generator().manual_seed(audit.state.seed)
    # One in a single module would enter with C / sqrt(modules) there.
    everywhere = parts.hyper.clipping == "per-module"
    canaries = draw_canaries(parts.adapter, len(audit.state.scores), generator, spread=everywhere)

    def instrument(mechanism: Mechanism) -> Mechanism:
        assert isinstance(mechanism, GaussianMechanism)
        return CanaryMechanism(mechanism, canaries, audit.state, audit.save)

    with parts.adapter:
        audit.train(parts, data, instrument)


def _with_texts(audit: _Audit, data: Data) -> None:
    state = audit.state
    texts = data.examples.like(_planted(audit))
    included = [text for text, chosen in zip(texts, state.included, strict=True) if chosen]
    examples, units = add_records(data.examples, data.units, included)
    with room_for(audit.kind, audit.model, audit.tokenizer, len(texts), state.seed):
        before = record_losses(audit.model, texts)
        parts = build_parts(audit.settings, audit.model, PublicStart(audit.tokenizer))
        with parts.adapter:
            audit.train(parts, replace(data, examples=examples, units=units))
            parts.install_result()
            state.scores = before - record_losses(audit.model, texts)
    state.releases = audit.settings.privacy.steps
    audit.save()


def _planted(audit: _Audit) -> list[Example]:
    """The canaries as they were first drawn: where a model wrote them, another processor may round to other words."""
    path = audit.folder.private / _TEXTS
    if path.exists():
        return _read(path)
    state, length = audit.state, min(_TEXT_TOKENS, audit.settings.data.max_length)
    drawn = text_canaries(
        audit.kind,
        len(state.scores),
        length,
        audit.tokenizer,
        state.seed,
        model=audit.model,
        temperature=audit.temperature,
        public=audit.prefixes,
    )
    content = [
        {"input_ids": each.input_ids.tolist(), "labels": each.labels.tolist(), "text": _text(audit, each)}
        for each in drawn
    ]
    write_atomically(path, json.dumps(content, ensure_ascii=False) + "\n")
    return drawn


def _text(audit: _Audit, example: Example) -> str:
    """For whoever looks; a new token has none."""
    return str(audit.tokenizer.decode([i for i in example.input_ids.tolist() if i < len(audit.tokenizer)]))


def _read(path: Path) -> list[Example]:
    """Raises RunError for a file that is damaged."""
    try:
        return [
            Example(np.array(each["input_ids"], np.int32), np.array(each["labels"], np.int32))
            for each in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error, "what to look for in the model") from None


def plan_of_audit(settings: Settings, folder: RunFolder, model: torch.nn.Module) -> Plan | None:
    """Of an audit's ledger, which says that it is one; None where there is a ledger already, or none is kept."""
    if folder.has_plan or not settings.privacy.private:
        return None
    plan = plan_privacy(settings, model)[0]
    return replace(plan, dataset=AUDITED + plan.dataset)


def save_state(state: CanaryState, folder: RunFolder) -> None:
    """Write it into private/. Raises RunError."""
    state.save(folder.canaries)


def read_state(root: Path) -> CanaryState:
    """The canaries of an audit in ``root``. Raises RunError if there are none."""
    return CanaryState.load(RunFolder(root).canaries)


def _refuse_unfit(settings: Settings, prefixes: str) -> None:
    """Raise DataError for a file of public records that is not there, or lacks the columns of the private ones."""
    try:
        refuse_missing(prefixes, format=settings.data.format)
        check_columns(_with_data(settings, {"path": prefixes}))
    except DataError as error:
        fix = "give public records in the columns of the private ones"
        raise DataError(f"--prefixes: {error.what}", why=error.why, fix=fix) from None


def _with_data(settings: Settings, more: Mapping[str, Any]) -> Settings:
    return settings.model_copy(update={"data": settings.data.model_copy(update=dict(more))})


def _refuse(settings: Settings, kind: str, temperature: float | None, *, prefixes: bool) -> None:
    method = find_method(settings.method.name)  # of votes there is no step that a canary could be in
    privacy = settings.privacy
    check_kind(kind, temperature, OF_ONE_RUN, prefixes=prefixes)
    if not privacy.private:
        raise ConfigError(
            "a run without noise claims nothing that could be audited", fix="set privacy.private=true"
        )
    refuse_settings(settings)
    if kind == GRADIENT and method.coordinates.forward_only:
        raise ConfigError(
            f"method {method.name!r} cannot be audited by gradients",
            why="it takes none, and all canaries of a step would lie along its one direction and cover each other",
            fix="plant texts, as --kind random-tokens",
        )


def refuse_settings(settings: Settings) -> None:
    """Raise ConfigError for settings that no audit by canaries goes with."""
    if settings.privacy.max_batch_size is not None or settings.privacy.sampling != "poisson":
        raise ConfigError(
            "an audit needs plain Poisson sampling",
            why="a canary could push another unit out of a truncated batch, and passes of balls in bins have no bound "
            "for canaries yet",
            fix="remove privacy.max_batch_size and privacy.sampling for the audit",
        )
    if settings.data.evaluation is not None:
        raise ConfigError("an audit evaluates nothing", fix="set data.evaluation=null for the audit")


def open_audit(
    folder: RunFolder, settings: Settings, kind: str, canaries: int, also: Sequence[Path] = ()
) -> CanaryState:
    """The canaries of this folder: drawn, or those of an audit with the same settings. kind: what they are. also: files
    that an audit of this kind keeps before it trains.

    An audit with other settings that failed before anything was charged is replaced. Raises RunError where the folder
    holds another run, or nothing can be written.
    """
    path = folder.canaries
    if goes_on(folder, settings, kind, canaries):
        return CanaryState.load(path)
    refuse_another(folder, also)
    make_room(folder, _own(folder, also), _GO_ON)
    state = CanaryState.draw(canaries)
    folder.create(protects=settings.privacy.protects)
    write_atomically(folder.release / MARK, _mark(kind, canaries))
    state.save(path)
    # Last: from here on there is an audit to resume.
    write_atomically(folder.settings, settings.to_yaml())
    return state


def refuse_another(folder: RunFolder, also: Sequence[Path] = ()) -> None:
    """Raise RunError if the folder holds a run that an audit may not replace. also: of ``open_audit``."""
    path = folder.canaries
    spent = path.exists() and CanaryState.load(path).releases
    if spent or (folder.settings.exists() and not folder.is_audit):
        raise RunError(
            f"{str(folder.root)!r} holds another run",
            why="its canaries were scored on releases, which must not be forgotten"
            if spent
            else "an audit goes on with the canaries that it began with, and there are none",
            fix=_GO_ON,
        )
    refuse_if_spent(folder, _own(folder, also), _GO_ON)


def goes_on(folder: RunFolder, settings: Settings, kind: str, canaries: int) -> bool:
    """Whether the folder holds an audit with these settings and canaries."""
    marked = folder.release / MARK
    return (
        folder.settings.exists()
        and marked.exists()
        and folder.settings.read_text(encoding="utf-8") == settings.to_yaml()
        and marked.read_text(encoding="utf-8") == _mark(kind, canaries)
    )


def _own(folder: RunFolder, also: Sequence[Path]) -> list[Path]:
    """What an audit writes before it trains."""
    return [folder.canaries, folder.release / MARK, *also]


def _mark(kind: str, canaries: int) -> str:
    return f"{_WARNING}\ncanaries: {canaries} {kind}\n"
