"""What could be done about a step's time, in words that follow from its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from privlora.pages.numbers import duration, number
from privlora.profiling.facts import Facts
from privlora.stages import (
    ACCUMULATE,
    AVERAGING,
    BACKWARD,
    CAPTURE,
    CHARGE,
    CHECKPOINT,
    COLLATE,
    EVALUATION,
    FORWARD,
    INSTALL,
    LOSS,
    NOISE,
    OPTIMIZER,
    PREPARE,
    PROCESSES,
)

# From which share of a step on a stage is spoken of.
_NOTABLE: Final = 0.05
_PADDED, _IDLE = 0.25, 0.6
_MUCH: Final = 2**29  # bytes


def findings(facts: Facts) -> list[str]:
    """Sentences, what matters most first; never empty."""
    found = [line for rule in _RULES for line in rule(facts)]
    return found or [
        f"The model's own passes take {_share(facts, FORWARD, LOSS, BACKWARD):.0%} of a step, and nothing else stands "
        "out: a step is as fast as forward and backward passes are here. Shorter records (data.max_length), fewer "
        "adapted modules or a smaller batch over more steps change that; the last one changes what epsilon pays for."
    ]


def _padding(facts: Facts) -> Iterator[str]:
    micro = facts["micro_batches"]
    if micro["padding"] < _PADDED:
        return
    half = "more than half" if micro["padding"] > 0.5 else f"{micro['padding']:.0%}"
    if micro["alone"]:
        return
    if facts["dtype"] in ("bfloat16", "float16") and micro["width"] and micro["width"][1] <= 96:
        yield (
            f"{half} of the positions are padding: below float32 each micro-batch is padded by 1 to 32 columns, so "
            f"that rows are rounded alike whoever is beside them; here their median is {number(micro['width'][1])} "
            "columns. With model.dtype=float32 nothing is added; whether that is faster, a second profile shows."
        )
        return
    yield (
        f"{half} of the positions are padding: rows are sorted by length and cut where least is padded, so few units "
        f"of very unlike lengths share a batch. A larger expected batch over fewer steps (`privlora plan` tells the "
        "noise that goes with it) pads less; so does a smaller data.max_length, if a few long records make it."
    )


def _alone(facts: Facts) -> Iterator[str]:
    micro = facts["micro_batches"]
    if micro["alone"] and micro["of_a_step"] > 1:
        yield (
            f"Each unit goes through the model by itself, {number(micro['of_a_step'])} passes a step: the clipping "
            "(automatic, normalized, per-module), method dp-zo, a model that routes tokens or layers of "
            "8 bits ask for it, since else one record would change what is taken of another. method.clipping=flat with "
            "another method on a model without them takes many units at once."
        )


def _small_passes(facts: Facts) -> Iterator[str]:
    micro = facts["micro_batches"]
    if micro["alone"] or micro["of_a_step"] < 4 or not micro["positions"]:
        return
    full = micro["positions"][2] > 0.7 * micro["allowed"]
    operators = facts["operators"]
    idle = operators is not None and operators["busy"] is not None and operators["seconds"] > 0
    busy = operators["busy"] / operators["seconds"] if idle else None
    if full and facts["on_gpu"]:
        yield (
            f"A step takes {number(micro['of_a_step'])} micro-batches of at most {number(micro['allowed'])} positions"
            + (f", and the GPU computes {busy:.0%} of the time" if busy is not None else "")
            + ": run.tokens_per_micro_batch=auto takes as many as fit in its memory, for fewer and larger kernels."
        )


def _waiting(facts: Facts) -> Iterator[str]:
    operators = facts["operators"]
    if not facts["on_gpu"] or operators is None or operators["busy"] is None or not operators["seconds"]:
        return
    busy = operators["busy"] / operators["seconds"]
    if busy < _IDLE:
        yield (
            f"The GPU computes {busy:.0%} of the time and waits for launches else ({operators['launches']} kernels and "
            f"{operators['read_backs']} read-backs in the {duration(operators['seconds'])} of the trace): more rows "
            "a micro-batch (run.tokens_per_micro_batch), fewer adapted modules, or a faster core help; a faster GPU "
            "does not."
        )


def _threads(facts: Facts) -> Iterator[str]:
    if facts["on_gpu"]:
        return
    seconds, cores, threads = facts["seconds"]["median"], facts["cores"], facts["threads"]
    used = facts["cpu_seconds"] / max(seconds, 1e-12)
    if used < 0.6 * threads:
        yield (
            f"Of {threads} {'thread' if threads == 1 else 'threads'} {used:.2g} computed on average: other processes "
            "share the cores, or kernels are too small to be spread (more tokens a micro-batch make them larger). "
            f"By CPU time alone a step takes {duration(facts['cpu_seconds'] / threads)}."
        )
    if threads < cores:
        yield (
            f"torch computes with {threads} of {cores} cores: OMP_NUM_THREADS (or what the launcher sets in its place) "
            "says how many."
        )


def _recomputing(facts: Facts) -> Iterator[str]:
    memory = facts["memory"]
    free = memory["free"]
    if not facts["checkpointing"]:
        return
    room = f", and {_gib(free)} GiB of the GPU are free" if free is not None else ""
    yield (
        f"Activations are recomputed in the backward pass (model.gradient_checkpointing), which takes about one more "
        f"forward pass, {_seconds(facts, FORWARD)} of a step{room}: `privlora plan` with "
        "model.gradient_checkpointing=none tells what a step would need without."
    )


def _single_precision(facts: Facts) -> Iterator[str]:
    if facts["on_gpu"] and facts["dtype"] == "float32" and _share(facts, FORWARD, LOSS, BACKWARD) > 0.5:
        yield (
            "The model computes in float32, and no product is taken in TF32, since coarse rounding depends on who "
            "shares a micro-batch: model.dtype=bfloat16 is several times as fast on GPUs, and clipping allows for it."
        )


def _stages(facts: Facts) -> Iterator[str]:
    said: dict[str, Callable[[str], str]] = {
        PREPARE: lambda t: (
            f"Public work takes {t}: texts and their gradients (fewer synthesis texts, rarer refreshes)."
        ),
        COLLATE: lambda t: (
            f"Cutting and padding micro-batches takes {t}, on the CPU: longer records cost it less a token."
        ),
        LOSS: lambda t: (
            f"The output layer and its loss take {t}: they grow with label tokens and with the vocabulary; "
            "data.loss_on=completion leaves out what need not be learned."
        ),
        CAPTURE: lambda t: (
            f"Gathering gradients of each unit takes {t}: it grows with rows, modules and the rank."
        ),
        ACCUMULATE: lambda t: (
            f"Clipping and summing takes {t}: it grows with rows, modules and the rank, not with "
            "lengths, so short records pay most; flat clipping is the cheapest."
        ),
        PROCESSES: lambda t: (
            f"Sending to other processes and waiting for them takes {t}: units are dealt out whole, so "
            "processes wait where one has a longer unit; larger batches even that out."
        ),
        CHARGE: lambda t: (
            f"The ledger takes {t}: each charge is on the disk before noise is drawn. Put run.output on a "
            "local disk rather than a network's."
        ),
        NOISE: lambda t: (
            f"Noise takes {t}: it is drawn on the CPU, from AES, and grows with the rank and the modules, "
            "not with the batch. A larger batch over fewer steps pays it more rarely."
        ),
        OPTIMIZER: lambda t: f"The optimizer takes {t}: once a step, whatever the batch.",
        AVERAGING: lambda t: (
            f"Averaging is {t}: method.averaging=0 exports the last iterate in place of the average."
        ),
        INSTALL: lambda t: f"Moving the adapter takes {t}: once a step, whatever the batch.",
    }
    notable = {PREPARE: 0.05, COLLATE: 0.05, LOSS: 0.35, CAPTURE: 0.1, ACCUMULATE: 0.15}
    for line in sorted(facts["stages"], key=lambda line: -line["share"]):
        name, share = line["stage"], line["share"]
        if name in said and share >= notable.get(name, _NOTABLE):
            yield said[name](f"{share:.0%} of a step ({duration(line['wall'])})")


def _fixed(facts: Facts) -> Iterator[str]:
    fit = facts["fit"]
    if fit is not None and fit["fixed"] > 0.25 * facts["seconds"]["median"]:
        positions = facts["micro_batches"]["positions_of_a_step"]
        yield (
            f"About {duration(fit['fixed'])} of a step come whatever its length, {duration(fit['per_position'])} with "
            f"each of its {number(positions)} positions (a line through {facts['measured']} steps): larger batches "
            "over fewer steps pay the first part more rarely."
        )


def _aside(facts: Facts) -> Iterator[str]:
    said = {EVALUATION: "run.evaluate_every", CHECKPOINT: "run.checkpoint_every and run.checkpoint_minutes"}
    for line in facts["aside"]:
        share = line["of_a_step"] / max(facts["seconds"]["median"], 1e-12)
        if share >= _NOTABLE and line["times"] > 1:
            yield (
                f"Beside the steps, {line['stage']} took {duration(line['each'])} each of {line['times']} times, "
                f"which is {share:.0%} of a step spread over all of them: {said[line['stage']]} says how often."
            )


def _memory(facts: Facts) -> Iterator[str]:
    memory = facts["memory"]
    told, of_steps = memory["told"], memory["of_steps"]
    if told is None or of_steps is None or facts["on_gpu"]:
        return
    if of_steps > max(1.5 * told["step_bytes"], told["step_bytes"] + _MUCH):
        yield (
            f"Steps took {_gib(of_steps)} GiB over the loaded model, `privlora plan` tells {_gib(told['step_bytes'])}: "
            "glibc keeps freed memory for later (MALLOC_MMAP_THRESHOLD_=65536 gives it back, at more CPU time)."
        )


_RULES: Final = (
    _padding,
    _alone,
    _small_passes,
    _waiting,
    _threads,
    _single_precision,
    _recomputing,
    _stages,
    _fixed,
    _aside,
    _memory,
)


def _share(facts: Facts, *stages: str) -> float:
    return sum(line["share"] for line in facts["stages"] if line["stage"] in stages)


def _seconds(facts: Facts, stage: str) -> str:
    wall = next((line["wall"] for line in facts["stages"] if line["stage"] == stage), 0.0)
    return duration(wall)


def _gib(size: float) -> str:
    return number(size / 2**30, 3)
