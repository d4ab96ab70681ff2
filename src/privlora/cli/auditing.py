"""``privlora audit``: what a finished run gives away, or what a run's releases give away about canaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from privlora.auditing.asked import (
    GRADIENT,
    OF_ONE_RUN,
    OF_SHADOWS,
    check_kind,
    refuse_few,
    settings_of_finished,
)
from privlora.cli import console
from privlora.cli.console import JsonOption, argument, option, quiet_libraries, refuse_given, show, stoppable
from privlora.config import Settings, load_settings
from privlora.consoles import err, loading
from privlora.errors import ConfigError
from privlora.training.files import RunFolder
from privlora.training.preflight import refuse_unknown_model

if TYPE_CHECKING:
    from privlora.training.progress import RichObserver

Found = tuple[dict[str, Any], list[str]]
"""Of an audit: what --json gives, and the lines of the screen."""
KEPT = "what was done is kept; run the same command again to go on"
_SETTING = "a setting (group.name=value)"
_NOT_KEPT = "nothing was written; an audit keeps no state, so run the command again"


def audit(
    target: Annotated[
        Path,
        argument(
            "TARGET", "A finished run's folder, a federation's CONFIG, or any with --one-run or --shadows."
        ),
    ],
    overrides: Annotated[list[str] | None, argument("[GROUP.KEY=VALUE]...", "With a CONFIG.")] = None,
    secrets: Annotated[str | None, option("JSONL of prefix, secret, references.")] = None,
    members: Annotated[str | None, option("Records that were trained on.")] = None,
    non_members: Annotated[str | None, option("Records of the same kind that were not.")] = None,
    limit: Annotated[int | None, option("Use this many records of each file.", min=1)] = None,
    one_run: Annotated[bool, option("Train again with canaries, not for release.", "--one-run")] = False,
    shadows: Annotated[int | None, option("Train so many adapters, half with a canary.", min=20)] = None,
    canaries: Annotated[int | None, option("With --one-run; 1000.")] = None,
    kind: Annotated[
        str | None,
        option(
            "With --one-run: gradient (default), random-tokens, codes, sampled, prefix-suffix or new-token. With "
            "--shadows: random-tokens (default) and the rest of these, or least-likely; no gradient."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        option(
            "At which the base model writes canaries of the kind sampled (1), or the suffixes of prefix-suffix "
            "(without it, uniform tokens)."
        ),
    ] = None,
    prefixes: Annotated[
        str | None,
        option(
            "PUBLIC records in the columns of the private ones: canaries of the kinds prefix-suffix and new-token "
            "begin as they do (without them, as the base model writes)."
        ),
    ] = None,
    attacker: Annotated[Literal["server", "client"] | None, option("Of a federation; server.")] = None,
    trials: Annotated[
        int | None,
        option(
            "Of a federation: rounds with and without the canary; 1000. The first 200 teach the attack.",
            min=40,
        ),
    ] = None,
    sampled: Annotated[bool, option("Of a federation: draw units at the run's rate.", "--sampled")] = False,
    output: Annotated[
        Path | None,
        option("With --one-run and of a federation; run.output-audit. With --shadows; run.output-shadows."),
    ] = None,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of every lower bound.")] = 0.95,
    as_json: JsonOption = False,
) -> None:
    """Attack a run and bound its epsilon from below; results go to its private folder."""
    records = {"secrets": secrets, "members": members, "non_members": non_members}
    files = {**records, "limit": limit}
    written = {"kind": kind, "temperature": temperature, "prefixes": prefixes}
    some = {"canaries": canaries}
    if one_run and shadows is not None:
        raise ConfigError("--one-run and --shadows are two audits", fix="give one of them")
    if not one_run and shadows is None and target.is_file():
        settings = load_settings(target, overrides or ())
        settings.refuse_labels("an audit")
        if settings.federation is not None:
            _refuse({**files, **written, **some}, "does not go with a federation")
            folder = Path(f"{settings.run.output}-audit") if output is None else output
            found = _federation(settings, folder, attacker or "server", trials or 1000, sampled, confidence)
            show(*found, as_json)
            return
    rounds = {"attacker": attacker, "trials": trials, "sampled": sampled or None}
    _refuse(rounds, "goes with the configuration of a federation")
    if one_run:
        _refuse(files, "does not go with --one-run")
        kind = kind or GRADIENT
        check_kind(kind, temperature, OF_ONE_RUN, prefixes=prefixes is not None)
        settings = _settings(target, overrides, output, "audit")
        number = 1000 if canaries is None else canaries
        refuse_few(number)
        found = _one_run(settings, number, {**written, "kind": kind}, confidence)
    elif shadows is not None:
        _refuse({**files, **some}, "does not go with --shadows")
        kind = kind or "random-tokens"
        _refuse({"prefixes": prefixes}, "goes with --one-run")
        check_kind(kind, temperature, OF_SHADOWS)
        settings = _settings(target, overrides, output, "shadows")
        found = _shadows(settings, shadows, kind, temperature, confidence)
    else:
        _refuse({**written, "output": output, _SETTING: overrides or None, **some}, "needs --one-run")
        found = _finished(target, records, limit, confidence)
    show(*found, as_json)


def _refuse(options: dict[str, Any], words: str) -> None:
    named = {name if name == _SETTING else f"--{name.replace('_', '-')}": options[name] for name in options}
    refuse_given(named, words, fix="audit a finished run with files, or a configuration with canaries")


def _finished(target: Path, records: dict[str, str | None], limit: int | None, confidence: float) -> Found:
    if target.is_file():
        raise ConfigError(
            f"{str(target)!r} is a file", fix="add --one-run or --shadows to audit a configuration"
        )
    if records["secrets"] is None and records["members"] is None:
        _refuse_folder_of_a_federation(target)
    settings_of_finished(target, **records)
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.finished_run import audit_finished
            from privlora.auditing.page import at_most, write_audit

        with stoppable(_NOT_KEPT):
            found = audit_finished(
                target, **records, limit=limit, confidence=confidence, on_stage=err().print
            )
            written = write_audit(found, target)
    content = found.to_dict()
    lines = []
    for stage, x in (content["secrets"] or {}).items():
        bits = f"{x['exposure']:.2f} bits (chance {x['chance']:.2f}, memorised {x['ceiling']:.2f})"
        recited = f"{x['extracted']} of {x['secrets']} secrets recited"
        lines.append(f"{stage + ':':<8}exposure {bits}, {recited}")
    for stage, x in (content["membership"] or {}).items():
        bound = f"epsilon at least {x['epsilon_lower']:.3f} ({content['confidence']:.0%} confidence)"
        lines.append(f"{stage + ':':<8}{_area(x['area'])}, {bound}")
    claim = content["epsilon"]
    lines.append("claimed: " + _claim(claim, content["delta"]))
    said = bool(content["violated"] or (claim is not None and content["membership"] is not None))
    verdict = (
        verdict_of(content["violated"], "the attack shows more than the run claims", claim) if said else None
    )
    return finished(content, [*lines, *note(at_most(found))], verdict, written)


def _area(area: dict[str, float]) -> str:
    return f"AUC {area['value']:.3f} ({area['low']:.3f} to {area['high']:.3f})"


@contextmanager
def on_screen(settings: Settings, canaries: int) -> Iterator[RichObserver]:
    """Inside, the run that an audit trains is on the screen; before it stands what the run claims."""
    from privlora.training.progress import RichObserver
    from privlora.training.promise import plan_privacy

    plan = plan_privacy(settings) if settings.privacy.private else None
    claim = "NOT PRIVATE: no clipping, no noise" if plan is None else plan.promise()
    err().print(f"audit, not for release: {claim}; {canaries} canaries")
    with stoppable(KEPT), RichObserver(err(), plan) as observer:
        yield observer


def _one_run(settings: Settings, canaries: int, planted: dict[str, Any], confidence: float) -> Found:
    """planted: kind, temperature and prefixes of the canaries."""
    folder = Path(settings.run.output)
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.canary_run import audit_run
            from privlora.auditing.exposure import exposure_of_scores
            from privlora.auditing.page import at_most, write_audit

        with on_screen(settings, canaries) as observer:
            given: dict[str, Any] = {"canaries": canaries, "confidence": confidence, "observer": observer}
            found = audit_run(settings, **given, **planted)
        exposure, prefixes = exposure_of_scores(*found.scores), planted.pop("prefixes")
        planted["public_prefixes"] = prefixes is not None
        written = write_audit(found, folder, **planted, **exposure.to_dict())
    bits = f"{exposure.mean:.2f} bits (chance {exposure.chance:.2f}, memorised {exposure.ceiling:.2f})"
    lines = claimed_and_bound(found)
    if found.epsilon_signals is not None:
        lines.append(f"signals:     epsilon {found.epsilon_signals:.4f}, of all canaries together")
    guesses = f"{found.correct} right of {found.guesses}, on {found.canaries} canaries"
    lines += [f"guesses:     {guesses}", *note(at_most(found)), f"exposure:    {bits}"]
    verdict = verdict_of(found.violated, "the run leaks more than it claims", found.epsilon_claimed)
    return finished({**found.to_dict(), **exposure.to_dict()}, lines, verdict, written, folder)


def _shadows(
    settings: Settings, adapters: int, kind: str, temperature: float | None, confidence: float
) -> Found:
    folder = Path(settings.run.output)
    RunFolder(folder).refuse_if_used()
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.page import at_most, write_audit
            from privlora.auditing.shadows import audit_shadows

        what = f"{adapters} adapters, half of them with a canary"
        with stoppable(_NOT_KEPT), console.counted(what) as progress:
            found = audit_shadows(
                settings,
                adapters=adapters,
                kind=kind,
                confidence=confidence,
                temperature=temperature,
                progress=progress,
            )
        written = write_audit(found, folder)
    lines = [
        *claimed_and_bound(found),
        f"AUC:         {_area(vars(found.result.area)).removeprefix('AUC ')}",
        f"guesses:     {found.correct} right of {found.judged}",
        *note(at_most(found)),
    ]
    verdict = None
    if found.violated or found.epsilon_claimed is not None:
        verdict = verdict_of(
            found.violated, "the configuration leaks more than it claims", found.epsilon_claimed
        )
    return finished(found.to_dict(), lines, verdict, written, folder)


def _federation(
    settings: Settings, folder: Path, attacker: str, trials: int, sampled: bool, confidence: float
) -> Found:
    refuse_unknown_model(settings.model.name)
    RunFolder(folder).refuse_if_used()
    with quiet_libraries(told=True):
        with loading():
            from privlora.auditing.federation import audit_federation
            from privlora.auditing.page import PAGE, at_most, write_audit

        what = f"{trials} rounds with and {trials} without a canary"
        with stoppable(_NOT_KEPT), console.counted(what) as progress:
            found = audit_federation(
                settings,
                attacker=attacker,
                trials=trials,
                sampled=sampled,
                confidence=confidence,
                progress=progress,
            )
        page, series = write_audit(found, folder)
    taught = 2 * found.trials - found.strongest.judged
    verdict = verdict_of(found.violated, "the federation leaks more than it claims", found.epsilon_claimed)
    lines = [
        f"claimed:     {_claim(found.epsilon_claimed, found.delta)}, of one round",
        *(
            f"lower bound: epsilon {view.epsilon_lower:.4f} for {view.attacker}, who sees {view.view} "
            f"({view.correct} right of {view.judged} guesses)"
            for view in found.views
        ),
        f"guesses:     of {2 * found.trials} rounds, half of them with the canary; {taught} taught the attack, and "
        "are not guessed",
        *note(at_most(found)),
        verdict if found.violated else f"{verdict} ({confidence:.0%} confidence)",
        f"page:        {page}"
        + ("" if page.name == PAGE else "; earlier audits of this folder are kept next to it"),
    ]
    places = {"page": str(page), "series": str(series), "output": str(folder)}
    return {**found.to_dict(), **places}, lines


def _refuse_folder_of_a_federation(target: Path) -> None:
    """Raise ConfigError: what its rounds give away is seen in rounds that are played, not in what they left."""
    path = RunFolder(target).settings
    if path.exists() and load_settings(path).federation is not None:
        raise ConfigError(
            f"{str(target)!r} holds a federation, and its audit plays rounds from the settings",
            fix="give the YAML that it was started with, as `privlora audit clinics.yaml`; or attack the adapter alone "
            "with --secrets, or --members and --non-members",
        )


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
    folder = str(output or f"{settings.run.output}-{suffix}")
    return settings.changed(run={"output": folder}, data={"evaluation": None})


def _claim(epsilon: float | None, delta: float | None) -> str:
    return "nothing" if epsilon is None else f"epsilon {epsilon:.4f}, delta {delta:g}"


def claimed_and_bound(found: Any, also: str = "") -> list[str]:
    """The first lines of what an audit of canaries found. also: behind the confidence."""
    return [
        f"claimed:     {_claim(found.epsilon_claimed, found.delta)}",
        f"lower bound: epsilon {found.epsilon_lower:.4f} ({found.confidence:.0%} confidence{also})",
    ]


def verdict_of(violated: bool, words: str, claimed: float | None) -> str:
    """Whether an attack shows more than is claimed, which ``words`` say."""
    if violated:
        return f"VIOLATED: {words}"
    return "nothing is claimed" if claimed is None else "the attack does not refute the claim"


def note(most: str) -> list[str]:
    """On the screen, the sentence that the page has of what guesses could have shown, if any."""
    return [f"note:        {most}"] if most else []


def finished(
    content: dict[str, Any],
    lines: Iterable[str],
    verdict: str | None,
    written: tuple[Path, Path],
    output: Path | None = None,
) -> Found:
    """With the page and the series that an audit wrote. verdict: None where nothing was claimed."""
    page, series = map(str, written)
    places = {"page": page, "series": series, **({} if output is None else {"output": str(output)})}
    private = "PRIVATE: these numbers are about the records; do not publish them"
    return {**content, **places}, [*lines, *([verdict] if verdict else []), f"page:        {page}", private]
