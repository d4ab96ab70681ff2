"""``privlora train`` and ``privlora resume``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from privlora.accounting import Plan, accountant_versions, read_ledger
from privlora.accounting.events import event_or_phases
from privlora.api import resume_run, start_run, train_run
from privlora.calling import Given
from privlora.cli.console import (
    JsonOption,
    Stopped,
    argument,
    named,
    option,
    processes,
    quiet_libraries,
    refuse_alone,
    refuse_given,
    show,
)
from privlora.config import Settings, kept_settings, load_settings
from privlora.consoles import err, loading
from privlora.errors import ConfigError, RunError
from privlora.training.files import RunFolder, no_run

if TYPE_CHECKING:
    from privlora.api import Result
    from privlora.training.progress import RichObserver

_Engine = Literal["embedded", "simulation"]
ConfigArgument = Annotated[Path, argument("CONFIG", "YAML file of the run.")]
OverridesArgument = Annotated[
    list[str] | None, argument("[GROUP.KEY=VALUE]...", "Settings that replace those of the file.")
]


_ProfileOption = Annotated[
    bool, option("Leave a trace in private/ that shows where the time of a step goes.", "--profile")
]


_SUPERLINK = "127.0.0.1:8000"


def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    profile: _ProfileOption = False,
    engine: Annotated[
        _Engine | None, option("Of a federation: clients in this process (embedded), or Flower's simulation.")
    ] = None,
    app: Annotated[
        Path | None, option("Write a federation's app for several machines.", "--write-app", metavar="FOLDER")
    ] = None,
    superlink: Annotated[
        str | None, option(f"Of the app: where the SuperLink answers; {_SUPERLINK}.", metavar="HOST:PORT")
    ] = None,
    root_certificates: Annotated[
        Path | None, option("Of the app: the authority of the SuperLink's certificate.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune as CONFIG says; leaves an adapter, a ledger and a report in run.output.

    With a group federation, the records stay with several owners: each client has a folder and a ledger of its own,
    and the server sees nothing but their messages.
    """
    of_app = {"--superlink": superlink, "--root-certificates": root_certificates}
    if app is None:
        refuse_given(
            of_app,
            "without --write-app: all clients of this run are in this process, and nobody is called",
            fix="add --write-app FOLDER, which writes the app for machines of their own",
        )
    with processes() as ranks:
        settings = ranks.same(partial(_settings, config, overrides))
        if settings.federation is not None:
            from privlora.cli import federating

            _refuse_in_a_federation("train", profile)
            if app is not None:
                federating.write(app, settings, superlink or _SUPERLINK, root_certificates, as_json)
            else:
                federating.start(settings, as_json, simulated=engine == "simulation")
            return
        refuse_given(
            {"--engine": engine, "--write-app": app, **of_app},
            f"is for a federation, and {config} has no group federation, so nothing says who its clients are",
            fix=[
                "add one, as federation: {clients: [{name: north, path: north.jsonl}, {name: south, path: "
                "south.jsonl}], rounds: 10, local_steps: 4, rule: tan}, without data.path and privacy.steps",
                "or let `privlora init north.jsonl south.jsonl --clients --model NAME` write such a YAML",
                "or leave the option out, to train in one place",
            ],
        )
        folder = RunFolder(Path(settings.run.output))
        if not ranks.first:
            with quiet_libraries(), explained_stops(folder):
                train_run(settings)
            return
        result = start_run(settings, partial(watched, folder), Given(profile=profile))
    _show(folder, result, as_json)


def _settings(config: Path, overrides: list[str] | None) -> Settings:
    settings = load_settings(config, overrides or ())
    if settings.synthesis is not None and settings.synthesis.publish:
        fix = "use `privlora synthesize`, or remove it"
        raise ConfigError("synthesis.publish is set, so texts are the release", fix=fix)
    return settings


def _refuse_in_a_federation(command: str, profile: bool) -> None:
    """Raise ConfigError for what only a run in one place has: several processes, and a profile of its steps."""
    refuse_alone(f"{command} of a federation")
    refuse_given(
        {"--profile": profile or None},
        "does not go with a federation: its steps are its clients'",
        fix="leave --profile out",
    )


def resume(
    run: Annotated[Path, argument("RUN", "Folder of the interrupted run.")],
    data: Annotated[Path | None, option("Where the same records lie now.", metavar="FILE")] = None,
    evaluation: Annotated[Path | None, option("Where the public ones lie.", metavar="FILE")] = None,
    profile: _ProfileOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue an interrupted run or federation with fresh noise; what was charged stays charged."""
    folder = RunFolder(run)
    given: dict[str, Any] = {"records": data, "evaluation": evaluation}
    moved = {name: path for name, path in given.items() if path is not None}
    with processes() as ranks:
        settings = ranks.same(lambda: load_run_settings(folder))
        if settings.federation is not None:
            _refuse_in_a_federation("resume", profile)
            refuse_given(
                {"--data": data, "--evaluation": evaluation},
                "is not for a federation: its records are its clients'",
                fix="leave it out, and resume in the folder in which it was started",
            )
        if not ranks.first:
            with quiet_libraries(), explained_stops(folder):
                resume_run(folder.root, show_progress=False, **moved)
        elif settings.federation is not None:
            from privlora.cli import federating

            federating.go_on(folder, settings, as_json)
        else:
            with watched(folder) as observer:
                result = resume_run(folder.root, observer=observer, profile=profile, **moved)
            if profile and result.profile is None:
                err().print("no step was taken, so there is no profile")
            shows = _show if settings.synthesis is None or not settings.synthesis.publish else show_texts
            shows(folder, result, as_json)


def load_run_settings(folder: RunFolder) -> Settings:
    """What the run was started with. Raises RunError if there is none."""
    if not folder.settings.exists():
        raise no_run(folder.root)
    return kept_settings(folder.settings)


@contextlib.contextmanager
def watched(folder: RunFolder) -> Iterator[RichObserver]:
    """Inside, after all slow imports, the run is on the screen."""
    with quiet_libraries(told=True):
        with loading():
            import privlora.running  # noqa: F401 - else imported after the plan is shown, in silence
            from privlora.training.progress import RichObserver
        with explained_stops(folder), RichObserver(err()) as observer:
            yield observer


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
            when = f"before the run started; nothing was released or spent, and the same command {how}"
            raise Stopped(when) from None
        when = "before it could save"
        if isinstance(stop, Interrupted):
            when = f"after {stop.counted or step} {stop.step}, which is saved"
        raise Stopped(f"{when}. Continue with `privlora resume {folder.root}`") from None
    except torch.OutOfMemoryError:
        fix = "lower run.tokens_per_micro_batch or set model.gradient_checkpointing"
        if folder.settings.exists():
            fix += f" in {folder.settings}, then `privlora resume {folder.root}`"
        raise RunError("out of device memory", fix=fix) from None


def places_of(folder: RunFolder, release: Path, **first: str) -> dict[str, str | None]:
    """Of what a run leaves; None for what is not there. first: what was released."""
    ledger = str(folder.ledger) if folder.ledger.exists() else None
    return {**first, "ledger": ledger, "report": str(release / "report.html")}


def _show(folder: RunFolder, result: Result, as_json: bool) -> None:
    from privlora.reporting.wording import spoken

    places = places_of(folder, result.release, adapter=str(result.release))
    if result.profile is not None:
        places["profile"] = str(result.profile)
    statement, promise = _statement(folder, result)
    said = result.report.get("answers")
    lines = (*spoken(said), *named([*places.items(), ("promise", promise)]))
    show({**places, "steps": result.steps, "answers": said, **statement}, lines, as_json)


def show_texts(folder: RunFolder, result: Result, as_json: bool) -> None:
    """Where everything lies, and what is promised."""
    from privlora.pages.numbers import number
    from privlora.reporting.publication import read_report

    report = read_report(folder.report)
    facts, quality = report["texts"], report["quality"]
    places = places_of(folder, result.release, texts=str(folder.texts))
    statement, promise = _statement(folder, result)
    figures = (
        f"{facts['count']} texts, perplexity {number(quality['perplexity'])} under the base model, distinct pairs of "
        f"words {number(quality['distinct']['2'], 3)}, near copies {quality['near_copies']:.1%}"
    )
    shown = {name: value for name, value in quality.items() if not name.endswith("_per_text")}
    content = {**places, "count": facts["count"], "column": facts["column"], "quality": shown, **statement}
    show(content, named([*places.items(), ("figures", figures), ("promise", promise)]), as_json)


def _statement(folder: RunFolder, result: Result) -> tuple[dict[str, Any], str]:
    """What is promised, for --json and in words."""
    if result.epsilon is None:
        return {"private": False}, "NOT PRIVATE: nothing is promised about the records"
    plan = read_ledger(folder.ledger).plan
    found = {"private": True, "epsilon": result.epsilon, "delta": result.delta, **promised(plan)}
    return found, plan.promise(result.epsilon)


def promised(plan: Plan) -> dict[str, Any]:
    """All that an epsilon depends on, for --json."""
    return {
        "unit": plan.unit,
        "adjacency": plan.adjacency,
        **event_or_phases(plan.phases),
        "accountant": "pld",
        "versions": accountant_versions(),
    }
