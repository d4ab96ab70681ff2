"""What one step in the span of public gradients costs: passes through the model, linear algebra, memory, and a peer.

    python benchmarks/few_records/step_cost.py [--ranks 16 44] [--tokens 128] [--peer FOLDER]

A random Llama of 82 million parameters, LoRA on all linear layers, N = 200 public texts and 80 private records of
``tokens`` tokens, float32 on one thread. Each passes measure takes a part of the texts and records, all of which cost
alike, and is scaled up; the linear algebra is measured in full, on gradients of the full size. Peak memory is that of a
whole step on very short texts, over the public gradients themselves and over the same passes without them.

FOLDER: a checkout of github.com/LindaLydia/PE-SGD (Zou et al. 2026), of which per-sample gradients (GradSampleModule on
peft's layers, 4 records at a time) and opt_grad_combine run on the same model, texts and sizes: without its padding of
every text to 2048 tokens, and with it, which one record is measured for. Seconds are of CPU, so that other work on the
machine hardly counts.
Writes benchmarks/results/few_records/step_cost.json.
"""

from __future__ import annotations

import argparse
import ast
import copy
import ctypes
import gc
import json
import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from privlora.accounting.events import PoissonSampling, StepEvent
from privlora.adapters import Captured
from privlora.config import settings_from
from privlora.coordinates import PublicGradients
from privlora.coordinates.public_span import Span
from privlora.coordinates.span import lay, rows_of, units_beside
from privlora.data.batching import micro_batches
from privlora.data.examples import Example, Examples
from privlora.mechanisms import GaussianMechanism, NoiseSource
from privlora.mechanisms.charges import Uncharged
from privlora.training.assembly import build_parts
from privlora.training.gradients import micro_batch_gradients
from privlora.training.step import Step

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "few_records" / "step_cost.json"
TEXTS, UNITS, SHARE = 200, 80, 20  # passes are measured on a twentieth
REPEATS = 3
PADDED = 2048  # tokens to which its script pads every text
PHYSICAL = 4  # records of the peer's micro-batches, as its script has it
VOCABULARY = 4096


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).eval()


def texts(count: int, tokens: int, seed: int) -> Examples:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, VOCABULARY, size=tokens).astype(np.int32) for _ in range(count)]
    return Examples([Example(ids, ids.copy()) for ids in rows], pad_token_id=0)


def seconds(work: Callable[[], object]) -> float:
    """Of CPU, on the one thread."""
    start = time.process_time()
    work()
    return time.process_time() - start


def parts_of(model: Any, rank: int, public: Examples) -> Any:
    settings = settings_from(
        {
            "model": {"name": "random"},
            "data": {"path": "(in memory)"},
            "adapter": {"r": rank},
            "privacy": {
                "steps": 10,
                "expected_batch_size": 80,
                "public_dataset_size": 400,
                "noise_multiplier": 2.83,
                "delta": 1e-5,
            },
            "method": {"name": "pe-sgd"},
        },
        source="benchmark",
    )
    return build_parts(settings, model, texts=lambda _: public)


def step_of(parts: Any, private: Examples) -> Step:
    mechanism = GaussianMechanism(
        parts.coordinates,
        clip_norm=1.0,
        event=StepEvent(PoissonSampling(0.2), 2.83),
        expected_batch_size=80.0,
        ledger=Uncharged(),
        noise=NoiseSource(0),
        clipping="normalized",
    )
    return Step(state=parts, mechanism=mechanism, examples=private, learning_rate=1e-4)


def own_passes(rank: int, tokens: int) -> dict[str, float]:
    """Forward and backward passes alone, scaled up to the step."""
    model = llama()
    public, private = texts(TEXTS // SHARE, tokens, 0), texts(UNITS // SHARE, tokens, 1)
    parts = parts_of(model, rank, public)
    adapter = parts.coordinates.adapter

    def run(examples: Examples, *, as_public: bool) -> None:
        for batch in micro_batches(range(len(examples)), examples, max_tokens=4096, max_rows=12):
            micro_batch_gradients(adapter, batch, public=as_public)

    run(texts(2, tokens, 2), as_public=True)  # warms up
    spent = [
        (
            SHARE * seconds(lambda: run(public, as_public=True)),
            SHARE * seconds(lambda: run(private, as_public=False)),
            SHARE * seconds(lambda: run(private, as_public=True)),
        )
        for _ in range(REPEATS)
    ]
    adapter.detach()
    names = ("public", "private", "private_together")
    return dict(zip(names, np.median(spent, axis=0).tolist(), strict=True))


Timed = Callable[[str, float, Callable[[], Any]], Any]
"""Does the work, keeps what it took so many times under a name, and gives what came of it."""


def step_algebra(parts: Any, rows: Tensor, timed: Timed) -> None:
    """All that a step does beside passes, once, over public gradients that are kept in ``rows``."""
    space, adapter = parts.coordinates.inner, parts.coordinates.adapter
    rank = adapter.rank
    count = min(UNITS, units_beside(rows.shape[1], rows.nbytes, 1))  # that a step reads together
    some = Captured(
        [torch.randn(count, site.m, rank) for site in adapter.sites],
        [torch.randn(count, site.n, rank) for site in adapter.sites],
    )

    def put_in_place() -> None:
        for unit in range(count):
            lay(space, some, unit, rows[unit])

    timed("lay_out_public_gradients", TEXTS / count, put_in_place)
    kept = timed("round_and_gram_matrix", 1, lambda: PublicGradients(rows))
    span = timed("eigenvectors", 1, partial(Span, kept, ridge=1e-6, top_k=0))
    timed("columns", UNITS / count, partial(span.along, rows_of(space, some), -1.0))
    timed("decode", 1, partial(span.back, torch.randn(TEXTS), 0.0))


def own_algebra(rank: int) -> dict[str, float]:
    """On gradients of a step's sizes: medians of REPEATS, one after the other."""
    parts = parts_of(llama(), rank, texts(1, 8, 0))
    p = parts.coordinates.inner.entries()
    torch.manual_seed(1)
    rows = torch.randn(TEXTS, p)
    spent: dict[str, list[float]] = {}

    def timed(name: str, times: float, work: Callable[[], Any]) -> Any:
        made: list[Any] = []
        spent.setdefault(name, []).append(times * seconds(lambda: made.append(work())))
        return made[0]

    for _ in range(REPEATS):
        step_algebra(parts, rows, timed)
    parts.coordinates.adapter.detach()
    return {"parameters": p} | {name: float(np.median(each)) for name, each in spent.items()}


class Peak:
    """The largest resident memory of the process while it runs, in bytes over that at its beginning."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before = self.peak = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def more(self) -> int:
        return self.peak - self.before

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def own_memory(rank: int) -> dict[str, float]:
    """Of a whole step on texts of 8 tokens, whose activations are small."""
    model = llama()
    parts = parts_of(model, rank, texts(TEXTS, 8, 0))
    step = step_of(parts, texts(UNITS, 8, 1))
    with Peak() as peak:
        step.take(range(UNITS))
    kept = parts.coordinates.span.gradients.matrix.nbytes
    parts.coordinates.adapter.detach()
    return {"public_gradients_bytes": kept, "peak_bytes": peak.more, "peak_over_kept": peak.more / kept}


def peer_step(folder: Path, rank: int, tokens: int) -> dict[str, float]:
    """The peer's per-sample gradients, scaled up, and its combination of them in full."""
    from peft import LoraConfig, get_peft_model

    sys.path.insert(0, str(folder))
    from pesgd.grad_sample.grad_sample_module import GradSampleModule  # type: ignore[import-not-found]

    quiet = types.SimpleNamespace(info=logging.getLogger("peer").debug)
    names: dict[str, Any] = {"torch": torch, "copy": copy, "np": np, "gc": gc, "execution_logger": quiet}
    names["print"] = lambda *_: None
    for file, function in (
        ("pesgd/llm/sample_grad.py", "opt_grad_combine"),
        ("pesgd/llm/fine_tune/trainer.py", "per_sample_loss_function"),
    ):  # the modules around them import services that are not here
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        body: list[ast.stmt] = [
            n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function
        ][:1]
        exec(compile(ast.Module(body, []), file, "exec"), names)

    config = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    lora = get_peft_model(llama(), config)
    lora.enable_input_require_grads()
    model = GradSampleModule(lora).train()
    spent: dict[str, float] = {}

    def gather(model: Any, count: int, seed: int, width: int = 0) -> Tensor:
        examples = texts(count, tokens, seed)
        for batch in micro_batches(range(count), examples, max_tokens=PHYSICAL * tokens):
            batch = batch.widened(width)
            out = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)
            names["per_sample_loss_function"](batch.labels, out.logits, reduction="none").sum().backward()
            for param in model.parameters():
                param.grad = None
            gc.collect()
        pieces = []
        for _, param in model.named_parameters():
            found = getattr(param, "grad_sample", None)
            if found is None or not len(found):
                continue
            pieces.append((torch.concat(found) if isinstance(found, list) else found).flatten(start_dim=1))
            param.grad_sample = None
        return torch.cat(pieces, dim=1)

    gather(model, 4, 2)
    kept: list[Tensor] = []
    part = (TEXTS + UNITS) // SHARE
    each = [SHARE * seconds(lambda: kept.append(gather(model, part, 0))) for _ in range(REPEATS)]
    spent["passes"] = float(np.median(each))
    spent["passes_padded"] = (TEXTS + UNITS) * seconds(lambda: gather(model, 1, 0, width=PADDED))
    p = kept[0].shape[1]
    spent["parameters"] = p
    del lora
    model.to("meta")
    kept.clear()
    public, private = torch.randn(TEXTS, p), torch.randn(UNITS, p)
    spent["combination"] = seconds(lambda: names["opt_grad_combine"](public, private, noise_multiplier=2.83))
    spent["step"] = spent["passes"] + spent["combination"]
    spent["step_padded"] = spent["passes_padded"] + spent["combination"]
    return spent


def measured(rank: int, tokens: int, peer: Path | None) -> dict[str, Any]:
    passes, algebra = own_passes(rank, tokens), own_algebra(rank)
    spent = sum(v for name, v in algebra.items() if name != "parameters")
    through = passes["public"] + passes["private"]
    row: dict[str, Any] = {
        "rank": rank,
        "parameters": int(algebra.pop("parameters")),
        "passes_seconds": passes,
        "algebra_seconds": algebra,
        "algebra_over_passes": spent / through,
        "step_seconds": spent + through,
        "memory": own_memory(rank),
    }
    if peer is not None:
        print(json.dumps(row), flush=True)
        row["peer"] = peer_step(peer, rank, tokens)
        row["peer_over_own"] = row["peer"]["step"] / row["step_seconds"]
        row["padded_peer_over_own"] = row["peer"]["step_padded"] / row["step_seconds"]
    return row


def to_markdown(found: dict[str, Any]) -> list[str]:
    """The table of the page, a line a row."""
    lines = [
        "| p, millions | passes | linear algebra | share | 5% from | peak over G | the peer's step | padded |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        passes = row["passes_seconds"]["public"] + row["passes_seconds"]["private"]
        share = row["algebra_over_passes"]
        # Passes take time in proportion to the model's parameters.
        enough = found["model_parameters"] * share / 0.05 / 1e6
        lines.append(
            f"| {row['parameters'] / 1e6:.2f} | {passes:.0f} s | {share * passes:.1f} s | {100 * share:.1f}% "
            f"| {enough:.0f} million parameters | {row['memory']['peak_over_kept']:.2f} "
            f"| {row['peer_over_own']:.1f} times | {row['padded_peer_over_own']:.0f} times |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[11, 30])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for rank in given.ranks:
        rows.append(measured(rank, given.tokens, given.peer))
        print(json.dumps(rows[-1]), flush=True)
        found = {
            "texts": TEXTS,
            "units": UNITS,
            "tokens": given.tokens,
            "model_parameters": sum(t.numel() for t in llama().parameters()),
            "torch": torch.__version__,
            "seconds": "of CPU on one thread",
            "rows": rows,
        }
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.peer is not None:
        print("\n".join(to_markdown(found)))


if __name__ == "__main__":
    main()
