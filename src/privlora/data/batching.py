"""Splitting one logical batch into padded micro-batches that fit in memory, without coupling its examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from privlora.data.examples import IGNORED, Answers, Examples
from privlora.errors import ConfigError, PrivacyError
from privlora.stages import COLLATE, staged

# What a micro-batch costs besides its tokens, as so many tokens more: kernels that are started, modules that are
# called.
_OVERHEAD, _OVERHEAD_OF_GPUS = 96, 1024


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """``b`` rows, right-padded to ``T`` tokens, that hold the whole contribution of each of their units.

    The loss of unit u is the sum of ``token_weight * cross_entropy`` over its rows: the mean over its drawn
    records of each record's mean over its own label tokens. It depends on no other unit.
    """

    input_ids: torch.Tensor
    """(b, T) int64; the examples' ``pad_token_id`` at the right."""
    attention_mask: torch.Tensor
    """(b, T) int64; 1 on tokens. A row without any token attends to one pad: its softmax is finite."""
    labels: torch.Tensor
    """(b, T) int64, not shifted: ``labels[:, t]`` is predicted from the logits at t - 1; -100 is ignored."""
    unit_index: torch.Tensor
    """(b,) int64: the row's unit, 0 to unit_count - 1 within this micro-batch; rows are in unit order."""
    row_weight: torch.Tensor
    """(b,) float32: 1 / number of drawn records of the row's unit."""
    token_weight: torch.Tensor
    """(b, T) float32: row_weight / number of label tokens of the row, 0 where nothing is predicted."""
    record_index: torch.Tensor
    """(b,) int64: which example each row is of."""
    unit_count: int
    """Number of units (private)."""
    pad_token_id: int
    """What rows are filled up with."""
    answers: torch.Tensor | None = None
    """(b,) float64, of labelled texts: each one's class number or score."""
    token_type_ids: torch.Tensor | None = None
    """(b, T) int64, of labelled pairs whose texts the model tells apart: 1 on tokens of the second."""
    beta: float | None = None
    """Of preferences: rows are chosen and rejected answers in turn, two a record, and this is of their loss."""

    def each_unit(self) -> Iterator[MicroBatch]:
        """One micro-batch a unit, in unit order, padded to the unit's own longest row: a function of the unit alone."""
        for unit in range(self.unit_count):
            rows = self.unit_index == unit
            width = max(1, int(self.attention_mask[rows].sum(dim=1).max()))  # a record may have no token
            own: dict[str, Any] = {name: value[rows] for name, value in self._tensors().items()}
            own |= {name: value[:, :width] for name, value in own.items() if value.dim() == 2}
            own["unit_index"] = torch.zeros_like(own["unit_index"])
            yield replace(self, unit_count=1, **own)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def widened(self, width: int) -> MicroBatch:
        """The same micro-batch with padding up to ``width`` columns, if it has fewer."""
        more = width - self.input_ids.shape[1]
        if more <= 0:
            return self

        def padded(t: torch.Tensor, value: int) -> torch.Tensor:
            return torch.nn.functional.pad(t, (0, more), value=value)

        types = self.token_type_ids
        return replace(
            self,
            # No other token: classifiers find a text's end by it.
            input_ids=padded(self.input_ids, self.pad_token_id),
            attention_mask=padded(self.attention_mask, 0),
            labels=padded(self.labels, IGNORED),
            token_weight=padded(self.token_weight, 0),
            token_type_ids=None if types is None else padded(types, 0),
        )

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with what a model reads on ``device``.

        The rest stays on the CPU: where labels are and which rows are a unit's is found out there, so that nobody waits
        for a device to answer.
        """
        read = {"input_ids", "attention_mask", "token_type_ids"} & self._tensors().keys()
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in read})


def micro_batches(
    indices: Iterable[int | np.integer | np.ndarray],
    examples: Examples,
    *,
    max_tokens: int,
    max_rows: int | None = None,
    row_tokens: int = 0,
    device: torch.device | None = None,
    own_width: Callable[[int], int] | None = None,
) -> Iterator[MicroBatch]:
    """Split a logical batch into those micro-batches of units of like length that take least work, longest units first.

    Work is the sum over micro-batches of rows x padded length and of what one more of them costs. An empty logical
    batch yields nothing; the caller still has to add the noise of that step.

    Args:
        indices: one item a drawn unit: the index of its only record, or the (k,) array of its drawn records.
        examples: all tokenised records.
        max_tokens: rows x padded length of a micro-batch stays at or below it. A single unit that is larger
            still is one micro-batch, since its gradient must be summed before it is clipped.
        max_rows: a bound on its rows alone.
        row_tokens: shorter rows count as this long: the memory that goes with rows, in tokens (training.footprint).
        device: where they are computed, which is where one more of them has its cost; None: on a CPU.
        own_width: from a unit's longest row to the width that it is computed in, which does not fall; units of two
            widths are never together, and one that fills its width is by itself. None: any are.

    Raises:
        ConfigError: ``max_tokens`` or ``max_rows`` < 1.
        PrivacyError: what is given is no record's number, or a record occurs twice, so that its contribution would
            not be bounded.
    """
    if max_tokens < 1:
        fix = "set it to a few times the longest example"
        raise ConfigError(f"max_tokens={max_tokens} is below 1", fix=fix)
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"max_rows={max_rows} is below 1", fix="set it to the rows that fit in memory")
    units = [np.atleast_1d(np.asarray(unit)) for unit in indices]
    records = np.concatenate([np.empty(0, np.int64), *units])
    numbers = all(unit.dtype.kind in "iu" for unit in units if len(unit))
    if not numbers or (len(records) and not 0 <= records.min() <= records.max() < len(examples)):
        raise PrivacyError(
            f"a logical batch holds what is no number of a record, 0 to {len(examples) - 1}",
            why="counted from the end or as a mask, a record could be in the batch twice",
            fix="give the indices that a sampler draws",
        )
    if len(np.unique(records)) != len(records):
        why = "its contribution would be twice the clipping bound that the noise is made for"
        fix = "draw each logical batch with one call of PoissonSampler.draw"
        raise PrivacyError("a record occurs twice in one logical batch", why=why, fix=fix)

    lengths = [_longest(unit, examples) for unit in units]
    order = sorted(range(len(units)), key=lambda unit: -lengths[unit])
    counts = [examples.rows * len(unit) for unit in units]
    overhead = _OVERHEAD if device is None or device.type == "cpu" else _OVERHEAD_OF_GPUS

    def kind(unit: int) -> tuple[int, int]:
        width = 0 if own_width is None else own_width(lengths[unit])
        # What no column is left for has no padding by itself, and would have some next to a shorter unit.
        return width, unit if own_width is not None and width <= lengths[unit] else -1

    for _, alike in groupby(order, key=kind):
        together = list(alike)
        widths, rows = (np.array([of[unit] for unit in together]) for of in (lengths, counts))
        if own_width is not None:
            widths[:] = widths[0]  # which saves nothing for shorter ones
        pieces = _cheapest_split(np.maximum(widths, 1), rows, max_tokens, max_rows, row_tokens, overhead)
        for start, stop in pieces:
            yield collate([units[unit] for unit in together[start:stop]], examples)


@staged(COLLATE)
def _cheapest_split(
    widths: np.ndarray,
    rows: np.ndarray,
    max_tokens: int,
    max_rows: int | None,
    row_tokens: int,
    overhead: int,
) -> list[tuple[int, int]]:
    """Where to cut units in descending order of ``widths``: (start, stop) of each piece, by dynamic programming.

    widths: of each unit's longest row; rows: of each unit. (units,) both. A piece of several units is within both
    bounds, and costs its rows x its largest width + overhead.
    """
    before = np.concatenate([[0], np.cumsum(rows)])  # rows of the units before
    cost = np.zeros(len(rows) + 1)  # of the first units, as cheaply as can be
    last = np.zeros(len(rows) + 1, np.int64)  # where their last piece starts
    # The first unit that can be in a piece with the present one: later ones need not look before it.
    first = 0
    for stop in range(1, len(rows) + 1):
        while first < stop - 1 and (
            (before[stop] - before[first]) * max(widths[first], row_tokens) > max_tokens
            or (max_rows is not None and before[stop] - before[first] > max_rows)
        ):
            first += 1
        costs = cost[first:stop] + (before[stop] - before[first:stop]) * widths[first:stop]
        # Of equal ones the shortest: full pieces come first.
        last[stop] = stop - 1 - int(costs[::-1].argmin())
        cost[stop] = costs[last[stop] - first] + overhead
    pieces, stop = list[tuple[int, int]](), len(rows)
    while stop:
        pieces.append((int(last[stop]), stop))
        stop = pieces[-1][0]
    return pieces[::-1]


def sequential_batches(examples: Examples, **bounds: Any) -> Iterator[MicroBatch]:
    """Every example once, for evaluation; ``record_index`` leads back to the original order.

    bounds: arguments of :func:`micro_batches`, whose errors these are; each example is its own unit.
    """
    return micro_batches(range(len(examples)), examples, **bounds)


def nobody(pad_token_id: int) -> MicroBatch:
    """One row of two tokens that belongs to no record, and whose loss has no weight."""
    row = torch.full((1, 2), pad_token_id, dtype=torch.int64)
    labels, mask = torch.tensor([[IGNORED, pad_token_id]]), torch.ones_like(row)
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(row, mask, labels, zero, torch.zeros(1), torch.zeros(1, 2), zero, 1, pad_token_id)


def _longest(unit: np.ndarray, examples: Examples) -> int:
    return int(examples.lengths[unit].max())


@staged(COLLATE)
def collate(units: Sequence[np.ndarray], examples: Examples) -> MicroBatch:
    """One micro-batch of these units, each the (k,) numbers of its records, in their order."""
    width = max(1, *(_longest(unit, examples) for unit in units))
    records = np.repeat(np.concatenate(units), examples.rows)
    sizes = np.array([len(unit) for unit in units])
    input_ids = np.full((len(records), width), examples.pad_token_id, dtype=np.int64)
    labels = np.full_like(input_ids, IGNORED)
    attention_mask = np.zeros_like(input_ids)
    # A softmax over no position at all is NaN, and NaN times a weight of zero is still NaN.
    attention_mask[:, 0] = 1
    for row, record in enumerate(records):
        example = examples[record]
        if example.rejected is not None and row % 2:
            example = example.rejected
        length = len(example.input_ids)
        input_ids[row, :length] = example.input_ids
        labels[row, :length] = example.labels
        attention_mask[row, :length] = 1

    row_weight = np.repeat(1.0 / sizes, sizes * examples.rows)
    predicted = labels != IGNORED
    predicted[:, 0] = False  # nothing precedes the first token
    token_weight = predicted * (row_weight / np.maximum(predicted.sum(axis=1), 1))[:, None]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        labels=torch.from_numpy(labels),
        unit_index=torch.from_numpy(np.repeat(np.arange(len(units)), sizes * examples.rows)),
        row_weight=torch.from_numpy(row_weight.astype(np.float32)),
        token_weight=torch.from_numpy(token_weight.astype(np.float32)),
        record_index=torch.from_numpy(records),
        unit_count=len(units),
        pad_token_id=examples.pad_token_id,
        answers=None if examples.answers is None else torch.from_numpy(examples.answers.values[records]),
        token_type_ids=_types(examples.answers, records, attention_mask),
        beta=None if examples.preferences is None else examples.preferences.beta,
    )


def _types(answers: Answers | None, records: np.ndarray, mask: np.ndarray) -> torch.Tensor | None:
    """None where no example has a second text that the model tells apart."""
    if answers is None or not answers.typed:
        return None
    later = np.arange(mask.shape[1]) >= answers.seconds[records][:, None]
    return torch.from_numpy((later & (mask == 1)).astype(np.int64))
