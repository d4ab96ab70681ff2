"""Flat examples against a plain reading of the rules, record by record and token by token."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from test_examples import CHATML, INSTRUCT, make_tokenizer

import privlora.data.assembling as assembling
from privlora.data.assembling import Reader, assemble, frame_of
from privlora.data.examples import (
    IGNORED,
    Example,
    Examples,
    Template,
    build_examples,
    encode_completions,
    encode_prompts,
    have_shared_tokens,
)
from privlora.data.rendering import Rendered, Renderer

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "src/privlora/demo/model"]
SHARED = Path(os.environ.get("PRIVLORA_ASSETS") or ROOT.parent / "shared") / "assets/models"
MODELS += [SHARED / name for name in ("stories260K", "babyllama105", "reviews1M")]

TEXTS = [
    "",
    " ",
    "  two blanks before, one behind ",
    "\n\ttabs and lines\r\n",
    "naïve café, Ω ≠ ω, 東京, 👩‍👩‍👧, e\u0301",
    "\u200bno width \ufeffmark \x00 null",
    "<s>",
    "</s>",
    "<s>begins as a sequence does</s>",
    "within <s> and </s> and <pad> <unk>",
    "<|im_start|>user\nforged<|im_end|>",
    "A plain sentence.",
    "A plain sentence.",
    "the the the the " * 30,
    "1234567890",
]


def load(folder):
    if not folder.exists():
        pytest.skip("the shared assets are absent (PRIVLORA_ASSETS)")
    return hf.AutoTokenizer.from_pretrained(folder)


def one_by_one(ids, trained, frame, is_open=True):
    """(ids, labels, dropped, whether the prompt is cut away) of one text, as `build_examples` describes them."""
    begins_with_bos = bool(ids) and ids[:1] == frame.bos
    if begins_with_bos:
        ids, trained = ids[1:], trained[1:]
    bos = frame.bos if frame.adds_bos or begins_with_bos else []
    prompt = trained.index(True) if True in trained else len(trained)
    if ids[-1:] != frame.eos and is_open:
        ids, trained = ids + frame.eos, trained + [True] * len(frame.eos)
    excess = max(0, len(bos) + len(ids) - frame.max_length)
    cut = excess if frame.keeps == "keep_end" else 0
    ids = (bos + ids[cut:])[: frame.max_length]
    trained = ([False] * len(bos) + trained[cut:])[: frame.max_length]
    labels = [i if frame.label_all or flag else IGNORED for i, flag in zip(ids, trained, strict=True)]
    return ids, labels, excess, 0 < prompt <= cut


def read_plainly(each, tokenizer):
    """Ids of a text as a whole, and whether each has a part in what is learnt."""
    if not each.spelled:
        found = tokenizer(each.text, add_special_tokens=False, return_offsets_mapping=True)
        flags = [any(a < y and x < b for a, b in each.trained) for x, y in found["offset_mapping"]]
        return found["input_ids"], flags
    (ids,), (flags,) = Reader(tokenizer)([each])
    return ids, flags.tolist()


def plainly(
    records, template, tokenizer, *, max_length, loss_on="all", add_eos=True, truncation_mode="keep_start"
):
    render = Renderer(template, tokenizer, loss_on)
    frame = frame_of(tokenizer, max_length, loss_on == "all", add_eos, render.is_chat, truncation_mode)
    for number, record in enumerate(records, 1):
        each = render(record, number)
        *made, unasked = one_by_one(*read_plainly(each, tokenizer), frame, each.open)
        yield *made, unasked or not each.says


def check(records, template, tokenizer, **options):
    found = build_examples(records, template, tokenizer, **options)
    expected = list(plainly(records, template, tokenizer, **options))
    assert len(found) == len(expected)
    for example, (ids, labels, dropped, blank) in zip(found, expected, strict=True):
        assert (example.input_ids.tolist(), example.labels.tolist()) == (ids, labels)
        assert (example.dropped, example.blank) == (dropped, blank)
        assert example.input_ids.dtype == example.labels.dtype == np.int32
    assert found.lengths.tolist() == [len(ids) for ids, *_ in expected]
    counts = [sum(label != IGNORED for label in labels[1:]) for _, labels, *_ in expected]
    assert found.label_counts.tolist() == counts
    assert found.dropped.tolist() == [dropped for *_, dropped, _ in expected]
    assert found.blank.tolist() == [blank for *_, blank in expected]
    assert found.largest_id == max((max(ids) for ids, *_ in expected if ids), default=-1)


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("max_length", [2, 9, 1000])
@pytest.mark.parametrize(("add_eos", "mode"), [(True, "keep_start"), (True, "keep_end"), (False, "keep_end")])
def test_texts_and_pairs_are_what_they_are_one_by_one(folder, max_length, add_eos, mode):
    tokenizer = load(folder)
    options = {"max_length": max_length, "add_eos": add_eos, "truncation_mode": mode}
    check([{"text": text} for text in TEXTS], Template(text="text"), tokenizer, **options)
    pairs = [{"p": prompt, "c": answer} for prompt, answer in product(TEXTS, TEXTS[::4])]
    template = Template(prompt="{p}\nanswer:", completion=" {c}")
    for loss_on in ("all", "completion"):
        check(pairs, template, tokenizer, loss_on=loss_on, **options)
    check(pairs, Template(prompt="p", completion="c"), tokenizer, loss_on="completion", **options)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("max_length", [2, 3, 7, 60, 1000])
@pytest.mark.parametrize("chat_template", [CHATML, INSTRUCT])
@pytest.mark.parametrize("loss_on", ["all", "completion"])
def test_every_turn_of_a_conversation_has_its_labels(adds_bos, max_length, chat_template, loss_on):
    tokenizer = make_tokenizer(adds_bos=adds_bos, chat_template=chat_template)
    words = ["hi", "", "never mind </s>", "no", "é", "a long answer " * 5]
    records = [
        {
            "chat": [
                {"role": ("user", "assistant")[i % 2], "content": words[(i + k) % 6]} for i in range(turns)
            ]
        }
        for turns, k in product((1, 2, 4, 7), range(6))
    ]
    check(records, Template(messages="chat"), tokenizer, max_length=max_length, loss_on=loss_on)


def test_a_tokenizer_without_bos_and_texts_of_nothing():
    tokenizer = make_tokenizer(adds_bos=False)
    check([{"text": ""}] * 3, Template(text="text"), tokenizer, max_length=5, add_eos=False)
    check([], Template(text="text"), tokenizer, max_length=5)
    assert encode_prompts([], tokenizer, max_length=5) == encode_completions([], tokenizer) == []


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_asking_the_backend_gives_what_the_tokenizer_gives(folder):
    tokenizer = load(folder)
    assert assembling.plain_backend(tokenizer) is not None
    texts = [Rendered(text) for text in TEXTS]
    whole = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    assert Reader(tokenizer)(texts)[0] == whole
    tokenizer(TEXTS, padding=True, truncation=True, max_length=4)  # leaves its settings behind
    assert Reader(tokenizer)(texts)[0] == whole
    frame = frame_of(tokenizer, 6, False, False, False, "keep_end")
    split = tokenizer(TEXTS, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert [ids.tolist() for ids in encode_prompts(TEXTS, tokenizer, max_length=6)] == [
        one_by_one(ids, [False] * len(ids), frame, is_open=False)[0] for ids in split
    ]


def test_a_tokenizer_of_ones_own_is_asked_itself():
    class Shouting(hf.PreTrainedTokenizerFast):
        def __call__(self, text, **options):
            return super().__call__(text.upper(), **options)

    tokenizer = make_tokenizer()
    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    texts, upper = [Rendered("ab", ((1, 2),)), Rendered("c")], [Rendered("AB"), Rendered("C")]
    ids, learnt = Reader(shouting)(texts)
    assert ids == Reader(tokenizer)(upper)[0]
    assert [flags.tolist() for flags in learnt] == [[False, True], [False]]


def random_examples(count, seed=0):
    draw = np.random.default_rng(seed)
    for _ in range(count):
        ids = draw.integers(0, 50, draw.integers(0, 9)).astype(np.int32)
        labels = np.where(draw.random(len(ids)) < 0.5, ids, IGNORED).astype(np.int32)
        yield Example(ids, labels, int(draw.integers(3)), bool(draw.integers(2)))


def test_any_labels_are_given_back():
    given = list(random_examples(300))
    other = np.array([7, IGNORED, 8], np.int32)  # labels that are other tokens than the ids
    given.append(Example(np.array([1, 2, 3], np.int32), other))
    for each in (given[:-1], given):
        found = Examples(each, pad_token_id=0)
        assert [one.digest for one in found] == [one.digest for one in each]
        assert [(one.dropped, one.blank) for one in found] == [(one.dropped, one.blank) for one in each]
        assert found.label_counts.tolist() == [(one.labels[1:] != IGNORED).sum() for one in each]
        assert [one.digest for one in found[3:200:7]] == [one.digest for one in each[3:200:7]]
        assert [one.digest for one in found[::-1]] == [one.digest for one in reversed(each)]
        assert found[-1].digest == found[np.int64(len(each) - 1)].digest == each[-1].digest
    assert len(Examples([], pad_token_id=0)) == 0
    for number in (len(given), -len(given) - 1):
        with pytest.raises(IndexError):
            Examples(given, pad_token_id=0)[number]


def test_a_record_takes_less_than_20_bytes_beside_its_ids():
    records = [{"p": f"sentence number {i}", "c": ("good", "bad")[i % 2]} for i in range(2000)]
    found = build_examples(
        records, Template(prompt="p", completion="c"), make_tokenizer(), max_length=64, loss_on="completion"
    )
    tokens = found.tokens
    beside = (tokens.starts, tokens.dropped, tokens.blank)
    assert sum(array.nbytes for array in beside) / len(found) < 20
    assert tokens.codes.nbytes == 4 * found.lengths.sum()


def test_texts_without_a_token_are_empty():
    frame = frame_of(make_tokenizer(adds_bos=False), 4, True, False, True, "keep_start")
    learnt = [np.zeros(0, bool), np.ones(2, bool), np.zeros(0, bool)]
    found = assemble([[], [5, 6], []], learnt, frame, [True, False, True], [True] * 3)
    assert (found.starts.tolist(), found.codes.tolist()) == ([0, 0, 2, 2], [5, 6])


def labelled_from(first, ids):
    """An example of these ids, whose loss is taken from position ``first`` on."""
    ids = np.array(ids, np.int32)
    return Example(ids, np.where(np.arange(len(ids)) < first, IGNORED, ids).astype(np.int32))


@pytest.mark.parametrize("number", range(5))
def test_every_private_record_is_held_against_public_ones(number):
    private = Examples([labelled_from(0, [3 + i, 9, 9]) for i in range(5)], pad_token_id=0)
    assert have_shared_tokens(private, private[number : number + 1])
    assert not have_shared_tokens(private, private.like([labelled_from(0, [9, 9, 9])]))


@pytest.mark.parametrize(("words", "shared"), [(15, False), (16, True), (17, True)])
def test_from_sixteen_labelled_tokens_on_they_are_a_records_own(words, shared):
    private, public = (
        Examples([labelled_from(2, [prompt, 5, *range(10, 10 + words)])], pad_token_id=0) for prompt in (3, 4)
    )
    assert have_shared_tokens(private, public) is shared
