"""Whether a finished run and the files to attack it with are there: asked before slow imports."""

from __future__ import annotations

from pathlib import Path

from privlora.config import Settings, kept_settings
from privlora.data.records import refuse_missing
from privlora.errors import ConfigError, DataError, RunError
from privlora.names import ADAPTER_FILES
from privlora.training.files import RunFolder, no_run


def settings_of_finished(
    root: str | Path, *, secrets: str | None, members: str | None, non_members: str | None
) -> Settings:
    """Those of the run in ``root``, for an audit with these files. Nothing is read of them.

    Raises ConfigError if nothing is given to audit with, RunError for a run without an adapter, DataError for files
    that are not there.
    """
    folder = RunFolder(Path(root))
    if not folder.settings.exists():
        raise no_run(Path(root))
    if (members is None) != (non_members is None):
        raise ConfigError("--members and --non-members go together", fix="give both, or neither")
    if secrets is None and members is None:
        raise ConfigError(
            "there is nothing to audit with",
            fix="give --secrets, or --members and --non-members; or a configuration with --one-run",
        )
    if not all((folder.release / name).exists() for name in ADAPTER_FILES):
        raise RunError(
            f"the run in {str(root)!r} is not finished: it has no adapter",
            fix=f"finish it with `privlora resume {root}`",
        )
    settings = kept_settings(folder.settings)
    settings.refuse_labels("an audit")
    given = {"--members": members, "--non-members": non_members}
    if members is not None and members == non_members:
        raise ConfigError(
            "--members and --non-members name the same file, of which no attack could tell anything",
            fix="give records that took part, and others of their kind that did not",
        )
    files = [
        ("--secrets", secrets, "jsonl"),
        *((name, file, settings.data.format) for name, file in given.items()),
    ]
    for option, file, form in files:
        if file is None:
            continue
        try:
            refuse_missing(file, format=form)
        except DataError as error:
            raise error.of(option) from None
    return settings


def refuse_few(canaries: int) -> None:
    """Raise ConfigError for fewer than 20."""
    if canaries < 20:
        raise ConfigError(f"{canaries} canaries can show nothing", fix="use 500 or more")
