"""What is looked at before the model's weights are loaded, which takes longest: all of it that needs none of them."""

from __future__ import annotations

from typing import Any

from privlora.config import Settings
from privlora.errors import ModelError, PrivloraError, Together
from privlora.training.classifier import head_of
from privlora.training.inputs import fitted
from privlora.training.model_checks import refuse_out_of_reach
from privlora.training.models import load_skeleton, load_tokenizer, loadable_adapter, refuse_missing


def look_at_model(settings: Settings, tokenizer: Any = None) -> tuple[Settings, Any]:
    """The settings with a length that the model reads, and its tokenizer. tokenizer: None for that of the settings.

    Raises together what would be found later: a package that the model needs, a tokenizer that cannot be loaded,
    lengths, targets and rank that the model's configuration rules out.
    """
    problems = Together()
    problems.of(None, refuse_missing, settings.model)
    own = tokenizer if tokenizer is not None else problems.of(None, load_tokenizer, settings.model)
    if own is not None:
        settings = problems.of(settings, _refuse_unfit, settings, own)
    problems.tell()
    return settings, own


def _refuse_unfit(settings: Settings, tokenizer: Any) -> Settings:
    """The settings, fitted. Raises ModelError for what no model of this configuration can follow."""
    try:
        skeleton = load_skeleton(settings.model, head=head_of(settings))
    except ModelError:  # told with its reason where the model itself is loaded
        return settings
    problems = Together()
    settings = fitted(settings, skeleton)
    length = settings.data.max_length
    problems.of(None, lambda: refuse_out_of_reach(skeleton, tokenizer, max_length=length))
    problems.of(None, _refuse_unfit_adapter, settings, skeleton)
    problems.tell()
    return settings


def _refuse_unfit_adapter(settings: Settings, skeleton: Any) -> None:
    try:
        loadable_adapter(settings, skeleton)
    except PrivloraError as error:
        raise settings.placed(error, "adapter.target_modules") from None
