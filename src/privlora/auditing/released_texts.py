"""What a data set of generated texts gives away about records: a run once more, with canaries among the records.

A coin decides for each canary whether it is a record of the run. The run then writes the texts that it would release,
and an attacker who has these texts alone guesses which canaries were in. Texts follow from releases, so the
bound on epsilon is that of any other attack on the run, and holds for the texts too.

A canary is a public text with an end that nobody would write: words drawn one by one. A writer may fall into such a
beginning, and a record that begins so votes for such a text, while canaries of rare words alone are hardly ever echoed
(Meeus et al. 2025, "The Canary's Echo"); the end is what only the canary could have taught. Its score is the sum of two
means, over the words of its beginning and over those of its end, of

    ln P(word | word before it) under the released texts, less the same under the public texts,

P a bigram model with Dirichlet smoothing. The public texts are those that gave canaries their beginnings, so what is
common anyway gains nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from privlora.accounting import LedgerSummary, read_ledger
from privlora.auditing.asked import refuse_few
from privlora.auditing.bounds import Floats, one_run_epsilon
from privlora.auditing.canary_scores import CanaryState, Guessed, judge_canaries, right_guesses
from privlora.auditing.exposure import exposure_of_scores
from privlora.auditing.membership import Area, area_under_curve
from privlora.auditing.rerun import Rerun, refuse_settings
from privlora.auditing.text_canaries import add_records
from privlora.config import Settings, SynthesisSettings, kept_settings
from privlora.errors import ConfigError, GeneratorError, RunError
from privlora.evaluation.texts import runs_of, words_of
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
                drawn = _draw_canaries(begins, canaries, seed, fits)
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
    state.scores = _score_canaries(drawn, texts, public)
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
    found = np.array(_recited(drawn, texts))
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


_END: Final = 8  # words
_RECITED: Final = 5  # words of an end in a row: none of the public texts has them but by chance
_FEWEST: Final = 20  # different words that ends are made of


@dataclass(frozen=True)
class Canary:
    """A record that is nobody's: ``beginning`` and ``end`` with a blank between them."""

    beginning: str
    end: str

    @property
    def text(self) -> str:
        return f"{self.beginning} {self.end}".strip()


def _draw_canaries(public: Sequence[str], count: int, seed: int, fits: Callable[[str], bool]) -> list[Canary]:
    """``count`` different canaries: public texts in turn, each with 8 words of all of them at random behind it.

    fits: whether a record is short enough to be trained on as a whole; beginnings are cut until it is.

    Raises GeneratorError for public texts of too few different words, ConfigError where no end fits.
    """
    words = sorted({word for text in public for word in text.split()})
    if len(words) < _FEWEST:
        what = f"the public texts hold {len(words)} different words, and canaries need at least {_FEWEST}"
        raise GeneratorError(what, fix="raise synthesis.max_new_tokens, or mend the prompts or the file")
    generator, found = np.random.default_rng(seed), dict[str, Canary]()
    while len(found) < count:
        end = " ".join(generator.choice(words, size=_END, replace=False))
        kept = public[len(found) % len(public)].split()
        while kept and not fits(Canary(" ".join(kept), end).text):
            kept.pop()
        canary = Canary(" ".join(kept), end)
        if not kept and not fits(canary.text):
            what = f"a canary of {_END} words is longer than a record may be, and would be cut off"
            raise ConfigError(what, fix="raise data.max_length")
        found.setdefault(canary.text, canary)
    return list(found.values())


class _Bigrams:
    """Words of texts and the word before each, with Dirichlet smoothing: P(w | v) = (n(v w) + P(w)) / (n(v) + 1) and
    P(w) = (n(w) + 1) / (n + V). Words are casefolded; a text begins after an empty word.

    vocabulary: V, how many words there may be.
    """

    def __init__(self, texts: Sequence[str], vocabulary: int) -> None:
        rows = [["", *words_of(text)] for text in texts]
        self._pairs = Counter(pair for row in rows for pair in runs_of(row, 2))
        self._before = Counter(word for row in rows for word in row[:-1])
        self._words = Counter(word for row in rows for word in row[1:])
        self._total = self._words.total() + vocabulary

    def log_likelihoods(self, text: str) -> Floats:
        """Of each word of a text, in nats, (words,)."""
        return np.array([self._log_probability(pair) for pair in runs_of(["", *words_of(text)], 2)])

    def _log_probability(self, pair: tuple[str, ...]) -> float:
        before, word = pair
        alone = (self._words[word] + 1) / self._total
        return math.log((self._pairs[pair] + alone) / (self._before[before] + 1))


def _score_canaries(canaries: Sequence[Canary], texts: Sequence[str], public: Sequence[str]) -> Floats:
    """(canaries,) float64: see the module. texts: what was released. Which canaries were in is not told."""
    all_texts = [*texts, *public, *(canary.text for canary in canaries)]
    vocabulary = len({word for text in all_texts for word in words_of(text)})
    released, other = _Bigrams(texts, vocabulary), _Bigrams(public, vocabulary)
    scores = np.zeros(len(canaries))
    for number, canary in enumerate(canaries):
        ratios = released.log_likelihoods(canary.text) - other.log_likelihoods(canary.text)
        parts = np.split(ratios, [len(ratios) - len(words_of(canary.end))])
        scores[number] = sum(part.mean() for part in parts if len(part))
    return scores


def _recited(canaries: Sequence[Canary], texts: Sequence[str]) -> list[bool]:
    """Whether five words of a canary's end stand in one text, in their order."""
    found = {run for text in texts for run in runs_of(words_of(text), _RECITED)}
    return [any(run in found for run in runs_of(words_of(canary.end), _RECITED)) for canary in canaries]
