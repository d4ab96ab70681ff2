"""A finished run's release on the Hugging Face hub: the files that reporting writes, and nothing else.

They are copied to a folder of their own first, so that nothing that comes to lie in the release meanwhile goes along.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from privlora.accounting import read_ledger
from privlora.adapters.peft_files import CONFIG_NAME, WEIGHTS_NAME
from privlora.errors import ConfigError, PrivacyError, RunError, named
from privlora.names import HUB_NAME, UNNAMED, is_local
from privlora.reporting.facts import PRIVATE, evaluation_rows
from privlora.reporting.publication import CARD_NAME, HTML_NAME, check_statement, read_report, write_report
from privlora.training.files import RunFolder, no_run, write_atomically

_ALWAYS: Final = (CARD_NAME, HTML_NAME, "privacy_report.json")
_ADAPTER: Final = (CONFIG_NAME, WEIGHTS_NAME)
_TEXTS: Final = ("synthetic.jsonl",)
_SOMETIMES: Final = ("ledger.jsonl", "evaluations.jsonl", "choice.json", "metrics.jsonl")
_OF_CLIENTS: Final = re.compile(r"ledger-[\w.-]+\.jsonl")
_OF_METRICS: Final = frozenset(("step", "epsilon", "learning_rate", "held_out_loss", "clip_norm"))
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
    if not isinstance(repo, str) or HUB_NAME.fullmatch(repo) is None or len(repo) > _LONGEST:
        raise ConfigError(f"{named(repo)} is no name of a repository", fix="write it as owner/name")
    report = _finished(folder)
    files = _files(folder, report)
    base_model = _base(folder, report, base_model)
    kind = "dataset" if "texts" in report else "model"
    if dry_run:
        return Pushed(repo, kind, files, None)
    with _copy(folder, files, report, base_model) as copied:
        return Pushed(repo, kind, files, _upload(api, copied, repo, kind, files, private=private))


def _finished(folder: RunFolder) -> dict[str, Any]:
    """The report of a run that may be published."""
    if not (folder.settings.exists() or folder.ledger.exists() or folder.report.exists()):
        raise no_run(folder.root)
    if folder.is_audit:
        raise PrivacyError(
            f"{str(folder.root)!r} holds an audit",
            why="canaries are among its records, and what is trained with them is not for release",
            fix="push a run of `privlora train`",
        )
    report = read_report(folder.report)
    if folder.release.name != "release" or report["stamp"]["text"] != PRIVATE:
        raise PrivacyError(
            f"the run in {str(folder.root)!r} is NOT PRIVATE",
            why="whoever loads it may learn its records",
            fix="train with privacy; if all of its records are public, upload the folder yourself",
        )
    if "federation" not in report:
        summary = read_ledger(folder.ledger)
        check_statement(report, summary)
        if not summary.closed:
            raise RunError(
                f"the run in {str(folder.root)!r} is not finished",
                why="its ledger may come to show more than its report says",
                fix=f"`privlora resume {folder.root}`",
            )
    return report


def released(folder: RunFolder) -> tuple[str, ...]:
    """Names of the files of a finished private run's release. Raises what `push` does for those that are not."""
    return _files(folder, _finished(folder))


def _files(folder: RunFolder, report: dict[str, Any]) -> tuple[str, ...]:
    """Names of all files of the release, if each is one that reporting writes."""
    if folder.release.is_symlink():
        raise PrivacyError(
            f"{str(folder.release)!r} is a link",
            why="what privlora did not write may hold records",
            fix="put the folder that it leads to in its place",
        )
    needed = (*_ALWAYS, *(_TEXTS if "texts" in report else _ADAPTER))
    found = {path.name: path for path in folder.release.iterdir()}
    for name, path in sorted(found.items()):
        known = name in needed or name in _SOMETIMES
        known = known or ("federation" in report and _OF_CLIENTS.fullmatch(name) is not None)
        if not known or path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1:
            what = (
                "a link"
                if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1)
                else "nothing that a run leaves there"
                if not known
                else "no file"
            )
            raise PrivacyError(
                f"{named(name, longest=80)} in {str(folder.release)!r} is {what}",
                why="what privlora did not write may hold records",
                fix="move it elsewhere",
            )
    lacking = sorted(set(needed) - found.keys())
    if lacking:
        raise RunError(
            f"{str(folder.release)!r} lacks {', '.join(lacking)}",
            fix=f"`privlora resume {folder.root}` writes it anew",
        )
    _refuse_altered(folder, report)
    return tuple(sorted(found))


def _refuse_altered(folder: RunFolder, report: Mapping[str, Any]) -> None:
    """Raise PrivacyError for a file of rows that holds anything else than what the run wrote and the report repeats."""
    checks: dict[Path, Callable[[str], bool]] = {
        folder.evaluations: lambda text: evaluation_rows(_rows(text)) == report.get("evaluation"),
        folder.choice: lambda text: json.loads(text) == (report.get("method") or {}).get("choice"),
        folder.metrics: lambda text: all(map(_is_metrics, _rows(text))),
    }
    for path, as_written in checks.items():
        if not path.exists():
            continue
        try:
            same = as_written(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            same = False
        if not same:
            raise PrivacyError(
                f"{path.name} in {str(folder.release)!r} is not as the run wrote it",
                why="what privlora did not write may hold records",
                fix="restore it, or move it elsewhere",
            )


def _rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def _is_metrics(row: Mapping[str, Any]) -> bool:
    """Whether a row has the numbers of `privlora.training.public_rows`, and nothing else."""
    return row.keys() <= _OF_METRICS and all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        for value in row.values()
    )


def _base(folder: RunFolder, report: dict[str, Any], base_model: str | None) -> str | None:
    """The base model's name to write in the place of that in the release; None where that one stays."""
    adapter = report["adapter"]
    if base_model is not None:
        if HUB_NAME.fullmatch(base_model) is None or is_local(base_model):
            raise ConfigError(
                f"{named(base_model)} is no hub name of a base model", fix="write it as owner/name"
            )
        return base_model
    if "texts" in report:
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
    written = json.loads((folder.release / CONFIG_NAME).read_text(encoding="utf-8"))
    if written.get("base_model_name_or_path") != adapter["base_model"]:
        raise RunError(
            f"{CONFIG_NAME} names another base model than the report",
            fix=f"`privlora resume {folder.root}` writes both anew",
        )
    return None


@contextmanager
def _copy(
    folder: RunFolder, files: tuple[str, ...], report: dict[str, Any], base_model: str | None
) -> Iterator[Path]:
    """A folder with copies of the files, in which the base model is called ``base_model``."""
    with tempfile.TemporaryDirectory() as root:
        copied = RunFolder(Path(root))
        target = copied.release
        target.mkdir()
        for name in files:
            shutil.copyfile(folder.release / name, target / name, follow_symlinks=False)
        if base_model is not None:
            renamed = {**report["adapter"], "base_model": base_model, "base_is_local": False}
            report = {**report, "adapter": renamed}
            if CONFIG_NAME in files:
                note = json.loads((target / CONFIG_NAME).read_text(encoding="utf-8"))
                note["base_model_name_or_path"] = base_model
                write_atomically(target / CONFIG_NAME, json.dumps(note, indent=2, sort_keys=True))
        write_report(copied, report)  # card and page follow from the report, whatever was written into them
        yield target


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
