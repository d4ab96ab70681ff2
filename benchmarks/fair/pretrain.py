"""The fair table's third model: a Llama of 15.8 million parameters, trained on the spot.

    python benchmarks/fair/pretrain.py --assets ASSETS --out study-data/models/corpus16M

ASSETS: data/pretrain_corpus/{train,validation}.parquet, 52 MB of fiction, film reviews and children's stories, and the
tokenizer of models/reviews1M (4,096 byte-level pieces). Documents end with </s> and are cut into windows of 256 tokens.
AdamW (0.9, 0.95), weight decay 0.1, batches of 128 windows, three passes, a rate of 2e-3 that rises for a twentieth of
the steps and falls to a tenth along a cosine, gradients cut at norm 1, bfloat16 where there is a GPU; weights are kept
in bfloat16. Two minutes on a GPU, a day on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

WINDOW, BATCH = 256, 128


def windows(file: Path, tokenizer: object) -> torch.Tensor:
    """(windows, WINDOW) int64."""
    texts = pq.read_table(file).column("text").to_pylist()
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    end = tokenizer.eos_token_id  # type: ignore[attr-defined]
    flat = np.concatenate([np.array([*each, end], np.int64) for each in ids])
    return torch.from_numpy(flat[: len(flat) // WINDOW * WINDOW].reshape(-1, WINDOW))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many, wherever the rate is")
    args = parser.parse_args()
    began = time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.assets / "models" / "reviews1M")
    corpus = args.assets / "data" / "pretrain_corpus"
    train, held = (
        windows(corpus / f"{name}.parquet", tokenizer).to(device) for name in ("train", "validation")
    )
    print(f"{train.numel():,} tokens in {time.time() - began:.0f} s", flush=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    steps = int(args.epochs * len(train) / BATCH)
    step, losses = 0, torch.zeros((), device=device)

    def loss_on(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return model(input_ids=rows, labels=rows).loss

    order = torch.randperm(len(train), device=device)
    for step in range(steps):
        at = step * BATCH % (len(train) // BATCH * BATCH)
        if at == 0:
            order = torch.randperm(len(train), device=device)
        warm = min(1.0, (step + 1) / (0.05 * steps))
        rate = 2e-3 * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_on(train[order[at : at + BATCH]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.3f}, {time.time() - began:.0f} s", flush=True)
            if time.time() - began > 60 * args.minutes:
                break
    model.eval()
    with torch.no_grad():
        losses = torch.stack([loss_on(held[i : i + 64]) for i in range(0, len(held), 64)]).mean()
    model.to(torch.bfloat16).save_pretrained(args.out, max_shard_size="14MB")
    tokenizer.save_pretrained(args.out)
    facts = {
        "parameters": model.num_parameters(),
        "tokens": train.numel(),
        "steps": step + 1,
        "validation_loss": round(float(losses), 4),
        "seconds": round(time.time() - began, 1),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    (args.out / "recipe.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
