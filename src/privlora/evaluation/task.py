"""The official score of a model on a task, with its confidence interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from privlora.data.examples import encode_completions, encode_prompts
from privlora.data.tasks import SCORE_STEP, Question, Scoring, Task, by_task, find_task, questions, scoring_of
from privlora.errors import ConfigError, DataError, RecordError
from privlora.evaluation.answers import as_llm_adapters, read_label, read_letter, read_number, read_score
from privlora.evaluation.generation import generate
from privlora.evaluation.intervals import Difference, Interval, bootstrap_interval, paired_difference
from privlora.evaluation.likelihood import answer_log_likelihoods
from privlora.evaluation.metrics import METRICS, is_correct, worst_for

Record = Mapping[str, Any]

_MATH_TOKENS, _MATH_BEAMS = 256, 4  # LLM-Adapters (Hu et al. 2023)
_NEXT_BLOCK = ("###",)  # a model that goes on after its answer writes the next instruction


@dataclass(frozen=True)
class TaskResult:
    """One evaluation. The arrays have one entry an example, in the order of the records; they describe records.

    gold, predicted: label numbers, scores, numbers, or letters as 0 (A) to 4 (E), float64; NaN where the answer
    could not be read. part: name of the part that each example belongs to. answers: generated texts, else empty.
    """

    task: Task
    scoring: Scoring
    gold: np.ndarray
    predicted: np.ndarray
    part: np.ndarray
    answers: list[str]
    interval: Interval
    as_read_by_llm_adapters: float | None = None
    """Of math, the accuracy by their reader of the same answers, which end where the next instruction begins."""

    @property
    def metric(self) -> float:
        """The task's score: the mean of its metrics, averaged over the parts (all parts weigh the same)."""
        return self.statistic(np.arange(len(self.gold)))

    @property
    def metric_name(self) -> str:
        names = " and ".join(self.task.metrics)
        return f"mean of {names}" if len(self.task.metrics) > 1 else names

    @property
    def unparsable(self) -> int:
        """Answers that could not be read; they count as wrong (scores and binary labels: as the worst answer)."""
        return int(np.isnan(self.predicted).sum())

    @property
    def correct(self) -> np.ndarray:
        """(n,) bool, for paired tests of accuracies; of scores, whether they are equal."""
        return is_correct(self.gold, self.predicted)

    def statistic(self, chosen: np.ndarray) -> float:
        """The score of the examples with these indices: what intervals and paired tests resample."""
        scores = _scores(self.task, self.gold[chosen], self.predicted[chosen], self.part[chosen])
        return float(np.mean([list(of_part.values()) for of_part in scores.values()]))

    def parts(self) -> dict[str, dict[str, float]]:
        """Every metric of every part."""
        return _scores(self.task, self.gold, self.predicted, self.part)

    def to_dict(self, *, per_example: bool = False) -> dict[str, Any]:
        """For JSON. ``per_example`` adds gold, predicted, correct and the answers, which may quote records."""
        parts = self.parts()
        result: dict[str, Any] = {
            "task": self.task.name,
            "scoring": self.scoring,
            "metric": self.metric,
            "metric_name": self.metric_name,
            "interval": _plain([self.interval.low, self.interval.high]),
            "confidence": self.interval.confidence,
            "scores": {n: float(np.mean([p[n] for p in parts.values()])) for n in self.task.metrics},
            "examples": len(self.gold),
            "unparsable": self.unparsable,
        }
        if self.as_read_by_llm_adapters is not None:
            result["as_read_by_llm_adapters"] = self.as_read_by_llm_adapters
        if len(parts) > 1:
            counts = {part: int((self.part == part).sum()) for part in parts}
            result["parts"] = {part: {**scores, "examples": counts[part]} for part, scores in parts.items()}
        if per_example:
            result["per_example"] = {
                "gold": self.gold.tolist(),
                "predicted": _plain(self.predicted.tolist()),
                "correct": self.correct.tolist(),
                "answers": self.answers,
            }
        return result


def evaluate_task(
    model: torch.nn.Module,
    tokenizer: Any,
    task: str,
    records: Sequence[Record] | Mapping[str, Sequence[Record]],
    *,
    scoring: Scoring | None = None,
    max_length: int = 512,
    max_tokens: int = 8192,
    max_new_tokens: int | None = None,
    num_beams: int | None = None,
    limit: int | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> TaskResult:
    """Ask the model every question of ``records``, in the training format, and score its answers.

    Args:
        model: a causal LM as transformers and peft load it, also with an attached privlora adapter.
        tokenizer: its tokenizer; needs no padding token.
        task: a name of ``privlora.data.tasks.TASKS``.
        records: as for training. A mapping gives parts by name, as MNLI's matched and mismatched records; math
            records that name their source are parts by themselves.
        scoring: ``likelihood`` (labels and scores: the most probable label, the expected score) or ``generation``
            (any task: the generated answer is read). None takes likelihood where it is possible.
        max_length: tokens of prompt and answer together, as ``data.max_length``; prompts are cut on the left.
        max_tokens: bound on the padded tokens of a batch; limits memory, does not change results.
        max_new_tokens: limit of a generated answer; None takes what the longest answer needs, and 256 for math.
        num_beams: None takes 1 (greedy), and 4 for math (LLM-Adapters).
        limit: use the first ``limit`` records of each part.
        confidence, resamples, seed: of the interval (see ``bootstrap_interval``).

    Raises:
        ConfigError: unknown task, a mixture of tasks, a setting out of range, or likelihood asked of a math task.
        DataError: no records, or one without its texts or its answer.
    """
    row = find_task(task)
    if row.kind == "mixture":
        raise ConfigError(
            f"task {task} is several tasks, each with a metric of its own", fix="use evaluate_suite"
        )
    scoring = scoring_of(row, scoring)
    for name, value in (("limit", limit), ("max_new_tokens", max_new_tokens), ("num_beams", num_beams)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is below 1", fix="leave it out")
    asked, part = _asked(row, records, limit)
    prompts = [question.prompt for question in asked]
    gold = np.array([_number(question, i) for i, question in enumerate(asked, start=1)])
    options = encode_completions(list(map(row.completion, row.answers)), tokenizer, prompt=prompts[0])
    longest = max(map(len, options), default=_MATH_TOKENS)
    answers: list[str] = []
    if scoring == "likelihood":
        ids = encode_prompts(prompts, tokenizer, max_length=_room(model, max_length, longest + 1, longest))
        found = answer_log_likelihoods(model, tokenizer, ids, options, max_tokens=max_tokens)
        predicted = _most_probable(row, found)
    else:
        new = max_new_tokens or longest + (row.kind != "math")  # one more shows where a label ends
        ids = encode_prompts(prompts, tokenizer, max_length=_room(model, max_length, 0, new))
        answers = generate(
            model,
            tokenizer,
            ids,
            max_new_tokens=new,
            num_beams=num_beams or (_MATH_BEAMS if row.kind == "math" else 1),
            stop=_NEXT_BLOCK if row.kind == "math" else (),
            max_tokens=max_tokens,
        )
        read = (_read(row, question, answer) for question, answer in zip(asked, answers, strict=True))
        predicted = np.array([np.nan if value is None else float(value) for value in read])
    nowhere = Interval(float("nan"), float("nan"), confidence)
    result = TaskResult(row, scoring, gold, predicted, part, answers, nowhere)
    interval = bootstrap_interval(
        result.statistic, part, confidence=confidence, resamples=resamples, seed=seed
    )
    if row.kind == "math":
        theirs = np.array([_as_theirs(*pair) for pair in zip(asked, answers, strict=True)])
        of_parts = _scores(row, gold, theirs, part).values()
        result = replace(result, as_read_by_llm_adapters=float(np.mean([s["accuracy"] for s in of_parts])))
    return replace(result, interval=interval)


def evaluate_suite(
    model: torch.nn.Module, tokenizer: Any, records: Sequence[Record], **options: Any
) -> dict[str, TaskResult]:
    """The result of each task of a mixture, by the column ``task`` of its records. options: of ``evaluate_task``.

    Raises what ``evaluate_task`` does.
    """
    return {
        name: evaluate_task(model, tokenizer, name, of_task, **options)
        for name, of_task in by_task(records).items()
    }


def compare_results(
    first: TaskResult,
    second: TaskResult,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Difference:
    """How much better ``first`` is than ``second`` on the same records. Raises ConfigError if they differ."""
    if first.task != second.task or not np.array_equal(first.gold, second.gold):
        raise ConfigError("the results are of different records", fix="evaluate both models on the same file")
    return paired_difference(
        first.statistic,
        second.statistic,
        first.part,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def _plain(values: list[float]) -> list[float | None]:
    """None for NaN, which JSON does not have."""
    return [None if value != value else value for value in values]


def _asked(
    task: Task, records: Sequence[Record] | Mapping[str, Sequence[Record]], limit: int | None
) -> tuple[list[Question], np.ndarray]:
    given = records if isinstance(records, Mapping) else {"": records}
    asked: list[Question] = []
    parts: list[str] = []
    for name, rows in given.items():
        if not rows:
            raise DataError("there are no records to evaluate on", fix="check the file and its split")
        found = questions(task, rows[:limit])
        asked += found
        parts += [name or (question.source or "") for question in found]
    if not asked:
        raise DataError("there are no records to evaluate on", fix="check the file and its split")
    return asked, np.array(parts)


def _number(question: Question, number: int) -> float:
    gold = question.gold
    if gold is None:
        raise RecordError(
            number,
            "has no column 'answer'",
            fix="give the right answers to evaluate on these records",
        )
    return float("ABCDE".index(gold)) if isinstance(gold, str) else float(gold)


def _room(model: Any, max_length: int, reserved: int, following: int) -> int:
    """Most tokens of a prompt: ``reserved`` within max_length (as in training), ``following`` within the context."""
    context = getattr(model.config, "max_position_embeddings", None)
    room = min(max_length - reserved, (context or max_length + following) - following)
    if room < 2:
        raise ConfigError(
            f"max_length={max_length} and the model's context ({context}) leave no room for a prompt",
            fix="raise max_length, or lower max_new_tokens",
        )
    return room


def _most_probable(task: Task, log_p: np.ndarray) -> np.ndarray:
    """(n,): the most probable label; of scores, the mean of the distribution over the grid."""
    if task.kind == "label":
        return log_p.argmax(axis=1).astype(np.float64)
    p = np.exp(log_p - log_p.max(axis=1, keepdims=True))
    grid = SCORE_STEP * np.arange(log_p.shape[1])
    return (p @ grid) / p.sum(axis=1)


def _read(task: Task, question: Question, answer: str) -> float | None:
    if task.kind == "label":
        return read_label(answer, task.labels)
    if task.kind == "score":
        return read_score(answer)
    if isinstance(question.gold, str):
        letter = read_letter(answer)
        return None if letter is None else "ABCDE".index(letter)
    return read_number(answer)


def _as_theirs(question: Question, answer: str) -> float:
    """NaN where nothing can be read."""
    found = as_llm_adapters(answer, letter=isinstance(question.gold, str))
    if isinstance(found, str):
        return float("ABCDE".index(found))
    return float("nan") if found is None else found


def _scores(
    task: Task, gold: np.ndarray, predicted: np.ndarray, part: np.ndarray
) -> dict[str, dict[str, float]]:
    if task.kind != "math":  # NaN is wrong for math's accuracy as it is
        predicted = worst_for(gold, predicted, classes=len(task.labels), top=5.0)
    metrics: list[tuple[str, Callable[[np.ndarray, np.ndarray], float]]] = [
        (name, METRICS[name]) for name in task.metrics
    ]
    return {
        str(name): {metric: of(gold[part == name], predicted[part == name]) for metric, of in metrics}
        for name in np.unique(part)
    }
