"""One call in Python: ``synthesize``, texts instead of an adapter; and what is behind ``privlora synthesize``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privlora.api import Result, start_run
from privlora.calling import (
    Given,
    Source,
    is_loaded,
    naming_the_nearest,
    records_of,
    refuse_no_tokenizer,
    settings_of_call,
    with_generator,
)
from privlora.config import Settings, load_settings
from privlora.errors import ConfigError, Together
from privlora.training.files import RunFolder, no_run

if TYPE_CHECKING:
    import torch

    from privlora.training.observer import Observer


@dataclass(frozen=True)
class SynthesisResult(Result):
    """What a run leaves whose release is texts. All of it is public, but for what lies in ``folder``/private.

    texts: those of ``release``/synthetic.jsonl, in order. folder: of the run. report: privacy_report.json, where
    "quality" has the figures. For the rest see ``Result``.
    """

    texts: tuple[str, ...]
    folder: Path


@naming_the_nearest
def synthesize(
    model: str | Path | torch.nn.Module,
    records: Source | None = None,
    *,
    synthesis: Mapping[str, Any],
    privacy: Mapping[str, Any] | None = None,
    source: str | Path | None = None,
    tokenizer: Any = None,
    evaluation: Source | None = None,
    data: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    loading: Mapping[str, Any] | None = None,
    method: str | Mapping[str, Any] | None = None,
    generator: Any = None,
    output: str | Path = "runs/texts",
    run: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> SynthesisResult:
    """Make a private data set of texts that stand for ``records``; what ``privlora synthesize`` does.

    records: the private ones, as in ``fine_tune``. Or source: the folder of a finished run of ``fine_tune``, whose
        adapter is asked at no further cost; what it was trained on and how is known from there, so of the rest
        ``data``, ``loading``, ``tokenizer``, ``run`` and ``observer`` may be given.
    synthesis: fields of SynthesisSettings, for example ``dict(preset="clinical-note", seeds=100, samples=500)``.
    method: a method's name or fields of MethodSettings; None: aug-pe.
    generator: see ``fine_tune``. It is never given anything private.
    For the rest see ``fine_tune``.

    Raises PrivloraError subclasses that say what to mend.
    """
    problems = Together()
    problems.of(None, refuse_no_tokenizer, tokenizer)
    if (records is None) == (source is None):
        what = "texts stand for records, or come of a finished run"
        problems.found.append(ConfigError(what, fix="give records, or source, and not both"))
        problems.tell()
    loaded = model if is_loaded(model) else None
    groups: dict[str, Any] = {"data": data, "loading": loading, "run": run}
    if source is not None:
        refused = {"privacy": privacy, "evaluation": evaluation, "adapter": adapter, "method": method}
        problems.found += [
            ConfigError(f"{name} is given, and the run in source is trained already", fix=f"leave out {name}")
            for name, value in {**refused, "generator": generator}.items()
            if value is not None
        ]
        problems.tell()
        groups |= {"synthesis": synthesis}
        settings = _of_source(source, model, groups, output)
        return synthesize_run(settings, model=loaded, tokenizer=tokenizer, observer=observer)
    path, given = records_of(problems, records, "records")
    public, held = records_of(problems, evaluation, "evaluation")
    groups |= {"privacy": privacy, "adapter": adapter, "method": "aug-pe" if method is None else method}
    groups |= {"synthesis": problems.of(None, with_generator, synthesis, generator)}
    files = {"path": path, "evaluation": public}
    settings = settings_of_call(model, files, groups, output, source="synthesize", problems=problems)
    handed = {"model": loaded, "tokenizer": tokenizer, "generator": generator, "records": given}
    return synthesize_run(settings, observer=observer, evaluation=held, **handed)


def synthesize_run(
    settings: Settings | str | Path, *, observer: Observer | None = None, **given: Any
) -> SynthesisResult:
    """Start a run whose release is a data set of generated texts. settings: checked, or the YAML file that says them.

    They have the group ``synthesis``; with synthesis.source the adapter of that finished run is asked, at no further
    cost. given: as of ``train_run``; of a finished run model, tokenizer and observer alone.

    Raises what ``train_run`` does.
    """
    return start_synthesis(settings, lambda: nullcontext(observer), **given)


def start_synthesis(
    settings: Settings | str | Path,
    watched: Callable[[], AbstractContextManager[Observer | None]],
    **given: Any,
) -> SynthesisResult:
    """`synthesize_run`, with ``watched`` as of `privlora.api.start_run`."""
    if not isinstance(settings, Settings):
        settings = load_settings(settings)
    if settings.synthesis is None:
        raise ConfigError("nothing says who writes the texts", fix="add the group synthesis")
    publishing = settings.synthesis.model_copy(update={"publish": True})
    settings = settings.model_copy(update={"synthesis": publishing})
    if publishing.source is None:
        result = start_run(settings, watched, Given(**given))
    else:
        with watched() as observer:
            from privlora.running import ask_finished_run

            result = ask_finished_run(settings.located(), observer=observer, **given)
    from privlora.reporting.publication import read_report

    folder = RunFolder(Path(settings.run.output))
    report = read_report(folder.report)
    rows = map(json.loads, folder.texts.read_text(encoding="utf-8").splitlines())
    texts = tuple(row[report["texts"]["column"]] for row in rows)
    return SynthesisResult(**vars(result), texts=texts, folder=folder.root)


def _of_source(
    source: str | Path, model: str | Path | torch.nn.Module, groups: Mapping[str, Any], output: str | Path
) -> Settings:
    """The settings of the finished run, with what is asked of its adapter. Raises RunError without such a run."""
    folder = RunFolder(Path(source).expanduser())
    if not folder.settings.exists():
        raise no_run(folder.root)
    trained = load_settings(folder.settings)
    asked = groups["synthesis"]
    if isinstance(asked, Mapping):
        asked = {**asked, "publish": True, "source": str(folder.root.resolve())}
    known = {
        "privacy": trained.privacy.model_dump(exclude_unset=True),
        "data": trained.data.model_dump(exclude_unset=True, exclude={"path", "evaluation"}),
        "loading": trained.model.model_dump(exclude_unset=True, exclude={"name"}),
    }
    given = {name: group for name, group in groups.items() if group is not None}
    return settings_of_call(
        trained.model.name if is_loaded(model) else model,
        {"path": trained.data.path},
        {**dict.fromkeys(groups), **known, **given, "synthesis": asked},
        output,
        source="synthesize",
    )
