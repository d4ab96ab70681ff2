"""``privlora calibrate`` and ``privlora budget``: accounting without a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from privlora.accounting import (
    Adjacency,
    CyclicPoissonSampling,
    PoissonSampling,
    Sampling,
    TruncatedPoissonSampling,
    calibrate_noise_multiplier,
    compose_ledgers,
)
from privlora.accounting import epsilon as accounted_epsilon
from privlora.accounting.accountants import accountant_versions
from privlora.accounting.calibration import Calibration
from privlora.accounting.events import StepEvent, describe_events, event_or_phases
from privlora.accounting.meaning import in_words, meaning, noise_for
from privlora.cli.console import JsonOption, argument, option, show
from privlora.errors import ConfigError, PrivacyError, Together, named
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder

if TYPE_CHECKING:
    from privlora.config import PrivacySettings

Drawing = Literal["poisson", "balls-in-bins"]
_DEFAULT_ADJACENCY: Adjacency = "add-or-remove-one"


def _as(kind: type[float]) -> Callable[[object], Any]:
    """Gives a number, or the text that is none, which is said with all else that is wrong."""

    def read(text: Any) -> Any:
        with suppress(ValueError, TypeError):
            return kind(text)
        return text

    return read


_FLOAT: dict[str, Any] = {"parser": _as(float), "metavar": "FLOAT"}
_WHOLE: dict[str, Any] = {"parser": _as(int), "metavar": "INTEGER"}


def calibrate(
    delta: Annotated[float, option("Well below 1 / number of privacy units.", **_FLOAT)],
    steps: Annotated[int, option("Number of releases.", **_WHOLE)],
    epsilon: Annotated[float | None, option("Target: epsilon at most.", **_FLOAT)] = None,
    right_guesses: Annotated[
        float | None, option("Instead: share of right guesses who took part; a coin has 0.5.", **_FLOAT)
    ] = None,
    found: Annotated[
        float | None, option("Instead: share that is found at 1 false accusation in 100.", **_FLOAT)
    ] = None,
    sample_rate: Annotated[float | None, option("q: probability of each unit in a step.", **_FLOAT)] = None,
    expected_batch_size: Annotated[float | None, option("q N, instead of --sample-rate.", **_FLOAT)] = None,
    public_dataset_size: Annotated[
        int | None, option("N as you may publish it.", "--public-dataset-size", "--dataset-size", **_WHOLE)
    ] = None,
    max_batch_size: Annotated[int | None, option("Public cap on a batch.", **_WHOLE)] = None,
    projection: Annotated[
        list[str] | None,
        option(
            "Each step clips whole gradients, then projects a layer's input of this width on a fresh random "
            "subspace of this rank. Repeat it for layers that differ.",
            metavar="RANK:WIDTH",
        ),
    ] = None,
    bands: Annotated[str | None, option("As privacy.bands.", metavar="NUMBER|auto", parser=_as(int))] = None,
    drawing: Annotated[Drawing, typer.Option("--sampling", help="As privacy.sampling.")] = "poisson",
    adjacency: Annotated[Adjacency, typer.Option(help="Of data sets.")] = _DEFAULT_ADJACENCY,
    as_json: JsonOption = False,
) -> None:
    """Print the smallest noise multiplier that meets a target (PLD accountant)."""
    from privlora.config import PrivacySettings, checked

    problems = Together()  # all of them, before anything that takes seconds is loaded
    projections = [
        pair for text in projection or () if (pair := problems.of(None, _projection, text)) is not None
    ]
    if (sample_rate is None) == (expected_batch_size is None):
        fix = "--expected-batch-size goes with --public-dataset-size"
        raise ConfigError("give exactly one of --sample-rate and --expected-batch-size", fix=fix)
    shares = right_guesses is not None or found is not None
    if (epsilon is None) != shares:
        fix = "give one of them, as --epsilon 3"
        raise ConfigError("give either --epsilon or shares (--right-guesses, --found)", fix=fix)
    if bands not in (None, "1") and projection:
        what = (
            "--bands does not go with --projection: correlated noise is of no projection that is drawn anew"
        )
        problems.found.append(ConfigError(what, fix="leave out --bands or --projection"))
    given = {
        "target_epsilon": epsilon,
        "target_right_guesses": right_guesses,
        "target_found": found,
        "delta": delta,
        "steps": steps,
        "sample_rate": sample_rate,
        # The noise multiplier is of any number of units at this rate, so one will do.
        "expected_batch_size": expected_batch_size or (sample_rate if public_dataset_size is None else None),
        "public_dataset_size": public_dataset_size,
        "max_batch_size": max_batch_size,
        "bands": bands,
        "sampling": drawing,
    }
    given = {name: value for name, value in given.items() if value is not None}
    privacy = problems.of(None, checked, PrivacySettings, given, "calibrate")
    problems.tell()
    assert privacy is not None
    sampling: Sampling = PoissonSampling(privacy.q)
    if privacy.max_batch_size is not None:
        sampling = TruncatedPoissonSampling(privacy.q, privacy.max_batch_size, int(privacy.n))
    found_of_bands: dict[str, Any] = {}
    if privacy.bands != 1 or privacy.sampling != "poisson":
        from privlora.training.promise import planned_sampling

        plain, sampling = sampling, planned_sampling(privacy, sampling, adjacency)
        number = sampling.classes if isinstance(sampling, CyclicPoissonSampling) else 1
        found_of_bands = facts_of_bands(privacy, plain, number, adjacency)
    of_steps: dict[str, Any] = {"adjacency": adjacency, "projections": tuple(projections)}
    if epsilon is None:
        sigma = noise_for(
            ((sampling, steps),), right_guesses=right_guesses, found_at_1_percent=found, **of_steps
        )
        event = StepEvent(sampling, sigma, tuple(projections))
        spent = accounted_epsilon([(event, steps)], delta, adjacency=adjacency)
        calibrated = Calibration(event, steps, spent, spent, delta, adjacency, 1e-5, accountant_versions())
    else:
        calibrated = calibrate_noise_multiplier(sampling, steps, epsilon, delta, **of_steps)
    lines = [f"noise_multiplier {calibrated.noise_multiplier:.7g}", calibrated.describe()]
    if found_of_bands:
        lines.insert(1, f"bands {words_of_bands(found_of_bands)}")
    means = meaning(calibrated.events, adjacency)
    lines += in_words(means, "unit", calibrated.epsilon)
    facts = {"noise_multiplier": calibrated.noise_multiplier, **found_of_bands, "means": means.to_dict()}
    show({**facts, **calibrated.to_dict()}, lines, as_json)


def facts_of_bands(
    privacy: PrivacySettings, plain: Sampling, bands: int, adjacency: Adjacency = _DEFAULT_ADJACENCY
) -> dict[str, Any]:
    """JSON-ready: how many there are, whether auto chose them, and `training.promise.noise_of_bands`. Nothing of one
    band that nobody asked for by auto. plain: how batches would be drawn with one band."""
    from privlora.training.promise import noise_of_bands

    chosen = {"bands_by_auto": bands} if privacy.bands == "auto" else {}
    if bands == 1:
        return chosen
    return {"bands": bands, **chosen, **noise_of_bands(privacy, plain, bands, adjacency)}


def words_of_bands(facts: dict[str, Any]) -> str:
    """How much noise so many bands leave in steps and in their sums."""
    if "bands" not in facts:
        return "auto: 1 is best here"
    chosen, equal = "auto: " if "bands_by_auto" in facts else "", facts["noise_in_sums_at_equal_epsilon"]
    at_one_epsilon, another = "", ", whose epsilon would be another"
    if equal is not None:
        at_one_epsilon, another = f"{equal:.3g} times the noise of 1 band at the same epsilon, and ", ""
    return (
        f"{chosen}{facts['bands']}: in the sums of steps {at_one_epsilon}{facts['noise_in_sums']:.3g} times that of 1 "
        f"band with this sigma{another}; in a step up to {facts['largest_row']:.3g} times as much as independent noise "
        "of this sigma"
    )


def _projection(text: str) -> tuple[int, int]:
    """Rank and width. Raises ConfigError for anything else."""
    parts = text.split(":")
    # More digits than any number here has would take seconds to read.
    if len(parts) == 2 and all(part.isdecimal() and len(part) <= 18 for part in parts):
        rank, width = map(int, parts)
        if 1 <= rank <= width:
            return rank, width
    raise ConfigError(
        f"--projection {named(text)} is not RANK:WIDTH, two whole numbers from 1 on, the second no smaller",
        why="the share of a gradient that a random subspace captures depends on both",
        fix="give the rank and the width of the layer's input, for example --projection 64:2048",
    )


def budget(
    ledgers: Annotated[list[Path], argument("LEDGER...", "Ledgers, or folders of runs.")],
    delta: Annotated[float | None, option("Of the total; else the one of all runs.")] = None,
    adjacency: Annotated[Adjacency | None, option("Of the total; else the one of all runs.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compose the ledgers of several runs on the same data into one guarantee."""
    statement = compose_ledgers([_ledger_of(path) for path in ledgers], delta, adjacency)
    runs = [
        {
            "ledgers": [{"path": str(copy.path), "steps_charged": copy.charges} for copy in run.copies],
            "run_id": run.run_id,
            "dataset": run.plan.dataset,
            "method": run.plan.method,
            **event_or_phases(run.events),
            "steps_charged": run.releases,
            "epsilon": run.epsilon,
        }
        for run in statement.runs
    ]
    content = {
        "epsilon": statement.epsilon,
        "delta": statement.delta,
        "unit": statement.unit,
        "adjacency": statement.adjacency,
        "accountant": "pld",
        "versions": statement.versions,
        "datasets": list(statement.datasets),
        "runs": runs,
    }
    lines = [
        f"{', '.join(str(copy.path) for copy in run.copies)}: epsilon {rounded_up(run.epsilon)}, "
        f"{describe_events(run.events)}"
        for run in statement.runs
    ]
    show(content, [*lines, statement.describe()], as_json)


def _ledger_of(path: Path) -> Path:
    """A ledger itself, or that of a run's folder or of its release."""
    if not path.is_dir():
        return path
    run = RunFolder(path)
    if run.release.name == "not-private" and not run.ledger.exists():
        raise PrivacyError(
            f"the run in {str(path)!r} was trained without privacy",
            why="no epsilon bounds what it shows of its records, nor what it shows together with other runs",
            fix="leave it out only if nobody ever sees its adapter",
        )
    return run.ledger if run.ledger.exists() else path / run.ledger.name
