"""``privlora init``: the YAML of a first run, for a file of one's own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import yaml

from privlora.cli.console import JsonOption, argument, named, option, quiet_libraries, show
from privlora.config import settings_from
from privlora.consoles import err, loading
from privlora.errors import ConfigError, DataError, ModelError, Together


def init(
    data: Annotated[list[str] | None, argument("DATA...", "The private records, in files.")] = None,
    model: Annotated[str | None, option("Local folder or hub name of the base model.")] = None,
    output: Annotated[Path | None, option("The YAML; else named as DATA.", "--output", "-o")] = None,
    epsilon: Annotated[float, typer.Option("--epsilon", help="The promise; smaller is stronger.")] = 3.0,
    text: Annotated[str | None, option("Column of the whole text, or a format.")] = None,
    prompt: Annotated[str | None, option("Column or format of the prompt.")] = None,
    completion: Annotated[str | None, option("Column or format of the answer.")] = None,
    messages: Annotated[str | None, option("Column of chat messages.")] = None,
    user: Annotated[str | None, option("Column of people: protect all records of one.")] = None,
    file_format: Annotated[str, typer.Option("--format", help="As data.format.")] = "auto",
    clients: Annotated[bool, option("Each file is of one owner: a federation of them.", "--clients")] = False,
    as_json: JsonOption = False,
) -> None:
    """Propose the settings of a first run: reads DATA here, and writes a commented YAML that plan and train accept."""
    # Not at the top: numpy and templates, which most commands need later or never.
    from privlora.data.records import format_of
    from privlora.starting.columns import fitting_form
    from privlora.starting.draft import refuse_existing, write_new
    from privlora.starting.proposal import (
        Asked,
        checked_text,
        look_at,
        owners_of,
        propose,
        refuse_epsilon,
        top_of,
    )
    from privlora.starting.survey import refuse_no_files, survey
    from privlora.training.preflight import near_folder

    problems = Together()
    problems.of(None, refuse_epsilon, epsilon)
    form = problems.of(None, format_of, file_format) or "auto"
    paths = tuple(data or ())
    if not paths:
        problems.found.append(
            ConfigError("no DATA is given", fix="`privlora init records.jsonl --model NAME`")
        )
    owners = problems.of(None, owners_of, paths) if clients and paths else None
    paths = tuple(each.path for each in owners) if owners else paths
    if paths and (owners or not clients):
        problems.of(None, refuse_no_files, paths, form)
        target = output or Path(f"{Asked(paths, epsilon, clients=owners or ()).stem}.yaml")
        problems.of(None, refuse_existing, target)
    if not model:
        problems.found.append(
            ConfigError("no model is given", fix="add --model with a local folder or a hub name")
        )
    base = problems.of(None, look_at, model) if model else None
    problems.tell()
    assert base is not None
    assert model is not None
    asked = Asked(paths, epsilon, user, output, owners or (), form)
    found = survey(paths, user, form)
    told = {"text": text, "prompt": prompt, "completion": completion, "messages": messages}
    chosen = fitting_form(paths, form, found, user, **told)
    draft, notes = propose(asked, found, chosen, base)
    if not Path(model).expanduser().is_dir():
        near = near_folder(model)
        meant = "" if near is None else f". Did you mean the folder {near!r}?"
        notes.insert(
            0, f"model {model!r} is no folder here, so the hub will be asked for it by that name{meant}"
        )
    words = ", ".join(Path(path).name for path in paths)
    written = checked_text(draft, top_of(target, words))
    if base.unproven:  # `privlora plan` and `train` would refuse it with these settings
        with loading():
            from privlora.training.models import look_at_model
        look_at_model(settings_from(yaml.safe_load(written)))
    write_new(target, written)
    shown = _example(written) if base.local and base.tokenizer is not None else []
    following = [f"privlora plan {target}", f"privlora train {target}"]
    content = {"settings": str(target), "groups": draft.content(), "notes": notes}
    if not as_json:
        for note in notes:
            err().print(f"note: {note}")
    rows = [("settings", str(target)), *shown, *(("next", one) for one in following)]
    show({**content, "example": dict(shown), "next": following}, named(rows), as_json)


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
