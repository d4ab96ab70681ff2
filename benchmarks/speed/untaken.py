"""Two ways to a faster step that privlora does not take, measured: records packed into one row, compiled blocks.

    python benchmarks/speed/untaken.py --out benchmarks/results/untaken.json

Packed: forward and backward passes of a peft model over the same batches of real lengths, once in the padded
micro-batches that privlora cuts, once with records one behind the other in rows of 512 positions, each attending to
itself alone (a 4-D mask, positions that start anew). What packing could win at the most is the padding, which is told.
Compiled: privlora's whole PRISM step with and without torch.compile of each block of the frozen model, in default
settings for equal lengths and dynamic=True for real ones; the first steps, which compile, are told by themselves.
Steps take turns in one process; ratios are medians within rounds, of CPU time on one thread. --smoke runs a tiny model.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_lengths import MAX_TOKENS, POOL, RESULTS, WARM, Case
from speed_steps import Privlora, Setting, Variant, build_records, peft_model
from speed_timing import save, time_rounds
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.data.batching import micro_batches
from privlora.data.examples import Examples
from privlora.training.footprint import row_tokens

from machine import describe_machine  # isort: skip - beside this folder; real_lengths has put it on the path

WIDTH = 512
PADDED, PACKED = "padded", "packed"
AS_IT_IS, COMPILED = "as it is", "compiled"


class Passes:
    """Forward and backward passes of one batch through the body of a peft model, without head and loss."""

    def __init__(self, setting: Setting, packed: bool) -> None:
        self.records = build_records(setting)
        self.model: Any = peft_model(setting)
        self.packed = packed
        adapter = LowRankAdapter(self.model.base_model.model, rank=setting.shape.rank)
        self.row_tokens = row_tokens(adapter)
        self.positions = self.tokens = 0

    def step(self, drawn: Sequence[int]) -> None:
        for given, used in self.batches(drawn):
            self.positions += used.numel()
            self.tokens += int(used.sum())
            states = self.model.base_model.model.model(**given).last_hidden_state
            (states.square() * used[..., None]).sum().backward()
        self.model.zero_grad(set_to_none=True)

    def batches(self, drawn: Sequence[int]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """What the model is given, and (rows, width) which positions are tokens."""
        if self.packed:
            yield from packed_batches(self.records, drawn)
            return
        for batch in micro_batches(drawn, self.records, max_tokens=MAX_TOKENS, row_tokens=self.row_tokens):
            used = batch.attention_mask.bool()
            yield {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}, used


def packed_batches(records: Examples, drawn: Sequence[int]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Records in rows of WIDTH positions, first fit, longest first; at most MAX_TOKENS positions at once."""
    rows: list[list[int]] = []
    for record in sorted(drawn, key=lambda record: -records.lengths[record]):
        length = records.lengths[record]
        fits = (row for row in rows if sum(records.lengths[r] for r in row) + length <= WIDTH)
        row = next(fits, None)
        if row is None:
            rows.append([record])
        else:
            row.append(record)
    at_once = MAX_TOKENS // WIDTH
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        width = max(int(sum(records.lengths[r] for r in row)) for row in some)
        ids = torch.zeros(len(some), width, dtype=torch.int64)
        places, owner = torch.zeros_like(ids), torch.full_like(ids, -1)
        for k, row in enumerate(some):
            at = 0
            for record in row:
                tokens = torch.from_numpy(records[record].input_ids.astype(np.int64))
                here = slice(at, at := at + len(tokens))
                ids[k, here], places[k, here] = tokens, torch.arange(len(tokens))
                owner[k, here] = record
        # Padding sees padding, so that no softmax is over nothing.
        seen = (owner[:, :, None] == owner[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)[:, None]
        yield {"input_ids": ids, "position_ids": places, "attention_mask": mask}, owner >= 0


def spoiled(passes: Passes, drawn: Sequence[int]) -> int:
    """Records beside the first whose states are not finite once the first one's embeddings are not."""
    model = passes.model.base_model.model.model
    records, bad = passes.records, drawn[0]
    lost = 0
    for given, used in passes.batches(drawn):
        with torch.no_grad():
            inputs = model.embed_tokens(given["input_ids"])
            here = _places(given["input_ids"], used, records[bad].input_ids)
            if here is None:
                continue
            inputs[here] = torch.nan
            rest = {name: t for name, t in given.items() if name != "input_ids"}
            found = model(inputs_embeds=inputs, **rest).last_hidden_state
        others = used.clone()
        others[here] = False
        lost += int((others & ~found.isfinite().all(dim=-1)).sum())
    return lost


def _places(ids: Tensor, used: Tensor, tokens: np.ndarray) -> tuple[int, slice] | None:
    """Where these tokens stand, one behind the other."""
    wanted = torch.from_numpy(tokens.astype(np.int64))
    for row in range(len(ids)):
        for at in range(ids.shape[1] - len(wanted) + 1):
            here = slice(at, at + len(wanted))
            if bool(used[row, here].all()) and torch.equal(ids[row, here], wanted):
                return row, here
    return None


def measure_packing(case: Case, setting: Setting, rounds: int) -> dict[str, Any]:
    variants = {PADDED: Passes(setting, False), PACKED: Passes(setting, True)}
    draws = np.random.default_rng(1)

    def draw() -> list[int]:
        return list(draws.choice(len(setting.lengths), case.batch, replace=False).tolist())

    drawn = draw()
    lost = {name: spoiled(passes, drawn) for name, passes in variants.items()}
    warm = range(min(WARM, case.batch))
    found = time_rounds(variants, draw, warm=warm, base=PADDED, seconds=0.0, rounds=rounds)
    for name, passes in variants.items():
        found["variants"][name]["padding"] = round(passes.positions / passes.tokens, 3)
        found["variants"][name]["tokens_spoiled_by_another_record"] = lost[name]
    return {"case": f"{PACKED}: {case.data} {case.batch}", "base": PADDED, **found}


def measure_compiling(case: Case, setting: Setting, rounds: int) -> dict[str, Any]:
    made = {name: Privlora(setting, "prism") for name in (AS_IT_IS, COMPILED)}
    for block in made[COMPILED].model.model.layers:
        block.compile(dynamic=None if case.data == "equal" else True)
    draws = np.random.default_rng(1)

    def draw() -> list[int]:
        return list(draws.choice(len(setting.lengths), case.batch, replace=False).tolist())

    started = time.perf_counter()
    drawn = draw()
    sums = []
    for each in made.values():
        each.private_step.accumulate(drawn)
        sums.append(torch.cat([t.flatten() for parts in each.mechanism.clipped_sum() for t in parts]))
        each.mechanism.discard()
    off = float((sums[0] - sums[1]).norm() / sums[0].norm())
    for _ in range(2):  # shapes that are new compile again
        made[COMPILED].step(draw())
    first = time.perf_counter() - started
    variants: dict[str, Variant] = dict(made)
    found = time_rounds(variants, draw, warm=drawn, base=AS_IT_IS, seconds=0.0, rounds=rounds)
    found["variants"][COMPILED] |= {"first_steps_s": round(first, 1), "clipped_sum_off": float(f"{off:.1e}")}
    return {"case": f"{COMPILED}: {case.data} {case.batch}", "base": AS_IT_IS, **found}


def markdown(result: dict[str, Any]) -> str:
    """The table of benchmarks/results/performance.md."""
    lines = ["| what | CPU time (quartiles) | also measured |", "|---|---|---|"]
    for row in result["cases"]:
        tried = next(name for name in row["variants"] if name != row["base"])
        found, base = row["variants"][tried], row["variants"][row["base"]]
        low, high = found["cpu"]["ratio_quartiles"]
        if tried == PACKED:
            lost = found["tokens_spoiled_by_another_record"], base["tokens_spoiled_by_another_record"]
            beside = (
                f"padding {base['padding']:.2f} -> {found['padding']:.2f}; tokens of others that one record's NaN "
                f"reaches: {lost[1]} -> {lost[0]}"
            )
        else:
            beside = f"first steps {found['first_steps_s']:.0f} s; sum off by {found['clipped_sum_off']:.0e}"
        lines.append(f"| {row['case']} | **{found['cpu']['ratio']:.2f}** ({low:.2f}-{high:.2f}) | {beside} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=(PACKED, COMPILED))
    parser.add_argument("--smoke", action="store_true", help="does everything run? A tiny model, one round")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.perf_counter()
    lengths = json.loads((RESULTS / "record_lengths.json").read_text(encoding="utf-8"))
    result: dict[str, Any] = {"machine": describe_machine(), "records": POOL, "cases": []}
    for data in ("SST-2", "GSM8K", "equal"):
        case = Case(data, 32 if data == "equal" else 64, "8k")
        if chosen.smoke:
            case = replace(case, batch=4)
        setting = case.setting(lengths, chosen.smoke)
        rounds = 1 if chosen.smoke else chosen.rounds
        if data != "equal" and chosen.only != COMPILED:
            result["cases"].append(measure_packing(case, setting, rounds))
        if data != "GSM8K" and chosen.only != PACKED:
            result["cases"].append(measure_compiling(case, setting, rounds))
        save(result, started, None if chosen.smoke else chosen.out)
    print(markdown(result))


if __name__ == "__main__":
    main()
