"""``privlora push``: a release on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privlora.cli.console import JsonOption, emit, out, quiet_libraries
from privlora.training.files import RunFolder, refuse_no_run, refuse_unfinished


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="owner/name on the hub.", show_default=False)],
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", metavar="NAME", help="Hub name of a base that was a local folder."),
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="Make a repository that everybody sees; else its owner alone does."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be uploaded; send nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload RUN/release, and nothing else, to the Hugging Face hub."""
    folder = RunFolder(run)
    refuse_no_run(folder)
    refuse_unfinished(folder)
    with quiet_libraries(told=True):
        from privlora.reporting.pushing import push as push_release

        pushed = push_release(folder, repo, private=not public, base_model=base_model, dry_run=dry_run)
    if as_json:
        emit({"repo": pushed.repo, "kind": pushed.kind, "files": list(pushed.files), "url": pushed.url})
        return
    for name in pushed.files:
        out().print(f"{(folder.release / name).stat().st_size:>12}  {name}")
    if pushed.kind == "model":
        out().print("no tokenizer: it is the base model's, which is not changed")
    if pushed.url is None:
        out().print(f"nothing was sent; without --dry-run these go to {pushed.kind} {pushed.repo}")
    else:
        out().print(f"sent to {pushed.url}")
