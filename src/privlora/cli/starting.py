"""``privlora init``: the YAML of a first run, for a file of one's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

import typer
import yaml

from privlora.cli.console import JsonOption, emit, err, loading, out, quiet_libraries
from privlora.config import settings_from
from privlora.errors import ConfigError, DataError, ModelError, PrivloraError, in_one

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


def init(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA...", help="The private records: one file or several.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Local folder or hub name of the base model.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The YAML; the name of DATA unless given.", show_default=False),
    ] = None,
    epsilon: Annotated[float, typer.Option("--epsilon", help="The promise; smaller is stronger.")] = 3.0,
    text: Annotated[
        str | None, typer.Option("--text", help="Column of the whole text, or a format.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Column or format of the prompt.", show_default=False)
    ] = None,
    completion: Annotated[
        str | None, typer.Option("--completion", help="Column or format of the answer.", show_default=False)
    ] = None,
    messages: Annotated[
        str | None, typer.Option("--messages", help="Column of chat messages.", show_default=False)
    ] = None,
    user: Annotated[
        str | None,
        typer.Option("--user", help="Column of people: protect all records of one.", show_default=False),
    ] = None,
    file_format: Annotated[
        str, typer.Option("--format", help="Of the files, as data.format; auto: by their endings.")
    ] = "auto",
    clients: Annotated[
        bool,
        typer.Option(
            "--clients", help="Each file of DATA, or of a folder, is of one owner: a federation of them."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Propose the settings of a first run: reads DATA here, and writes a commented YAML that plan and train accept."""
    # Not at the top: numpy and templates, which most commands need later or never.
    from privlora.data.records import format_of
    from privlora.starting.columns import fitting_form
    from privlora.starting.files import refuse_existing, write_new
    from privlora.starting.owners import owners_of
    from privlora.starting.proposal import Asked, checked_text, look_at, propose, refuse_epsilon, top_of
    from privlora.starting.survey import refuse_no_files, survey
    from privlora.training.model_names import told_to_be_of_the_hub

    wrong = _Wrong()
    wrong.from_(refuse_epsilon, epsilon)
    form = wrong.from_(format_of, file_format) or "auto"
    paths = tuple(data or ())
    if not paths:
        wrong.append(ConfigError("no DATA is given", fix="`privlora init records.jsonl --model NAME`"))
    owners = wrong.from_(owners_of, paths) if clients and paths else None
    paths = tuple(each.path for each in owners) if owners else paths
    if paths and (owners or not clients):
        wrong.from_(lambda given: refuse_no_files(given, form), paths)
        target = output or Path(f"{Asked(paths, epsilon, clients=owners or ()).stem}.yaml")
        wrong.from_(refuse_existing, target)
    if not model:
        wrong.append(ConfigError("no model is given", fix="add --model with a local folder or a hub name"))
    base = wrong.from_(look_at, model) if model else None
    if wrong or base is None or model is None:
        raise in_one(wrong)
    asked = Asked(paths, epsilon, user, output, owners or (), form)
    found = survey(paths, user, form)
    told = {"text": text, "prompt": prompt, "completion": completion, "messages": messages}
    chosen = fitting_form(paths, form, found, user, **told)
    draft, notes = propose(asked, found, chosen, base)
    if (assumed := told_to_be_of_the_hub(model)) is not None:
        notes.insert(0, assumed)
    words = ", ".join(Path(path).name for path in paths)
    command = "federate" if owners else "train"
    content = checked_text(draft, top_of(target, words, command))
    if base.unproven:
        _refuse_unfit(content)
    write_new(target, content)
    shown = _example(content) if base.local and base.tokenizer is not None else []
    following = [f"privlora plan {target}", f"privlora {command} {target}"]
    if as_json:
        emit(
            {
                "settings": str(target),
                "groups": draft.content(),
                "notes": notes,
                "example": dict(shown),
                "next": following,
            }
        )
        return
    for note in notes:
        err().print(f"note: {note}")
    out().print(f"{'settings:':<10}{target}")
    for name, text in [*((f"{name}:", text) for name, text in shown), *(("next:", one) for one in following)]:
        out().print(f"{name:<10}{text}")


def _example(content: str) -> list[tuple[str, str]]:
    """How a record is read by the settings in a YAML, where a tokenizer is at hand."""
    with quiet_libraries(told=True), loading():
        from privlora.cli.example import example_rows
        from privlora.training.inputs import refuse_all_unusable
        from privlora.training.models import load_tokenizer

        settings = settings_from(yaml.safe_load(content))
        rows: list[tuple[str, str]] = []
        with suppress(ConfigError, ModelError):  # `plan` says what is wrong with the model
            tokenizer = load_tokenizer(settings.model)
            rows = example_rows(settings.data, tokenizer)
            try:
                refuse_all_unusable(settings, tokenizer)
            except DataError as error:
                err().print(f"note: `privlora train` refuses these records as they are: {error}")
        return rows


def _refuse_unfit(content: str) -> None:
    """Raise ModelError for a model that `privlora plan` and `train` would refuse with these settings."""
    with loading():
        from privlora.training.first_looks import look_at_model
        from privlora.training.models import load_skeleton
    settings = settings_from(yaml.safe_load(content))
    load_skeleton(settings.model)
    look_at_model(settings)


class _Wrong(list[PrivloraError]):
    """All that is wrong with a command line, so that it is mended at once."""

    def from_(self, call: Callable[[_Given], _Found], given: _Given) -> _Found | None:
        """What a call gives; None, with its error kept, where it refuses."""
        try:
            return call(given)
        except PrivloraError as error:
            self.append(error)
            return None
