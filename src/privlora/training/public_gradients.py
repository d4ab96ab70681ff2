"""Gradients of public texts at the present state, one row a text: what spans (coordinates.span) are made of.

Private records are not used. Texts go through the model as private records do, without dropout, but together: what
they round in each other's gradients is public too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from privlora.coordinates import Coordinates, PublicGradients
from privlora.coordinates.span import rows_beside, unit_vectors
from privlora.data.batching import sequential_batches
from privlora.data.examples import Examples
from privlora.randomness import counter_generator
from privlora.training.forward import training_passes
from privlora.training.gradients import micro_batch_gradients

PublicTexts = Callable[[Tensor | None], Examples]
"""The public texts of the next step, in order. Its argument: how much each text of the last step had to do with that
step's release, (N,) >= 0; None where nothing was released since they were asked for. Texts that evolve do so here."""


def public_gradients(
    space: Coordinates, texts: Examples, *, max_tokens: int, dtype: torch.dtype | None = None
) -> PublicGradients:
    """Row j: the gradient of text j in ``space`` at its state, of the mean loss over the text's labels.

    A text whose gradient is not finite counts as zero. max_tokens: of a micro-batch. dtype: in which rows are stored;
    None for that of ``space``. Raises DataError if no gradient is finite and other than zero.
    """
    adapter = space.adapter
    rows = torch.zeros(len(texts), space.entries(), dtype=dtype or space.dtype, device=adapter.device)
    # Short texts would fill a micro-batch's tokens with more gradients than all that are kept.
    at_once = rows_beside(rows.shape[1], rows.nbytes, 1)
    # Reports ask for it too, where nothing else takes gradients.
    with torch.enable_grad(), training_passes(adapter.model, counter_generator(0)):
        for batch in sequential_batches(texts, max_tokens=max_tokens, max_rows=at_once):
            captured, _ = micro_batch_gradients(adapter, batch, public=True)
            captured.zero(~captured.finite())
            for unit, text in enumerate(batch.record_index.tolist()):
                one = captured.some(slice(unit, unit + 1))
                rows[text] = unit_vectors(space, one, space.dtype)[0].to(rows)
    return PublicGradients(rows)
