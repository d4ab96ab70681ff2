"""How much memory a step takes at its most: found by taking it on paper (training.paper), from public facts alone.

Nothing is read of records: the micro-batch is the worst that settings allow. Of a model of many equal layers, steps are
taken with one and with two of them, and each phase of the step goes on in a straight line from there.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch._subclasses import fake_tensor

from privlora.accounting.events import StepEvent
from privlora.adapters import Captured, LowRankAdapter
from privlora.config import PrivacySettings, Settings
from privlora.data.examples import Answers, Example, Examples
from privlora.data.labels import Classes
from privlora.errors import reason_of
from privlora.mechanisms import GaussianMechanism, MeanMechanism, Mechanism, takes_units_alone
from privlora.mechanisms.charges import Uncharged
from privlora.methods import find_row
from privlora.names import SPECTRAL_SPLIT
from privlora.training.assembly import Parts, build_parts
from privlora.training.footprint import roughly, row_tokens
from privlora.training.model_checks import positions_of, routes_tokens
from privlora.training.models import adapter_for, packing_of, set_checkpointing, unchanged_afterwards
from privlora.training.paper import Paper
from privlora.training.promise import sampler
from privlora.training.step import Step

# A logical batch has more units than are assumed with less than this probability a step.
_RARE = 1e-9
_FEW = (1, 2)  # layers that stand for more
# Of units that go through the model one by one, so many stand for more, but where they are clipped at once.
_ALONE = (2, 3)
CLIPPING = "clipping"
_COLUMNS = 32  # of gradients.steadied


@dataclass(frozen=True)
class Rows:
    """A micro-batch: of units of so many ``rows`` each, all ``width`` tokens long.

    clipped: units whose gradients are clipped at once, where those of ``rows`` are some of them; 0: no others.
    """

    rows: tuple[int, ...]
    width: int
    clipped: int = 0

    @property
    def count(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True)
class Peak:
    """step_bytes: the largest total that lives during a step, over the loaded model; model_bytes: the model's.

    rows, width: of the micro-batch that takes most.
    """

    step_bytes: int
    model_bytes: int
    rows: int
    width: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class Unknown(Exception):
    """A step could not be taken on paper; says why in one line."""


Told = Callable[[int, int], None]
"""Called with how many micro-batches on paper are done, and of how many."""


def peak_of_a_step(
    settings: Settings,
    model: torch.nn.Module,
    device: torch.device,
    *,
    max_tokens: int,
    told: Told = lambda *_: None,
) -> Peak | None:
    """The largest total over all micro-batches that can occur; None for rows that take no private steps.

    model: the base model, with or without weights; it is not changed. max_tokens: of a micro-batch.
    Raises Unknown for a model that does more with values than can be done on paper, and for rows that lean on public
    texts.
    """
    if find_row(settings.method.name).releases != "gradients":
        return None
    adapter, batches = _counted(settings, model, max_tokens)
    quiet = logging.getLogger(fake_tensor.__name__)  # it writes down what goes wrong, before it raises
    before, quiet.disabled = quiet.disabled, True
    try:
        found = _bytes(settings, model, adapter, device, batches, told)
    except Exception as error:  # models are anybody's code, and raise anything on paper
        routed = "its experts are computed by kernels that nothing counts in this dtype"
        raise Unknown(routed if routes_tokens(model) else reason_of(error)) from error
    finally:
        quiet.disabled = before
    worst = max(batches, key=lambda batch: found[batch])
    return Peak(found[worst], model_bytes(model), worst.count, worst.width)


def bound_of_a_step(settings: Settings, model: torch.nn.Module, *, max_tokens: int) -> float:
    """PUBLIC. What `peak_of_a_step` would give is a part of it; nothing is done on paper. Infinite for a model of which
    that cannot be told. For a row that releases gradients; raises Unknown for what is not counted."""
    adapter, batches = _counted(settings, model, max_tokens)
    padding = 2 * _COLUMNS if adapter.reduced_precision else 0
    found = [roughly(adapter, batch.count, batch.width + padding) for batch in batches]
    return max(math.inf if each is None else each for each in found)


def _counted(
    settings: Settings, model: torch.nn.Module, max_tokens: int
) -> tuple[LowRankAdapter, list[Rows]]:
    """The adapter, and the micro-batches that may take most. Raises Unknown for steps of which not all is counted."""
    row = find_row(settings.method.name)
    if row.public_texts:
        raise Unknown(f"method {row.name!r} also takes gradients of public texts")
    if settings.data.chosen is not None:
        raise Unknown("a preference takes passes of the base model beside its own, which nothing counts")
    if packing_of(settings.model, model):
        raise Unknown("packed weights are unpacked by kernels that nothing counts")
    adapter = adapter_for(settings, model)
    return adapter, worst_batches(
        settings.privacy,
        of_a_unit=settings.rows_of_a_unit,
        max_tokens=max_tokens,
        max_length=longest_row(settings, model),
        row_tokens=tokens_of_a_row(settings, adapter),
        columns=_COLUMNS if adapter.reduced_precision else 1,
    )


def tokens_of_a_row(settings: Settings, adapter: LowRankAdapter) -> int:
    """footprint.row_tokens in the run, which may recompute activations; 0 where rows need no gradients of their own."""
    if not settings.privacy.private or find_row(settings.method.name).coordinates.forward_only:
        return 0
    with unchanged_afterwards(adapter.model):
        set_checkpointing(adapter.model, settings.model.gradient_checkpointing)
        return row_tokens(adapter)


def model_bytes(model: torch.nn.Module) -> int:
    """Of the weights and buffers, those that several modules share once."""
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def longest_row(settings: Settings, model: torch.nn.Module) -> int:
    """PUBLIC. data.max_length, or what the model reads if that is less."""
    length, positions = settings.data.max_length, positions_of(model)
    return length if positions is None else min(length, positions)


def worst_batches(
    privacy: PrivacySettings,
    *,
    of_a_unit: int,
    max_tokens: int,
    max_length: int,
    row_tokens: int,
    columns: int,
) -> list[Rows]:
    """PUBLIC. The micro-batches one of which takes most: of the longest rows, and of as many rows as there can be.

    of_a_unit: rows that a unit brings at most. columns: widths are padded beyond the next multiple of it, where it is
    above 1 (gradients.steadied).
    """
    user = of_a_unit
    most = largest_batch(privacy) * user
    short = min(max(1, row_tokens), max_length)

    def fitting(width: int) -> int:
        return max(1, min(most, max_tokens // max(width, row_tokens)))

    longest = fitting(max_length)
    widths = [max_length, short]
    if longest < most:  # as many tokens as are allowed, where rows of full length leave some
        widths.append(max(short, min(max_length, max_tokens // (longest + 1))))
    if columns > 1:
        widths += [min(max_length, -(-short // each) * each) for each in (8, columns)]
    found = []
    for width in sorted(set(widths), reverse=True):
        rows = fitting(width)
        if user == 1 or rows == 1:
            found.append(Rows((1,) * rows, width))
        else:  # units of several rows are added up, beside their rows: nearly as many units as rows, and not as many
            found.append(Rows((2,) + (1,) * (rows - 2), width))
        if user > rows:  # a single unit may be larger
            found.append(Rows((user,), width))
    return found


def largest_batch(privacy: PrivacySettings) -> int:
    """PUBLIC. Units of a logical batch, at most; with a probability of 1e-9 a step there are more."""
    n = math.ceil(privacy.n)
    if privacy.max_batch_size is not None:
        return min(n, privacy.max_batch_size)
    from scipy.stats import binom

    return max(1, min(n, int(binom.isf(_RARE, n, min(1.0, privacy.q)))))


def _bytes(
    settings: Settings,
    model: Any,
    adapter: LowRankAdapter,
    device: torch.device,
    batches: Sequence[Rows],
    told: Told = lambda *_: None,
) -> dict[Rows, int]:
    """Of steps on paper with these micro-batches, or as it follows from steps with fewer layers and units."""
    return {
        batch: max(phases.values())
        for batch, phases in _of_units(settings, model, adapter, device, batches, told).items()
    }


def _of_units(
    settings: Settings,
    model: Any,
    adapter: LowRankAdapter,
    device: torch.device,
    batches: Sequence[Rows],
    told: Told = lambda *_: None,
) -> dict[Rows, Mapping[str, int]]:
    """Phase -> the largest total in it, each followed by itself: a release, which takes the same for all, may be the
    largest of few units alone."""
    forward_only = find_row(settings.method.name).coordinates.forward_only
    alone = forward_only or routes_tokens(model) or takes_units_alone(settings.method.clipping or "")
    if not (alone and settings.privacy.private):
        return _of_layers(settings, model, adapter, device, batches, told)
    few = {
        batch: [Rows(batch.rows[:units], batch.width, len(batch.rows)) for units in _ALONE]
        for batch in batches
    }
    asked = {each for found in few.values() for each in found}
    known = _of_layers(settings, model, adapter, device, sorted(asked, key=lambda each: each.count), told)
    return {
        batch: _straight(known[less], known[more], _ALONE, len(batch.rows))
        for batch, (less, more) in few.items()
    }


def _of_layers(
    settings: Settings,
    model: Any,
    adapter: LowRankAdapter,
    device: torch.device,
    batches: Sequence[Rows],
    told: Told = lambda *_: None,
) -> dict[Rows, Mapping[str, int]]:
    layers = _equal_layers(model, adapter)
    taken: list[int | None] = [None] if layers <= max(_FEW) else [*_FEW]
    done, total = itertools.count(1), len(taken) * len(batches)
    told(0, total)

    def one_more() -> None:
        told(next(done), total)

    found = [_phases(settings, model, device, batches, few, one_more) for few in taken]
    if len(found) == 1:
        return found[0]
    less, more = found
    return {batch: _straight(less[batch], more[batch], _FEW, layers) for batch in batches}


def _straight(
    less: Mapping[str, int], more: Mapping[str, int], at: tuple[int, int], asked: int
) -> dict[str, int]:
    return {phase: _further(less[phase], size, at, asked) for phase, size in more.items()}


def _further(less: int, more: int, at: tuple[int, int], asked: int) -> int:
    """The straight line through (at[0], less) and (at[1], more), at ``asked``; no lower than ``less`` before it."""
    return less + max(0, asked - at[0]) * (more - less) // (at[1] - at[0])


def _phases(
    settings: Settings,
    model: Any,
    device: torch.device,
    batches: Sequence[Rows],
    layers: int | None,
    one_more: Callable[[], object] = lambda: None,
) -> dict[Rows, Mapping[str, int]]:
    """Phase -> the largest total in it, of a micro-batch of each kind that is added to the sum of those before.

    There was a step before, so the optimizer has its moments.
    """
    paper = Paper(device)
    copied = paper.copy(_first_layers(model, layers))
    if settings.data.label is not None:  # with what `_all_labels` fills rows up
        copied.config.get_text_config().pad_token_id = 0
    found: dict[Rows, Counter[str]] = {}
    with warnings.catch_warnings(), paper:
        warnings.simplefilter("ignore")
        parts = build_parts(_startable(settings), copied)
        mechanism = _mechanism(parts)
        paper.gathering = lambda: parts.adapter.gathering
        beside = _clip_more(mechanism, clipped := [0])
        _follow(paper, mechanism, "accumulate", CLIPPING)
        step = _step(parts, mechanism, [])
        step.take([])
        for batch in batches:
            paper.peaks.clear()
            clipped[0] = batch.clipped
            again = [batch] if mechanism.pending else [batch, batch]  # the second one is added to a sum
            step = _step(parts, mechanism, again)
            bounds = np.cumsum([0, *(rows for each in again for rows in each.rows)])
            # Past the guard between batches, which a release is for: of these sums nothing is released.
            step._accumulate([np.arange(first, stop) for first, stop in pairwise(bounds)])
            found[batch] = Counter(paper.peaks)
            found[batch][CLIPPING] -= beside.pop() if beside else 0
            one_more()
        paper.peaks.clear()
        paper.phase = "release"
        step.release()
    return {batch: {**phases, **paper.peaks} for batch, phases in found.items()}


def _step(parts: Parts, mechanism: Mechanism, batches: Sequence[Rows]) -> Step:
    """Of records of one micro-batch after the other; one of them has padding, so that there is a mask."""
    lengths = [batch.width for batch in batches for _ in range(batch.count)]
    if lengths:
        lengths[-1] = max(1, lengths[-1] - 1)
    least = row_tokens(parts.adapter) if mechanism.needs_examples else 0
    return Step(
        state=parts,
        mechanism=mechanism,
        examples=_all_labels(lengths, parts.settings.data.classes),
        learning_rate=0.0,
        max_tokens=max((batch.count * max(batch.width, least) for batch in batches), default=1),
        dropout=parts.settings.model.dropout,
    )


def _clip_more(mechanism: Any, clipped: list[int]) -> list[int]:
    """Have as many units clipped as ``clipped`` says, where a micro-batch has fewer.

    Also a list that then holds the bytes of those that it has, which are beside the others.
    """
    clip, beside = mechanism.accumulate, list[int]()

    def repeated(stack: torch.Tensor) -> torch.Tensor:
        return stack[:, :1].expand(-1, clipped[0], -1, -1).contiguous()

    def more(captured: Captured) -> None:
        units, stacks = clipped[0], captured.stacks
        if stacks is None or units <= captured.units:
            clip(captured)
            return
        beside[:] = [sum(t.nbytes for pair in stacks for t in pair)]
        like = [(repeated(p), repeated(q)) for p, q in stacks]
        squares, owners = captured.dense_squares, captured.owners
        clip(
            Captured.of_stacks(
                like,
                None if squares is None else squares[:1].expand(units).contiguous(),
                None if owners is None else owners[:, :1].expand(-1, units).contiguous(),
            )
        )

    mechanism.accumulate = more
    return beside


def _follow(paper: Paper, owner: Any, method: str, phase: str) -> None:
    """Note what one object's method does as a phase of its own."""
    call: Callable[..., Any] = getattr(owner, method)

    def noted(*args: Any, **options: Any) -> Any:
        before, paper.phase = paper.phase, phase
        try:
            return call(*args, **options)
        finally:
            paper.phase = before

    setattr(owner, method, noted)


def _mechanism(parts: Parts) -> Mechanism:
    """Without a ledger: what it sums has no values, and nothing is released."""
    privacy = parts.settings.privacy
    if not privacy.private:
        return MeanMechanism(parts.coordinates, expected_batch_size=privacy.b, steps=2)
    sampling = sampler(privacy, math.ceil(privacy.n)).sampling
    return GaussianMechanism(
        parts.coordinates,
        clip_norm=privacy.clip_norm,
        event=StepEvent(sampling, 1.0, parts.coordinates.event_layers),
        expected_batch_size=privacy.b,
        ledger=Uncharged(),
        clipping=parts.hyper.clipping,
        adaptive=parts.adaptive,
    )


def _startable(settings: Settings) -> Settings:
    """Settings whose start reads no file and decomposes no weight; one that changes what a step does stays. What is
    auto takes its default: no rate or clip norm changes what a step needs."""
    lora, settings = settings.adapter, settings.model_copy(update={"auto": None})
    if lora.init in (None, SPECTRAL_SPLIT):
        return settings
    return settings.model_copy(
        update={"adapter": lora.model_copy(update={"init": "random", "public_text": None})}
    )


def _all_labels(lengths: Sequence[int], classes: Classes | None) -> Examples:
    """Records of these lengths, of one token each time; of the first class, where there are any."""
    ones = {length: np.ones(length, np.int32) for length in set(lengths)}
    found = Examples((Example(ones[length], ones[length]) for length in lengths), pad_token_id=0)
    if classes is not None:
        found.answers = Answers(np.zeros(len(lengths)), np.array(lengths, np.int32), classes.outputs)
    return found


def _equal_layers(model: Any, adapter: LowRankAdapter) -> int:
    """How many layers the model has, if all are of one kind and adapted alike; else 0."""
    lists = _layer_lists(model)
    if len(lists) != 1:
        return 0
    (name, layers), kinds = lists[0], getattr(model.config, "layer_types", None)
    adapted: dict[str, set[tuple[str, int, int]]] = {}
    for site in adapter.sites:
        if site.name.startswith(f"{name}."):
            number, _, inner = site.name.removeprefix(f"{name}.").partition(".")
            adapted.setdefault(number, set()).add((inner, site.m, site.n))
    shapes = [
        [(type(layer).__name__, key, tuple(p.shape), p.dtype) for key, p in layer.named_parameters()]
        for layer in layers
    ]
    alike = all(each == shapes[0] for each in shapes) and len(set(kinds or ())) <= 1
    alike = alike and len(adapted) in (0, len(layers)) and len({frozenset(s) for s in adapted.values()}) <= 1
    return len(layers) if alike else 0


def _layer_lists(model: Any) -> list[tuple[str, torch.nn.ModuleList]]:
    count = getattr(model.config, "num_hidden_layers", None)
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]


def _first_layers(model: Any, count: int | None) -> Any:
    """The model with its first layers alone; the model itself, which is not changed, if ``count`` is None.

    Tensors are the model's own.
    """
    if count is None:
        return model
    ((name, layers),) = _layer_lists(model)
    shared: dict[int, Any] = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    shared[id(layers)] = few = torch.nn.ModuleList(copy.deepcopy(layer, shared) for layer in layers[:count])
    cut = copy.deepcopy(model, shared)
    assert cut.get_submodule(name) is few
    cut.config.num_hidden_layers = count
    if getattr(cut.config, "layer_types", None):
        cut.config.layer_types = cut.config.layer_types[:count]
    return cut
