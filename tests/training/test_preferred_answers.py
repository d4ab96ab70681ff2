"""Preferences: the gradient of each pair of answers, what leaves when it leaves, a run, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_cases import CLIPPINGS, batch_of, check_gradients, logits_of, moves, spoiled
from promises import promise, small_settings
from tiny_models import VOCAB, everything_in_double, tiny_model, tiny_tokenizer

from privlora import fine_tune
from privlora.adapters import LowRankAdapter
from privlora.api import resume_run
from privlora.cli import main
from privlora.config import Settings
from privlora.coordinates import Coordinates
from privlora.data.batching import MicroBatch, micro_batches
from privlora.data.examples import IGNORED, Examples
from privlora.errors import ConfigError, DataError
from privlora.evaluation import evaluate_held_out, evaluate_preferences
from privlora.methods import METHODS, build
from privlora.training.gradients import micro_batch_gradients
from privlora.training.inputs import load_data, tokenise

RECORDS = [
    {"q": "ab", "good": "yes sir", "bad": "no"},
    {"q": "what is it", "good": "a", "bad": "nothing that you would know"},
    {"q": "", "good": "well", "bad": "ill"},
    {"q": "z", "good": "", "bad": "more words"},
    {"q": "same", "good": "same", "bad": "same"},
]
COLUMNS = {"prompt": "q", "chosen": "good", "rejected": "bad"}
BETA = 0.3


def settings_of(privacy: Mapping[str, Any] = {}, **groups: Mapping[str, Any]) -> Settings:
    own = promise(steps=2, batch=2, records=5, noise_multiplier=1.0, delta=1e-5)
    data = {"path": "x.jsonl", **COLUMNS, "dpo_beta": BETA, "max_length": 40, **groups.pop("data", {})}
    return small_settings(privacy=own | dict(privacy), data=data, **groups)


def examples_of(records: Sequence[Mapping[str, Any]] = RECORDS, **data: Any) -> Examples:
    return tokenise(list(records), settings_of(data=data).data, tiny_tokenizer())


def started(model: Any, method: str = "dp-adamw") -> tuple[LowRankAdapter, Coordinates]:
    """An adapter that has left the base model."""
    adapter = LowRankAdapter(model, rank=3)
    coordinates, _ = build(METHODS[method], adapter, dtype=next(model.parameters()).dtype)
    torch.manual_seed(1)
    for name, t in coordinates.state_dict().items():
        if name.endswith((".left", ".S")):
            t.copy_(0.3 * torch.rand_like(t))
    coordinates.install()
    return adapter, coordinates


def test_both_answers_follow_the_same_prompt() -> None:
    examples, tokenizer = examples_of(), tiny_tokenizer()
    assert len(examples) == len(RECORDS)
    for record, example in zip(RECORDS, examples, strict=True):
        for answer, found in (("good", example), ("bad", example.rejected)):
            labelled = found.labels != IGNORED
            assert tokenizer.decode(found.input_ids[labelled], skip_special_tokens=True) == record[answer]
            assert tokenizer.decode(found.input_ids[~labelled], skip_special_tokens=True) == record["q"]
    assert examples.lengths.tolist() == [max(len(e.input_ids), len(e.rejected.input_ids)) for e in examples]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_those_of_the_papers_loss(family: str) -> None:
    """Eq. 7 written down with dense weights and autograd, for pairs of several lengths in one micro-batch."""
    with everything_in_double():
        model = tiny_model(family, dtype=torch.float64)
        adapter, _ = started(model)

        def likelihoods(weights: Mapping[str, torch.Tensor], pair: MicroBatch) -> torch.Tensor:
            log_p = logits_of(model, weights, pair)[:, :-1].log_softmax(-1)
            labels = pair.labels[:, 1:]
            picked = log_p.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
            return (picked * (labels != IGNORED)).sum(-1)

        def loss_of(weights: dict[str, torch.Tensor], pair: MicroBatch) -> torch.Tensor:
            gain = likelihoods(weights, pair) - likelihoods({}, pair).detach()
            return -torch.nn.functional.logsigmoid(BETA * (gain[0] - gain[1]))

        captured, losses = check_gradients(model, adapter, examples_of(), loss_of)
    assert float(losses[4]) == pytest.approx(math.log(2))  # equal answers
    assert all(float(p[4].norm()) < 1e-9 for p in captured.p)


@pytest.mark.parametrize("method", ["prism", "dp-adamw", "ffa"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_preference_moves_the_sum_by_at_most_the_clip_norm(method: str, clipping: str) -> None:
    """Both of its answers together; one with a token that is not finite moves nothing, in either answer."""
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCAB - 1] = float("nan")
    adapter, coordinates = started(model, method)
    examples = examples_of([*RECORDS[:3], *({**r, "bad": 2 * r["good"]} for r in RECORDS[:3])])
    first, second = examples[0], examples[1]
    bad = [spoiled(first), replace(second, rejected=spoiled(second.rejected))]
    changes = moves(adapter, coordinates, clipping, examples.like([*examples, *bad]))
    assert max(changes) <= 1 + 1e-5
    assert max(changes[-2:]) < 1e-3
    assert max(changes) > 0.9


def test_company_and_cuts_change_nothing() -> None:
    """A pair stays together however a batch is cut, and its gradient is what it is alone."""
    with everything_in_double():
        adapter, _ = started(tiny_model(dtype=torch.float64))
        examples = examples_of()
        with adapter:
            alone = [micro_batch_gradients(adapter, batch_of(examples, [[k]]))[0] for k in range(5)]
            for most in (1, 60, 10_000):
                for batch in micro_batches(range(5), examples, max_tokens=most):
                    assert len(batch.input_ids) == 2 * batch.unit_count
                    assert batch.record_index[0::2].tolist() == batch.record_index[1::2].tolist()
                    captured, _ = micro_batch_gradients(adapter, batch)
                    for unit, record in enumerate(batch.record_index[0::2].tolist()):
                        assert all(
                            torch.allclose(p[unit], own[0], atol=1e-10)
                            for p, own in zip(captured.p, alone[record].p, strict=True)
                        )
                    each = [micro_batch_gradients(adapter, unit)[0] for unit in batch.each_unit()]
                    assert len(each) == batch.unit_count


def test_a_users_gradient_is_the_mean_of_its_preferences() -> None:
    with everything_in_double():
        adapter, _ = started(tiny_model(dtype=torch.float64))
        examples = examples_of()
        with adapter:
            each, losses = micro_batch_gradients(adapter, batch_of(examples, [[0], [1], [2]]))
            both, loss = micro_batch_gradients(adapter, batch_of(examples, [[0, 1, 2]]))
    assert torch.allclose(loss[0], losses.mean())
    assert torch.allclose(both.p[0][0], each.p[0].mean(dim=0), atol=1e-10)
    who = settings_of({"unit": "user", "user_column": "who", "max_records_per_user": 3})
    assert who.rows_of_a_unit == 6
    assert settings_of().rows_of_a_unit == 2
    records = [{**record, "who": "a" if k else "b"} for k, record in enumerate(RECORDS)]
    two = who.privacy.model_copy(update={"public_dataset_size": 2})
    data = load_data(who.model_copy(update={"privacy": two}), tiny_tokenizer(), records)
    assert sorted(len(unit) for unit in data.units) == [1, 4]


def test_the_reference_is_the_base_model() -> None:
    """Also while the adapter is in; and it is the adapter's model again afterwards, whatever happens inside."""
    model = tiny_model()
    ids = torch.arange(3, 9)[None]
    base = model(input_ids=ids).logits
    adapter, _ = started(model)
    with adapter:
        moved = model(input_ids=ids).logits
        with adapter.without_terms():
            inside = model(input_ids=ids).logits
        with pytest.raises(ValueError, match="stop"), adapter.without_terms():
            raise ValueError("stop")
        again = model(input_ids=ids).logits
    assert torch.equal(inside, base)
    assert not inside.requires_grad
    assert torch.equal(moved, again)
    assert not torch.allclose(moved, base)


def test_the_rejected_answer_is_a_part_of_a_record() -> None:
    first, second = examples_of(), examples_of([{**RECORDS[0], "bad": "nor"}, *RECORDS[1:]])
    differ = [a.digest != b.digest for a, b in zip(first, second, strict=True)]
    assert differ == [True, False, False, False, False]
    assert first.largest_id == max(int(max(e.input_ids.max(), e.rejected.input_ids.max())) for e in first)
    assert [e.digest for e in first[1:3]] == [first[1].digest, first[2].digest]


def test_cut_and_empty_answers_are_counted() -> None:
    examples = examples_of(max_length=12)
    assert (examples.dropped > 0).tolist() == [False, True, False, True, False]
    assert examples.blank.tolist() == [False, False, False, True, False]


def test_chats_are_rendered_with_both_answers() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }} {% endfor %}"

    def chat(answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]

    data = settings_of(data={"prompt": None}).data
    (example,) = tokenise([{"good": chat("yes"), "bad": chat("no")}], data, tokenizer)
    assert tokenizer.decode(example.input_ids).endswith("uhi ayes </s>")
    assert tokenizer.decode(example.rejected.input_ids).endswith("uhi ano </s>")
    assert (example.rejected.labels != IGNORED).sum() < len(example.rejected.labels)


def test_held_out_preferences_are_measured_against_the_reference() -> None:
    examples = examples_of(RECORDS[:3])
    model = tiny_model()
    adapter, _ = started(model)
    with adapter:
        found = evaluate_held_out(model, examples, adapter.without_terms).to_dict()
        small = evaluate_preferences(model, examples, adapter.without_terms, max_tokens=1).to_dict()
        _, losses = micro_batch_gradients(adapter, batch_of(examples, [[0], [1], [2]]))
    assert found == pytest.approx(small, rel=1e-5)
    assert found["loss_per_example"] == pytest.approx(float(losses.mean()), rel=1e-5)
    untouched = evaluate_preferences(tiny_model(), examples, adapter.without_terms).to_dict()
    assert untouched["loss_per_example"] == pytest.approx(math.log(2))
    assert untouched["accuracy"] == 0.5
    with pytest.raises(DataError, match="no preference to evaluate"):
        evaluate_preferences(model, examples[:0], adapter.without_terms)


def run(folder: Path, **more: Any) -> Any:
    privacy = {"noise_multiplier": 0.6, "delta": 1e-3, "steps": 4, "expected_batch_size": 10}
    options: dict[str, Any] = {
        "privacy": {**privacy, "public_dataset_size": 40},
        "data": {**COLUMNS, "max_length": 40},
        "adapter": {"r": 3},
        "output": folder / "run",
        "tokenizer": tiny_tokenizer(),
    }
    records = [{**RECORDS[k % 3], "q": f"{RECORDS[k % 3]['q']} {k}"} for k in range(40)]
    return fine_tune(more.pop("model", None) or tiny_model(), records, **(options | more))


ROWS = [
    name for name, row in METHODS.items() if not (row.public_texts or row.coordinates.dense) and row.private
]
ONE_A_SPACE = {METHODS[name].space: name for name in reversed(ROWS)}.values()


@pytest.mark.parametrize(
    "method", [name if name in ONE_A_SPACE else pytest.param(name, marks=pytest.mark.long) for name in ROWS]
)
def test_every_row_of_low_rank_without_public_texts_learns_preferences(method: str, tmp_path: Path) -> None:
    """As docs/preferences.md says; dp-zo, which takes no gradients, is one of them."""
    found = run(tmp_path / "run", method=method)
    assert found.report["preferences"]["loss"] == "dpo"
    assert found.report["statement"]["steps_charged"] == 4
    assert "dp-zo" in ROWS


def test_a_run_of_preferences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped and resumed; its report, its card, and its adapter in `privlora evaluate`."""
    from privlora.training.loop import Interrupted

    def stop(event: Any) -> None:
        if event.step == 2:
            event.stop()

    held_out = [{"q": "other", "good": "fine", "bad": "not so"}, {"q": "last", "good": "this", "bad": "that"}]
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    given = {"evaluation": held_out, "run": {"checkpoint_every": 1, "evaluate_every": 2}}
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run(tmp_path, model=str(tmp_path / "base"), tokenizer=None, callbacks=[stop], **given)
    records = [{**RECORDS[k % 3], "q": f"{RECORDS[k % 3]['q']} {k}"} for k in range(40)]
    result = resume_run(tmp_path / "run", records=records, evaluation=held_out)
    assert result.steps == 4
    report = json.loads((result.release / "privacy_report.json").read_text())
    assert report["preferences"] == {"loss": "dpo", "beta": 0.1}
    first, last = report["evaluation"][0], report["evaluation"][-1]
    assert first["loss_per_example"] == pytest.approx(math.log(2))
    assert {"accuracy", "reward_margin"} <= set(last)
    shown = tmp_path / "held_out.jsonl"
    shown.write_text("\n".join(map(json.dumps, held_out)))
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(shown), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["loss_per_example"] == pytest.approx(last["loss_per_example"], rel=1e-4)
    assert measured["accuracy"] == last["accuracy"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"chosen": "c", "prompt": "p"}, "name the column rejected"),
    ({"rejected": "c", "prompt": "p"}, "name the column chosen"),
    ({"chosen": "c", "rejected": "c", "prompt": "p"}, "the same column"),
    ({"chosen": "c", "rejected": "r", "text": "t"}, "another form of records"),
    ({"chosen": "c", "rejected": "r", "prompt": "p", "completion": "t"}, "another form of records"),
    ({"chosen": "c", "rejected": "r", "messages": "m"}, "another form of records"),
    ({"chosen": "c", "rejected": "r", "task": "sst2"}, "another form of records"),
    ({"chosen": "c", "rejected": "r", "text": "t", "label": "l", "labels": 2}, "another form of records"),
    ({"chosen": "c", "rejected": "r", "prompt": "p", "loss_on": "all"}, "about answers alone"),
    ({"chosen": "c", "rejected": "r", "prompt": "p", "chunk": True}, "chunk divides whole texts"),
    ({"text": "t", "dpo_beta": 0.2}, "read with chosen and rejected only"),
    (
        {
            **{"chosen": "c", "rejected": "r", "prompt": "p", "template": "none"},
            "chat_template": "{{ messages }}",
        },
        "read for chats",
    ),
]


@pytest.mark.parametrize(("data", "words"), WRONG)
def test_settings_that_do_not_go_together(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small_settings(data={"path": "x.jsonl", **data})


@pytest.mark.parametrize(
    "more",
    [
        {"method": "projected"},
        {"method": "pe-sgd"},
        {"loading": {"dropout": True}},
        {"loading": {"fully_shard": True}},
    ],
)
def test_what_preferences_do_not_go_with(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not go with data\.chosen"):
        run(tmp_path, **more)
    assert not (tmp_path / "run").exists()


def test_what_knows_no_preferences_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="asks for preferences"):
        settings_of().refuse_labels("an audit")
    with pytest.raises(ConfigError, match="federation"):
        settings_of(federation={"clients": 2, "rounds": 2})
