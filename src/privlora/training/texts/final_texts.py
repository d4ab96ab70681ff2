"""The texts that a run leaves where they are its release: its last population, or what its adapter writes.

All of it is post-processing of releases, and public. Half of the work is kept, so that an interruption loses little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from privlora.errors import GeneratorError
from privlora.optimizers import SpanOptimizer
from privlora.synthesis.generators import ResumableGenerator
from privlora.synthesis.population import Population, normalised
from privlora.training.assembly import Parts
from privlora.training.checkpoint import Mark, load_checkpoint, save_checkpoint
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted
from privlora.training.misfits import texts_evolve
from privlora.training.stopping import stop_on_signal

_AT_ONCE: Final = 32  # texts between two savings
_AFTER_TEXTS: Final = (
    "stopping after the texts that are being written, and saving. A second Ctrl-C or SIGTERM stops at once: these "
    "texts are written again, which costs nothing"
)
_ROUNDS: Final = 8  # in which as many texts may be asked for as are wanted

Progress = Callable[[int, int], None]


def final_texts(parts: Parts, folder: RunFolder, run_id: str, progress: Progress | None = None) -> list[str]:
    """Of a run that took all its steps; synthesis.samples of them, or as many as a population has.

    A population that evolves is chosen from and varied by the last release too. For the rest see ``gather_texts``.
    """
    texts, chosen = parts.texts, parts.settings.synthesis
    assert texts is not None
    assert chosen is not None

    def first() -> Population:
        if not texts_evolve(parts.settings):
            return Population([])
        if isinstance(parts.optimizer, SpanOptimizer):
            texts.evolve_once_more(parts.optimizer.take_scores())
        return texts.population

    with parts.exported():
        return gather_texts(texts.generator, first, chosen.samples or chosen.count, folder, run_id, progress)


def gather_texts(
    generator: ResumableGenerator,
    first: Callable[[], Population],
    wanted: int,
    folder: RunFolder,
    run_id: str,
    progress: Progress | None = None,
) -> list[str]:
    """``wanted`` texts that differ in more than blanks and capitals: of ``first``, and then variations of these;
    where it has none, fresh ones. There are fewer where eight times as many did not give more.

    What was written is kept in private/ and gone on with. A signal ends the work after the texts that are being
    written.

    Raises Interrupted after a signal; GeneratorError or DataError where the generator fails, or no text has a word.
    """
    asked, written, seeds = 0, Population([]), Population([])
    if folder.sampled.exists():
        asked, kept = load_checkpoint(folder.sampled, run_id=run_id)
        for population, name in ((written, "texts"), (seeds, "first")):
            population.load_state_dict(kept[name])
        generator.load_state_dict(kept["generator"])
    else:
        seeds = written = first()
    found = _distinct(written.texts)

    def save() -> None:
        texts = Population(list(found.values()))
        states = {
            "texts": texts.state_dict(),
            "first": seeds.state_dict(),
            "generator": generator.state_dict(),
        }
        save_checkpoint(folder.sampled, states, Mark(asked, run_id, None))

    save()
    with stop_on_signal(_AFTER_TEXTS) as stop:
        while len(found) < wanted and asked < _ROUNDS * wanted:
            count = min(_AT_ONCE, wanted - len(found))
            if len(seeds):
                more = generator.vary([seeds.texts[(asked + i) % len(seeds)] for i in range(count)])
            else:
                more = generator.random(count)
            asked += count
            found = _distinct([*found.values(), *more])
            save()
            if progress is not None:
                progress(min(len(found), wanted), wanted)
            if stop.is_set():
                raise Interrupted(len(found), "text")
    if not found:
        fix = "mend the prompts or the generator, then `privlora resume`; nothing more is charged"
        raise GeneratorError("not one text is there to release", fix=fix)
    return list(found.values())[:wanted]


def _distinct(texts: Sequence[str]) -> dict[str, str]:
    """In order, of those that are alike the first."""
    found: dict[str, str] = {}
    for text in texts:
        if text.strip():
            found.setdefault(normalised(text), text)
    return found
