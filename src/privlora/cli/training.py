"""``privlora train``, and going on with a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from privlora.accounting import Plan, accountant_versions, read_ledger
from privlora.accounting.events import event_or_phases
from privlora.cli.console import (
    JsonOption,
    Stopped,
    accounting,
    counted,
    emit,
    err,
    loading,
    out,
    processes,
    quiet_libraries,
)
from privlora.config import Settings, kept_settings, load_settings
from privlora.config.groups import IN_MEMORY
from privlora.errors import ConfigError, DataError, RunError
from privlora.training.files import RunFolder, no_run
from privlora.training.sources import check_sources, refuse_first
from privlora.training.takeover import OVER, is_over

if TYPE_CHECKING:
    from privlora.api import Result
    from privlora.data.summary import DataSummary
    from privlora.training.progress import RichObserver

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[GROUP.KEY=VALUE]...", help="Settings that replace those of the file.", show_default=False
    ),
]


WRITING = "writing texts"
"""What is shown while a release of texts is made."""


ProfileOption = Annotated[
    bool,
    typer.Option("--profile", help="Leave a trace in private/ that shows where the time of a step goes."),
]


def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    profile: ProfileOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune as CONFIG says; leaves an adapter, a ledger and a report in run.output."""
    with processes() as ranks:
        settings = ranks.same(partial(_settings, config, overrides))
        folder = RunFolder(Path(settings.run.output))
        with quiet_libraries(told=True):
            with loading():
                import privlora.running  # noqa: F401 - else imported after the plan is shown, in silence
                from privlora.api import train_run
                from privlora.rehearsals.choosing import plan_run

            if not ranks.first:
                with explained_stops(folder):
                    train_run(settings)
                return
            with accounting(settings.privacy.steps):
                plan = plan_run(settings)
            result = observed(
                folder,
                plan,
                settings,
                lambda observer: train_run(
                    settings,
                    observer=observer,
                    on_data=show_data,
                    on_choice=show_choice,
                    on_profile=show_profile if profile else None,
                ),
            )
    _show(folder, result, as_json)


def _settings(config: Path, overrides: list[str] | None) -> Settings:
    settings = load_settings(config, overrides or ())
    settings.refuse_a_federation()
    if settings.synthesis is not None and settings.synthesis.publish:
        raise ConfigError(
            "synthesis.publish is set, so texts are the release",
            fix="use `privlora synthesize`, or remove it",
        )
    refuse_first(settings)  # as the run itself does, but before slow imports
    return settings


def go_on(
    folder: RunFolder, settings: Settings, as_json: bool, moved: Mapping[str, Any], *, profile: bool = False
) -> None:
    """Resume a run, and show what it leaves. moved: files that lie elsewhere now, as `resume_run` takes them."""
    chosen = settings.synthesis
    publish = chosen is not None and chosen.publish
    if is_over(folder):
        err().print(OVER)
    else:
        _refuse_moved(settings, moved)
    with quiet_libraries(told=True):
        with loading():
            import privlora.running  # noqa: F401 - as of `train`
            from privlora.api import resume_run
            from privlora.screen import going_on
            from privlora.training.promise import plan_privacy

        if (begun := going_on(folder, settings)) is not None:
            err().print(begun)
        if chosen is not None and chosen.source is not None and not profile:
            with explained_stops(folder), counted(WRITING) as progress:
                result = resume_run(folder.root, progress=progress, show_progress=False)
        else:
            plan = None
            if settings.privacy.private:
                plan = read_ledger(folder.ledger).plan if folder.has_plan else plan_privacy(settings)[0]
            result = observed(
                folder,
                plan,
                settings,
                lambda observer: resume_run(
                    folder.root,
                    observer=observer,
                    on_data=show_data,
                    on_profile=show_profile if profile else None,
                    progress=observer.on_texts,
                    **moved,
                ),
            )
            if profile and result.profile is None:
                err().print("no step was taken, so there is no profile")
    if publish:
        show_texts(folder, result, as_json)
    else:
        _show(folder, result, as_json)


def _refuse_moved(settings: Settings, moved: Mapping[str, Any]) -> None:
    """Before slow imports, raise DataError for files of a run that are no longer where it read them."""
    paths = [settings.data.path, settings.data.evaluation]
    if any(IN_MEMORY in each for each in paths if each is not None):
        return
    try:
        check_sources(settings, moved.get("records"), moved.get("evaluation"))
    except DataError as error:
        fix = "say where the same records lie now: --data FILE, and --evaluation FILE of the public ones"
        raise DataError(error.what, why=error.why, fix=fix) from None


def go_on_beside(folder: RunFolder, moved: Mapping[str, Any]) -> None:
    """The part in it of a process that is not the first of those that were started together."""
    with quiet_libraries():
        from privlora.api import resume_run

        with explained_stops(folder):
            resume_run(folder.root, show_progress=False, **moved)


def load_run_settings(folder: RunFolder) -> Settings:
    """What the run was started with. Raises RunError if there is none."""
    if not folder.settings.exists():
        raise no_run(folder.root)
    return kept_settings(folder.settings)


_WORDS: Final = " (its words: docs/glossary.md)"


def observed(
    folder: RunFolder, plan: Plan | None, settings: Settings, start: Callable[[RichObserver], Result]
) -> Result:
    """What ``start`` gives, with the run on the screen."""
    from privlora.training.progress import RichObserver, unit_of

    console = err()
    words = "NOT PRIVATE: no clipping, no noise" if plan is None else f"plan: {plan.describe()}{_WORDS}"
    console.print(words)
    with explained_stops(folder), RichObserver(console, plan, unit_of(settings)) as observer:
        return start(observer)


@contextlib.contextmanager
def explained_stops(folder: RunFolder, step: str = "step") -> Iterator[None]:
    """Inside, an interruption and full memory end in a message that says how to go on. step: what is counted."""
    import torch

    from privlora.training.loop import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        if not folder.settings.exists():
            how = "goes on with what was measured" if folder.measured.exists() else "begins anew"
            raise Stopped(
                f"before the run started; nothing was released or spent, and the same command {how}"
            ) from None
        when = (
            f"after {stop.counted or step} {stop.step}, which is saved"
            if isinstance(stop, Interrupted)
            else "before it could save"
        )
        raise Stopped(f"{when}. Continue with `privlora resume {folder.root}`") from None
    except torch.OutOfMemoryError:
        raise RunError(
            "out of device memory",
            fix="lower run.tokens_per_micro_batch or set model.gradient_checkpointing"
            + (
                f" in {folder.settings}, then `privlora resume {folder.root}`"
                if folder.settings.exists()
                else ""
            ),
        ) from None


def show_data(summary: DataSummary, settings: Settings) -> None:
    """To whoever may see the records."""
    from privlora.screen import tell_records

    tell_records(err(), summary, settings)


def show_choice(why: str) -> None:
    """What was left to a run: the row, where ``method.name`` stands for several; the tokens of a micro-batch."""
    err().print(f"chosen: {why}")


def show_profile(page: Path) -> None:
    """To whoever may see the records."""
    err().print(f"PRIVATE, where the time of a step went: {page}")


def _show(folder: RunFolder, result: Result, as_json: bool) -> None:
    places = {
        "adapter": str(result.release),
        "ledger": str(folder.ledger) if folder.ledger.exists() else None,
        "report": str(result.release / "report.html"),
    }
    if result.profile is not None:
        places["profile"] = str(result.profile)
    statement, words = _statement(folder, result)
    said = result.report.get("answers")
    if as_json:
        emit({**places, "steps": result.steps, "answers": said, **statement})
        return
    from privlora.reporting.wording import spoken

    for line in spoken(said):
        out().print(line)
    for name, place in places.items():
        if place is not None:
            out().print(f"{name + ':':<10}{place}")
    out().print(f"{'promise:':<10}{words}")


def show_texts(folder: RunFolder, result: Result, as_json: bool) -> None:
    """Where everything lies, and what is promised."""
    from privlora.pages.numbers import number
    from privlora.reporting.publication import read_report

    report = read_report(folder.report)
    facts, quality = report["texts"], report["quality"]
    places = {
        "texts": str(folder.texts),
        "ledger": str(folder.ledger) if folder.ledger.exists() else None,
        "report": str(result.release / "report.html"),
    }
    statement, words = _statement(folder, result)
    shown = {name: value for name, value in quality.items() if not name.endswith("_per_text")}
    if as_json:
        emit({**places, "count": facts["count"], "column": facts["column"], "quality": shown, **statement})
        return
    for name, place in places.items():
        if place is not None:
            out().print(f"{name + ':':<10}{place}")
    out().print(
        f"{'figures:':<10}{facts['count']} texts, perplexity {number(quality['perplexity'])} under the base model, "
        f"distinct pairs of words {number(quality['distinct']['2'], 3)}, near copies {quality['near_copies']:.1%}"
    )
    out().print(f"{'promise:':<10}{words}")


def _statement(folder: RunFolder, result: Result) -> tuple[dict[str, Any], str]:
    """What is promised, for --json and in words."""
    if result.epsilon is None:
        return {"private": False}, "NOT PRIVATE: nothing is promised about the records"
    from privlora.rounding import rounded_up

    plan = read_ledger(folder.ledger).plan
    words = f"({rounded_up(result.epsilon)}, {result.delta:.3g})-DP {plan.describe()}"
    return {"private": True, "epsilon": result.epsilon, "delta": result.delta, **promised(plan)}, words


def promised(plan: Plan) -> dict[str, Any]:
    """All that an epsilon depends on, for --json."""
    return {
        "unit": plan.unit,
        "adjacency": plan.adjacency,
        **event_or_phases(plan.phases),
        "accountant": "pld",
        "versions": accountant_versions(),
    }
