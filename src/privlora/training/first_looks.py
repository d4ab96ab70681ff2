"""What is looked at before the model's weights are loaded, which takes longest: all that needs none of them."""

from __future__ import annotations

from typing import Any

from privlora.config import Settings
from privlora.errors import ModelError, PrivloraError, Together
from privlora.training.classifier import head_of
from privlora.training.inputs import fitted, refuse_shared_first, refuse_unfit_first, refuse_unrendered_first
from privlora.training.model_checks import refuse_out_of_reach
from privlora.training.models import load_skeleton, load_tokenizer, loadable_adapter, refuse_missing
from privlora.training.sources import are_read_twice, read_files


def look_first(settings: Settings, tokenizer: Any, records: Any = None, evaluation: Any = None) -> None:
    """Raise what would be found later, together: a package that the model needs, targets and rank of an adapter that
    the model's configuration rules out, records longer than it reads, public records that are private ones, chats
    that the template refuses, records with nothing to train on.

    Records are looked at where they can be read twice at no cost: lists, and local files that are not large. The rest,
    and all that needs weights, is refused where it is read. tokenizer: None for that of the settings.
    """
    problems = Together()
    own = _looked_at(settings, tokenizer, problems)
    unread = len(problems.found)
    if _is_read_twice(settings, records, evaluation):
        problems.of(None, refuse_shared_first, settings, records, evaluation)
    if own is not None:
        problems.of(None, refuse_unrendered_first, settings, own, records, evaluation)
    if own is not None and len(problems.found) == unread:
        problems.of(None, refuse_unfit_first, settings, own, records, evaluation)
    problems.tell()


def look_at_model(settings: Settings, tokenizer: Any = None) -> None:
    """The part of `look_first` that is about the model."""
    problems = Together()
    _looked_at(settings, tokenizer, problems)
    problems.tell()


def _looked_at(settings: Settings, tokenizer: Any, problems: Together) -> Any:
    """The tokenizer, or None where it cannot be loaded; what is wrong with the model is added to ``problems``."""
    problems.of(None, refuse_missing, settings.model)
    own = tokenizer if tokenizer is not None else problems.of(None, load_tokenizer, settings.model)
    if own is not None:
        problems.of(None, _refuse_unfit_model, settings, own)
    return own


def _refuse_unfit_model(settings: Settings, tokenizer: Any) -> None:
    """Raise ModelError for settings that no model of this configuration can follow."""
    try:
        skeleton = load_skeleton(settings.model, head=head_of(settings))
    except ModelError:  # told with its reason where the model itself is loaded
        return
    problems = Together()
    length = fitted(settings, skeleton).data.max_length
    problems.of(None, lambda: refuse_out_of_reach(skeleton, tokenizer, max_length=length))
    problems.of(None, _refuse_unfit_adapter, settings, skeleton)
    problems.tell()


def _refuse_unfit_adapter(settings: Settings, skeleton: Any) -> None:
    try:
        loadable_adapter(settings, skeleton)
    except PrivloraError as error:
        raise settings.placed(error, "adapter.target_modules") from None


def _is_read_twice(settings: Settings, records: Any, evaluation: Any) -> bool:
    """Whether all records may be gone through once more: none comes from a hub or an iterator, and files are small."""
    if not all(given is None or isinstance(given, list) for given in (records, evaluation)):
        return False
    read = read_files(settings, records, evaluation)
    return are_read_twice(path for _, paths, *_ in read for path in paths)
