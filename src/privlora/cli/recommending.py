"""Sizes of ``privlora plan``: how many steps, how large a batch, which epsilon, before any record is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from privlora.cli.console import finished_run, phased, quiet_libraries, refuse_given, show
from privlora.config import Settings, load_settings
from privlora.consoles import loading
from privlora.errors import ConfigError
from privlora.training.preflight import check_sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from privlora.rehearsals.recommending import Recommendation, Size


def show_sizes(
    config: Path,
    overrides: Sequence[str],
    public: Path | None,
    minutes: float | None,
    tokens: int | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """What more passes, and other epsilons, would bring to a run: its noise, and its loss on public records. For the
    arguments see ``privlora plan``; config: also the folder of a finished run."""
    more = []
    if public is not None:
        # JSON's quotes are YAML's: a file may be called 12.
        more = ["method.learning_rate=auto", f"auto.file={json.dumps(str(public), ensure_ascii=False)}"]
    file = finished_run(config).settings if config.is_dir() else config
    settings = load_settings(file, [*overrides, *more])
    settings.refuse_a_federation()
    if page is not None and page.is_dir():
        raise ConfigError(f"--page {page} is a folder", fix=f"name a file, as {page / 'recommendation.html'}")
    if page is not None and not page.parent.is_dir():
        raise ConfigError(f"--page {page} is in a folder that is not there", fix=f"make {page.parent} first")
    if minutes is None:
        refuse_given({"--tokens": tokens}, "is of records that --minutes times", fix="give --minutes, too")
    rehearse = settings.auto is not None and settings.auto.rehearses_rate
    if rehearse:
        check_sources(settings, records=())
    with quiet_libraries(told=True):
        with loading():
            from privlora.rehearsals.recommending import recommend as run
            from privlora.training.inputs import fitted
            from privlora.training.models import check_model, given_or_loaded

        model = tokenizer = None
        if rehearse or minutes is not None:
            model, tokenizer = given_or_loaded(settings.model, None, None)
            settings = fitted(settings, model)
            check_model(settings, model, tokenizer)
        with phased("sizes of runs") as tell:
            found = run(settings, model, tokenizer, tell, budget=minutes, tokens=tokens)
        if page is not None:
            from privlora.rehearsals.page import write

            write(found, settings, page)
    lines = _lines(found, settings)
    where = None if page is None else str(page)
    if where is not None:
        lines.append(f"page: {where}")
    show({**found.to_dict(), "page": where}, lines, as_json)


def _lines(found: Recommendation, settings: Settings) -> list[str]:
    from privlora.rehearsals.wording import advice, has_losses, meaning_of_noise

    privacy, losses = settings.privacy, has_losses(found)
    return [
        f"N {found.units:g}, delta {found.delta:g}, method {settings.method.name}",
        meaning_of_noise(),
        f"\nby passes over the data, at epsilon {privacy.target_epsilon:g}",
        *_table(found.by_passes, losses=losses),
        f"\nby epsilon, in {privacy.steps} steps of {privacy.b:g}",
        *_table(found.by_epsilon, losses=losses),
        "",
        *advice(found),
    ]


def _table(sizes: Sequence[Size], *, losses: bool) -> Iterator[str]:
    from privlora.rehearsals.wording import minutes_of

    heads = ["epsilon", "passes", "steps", "batch", "sigma", "noise", "rate", *(["loss"] * losses)]
    heads += ["minutes"] * (sizes[0].minutes is not None)
    yield "  " + "".join(f"{head:>10}" for head in heads)
    for size in sizes:
        cells = [f"{size.epsilon:g}", f"{size.passes:.2g}", f"{size.steps}", f"{size.batch:g}"]
        cells += [f"{size.noise_multiplier:.4g}", f"{size.noise:.3g}", f"{size.learning_rate:.3g}"]
        if losses:
            cells.append("" if size.loss is None else f"{size.loss:.4f}")
        line = "".join(f"{cell:>10}" for cell in (*cells, *minutes_of(size)))
        yield f"  {line}{'  <- these settings' if size.own else ''}"
