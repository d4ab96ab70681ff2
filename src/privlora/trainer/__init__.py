"""A trainer in the shape of TRL's SFTTrainer: its arguments where they mean the same, refusals where they do not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from privlora.api import callbacks_of, fine_tune, resume_run
from privlora.calling import all_auto, is_loaded, records_of, refuse_no_tokenizer, settings_of_call
from privlora.config import IN_MEMORY
from privlora.consoles import err, is_wanted
from privlora.errors import ConfigError, DataError, PrivacyError, RunError, Together, named
from privlora.names import EITHER
from privlora.result import Result
from privlora.trainer.arguments import Groups, PrivateConfig, groups_of, names_for
from privlora.training.files import RunFolder
from privlora.training.takeover import is_over, refuse_if_spent

if TYPE_CHECKING:
    import torch

    from privlora.reporting.pushing import Pushed

_REFUSED: Final = {
    "data_collator": "batches are drawn and padded by what the accounting counts on",
    "compute_loss_func": "the loss is the log-likelihood of the tokens",
    "compute_metrics": "the held-out loss is measured; `privlora evaluate --task` scores answers",
    "optimizers": "the method brings its optimizer, which sees releases alone: method='dp-adamw', for example",
    "optimizer_cls_and_kwargs": "the method brings its optimizer, which sees releases alone",
    "preprocess_logits_for_metrics": "the held-out loss is measured, and nothing else",
    "formatting_func": "columns say it: privlora.fine_tune(data=dict(text='{title} {body}'))",
    "quantization_config": "load the model with it, and pass the model",
    "tokenizer": "it is called processing_class",
}
_INSTEAD: Final = {
    "predict": ": text is written by trainer.model.generate once it is trained, and `privlora evaluate` measures it",
    "state": ": what happened is in trainer.result.history",
}


class PrivateTrainOutput(NamedTuple):
    """What `PrivateTrainer.train` gives: as transformers' TrainOutput, without the loss of training, which is private.

    metrics: epsilon and delta (None where nothing is promised), and eval_loss where there are public records.
    """

    global_step: int
    metrics: dict[str, float | None]


class PrivateTrainer:
    """Fine-tunes privately behind the methods of TRL's SFTTrainer.

    model: a folder, a hub name, or a loaded model (then with processing_class, its tokenizer).
    args: a `PrivateConfig`; or an SFTConfig or TrainingArguments, of which what is not at its default is taken where it
        means the same, and refused by name where it does not; then privacy is needed, too.
    train_dataset: PRIVATE records, of any kind that `fine_tune` takes. Which columns are read is seen from the names
        that all records have: messages; or prompt and completion (then the loss is on completions, unless
        completion_only_loss is False); or text. As in TRL, prompts that are texts are rendered by no chat template:
        data=dict(template="chat") does.
    eval_dataset: PUBLIC records of the same form: their loss is published. What was held out of private records is as
        private as they are, and is refused only where it can be seen (one table of `datasets`, equal records).
    peft_config: a peft.LoraConfig, or fields of AdapterSettings; None: an adapter of rank 16 on all linear layers (with
        auto=True of rank 8, on those outside of attention), and not the whole model, as in TRL, which is said when it
        trains. callbacks: see `fine_tune`.
    privacy, method, data, loading, run, auto: as in `fine_tune`, for what args have no names for.

    Raises ConfigError, DataError or PrivacyError before anything is charged or written.
    """

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        args: Any = None,
        *,
        train_dataset: Any,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        privacy: Mapping[str, Any] | None = None,
        method: str | Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        loading: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        auto: bool | Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        problems = Together()
        refused = {name: value for name, value in others.items() if name in _REFUSED}
        unknown = [name for name in others if name not in _REFUSED]
        if unknown:
            raise TypeError(
                f"PrivateTrainer() got an unexpected keyword argument {named(unknown[0])}; it takes those of a "
                "trainer, and privacy, method, data, loading, run and auto as fine_tune does"
            )
        problems.found += [
            ConfigError(f"{name} is given", why=_REFUSED[name], fix=f"leave {name} out")
            for name, value in refused.items()
            if value is not None and value != (None, None)
        ]
        auto = all_auto(auto)
        sized = isinstance(auto, Mapping) and auto.get("all") is True
        groups = groups_of(args, privacy, method, sized=sized)
        for name, more in {"data": data, "loading": loading, "run": run}.items():
            if more is not None and not isinstance(more, Mapping):
                what = f"{name} is of type {type(more).__name__}, not a mapping of settings"
                problems.found.append(ConfigError(what, fix=f"give a mapping, as {name}=dict(...)"))
            else:
                getattr(groups, name).update(more or {})
        if is_loaded(model) and processing_class is None:
            fix = "pass processing_class=..."
            problems.found.append(ConfigError("a loaded model needs its tokenizer", fix=fix))
        problems.of(None, refuse_no_tokenizer, processing_class, "processing_class")
        heard: list[Any] = problems.of([], lambda: list(callbacks_of(callbacks)))
        self._model = model
        if groups.privacy.get("private", True):
            problems.of(None, _refuse_own_records, train_dataset, eval_dataset)
        self._output = "runs/run" if groups.output is None else groups.output
        path, self._records = records_of(problems, train_dataset, "train_dataset", needed=True)
        public, self._evaluation = records_of(problems, eval_dataset, "eval_dataset")
        self._sources = {"records": path, "evaluation": public}
        problems.of(None, _add_columns, groups, self._records)
        problems.of(None, _add_dtype, groups, model)
        self._groups: dict[str, Any] = {"privacy": groups.privacy or None, "data": groups.data, "auto": auto}
        self._groups |= {"adapter": peft_config, "loading": groups.loading, "run": groups.run}
        self._groups["method"] = {"name": "prism", **groups.method}
        self._handed: dict[str, Any] = {"tokenizer": processing_class, "callbacks": heard}
        self._handed["show_progress"] = groups.show_progress
        # Now, and not only when it trains; and before torch is loaded.
        settings = settings_of_call(
            model,
            {"path": path, "evaluation": public},
            self._groups,
            self._output,
            source="PrivateTrainer",
            problems=problems,
            arguments=names_for(args),
        )
        self._result: Result | None = None
        self._adapter = settings.adapter

    @property
    def result(self) -> Result:
        """What the run left. Raises RunError before it is over."""
        if self._result is None:
            raise RunError("there is no result yet", fix="call train()")
        return self._result

    @property
    def model(self) -> Any:
        """That with the adapter (``result.model``) once a run is over; before, or of a loaded model, what was given."""
        trained = self._result is not None and not self._result.base_was_given
        return self.result.model if trained else self._model

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"PrivateTrainer has no {name!r}{_INSTEAD.get(name, '')}")

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> PrivateTrainOutput:
        """Train; or go on with the run in args.output_dir, where resume_from_checkpoint is true or names that folder.

        Raises Interrupted where the user or a callback stopped it: all is saved, and can be resumed.
        """
        from privlora.training.loop import Interrupted

        try:
            self._result = self._trained(resume_from_checkpoint)
        except Interrupted as stop:
            stop.add_note("Or, in this script, with train(resume_from_checkpoint=True)")
            raise
        found = self._result
        metrics: dict[str, float | None] = {"epsilon": found.epsilon, "delta": found.delta}
        if self._sources["evaluation"] is not None:
            metrics |= self.evaluate()
        return PrivateTrainOutput(found.steps, metrics)

    def _trained(self, resume_from_checkpoint: bool | str | Path | None) -> Result:
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            try:
                refuse_if_spent(RunFolder(Path(self._output)))
            except RunError as error:
                again = "continue it with train(resume_from_checkpoint=True), or give another output_dir"
                if is_over(RunFolder(Path(self._output))):
                    again = "take up what it left with train(resume_from_checkpoint=True), or give another output_dir"
                raise RunError(error.what, why=error.why, fix=again) from None
            if self._groups["adapter"] is None and is_wanted(self._handed["show_progress"]):
                layers = "all linear layers"
                if self._adapter.target_modules == EITHER:
                    layers = "the linear layers outside of attention"
                err().print(
                    f"no peft_config: a LoRA adapter of rank {self._adapter.r} is trained on {layers}, and the model's "
                    "own weights stay as they are, where TRL would train them all. For another one give "
                    "peft_config=LoraConfig(r=…)"
                )
            given = self._given("records", self._records), self._given("evaluation", self._evaluation)
            more = {**self._groups, **self._handed, "output": self._output}
            return fine_tune(self._model, given[0], evaluation=given[1], **more)
        if resume_from_checkpoint is not True and Path(resume_from_checkpoint) != Path(self._output):
            raise ConfigError(
                "resume_from_checkpoint names another folder than output_dir",
                why="a run is one folder, and its ledger lies there",
                fix="give train(resume_from_checkpoint=True)",
            )
        loaded = self._model if is_loaded(self._model) else None
        own: dict[str, Any] = {"records": self._records, "evaluation": self._evaluation}
        return resume_run(self._output, model=loaded, **own, **self._handed)

    def evaluate(self) -> dict[str, float | None]:
        """eval_loss: what the adapter loses on eval_dataset, in nats (mean over records), as it is published.

        Raises ConfigError without eval_dataset, RunError before the run is over.
        """
        if self._sources["evaluation"] is None:
            fix = "give one; `privlora evaluate RUN --data FILE` measures a finished run on other records"
            raise ConfigError("there is no eval_dataset, which is public", fix=fix)
        return {"eval_loss": self.result.report["evaluation"][-1]["loss_per_example"]}

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Copy the release (adapter, card, report, ledger) to a new folder; None: it stays where it is. Gives where.

        Raises RunError for a folder that holds anything; what `privlora.reporting.pushing.push` does for a private
        run's release that is not as the run wrote it.
        """
        from privlora.reporting.pushing import checked

        release = self.result.release
        if output_dir is None:
            return release
        target = Path(output_dir)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RunError(f"{str(target)!r} holds something already", fix="give a new folder")
        if release.name == "release":
            with checked(RunFolder(release.parent)) as found:
                _copy_files(found.place, target, found.files)
        else:
            _copy_files(release, target, [path.name for path in release.iterdir() if path.is_file()])
        return target

    def push_to_hub(self, repo_id: str, *, private: bool = True, base_model: str | None = None) -> Pushed:
        """Upload the release, and nothing else; see `privlora.reporting.pushing.push`."""
        return self.result.push(repo_id, private=private, base_model=base_model)

    def _given(self, name: str, records: Any) -> Any:
        """What `fine_tune` takes for a source: records, or the files that were named."""
        source = self._sources[name]
        if source == IN_MEMORY:
            return records
        return [Path(one) for one in source] if isinstance(source, list) else source


def _copy_files(source: Path, target: Path, names: Sequence[str]) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(source / name, target / name, follow_symlinks=False)
    except OSError as error:
        what = f"cannot write {str(target)!r}: {error.strerror or type(error).__name__}"
        raise RunError(what, fix="free space, or give a writable place") from None


def _add_columns(groups: Groups, records: Sequence[Mapping[str, Any]] | None) -> None:
    """Which columns are read, and what of them is trained on, where the arguments do not say."""
    columns = groups.data
    if "text" not in columns and groups.method.get("task") is None:
        form = _form(records or [])
        if form == "messages":
            columns.setdefault("messages", "messages")
        elif form == "completion":
            columns |= {"prompt": "prompt", "completion": "completion"}
            of_one_kind = records and getattr(records, "column_names", None)  # as all of a table's are
            some = [records[0]] if records and of_one_kind else records or ()
            if not any(isinstance(record["prompt"], list) for record in some):
                columns.setdefault("template", "none")  # as TRL, which renders messages alone
    if groups.assistant_only:
        columns["loss_on"] = "completion"
    elif groups.completion_only is not None and ("prompt" in columns or groups.completion_only):
        columns["loss_on"] = "completion" if groups.completion_only else "all"
    elif "prompt" in columns or "messages" in columns:  # as TRL, unless assistant_only_loss
        columns.setdefault("loss_on", "completion" if "prompt" in columns else "all")


def _form(records: Sequence[Mapping[str, Any]]) -> str:
    """By which columns all records are of one form. It is published, so that no single record may decide it.

    Raises DataError where they differ.
    """

    def of(names: Any) -> str:
        if "messages" in names:
            return "messages"
        return "completion" if {"prompt", "completion"} <= set(names) else "text"

    schema = getattr(records, "column_names", None)
    found = {of(schema)} if schema else {of(record.keys()) for record in records}
    if len(found) > 1:
        raise DataError(
            "some records have messages, or prompt and completion, and others do not",
            why="how they are read is published, and must not follow from some of them",
            fix="bring all records into one form, or say which column is read by dataset_text_field",
        )
    return next(iter(found), "text")


def _add_dtype(groups: Groups, model: Any) -> None:
    if not groups.bf16:
        return
    if not is_loaded(model):
        groups.loading.setdefault("dtype", "bfloat16")
    elif str(next(model.parameters()).dtype) != "torch.bfloat16":
        raise ConfigError(
            "bf16 is set, and the model's weights are of another dtype",
            why="a model computes here in the dtype of its frozen weights",
            fix="load it with dtype='bfloat16', or leave bf16 out",
        )


def _refuse_own_records(train: Any, evaluation: Any) -> None:
    """Raise PrivacyError for public records that are the private object, or share a table's files or memory with it.

    That is all that is seen here: not slices of lists or of pandas tables, nor what `map` or streaming wrote anew. Of
    those only records that equal private ones are found, later.
    """
    if evaluation is None or isinstance(train, str | Path):
        return
    if evaluation is train or _places(train) & _places(evaluation):
        raise PrivacyError(
            "eval_dataset is train_dataset, or both are parts of one table",
            why="what is held out of private records is as private as they are, and its loss would be published",
            fix="give public records as eval_dataset, or none",
        )


def _places(data: Any) -> set[Any]:
    """Where a datasets.Dataset keeps its rows: files, and places in memory; empty for anything else."""
    table = getattr(data, "data", None)
    if not hasattr(data, "cache_files") or not hasattr(table, "columns"):
        return set()
    files = {file.get("filename") for file in data.cache_files}
    return files | set(_addresses(table)) - {None}


def _addresses(table: Any) -> Iterator[int]:
    for column in table.columns:
        for chunk in getattr(column, "chunks", ()):
            yield from (buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size)


__all__ = ["PrivateConfig", "PrivateTrainOutput", "PrivateTrainer"]
