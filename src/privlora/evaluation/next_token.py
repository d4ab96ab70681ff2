"""Next-token loss and accuracy on public or held-out text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from privlora.data.batching import MicroBatch, sequential_batches
from privlora.data.examples import Examples
from privlora.errors import DataError
from privlora.evaluation.batches import evaluating
from privlora.losses import LabelLogits, label_logits, weighted_cross_entropy


@dataclass(frozen=True)
class NextTokenResult:
    """Losses are in nats.

    loss_per_token: total loss over total label tokens. loss_per_example: mean over examples of each one's mean loss,
    which is what training minimises, and its standard error. accuracy: fraction of label tokens that are the
    most probable one.
    """

    loss_per_token: float
    loss_per_example: float
    standard_error: float
    accuracy: float
    examples: int
    tokens: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def evaluate_next_token(
    model: torch.nn.Module, examples: Examples, *, max_tokens: int = 8192
) -> NextTokenResult:
    """Evaluate in batches of at most ``max_tokens`` padded tokens. Raises DataError if nothing can be predicted."""
    rows: list[Tensor] = []  # of each batch: losses and whether there is any
    totals: list[Tensor] = []  # loss and hits; read back once, at the end
    tokens = 0
    with evaluating(model) as device:
        for batch in sequential_batches(examples, max_tokens=max_tokens, device=device):
            batch = batch.to(device)
            found = label_logits(model, batch.input_ids, batch.attention_mask, batch.labels)
            _, token_losses = weighted_cross_entropy(found, batch.token_weight)
            rows.append(
                torch.stack([found.row_means(token_losses), found.counts().to(token_losses.device) > 0])
            )
            hits = (found.logits.argmax(dim=-1) == found.targets).sum()
            totals.append(torch.stack([token_losses.sum(), hits.to(token_losses.dtype)]))
            tokens += len(found.targets)
    if not tokens:
        raise DataError("the evaluation records hold no label token", fix="check the columns and max_length")
    total, right = torch.stack(totals).cpu().double().sum(dim=0).tolist()
    losses, labelled = torch.cat(rows, dim=1).cpu()
    per_example = losses[labelled > 0]
    error = float(per_example.std() / len(per_example) ** 0.5) if len(per_example) > 1 else float("nan")
    return NextTokenResult(
        total / tokens, float(per_example.mean()), error, right / tokens, len(per_example), tokens
    )


def record_losses(model: torch.nn.Module, examples: Examples, *, max_tokens: int = 8192) -> Tensor:
    """Mean next-token loss of each record in their order, in nats per label token, (N,) float64 on the CPU."""
    return record_means(
        model,
        examples,
        lambda batch, found: weighted_cross_entropy(found, batch.token_weight)[1],
        max_tokens=max_tokens,
    )


def record_means(
    model: torch.nn.Module,
    examples: Examples,
    of: Callable[[MicroBatch, LabelLogits], Tensor],
    *,
    max_tokens: int = 8192,
) -> Tensor:
    """What ``of`` makes of each label, (k,), as each record's mean, (N,) float64 on the CPU. Batches are always the
    same ones, in the same order."""
    means = torch.zeros(len(examples), dtype=torch.float64)
    with evaluating(model) as device:
        for batch in sequential_batches(examples, max_tokens=max_tokens, device=device):
            batch = batch.to(device)
            found = label_logits(model, batch.input_ids, batch.attention_mask, batch.labels)
            means[batch.record_index] = found.row_means(of(batch, found)).cpu().double()
    return means


def row_losses(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """Mean next-token loss of each row in nats per label token, (rows,) float64; 0 where nothing is predicted."""
    found = label_logits(model, batch.input_ids, batch.attention_mask, batch.labels)
    return found.row_means(weighted_cross_entropy(found, batch.token_weight)[1])
