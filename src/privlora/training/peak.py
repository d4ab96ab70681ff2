"""How much memory a step takes at its most, by a formula of public facts: nothing is read of records.

Of the model one pass of a few tokens is done on paper (training.paper): what it keeps for the backward pass is counted,
a token and a token squared. All else follows from shapes. The formula was held against steps of ten architectures
(docs/performance.md): it lies within 25 % above them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

from privlora.adapters import LowRankAdapter
from privlora.adapters.targets import output_layer
from privlora.config import PrivacySettings, Settings
from privlora.errors import reason_of
from privlora.losses import block_rows
from privlora.mechanisms import takes_units_alone
from privlora.methods import find_row
from privlora.training.footprint import gradient_bytes, row_tokens
from privlora.training.model_checks import positions_of, routes_tokens, steady_width
from privlora.training.models import adapter_for, packing_of, set_checkpointing, unchanged_afterwards
from privlora.training.paper import on_paper

# A logical batch has more units than are assumed with less than this probability a step.
_RARE = 1e-9
_MORE = 1.08  # of what the formula says: no step that was tried took more
_KERNELS = 24 * 2**20  # what kernels below float32 keep of their own
_FEW, _MANY = 16, 64  # tokens of the passes on paper


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
    """What a step takes cannot be told; says why in one line."""


class StepMemory:
    """What a step with micro-batches of so many tokens takes, of one run.

    model: the base model, with or without weights; it is not changed. device: where it will be. Raises Unknown for
    steps of which not all is counted: rows that lean on public texts, preferences, packed weights, experts, and models
    that do more with values than can be done on paper.
    """

    def __init__(self, settings: Settings, model: Any, device: torch.device) -> None:
        self._settings, self._model, self._device = settings, model, device
        method, privacy = find_row(settings.method.name), settings.privacy
        if method.public_texts:
            raise Unknown(f"method {method.name!r} also takes gradients of public texts")
        if settings.data.chosen is not None:
            raise Unknown("a preference takes passes of the base model beside its own, which nothing counts")
        if packing_of(settings.model, model):
            raise Unknown("packed weights are unpacked by kernels that nothing counts")
        if routes_tokens(model):
            raise Unknown("how many tokens an expert is given is not known before")
        self._adapter = adapter = adapter_for(settings, model)
        self._hyper = method.resolve(
            settings.method, settings.adapter.init, privacy.steps, private=privacy.private
        )
        self._kind = method.coordinates
        self._alone = self._kind.forward_only or takes_units_alone(self._hyper.clipping)
        self._least = tokens_of_a_row(settings, adapter)
        self._saved = _saved(model, adapter)
        config: Any = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._layers = getattr(config, "num_hidden_layers", None) or 1
        self._width = getattr(config, "hidden_size", None) or 0
        self._words = getattr(config, "vocab_size", None) or 0
        self._item = max((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), default=4)

    def peak(self, max_tokens: int) -> Peak:
        """Of the micro-batch that takes most, of the longest rows, or of as many rows as there can be."""
        worst = max(self._batches(max_tokens), key=lambda batch: self._bytes(*batch))
        return Peak(self._bytes(*worst), model_bytes(self._model), *worst)

    def _batches(self, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Rows and their width, before padding."""
        longest = longest_row(self._settings, self._model)
        most = largest_batch(self._settings.privacy) * self._settings.rows_of_a_unit
        shortest = min(max(1, self._least), longest)
        whole = max_tokens // (max_tokens // longest + 1)  # where rows of full length leave some tokens
        # Below float32 rows that fill a block are padded by one more.
        blocks = [
            end // each * each + each * (end < longest) for end in (longest, shortest) for each in (8, 32)
        ]
        for width in {longest, *(min(longest, max(shortest, each)) for each in (shortest, whole, *blocks))}:
            fits = max_tokens // max(width, self._least)
            # A unit of several rows goes through as a whole.
            yield max(self._settings.rows_of_a_unit, min(most, fits), 1), width

    def _padded(self, width: int) -> int:
        return steady_width(self._adapter, width, self._device) if self._adapter.reduced_precision else width

    def _bytes(self, rows: int, width: int) -> int:
        """Of a step whose micro-batches have so many rows."""
        adapter, privacy, wide = self._adapter, self._settings.privacy, self._padded(width)
        sites = [(part.rank, site) for part in adapter.parts for site in part.sites]
        numbers = sum(rank * (site.m + site.n) for rank, site in sites)
        dense = sum(site.m * site.n for _, site in sites) if self._kind.dense else 0
        update = 8 * dense  # and the weights with it
        state = 16 * numbers + update  # factors, moments and sums
        gradients = gradient_bytes(adapter) * (rows if privacy.private else 1)
        at_once = self._settings.rows_of_a_unit if self._alone else rows  # through the model
        tokens, (linear, square, plain) = at_once * wide, self._saved
        kept = tokens * linear + tokens * wide * square
        logits = self._logits(tokens, plain)
        if self._kind.forward_only:  # without a graph: one layer's tensors at a time
            return self._told(state / 2 + kept / self._layers + logits * 2 / 3)
        if self._alone:
            forward = state + gradients + kept + logits
        elif self._settings.model.gradient_checkpointing != "none":
            inputs = tokens * self._width * self._layers * self._item
            forward = state + inputs + max(logits, kept / self._layers + gradients)
        else:
            # Their room is taken whole; on a CPU where it is written to, while activations are let go.
            room = gradients if self._device.type != "cpu" else 0.03 * gradients
            forward = state + kept + max(logits, room)
        # Clipping has r x r statistics of each unit in float64 where it looks at singular values.
        small = 100 * rows * sum(rank**2 for rank, _ in sites) if self._hyper.clipping == "spectral" else 0
        # Units of several rows are added up next to their rows.
        sums = 0.8 * gradients if self._settings.rows_of_a_unit > 1 else 0
        clipping = 32 * numbers + update + 1.04 * gradients + max(small, sums)
        release = (40 if self._kind.entrywise else 66) * numbers + update
        return self._told(max(forward, clipping, release))

    def _logits(self, tokens: int, plain: bool) -> float:
        """Of the loss: a block of labels at a time, in float32 next to the model's dtype, or all of them at once."""
        if self._settings.data.classes is not None:
            return 0
        if not plain:
            return 4.0 * tokens * self._words * self._item
        block = min(tokens, block_rows(self._words)) * self._words * 4
        return block * (3 if self._item >= 4 else 2.7)

    def _told(self, found: float) -> int:
        return math.ceil(_MORE * found + (_KERNELS if self._adapter.reduced_precision else 0))


def peak_of_a_step(settings: Settings, model: Any, device: torch.device, *, max_tokens: int) -> Peak | None:
    """The largest total over all micro-batches of so many tokens; None for rows that take no private steps.

    Raises Unknown, as `StepMemory`.
    """
    if find_row(settings.method.name).releases != "gradients":
        return None
    return StepMemory(settings, model, device).peak(max_tokens)


_SAVED: WeakKeyDictionary[Any, dict[frozenset[str], tuple[float, float, bool]]] = WeakKeyDictionary()


def _saved(model: Any, adapter: LowRankAdapter) -> tuple[float, float, bool]:
    """Bytes that a forward pass keeps for the backward one: a token of a row, and a pair of its tokens; and whether the
    model returns what its output layer gives."""
    names = frozenset(site.name for site in adapter.sites)
    known = _SAVED.setdefault(model, {})
    if names not in known:
        (few, plain), (many, _) = (_kept(model, names, tokens) for tokens in (_FEW, _MANY))
        square = max(0.0, (many / _MANY - few / _FEW) / (_MANY - _FEW))
        known[names] = few / _FEW - _FEW * square, square, plain
    return known[names]


def _kept(model: Any, names: frozenset[str], tokens: int) -> tuple[int, bool]:
    """Bytes that one row of so many tokens keeps, the last of them padding, so that there is a mask."""
    held = dict[int, tuple[torch.Tensor, int]]()
    given = list[torch.Tensor]()
    try:
        with on_paper(model) as copied:
            weights = {t.untyped_storage()._cdata for t in [*copied.parameters(), *copied.buffers()]}

            def keep(t: torch.Tensor) -> torch.Tensor:
                storage = t.untyped_storage()
                if storage._cdata not in weights:
                    held[storage._cdata] = t, storage.nbytes()
                return t

            copied.get_input_embeddings().register_forward_hook(lambda *args: args[-1].requires_grad_())

            def keep_input(_: Any, args: tuple[torch.Tensor, ...]) -> None:
                keep(args[0])  # the gradients of an adapted layer need it

            for name in names:
                copied.get_submodule(name).register_forward_pre_hook(keep_input)
            if (head := output_layer(copied)) is not None:
                head.register_forward_pre_hook(lambda _, args: (args[0][:, :1].detach(),))
                head.register_forward_hook(lambda *args: given.append(args[-1]))
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            mask = torch.ones_like(ids)
            mask[0, -1] = 0
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda t: t):
                logits = copied(input_ids=ids, attention_mask=mask, use_cache=False).logits
            plain = bool(given) and logits.untyped_storage()._cdata == given[0].untyped_storage()._cdata
    except Exception as error:  # models are anybody's code, and raise anything on paper
        raise Unknown(reason_of(error)) from error
    return sum(size for _, size in held.values()), plain


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


def largest_batch(privacy: PrivacySettings) -> int:
    """PUBLIC. Units of a logical batch, at most; with a probability of 1e-9 a step there are more."""
    n = math.ceil(privacy.n)
    if privacy.max_batch_size is not None:
        return min(n, privacy.max_batch_size)
    from scipy.stats import binom

    return max(1, min(n, int(binom.isf(_RARE, n, min(1.0, privacy.q)))))
