"""``privlora export`` and ``privlora push``: other forms of a trained adapter, and a release on the hub."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from privlora.cli.console import CHECKING, JsonOption, argument, finished_run, option, quiet_libraries, show
from privlora.consoles import loading, saying
from privlora.errors import ConfigError, RunError, Together
from privlora.names import ADAPTER_FILES
from privlora.training.files import RunFolder, set_times

if TYPE_CHECKING:
    from privlora.config import ModelSettings, Settings


def export(
    run: Annotated[Path | None, argument("RUN", "Folder of a finished run.")] = None,
    out_folder: Annotated[Path | None, argument("OUT", "New folder.")] = None,
    output: Annotated[Path | None, option("The same as OUT.", "--output", "-o")] = None,
    merge: Annotated[bool, option("The base model with the adapter merged in.", "--merge")] = False,
    as_lora: Annotated[bool, option("A copy of the plain peft adapter.", "--as-lora")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's adapter as a whole model or a plain LoRA adapter, with its privacy report and ledger."""
    problems = Together()  # one that hides none of the others
    problems.of(None, lambda: _asked(run, out_folder, output, merge=merge, as_lora=as_lora))
    output = output or out_folder
    if output is not None and output.exists():
        wrong = RunError(f"{str(output)!r} exists already", fix="give a new folder; nothing is written over")
        problems.found.append(wrong)
    if run is not None and output is not None and _is_plain(run):
        problems.tell()
        _export_plain(run, output, merge=merge)
        return _show(output, merge, as_json)
    if run is not None and problems.fails(finished_run, run):
        problems.tell()  # at once
    kept = ["ledger.jsonl", *((*ADAPTER_FILES, "README.md") if as_lora else ())]
    with contextlib.ExitStack() as stack:
        with saying(CHECKING, piped=True) if run is not None else contextlib.nullcontext():
            # At once: settings and accountants take a second to import.
            from privlora.accounting import read_ledger
            from privlora.reporting.seals import REPORT_NAME, text_with_files_of

            folder = RunFolder(run or Path())
            settings = None if run is None else problems.of(None, _settings, folder)
            problems.tell()
            assert output is not None
            assert settings is not None
            release, report = stack.enter_context(_release(folder))
        temporary = stack.enter_context(_new_folder(output))
        if merge:
            with quiet_libraries():
                from privlora.training.classifier import head_of

                _write_merged(settings.model, release, report, temporary, head_of(settings))
        for name in kept:
            if (release / name).exists():  # a run without privacy has no ledger
                shutil.copyfile(release / name, temporary / name, follow_symlinks=False)
        (temporary / REPORT_NAME).write_bytes(text_with_files_of(report, temporary).encode())
        if folder.ledger.exists():
            set_times(temporary, read_ledger(folder.ledger).created)
    _show(output, merge, as_json)


def _show(output: Path, merge: bool, as_json: bool) -> None:
    form = "merged model" if merge else "adapter"
    show({"output": str(output), "form": form}, [f"{form} in {output}"], as_json)


def _is_plain(folder: Path) -> bool:
    """Whether it is an adapter's that no run released, as a client of the rule fedsa has of its own."""
    released = RunFolder(folder).settings.exists() or (folder / "privacy_report.json").exists()
    return (folder / ADAPTER_FILES[0]).exists() and not released


def _export_plain(adapter: Path, output: Path, *, merge: bool) -> None:
    """Without a report and a ledger, which such an adapter has not."""
    from privlora.cli.evaluation import _base_of

    with quiet_libraries(), _new_folder(output) as temporary:
        if merge:
            from privlora.config import ModelSettings

            model = ModelSettings(name=_base_of(adapter), device="cpu")
            _write_merged(model, adapter, None, temporary)
        for name in () if merge else ADAPTER_FILES:
            shutil.copyfile(adapter / name, temporary / name, follow_symlinks=False)


def _settings(folder: RunFolder) -> Settings:
    """Of a finished run that has an adapter."""
    from privlora.cli.evaluation import require_adapter
    from privlora.cli.training import load_run_settings

    settings = load_run_settings(folder)
    require_adapter(folder)
    return settings


def _asked(
    run: Path | None, out_folder: Path | None, output: Path | None, *, merge: bool, as_lora: bool
) -> None:
    """Raise ConfigError for all that is missing or given twice, with a whole command."""
    new = output or out_folder
    there = {"RUN": run, "OUT": new, "one of --merge and --as-lora": merge or as_lora or None}
    wrong = [f"{name} is missing" for name, given in there.items() if given is None]
    if out_folder is not None and output is not None:
        wrong.append("OUT and --output are both given")
    if merge and as_lora:
        wrong.append("--merge and --as-lora are both given")
    if not wrong:
        return
    form = "--as-lora" if as_lora and not merge else "--merge"
    forms = "" if merge != as_lora else " for a whole model, or with --as-lora for a plain peft adapter"
    places = [shlex.quote(str(each)) for each in (run or Path("runs/run"), new or Path("exported"))]
    raise ConfigError("; ".join(wrong), fix=f"`privlora export {' '.join(places)} {form}`{forms}")


@contextlib.contextmanager
def _release(folder: RunFolder) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Where the run's files are, and its report: where it makes a promise, copies that were looked at as for a push.

    Raises PrivacyError for files that the run did not write.
    """
    from privlora.reporting.publication import read_report
    from privlora.reporting.pushing import checked
    from privlora.reporting.statement import PRIVATE

    report = read_report(folder.report)
    stamp = report.get("stamp")
    if isinstance(stamp, dict) and stamp.get("text") == PRIVATE:
        with checked(folder) as found:
            yield found.place, found.report
    else:
        yield folder.release, report


def _write_merged(
    settings: ModelSettings, release: Path, report: dict[str, Any] | None, folder: Path, head: Any = None
) -> None:
    """report: of a run; None of an adapter that no run released. head: of a classifier."""
    with loading(piped=True):
        from privlora.adapters.peft_files import merge, read_adapter
        from privlora.reporting.card import card
        from privlora.reporting.seals import CARD_NAME
        from privlora.training.base_weights import refuse_another_base, with_adapter
        from privlora.training.models import load_model

    # Packed weights cannot take an update: it goes into those that they were packed from.
    unpacked = settings.model_copy(update={"device": "cpu", "quantization": None})
    factors = read_adapter(release) if head is None else {}
    model, tokenizer = load_model(unpacked, head)
    if report is not None:
        refuse_another_base(report["adapter"], model, classifies=head is not None)
    if head is None:
        merge(model, factors)
    else:  # its last layers are whole in the adapter's files
        model = with_adapter(model, release, head).merge_and_unload()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if report is not None:
        (folder / CARD_NAME).write_text(card(report, merged=True), encoding="utf-8")
    mode = (folder / "config.json").stat().st_mode
    for path in folder.iterdir():  # safetensors lets nobody else read what it writes
        path.chmod(mode)


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder that gets the name ``target`` once it is complete; nothing is left if it never is."""
    from safetensors import SafetensorError

    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        yield temporary
        temporary.chmod(0o755)  # mkdtemp lets nobody else in
        os.rename(temporary, target)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        what = f"cannot write {str(target)!r}: {getattr(error, 'strerror', None) or error}"
        raise RunError(what, fix="free space, or give a writable place") from None
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary)


def push(
    run: Annotated[Path, argument("RUN", "Folder of a finished run.")],
    repo: Annotated[str, argument("REPO", "owner/name on the hub.")],
    base_model: Annotated[str | None, option("Hub name of a base that was a folder.", metavar="NAME")] = None,
    public: Annotated[bool, option("For everybody to see; else its owner alone does.", "--public")] = False,
    dry_run: Annotated[bool, option("Show what would be uploaded; send nothing.", "--dry-run")] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload RUN/release, and nothing else, to the Hugging Face hub."""
    folder = finished_run(run)
    with quiet_libraries(told=True):
        from privlora.reporting.pushing import push as push_release

        pushed = push_release(folder, repo, private=not public, base_model=base_model, dry_run=dry_run)
    lines = [f"{(folder.release / name).stat().st_size:>12}  {name}" for name in pushed.files]
    if pushed.kind == "model":
        lines.append("no tokenizer: it is the base model's, which is not changed")
    unsent = f"nothing was sent; without --dry-run these go to {pushed.kind} {pushed.repo}"
    lines.append(unsent if pushed.url is None else f"sent to {pushed.url}")
    content = {"repo": pushed.repo, "kind": pushed.kind, "files": list(pushed.files), "url": pushed.url}
    show(content, lines, as_json)
