"""What the clients of one process share: the frozen base model, loaded when a message first needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from privlora.config import Settings
from privlora.federated.rules.base import Sizes
from privlora.training.inputs import fitted
from privlora.training.models import adapter_for, check_model, given_or_loaded


@dataclass
class Workplace:
    """settings: of the run, with its local method. model, tokenizer: where the caller has them. told: is shown the
    local steps of its clients, as (done, of how many)."""

    settings: Settings
    model: torch.nn.Module | None = None
    tokenizer: Any = field(default=None, repr=False)
    told: Callable[[int, int], None] | None = field(default=None, repr=False)

    @cached_property
    def groups(self) -> list[Sizes]:
        """(L, m, n) of each group of the adapter: L modules whose weights are m x n."""
        model, _, settings = self.loaded
        return [(len(group.sites), group.m, group.n) for group in adapter_for(settings, model).groups]

    @cached_property
    def loaded(self) -> tuple[torch.nn.Module, Any, Settings]:
        """The model, its tokenizer, and the settings fitted to it. Raises ModelError, ConfigError or PrivacyError."""
        model, tokenizer = given_or_loaded(self.settings.model, self.model, self.tokenizer)
        settings = fitted(self.settings, model)
        check_model(settings, model, tokenizer)
        return model, tokenizer, settings
