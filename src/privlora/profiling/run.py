"""A run under its profile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from privlora.config import Settings
from privlora.errors import ConfigError, PrivloraError
from privlora.methods import CHOICES, find_row
from privlora.profiling.facts import Around, gather
from privlora.profiling.page import write
from privlora.profiling.trace import remove_temporary
from privlora.profiling.watch import Watch
from privlora.stages import heard_by
from privlora.training.assembly import Parts
from privlora.training.files import RunFolder
from privlora.training.loop import Interrupted
from privlora.training.model_checks import routes_tokens
from privlora.training.peak import Peak, Unknown, peak_of_a_step
from privlora.training.sharding import is_sharded

_log = logging.getLogger(__name__)


def refuse_without_steps(settings: Settings) -> None:
    """Raise ConfigError for settings whose runs take no steps of gradients."""
    name = settings.method.name
    if name not in CHOICES and find_row(name).releases != "gradients":
        raise ConfigError(
            f"method {name!r} releases votes and takes no steps, so there is nothing to profile",
            fix="leave --profile (profile=True) out",
        )
    if settings.synthesis is not None and settings.synthesis.source is not None:
        raise ConfigError(
            "synthesis.source names a finished run, which takes no steps, so there is nothing to profile",
            fix="leave --profile (profile=True) out",
        )


def told_peak(settings: Settings, model: torch.nn.Module) -> Peak | str:
    """What `privlora plan` says that a step takes, or why it does not; of a model that is not adapted yet."""
    if is_sharded(model):
        return "the base is spread over processes"
    device = next(model.parameters()).device
    try:
        found = peak_of_a_step(settings, model, device, max_tokens=settings.run.max_tokens)
    except Unknown as unknown:
        return str(unknown)
    return found or "this method takes no private steps"


@contextmanager
def profiled(
    parts: Parts,
    folder: RunFolder,
    told: Peak | str,
    processes: int,
    tell: Callable[[Path], None] | None,
) -> Iterator[list[Path]]:
    """Around a run's steps: writes the page when they are over, also those of a run that stops early, and ``tell``s of
    it; the list that it gives then holds the page. Without ``tell`` nothing is measured.

    Of a run that takes no step inside nothing is written. What cannot be written is said in the log, and stops nothing.
    """
    pages = list[Path]()
    if tell is None or not _made(folder.profile):
        yield pages
        return
    watch = Watch(parts.adapter.device, parts.settings.privacy.steps, folder.profile)
    whole = False
    try:
        with heard_by(watch):
            yield pages
        whole = True
    except Interrupted:
        whole = True
        raise
    finally:
        watch.end(whole=whole)
        if watch.steps:
            try:
                pages.append(
                    write(gather(watch, _around(parts, told, processes)), folder.profile, watch.trace.path)
                )
                tell(pages[0])
            except PrivloraError as error:
                _log.warning("%s", error)


def _made(place: Path) -> bool:
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.chmod(0o700)  # one that was there
        remove_temporary(place)
        return True
    except OSError as error:
        _log.warning("no profile: cannot write %s: %s", place, error.strerror)
        return False


def _around(parts: Parts, told: Peak | str, processes: int) -> Around:
    adapter, settings = parts.adapter, parts.settings
    dtype = next(p.dtype for p in adapter.model.parameters() if p.is_floating_point())
    return Around(
        settings=settings,
        told=told if isinstance(told, Peak) else None,
        why_not=told if isinstance(told, str) else None,
        alone=settings.privacy.private and (adapter.one_by_one or routes_tokens(adapter.model)),
        checkpointing=settings.model.gradient_checkpointing != "none",
        processes=processes,
        dtype=str(dtype).removeprefix("torch."),
    )
