"""``privlora evaluate`` and ``privlora export``: what a trained adapter is worth, and other forms of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from safetensors import SafetensorError

from privlora.cli.console import JsonOption, emit, out, quiet_libraries
from privlora.cli.training import load_run_settings
from privlora.config import DataSettings, ModelSettings, checked
from privlora.errors import ConfigError, ModelError, RunError
from privlora.training.files import RunFolder

if TYPE_CHECKING:
    import torch

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_PRIVACY = ("privacy_report.json", "ledger.jsonl")
_FORMS = ("text", "prompt", "completion", "messages")


def evaluate(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A run, an adapter's folder, or a model.", show_default=False),
    ],
    data: Annotated[
        list[str], typer.Option(help="Records to evaluate on; may be repeated.", show_default=False)
    ],
    base: Annotated[
        str | None,
        typer.Option(help="Base model, if the adapter's own note of it is wrong.", show_default=False),
    ] = None,
    format: Annotated[str | None, typer.Option(help="As data.format.", show_default=False)] = None,
    text: Annotated[
        str | None, typer.Option(help="Column or format of whole texts.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Column or format of prompts.", show_default=False)
    ] = None,
    completion: Annotated[str | None, typer.Option(help="Column of completions.", show_default=False)] = None,
    messages: Annotated[str | None, typer.Option(help="Column of chat messages.", show_default=False)] = None,
    loss_on: Annotated[str | None, typer.Option(help="all or completion.", show_default=False)] = None,
    max_length: Annotated[int | None, typer.Option(help="In tokens.", show_default=False)] = None,
    add_eos: Annotated[bool | None, typer.Option(help="End texts with EOS.", show_default=False)] = None,
    limit: Annotated[
        int | None, typer.Option(help="Use the first so many records.", show_default=False)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, …", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Next-token loss and accuracy of TARGET on records; a run's own columns are used unless given."""
    stored, adapter, run_data = _resolve(target, base)
    given = {"text": text, "prompt": prompt, "completion": completion, "messages": messages}
    others = {
        "format": format,
        "loss_on": loss_on,
        "max_length": max_length,
        "add_eos": add_eos,
        "limit": limit,
    }
    if any(given.values()):  # another form of records replaces the run's
        run_data = {k: v for k, v in run_data.items() if k not in (*_FORMS, "loss_on")}
    chosen = {k: v for k, v in {**given, **others}.items() if v is not None}
    settings = checked(DataSettings, {**run_data, **chosen, "path": data}, "evaluate")
    wanted = {k: v for k, v in {"dtype": dtype, "device": device}.items() if v is not None}
    model_settings = checked(ModelSettings, {**stored, **wanted}, "evaluate")
    with quiet_libraries():
        result = _evaluate(model_settings, adapter, settings)
    if as_json:
        emit({"target": target, "data": data, **result})
        return
    lines = (
        f"loss per record  {result['loss_per_example']:.4f} ± {result['standard_error']:.4f} nats per token",
        f"loss per token   {result['loss_per_token']:.4f} nats",
        f"accuracy         {result['accuracy']:.2%}",
        f"measured on      {result['tokens']} tokens of {result['examples']} records",
        "These numbers describe the records they were computed on: if those are private, so are these.",
    )
    for line in lines:
        out().print(line)


def _resolve(target: str, base: str | None) -> tuple[dict[str, Any], Path | None, dict[str, Any]]:
    """Model settings, the adapter's folder if there is one, and the data settings of a run."""
    folder = Path(target).expanduser()
    run = RunFolder(folder)
    if run.settings.exists():
        settings = load_run_settings(run)
        _require_adapter(run)
        model = settings.model.model_dump()
        # Where and how far the run read says nothing about other records.
        data = settings.data.model_dump(exclude={"path", "evaluation", "limit"})
        return {**model, **({"name": base} if base else {})}, run.release, data
    if (folder / _ADAPTER[0]).exists():
        return {"name": base or _base_of(folder)}, folder, {}
    if base is not None:
        raise ModelError(
            f"there is no adapter in {target!r}", fix="leave out --base to evaluate a model itself"
        )
    return {"name": target}, None, {}


def _base_of(adapter: Path) -> str:
    """The base model that an adapter names."""
    file = adapter / _ADAPTER[0]
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{str(file)!r} cannot be read ({type(error).__name__})", fix="give --base"
        ) from None
    if not isinstance(name, str) or not name:
        raise ModelError(f"{str(file)!r} names no base model", fix="give --base")
    return name


def _require_adapter(run: RunFolder) -> None:
    if not (run.release / _ADAPTER[1]).exists():
        raise RunError(
            f"the run in {str(run.root)!r} is not finished: it has no adapter",
            fix=f"finish it with `privlora resume {run.root}`",
        )


def _evaluate(model_settings: ModelSettings, adapter: Path | None, data: DataSettings) -> dict[str, float]:
    from privlora.api import pad_token
    from privlora.data.records import load_records
    from privlora.evaluation import evaluate_next_token
    from privlora.training.session import load_model, tokenise

    records = load_records(data.path, format=data.format, limit=data.limit)
    model, tokenizer = load_model(model_settings)
    if adapter is not None:
        model = _with_adapter(model, adapter)
    examples = tokenise(records, data, tokenizer)
    return evaluate_next_token(model, examples, pad_token_id=pad_token(tokenizer)).to_dict()


def _with_adapter(model: torch.nn.Module, adapter: Path) -> torch.nn.Module:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(adapter))
    except Exception as error:  # noqa: BLE001 - loaders raise anything; the user needs the cause, not a traceback
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(
            f"the adapter in {str(adapter)!r} does not load on this base model: {reason}",
            fix="give the base model it was trained on with --base, or restore its files",
        ) from None


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.", show_default=False)],
    merge: Annotated[
        bool, typer.Option("--merge", help="The base model with the adapter merged in.")
    ] = False,
    as_lora: Annotated[bool, typer.Option("--as-lora", help="A copy of the plain peft adapter.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a run's adapter as a whole model or a plain LoRA adapter, with its privacy report and ledger."""
    if merge == as_lora:
        raise ConfigError("give exactly one of --merge and --as-lora", fix="--merge makes a whole model")
    folder = RunFolder(run)
    settings = load_run_settings(folder)
    _require_adapter(folder)
    if output.exists():
        raise RunError(f"{str(output)!r} exists already", fix="give a new folder; nothing is written over")
    kept = [*_PRIVACY, *((*_ADAPTER, "README.md") if as_lora else ())]
    with _new_folder(output) as temporary:
        if merge:
            with quiet_libraries():
                _write_merged(settings.model, folder.release, temporary)
        for name in kept:
            if (folder.release / name).exists():  # a run without privacy has no ledger
                shutil.copyfile(folder.release / name, temporary / name)
    form = "merged model" if merge else "adapter"
    if as_json:
        emit({"output": str(output), "form": form})
    else:
        out().print(f"{form} in {output}")


def _write_merged(settings: ModelSettings, adapter: Path, folder: Path) -> None:
    from privlora.adapters.peft_files import merge, read_adapter
    from privlora.training.session import load_model

    factors = read_adapter(adapter)
    model, tokenizer = load_model(settings.model_copy(update={"device": "cpu"}))
    merge(model, factors)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder that gets the name ``target`` once it is complete; nothing is left if it never is."""
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        yield temporary
        temporary.chmod(0o755)  # mkdtemp lets nobody else in
        os.rename(temporary, target)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise RunError(
            f"cannot write {str(target)!r}: {getattr(error, 'strerror', None) or error}",
            fix="free space, or give a writable place",
        ) from None
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary)
