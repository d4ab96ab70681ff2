"""Next-token losses: one number per sequence, never a mean over a batch.

Only label positions reach the output layer: hidden states are gathered before it, so prompts, padding and last tokens
cost no logits. The gradient is computed with the loss, one block of rows at a time, so no second copy of the
log-probabilities is kept. In training, where a frozen linear layer makes the logits and nothing follows it, that layer
runs in blocks too, forward and backward: there is no tensor of all labels by the whole vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules import module as _modules

from privlora.adapters.targets import output_layer
from privlora.data.batching import MicroBatch
from privlora.data.examples import IGNORED
from privlora.errors import ModelError, PrivacyError


def class_logits(
    model: Any, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
) -> Tensor:
    """(b, outputs) of one pass over (b, T) ids, in the model's dtype."""
    more: dict[str, Any] = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "use_cache" in inspect.signature(inner.forward).parameters:  # encoders do not know the word
        more["use_cache"] = False
    logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, **more).logits
    return logits


def batch_logits(model: Any, batch: MicroBatch) -> Tensor:
    """(b, outputs) of a micro-batch on the model's device, in float32 or better.

    Raises PrivacyError where texts are filled up with another token than the model finds their ends by.
    """
    known = model.config.get_text_config().pad_token_id
    if known != batch.pad_token_id:
        raise PrivacyError(
            f"texts are filled up with token {batch.pad_token_id}, and the classifier's padding token is {known}",
            why="it would take a text's last token to be elsewhere, by how long the texts beside it are",
            fix="call training.classifier.padded_as(model, tokenizer) with the tokenizer of the texts",
        )
    logits = class_logits(model, batch.input_ids, batch.attention_mask, batch.token_type_ids)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def class_losses(logits: Tensor, answers: Tensor) -> Tensor:
    """(b,) losses of (b, outputs) logits: in nats for the class of each row, squared for one output.

    answers: (b,) float64, the classes' numbers or the scores.
    """
    there = answers.to(logits.device, non_blocking=True)
    if logits.shape[-1] == 1:
        return (logits[:, 0] - there.to(logits.dtype)).square()
    return torch.nn.functional.cross_entropy(logits, there.long(), reduction="none")


def log_likelihoods(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """(rows,) sums of log p over each row's label tokens, in float32 or better, with a graph; batch: on the device."""
    found = label_states(model, batch.input_ids, batch.attention_mask, batch.labels)
    return -found.per_row(token_losses(found))


def margins(own: Tensor, reference: Tensor, beta: float) -> Tensor:
    """(rows / 2,) of log-likelihoods (rows,) in turn chosen and rejected, by the model and by the reference."""
    gain = own - reference
    return beta * (gain[0::2] - gain[1::2])


def preference_losses(found: Tensor) -> Tensor:
    """Of margins, in nats; 0.693 where the model is the reference: -log sigmoid(margin), with

        margin = beta (log p(chosen) - log p_ref(chosen) - log p(rejected) + log p_ref(rejected))

    Rafailov et al. 2023 (DPO), Eq. 7. A record's loss depends on its own two answers alone, so that its gradient is
    clipped as any other record's.
    """
    return torch.nn.functional.softplus(-found)


_BLOCK = 512  # rows of logits that are in float32 at a time
_NUMBERS = 2**25  # at most in such a block, but for one of few rows
_FEW = 64


@dataclass(frozen=True)
class Labels:
    """The k label positions of a batch. targets: (k,), on the model's device.

    rows, columns: (k,) int64, where labels were given: label j is token columns[j] of row rows[j], and is predicted at
    the position before it. batch: number of rows.
    """

    targets: Tensor
    rows: Tensor
    columns: Tensor
    batch: int

    def at_labels(self, values: Tensor) -> Tensor:
        """``values`` (batch, T) at the label positions, (k,), on the targets' device."""
        found = values[self.rows.to(values.device), self.columns.to(values.device)]
        return found.to(self.targets.device, non_blocking=True)

    def per_row(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (k,) over the label positions of each row, (batch,)."""
        rows = self.rows.to(values.device, non_blocking=True)
        return values.new_zeros(self.batch).index_add_(0, rows, values)

    def counts(self) -> Tensor:
        """Number of label positions of each row, (batch,) int64, where labels were given."""
        return torch.bincount(self.rows, minlength=self.batch)

    def row_means(self, values: Tensor) -> Tensor:
        """Mean of ``values`` (k,) over the label positions of each row, (batch,) float64; 0 where there is none."""
        return (self.per_row(values) / self.counts().clamp_min(1).to(values.device)).double()


@dataclass(frozen=True)
class LabelLogits(Labels):
    """logits: (k, vocabulary), of the positions that predict the labels."""

    logits: Tensor


@dataclass(frozen=True)
class LabelStates(Labels):
    """states: (k, d), what the output layer ``head`` would make their logits of."""

    states: Tensor
    head: torch.nn.Linear

    @property
    def logits(self) -> Tensor:
        """(k, vocabulary), all at once: what training never needs."""
        return torch.nn.functional.linear(self.states, self.head.weight, self.head.bias)


def label_logits(
    model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> LabelLogits:
    """Run a causal LM on (batch, T) token ids; labels (batch, T) are not shifted, -100 is ignored.

    Labels may lie on the CPU whatever the model's device: then nothing has to be read back to find them. Raises
    ModelError if the output layer is not given (batch, T, d).
    """
    run = _Run(model, input_ids, attention_mask, labels)
    logits = run.logits(lambda states: states)
    if output_layer(model) is None:
        logits = run.gathered(logits)
    return LabelLogits(*run.labels(logits.device), logits)


def label_states(
    model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
) -> LabelStates | LabelLogits:
    """The same for training: without logits where the output layer is frozen, linear and the last thing to happen."""
    head = output_layer(model)
    run = _Run(model, input_ids, attention_mask, labels)
    if not _is_plain(head) or not _is_last(model, run):
        return label_logits(model, input_ids, attention_mask, labels)
    found: list[Tensor] = []

    def keep(states: Tensor) -> Tensor:
        found.append(states)
        return states[:0]

    run.logits(keep, watch=True)
    if not run.last:  # what follows has changed since: a hook, a cap
        _LAST[model] = False
        return label_logits(model, input_ids, attention_mask, labels)
    assert isinstance(head, torch.nn.Linear)
    return LabelStates(*run.labels(found[0].device), found[0], head)


class _Run:
    """Passes of a model in which its output layer sees label positions alone, or fewer.

    last: whether the last pass that was watched returned what the output layer gave first, as it was.
    """

    last = False

    def __init__(
        self, model: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> None:
        self._model, self._inputs, self._labels = model, (input_ids, attention_mask), labels
        self._rows, self._before = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        self._flat = self._rows * labels.shape[1] + self._before

    def labels(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
        columns = self._before + 1
        targets = self._labels[self._rows, columns].to(device, non_blocking=True)
        return targets, self._rows, columns, len(self._labels)

    def gathered(self, whole: Tensor) -> Tensor:
        """(batch, T, d) at the positions that predict labels, (k, d)."""
        return whole.flatten(0, 1).index_select(0, self._flat.to(whole.device, non_blocking=True))

    def logits(self, choose: Any, *, watch: bool = False) -> Tensor:
        """What the model returns when its output layer is given ``choose`` of the gathered states, (., vocabulary)."""
        head, given = output_layer(self._model), list[tuple[Tensor, int]]()

        def gather(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not args or args[0].shape[:2] != self._labels.shape:
                raise ModelError(
                    "the model's output layer is not given one state a token, row by row",
                    why="the labels of one record may then be predicted from the states of another",
                    fix="use a model that hands its output layer (rows, tokens, features)",
                )
            return (choose(self.gathered(args[0])).unsqueeze(0), *args[1:])

        def keep(_: torch.nn.Module, __: Any, out: Tensor) -> None:
            given.append((out, out._version))

        handles = [] if head is None else [head.register_forward_pre_hook(gather)]
        handles += [head.register_forward_hook(keep)] if head is not None and watch else []
        try:
            ids, mask = self._inputs
            logits: Tensor = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        if head is None:
            return logits
        self.last = bool(given) and _is_same(logits, *given[0])
        return logits.squeeze(0)


def _is_same(logits: Tensor, out: Tensor, version: int) -> bool:
    """Whether ``logits`` are all of ``out``, into which nothing was written since; also where both are empty."""
    same = logits.untyped_storage()._cdata == out.untyped_storage()._cdata
    untouched = out._version == version  # some models write into their logits
    return same and untouched and logits.dtype == out.dtype and logits.shape[-1] == out.shape[-1]


def _is_plain(head: torch.nn.Module | None) -> bool:
    """Whether a layer is known to compute states weight^T + bias, and needs no gradient of its own."""
    if type(head) is not torch.nn.Linear or "forward" in vars(head):
        return False
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    parameters = list(head.parameters())
    floating = all(p.is_floating_point() and not p.requires_grad for p in parameters)
    return floating and not any(hooks) and not any(getattr(_modules, name) for name in _EVERYWHERE)


_EVERYWHERE = (  # hooks on all modules of the process
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_LAST: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def _is_last(model: torch.nn.Module, run: _Run) -> bool:
    """Whether the model returns what its output layer gives, as it is; found out by one pass, once a model.

    By a pass of its own: a first batch that went another way than later ones would be rounded in another way. Where
    it is not so any more, a later pass shows it.
    """
    if model not in _LAST:
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            run.logits(lambda states: states[:1], watch=True)
        _LAST[model] = run.last
    return _LAST[model]


def weighted_cross_entropy(
    found: LabelLogits | LabelStates, weights: Tensor, *, is_root: bool = False
) -> tuple[Tensor, Tensor]:
    """sum_k weights_k * (-log p_k) as a scalar to call backward on, and the k token losses (float32, no graph).

    weights: (batch, T), taken at label positions. The weight of a token may depend on its own record only. is_root:
    whether ``backward`` will be called on the scalar itself, which saves a pass over the step's largest tensor.
    """
    chosen = found.at_labels(weights)
    if isinstance(found, LabelLogits):
        total, losses = _OfLogits.apply(found.logits, found.targets, chosen, is_root)
    else:
        head = found.head
        total, losses = _OfStates.apply(found.states, found.targets, chosen, head.weight, head.bias, is_root)
    return total, losses


def token_losses(found: LabelLogits | LabelStates) -> Tensor:
    """The k token losses -log p_k, in float32 or better, with a graph: backward may be given any weights of them."""
    ones = torch.ones_like(found.targets, dtype=torch.float32)
    if isinstance(found, LabelLogits):
        source, (losses, gradient) = found.logits, _of_logits(found.logits, found.targets, ones)
    else:
        source, head = found.states, found.head
        losses, gradient = _of_states(source, found.targets, ones, head.weight, head.bias)
    if gradient is None:
        return losses
    return _Known.apply(source, losses, gradient)


class _Known(torch.autograd.Function):
    """Losses (k,) whose gradients by the rows of ``source`` (k, .) are known."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, losses: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), None, None


@torch.no_grad()
def divergences(before: Tensor, after: Tensor) -> Tensor:
    """KL(p || q) of each row in nats, (k,) float32 or better, of logits (k, vocabulary) of p, ``before``, and of q."""
    dtype = torch.promote_types(before.dtype, torch.float32)
    found = torch.empty(len(before), dtype=dtype, device=before.device)
    for block in _in_blocks(*before.shape):
        log_p, log_q = (torch.log_softmax(logits[block], dim=-1, dtype=dtype) for logits in (before, after))
        p = log_p.exp()  # of which 0 adds nothing, also where q is 0
        found[block] = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
    return found


def block_rows(width: int) -> int:
    """PUBLIC. Rows of logits of such a vocabulary that are there at a time, at most."""
    return min(_BLOCK, max(_FEW, _NUMBERS // max(1, width)))


def _in_blocks(count: int, width: int) -> list[slice]:
    rows = block_rows(width)
    return [slice(start, start + rows) for start in range(0, count, rows)]


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, room: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Losses (k,), and the gradient of their weighted sum by the logits (k, vocabulary), in float32 or better."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits, dim=-1, dtype=dtype, out=room)
    losses = -log_p.gather(1, targets[:, None])[:, 0]
    w = weights[:, None].to(dtype)
    return losses, log_p.exp_().mul_(w).scatter_add_(1, targets[:, None], -w)


@torch.no_grad()
def _of_logits(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Losses (k,), and the gradient of their weighted sum by the logits, if those have one."""
    gradient = torch.empty_like(logits) if logits.requires_grad else None
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.empty(len(targets), dtype=dtype, device=logits.device)
    # In float32 the gradient's own memory holds the log-probabilities on their way to it.
    in_place = gradient is not None and gradient.dtype == dtype
    for block in _in_blocks(*logits.shape):
        room = gradient[block] if gradient is not None and in_place else None
        losses[block], part = _loss_and_gradient(logits[block], targets[block], weights[block], room)
        if gradient is not None and not in_place:
            gradient[block] = part
    return losses, gradient


@torch.no_grad()
def _of_states(
    states: Tensor, targets: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The same by the states that the output layer makes logits of."""
    gradient = torch.empty_like(states) if states.requires_grad else None
    dtype = torch.promote_types(states.dtype, torch.float32)
    losses = torch.empty(len(targets), dtype=dtype, device=states.device)
    blocks = _in_blocks(len(states), len(matrix))
    room = states.new_empty(blocks[0].stop if blocks else 0, len(matrix), dtype=dtype)
    for block in blocks:
        logits = torch.nn.functional.linear(states[block], matrix, bias)
        losses[block], part = _loss_and_gradient(logits, targets[block], weights[block], room[: len(logits)])
        if gradient is not None:
            gradient[block] = part.to(matrix.dtype) @ matrix
    return losses, gradient


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor, is_root: bool
    ) -> tuple[Tensor, Tensor]:
        losses, gradient = _of_logits(logits, targets, weights)
        ctx.save_for_backward(gradient)
        ctx.is_root = is_root
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return _scaled(gradient, upstream, ctx.is_root), None, None, None


class _OfStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        targets: Tensor,
        weights: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        is_root: bool,
    ) -> tuple[Tensor, Tensor]:
        losses, gradient = _of_states(states, targets, weights, matrix, bias)
        ctx.save_for_backward(gradient)
        ctx.is_root = is_root
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return _scaled(gradient, upstream, ctx.is_root), None, None, None, None, None


def _scaled(gradient: Tensor, upstream: Tensor, is_root: bool) -> Tensor:
    return gradient if is_root else gradient * upstream.to(gradient.dtype)
