"""The pretraining script on a few texts: what it makes loads as promised, is reproducible, and learns."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from demo_model import batches, encode, loss_sum, main, mean_loss, new_model, train, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from privlora.demo.corpus import public_texts


def test_batches_hold_every_row_once_and_rows_of_similar_length() -> None:
    rows = [[index] * (1 + index % 40) for index in range(1000)]
    found = list(batches(rows, 16, random.Random(0)))
    assert sorted(row[0] for batch in found for row in batch) == list(range(1000))
    assert max(map(len, found)) == 16
    padding = sum(len(batch) * max(map(len, batch)) - sum(map(len, batch)) for batch in found)
    assert padding < 0.1 * sum(map(len, rows))


def test_mean_loss_ignores_padding() -> None:
    tokenizer = train_tokenizer(public_texts(300, 0))
    torch.manual_seed(0)
    model = new_model(tokenizer).eval()
    rows = sorted(encode(tokenizer, public_texts(8, 1)), key=len)
    alone = [loss_sum(model, [row]) for row in rows]
    expected = sum(float(total.detach()) for total, _ in alone) / sum(count for _, count in alone)
    assert len(rows[0]) < len(rows[-1])
    assert mean_loss(model, rows, batch_size=8) == pytest.approx(expected, rel=1e-5)


def test_training_learns_and_is_reproducible() -> None:
    texts = public_texts(160, 0)
    tokenizer = train_tokenizer(texts)
    rows = encode(tokenizer, texts)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = new_model(tokenizer)
        before = mean_loss(model, rows[:32])
        train(model, rows, batch_size=16)
        losses.append(mean_loss(model, rows[:32]))
    assert losses[0] < before - 0.5
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.long
def test_the_script_writes_a_folder_that_transformers_loads_as_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain", str(tmp_path / "model"), "--texts", "128"])
    main()
    assert "held-out private notes" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for dtype in ("auto", torch.float32):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).dtype == torch.float32
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")("x")["input_ids"]) == 2  # <s> and the letter
