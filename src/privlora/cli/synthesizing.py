"""``privlora synthesize``: a private data set of generated texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privlora.cli.auditing import close, note, stoppable
from privlora.cli.console import (
    WITHIN,
    JsonOption,
    accounting,
    counted,
    emit,
    err,
    loading,
    out,
    quiet_libraries,
)
from privlora.cli.training import (
    WRITING,
    ConfigArgument,
    OverridesArgument,
    explained_stops,
    observed,
    show_choice,
    show_data,
    show_texts,
)
from privlora.config import Settings, load_settings
from privlora.errors import ConfigError, Together
from privlora.training.files import RunFolder, refuse_no_run
from privlora.training.model_names import refuse_unknown_model
from privlora.training.sources import refuse_first

if TYPE_CHECKING:
    from privlora.auditing.released_texts import TextAudit


def synthesize(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A finished run: ask its adapter, at no further cost.", show_default=False
        ),
    ] = None,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Make them once more with canaries, not for release, and attack the texts."
        ),
    ] = False,
    canaries: Annotated[int | None, typer.Option(help="With --audit; 200.", show_default=False)] = None,
    confidence: Annotated[
        float | None,
        typer.Option(
            min=0.5, max=0.999, help="With --audit: of the lower bound on epsilon; 0.95.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a private synthetic data set as CONFIG says: texts, a ledger, a card and a report in run.output.

    The texts are the last population of methods whose texts evolve; with others, the trained adapter writes them.
    """
    problems = Together()
    if source is not None:
        problems.of(None, refuse_no_run, RunFolder(source.expanduser()))
    settings = problems.of(None, lambda: _publishing(load_settings(config, overrides or ()), source))
    if settings is not None:
        problems.of(None, _refuse_early, settings, source is None and not audit)
    problems.tell()
    assert settings is not None
    if audit:
        _audit(
            settings,
            200 if canaries is None else canaries,
            0.95 if confidence is None else confidence,
            as_json,
        )
        return
    for option, value in (("--canaries", canaries), ("--confidence", confidence)):
        if value is not None:
            raise ConfigError(f"{option} goes with --audit", fix=f"add --audit, or remove {option}")
    folder = RunFolder(Path(settings.run.output))
    with quiet_libraries(told=True):
        with loading():
            from privlora.api_synthesis import synthesize_run
            from privlora.rehearsals.choosing import plan_run

        if source is None:
            with accounting(settings.privacy.steps):
                plan = plan_run(settings)
            result = observed(
                folder,
                plan,
                settings,
                lambda observer: synthesize_run(
                    settings,
                    observer=observer,
                    on_data=show_data,
                    on_choice=show_choice,
                    progress=observer.on_texts,
                ),
            )
        else:
            with explained_stops(folder), counted(WRITING) as progress:
                result = synthesize_run(settings, progress=progress)
    show_texts(folder, result, as_json)


def _refuse_early(settings: Settings, trains: bool) -> None:
    """What the run itself refuses, but before slow imports; of one that takes no steps of its own its model alone."""
    if trains:
        refuse_first(settings)
        return
    refuse_unknown_model(settings.model.name)


def _publishing(settings: Settings, source: Path | None) -> Settings:
    """The settings of a run whose release is texts. Raises ConfigError."""
    settings.refuse_a_federation()
    if settings.synthesis is None:
        raise ConfigError(
            "nothing says who writes the texts, and in which words",
            fix="add the group synthesis, as `synthesis: {generator: model, preset: clinical-note}`",
        )
    updates: dict[str, Any] = {"publish": True}
    if source is None and settings.synthesis.source is not None:
        raise ConfigError(
            "synthesis.source is for --from alone",
            why="a run that trains has a release of its own",
            fix="remove it, or give the finished run as --from RUN",
        )
    if source is not None:
        updates["source"] = str(source.expanduser().resolve())
    return settings.model_copy(update={"synthesis": settings.synthesis.model_copy(update=updates)})


def _audit(settings: Settings, canaries: int, confidence: float, as_json: bool) -> None:
    """In a folder of its own, beside that of the texts which may be released."""
    settings = settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"output": f"{settings.run.output}-audit"}),
            "data": settings.data.model_copy(update={"evaluation": None}),
        }
    )
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.page import at_most as at_most_of_canaries
            from privlora.auditing.page import write_texts_audit
            from privlora.auditing.released_texts import audit_texts, settings_of_audit
            from privlora.training.progress import RichObserver
            from privlora.training.promise import plan_privacy

        settings, writer = settings_of_audit(settings)
        folder = Path(settings.run.output)
        plan = plan_privacy(settings)[0] if settings.privacy.private else None
        console = err()
        claim = "NOT PRIVATE: no clipping, no noise" if plan is None else plan.describe()
        console.print(f"audit, not for release: {claim}; {canaries} canaries")
        with (
            stoppable("what was done is kept; run the same command again to go on"),
            RichObserver(console, plan) as observer,
        ):
            found, state, claimed = audit_texts(
                settings,
                writer,
                canaries=canaries,
                confidence=confidence,
                observer=observer,
                progress=observer.on_texts,
            )
        events = None if claimed is None else claimed.plan.phases
        page, series = write_texts_audit(found, state, events, folder)
    if as_json:
        emit({**found.to_dict(), "page": str(page), "series": str(series), "output": str(folder)})
        return
    for line in _lines(found, at_most_of_canaries(found)):
        out().print(line)
    close(page)


def _lines(found: TextAudit, most: str) -> Iterator[str]:
    """most: what guesses could have shown, if that is to be said."""
    inside, outside = found.included, found.canaries - found.included
    claimed = found.epsilon_claimed
    yield (
        "claimed:     nothing"
        if claimed is None
        else f"claimed:     epsilon {claimed:.4f}, delta {found.delta:g}"
    )
    zero = "" if found.epsilon_lower else "; 0 proves nothing, only that this attack found nothing"
    yield f"lower bound: epsilon {found.epsilon_lower:.4f} ({found.confidence:.0%} confidence{zero})"
    yield (
        f"exposure:    {found.exposure:.2f} bits (chance {found.chance:.2f}, most {found.ceiling:.2f}), "
        f"AUC {found.area.value:.3f} ({found.area.low:.3f} to {found.area.high:.3f})"
    )
    yield (
        f"recited:     {found.recited[0]} of {inside} canaries that were in, {found.recited[1]} of {outside} that "
        f"were not, in {found.texts} texts"
    )
    yield f"guesses:     {found.correct} right of {found.guesses}, on {found.canaries} canaries"
    if most:
        yield note(most)
    if claimed is not None:
        yield "VIOLATED: the texts leak more than the run claims" if found.violated else WITHIN
