"""``privlora recommend``: how many steps, how large a batch, which epsilon, before any record is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privlora.cli.console import JsonOption, emit, loading, out, phased, quiet_libraries
from privlora.cli.training import ConfigArgument, OverridesArgument
from privlora.config import Settings, load_settings
from privlora.data.records import iterate_records
from privlora.errors import ConfigError, DataError
from privlora.training.sources import check_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from privlora.rehearsals.recommending import Recommendation, Size


def recommend(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    public: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PUBLIC records of the form of the private ones: each size is rehearsed on them, which takes minutes.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Time steps on this machine, and say how many passes so many minutes have room for.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="With --minutes: how many tokens a record has, as you know it; without it data.max_length.",
            show_default=False,
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page with the curves.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What more passes, and other epsilons, would bring to a run: its noise, and its loss on public records. Reads no
    private record."""
    _recommend(config, overrides, public, minutes, tokens, page, as_json)


def _recommend(
    config: Path,
    overrides: list[str] | None,
    public: Path | None,
    minutes: float | None,
    tokens: int | None,
    page: Path | None,
    as_json: bool,
) -> None:
    more = []
    if public is not None:
        # JSON's quotes are YAML's: a file may be called 12.
        more = ["method.learning_rate=auto", f"auto.file={json.dumps(str(public), ensure_ascii=False)}"]
    settings = load_settings(config, [*(overrides or ()), *more])
    settings.refuse_a_federation()
    if page is not None and page.is_dir():
        raise ConfigError(f"--page {page} is a folder", fix=f"name a file, as {page / 'recommendation.html'}")
    if page is not None and not page.parent.is_dir():
        raise ConfigError(f"--page {page} is in a folder that is not there", fix=f"make {page.parent} first")
    if tokens is not None and minutes is None:
        raise ConfigError(
            "--tokens says how long the records are that --minutes times", fix="give --minutes, too"
        )
    rehearse = settings.auto is not None and settings.auto.rehearses_rate
    if rehearse:
        _refuse_no_records(settings)
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
    if as_json:
        emit({**found.to_dict(), "page": None if page is None else str(page)})
        return
    _show(found, settings)
    if page is not None:
        out().print(f"page: {page}")


def _refuse_no_records(settings: Settings) -> None:
    """Raise DataError for public files that are not there, and for an auto.file without a record."""
    check_sources(settings, records=())
    assert settings.auto is not None
    assert settings.auto.file is not None
    try:
        next(iterate_records(settings.auto.file, format=settings.data.format, limit=1))
    except DataError as error:
        raise error.of("auto.file") from None


def _show(found: Recommendation, settings: Settings) -> None:
    from privlora.rehearsals.wording import advice, has_losses, meaning_of_noise

    epsilon = settings.privacy.target_epsilon
    out().print(f"N {found.units:g}, delta {found.delta:g}, method {settings.method.name}")
    out().print(meaning_of_noise())
    out().print(f"\nby passes over the data, at epsilon {epsilon:g}")
    losses = has_losses(found)
    _table(found.by_passes, losses=losses)
    steps, batch = settings.privacy.steps, settings.privacy.b
    out().print(f"\nby epsilon, in {steps} steps of {batch:g}")
    _table(found.by_epsilon, losses=losses)
    out().print("")
    for line in advice(found):
        out().print(line)


def _table(sizes: Sequence[Size], *, losses: bool) -> None:
    from privlora.rehearsals.wording import minutes_of

    timed = sizes[0].minutes is not None
    heads = ["epsilon", "passes", "steps", "batch", "sigma", "noise", "rate"]
    heads += [*(["loss"] if losses else []), *(["minutes"] if timed else [])]
    out().print("  " + "".join(f"{head:>10}" for head in heads))
    for size in sizes:
        cells = [
            f"{size.epsilon:g}",
            f"{size.passes:.2g}",
            f"{size.steps}",
            f"{size.batch:g}",
            f"{size.noise_multiplier:.4g}",
            f"{size.noise:.3g}",
            f"{size.learning_rate:.3g}",
            *([] if not losses else ["" if size.loss is None else f"{size.loss:.4f}"]),
            *minutes_of(size),
        ]
        out().print(
            "  " + "".join(f"{cell:>10}" for cell in cells) + ("  <- these settings" if size.own else "")
        )
