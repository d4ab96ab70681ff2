"""``privlora lab diagnose``: the diagnostics of PRISM's paper on a model and records of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from privlora.cli.console import JsonOption, emit, err, loading, out, quiet_libraries
from privlora.cli.stops import Stopped
from privlora.cli.training import OverridesArgument
from privlora.config import Settings, load_settings, settings_from
from privlora.lab.diagnostics.choosing import chosen_figures, refuse_unknown_methods

_QUICK = 20
_PAPER_TARGETS = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj")  # Table 7
_RECORDS = 1000


def diagnose(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="YAML file of a run; without it, the embedded model and generated records.",
            show_default=False,
        ),
    ] = None,
    overrides: OverridesArgument = None,
    output: Annotated[Path, typer.Option(help="Folder of the page, the series and the pictures.")] = Path(
        "runs/diagnose"
    ),
    figures: Annotated[
        str | None,
        typer.Option(
            help="Some of noise-ratio, gauge-sensitivity, noise-energy, clipping, gauge-sweep, preconditioning, "
            "gram-stress, with commas between them; all without it.",
            show_default=False,
        ),
    ] = None,
    also: Annotated[
        str | None,
        typer.Option(
            help="Methods to add to gauge-sensitivity and clipping, as lora-rite,dp-sgd.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Steps of each run; the paper takes 300.")] = _QUICK,
    seed: Annotated[int, typer.Option(min=0, help="Public seed of batches, noise and draws.")] = 0,
    public_data: Annotated[
        bool,
        typer.Option(
            "--public-data",
            help="The records of CONFIG are public, so pages may be shown to anyone: this protects no record, it is "
            "your word. Without it everything goes to OUTPUT/private.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what gauges, noise and preconditioning do to DP-AdamW and to PRISM; trains nothing to keep."""
    wanted = chosen_figures(figures)
    refuse_unknown_methods(also)
    settings = load_settings(config, overrides or ()) if config is not None else None
    if settings is not None:
        settings.refuse_labels("a diagnosis")
    with quiet_libraries(told=True):
        with loading():
            from privlora.lab.diagnostics.experiments import chosen_rows
            from privlora.lab.diagnostics.experiments import diagnose as run
            from privlora.lab.diagnostics.page import findings, make_folder, write

        others = chosen_rows(also)
        records: list[dict[str, str]] | None = None
        name, public = None, public_data
        if settings is None:
            settings, records = embedded_inputs()
            name, public = "(embedded)", True
        make_folder(output if public else output / "private", private=not public)
        try:
            with _progress() as progress:
                task = progress.add_task("loading", total=None)

                def advance(name: str, done: int, total: int) -> None:
                    progress.update(task, description=name, completed=done, total=total)

                found = run(
                    settings,
                    public=public,
                    figures=wanted,
                    also=others,
                    steps=steps,
                    seed=seed,
                    model_name=name,
                    records=records,
                    on_step=advance,
                )
        except KeyboardInterrupt:
            raise Stopped(
                "nothing was written; diagnostics keep no state, so run the command again"
            ) from None
        written = write(found, output)
    places = {"page": str(written.page), "series": str(written.series)}
    if as_json:
        pictures = [str(path) for path in written.pictures]
        # Numbers about private records stay in the private folder.
        said = findings(found) if found.public else None
        emit({"public": found.public, **places, "pictures": pictures, "findings": said})
        return
    for name, place in places.items():
        out().print(f"{name + ':':<9}{place}")
    out().print(f"pictures: {len(written.pictures)} PNG files beside them")
    if not found.public:
        out().print(
            "PRIVATE: computed from the records with seeded noise, which protects nobody; do not publish any of it "
            "(--public-data is for records that everybody may read)"
        )


def embedded_inputs() -> tuple[Settings, list[dict[str, str]]]:
    """The embedded model and generated records, with the paper's rank, alpha, targets, C and delta, in small."""
    from privlora.demo import model_path, private_records

    settings = settings_from(
        {
            "model": {"name": str(model_path()), "dtype": "float32"},
            "data": {"path": "(generated)", "max_length": 64},
            "adapter": {"r": 16, "lora_alpha": 16, "target_modules": list(_PAPER_TARGETS)},
            "privacy": {
                "target_epsilon": 3.0,
                "delta": 1e-5,
                "steps": 100,
                "expected_batch_size": 16,
                "public_dataset_size": _RECORDS,
            },
        }
    )
    return settings, private_records(_RECORDS, seed=1)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err(), transient=True)
