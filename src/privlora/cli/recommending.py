"""Sizes of ``privlora plan``: how many steps, how large a batch, which epsilon, before any record is read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from privlora.cli.console import finished_run, phased, quiet_libraries, refuse_given, show
from privlora.config import Settings, load_settings
from privlora.consoles import loading
from privlora.errors import ConfigError
from privlora.training.preflight import check_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from privlora.rehearsals.recommending import Recommendation


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
    lines, where = _lines(found, settings), None if page is None else str(page)
    show({**asdict(found), "page": where}, [*lines, *([f"page: {where}"] if where else [])], as_json)


def _lines(found: Recommendation, settings: Settings) -> list[str]:
    from privlora.rehearsals.recommending import MEANING, advice

    privacy = settings.privacy
    lines = [f"N {found.units:g}, delta {found.delta:g}, method {settings.method.name}", MEANING]
    for title, sizes in (
        (f"by passes over the data, at epsilon {privacy.target_epsilon:g}", found.by_passes),
        (f"by epsilon, in {privacy.steps} steps of {privacy.b:g}", found.by_epsilon),
    ):
        marks = ["", *("  <- these settings" if size.own else "" for size in sizes)]
        rows = zip(found.table(sizes), marks, strict=True)
        lines += [f"\n{title}", *("  " + "".join(f"{x:>10}" for x in cells) + mark for cells, mark in rows)]
    return [*lines, "", *advice(found)]
