"""Loss and GLUE's metrics of a classifier on public or held-out texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.errors import DataError
from privlora.evaluation.batches import evaluating
from privlora.evaluation.metrics import accuracy, f1, matthews_correlation, pearson, spearman
from privlora.losses import batch_logits, class_losses


@dataclass(frozen=True)
class ClassResult:
    """loss_per_example: mean cross-entropy in nats, or mean squared error of scores, and its standard error.

    metrics: of classes accuracy, f1 (of class 1; of more than two the mean over classes) and matthews_correlation; of
    scores pearson and spearman.
    """

    loss_per_example: float
    standard_error: float
    metrics: dict[str, float]
    examples: int

    def to_dict(self) -> dict[str, float]:
        """With the metrics and the loss."""
        return {
            "loss_per_example": self.loss_per_example,
            "standard_error": self.standard_error,
            **self.metrics,
            "examples": self.examples,
        }


def evaluate_classes(model: torch.nn.Module, examples: Examples, *, max_tokens: int = 8192) -> ClassResult:
    """Evaluate labelled texts in batches of at most ``max_tokens`` padded tokens. Raises DataError without any.

    model: finds the end of each text by the examples' padding token.
    """
    if examples.answers is None or not len(examples):
        raise DataError("there is no labelled record to evaluate", fix="give records with data.label")
    losses, told = np.zeros(len(examples)), np.zeros(len(examples))
    with evaluating(model) as device:
        for batch in sequential_batches(examples, max_tokens=max_tokens, device=device):
            assert batch.answers is not None
            logits = batch_logits(model, batch.to(device))
            at = batch.record_index.numpy()
            losses[at] = class_losses(logits, batch.answers).double().cpu().numpy()
            found = logits[:, 0] if examples.answers.outputs == 1 else logits.argmax(dim=-1)
            told[at] = found.double().cpu().numpy()
    error = float(losses.std(ddof=1) / len(losses) ** 0.5) if len(losses) > 1 else float("nan")
    scores = _scores(examples.answers.values, told, examples.answers.outputs)
    return ClassResult(float(losses.mean()), error, scores, len(losses))


def _scores(gold: np.ndarray, told: np.ndarray, outputs: int) -> dict[str, float]:
    if outputs == 1:
        return {"pearson": pearson(gold, told), "spearman": spearman(gold, told)}
    of_each = [f1((gold == k).astype(float), (told == k).astype(float)) for k in range(outputs)]
    return {
        "accuracy": accuracy(gold, told),
        "f1": of_each[1] if outputs == 2 else float(np.mean(of_each)),
        "matthews_correlation": _matthews(gold, told, outputs),
    }


def _matthews(gold: np.ndarray, told: np.ndarray, outputs: int) -> float:
    """Of two classes as GLUE has it; of more, Gorodkin's (2004). 0 if either is constant."""
    if outputs == 2:
        return matthews_correlation(gold, told)
    right, n = float((gold == told).sum()), len(gold)
    of_gold, of_told = (np.array([(v == k).sum() for k in range(outputs)], float) for v in (gold, told))
    spread = (n**2 - (of_gold**2).sum()) * (n**2 - (of_told**2).sum())
    return float((right * n - (of_gold * of_told).sum()) / spread**0.5) if spread > 0 else 0.0
