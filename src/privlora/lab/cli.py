"""``privlora lab``: the commands of the lab, which the program's command line loads when they are asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privlora.cli.console import JsonOption, Stopped, counted, emit, phased, quiet_libraries
from privlora.cli.training import OverridesArgument
from privlora.config import Settings, load_settings, read_yaml, settings_from
from privlora.consoles import err, loading, out
from privlora.data.records import is_data_file_name, refuse_missing
from privlora.errors import ConfigError
from privlora.lab.diagnostics.choosing import FIGURES, chosen_figures, chosen_rows

if TYPE_CHECKING:
    from privlora.lab.studies.results import Row
    from privlora.lab.studies.settings import Study
    from privlora.lab.studies.study import StudyReport, Unfinished

_HELP = {"help_option_names": ["-h", "--help"]}
_PAPER_TARGETS = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj")  # Table 7
_RECORDS = 1000

lab = typer.Typer(help="Research: methods compared at equal privacy, and the diagnostics of PRISM's paper.")


@lab.callback(invoke_without_command=True)
def _start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@lab.command(context_settings=_HELP)
def compare(
    study: Annotated[Path, typer.Argument(help="YAML file of the study.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder; studies/<name of the file> unless given.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at the same time.")] = 1,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of each run.")] = 1,
    part: Annotated[str, typer.Option(metavar="K/N", help="Every N-th run, from the K-th on.")] = "1/1",
    ray: Annotated[bool, typer.Option("--ray", help="Make the runs as tasks of Ray.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Run nothing; report what is finished.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed runs once more.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare methods at equal privacy, as STUDY says; the same command goes on after an interruption."""
    share = part_of(part)
    content = read_yaml(study)
    with quiet_libraries(told=True):
        with loading():
            from privlora.lab.studies.settings import study_from

        checked = study_from(content, source=str(study))
        if not table:
            _refuse_missing_files(checked)
        with loading():
            from privlora.lab.studies.study import report_study, run_study

        ended: StudyReport | Unfinished
        try:
            if table:
                ended = report_study(checked, output)
            else:
                with phased("looking at what is finished") as tell:

                    def told(row: Row, done: int, total: int) -> None:
                        if row.error is not None:
                            err().print(f"failed: {row.cell.folder}: {row.error}")
                        tell(f"{row.role} runs", done, total)

                    ended = run_study(
                        checked,
                        output,
                        part=share,
                        jobs=jobs,
                        threads=threads,
                        ray=ray,
                        retry_failed=retry_failed,
                        on_run=told,
                    )
        except KeyboardInterrupt:
            raise Stopped("finished runs are kept. Go on with the same command") from None
    _show(ended, part, as_json)


def part_of(text: str) -> tuple[int, int]:
    """Which runs a process makes. Raises ConfigError.

    >>> part_of("2/5")
    (2, 5)
    """
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"--part {text!r} is no part", fix="write 1/N to N/N, as 2/5")
    return number, count


def _refuse_missing_files(study: Study) -> None:
    """Raise DataError for a file of records that is not there."""
    for task in study.tasks:
        data = {**study.settings.base.get("data", {}), **study.of_task(task).get("data", {})}
        for name in ("path", "evaluation"):
            path = data.get(name)
            if isinstance(path, str) and is_data_file_name(path):
                refuse_missing(path)


def _show(ended: StudyReport | Unfinished, part: str, as_json: bool) -> None:
    from privlora.lab.studies.study import StudyReport

    if isinstance(ended, StudyReport):
        found = {"table": str(ended.table), "page": str(ended.page), **ended.summary}
        text = f"{ended.table.read_text(encoding='utf-8')}\ntable:    {ended.table}\npage:     {ended.page}"
    else:
        found = {"part": part, "phase": ended.phase, "ran": ended.ran, "left": ended.left}
        left = f"{ended.left} of other parts are left ({ended.phase})"
        text = f"part {part} made {ended.ran} runs; {left}. Then the same command goes on"
    if as_json:
        emit(found)
    else:
        out().print(text)


@lab.command(context_settings=_HELP)
def diagnose(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file of a run; without it, the embedded model and its records."),
    ] = None,
    overrides: OverridesArgument = None,
    output: Annotated[Path, typer.Option(help="Folder of page, series and pictures.")] = Path(
        "runs/diagnose"
    ),
    figures: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(FIGURES)}, with commas between; all without it.")
    ] = None,
    also: Annotated[
        str | None, typer.Option(help="Methods for gauge-sensitivity and clipping, as lora-rite,dp-sgd.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Steps of each run; the paper takes 300.")] = 20,
    burn_in: Annotated[
        int | None,
        typer.Option(help="Steps that means of preconditioned noise leave out; a third without it."),
    ] = None,
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
    others = chosen_rows(also)
    settings = load_settings(config, overrides or ()) if config is not None else None
    if settings is not None:
        settings.refuse_labels("a diagnosis")
    with quiet_libraries(told=True):
        with loading():
            from privlora.lab.diagnostics.experiments import diagnose as run
            from privlora.lab.diagnostics.page import make_folder, write

        records: list[dict[str, str]] | None = None
        name, public = None, public_data
        if settings is None:
            settings, records = embedded_inputs()
            name, public = "(embedded)", True
        make_folder(output if public else output / "private", private=not public)
        try:
            with counted("taking steps") as on_step:
                found = run(
                    settings,
                    public=public,
                    figures=wanted,
                    also=others,
                    steps=steps,
                    burn_in=burn_in,
                    seed=seed,
                    model_name=name,
                    records=records,
                    on_step=on_step,
                )
        except KeyboardInterrupt:
            raise Stopped("nothing was written; run the command again") from None
        page, series, *pictures = write(found, output)
    if as_json:
        places = {"page": str(page), "series": str(series), "pictures": list(map(str, pictures))}
        emit({"public": found.public, **places})
        return
    out().print(f"page:    {page}\nseries:  {series}")
    out().print(f"pictures: {len(pictures)} PNG files next to them")
    if not found.public:
        out().print(
            "PRIVATE: computed from the records with seeded noise, which protects nobody; do not publish any of it "
            "(--public-data is for records that everybody may read)"
        )


def embedded_inputs() -> tuple[Settings, list[dict[str, str]]]:
    """The embedded model and generated records, with the paper's rank, alpha, targets, C and delta, in small."""
    from privlora.demo import model_path, private_records

    sizes = {"expected_batch_size": 16, "public_dataset_size": _RECORDS}
    settings = settings_from(
        {
            "model": {"name": str(model_path()), "dtype": "float32"},
            "data": {"path": "(generated)", "max_length": 64},
            "adapter": {"r": 16, "lora_alpha": 16, "target_modules": list(_PAPER_TARGETS)},
            "privacy": {"target_epsilon": 3.0, "delta": 1e-5, "steps": 100, **sizes},
        }
    )
    return settings, private_records(_RECORDS, seed=1)
