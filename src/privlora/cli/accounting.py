"""``privlora calibrate`` and ``privlora budget``: accounting without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from privlora.accounting.events import describe_events, event_or_phases
from privlora.cli.console import JsonOption, emit, out
from privlora.errors import ConfigError, PrivacyError, Together, named
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
        float, typer.Option(help="Target, at most which is spent.", show_default=False, **_FLOAT)
    ],
    delta: Annotated[
        float, typer.Option(help="Well below 1 / number of privacy units.", show_default=False, **_FLOAT)
    ],
    steps: Annotated[int, typer.Option(help="Number of releases.", show_default=False, **_WHOLE)],
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
            parser=_whole,
            help="Of correlated noise, as privacy.bands (DP-BandMF).",
            show_default=False,
        ),
    ] = None,
    drawing: Annotated[
        Literal["poisson", "balls-in-bins"], typer.Option("--sampling", help="As privacy.sampling.")
    ] = "poisson",
    adjacency: Annotated[
        Adjacency, typer.Option(help="Which data sets are neighbours.")
    ] = _DEFAULT_ADJACENCY,
    as_json: JsonOption = False,
) -> None:
    """Print the smallest noise multiplier that meets a target epsilon (PLD accountant)."""
    from privlora.config import PrivacySettings, checked

    problems = Together()  # all of them, before anything that takes seconds is loaded
    problems.found += _wrong_projections(projection or ())
    if (sample_rate is None) == (expected_batch_size is None):
        raise ConfigError(
            "give exactly one of --sample-rate and --expected-batch-size",
            fix="--expected-batch-size goes with --public-dataset-size",
        )
    if bands not in (None, "1") and projection:
        problems.found.append(
            ConfigError(
                "--bands does not go with --projection: correlated noise is of no projection that is drawn anew",
                fix="leave out --bands or --projection",
            )
        )
    given = {
        "target_epsilon": epsilon,
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
    projections = tuple((int(rank), int(width)) for rank, width in map(_parts, projection or ()))
    found_of_bands: dict[str, Any] = {}
    if privacy.bands != 1 or privacy.sampling != "poisson":
        from privlora.training.cycles import planned_sampling

        plain, sampling = sampling, planned_sampling(privacy, sampling, adjacency)
        number = sampling.classes if isinstance(sampling, CyclicPoissonSampling) else 1
        found_of_bands = facts_of_bands(privacy, plain, number, adjacency)
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


def _wrong_projections(given: Sequence[str]) -> Iterator[ConfigError]:
    for text in given:
        rank, width = map(_digits, _parts(text))
        if rank is None or width is None or not 1 <= rank <= width:
            yield ConfigError(
                f"--projection {named(text)} is not RANK:WIDTH, two whole numbers from 1 on, the second no smaller",
                why="the share of a gradient that a random subspace captures depends on both",
                fix="give the rank and the width of the layer's input, for example --projection 64:2048",
            )


def _digits(text: str) -> int | None:
    """What digits stand for; None for anything else, and for more of them than any number here has."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def _parts(projection: str) -> tuple[str, str]:
    rank, _, width = projection.partition(":")
    return rank, width


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
