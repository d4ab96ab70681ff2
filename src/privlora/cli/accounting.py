"""``privlora calibrate`` and ``privlora budget``: accounting without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

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
from privlora.accounting.accountants import LARGEST_EPSILON
from privlora.accounting.calibration import SMALLEST_EPSILON
from privlora.accounting.events import describe_events, event_or_phases
from privlora.cli.console import JsonOption, emit, out
from privlora.errors import ConfigError, PrivacyError, in_one, named
from privlora.ranges import MOST_BANDS, MOST_STEPS
from privlora.rounding import rounded_up
from privlora.training.files import RunFolder

if TYPE_CHECKING:
    from privlora.config import PrivacySettings

_DEFAULT_ADJACENCY: Adjacency = "add-or-remove-one"


def _number(text: object) -> Any:
    """A number, or the text that is none, which is told with all else that is wrong."""
    with suppress(ValueError, TypeError):
        return float(text)  # type: ignore[arg-type]
    return text


def _whole(text: object) -> Any:
    """As ``_number``."""
    with suppress(ValueError, TypeError):
        return int(text)  # type: ignore[call-overload]
    return text


_FLOAT: dict[str, Any] = {"parser": _number, "metavar": "FLOAT"}
_WHOLE: dict[str, Any] = {"parser": _whole, "metavar": "INTEGER"}


def calibrate(
    epsilon: Annotated[
        float | None,
        typer.Option(help="Target, at most which is spent. Required.", show_default=False, **_FLOAT),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Well below 1 / number of privacy units. Required.", show_default=False, **_FLOAT),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of releases. Required.", show_default=False, **_WHOLE)
    ] = None,
    sample_rate: Annotated[
        float | None,
        typer.Option(help="q: probability of each unit in a step.", show_default=False, **_FLOAT),
    ] = None,
    expected_batch_size: Annotated[
        float | None,
        typer.Option(
            help="q N, with --public-dataset-size instead of --sample-rate.", show_default=False, **_FLOAT
        ),
    ] = None,
    public_dataset_size: Annotated[
        int | None,
        typer.Option(
            "--public-dataset-size",
            "--dataset-size",
            help="N as you may publish it.",
            show_default=False,
            **_WHOLE,
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Public cap on a batch (truncated Poisson sampling).", show_default=False, **_WHOLE
        ),
    ] = None,
    projection: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANK:WIDTH",
            help="Each step clips whole gradients, then projects a layer's input of this width on a fresh random "
            "subspace of this rank. Repeat it for layers that differ.",
            show_default=False,
        ),
    ] = None,
    bands: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|auto",
            help="Of correlated noise, as privacy.bands (DP-BandMF).",
            show_default=False,
        ),
    ] = None,
    adjacency: Annotated[
        Adjacency, typer.Option(help="Which data sets are neighbours.")
    ] = _DEFAULT_ADJACENCY,
    as_json: JsonOption = False,
) -> None:
    """Print the smallest noise multiplier that meets a target epsilon (PLD accountant)."""
    sizes = sample_rate, expected_batch_size, public_dataset_size, max_batch_size
    wrong = [
        *_wrong_targets(epsilon, delta, steps, public_dataset_size),
        *_wrong_sizes(*sizes),
        *_wrong_projections(projection or ()),
        *_wrong_bands(bands, steps, _rate(*sizes), max_batch_size, projection or ()),
    ]
    if wrong:  # all of them, before anything that takes seconds is loaded
        raise in_one(wrong)
    assert epsilon is not None
    assert delta is not None
    assert steps is not None
    sampling = _sampling(*sizes)
    projections = tuple((int(rank), int(width)) for rank, width in map(_parts, projection or ()))
    found_of_bands: dict[str, Any] = {}
    if bands not in (None, "1"):
        asked = {"target_epsilon": epsilon, "delta": delta, "steps": steps}
        sampling, found_of_bands = _with_bands(bands, sampling, asked, adjacency)
    found = calibrate_noise_multiplier(
        sampling, steps, epsilon, delta, adjacency=adjacency, projections=projections
    )
    if as_json:
        emit({"noise_multiplier": found.noise_multiplier, **found_of_bands, **found.to_dict()})
        return
    out().print(f"noise_multiplier {found.noise_multiplier:.7g}")
    if found_of_bands:
        out().print(f"bands {words_of_bands(found_of_bands)}")
    out().print(found.describe())


def _with_bands(
    bands: str, plain: Sampling, asked: dict[str, Any], adjacency: Adjacency
) -> tuple[Sampling, dict[str, Any]]:
    """How a run of the settings ``asked`` with so many bands draws its batches, and what its noise is."""
    from privlora.config import PrivacySettings, checked
    from privlora.training.cycles import planned_sampling

    # The noise multiplier is of any batch size at this rate, so 1 unit will do.
    sizes = {"sample_rate": plain.sample_rate, "expected_batch_size": 1}
    given = int(bands) if bands != "auto" else bands
    privacy = checked(PrivacySettings, {**asked, **sizes, "bands": given}, "calibrate")
    sampling = planned_sampling(privacy, plain, adjacency)
    number = sampling.classes if isinstance(sampling, CyclicPoissonSampling) else 1
    return sampling, facts_of_bands(privacy, plain, number, adjacency)


def facts_of_bands(
    privacy: PrivacySettings, plain: Sampling, bands: int, adjacency: Adjacency = _DEFAULT_ADJACENCY
) -> dict[str, Any]:
    """JSON-ready: how many there are, whether auto chose them, and `training.cycles.noise_of_bands`. Nothing of one
    band that nobody asked for by auto. plain: how batches would be drawn with one band."""
    from privlora.training.cycles import noise_of_bands

    chosen = {"bands_by_auto": bands} if privacy.bands == "auto" else {}
    if bands == 1:
        return chosen
    return {"bands": bands, **chosen, **noise_of_bands(privacy, plain, bands, adjacency)}


def words_of_bands(facts: dict[str, Any]) -> str:
    """How much noise so many bands leave in steps and in their sums."""
    if "bands" not in facts:
        return "auto: 1 is best here"
    chosen, equal = "auto: " if "bands_by_auto" in facts else "", facts["noise_in_sums_at_equal_epsilon"]
    text = f"{chosen}{facts['bands']}: in the sums of steps "
    if equal is not None:
        text += f"{equal:.3g} times the noise of 1 band at the same epsilon, and "
    text += f"{facts['noise_in_sums']:.3g} times that of 1 band with this sigma"
    text += "" if equal is not None else ", whose epsilon would be another"
    return (
        f"{text}; in a step up to {facts['largest_row']:.3g} times as much as independent noise of this sigma"
    )


def _wrong_targets(
    epsilon: float | None, delta: float | None, steps: int | None, units: int | None
) -> Iterator[ConfigError]:
    """What is missing, and what no calibration could have, in the user's words. units: N, where it is given."""
    for name, value, usual in (("epsilon", epsilon, "3"), ("delta", delta, "1e-5"), ("steps", steps, "200")):
        if value is None:
            yield ConfigError(f"--{name} is missing", fix=f"add it, as --{name} {usual}")
    yield from _unread({"--epsilon": epsilon, "--delta": delta}, "a number")
    yield from _unread({"--steps": steps}, "a whole number")
    if _is_number(epsilon) and not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
        yield ConfigError(
            f"--epsilon {epsilon:g} is not between {SMALLEST_EPSILON:g} and {LARGEST_EPSILON:g}",
            fix="choose an epsilon of about 1 to 10",
        )
    if _is_number(delta) and not 0 < delta < 1:
        yield ConfigError(
            f"--delta {delta:g} is not between 0 and 1",
            why="delta bounds the probability that the epsilon does not hold",
            fix="choose a delta below 1 / number of privacy units, for example 1e-5",
        )
    elif _is_number(delta) and _is_number(units) and units >= 1 and delta >= 1 / units:
        yield ConfigError(
            f"--delta {delta:g} is not below 1/N = {1 / units:g}",
            why="publishing one whole record would satisfy it",
            fix="set delta to a tenth of 1/N or less",
        )
    if _is_number(steps) and not 1 <= steps <= MOST_STEPS:
        yield ConfigError(
            f"--steps {steps} is not between 1 and {MOST_STEPS}", fix="give the number of steps of the run"
        )


def _wrong_sizes(
    sample_rate: float | None, expected: float | None, units: int | None, cap: int | None
) -> Iterator[ConfigError]:
    yield from _unread({"--sample-rate": sample_rate, "--expected-batch-size": expected}, "a number")
    yield from _unread({"--public-dataset-size": units, "--max-batch-size": cap}, "a whole number")
    if (sample_rate is None) == (expected is None):
        yield ConfigError(
            "give exactly one of --sample-rate and --expected-batch-size",
            fix="--expected-batch-size goes with --public-dataset-size",
        )
    if units is None and (expected is not None or cap is not None):
        yield ConfigError(
            "--expected-batch-size and --max-batch-size need --public-dataset-size",
            why="the cost depends on a public number of units",
            fix="add --public-dataset-size; a rounded figure will do",
        )
    if _is_number(sample_rate) and not 0 <= sample_rate <= 1:
        yield ConfigError(
            f"--sample-rate {sample_rate:g} is not a probability",
            fix="give expected batch size / number of privacy units, between 0 and 1",
        )
    if _is_number(units) and units < 1:
        yield ConfigError(f"--public-dataset-size {units} is below 1", fix="give the number of units")
    elif _is_number(expected) and not (expected >= 0 and (not _is_number(units) or expected <= units)):
        yield ConfigError(
            f"--expected-batch-size {expected:g} is not between 0 and the number of units",
            fix="give how many units a step draws on average",
        )
    if _is_number(cap) and cap < 1:
        yield ConfigError(
            f"--max-batch-size {cap} is below 1", fix="set it to about 1.75 times the expected batch size"
        )


def _wrong_projections(given: Sequence[str]) -> Iterator[ConfigError]:
    for text in given:
        rank, width = map(_digits, _parts(text))
        if rank is None or width is None or not 1 <= rank <= width:
            yield ConfigError(
                f"--projection {named(text)} is not RANK:WIDTH, two whole numbers from 1 on, the second no smaller",
                why="the share of a gradient that a random subspace captures depends on both",
                fix="give the rank and the width of the layer's input, for example --projection 64:2048",
            )


def _wrong_bands(
    bands: str | None, steps: int | None, rate: float | None, cap: int | None, projections: Sequence[str]
) -> Iterator[ConfigError]:
    """rate: q, where it is known and a probability."""
    if bands in (None, "1"):
        return
    number = _digits(bands)
    if number is None and bands != "auto":
        yield ConfigError(
            f"--bands {named(bands)} is neither a whole number nor auto",
            fix="give --bands 8, or --bands auto",
        )
    elif number is not None and not 1 <= number <= MOST_BANDS:
        yield ConfigError(
            f"--bands {bands} is not between 1 and {MOST_BANDS}", fix="give --bands 8, or --bands auto"
        )
    elif number is not None and _is_number(steps) and number > steps >= 1:
        yield ConfigError(f"--bands {bands} is above --steps {steps}", fix=f"give at most {steps} bands")
    elif number is not None and rate is not None and number * rate > 1:
        yield ConfigError(
            f"--bands {bands}: a class has 1/{bands} of all units, and a batch needs {rate:g} of them",
            fix=f"give at most {int(1 / rate)} bands, or a smaller batch",
        )
    if cap is not None:
        yield ConfigError(
            "--bands does not go with --max-batch-size",
            why="what a cap costs is not known for batches of one class",
            fix="leave out --bands or --max-batch-size",
        )
    if projections:
        yield ConfigError(
            "--bands does not go with --projection: correlated noise is of no projection that is drawn anew",
            fix="leave out --bands or --projection",
        )


def _unread(options: Mapping[str, object], kind: str) -> Iterator[ConfigError]:
    for name, value in options.items():
        if value is not None and not _is_number(value):
            yield ConfigError(f"{name} {named(value)} is not {kind}", fix=f"give {name} {kind}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float)


def _digits(text: str) -> int | None:
    """What digits stand for; None for anything else, and for more of them than any number here has."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def _parts(projection: str) -> tuple[str, str]:
    rank, _, width = projection.partition(":")
    return rank, width


def _rate(
    sample_rate: float | None, expected: float | None, units: int | None, cap: int | None
) -> float | None:
    """q, where it follows and is a probability above 0."""
    found = sample_rate
    if not _is_number(found):
        found = expected / units if _is_number(expected) and _is_number(units) and units >= 1 else None
    return found if found is not None and 0 < found <= 1 else None


def _sampling(
    sample_rate: float | None, expected: float | None, units: int | None, cap: int | None
) -> Sampling:
    """Of sizes that are not wrong."""
    if sample_rate is None:
        assert expected is not None
        assert units is not None
        sample_rate = expected / units
    if cap is None:
        return PoissonSampling(sample_rate)
    assert units is not None
    return TruncatedPoissonSampling(sample_rate, cap, units)


def budget(
    ledgers: Annotated[
        list[Path],
        typer.Argument(metavar="LEDGER...", help="Ledgers, or folders of runs.", show_default=False),
    ],
    delta: Annotated[
        float | None, typer.Option(help="Of the whole statement; else that of all runs.", show_default=False)
    ] = None,
    adjacency: Annotated[
        Adjacency | None,
        typer.Option(help="Of the whole statement; else that of all runs.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compose the ledgers of several runs on the same data into one guarantee."""
    statement = compose_ledgers([_ledger_of(path) for path in ledgers], delta, adjacency)
    if as_json:
        emit(
            {
                "epsilon": statement.epsilon,
                "delta": statement.delta,
                "unit": statement.unit,
                "adjacency": statement.adjacency,
                "accountant": "pld",
                "versions": statement.versions,
                "datasets": list(statement.datasets),
                "runs": [
                    {
                        "ledgers": [
                            {"path": str(copy.path), "steps_charged": copy.charges} for copy in run.copies
                        ],
                        "run_id": run.run_id,
                        "dataset": run.plan.dataset,
                        "method": run.plan.method,
                        **event_or_phases(run.events),
                        "steps_charged": run.releases,
                        "epsilon": run.epsilon,
                    }
                    for run in statement.runs
                ],
            }
        )
        return
    for run in statement.runs:
        paths = ", ".join(str(copy.path) for copy in run.copies)
        out().print(f"{paths}: epsilon {rounded_up(run.epsilon)}, {describe_events(run.events)}")
    out().print(statement.describe())


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
