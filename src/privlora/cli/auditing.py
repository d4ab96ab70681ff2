"""``privlora audit``: what a finished run gives away, or what a run's releases give away about canaries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from privlora.auditing.asked import (
    GRADIENT,
    OF_ONE_RUN,
    OF_SHADOWS,
    check_kind,
    refuse_few,
    settings_of_finished,
)
from privlora.cli.console import (
    WITHIN,
    JsonOption,
    Stopped,
    counted,
    emit,
    err,
    loading,
    out,
    quiet_libraries,
)
from privlora.config import Settings, load_settings
from privlora.errors import ConfigError
from privlora.training.files import RunFolder
from privlora.training.model_names import refuse_unknown_model
from privlora.training.sources import refuse_first


def audit(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="Folder of a finished run, the CONFIG of a federation, or with --one-run or --shadows any CONFIG.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GROUP.KEY=VALUE]...", help="With a CONFIG.", show_default=False),
    ] = None,
    secrets: Annotated[
        str | None, typer.Option(help="JSONL of prefix, secret, references.", show_default=False)
    ] = None,
    members: Annotated[
        str | None, typer.Option(help="Records that were trained on.", show_default=False)
    ] = None,
    non_members: Annotated[
        str | None, typer.Option(help="Records of the same kind that were not.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use this many records of each file.", show_default=False)
    ] = None,
    one_run: Annotated[
        bool, typer.Option("--one-run", help="Train CONFIG once more, with canaries, not for release.")
    ] = False,
    shadows: Annotated[
        int | None,
        typer.Option(
            min=20, help="Train this many adapters of CONFIG, half of them with a canary.", show_default=False
        ),
    ] = None,
    canaries: Annotated[int | None, typer.Option(help="With --one-run; 1000.", show_default=False)] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="With --one-run: gradient (default), random-tokens, codes, sampled, prefix-suffix or new-token. With "
            "--shadows: random-tokens (default) and the rest of these, or least-likely; no gradient.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="At which the base model writes canaries of the kind sampled (1), or the suffixes of prefix-suffix "
            "(without it, uniform tokens).",
            show_default=False,
        ),
    ] = None,
    prefixes: Annotated[
        str | None,
        typer.Option(
            help="PUBLIC records in the columns of the private ones: canaries of the kinds prefix-suffix and new-token "
            "begin as they do (without them, as the base model writes).",
            show_default=False,
        ),
    ] = None,
    attacker: Annotated[
        Literal["server", "client"] | None,
        typer.Option(help="Of a federation: server (default) or client.", show_default=False),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Of a federation: rounds with and as many without the canary; 1000. The first 200 of "
            "each, or a quarter of fewer than 800, teach the attack; guesses are made on the rest.",
            min=40,
            show_default=False,
        ),
    ] = None,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Of a federation: draw units at the run's rate.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="With --one-run and of a federation; run.output-audit. With --shadows; run.output-shadows.",
            show_default=False,
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of every lower bound.")] = 0.95,
    as_json: JsonOption = False,
) -> None:
    """Attack a run and bound its epsilon from below; results go to its private folder."""
    files = {"--secrets": secrets, "--members": members, "--non-members": non_members, "--limit": limit}
    written = {"--kind": kind, "--temperature": temperature, "--prefixes": prefixes}
    trial = {**written, "--output": output, "a setting (group.name=value)": overrides or None}
    if one_run and shadows is not None:
        raise ConfigError("--one-run and --shadows are two audits", fix="give one of them")
    rounds = {"--attacker": attacker, "--trials": trials, "--sampled": sampled or None}
    if not one_run and shadows is None and target.is_file():
        settings = load_settings(target, overrides or ())
        settings.refuse_labels("an audit")
        if settings.federation is not None:
            _refuse({**files, **written, "--canaries": canaries}, "does not go with a federation")
            folder = Path(f"{settings.run.output}-audit") if output is None else output
            _federation(settings, folder, attacker or "server", trials or 1000, sampled, confidence, as_json)
            return
    _refuse(rounds, "goes with the configuration of a federation")
    mode = "--one-run" if one_run else "--shadows"
    if one_run or shadows is not None:
        _refuse(files if one_run else {**files, "--canaries": canaries}, f"does not go with {mode}")
    else:
        _refuse({**trial, "--canaries": canaries}, "needs --one-run")
    if one_run:
        kind = kind or GRADIENT
        check_kind(kind, temperature, OF_ONE_RUN, prefixes=prefixes is not None)
        _one_run(
            target,
            overrides,
            1000 if canaries is None else canaries,
            kind,
            temperature,
            prefixes,
            output,
            confidence,
            as_json,
        )
    elif shadows is not None:
        kind = kind or "random-tokens"
        _refuse({"--prefixes": prefixes}, "goes with --one-run")
        check_kind(kind, temperature, OF_SHADOWS)
        _shadows(target, overrides, shadows, kind, temperature, output, confidence, as_json)
    else:
        _finished(target, secrets, members, non_members, limit, confidence, as_json)


def _refuse(options: dict[str, Any], words: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} {words}", fix="audit a finished run with files, or a configuration with canaries"
            )


def _finished(
    target: Path,
    secrets: str | None,
    members: str | None,
    non_members: str | None,
    limit: int | None,
    confidence: float,
    as_json: bool,
) -> None:
    if target.is_file():
        raise ConfigError(
            f"{str(target)!r} is a file", fix="add --one-run or --shadows to audit a configuration"
        )
    if secrets is None and members is None:
        _refuse_folder_of_a_federation(target)
    settings_of_finished(target, secrets=secrets, members=members, non_members=non_members)
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.finished_run import audit_finished
            from privlora.auditing.page import at_most as at_most_of_finished
            from privlora.auditing.page import write_finished

        console = err()
        with stoppable("nothing was written; an audit keeps no state, so run the command again"):
            found = audit_finished(
                target,
                secrets=secrets,
                members=members,
                non_members=non_members,
                limit=limit,
                confidence=confidence,
                on_stage=console.print,
            )
            page, series = write_finished(found)
    content = found.to_dict()
    if as_json:
        emit({**content, "page": str(page), "series": str(series)})
        return
    for line in _lines(content, at_most_of_finished(found)):
        out().print(line)
    close(page)


def _lines(content: dict[str, Any], most: str) -> Iterator[str]:
    """most: what guesses could have shown, if that is to be said."""
    if content["secrets"] is not None:
        for stage, x in content["secrets"].items():
            yield (
                f"{stage + ':':<8}exposure {x['exposure']:.2f} bits (chance {x['chance']:.2f}, memorised "
                f"{x['ceiling']:.2f}), {x['extracted']} of {x['secrets']} secrets recited"
            )
    if content["membership"] is not None:
        for stage, x in content["membership"].items():
            area = x["area"]
            yield (
                f"{stage + ':':<8}AUC {area['value']:.3f} ({area['low']:.3f} to {area['high']:.3f}), epsilon at least "
                f"{x['epsilon_lower']:.3f} ({content['confidence']:.0%} confidence)"
            )
    claimed = content["epsilon"]
    yield (
        "claimed: nothing"
        if claimed is None
        else f"claimed: epsilon {claimed:.4f}, delta {content['delta']:g}"
    )
    if most:
        yield note(most)
    if content["violated"]:
        yield "VIOLATED: the attack shows more than the run claims"
    elif claimed is not None and content["membership"] is not None:
        yield WITHIN


def _one_run(
    config: Path,
    overrides: list[str] | None,
    canaries: int,
    kind: str,
    temperature: float | None,
    prefixes: str | None,
    output: Path | None,
    confidence: float,
    as_json: bool,
) -> None:
    settings = _settings(config, overrides, output, "audit")
    refuse_few(canaries)
    folder = settings.run.output
    with quiet_libraries(told=True):
        with loading():
            from privlora.accounting import read_ledger
            from privlora.auditing.canary_run import audit_run, read_state
            from privlora.auditing.exposure import exposure_of_scores
            from privlora.auditing.page import at_most as at_most_of_canaries
            from privlora.auditing.page import bits_of, write_one_run
            from privlora.training.progress import RichObserver
            from privlora.training.promise import plan_privacy

        plan = plan_privacy(settings)[0] if settings.privacy.private else None
        console = err()
        if plan is not None:
            console.print(f"audit, not for release: {plan.describe()}; {canaries} canaries")
        with (
            stoppable("what was done is kept; run the same command again to go on"),
            RichObserver(console, plan) as observer,
        ):
            found = audit_run(
                settings,
                canaries=canaries,
                kind=kind,
                confidence=confidence,
                temperature=temperature,
                prefixes=prefixes,
                observer=observer,
            )
        written = read_ledger(RunFolder(Path(folder)).ledger).plan
        state = read_state(Path(folder))
        page, series = write_one_run(
            found, state, written.phases, Path(folder), kind, temperature, public=prefixes is not None
        )
        exposure = exposure_of_scores(state.scores[state.included], state.scores[~state.included])
    if as_json:
        emit(
            {
                **found.to_dict(),
                **bits_of(exposure),
                "page": str(page),
                "series": str(series),
                "output": folder,
            }
        )
        return
    out().print(f"claimed:     epsilon {found.epsilon_claimed:.4f}, delta {found.delta:g}")
    out().print(f"lower bound: epsilon {found.epsilon_lower:.4f} ({confidence:.0%} confidence)")
    if found.epsilon_signals is not None:
        out().print(f"signals:     epsilon {found.epsilon_signals:.4f}, of all canaries together")
    out().print(f"guesses:     {found.correct} right of {found.guesses}, on {found.canaries} canaries")
    if most := at_most_of_canaries(found):
        out().print(note(most))
    out().print(
        f"exposure:    {exposure.mean:.2f} bits (chance {exposure.chance:.2f}, memorised {exposure.ceiling:.2f})"
    )
    out().print("VIOLATED: the run leaks more than it claims" if found.violated else WITHIN)
    close(page)


def _shadows(
    config: Path,
    overrides: list[str] | None,
    adapters: int,
    kind: str,
    temperature: float | None,
    output: Path | None,
    confidence: float,
    as_json: bool,
) -> None:
    settings = _settings(config, overrides, output, "shadows")
    folder = Path(settings.run.output)
    RunFolder(folder).refuse_if_used()
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.page import at_most as at_most_of_shadows
            from privlora.auditing.page import write_shadows
            from privlora.auditing.shadows import audit_shadows

        with (
            stoppable("nothing was written; such an audit keeps no state, so run the command again"),
            counted(f"{adapters} adapters, half of them with a canary") as progress,
        ):
            found = audit_shadows(
                settings,
                adapters=adapters,
                kind=kind,
                confidence=confidence,
                temperature=temperature,
                progress=progress,
            )
        page, series = write_shadows(found, folder)
    if as_json:
        emit({**found.to_dict(), "page": str(page), "series": str(series), "output": str(folder)})
        return
    area, claimed = found.result.area, found.epsilon_claimed
    out().print(
        "claimed:     nothing"
        if claimed is None
        else f"claimed:     epsilon {claimed:.4f}, delta {found.delta:g}"
    )
    out().print(f"lower bound: epsilon {found.epsilon_lower:.4f} ({confidence:.0%} confidence)")
    out().print(f"AUC:         {area.value:.3f} ({area.low:.3f} to {area.high:.3f})")
    out().print(f"guesses:     {found.correct} right of {found.judged}")
    if most := at_most_of_shadows(found):
        out().print(note(most))
    if found.violated:
        out().print("VIOLATED: the configuration leaks more than it claims")
    elif claimed is not None:
        out().print(WITHIN)
    close(page)


def _federation(
    settings: Settings,
    folder: Path,
    attacker: str,
    trials: int,
    sampled: bool,
    confidence: float,
    as_json: bool,
) -> None:
    refuse_unknown_model(settings.model.name)
    RunFolder(folder).refuse_if_used()
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.federation import audit_federation
            from privlora.auditing.page import PAGE, write_federation
            from privlora.auditing.page import at_most as at_most_of_rounds

        with (
            stoppable("nothing was written; such an audit keeps no state, so run the command again"),
            counted(f"{trials} rounds with and {trials} without a canary") as progress,
        ):
            found = audit_federation(
                settings,
                attacker=attacker,
                trials=trials,
                sampled=sampled,
                confidence=confidence,
                progress=progress,
            )
        page, series = write_federation(found, folder)
    if as_json:
        emit({**found.to_dict(), "page": str(page), "series": str(series), "output": str(folder)})
        return
    out().print(f"claimed:     epsilon {found.epsilon_claimed:.4f}, delta {found.delta:g}, of one round")
    for view in found.views:
        out().print(
            f"lower bound: epsilon {view.epsilon_lower:.4f} for {view.attacker}, who sees {view.view} "
            f"({view.correct} right of {view.judged} guesses)"
        )
    taught = 2 * found.trials - found.strongest.judged
    out().print(
        f"guesses:     of {2 * found.trials} rounds, half of them with the canary; {taught} taught the attack, and "
        "are not guessed"
    )
    if most := at_most_of_rounds(found):
        out().print(note(most))
    out().print(
        "VIOLATED: the federation leaks more than it claims"
        if found.violated
        else f"{WITHIN} ({confidence:.0%} confidence)"
    )
    kept = "" if page.name == PAGE else "; earlier audits of this folder are kept beside it"
    out().print(f"page:        {page}{kept}")


def _refuse_folder_of_a_federation(target: Path) -> None:
    """Raise ConfigError: what its rounds give away is seen in rounds that are played, not in what they left."""
    path = RunFolder(target).settings
    if path.exists() and load_settings(path).federation is not None:
        raise ConfigError(
            f"{str(target)!r} holds a federation, and its audit plays rounds from the settings",
            fix="give the YAML that it was started with, as `privlora audit clinics.yaml`; or attack the adapter alone "
            "with --secrets, or --members and --non-members",
        )


_NOT_ITS_OWN: Final = ("run.output", "data.evaluation")
"""Settings that an audit replaces: it has a folder of its own, and evaluates nothing."""


def _settings(config: Path, overrides: list[str] | None, output: Path | None, suffix: str) -> Settings:
    """Of an audit: a folder of its own, and no evaluation."""
    settings = load_settings(config, overrides or ())
    settings.refuse_labels("an audit")
    if settings.federation is not None:
        option = "--one-run" if suffix == "audit" else "--shadows"
        raise ConfigError(
            f"{option} trains in one place, and {str(config)!r} has a group federation",
            fix=f"leave out {option}: `privlora audit {config}` plays rounds of the federation with a canary",
        )
    refuse_first(settings, begins=False, unread=_NOT_ITS_OWN)
    folder = str(output) if output is not None else f"{settings.run.output}-{suffix}"
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"output": folder}),
            "data": settings.data.model_copy(update={"evaluation": None}),
        }
    )


@contextmanager
def stoppable(words: str) -> Iterator[None]:
    """Inside, an interruption ends in ``words``, which say how to go on."""
    from privlora.training.loop import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        raise Stopped(words) from None


def note(most: str) -> str:
    """On the screen, the sentence that the page has of what guesses could have shown."""
    return f"note:        {most}"


def close(page: Path) -> None:
    """The last lines of an audit on the screen."""
    out().print(f"page:        {page}")
    out().print("PRIVATE: these numbers are about the records; do not publish them")
