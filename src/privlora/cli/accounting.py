"""``privlora calibrate`` and ``privlora budget``: accounting without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from privlora.errors import ConfigError, PrivacyError
from privlora.training.files import RunFolder

if TYPE_CHECKING:
    from privlora.config import PrivacySettings

_DEFAULT_ADJACENCY: Adjacency = "add-or-remove-one"


def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target, at most which is spent.", show_default=False)],
    delta: Annotated[float, typer.Option(help="Well below 1 / number of privacy units.", show_default=False)],
    steps: Annotated[int, typer.Option(help="Number of releases.", show_default=False)],
    sample_rate: Annotated[
        float | None, typer.Option(help="q: probability of each unit in a step.", show_default=False)
    ] = None,
    expected_batch_size: Annotated[
        float | None,
        typer.Option(help="q N, with --public-dataset-size instead of --sample-rate.", show_default=False),
    ] = None,
    public_dataset_size: Annotated[
        int | None,
        typer.Option(
            "--public-dataset-size", "--dataset-size", help="N as you may publish it.", show_default=False
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(help="Public cap on a batch (truncated Poisson sampling).", show_default=False),
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
    if public_dataset_size is not None and public_dataset_size >= 1 and delta >= 1 / public_dataset_size:
        raise ConfigError(
            f"--delta {delta:g} is not below 1/N = {1 / public_dataset_size:g}",
            why="publishing one whole record would satisfy it",
            fix="set it to a tenth of 1/N or less",
        )
    sampling = _sampling(sample_rate, expected_batch_size, public_dataset_size, max_batch_size)
    projections = tuple(_projection(text) for text in projection or ())
    found_of_bands: dict[str, Any] = {}
    if bands not in (None, "1"):
        if max_batch_size is not None:
            raise ConfigError(
                "--bands does not go with --max-batch-size",
                why="what a cap costs is not known for batches of one class",
                fix="leave one of them out",
            )
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

    if not (bands.isdecimal() or bands == "auto"):
        raise ConfigError(
            f"--bands {bands} is neither a whole number nor auto", fix="give --bands 8, or --bands auto"
        )
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


def _projection(text: str) -> tuple[int, int]:
    rank, _, width = text.partition(":")
    if not (rank.isdecimal() and width.isdecimal()):
        raise ConfigError(
            f"--projection {text} is not RANK:WIDTH",
            why="the share of a gradient that a random subspace captures depends on both",
            fix="give the rank and the width of the layer's input, for example --projection 64:2048",
        )
    return int(rank), int(width)


def _sampling(
    sample_rate: float | None, expected: float | None, dataset_size: int | None, cap: int | None
) -> Sampling:
    if (sample_rate is None) == (expected is None):
        raise ConfigError(
            "give exactly one of --sample-rate and --expected-batch-size",
            fix="--expected-batch-size goes with --public-dataset-size",
        )
    if dataset_size is None and (expected is not None or cap is not None):
        raise ConfigError(
            "--expected-batch-size and --max-batch-size need --public-dataset-size",
            why="the cost depends on a public number of units",
            fix="add it; a rounded figure will do",
        )
    if dataset_size is not None and dataset_size < 1:
        raise ConfigError(f"--public-dataset-size {dataset_size} is below 1", fix="give the number of units")
    if sample_rate is None:
        assert expected is not None
        assert dataset_size is not None
        sample_rate = expected / dataset_size
    if cap is None:
        return PoissonSampling(sample_rate)
    assert dataset_size is not None
    return TruncatedPoissonSampling(sample_rate, cap, dataset_size)


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
        out().print(f"{paths}: epsilon {run.epsilon:.4g}, {describe_events(run.events)}")
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
