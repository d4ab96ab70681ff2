"""GLUE and math word problems as prompts and completions: one form, for training and for evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from privlora.data.labels import number_of
from privlora.data.records import missing_column, text_of
from privlora.errors import ConfigError, DataError, RecordError, named, nearest

Scoring = Literal["likelihood", "generation"]
SCORE_STEP = 0.2
"""STS-B's scores are trained on and scored in steps of a fifth (Raffel et al. 2020, section 2.4)."""

_RESPONSE = "Write a response that appropriately completes the request.\n\n"
_ORDER = "### Instruction:\n{instruction}\n\n"
_INSTRUCTION = f"Below is an instruction that describes a task. {_RESPONSE}{_ORDER}### Response:\n"
_INSTRUCTION_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    f"{_RESPONSE}{_ORDER}### Input:\n{{input}}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Task:
    """What is asked, and how the answers are counted.

    kind: ``label`` has a fixed set of answers, ``score`` is a number from 0 to 5, ``math`` a number or a letter after
    a rationale; ``mixture`` takes each record's task from its column ``task``.
    columns: names of the texts that the prompt shows, in the order of preference. labels: the words that the model
    answers with, and names: what the data sets call them, both by GLUE's number. metrics: the score is their mean.
    """

    name: str
    kind: Literal["label", "score", "math", "mixture"]
    metrics: tuple[str, ...] = ("accuracy",)
    columns: tuple[tuple[str, ...], ...] = ()
    labels: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """With a {number} for each text."""
        return f"{_ASKED[self.name]}\nAnswer:"

    @property
    def answers(self) -> tuple[str, ...]:
        """Every answer of a ``label`` or ``score`` task; none for ``math``."""
        if self.kind == "score":
            return tuple(f"{step * SCORE_STEP:.1f}" for step in range(round(5 / SCORE_STEP) + 1))
        return self.labels

    def completion(self, answer: str) -> str:
        """An answer as it follows the prompt. Labels are words of a running text, so a blank comes first."""
        return answer if self.kind == "math" else f" {answer}"


@dataclass(frozen=True)
class Question:
    """One record in the form in which a model is trained on it and asked."""

    prompt: str
    completion: str
    gold: int | float | str | None
    """The label's number, the score, the number or the letter (A to E); None if a math record does not tell."""
    source: str | None
    """Which data set of a mixture it is from, if the record says."""


_ASKED = {
    "sst2": "Sentence: {0}\nIs its sentiment negative or positive?",
    "cola": "Sentence: {0}\nIs it acceptable English, yes or no?",
    "mrpc": "First: {0}\nSecond: {1}\nDo both sentences mean the same, yes or no?",
    "stsb": "First: {0}\nSecond: {1}\nHow similar are they, from 0.0 (unrelated) to 5.0 (equal)?",
    "qqp": "First: {0}\nSecond: {1}\nDo both questions ask the same, yes or no?",
    "mnli": "Premise: {0}\nHypothesis: {1}\nDoes the hypothesis follow, yes, maybe or no?",
    "qnli": "Question: {0}\nSentence: {1}\nDoes the sentence answer the question, yes or no?",
    "rte": "Premise: {0}\nHypothesis: {1}\nDoes the hypothesis follow, yes or no?",
}
_ONE, _PAIR, _PREMISE = (("sentence",), ("sentence1",)), ("sentence1", "sentence2"), ("premise", "hypothesis")
_QUESTIONS = ("question1", "question2")
_SENTIMENT, _NO_YES = ("negative", "positive"), ("no", "yes")
_ENTAILMENT = ("entailment", "not_entailment")
_F1 = ("accuracy", "f1")

_TASKS = (
    Task("sst2", "label", columns=(*_ONE, ("text",)), labels=_SENTIMENT, names=_SENTIMENT),
    Task("cola", "label", ("matthews_correlation",), _ONE, _NO_YES, ("unacceptable", "acceptable")),
    Task("mrpc", "label", _F1, (_PAIR,), _NO_YES, ("not_equivalent", "equivalent")),
    Task("stsb", "score", ("pearson", "spearman"), (_PAIR,)),
    Task("qqp", "label", _F1, (_QUESTIONS, _PAIR), _NO_YES, ("not_duplicate", "duplicate")),
    Task(
        *("mnli", "label", ("accuracy",), (_PREMISE, _PAIR), ("yes", "maybe", "no")),
        names=("entailment", "neutral", "contradiction"),
    ),
    Task("qnli", "label", columns=(("question", "sentence"), _PAIR), labels=("yes", "no"), names=_ENTAILMENT),
    Task("rte", "label", columns=(_PAIR, _PREMISE), labels=("yes", "no"), names=_ENTAILMENT),
    Task("glue8", "mixture"),
    *(Task(name, "math") for name in ("math10k", "gsm8k", "aqua", "mawps", "svamp")),
)

TASKS: dict[str, Task] = {task.name: task for task in _TASKS}


def find_task(name: str) -> Task:
    """A row of TASKS. Raises ConfigError with the nearest name."""
    if name in TASKS:
        return TASKS[name]
    raise ConfigError(f"unknown task {named(name)}", fix=nearest(name, TASKS))


def scoring_of(task: Task, wanted: str | None) -> Scoring:
    """How the task is scored. wanted: None takes likelihood where it is possible. Raises ConfigError."""
    if wanted is None:
        return "generation" if task.kind == "math" else "likelihood"
    if wanted not in get_args(Scoring):
        raise ConfigError(f"scoring={wanted!r} is unknown", fix="use likelihood or generation")
    if wanted == "likelihood" and task.kind == "math":
        what = f"task {task.name} has no fixed set of answers to compare"
        raise ConfigError(what, fix="use scoring=generation")
    return cast(Scoring, wanted)


def questions(task: Task, records: Sequence[Mapping[str, Any]]) -> list[Question]:
    """The records in the task's form.

    GLUE: the columns of the hub's data sets (``sentence``, ``question1`` and ``question2``, ``premise`` and
    ``hypothesis``, …) or ``sentence1`` and ``sentence2``, and ``label`` as a number (also as text) or as a name; or
    ``instruction``, ``input``, and the label's name in ``output``; ``glue8`` also wants ``task``.
    Math: ``instruction``, ``input``, ``output``, ``answer`` (LLM-Adapters), or the hub's columns of GSM8K, AQuA and
    SVAMP.

    Raises:
        DataError: a column is missing, or a label, score or answer is none (record contents are not shown).
    """
    return [_question(task, record, number) for number, record in enumerate(records, start=1)]


def by_task(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The records of a mixture by their column ``task``, in the order in which tasks come first. Raises DataError."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for number, record in enumerate(records, start=1):
        found.setdefault(_task_of(record, number), []).append(record)
    return found


def task_record(task: Task, record: Mapping[str, Any], number: int) -> dict[str, str]:
    """Record ``number`` (from 1) with the columns ``prompt`` and ``completion``, for ``build_examples``.

    Raises what `questions` does.
    """
    question = _question(task, record, number)
    return {"prompt": question.prompt, "completion": question.completion}


def labelled_record(task: Task, record: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Record ``number`` (from 1) as a classifier reads it: ``text``, ``text_pair`` of pairs, and ``label``, a number.

    task: of GLUE, with the data set's own columns. Raises DataError.
    """
    texts = _texts(task, record, number)
    if texts is None:
        raise _no_text(task, record, number)
    found = (_score if task.kind == "score" else _label)(task, record, "label", number)
    return {**dict(zip(("text", "text_pair"), texts, strict=False)), "label": found}


def _texts(task: Task, record: Mapping[str, Any], number: int) -> list[str] | None:
    """The texts that the prompt shows; None where the record has not all columns."""
    chosen = next((names for names in task.columns if all(name in record for name in names)), None)
    return None if chosen is None else [text_of(record, name, number) for name in chosen]


def _no_text(task: Task, record: Mapping[str, Any], number: int) -> DataError:
    return missing_column(next(name for name in task.columns[0] if name not in record), record, number)


def _question(task: Task, record: Mapping[str, Any], number: int) -> Question:
    if task.kind == "math":
        return _math(record, number)
    if task.kind != "mixture":
        return _glue(task, record, number)
    return _glue(TASKS[_task_of(record, number)], record, number)


def _task_of(record: Mapping[str, Any], number: int) -> str:
    name = text_of(record, "task", number)
    known = [each.name for each in _TASKS if each.kind in ("label", "score")]
    if name not in known:
        fix = f"give one of {', '.join(known)}"
        raise RecordError(number, "column 'task' names no task of GLUE", fix=fix)
    return name


def _glue(task: Task, record: Mapping[str, Any], number: int) -> Question:
    texts = _texts(task, record, number)
    if texts is None and "instruction" not in record:
        raise _no_text(task, record, number)
    prompt = _instruction(record, number) if texts is None else task.prompt.format(*texts)
    column = "output" if texts is None and "label" not in record else "label"
    if task.kind == "score":
        score = _score(task, record, column, number)
        return Question(prompt, task.completion(f"{round(score / SCORE_STEP) * SCORE_STEP:.1f}"), score, None)
    label = _label(task, record, column, number)
    return Question(prompt, task.completion(task.labels[label]), label, None)


def _label(task: Task, record: Mapping[str, Any], column: str, number: int) -> int:
    value = _held(record, column, number)
    named = {name: i for i, name in enumerate(task.names)}
    numbers = {str(i): i for i in named.values()}
    words = {**dict(zip(task.labels, named.values(), strict=True)), **named, **numbers}
    key = value.strip().lower().rstrip(".") if isinstance(value, str) else ""
    if isinstance(value, int | float) and abs(value) < len(numbers) + 1:  # Python does not write all digits
        key = str(value)
    if isinstance(value, bool) or key not in words:
        unlabelled = " (-1 marks the unlabelled test splits of GLUE)" if key == "-1" else ""
        fix = f"give 0 to {len(task.names) - 1}, or one of {', '.join(task.names)}"
        what = f"column {column!r} holds no label of task {task.name}{unlabelled}"
        raise RecordError(number, what, fix=fix)
    stated = record.get("label_text")
    if stated in task.names and named[stated] != words[key]:
        fix = f"number them as GLUE does: {', '.join(f'{name} {i}' for name, i in named.items())}"
        raise RecordError(number, f"columns {column!r} and 'label_text' name different labels", fix=fix)
    return words[key]


def _held(record: Mapping[str, Any], column: str, number: int) -> Any:
    if column not in record:
        raise missing_column(column, record, number)
    return record[column]


def _score(_: Task, record: Mapping[str, Any], column: str, number: int) -> float:
    score = number_of(_held(record, column, number))
    if score is None or not 0 <= score <= 5:
        fix = "give a number from 0 to 5; STS-B's own"
        raise RecordError(number, f"column {column!r} holds no score", fix=fix)
    return score


def _instruction(record: Mapping[str, Any], number: int) -> str:
    """The prompt of LLM-Adapters (Hu et al. 2023), without its indentation."""
    instruction = text_of(record, "instruction", number)
    context = text_of(record, "input", number) if record.get("input") is not None else ""
    form = _INSTRUCTION_WITH_INPUT if context else _INSTRUCTION
    return form.format(instruction=instruction, input=context)


def _math(record: Mapping[str, Any], number: int) -> Question:
    if "instruction" in record:
        plain = dict(record)
    elif "options" in record:
        plain = _from_aqua(record, number)
    elif "Body" in record:
        body, question = (text_of(record, name, number).strip() for name in ("Body", "Question"))
        plain = {"instruction": f"{body} {question}", "answer": record.get("Answer")}
    elif "question" in record:
        plain = _from_gsm8k(record, number)
    else:
        raise missing_column("instruction", record, number)
    gold = _gold(plain.get("answer"), number)
    output = text_of(plain, "output", number).strip() if plain.get("output") is not None else ""
    if not output and gold is None:
        raise missing_column("output", record, number)
    source = record.get("source")
    source = source if isinstance(source, str) else None
    return Question(_instruction(plain, number), output or f"The answer is {plain['answer']}.", gold, source)


def _from_aqua(record: Mapping[str, Any], number: int) -> dict[str, str]:
    options = record["options"]
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise RecordError(number, "column 'options' is not a list of texts", fix='write ["A)21", …]')
    shown = ", ".join(re.sub(r"^\s*([A-E])\s*\)\s*", r"(\1) ", option) for option in options)
    correct = text_of(record, "correct", number)
    rationale = text_of(record, "rationale", number).strip() if "rationale" in record else ""
    return _worked(f"{text_of(record, 'question', number)} Answer Choices: {shown}", rationale, correct)


def _worked(instruction: str, rationale: str, answer: str) -> dict[str, str]:
    output = f"{rationale} The answer is {answer}.".strip()
    return {"instruction": instruction, "output": output, "answer": answer}


def _from_gsm8k(record: Mapping[str, Any], number: int) -> dict[str, str]:
    rationale, marker, answer = text_of(record, "answer", number).rpartition("####")
    if not marker:
        fix = "give GSM8K as published, or the columns instruction, output and answer"
        raise RecordError(number, "column 'answer' has no line '#### …' with the result", fix=fix)
    rationale = re.sub(r"<<[^>]*>>", "", rationale).strip()
    return _worked(text_of(record, "question", number), rationale, answer.strip())


def _gold(value: object, number: int) -> float | str | None:
    if value is None:
        return None
    text = str(value).strip()
    if re.fullmatch(r"[A-E]", text):
        return text
    result = None if isinstance(value, bool) else number_of(text.replace(",", ""))
    if result is None:
        what = "the answer is neither a number nor a letter from A to E"
        raise RecordError(number, what, fix="write it as 18, 1,234, 0.5 or B")
    return result
