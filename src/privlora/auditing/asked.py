"""What may be asked of an audit: known before slow imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from privlora.config import Settings, kept_settings
from privlora.data.records import refuse_missing
from privlora.errors import ConfigError, DataError, RunError
from privlora.names import ADAPTER_FILES
from privlora.training.files import RunFolder, no_run

GRADIENT: Final = "gradient"
NEW_TOKEN: Final = "new-token"
LEAST_LIKELY: Final = "least-likely"
OF_TEXTS: Final = ("random-tokens", "codes", "sampled", "prefix-suffix", NEW_TOKEN)
OF_ONE_RUN: Final = (GRADIENT, *OF_TEXTS)
OF_SHADOWS: Final = (*OF_TEXTS, LEAST_LIKELY)
_WITH_TEMPERATURE: Final = ("sampled", "prefix-suffix")
_WITH_PREFIXES: Final = ("prefix-suffix", NEW_TOKEN)


def check_kind(
    kind: str, temperature: float | None, kinds: Sequence[str] = OF_TEXTS, *, prefixes: bool = False
) -> None:
    """Raise ConfigError for a kind that is none of ``kinds``, a temperature that is out of range or not its own, or
    prefixes for a kind without any."""
    if kind not in kinds:
        raise ConfigError(f"unknown canaries {kind!r}", fix=f"one of {', '.join(kinds)}")
    for option, given, owners in (
        ("--prefixes", prefixes, _WITH_PREFIXES),
        ("--temperature", temperature is not None, _WITH_TEMPERATURE),
    ):
        if given and kind not in owners:
            fix = f"leave it out, or give --kind {' or '.join(owners)}"
            raise ConfigError(f"{option} does not go with canaries of the kind {kind!r}", fix=fix)
    if temperature is not None and not 0.05 <= temperature <= 100:
        raise ConfigError(f"temperature {temperature} is out of range", fix="give 0.05 to 100; 1 is usual")


def refuse_few(canaries: int) -> None:
    """Raise ConfigError for fewer than 20."""
    if canaries < 20:
        raise ConfigError(f"{canaries} canaries can show nothing", fix="use 500 or more")


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
        fix = "give --secrets, or --members and --non-members; or a configuration with --one-run"
        raise ConfigError("there is nothing to audit with", fix=fix)
    if not all((folder.release / name).exists() for name in ADAPTER_FILES):
        fix = f"finish it with `privlora resume {root}`"
        raise RunError(f"the run in {str(root)!r} is not finished: it has no adapter", fix=fix)
    settings = kept_settings(folder.settings)
    settings.refuse_labels("an audit")
    if members is not None and members == non_members:
        fix = "give records that took part, and others of their kind that did not"
        raise ConfigError("--members and --non-members name the same file", fix=fix)
    for option, file in (("--secrets", secrets), ("--members", members), ("--non-members", non_members)):
        try:
            if file is not None:
                refuse_missing(file, format="jsonl" if option == "--secrets" else settings.data.format)
        except DataError as error:
            raise error.of(option) from None
    return settings
