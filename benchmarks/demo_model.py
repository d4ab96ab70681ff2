"""Make the demo's embedded model from nothing but `public_texts`: python benchmarks/demo_model.py OUT

A byte-level BPE tokenizer with one token a digit, and a Llama of 1.4 million parameters: a quarter of an hour
on one CPU core. Weights are stored as float16 to halve the package, and load as float32.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from privlora.demo.corpus import private_records, public_texts

VOCABULARY = 1280
MAX_POSITIONS = 256
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
TRAIN_SEED, VALIDATION_SEED = 0, 1
HELD_OUT = 300


def train_tokenizer(texts: Sequence[str]) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` tokens. Digits never merge: a code has as many tokens as digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: hf.PreTrainedTokenizerFast) -> hf.LlamaForCausalLM:
    """An untrained Llama: 4 layers, width 160, tied embeddings, 1.4 million parameters."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=160,
            intermediate_size=416,
            num_hidden_layers=4,
            num_attention_heads=5,
            num_key_value_heads=5,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def encode(tokenizer: hf.PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, from BOS to EOS."""
    ids: list[list[int]] = tokenizer(list(texts))["input_ids"]
    return [[*row, tokenizer.eos_token_id] for row in ids]


def batches(rows: Sequence[list[int]], batch_size: int, rng: random.Random) -> Iterator[list[list[int]]]:
    """All rows in random order, in batches of similar length: sorted within windows of 32 batches."""
    order = rng.sample(range(len(rows)), len(rows))
    window = 32 * batch_size
    for start in range(0, len(order), window):
        near = sorted(order[start : start + window], key=lambda index: len(rows[index]))
        groups = [near[at : at + batch_size] for at in range(0, len(near), batch_size)]
        rng.shuffle(groups)
        for group in groups:
            yield [rows[index] for index in group]


def loss_sum(model: hf.LlamaForCausalLM, rows: Sequence[list[int]]) -> tuple[torch.Tensor, int]:
    """Sum of next-token losses in nats, and the number of predicted tokens, over right-padded `rows`."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])  # (rows, length)
    keep = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])  # (rows, length)
    logits = model(input_ids=ids, attention_mask=keep).logits[:, :-1]  # (rows, length - 1, vocabulary)
    targets = ids[:, 1:].masked_fill(keep[:, 1:] == 0, -100)
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, int(keep[:, 1:].sum())


@torch.no_grad()
def mean_loss(model: hf.LlamaForCausalLM, rows: Sequence[list[int]], batch_size: int = 64) -> float:
    """Mean next-token loss in nats per token."""
    parts = [loss_sum(model, rows[at : at + batch_size]) for at in range(0, len(rows), batch_size)]
    return sum(float(total) for total, _ in parts) / sum(count for _, count in parts)


def train(
    model: hf.LlamaForCausalLM, rows: Sequence[list[int]], *, batch_size: int = 64, peak_lr: float = 3e-3
) -> None:
    """One pass over `rows` by AdamW, 100 steps of warm-up and then a cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps, started = math.ceil(len(rows) / batch_size), time.monotonic()
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    for step, batch in enumerate(batches(rows, batch_size, random.Random(TRAIN_SEED)), start=1):
        total, count = loss_sum(model, batch)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            loss, seconds = float(total.detach()) / count, time.monotonic() - started
            print(f"step {step}/{steps}  loss {loss:.4f}  {seconds:.0f} s", flush=True)


def save(model: hf.LlamaForCausalLM, tokenizer: hf.PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights as float16 and a configuration that loads them as float32."""
    tokenizer.save_pretrained(out)
    model.half().save_pretrained(out)
    model.config.dtype = torch.float32
    model.config.save_pretrained(out)


def main() -> None:
    """Train the tokenizer and the model, save both, and print the saved model's losses."""
    parser = argparse.ArgumentParser(
        description="Pretrain the demo's embedded model on generated public texts."
    )
    parser.add_argument(
        "out", type=Path, help="folder to write: model.safetensors, config.json, tokenizer.json …"
    )
    parser.add_argument("--texts", type=int, default=110_000, help="number of public training texts")
    arguments = parser.parse_args()

    torch.manual_seed(TRAIN_SEED)
    texts = public_texts(arguments.texts, TRAIN_SEED)
    tokenizer = train_tokenizer(texts[:20_000])
    model = new_model(tokenizer)
    train(model, encode(tokenizer, texts))
    save(model, tokenizer, arguments.out)

    tokenizer = hf.AutoTokenizer.from_pretrained(arguments.out, trust_remote_code=False)
    model = hf.AutoModelForCausalLM.from_pretrained(arguments.out, trust_remote_code=False)
    notes = [record["text"] for record in private_records(HELD_OUT, VALIDATION_SEED)]
    public = public_texts(HELD_OUT, VALIDATION_SEED)
    for label, held_out in (("public texts", public), ("private notes", notes)):
        loss = mean_loss(model.eval(), encode(tokenizer, held_out))
        print(f"held-out {label}: {loss:.4f} nats per token")


if __name__ == "__main__":
    main()
