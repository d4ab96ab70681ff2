"""The advice of ``privlora plan --advise``: which row does better in rehearsals on public texts, for several N."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Final

from privlora.accounting import Plan
from privlora.cli.console import counted
from privlora.config import Settings
from privlora.errors import ConfigError

RECORDS: Final = (50, 100, 200, 400, 1600)
"""Numbers that are tried beside the run's own, at its sampling rate and noise multiplier."""


def advise_on(settings: Settings, planned: Plan | None) -> dict[str, Any]:
    """Losses of each row for several numbers of records. Loads the model and has texts written; reads no record.

    Raises ConfigError without public texts or without noise.
    """
    from privlora.rehearsals.choosing import rehearse, rows_to_advise_on, verdict
    from privlora.training.inputs import fitted
    from privlora.training.models import check_model, given_or_loaded
    from privlora.training.promise import plan_privacy

    rows = rows_to_advise_on(settings)
    if planned is None:
        raise ConfigError("there is no noise to weigh", fix="set a privacy target")
    if planned.event.projections:  # the noise of a row that is not among these
        planned = plan_privacy(rows[0])
    sigma = planned.event.noise_multiplier
    model, tokenizer = given_or_loaded(settings.model, None, None)
    settings = fitted(settings, model)
    check_model(settings, model, tokenizer)
    rows = rows_to_advise_on(settings)
    own = settings.privacy.n
    # More records than 1 / delta would get no promise.
    counts = sorted({own, *(n for n in RECORDS if n < 1 / planned.delta)})
    with counted("rehearsing on public texts") as tell:

        def told(what: str, done: int, total: int) -> None:
            if what.startswith("rehearsing"):  # and not of texts that are written, another number
                tell(done, total)

        found, facts = rehearse(settings, rows, counts, sigma, model, tokenizer, None, told)
    table = [{"records": n, **verdict(outcomes)} for n, outcomes in zip(counts, found, strict=True)]
    names = [row.method.name for row in rows]
    # Numbers of records from which on the first of them leads in every line.
    leads = [
        line["records"] for line in takewhile(lambda x: x["rows"][0]["name"] == names[0], reversed(table))
    ]
    return {
        **facts,
        "names": names,
        "clipping": {row.method.name: row.method.clipping for row in rows if row.method.clipping},
        "table": table,
        "overtakes": leads[-1] if leads else None,
    }


def advice_lines(advice: dict[str, Any]) -> Iterator[str]:
    """As a table, and in a sentence."""
    from privlora.pages.numbers import number

    yield (
        f"advice: the loss on {advice['held_out']} public texts after the run, with at most "
        f"{advice['in_place_of_records']} others instead of records; {advice['untrained']:.4f} without training"
    )
    for line in advice["table"]:
        rows = {row["name"]: row for row in line["rows"]}
        losses = "  ".join(
            f"{name} {number(rows[name]['loss'])} (rate {rows[name]['learning_rate']:.3g})"
            for name in advice["names"]
        )
        error = "" if line["standard_error"] is None else f" ± {line['standard_error']:.2g}"
        lead = "" if line["lead"] is None else f" by {line['lead']:.2g}{error}"
        yield f"  {line['records']:>6g} records  {losses}  better: {line['rows'][0]['name']}{lead}"
    first, *rest = (
        f"{name} with clipping: {advice['clipping'][name]}" if name in advice["clipping"] else name
        for name in advice["names"]
    )
    numbers = [line["records"] for line in advice["table"]]
    if advice["overtakes"] is None:
        words = f"does not overtake {' and '.join(rest)} with at most {numbers[-1]:g} records"
    elif advice["overtakes"] == numbers[0]:
        words = "does better with all of these numbers of records"
    else:
        words = f"overtakes {' and '.join(rest)} at {advice['overtakes']:g} records"
    yield f"  {first} {words}. What these public texts cannot show of your records, the advice does not know"
