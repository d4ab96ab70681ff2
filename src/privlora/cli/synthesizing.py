"""``privlora synthesize``: a private data set of generated texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from privlora.api import start_synthesis
from privlora.cli import auditing, training
from privlora.cli.console import JsonOption, option, quiet_libraries, refuse_given, show
from privlora.cli.training import ConfigArgument, OverridesArgument
from privlora.config import Settings, load_settings
from privlora.consoles import loading
from privlora.errors import ConfigError, Together
from privlora.training.files import RunFolder, refuse_no_run


def synthesize(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    source: Annotated[
        Path | None, option("Ask the adapter of this finished run, at no further cost.", "--from")
    ] = None,
    audit: Annotated[
        bool, option("Make texts with canaries and attack them; not for release.", "--audit")
    ] = False,
    canaries: Annotated[int | None, option("With --audit; 200.")] = None,
    confidence: Annotated[float | None, option("With --audit; 0.95.", min=0.5, max=0.999)] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a private synthetic data set as CONFIG says: texts, a ledger, a card and a report in run.output.

    The texts are the last population of methods whose texts evolve; with others, the trained adapter writes them.
    """
    problems = Together()
    if source is not None:
        problems.of(None, refuse_no_run, RunFolder(source.expanduser()))
    settings = problems.of(None, lambda: _publishing(load_settings(config, overrides or ()), source))
    problems.tell()
    assert settings is not None
    if audit:
        number, sure = 200 if canaries is None else canaries, 0.95 if confidence is None else confidence
        show(*_audit(settings, number, sure), as_json)
        return
    given = {"--canaries": canaries, "--confidence": confidence}
    refuse_given(given, "goes with --audit", fix="add --audit, or leave it out")
    folder = RunFolder(Path(settings.run.output))
    result = start_synthesis(settings, partial(training.watched, folder))
    training.show_texts(folder, result, as_json)


def _publishing(settings: Settings, source: Path | None) -> Settings:
    """The settings of a run whose release is texts. Raises ConfigError."""
    settings.refuse_a_federation()
    if settings.synthesis is None:
        fix = "add the group synthesis, as `synthesis: {preset: clinical-note}`"
        raise ConfigError("nothing says who writes the texts, and in which words", fix=fix)
    updates: dict[str, Any] = {"publish": True}
    if source is None and settings.synthesis.source is not None:
        raise ConfigError(
            "synthesis.source is for --from alone",
            why="a run that trains has a release of its own",
            fix="remove it, or give the finished run as --from RUN",
        )
    if source is not None:
        updates["source"] = str(source.expanduser().resolve())
    return settings.changed(synthesis=updates)


def _audit(settings: Settings, canaries: int, confidence: float) -> auditing.Found:
    """In a folder of its own, next to that of the texts which may be released. It evaluates nothing."""
    settings = settings.changed(run={"output": f"{settings.run.output}-audit"}, data={"evaluation": None})
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.page import at_most, write_audit
            from privlora.auditing.released_texts import audit_texts, settings_of_audit

        settings, writer = settings_of_audit(settings)
        with auditing.on_screen(settings, canaries) as observer:
            found = audit_texts(
                settings,
                writer,
                canaries=canaries,
                confidence=confidence,
                observer=observer,
                progress=observer.on_texts,
            )
        folder = Path(settings.run.output)
        written = write_audit(found, folder)
    area, outside = found.area, found.canaries - found.included
    zero = "" if found.epsilon_lower else "; 0 proves nothing, only that this attack found nothing"
    lines = [
        *auditing.claimed_and_bound(found, zero),
        f"exposure:    {found.exposure:.2f} bits (chance {found.chance:.2f}, most {found.ceiling:.2f}), "
        f"AUC {area.value:.3f} ({area.low:.3f} to {area.high:.3f})",
        f"recited:     {found.recited[0]} of {found.included} canaries that were in, {found.recited[1]} of {outside} "
        f"that were not, in {found.texts} texts",
        f"guesses:     {found.correct} right of {found.guesses}, on {found.canaries} canaries",
        *auditing.note(at_most(found)),
    ]
    verdict = None
    if found.epsilon_claimed is not None:
        verdict = auditing.verdict_of(
            found.violated, "the texts leak more than the run claims", found.epsilon_claimed
        )
    return auditing.finished(found.to_dict(), lines, verdict, written, folder)
