"""How often a model prefers the chosen answer of public or held-out preferences, and the loss of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import numpy as np
import torch

from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.errors import DataError
from privlora.evaluation.batches import evaluating
from privlora.losses import log_likelihoods, margins, preference_losses


@dataclass(frozen=True)
class PreferenceResult:
    """loss_per_example: mean loss in nats, 0.693 where the model is the reference, and its standard error.

    accuracy: share of records whose chosen answer gained more over the reference than the rejected one. reward_margin:
    the mean of what it gained more, times beta.
    """

    loss_per_example: float
    standard_error: float
    accuracy: float
    reward_margin: float
    examples: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def evaluate_preferences(
    model: torch.nn.Module,
    examples: Examples,
    reference: Callable[[], AbstractContextManager[None]],
    *,
    max_tokens: int = 8192,
) -> PreferenceResult:
    """Evaluate in batches of at most ``max_tokens`` padded tokens. Raises DataError without any record.

    reference: inside what it returns, ``model`` is the base model.
    """
    if examples.preferences is None or not len(examples):
        raise DataError(
            "there is no preference to evaluate", fix="give records with data.chosen and data.rejected"
        )
    found = np.zeros(len(examples))
    with evaluating(model) as device:
        for batch in sequential_batches(examples, max_tokens=max_tokens, device=device):
            batch = batch.to(device)
            own = log_likelihoods(model, batch)
            with reference():
                base = log_likelihoods(model, batch)
            assert batch.beta is not None
            at = batch.record_index[0::2].numpy()
            found[at] = margins(own, base, batch.beta).double().cpu().numpy()
    losses = preference_losses(torch.from_numpy(found)).numpy()
    error = float(losses.std(ddof=1) / len(losses) ** 0.5) if len(losses) > 1 else float("nan")
    right = (found > 0).mean() + (found == 0).mean() / 2
    return PreferenceResult(float(losses.mean()), error, float(right), float(found.mean()), len(found))
