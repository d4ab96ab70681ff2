"""Where the gradients of public texts could lie, and how to do without them: what each way costs.

    python benchmarks/few_records/engines.py [--assets ASSETS] [--parts NAME ...] [--ranks 11 30] [--tokens 128]

Sizes, model and units of work are those of step_cost.py: a random Llama of 82 million parameters, LoRA on all linear
layers, N = 200 public texts and 80 private records, one thread. Passes are measured on a twentieth and scaled up.

places      The linear algebra of a step over public gradients in memory, in a file whose pages the system keeps, and in
            one whose pages are let go before each piece of work and written out after it, as on a machine without
            the memory. Seconds of CPU, and of waiting for this machine's disk, in which other work does not count.
backward    Decoding without public gradients: one backward pass of sum_i z_i loss_i, its seconds and its difference
            from G^T z.
groups      No public gradients kept: for each of g groups of layers all texts and units pass through the model, and
            gradients of that group alone are kept; backward passes end at its lowest layer.
sketches    Gram matrix and products from random projections of whole weight gradients (no adapter) to s numbers,
            decoded with the gradients themselves: P_out G P_in^T of each layer with Gaussian sides, and a Gaussian
            matrix on all entries. At a state after a warm start, with 300 batches and their noise worked out from inner
            products, as in cosine.py.
whole       Full fine-tuning with what there is: adapter.r = the layers' smaller side on all linear layers.

The last two are in engine_sketches.py, and need ASSETS. Adds to benchmarks/results/few_records/engines.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import step_cost
import torch
from engine_sketches import PAIRS, noise_multiplier, sketches, whole
from engine_tables import PLACES, to_markdown
from step_cost import ROOT, SHARE, TEXTS, UNITS
from torch import Tensor

from privlora.adapters import LowRankAdapter
from privlora.coordinates import FactorCoordinates
from privlora.coordinates.span import unit_vectors
from privlora.coordinates.starts import factor_start
from privlora.data.batching import micro_batches, sequential_batches
from privlora.data.examples import Examples
from privlora.training.gradients import micro_batch_gradients
from privlora.training.texts import public_gradients as places_module
from privlora.training.texts.public_gradients import public_gradients, room_for

RESULTS = ROOT / "benchmarks" / "results" / "few_records" / "engines.json"
GROUPS = (1, 2, 4)
_DONT_NEED = 4  # madvise


class Clocks:
    """What pieces of work take: seconds of CPU, seconds in which they wait for the disk, and bytes that they read."""

    def __init__(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self.spent: dict[str, list[tuple[float, float, float]]] = {}
        self._before, self._after = before, after

    def __call__(self, name: str, times: float, work: Callable[[], Any]) -> Any:
        self._before()
        read, waited, cpu = _bytes_read(), _waited(), time.process_time()
        made = work()
        self._after()
        spent = time.process_time() - cpu, _waited() - waited, _bytes_read() - read
        self.spent.setdefault(name, []).append((times * spent[0], times * spent[1], times * spent[2]))
        return made

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            work: dict(zip(("cpu", "waited", "bytes_read"), np.median(each, axis=0).tolist(), strict=True))
            for work, each in self.spent.items()
        }


def _waited() -> float:
    """Seconds in which this thread neither ran nor was in line for a processor, since some moment."""
    ran, in_line, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    return time.perf_counter() - (int(ran) + int(in_line)) / 1e9


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@contextmanager
def rows_in(place: str, entries: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Clocks]]:
    """(TEXTS, entries) where a run would put them if it had to, and clocks for work on them."""
    if place == "memory":
        yield torch.empty(TEXTS, entries, dtype=dtype), Clocks(lambda: None, lambda: None)
        return
    descriptors: list[int] = []
    make = tempfile.TemporaryFile

    def made(*given: Any, **more: Any) -> Any:
        file = make(*given, **more)
        descriptors.append(os.dup(file.fileno()))
        return file

    with (
        mock.patch.object(places_module, "free_bytes", return_value=0.0),
        mock.patch.object(tempfile, "TemporaryFile", made),
    ):
        rows = room_for(TEXTS, entries, dtype, torch.device("cpu"))
    (descriptor,) = descriptors

    def write_out() -> None:
        os.fsync(descriptor)

    def let_go() -> None:
        write_out()
        if ctypes.CDLL(None).madvise(
            ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(rows.nbytes), _DONT_NEED
        ):
            raise OSError("the pages of the mapping stay")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    try:
        kept = place == PLACES[1]
        yield rows, Clocks(*((lambda: None, lambda: None) if kept else (let_go, write_out)))
    finally:
        os.close(descriptor)


def places(rank: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """All linear algebra of a step, by where the public gradients lie."""
    parts = step_cost.parts_of(step_cost.llama(), rank, step_cost.texts(1, 8, 0))
    p = parts.coordinates.inner.entries()
    found: dict[str, Any] = {"rank": rank, "parameters": p, "dtype": str(dtype).removeprefix("torch.")}
    found |= {"bytes": TEXTS * p * dtype.itemsize, "repeats": repeats}
    found["places"] = {}
    for place in PLACES:
        with rows_in(place, p, dtype) as (rows, clocks):
            torch.manual_seed(1)
            drawn = torch.randn(p)
            for number, row in enumerate(rows):
                row.copy_(drawn.roll(number))
            for _ in range(repeats):
                step_cost.step_algebra(parts, rows, clocks)
        del rows
        works = clocks.medians()
        sums = {name: sum(work[name] for work in works.values()) for name in ("cpu", "waited", "bytes_read")}
        found["places"][place] = {"works": works, **sums}
        print(rank, dtype, place, sums, flush=True)
    parts.coordinates.adapter.detach()
    return found


class OtherLayers(LowRankAdapter):
    """Terms that compute, of which no gradient is kept, and above which alone backward passes come by."""

    def attach(self) -> LowRankAdapter:
        super().attach()
        self._anchor = torch.zeros(())
        return self

    def _keep(self, *_: Any) -> None:
        pass


def started(adapter: LowRankAdapter, dtype: torch.dtype = torch.float32) -> FactorCoordinates:
    """Factors neither of which is zero."""
    space = factor_start(adapter, "random", seed=0, scale=1.0, dtype=dtype)
    torch.manual_seed(0)
    for left in space.left:
        left.normal_(std=0.01)
    space.install()
    return space


def combined_backward(space: FactorCoordinates, examples: Examples, z: Tensor) -> Tensor:
    """G^T z, (p,) float64, by backward passes of sum_i z_i loss_i: no gradient of one text is made."""
    total = torch.zeros(space.entries(), dtype=torch.float64)
    for batch in sequential_batches(examples, max_tokens=4096, max_rows=12):
        of_rows = z[batch.record_index, None].to(batch.token_weight)
        weighted = replace(batch, token_weight=batch.token_weight * of_rows)
        captured, _ = micro_batch_gradients(space.adapter, weighted, summed=True)
        total += unit_vectors(space, captured)[0]
    return total


def backward(rank: int, tokens: int) -> dict[str, Any]:
    """Seconds of one weighted pass over all texts, and its relative difference from G^T z in two precisions."""
    some = step_cost.texts(TEXTS // SHARE, tokens, 0)
    torch.manual_seed(2)
    z = torch.randn(len(some), dtype=torch.float64)
    found: dict[str, Any] = {"rank": rank, "difference": {}}
    for dtype in (torch.float32, torch.float64):
        with LowRankAdapter(step_cost.llama().to(dtype), rank=rank) as adapter:
            space = started(adapter, dtype)
            kept = public_gradients(space, some, max_tokens=4096).combined(z)
            passed = combined_backward(space, some, z)
            found["difference"][str(dtype).removeprefix("torch.")] = float(
                (passed - kept).norm() / kept.norm()
            )
            if dtype == torch.float32:
                spent = [
                    SHARE * step_cost.seconds(partial(combined_backward, space, some, z))
                    for _ in range(step_cost.REPEATS)
                ]
                found["parameters"] = space.entries()
                found["cpu"] = float(np.median(spent))
    return found


def groups(rank: int, tokens: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of all passes of a step, where each keeps the gradients of one group of layers."""
    public, private = (step_cost.texts(n // SHARE, tokens, seed) for seed, n in ((0, TEXTS), (1, UNITS)))
    model = step_cost.llama()
    layers = range(model.config.num_hidden_layers)
    found: dict[str, Any] = {"rank": rank, "rows": []}

    def passes(adapter: LowRankAdapter, examples: Examples, *, as_public: bool) -> None:
        for batch in micro_batches(range(len(examples)), examples, max_tokens=4096, max_rows=12):
            micro_batch_gradients(adapter, batch, public=as_public)

    for count in GROUPS:
        size = len(layers) // count
        each, parameters = [], []
        for start in layers[::size]:
            own = list(layers[start : start + size])
            others = [layer for layer in layers if layer not in own]
            with ExitStack() as attached:
                adapter = attached.enter_context(LowRankAdapter(model, rank=rank, layers_to_transform=own))
                parameters.append(started(adapter).entries())
                adapter.one_by_one = True
                if others:
                    started(attached.enter_context(OtherLayers(model, rank=rank, layers_to_transform=others)))
                passes(adapter, step_cost.texts(2, tokens, 2), as_public=True)  # warms up
                spent = [
                    (
                        SHARE * step_cost.seconds(partial(passes, adapter, public, as_public=True)),
                        SHARE * step_cost.seconds(partial(passes, adapter, private, as_public=False)),
                    )
                    for _ in range(repeats)
                ]
            each.append(np.median(spent, axis=0).tolist())
        row = {"groups": count, "cpu_of_each": each, "cpu": sum(map(sum, each))}
        row["bytes_kept"] = TEXTS * max(parameters) * 4
        found["rows"].append(row)
        found["parameters"] = sum(parameters)
        print(row, flush=True)
    return found


def main() -> None:
    names = ("places", "backward", "groups", "sketches", "whole")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--parts", nargs="+", choices=names, default=list(names))
    parser.add_argument("--ranks", type=int, nargs="+", default=[11, 30])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=step_cost.REPEATS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from machine import describe_machine

    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {}

    def keep(part: str, value: Any) -> None:
        found[part] = {"machine": describe_machine(), "rows": value}
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    if "backward" in given.parts:
        keep("backward", [backward(rank, given.tokens) for rank in given.ranks[:1]])
        print(found["backward"], flush=True)
    if "groups" in given.parts:
        keep("groups", [groups(rank, given.tokens, given.repeats) for rank in given.ranks[:1]])
    if "places" in given.parts:
        rows = []
        for rank in given.ranks:
            for dtype in (torch.float32, torch.bfloat16):
                rows.append(places(rank, dtype, given.repeats))
                keep("places", rows)
    if given.assets is None or not (given.assets / "models").is_dir():
        print(f"skipped sketches and whole: there are no models in {given.assets}")
        return
    sigma = noise_multiplier()
    if "whole" in given.parts:
        keep("whole", whole(given.assets, PAIRS[0], sigma))
    if "sketches" in given.parts:
        keep("sketches", {name: sketches(given.assets, name, sigma) for name in PAIRS})
    if set(names) <= set(found):
        print("\n".join(to_markdown(found)))


if __name__ == "__main__":
    main()
