"""Which method a run takes whose ``method.name`` stands for several: the one that does best in trials on public texts.

The choice is made before a record plays a part in it, from public texts, settings and the public seed alone, so it
costs no epsilon: whatever follows is the guarantee of the method that was taken. All methods of a choice are the same
mechanism to the accountant, so the noise is found before and stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from privlora.accounting import Plan
from privlora.config import MethodSettings, Settings
from privlora.errors import ConfigError, PrivloraError
from privlora.methods import CHOICES, find_method, find_row
from privlora.pages.numbers import finite
from privlora.rehearsals.kept import Chosen
from privlora.rehearsals.rates import paired_error
from privlora.rehearsals.trials import Noise, Outcome, Told, split_texts, start_losses, try_rows
from privlora.training.assembly import PublicStart, refuse_other_texts
from privlora.training.misfits import refuse_misfits, refuse_unrehearsed, refuse_unused_texts
from privlora.training.promise import plan_privacy, refuse_bands
from privlora.training.public_form import PublicForm

REHEARSALS: Final = 3
"""With how many draws of noise each method is rehearsed at its best learning rate."""

CHOICE, PLAIN = "auto", "prism"
"""What is advised on where settings name no method with public texts, with the clipping that the choice gives its
methods; and what such a method is compared with."""


def rows_of_choice(settings: Settings) -> list[Settings]:
    """The run's settings with each method that ``method.name`` stands for, in their order.

    Raises ConfigError for settings that one of the methods does not have, or without public texts.
    """
    name = settings.method.name
    refuse_bands(settings.privacy, f"method {name!r}, whose rehearsals have independent noise")
    _refuse_nothing_to_rehearse(settings, f"method {name!r}")
    choice = CHOICES[name]
    found = [_with_row(settings, row, clipping=choice.clipping.get(row)) for row in choice.rows]
    for row in found:
        try:
            find_method(row.method.name).resolve(row.method, row.adapter.init, row.privacy.steps)
            refuse_unused_texts(row)
        except PrivloraError as error:
            raise error.of(f"method {name!r}, which may take {row.method.name}") from None
    return found


def rows_to_advise_on(settings: Settings) -> list[Settings]:
    """The run's settings with PRISM, and with the method of public texts that they name, or else those of ``auto``.

    Of a choice the methods that it stands for. A method that settings do not name takes its defaults, or what ``auto``
    gives it.
    """
    own = settings.method.name
    if own in CHOICES:
        return rows_of_choice(settings)
    refuse_bands(settings.privacy, "an advice, whose rehearsals have independent noise")
    _refuse_nothing_to_rehearse(settings, "an advice")
    names = (PLAIN, own) if find_method(own).public_texts else CHOICES[CHOICE].rows
    return [
        _with_row(settings, row)
        if row == own
        else _with_row(
            settings.changed(method=MethodSettings(name=row)), row, clipping=CHOICES[CHOICE].clipping.get(row)
        )
        for row in names
    ]


def _with_row(
    settings: Settings, row: str, learning_rate: float | None = None, clipping: str | None = None
) -> Settings:
    """The settings of a run that takes the method ``row``, without what it would not read. learning_rate: None keeps
    it.

    clipping: where the settings name none.
    """
    method = find_method(row)
    updates: dict[str, Any] = {"name": row}
    warm = None if settings.synthesis is None else settings.synthesis.warm_start_learning_rate
    if settings.method.name in CHOICES and (settings.method.learning_rate or warm) is not None:
        # One number for several methods is in what all of them understand.
        updates["relative_rate"] = settings.method.relative_rate or False
    if learning_rate is not None:
        updates["learning_rate"] = learning_rate
    if clipping is not None and settings.method.clipping is None:
        updates["clipping"] = clipping
    chosen = settings.synthesis
    if chosen is not None and not (method.public_texts or chosen.publish or chosen.warm_start_epochs):
        chosen = None
    return settings.changed(method=updates, synthesis=chosen)


def plan_run(settings: Settings, model: torch.nn.Module | None = None) -> Plan | None:
    """What a run will release and cost, whichever method it takes; None in the non-private mode. See ``plan_privacy``.

    Raises ConfigError for all that is wrong with the settings as far as they tell it alone, before a model is loaded.
    """
    if settings.method.name in CHOICES:
        settings, *_ = rows_of_choice(settings)
    refuse_unrehearsed(settings)
    method = find_row(settings.method.name)
    refuse_misfits(settings, method)
    refuse_other_texts(settings, method)
    return plan_privacy(settings, model) if settings.privacy.private else None


def choose(
    settings: Settings,
    noise_multiplier: float,
    model: torch.nn.Module,
    tokenizer: Any,
    generator: Any = None,
    told: Told = lambda what, done, total: None,
) -> Chosen:
    """The method and the learning rate of a run on ``settings``, whose ``method.name`` stands for several.

    noise_multiplier: sigma of the run's plan. generator: instead of synthesis.callable, in Python. The model is given
    back as it was.

    Raises ConfigError and DataError for what cannot be rehearsed.
    """
    rows = rows_of_choice(settings)
    (outcomes,), facts = rehearse(
        settings, rows, [settings.privacy.n], noise_multiplier, model, tokenizer, generator, told
    )
    best = better(list(outcomes.values()))
    (row,) = (row for row in rows if row.method.name == best.row)
    settled = _with_row(row, best.row, best.learning_rate)
    if settled.synthesis is not None and settled.synthesis.warm_start_epochs:
        own = find_method(best.row)
        relative = own.is_relative(row.method.relative_rate)
        rate = settled.synthesis.warm_start_learning_rate or row.method.learning_rate
        rate = rate or own.rate_of(1, private=False, relative=relative)
        settled = settled.changed(synthesis={"warm_start_learning_rate": rate})  # as rehearsed
    tried = sum(outcome.tried for outcome in outcomes.values())
    return Chosen(
        settled,
        {"asked": settings.method.name, "row": best.row, **facts, **verdict(outcomes), "tried": tried},
    )


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


def better(outcomes: Sequence[Outcome]) -> Outcome:
    """The one of lowest loss; of equal ones the first."""
    return min(outcomes, key=lambda outcome: outcome.loss)


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


def _refuse_nothing_to_rehearse(settings: Settings, who: str) -> None:
    privacy = settings.privacy
    if settings.synthesis is None:
        raise ConfigError(
            f"{who} needs public texts to rehearse on, and there is no group synthesis",
            why="which method does better on few records depends on the model and on such texts",
            fix="add `synthesis: {file: PUBLIC.jsonl}`, or another writer; or name a method",
        )
    if not privacy.private:
        raise ConfigError(
            f"{who} weighs methods by what noise leaves of them, and privacy.private=false adds none",
            fix="name one in method.name",
        )
    if privacy.clip_quantile is not None:
        raise ConfigError(
            f"{who} does not go with privacy.clip_quantile",
            why="methods of public texts clip to one norm, and the clip norm of rehearsals would not be the run's",
            fix="remove clip_quantile, or name a method in method.name",
        )
    PublicForm(settings).refuse_none()
