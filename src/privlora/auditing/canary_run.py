"""Training a run once more with canaries in it, to find out what its releases give away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from privlora.accounting import read_ledger
from privlora.auditing.asked import GRADIENT, NEW_TOKEN, OF_ONE_RUN, check_kind, refuse_few
from privlora.auditing.canary_scores import CanaryMechanism, CanaryState, OneRunAudit, judge_canaries
from privlora.auditing.gradient_canaries import draw_canaries
from privlora.auditing.rerun import Rerun, refuse_settings
from privlora.auditing.text_canaries import add_records, record_losses, room_for, text_canaries
from privlora.config import IN_MEMORY, Settings
from privlora.data.examples import Example
from privlora.errors import ConfigError, DataError, PrivacyError
from privlora.mechanisms import GaussianMechanism, Mechanism
from privlora.methods import find_method
from privlora.precision import own_context
from privlora.training.assembly import PublicStart, build_parts
from privlora.training.inputs import Data, SharedRecordsError, load_data
from privlora.training.models import unchanged_afterwards
from privlora.training.observer import Observer
from privlora.training.preflight import check_columns

_TEXT_TOKENS = 32  # the loss is a mean over tokens: more of them dilute what each gives away


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
    _refuse(settings, kind, temperature, prefixes)
    # The canaries of these kinds take memory that is not counted.
    usual = kind not in (GRADIENT, NEW_TOKEN)
    run = Rerun.of(settings, model, tokenizer, records, usual=usual)
    data, begins = _load(run, records, prefixes)
    planted = kind if temperature is None else f"{kind} at temperature {temperature:g}"
    if begins:
        digest = sha256(repr([ids.tolist() for ids in begins]).encode()).hexdigest()
        planted += f" behind public prefixes {digest}"

    def plant(seed: int) -> list[dict[str, Any]] | None:
        if kind == GRADIENT:
            return None
        length = min(_TEXT_TOKENS, run.settings.data.max_length)
        drawn = text_canaries(kind, canaries, length, run.tokenizer, seed, run.model, temperature, begins)
        return [_as_json(each, run.tokenizer) for each in drawn]

    state = run.open(planted, canaries, plant)
    with unchanged_afterwards(run.model):
        if kind == GRADIENT:
            _train_with_gradients(run, data, state, observer)
        else:
            _train_with_texts(run, kind, data, state, observer)
    plan = read_ledger(run.folder.ledger).plan
    return judge_canaries(state, plan.event, plan.steps, plan.delta, confidence=confidence)


def _load(
    run: Rerun, records: Any, prefixes: str | Sequence[Mapping[str, Any]] | None
) -> tuple[Data, list[np.ndarray]]:
    """PRIVATE. The records, and the ids of ``prefixes``, read as evaluation records are: no private one is among
    them."""
    given = None if isinstance(prefixes, str) else prefixes
    evaluation = prefixes if given is None else IN_MEMORY
    settings = run.settings.changed(data={"evaluation": evaluation})
    try:
        data = load_data(settings, run.tokenizer, records, given, model=run.model)
    except SharedRecordsError as error:
        if error.named != "data.evaluation":
            raise
        what = "some records of --prefixes are private ones, and canaries would begin as they do"
        raise PrivacyError(what, fix="give records that are public, and no copies of private ones") from None
    begins = [example.input_ids for example in data.evaluation]
    return replace(data, evaluation=data.evaluation.like([])), begins


def _train_with_gradients(run: Rerun, data: Data, state: CanaryState, observer: Observer | None) -> None:
    parts = build_parts(run.settings, run.model, PublicStart(run.tokenizer))
    generator = torch.Generator().manual_seed(state.seed)
    # One in a single module would enter with C / sqrt(modules) there.
    everywhere = parts.hyper.clipping == "per-module"
    canaries = draw_canaries(parts.adapter, len(state.scores), generator, spread=everywhere)

    def instrument(mechanism: Mechanism) -> Mechanism:
        assert isinstance(mechanism, GaussianMechanism)
        return CanaryMechanism(mechanism, canaries, state, lambda: state.save(run.folder.canaries))

    with parts.adapter:
        run.train(parts, data, observer, instrument)


def _train_with_texts(
    run: Rerun, kind: str, data: Data, state: CanaryState, observer: Observer | None
) -> None:
    # As they were first drawn: where a model wrote them, another processor may round to other words.
    texts = data.examples.like(run.read_texts(_examples))
    included = [text for text, chosen in zip(texts, state.included, strict=True) if chosen]
    examples, units = add_records(data.examples, data.units, included)
    with room_for(kind, run.model, run.tokenizer, len(texts), state.seed):
        before = record_losses(run.model, texts)
        parts = build_parts(run.settings, run.model, PublicStart(run.tokenizer))
        with parts.adapter:
            run.train(parts, replace(data, examples=examples, units=units), observer)
            parts.install_result()
            state.scores = before - record_losses(run.model, texts)
    state.releases = run.settings.privacy.steps
    state.save(run.folder.canaries)


def _as_json(example: Example, tokenizer: Any) -> dict[str, Any]:
    """JSON-ready. Its text is for whoever looks; a new token has none."""
    ids = example.input_ids.tolist()
    text = str(tokenizer.decode([token for token in ids if token < len(tokenizer)]))
    return {"input_ids": ids, "labels": example.labels.tolist(), "text": text}


def _examples(content: Any) -> list[Example]:
    return [Example(np.array(each["input_ids"], "i4"), np.array(each["labels"], "i4")) for each in content]


def _refuse(settings: Settings, kind: str, temperature: float | None, prefixes: Any) -> None:
    method = find_method(settings.method.name)  # of votes there is no step that a canary could be in
    check_kind(kind, temperature, OF_ONE_RUN, prefixes=prefixes is not None)
    if not settings.privacy.private:
        raise ConfigError("a run without noise claims nothing to audit", fix="set privacy.private=true")
    refuse_settings(settings)
    if kind == GRADIENT and method.coordinates.forward_only:
        what = f"method {method.name!r} cannot be audited by gradients: it takes none"
        raise ConfigError(what, fix="plant texts, as --kind random-tokens")
    if isinstance(prefixes, str):
        try:
            check_columns(settings.data.model_copy(update={"path": prefixes}))
        except DataError as error:
            fix = "give public records in the columns of the private ones"
            raise DataError(f"--prefixes: {error.what}", why=error.why, fix=fix) from None
