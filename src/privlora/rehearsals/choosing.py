"""Which method does better on few records, by trials on public texts: what ``privlora plan --advise`` shows.

All follows from public texts, settings and the public seed alone, so it costs no epsilon. All methods are the same
mechanism to the accountant, so the noise is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from privlora.config import MethodSettings, Settings
from privlora.errors import ConfigError
from privlora.methods import find_method
from privlora.pages.numbers import finite
from privlora.rehearsals.rates import paired_error
from privlora.rehearsals.trials import Noise, Outcome, Told, split_texts, start_losses, try_rows
from privlora.training.assembly import PublicStart
from privlora.training.promise import refuse_bands
from privlora.training.public_form import PublicForm

REHEARSALS: Final = 3
"""With how many draws of noise each method is rehearsed at its best learning rate."""

_PLAIN, _LEANING = "prism", ("guided-prism", "span-prism")
"""What a method with public texts is compared with; and the methods that are advised on where settings name none."""


def rows_to_advise_on(settings: Settings) -> list[Settings]:
    """The run's settings with PRISM, and with the method of public texts that they name, or else the usual two.

    A method that settings do not name takes its defaults; PRISM then clips all gradients to one norm, as batches are
    small.
    """
    own = settings.method.name
    refuse_bands(settings.privacy, "an advice, whose rehearsals have independent noise")
    _refuse_nothing_to_rehearse(settings)
    names = (_PLAIN, own) if find_method(own).public_texts else (_PLAIN, *_LEANING)
    others = {name: MethodSettings(name=name) for name in names}
    others[_PLAIN] = MethodSettings(name=_PLAIN, clipping="automatic")
    return [_with_method(settings, settings.method if name == own else others[name]) for name in names]


def _with_method(settings: Settings, method: MethodSettings) -> Settings:
    """The settings of a run that takes the method, without public texts that it would not read."""
    chosen = settings.synthesis
    if chosen is not None and not (
        find_method(method.name).public_texts or chosen.publish or chosen.warm_start_epochs
    ):
        chosen = None
    return settings.changed(method=method, synthesis=chosen)


def rehearse(
    settings: Settings,
    rows: Sequence[Settings],
    counts: Sequence[float],
    noise_multiplier: float,
    model: torch.nn.Module,
    tokenizer: Any,
    generator: Any,
    told: Told,
) -> tuple[list[dict[str, Outcome]], dict[str, Any]]:
    """For each number of records: method -> how it did; and on what, as a report keeps it."""
    public = PublicStart(tokenizer, generator)
    spans = [row.method.name for row in rows if find_method(row.method.name).public_texts]
    texts = split_texts(settings, model, public, spans[-1], told)
    before = float(start_losses(model, texts).mean())
    noises = [Noise(noise_multiplier, settings.privacy, count) for count in counts]
    # Without texts that evolve: another writer's would be asked for in every step of every trial.
    still = [row if row.synthesis is None else row.changed(synthesis={"evolution": "none"}) for row in rows]
    found = try_rows(still, noises, texts, model, public, draws=REHEARSALS, told=told)
    facts = {
        "untrained": before,
        "spanning": len(texts.spanning),
        "in_place_of_records": len(texts.records),
        "held_out": len(texts.held),
        "draws": REHEARSALS,
    }
    return found, facts


def verdict(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Loss and rate of each method, the best one first, and its lead over the next with the lead's standard error.

    The error is over held-out texts and draws of noise, both of which are paired; None where one of the two is single.
    """
    ranked = sorted(outcomes.values(), key=lambda outcome: outcome.loss)
    lead = error = None
    if len(ranked) > 1:
        ahead = ranked[1].losses - ranked[0].losses
        lead = float(ahead.mean())
        if min(ahead.shape) > 1:
            error = paired_error(ahead)
    rows = [{"name": o.row, "learning_rate": o.learning_rate, "loss": o.loss} for o in ranked]
    found: dict[str, Any] = finite({"rows": rows, "lead": lead, "standard_error": error})
    return found


def _refuse_nothing_to_rehearse(settings: Settings) -> None:
    privacy = settings.privacy
    if settings.synthesis is None:
        raise ConfigError(
            "an advice needs public texts to rehearse on, and there is no group synthesis",
            why="which method does better on few records depends on the model and on such texts",
            fix="add `synthesis: {file: PUBLIC.jsonl}`, or another writer",
        )
    if not privacy.private:
        raise ConfigError(
            "an advice weighs methods by what noise leaves of them, and privacy.private=false adds none",
            fix="leave the advice out",
        )
    if privacy.clip_quantile is not None:
        raise ConfigError(
            "an advice does not go with privacy.clip_quantile",
            why="methods of public texts clip to one norm, and the clip norm of rehearsals would not be the run's",
            fix="remove clip_quantile",
        )
    PublicForm(settings).refuse_none()
