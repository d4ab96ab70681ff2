"""A finished run's release on the Hugging Face hub: the files that reporting writes, as it wrote them.

They are copied to a folder that nobody else reads or writes, and then looked at; the copies go up.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from privlora.accounting import read_ledger
from privlora.accounting.ledger_format import parse_ledger
from privlora.disk import TooLargeError, copy_plain
from privlora.errors import ConfigError, PrivacyError, PrivloraError, RunError, Together, in_one_line, named
from privlora.names import ADAPTER_FILES, HUB_NAME, UNNAMED, is_local
from privlora.reporting.publication import check_statement, parse_report, write_report
from privlora.reporting.rows import refuse_other_rows
from privlora.reporting.seals import (
    LARGEST,
    MADE_ANEW,
    REPORT_NAME,
    altered,
    belongs,
    digests,
    needed,
    refuse_altered,
    with_files,
)
from privlora.reporting.statement import PRIVATE
from privlora.training.files import AUDITED, RunFolder, refuse_no_run, write_atomically

_LONGEST: Final = 96  # of a repository's name


@dataclass(frozen=True)
class Pushed:
    """repo: on the hub. kind: "model", or "dataset" of a run that released texts. files: names, in order. url: of the
    commit; None where nothing was sent."""

    repo: str
    kind: str
    files: tuple[str, ...]
    url: str | None


def push(
    folder: RunFolder,
    repo: str,
    *,
    private: bool = True,
    base_model: str | None = None,
    dry_run: bool = False,
    api: Any = None,
) -> Pushed:
    """Upload the release of a finished private run.

    private: whether a repository that is made for it is visible to its owner alone; one that is there stays as it is.
    base_model: hub name of the base, which takes the place of a local folder's in the adapter's note, report and card.
    dry_run: send nothing. api: in the place of ``huggingface_hub.HfApi()``.

    Raises RunError for a run that is not finished, or a release that holds anything else than what reporting writes;
    PrivacyError for one that protects nobody; ConfigError for names that are none of the hub's, and for a base that is
    a local folder without ``base_model``.
    """
    problems = Together()
    problems.of(None, _refuse_no_repository, repo)
    with checked(folder) as release:
        base_model = problems.of(None, _base, folder, release, base_model)
        problems.tell()
        kind = "dataset" if "texts" in release.report else "model"
        if dry_run:
            return Pushed(repo, kind, release.files, None)
        if base_model is not None:
            _rename_base(release, base_model)
        return Pushed(
            repo, kind, release.files, _upload(api, release.place, repo, kind, release.files, private=private)
        )


def _refuse_no_repository(repo: object) -> None:
    """Raise ConfigError for what is no owner/name: the hub finds nothing under a name without its owner."""
    if not (isinstance(repo, str) and "/" in repo and HUB_NAME.fullmatch(repo) and len(repo) <= _LONGEST):
        shown = in_one_line(repr(repo)) if isinstance(repo, str) else f"of type {type(repo).__name__}, which"
        raise ConfigError(
            f"{shown} is no name of a repository",
            fix="write it as owner/name, with your name on the hub or that of an organisation",
        )


@dataclass(frozen=True)
class Checked:
    """place: folder with copies of all files of a release. files: their names, in order. report: what theirs says."""

    place: Path
    files: tuple[str, ...]
    report: dict[str, Any]


@contextmanager
def checked(folder: RunFolder) -> Iterator[Checked]:
    """Copies of the files of a finished private run's release, while they are needed, of which each was looked at when
    it was copied already; card and page are made anew from the report.

    Raises what `push` does for a run that is not finished, protects nobody, or was changed.
    """
    _refuse_unreleased(folder)
    with tempfile.TemporaryDirectory(prefix="privlora-") as root:
        copied = RunFolder(Path(root))
        copied.release.mkdir()
        if not folder.report.exists():
            raise RunError(
                f"no report in {str(folder.release)!r}", fix="`privlora resume` ends the run and writes it"
            )
        copy_file(folder, REPORT_NAME, copied)
        report = parse_report(folder.report, copied.report.read_bytes())
        _refuse_unprotected(folder, report)
        files = files_of(folder, report)
        for name in files:
            if name != REPORT_NAME:
                copy_file(folder, name, copied)
        _refuse_another_promise(folder, report, copied)
        found = digests(copied.release, files)
        refuse_altered(folder, report, {name: found[name] for name in files if name not in MADE_ANEW})
        refuse_other_rows(folder, report, copied)
        try:
            write_report(copied, with_files(report, copied.release))
        except PrivloraError:
            raise
        except Exception:  # noqa: BLE001 - what no run wrote can lack anything that a page shows
            raise altered(folder, REPORT_NAME) from None
        yield Checked(copied.release, files, report)


def _refuse_unreleased(folder: RunFolder) -> None:
    refuse_no_run(folder)
    if folder.is_audit:
        raise _of_an_audit(folder)


def _of_an_audit(folder: RunFolder) -> PrivacyError:
    return PrivacyError(
        f"{str(folder.root)!r} holds an audit",
        why="canaries are among its records, and what is trained with them is not for release",
        fix="push a run of `privlora train`",
    )


def _refuse_unprotected(folder: RunFolder, report: dict[str, Any]) -> None:
    stamp = report.get("stamp")
    if folder.release.name != "release" or not isinstance(stamp, dict) or stamp.get("text") != PRIVATE:
        raise PrivacyError(
            f"the run in {str(folder.root)!r} is NOT PRIVATE",
            why="whoever loads it may learn its records",
            fix="train with privacy; if all of its records are public, upload the folder yourself",
        )


def _refuse_another_promise(folder: RunFolder, report: dict[str, Any], copied: RunFolder) -> None:
    """The statement is that of the ledger, and of a run that is over."""
    if not copied.ledger.exists():
        read_ledger(folder.ledger)  # says what to do
        raise RunError(f"{str(folder.ledger)!r} came while its release was looked at", fix="push once more")
    summary = parse_ledger(folder.ledger, copied.ledger.read_bytes())[0]
    if summary.plan.dataset.startswith(AUDITED):
        raise _of_an_audit(folder)
    check_statement(report, summary)
    if not summary.closed:
        raise RunError(
            f"the run in {str(folder.root)!r} is not finished",
            why="its ledger may come to show more than its report says",
            fix=f"`privlora resume {folder.root}`",
        )


_OF_SYSTEMS: Final = (".DS_Store", "Thumbs.db", "desktop.ini")


def files_of(folder: RunFolder, report: Mapping[str, Any], beside: Collection[str] = ()) -> tuple[str, ...]:
    """Names of all files of the release, if each is one that reporting writes, or of those that lie ``beside`` it."""
    if folder.release.is_symlink():
        raise PrivacyError(
            f"{str(folder.release)!r} is a link",
            why="what privlora did not write may hold records",
            fix="put the folder that it leads to in its place",
        )
    found = {path.name: path for path in folder.release.iterdir() if path.name not in beside}
    for name, path in sorted(found.items()):
        known = belongs(name, report)
        linked = path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1)
        if not known or linked or not path.is_file():
            what = "a link" if linked else "no file" if known else "nothing that a run leaves there"
            if name in _OF_SYSTEMS and not linked:
                what = "a file of the operating system, which is no part of a release: remove it"
            raise _strange(folder, name, what)
    lacking = sorted(set(needed(report)) - found.keys())
    if lacking:
        raise RunError(
            f"{str(folder.release)!r} lacks {', '.join(lacking)}",
            fix=f"`privlora resume {folder.root}` writes it anew",
        )
    return tuple(sorted(found))


def copy_file(folder: RunFolder, name: str, copied: RunFolder) -> None:
    """Raises PrivacyError for what no run writes, RunError where there is no room for it or no permission."""
    root = copied.release
    most = shutil.disk_usage(root).free // 2 if Path(name).suffix == ".safetensors" else LARGEST
    try:
        copy_plain(folder.release / name, root / name, most)
    except TooLargeError:
        what = "larger than what a run writes, or than the room for a copy"
        raise _strange(folder, name, what) from None
    except OSError as error:
        if error.errno in (errno.EMLINK, errno.ELOOP):
            raise _strange(folder, name, f"no file that can be copied ({error.strerror})") from None
        raise RunError(
            f"cannot copy {name} in {str(folder.release)!r}: {error.strerror}",
            fix="free space where temporary files lie (TMPDIR), or give permission",
        ) from None


def _strange(folder: RunFolder, name: str, what: str) -> PrivacyError:
    return PrivacyError(
        f"{named(name, longest=80)} in {str(folder.release)!r} is {what}",
        why="what privlora did not write may hold records",
        fix="move it elsewhere",
    )


def _base(folder: RunFolder, release: Checked, base_model: str | None) -> str | None:
    """The base model's name to write in the place of that in the release; None where that one stays."""
    adapter = release.report["adapter"]
    if base_model is not None:
        if HUB_NAME.fullmatch(base_model) is None or is_local(base_model):
            raise ConfigError(
                f"{named(base_model)} is no hub name of a base model", fix="write it as owner/name"
            )
        return base_model
    if "texts" in release.report:
        return None
    unnamed = adapter["base_model"] == UNNAMED
    if adapter["base_is_local"] or unnamed:
        raise ConfigError(
            "the base model was handed over and has no name"
            if unnamed
            else f"the base model was the local folder {named(adapter['base_model'])}",
            why="whoever loads the adapter would look for that name on the hub, and get the model of whoever has it "
            "there",
            fix="name the hub's copy of the base: --base-model OWNER/NAME",
        )
    written = json.loads((release.place / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
    if written.get("base_model_name_or_path") != adapter["base_model"]:
        raise RunError(
            f"{ADAPTER_FILES[0]} names another base model than the report",
            fix=f"`privlora resume {folder.root}` writes both anew",
        )
    return None


def _rename_base(release: Checked, base_model: str) -> None:
    """Let the copies call the base model ``base_model``."""
    copied = RunFolder(release.place.parent)
    renamed = {**release.report["adapter"], "base_model": base_model, "base_is_local": False}
    if ADAPTER_FILES[0] in release.files:
        note = json.loads((copied.release / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
        note["base_model_name_or_path"] = base_model
        write_atomically(copied.release / ADAPTER_FILES[0], json.dumps(note, indent=2, sort_keys=True))
    write_report(copied, with_files({**release.report, "adapter": renamed}, copied.release))


def _upload(
    api: Any, folder: Path, repo: str, kind: str, files: tuple[str, ...], *, private: bool
) -> str | None:
    try:
        if api is None:
            from huggingface_hub import HfApi

            api = HfApi()
        api.create_repo(repo, repo_type=kind, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            repo_type=kind,
            folder_path=str(folder),
            allow_patterns=list(files),
            commit_message="Release of a run of privlora",
        )
    except Exception as error:  # noqa: BLE001 - clients raise anything; what they say may hold a token or a path
        status = getattr(getattr(error, "response", None), "status_code", None)
        raise RunError(
            f"the hub did not take {repo!r} ({type(error).__name__}{f', status {status}' if status else ''})",
            fix="check the name, the network and `hf auth login`; the run is as it was",
        ) from None
    return str(getattr(commit, "commit_url", commit))
