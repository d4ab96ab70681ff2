"""Which tool a YAML is of, and its settings laid over a proposal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from privlora.config import read_yaml
from privlora.config.auto import PASSES, run_sizes
from privlora.config.foreign_names import tool_of
from privlora.config.reference import groups
from privlora.data.records import HUB, is_data_file_name
from privlora.errors import ConfigError
from privlora.starting.draft import Draft
from privlora.starting.files import free
from privlora.starting.foreign import axolotl, litgpt, trl
from privlora.starting.foreign.taken import Taken
from privlora.starting.numbers import FEW

_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Taken]]] = {
    "TRL": trl.read,
    "axolotl": axolotl.read,
    "litgpt": litgpt.read,
}
_OF_ADAMW: Final = ("method.learning_rate", "method.beta1", "method.beta2", "method.weight_decay")


def read_foreign(path: Path) -> Taken:
    """Raises ConfigError for a file that is of none of the tools."""
    content = read_yaml(path, quoted=False)
    own = [group for group in groups() if isinstance(content.get(group), Mapping)]
    tool = tool_of(content)
    if {"data", "privacy"} <= set(own) or (len(own) > 1 and tool is None):
        raise ConfigError(
            f"{str(path)!r} holds privlora's own groups",
            fix=f"`privlora plan {path}`; nothing has to be converted",
        )
    if tool is None:
        raise ConfigError(
            f"{str(path)!r} is of no tool that is known here",
            fix="give a YAML of TRL (flat, as for `trl sft --config`), of axolotl or of litgpt; or leave out --from",
        )
    return _READERS[tool](content)


def data_of(taken: Taken) -> list[str]:
    """Its data, as far as they are files; ConfigError where they are not."""
    files = [name for name in taken.data if _is_file(name)]
    if not taken.data:
        raise ConfigError("no data are given, and the other file names none", fix="give DATA before --model")
    if len(files) < len(taken.data):
        raise ConfigError(
            "the data that the other file names are no files here",
            fix=f"give your file of records as DATA (a data set of the hub as {HUB}name:split)",
        )
    return files


def _is_file(name: str) -> bool:
    try:
        return is_data_file_name(name) and Path(name).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return False


def lay_over(draft: Draft, taken: Taken, positions: int | None = None) -> None:
    """Put what was taken over into the place of what was proposed. positions: the most tokens that the model reads."""
    n = draft.get("privacy.public_dataset_size")
    for name in (
        "learning_rate",
        "metric_power",
        "right_weight",
    ):  # prism's: other rows have their own, or none
        draft.drop(f"method.{name}")
    forms = ("data.text", "data.messages", "data.loss_on")
    for place, line in taken.settings.items():
        if place not in forms and place != "model.name":
            draft.put(place, line.value, line.why)
    if positions is not None and draft.get("data.max_length") > positions:
        draft.put("data.max_length", positions, "what the model reads at most, which is less than there")
    if draft.get("model.quantization") is not None:
        draft.below.pop("model", None)
    output = draft.get("run.output")
    draft.put("run.output", str(free(Path(output))), "release/ may be published, private/ never")
    loss = taken.settings.get("data.loss_on")
    if loss is not None and (loss.value == "all" or draft.get("data.loss_on") is not None):
        draft.put("data.loss_on", loss.value, loss.why)
    if draft.get("method.name") != "dp-adamw":  # whose rate is in units of the noise
        for place in _OF_ADAMW:
            if draft.get(place) is not None:
                draft.drop(place)
                taken.kept_out[place.partition(".")[2]] = (
                    f"it means something else in {draft.get('method.name')}"
                )
    draft.below.pop("method", None)
    draft.drop("method.clipping")
    draft.remark(
        "method",
        "The rate was chosen without noise: tune it on PUBLIC texts. name: prism, without the lines below it, takes",
        "privlora's own method with its own rate (docs/results.md).",
        *(
            ["clipping: automatic   # measured better on few records (docs/few-records.md)"]
            if n <= FEW
            else []
        ),
    )
    _batch_and_steps(draft, taken, n)


def _batch_and_steps(draft: Draft, taken: Taken, n: int) -> None:
    batch = taken.batch or draft.get("privacy.expected_batch_size")
    if taken.batch is not None:
        small = "; small for privacy: noise a step falls with it" if taken.batch < 64 else ""
        batch = min(taken.batch, n)
        cut = f", cut to N = {n}" if batch < taken.batch else ""
        draft.put(
            "privacy.expected_batch_size",
            batch,
            f"{taken.batch_from}{cut}{small}",
        )
        if n > FEW:
            steps, _ = run_sizes(n, batch=batch)
            draft.put("privacy.steps", steps, f"{PASSES:g} passes over the data; each is a noisy release")
    if taken.max_steps is not None:
        draft.put("privacy.steps", taken.max_steps, "max_steps there; each is a noisy release")
    elif taken.epochs is not None:
        steps = max(1, round(taken.epochs * n / batch))
        draft.put(
            "privacy.steps", steps, f"{taken.epochs:g} epochs x {n} / {batch}; each step is a noisy release"
        )
    steps = draft.get("privacy.steps")
    if taken.warmup_share is not None:
        draft.put(
            "method.warmup_steps", round(taken.warmup_share * steps), f"{taken.warmup_share:g} of the steps"
        )
    warmup = draft.get("method.warmup_steps")
    if warmup is not None and warmup > steps:
        draft.put("method.warmup_steps", steps, "cut to privacy.steps")
