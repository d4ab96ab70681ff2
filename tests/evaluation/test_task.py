"""evaluate_task: official scores of planted answers, parts, what is unreadable, and the same result in any batch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from privlora.data.records import load_records
from privlora.data.tasks import TASKS, questions
from privlora.errors import ConfigError, DataError
from privlora.evaluation import compare_results, evaluate_suite, evaluate_task
from privlora.evaluation import task as task_module
from privlora.evaluation.answers import read_letter, read_number

TOKENIZER = tiny_tokenizer()
ASSETS = Path(os.environ.get("PRIVLORA_ASSETS") or Path(__file__).parents[3] / "shared") / "assets"


def pairs(labels: list[Any]) -> list[dict[str, Any]]:
    return [{"sentence1": f"first {i}", "sentence2": "other", "label": v} for i, v in enumerate(labels)]


def sums(answers: list[Any], **more: Any) -> list[dict[str, Any]]:
    return [
        {"instruction": f"what is {i}", "output": "x", "answer": a, **more} for i, a in enumerate(answers)
    ]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plants what the model generates."""

    def plant(answers: list[str]) -> None:
        given = iter(answers)
        monkeypatch.setattr(task_module, "_room", lambda *_: 64)  # nothing has to fit
        monkeypatch.setattr(
            task_module, "generate", lambda m, t, prompts, **_: [next(given) for _ in prompts]
        )

    return plant


def test_mrpc_by_hand(say: Any) -> None:
    say([" yes", " yes.", "No", "yes", "hm"])
    result = evaluate_task(tiny_model(), TOKENIZER, "mrpc", pairs([1, 1, 1, 0, 0]), scoring="generation")
    # The last one cannot be read and counts as yes: TP 2, FN 1, FP 2.
    assert result.predicted.tolist()[:4] == [1, 1, 0, 1]
    assert result.unparsable == 1
    assert result.parts() == {"": {"accuracy": 2 / 5, "f1": pytest.approx(4 / 7)}}
    assert result.metric == pytest.approx((2 / 5 + 4 / 7) / 2)
    assert result.correct.tolist() == [True, True, False, False, False]


def test_stsb_by_hand(say: Any) -> None:
    say([" 1.0", "2.4", "9", "none"])
    result = evaluate_task(tiny_model(), TOKENIZER, "stsb", pairs([1, 2, 4, 1]), scoring="generation")
    gold, counted = np.array([1.0, 2, 4, 1]), np.array([1.0, 2.4, 5, 5])
    ranks = np.corrcoef([1.5, 3, 4, 1.5], [1, 2, 3.5, 3.5])[0, 1]
    assert result.metric == pytest.approx((np.corrcoef(gold, counted)[0, 1] + ranks) / 2)
    assert result.unparsable == 1


def test_math_by_hand(say: Any) -> None:
    records = [*sums(["18", "1,200"], source="gsm8k"), *sums(["B", "A", "C", "E"], source="aqua")]
    say(["3 eggs. The answer is 18.", "None", "The answer is (B).", "a dog", "C", "The answer is D."])
    result = evaluate_task(tiny_model(), TOKENIZER, "math10k", records)
    assert result.to_dict()["as_read_by_llm_adapters"] == result.as_read_by_llm_adapters
    assert result.scoring == "generation"
    assert result.correct.tolist() == [True, False, True, False, True, False]
    assert result.unparsable == 2
    assert result.parts() == {"aqua": {"accuracy": 0.5}, "gsm8k": {"accuracy": 0.5}}
    assert result.metric == 0.5
    shown = result.to_dict()
    assert shown["parts"]["aqua"] == {"accuracy": 0.5, "examples": 4}
    assert "per_example" not in shown
    whole = result.to_dict(per_example=True)["per_example"]
    assert whole["answers"][0] == "3 eggs. The answer is 18."
    assert whole["predicted"] == [18, None, 1, None, 2, 3]
    json.dumps(result.to_dict(per_example=True), allow_nan=False)


def test_one_example_has_a_score_and_no_interval(say: Any) -> None:
    say(["yes"])
    shown = evaluate_task(tiny_model(), TOKENIZER, "qqp", pairs([1]), scoring="generation").to_dict()
    assert (shown["metric"], shown["interval"]) == (1, [None, None])
    json.dumps(shown, allow_nan=False)


def test_parts_weigh_the_same(say: Any) -> None:
    """MNLI: the mean of matched and mismatched."""
    rows = [{"premise": "a", "hypothesis": "b", "label": 0}]
    say(["yes"] * 3 + ["no"])
    parts = {"matched": rows * 3, "mismatched": rows}
    result = evaluate_task(tiny_model(), TOKENIZER, "mnli", parts, scoring="generation")
    assert result.metric == 0.5
    assert {name: part["accuracy"] for name, part in result.parts().items()} == {
        "matched": 1,
        "mismatched": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mrpc", "stsb"])
def test_likelihood_is_the_most_probable_completion(task: str) -> None:
    model, records = tiny_model(), pairs([0, 1, 1, 0, 1, 0])
    model.config.max_position_embeddings = 512  # rotary: nothing is cut
    result = evaluate_task(model, TOKENIZER, task, records)
    small = evaluate_task(model, TOKENIZER, task, records, max_tokens=1)
    np.testing.assert_allclose(result.predicted, small.predicted, atol=1e-5)
    assert result.scoring == "likelihood"
    answers = TASKS[task].answers
    for question, predicted in zip(questions(TASKS[task], records), result.predicted, strict=True):
        prompt = TOKENIZER(question.prompt)["input_ids"]
        log_p = []
        for answer in answers:
            ids = TOKENIZER(f" {answer}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
            log_p.append(sum(float(logits[len(prompt) - 1 + k, token]) for k, token in enumerate(ids)))
        if task == "mrpc":
            assert predicted == np.argmax(log_p)
        else:
            p = np.exp(np.array(log_p) - max(log_p))
            assert predicted == pytest.approx(
                float(p @ np.array([float(a) for a in answers]) / p.sum()), abs=1e-4
            )


def test_generation_end_to_end() -> None:
    model = tiny_model()
    model.config.max_position_embeddings = 512
    for task, records in (("mrpc", pairs([0, 1, 1])), ("math10k", sums(["1", "B", "3"]))):
        results = [
            evaluate_task(
                model, TOKENIZER, task, records, scoring="generation", max_new_tokens=6, max_tokens=tokens
            )
            for tokens in (1, 10**5)
        ]
        assert results[0].answers == results[1].answers
        assert len(results[0].answers) == 3
        assert not model.training


def test_long_prompts_keep_the_question() -> None:
    records = [{"sentence1": "x" * 500, "sentence2": "y", "label": 1}]
    result = evaluate_task(tiny_model("gpt2"), TOKENIZER, "mrpc", records)  # 64 positions
    assert len(result.predicted) == 1
    generated = evaluate_task(tiny_model("gpt2"), TOKENIZER, "mrpc", records, scoring="generation")
    assert len(generated.answers) == 1


def test_interval_and_paired_comparison(say: Any) -> None:
    gold = [i % 2 for i in range(60)]
    words = ["no", "yes"]
    say([words[g] for g in gold])
    perfect = evaluate_task(tiny_model(), TOKENIZER, "rte", pairs(gold), scoring="generation")
    assert perfect.metric == 0  # yes is entailment, GLUE's label 0
    say([words[1 - g] for g in gold[:50]] + [words[g] for g in gold[50:]])
    good = evaluate_task(tiny_model(), TOKENIZER, "rte", pairs(gold), scoring="generation")
    assert good.metric == pytest.approx(50 / 60)
    assert good.interval.low < 50 / 60 < good.interval.high
    found = compare_results(good, perfect)
    assert found.value == pytest.approx(50 / 60)
    assert found.interval.low > 0.6
    with pytest.raises(ConfigError, match="different records"):
        compare_results(good, evaluate_task(tiny_model(), TOKENIZER, "rte", pairs([0, 1])))


def test_limit_is_of_each_part() -> None:
    parts = {"a": pairs([0] * 5), "b": pairs([1] * 3)}
    result = evaluate_task(tiny_model(), TOKENIZER, "mrpc", parts, limit=2)
    assert result.part.tolist() == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("task", "records", "settings", "error", "expected"),
    [
        ("mnlii", pairs([1]), {}, ConfigError, "did you mean 'mnli'"),
        ("glue8", pairs([1]), {}, ConfigError, "use evaluate_suite"),
        ("mrpc", [], {}, DataError, "no records"),
        ("mrpc", {}, {}, DataError, "no records"),
        ("mrpc", {"a": pairs([1]), "b": []}, {}, DataError, "no records"),
        ("gsm8k", sums(["1"]), {"scoring": "likelihood"}, ConfigError, "no fixed set of answers"),
        ("mrpc", pairs([1]), {"scoring": "guessing"}, ConfigError, "likelihood or generation"),
        ("mrpc", pairs([1]), {"limit": 0}, ConfigError, "limit=0"),
        ("mrpc", pairs([1]), {"num_beams": 0}, ConfigError, "num_beams=0"),
        ("mrpc", pairs([1]), {"max_length": 5}, ConfigError, "leave no room"),
        ("gsm8k", sums(["1"]), {"max_new_tokens": 64}, ConfigError, "leave no room"),
        ("gsm8k", [{"instruction": "a", "output": "b"}], {}, DataError, "no column 'answer'"),
    ],
)
def test_refused(
    task: str, records: Any, settings: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        evaluate_task(tiny_model(), TOKENIZER, task, records, **settings)


def test_the_guide_names_every_task_and_its_code_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in TASKS)
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    records = [{"sentence": f"film {i}", "label": i % 2} for i in range(6)]
    given = {
        "model": tiny_model(),
        "other_model": tiny_model(seed=1),
        "tokenizer": TOKENIZER,
        "records": records,
    }
    for block in blocks:
        exec(compile(block, "evaluation.md", "exec"), given)


@pytest.mark.skipif(not ASSETS.exists(), reason="the optional data sets are absent (set PRIVLORA_ASSETS)")
@pytest.mark.parametrize("file", ["gsm8k_test", "mawps_test", "aqua_test", "train"])
def test_the_right_solutions_are_read_as_right(file: str) -> None:
    """Every published solution reads as its published answer."""
    records = load_records(str(ASSETS / "data" / "math" / f"{file}.jsonl.gz"))
    for question in questions(TASKS["math10k"], records):
        if isinstance(question.gold, str):
            assert read_letter(question.completion) == question.gold
        else:
            assert read_number(question.completion) == pytest.approx(question.gold, abs=1e-3)


def test_answers_as_llm_adapters_read_them(say: Any) -> None:
    """Of the first text they take another number, and of the second another sign."""
    say(["The answer is 18. He has 5 left.", "16-3", "1,234 apples", "none", "(B), not A"])
    records = [*sums([18, 3, 1234, 7]), *sums(["B"])]
    result = evaluate_task(tiny_model(), TOKENIZER, "math10k", records)
    assert result.metric == 4 / 5
    assert result.as_read_by_llm_adapters == 2 / 5


def test_a_suite_is_its_tasks() -> None:
    records = [{**record, "task": task} for task in ("rte", "mrpc") for record in pairs([0, 1, 1])]
    found = evaluate_suite(tiny_model(), TOKENIZER, records)
    assert list(found) == ["rte", "mrpc"]
    alone = evaluate_task(tiny_model(), TOKENIZER, "mrpc", pairs([0, 1, 1]))
    assert found["mrpc"].to_dict() == alone.to_dict()
    with pytest.raises(ConfigError, match="evaluate_suite"):
        evaluate_task(tiny_model(), TOKENIZER, "glue8", records)
