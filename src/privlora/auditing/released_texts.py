"""What a data set of generated texts gives away about records: a run once more, with canaries among the records.

A coin decides for each canary whether it is a record of the run. The run then writes the texts that it would release,
and an attacker who has these texts alone guesses which canaries were in (``text_scores``). Texts follow from releases,
so the bound on epsilon is that of any other attack on the run, and holds for the texts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from privlora.accounting import LedgerSummary, read_ledger
from privlora.auditing.asked import refuse_few
from privlora.auditing.bounds import one_run_epsilon
from privlora.auditing.canary_scores import CanaryState, Guessed, judge_canaries, right_guesses
from privlora.auditing.exposure import exposure_of_scores
from privlora.auditing.membership import Area, area_under_curve
from privlora.auditing.rerun import Rerun, refuse_settings
from privlora.auditing.text_canaries import add_records
from privlora.auditing.text_scores import Canary, draw_canaries, recited, score_canaries
from privlora.config import Settings, SynthesisSettings, kept_settings
from privlora.errors import ConfigError, RunError
from privlora.methods import find_row
from privlora.names import published_name
from privlora.precision import own_context
from privlora.reporting.finished import refuse_another_writer
from privlora.synthesis.generators import ResumableGenerator, build_generator
from privlora.synthesis.population import Population
from privlora.training.assembly import Parts, PublicStart, build_parts
from privlora.training.checkpoint import NO_RUN
from privlora.training.files import RunFolder, no_run
from privlora.training.inputs import Data, load_data, tokenise
from privlora.training.misfits import refuse_unused_texts, texts_evolve
from privlora.training.models import unchanged_afterwards
from privlora.training.observer import Observer
from privlora.training.public_form import PublicForm
from privlora.training.texts.final_texts import Progress, final_texts, gather_texts

_GUESSED: Final = 0.1  # of the canaries on either side, where no plan says how many suit it
_DELTA: Final = 1e-5  # of the bound, for a run that claims nothing


@dataclass(frozen=True)
class Writer:
    """Who writes the texts of an audited run: settings of ``synthesis`` and a public seed, of --from; else the run."""

    synthesis: SynthesisSettings
    seed: int


@dataclass(frozen=True, kw_only=True)
class TextAudit(Guessed):
    """What the texts of one run gave away about its canaries.

    exposure: mean bits of the canaries that were in, each ranked among those that were not; chance and ceiling: of a
    run that never saw them, and of one where all rank first. exposures: of each, highest first. recited: of those that
    were in, and of those that were not, how many a text repeats. Where nothing is claimed, both bounds are the plain
    one, at 1e-5.
    """

    page: ClassVar[str] = "texts"
    canaries: int
    guesses: int
    included: int
    texts: int
    exposure: float
    chance: float
    ceiling: float
    exposures: tuple[float, ...]
    recited: tuple[int, ...]
    area: Area

    @property
    def guessed(self) -> str:
        return f"{self.canaries} canaries"


def settings_of_audit(settings: Settings) -> tuple[Settings, Writer | None]:
    """What is trained, and who writes where it is not the run itself: with synthesis.source, the settings of that run
    in the folder that ``settings`` name.

    Raises RunError for a run that cannot be asked or has another model, ConfigError for another generator.
    """
    chosen = settings.synthesis
    if chosen is None:
        raise ConfigError("nothing says who writes the texts", fix="add the group synthesis")
    if chosen.source is None:
        return settings.changed(synthesis={"publish": True}), None
    refuse_another_writer(chosen)
    source = RunFolder(Path(chosen.source).expanduser())
    if not source.settings.exists():
        raise no_run(source.root)
    found = kept_settings(source.settings)
    if found.federation is not None or (found.synthesis is not None and found.synthesis.publish):
        what = f"the run in {str(source.root)!r} has no adapter that could be asked"
        raise RunError(what, fix="give a run of `privlora train`")
    if published_name(found.model.name) != published_name(settings.model.name):
        what = f"{str(source.root)!r} trained an adapter of {published_name(found.model.name)!r}, not of model.name"
        raise RunError(what, fix="give the settings of that run")
    found = found.changed(run={"output": settings.run.output}, data={"evaluation": None})
    return found, Writer(chosen, settings.run.seed)


@own_context()
def audit_texts(
    settings: Settings,
    writer: Writer | None = None,
    *,
    canaries: int = 200,
    confidence: float = 0.95,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    records: Any = None,
    generator: Any = None,
    observer: Observer | None = None,
    progress: Progress | None = None,
) -> TextAudit:
    """Make the texts of ``settings`` once more with about half of ``canaries`` among the records, and attack them.

    settings, writer: of ``settings_of_audit``. Everything goes to run.output, a folder of its own with its own ledger;
    nothing is released. A second call with the same settings goes on where an interrupted audit stopped, or only judges
    again. For the rest see ``train_run``.

    Raises ConfigError for settings that cannot be audited, GeneratorError where no canary can be made of public texts,
    RunError where the folder holds another run.
    """
    refuse_few(canaries)
    find_row(settings.method.name)
    refuse_settings(settings)
    if writer is None:
        refuse_unused_texts(settings)
    column = PublicForm(settings).text_column
    run = Rerun.of(settings, model, tokenizer, records, usual=True)
    settings, tokenizer, folder = run.settings, run.tokenizer, run.folder
    data = load_data(settings, tokenizer, records, model=run.model)
    wide = settings.data.model_copy(update={"max_length": 10**6})

    def fits(text: str) -> bool:
        (example,) = tokenise([{column: text}], wide, tokenizer)
        return len(example.input_ids) <= settings.data.max_length

    with unchanged_afterwards(run.model):
        parts = build_parts(settings, run.model, PublicStart(tokenizer, generator))
        with parts.adapter:

            def plant(seed: int) -> dict[str, Any]:
                begins = _first_texts(parts, writer, tokenizer, canaries)
                drawn = draw_canaries(begins, canaries, seed, fits)
                return {"public": begins, "canaries": [asdict(canary) for canary in drawn]}

            state = run.open(_kind(writer), canaries, plant)
            drawn, public = run.read_texts(_planted)
            included = [c.text for c, chosen in zip(drawn, state.included, strict=True) if chosen]
            run.train(parts, _with_records(data, settings, column, tokenizer, included), observer)
            summary = read_ledger(folder.ledger) if settings.privacy.private else None
            run_id = NO_RUN if summary is None else summary.run_id
            if writer is None:
                texts = final_texts(parts, folder, run_id, progress)
            else:
                asked = _generator(parts, writer, tokenizer)
                wanted = writer.synthesis.samples or writer.synthesis.count
                with parts.exported():
                    texts = gather_texts(asked, lambda: Population([]), wanted, folder, run_id, progress)
    state.scores = score_canaries(drawn, texts, public)
    state.releases = 0 if summary is None else summary.charges
    state.save(folder.canaries)
    stated = None if summary is None or summary.plan.insecure_noise else summary
    return _judge(state, drawn, texts, stated, confidence)


def _planted(kept: Any) -> tuple[list[Canary], list[str]]:
    return [Canary(**each) for each in kept["canaries"]], list(kept["public"])


def _with_records(
    data: Data, settings: Settings, column: str, tokenizer: Any, included: Sequence[str]
) -> Data:
    """PRIVATE. The records and these texts, each a unit of its own; they vote where records do."""
    more = tokenise([{column: text} for text in included], settings.data, tokenizer)
    examples, units = add_records(data.examples, data.units, list(more))
    texts = [*data.texts, *included] if data.texts else data.texts
    return replace(data, examples=examples, units=units, texts=texts)


def _first_texts(parts: Parts, writer: Writer | None, tokenizer: Any, canaries: int) -> list[str]:
    """PUBLIC texts from before the first release: those that are voted on or chosen from, else fresh ones."""
    if writer is not None:
        return _generator(parts, writer, tokenizer).random(canaries)
    assert parts.texts is not None
    return parts.texts.texts if texts_evolve(parts.settings) else parts.texts.more(canaries)


def _generator(parts: Parts, writer: Writer, tokenizer: Any) -> ResumableGenerator:
    """The adapter as it is now, asked as ``privlora synthesize --from`` asks it."""
    given = {
        "model": parts.adapter.model,
        "tokenizer": tokenizer,
        "max_tokens": parts.settings.run.max_tokens,
    }
    return build_generator(writer.synthesis, seed=writer.seed, **given)


def _judge(
    state: CanaryState,
    drawn: Sequence[Canary],
    texts: Sequence[str],
    summary: LedgerSummary | None,
    confidence: float,
) -> TextAudit:
    """summary: of a run that claims something."""
    members, others = state.sides
    exposure = exposure_of_scores(members, others)
    found = np.array(recited(drawn, texts))
    if summary is not None:
        plan = summary.plan
        game = judge_canaries(state, plan.event, plan.steps, plan.delta, confidence=confidence)
        judged = dict(vars(game))
        del judged["epsilon_signals"]  # there are none of texts
    else:
        guesses = 2 * max(1, round(_GUESSED * len(drawn)))
        correct = right_guesses(state)(guesses // 2)
        bound = one_run_epsilon(correct, guesses, len(drawn), _DELTA, confidence)
        judged = {"canaries": len(drawn), "guesses": guesses, "correct": correct, "scores": state.sides}
        judged |= {"epsilon_lower": bound, "epsilon_lower_plain": bound}
        judged |= {"delta": _DELTA, "confidence": confidence}
    facts = {
        "included": len(members),
        "texts": len(texts),
        "exposures": tuple(sorted(exposure.exposures, reverse=True)),
        "recited": (int(found[state.included].sum()), int(found[~state.included].sum())),
        "area": area_under_curve(members, others, confidence=confidence),
    }
    return TextAudit(**{**judged, **exposure.to_dict(), **facts})


def _kind(writer: Writer | None) -> str:
    if writer is None:
        return "texts, found in what the run writes"
    asked = writer.synthesis.model_dump_json(exclude={"source"})
    return f"texts, found in what its adapter writes, asked by seed {writer.seed} and {asked}"
