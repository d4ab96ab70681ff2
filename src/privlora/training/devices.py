"""Where a model is to lie. Asked before slow imports, so torch is loaded for a device alone that has to be tried."""

from __future__ import annotations

from privlora.config import ModelSettings
from privlora.errors import ConfigError, named
from privlora.training.ranks import own_device


def device_of(settings: ModelSettings) -> str:
    """Where the model lies; of several processes each has a GPU of its own. Raises ConfigError if there is none."""
    name = settings.device
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return own_device("cuda") if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"model.device={named(name)} is not available here", fix="use auto or cpu"
        ) from None
    return name


def refuse_no_device(settings: ModelSettings) -> None:
    """Raise ConfigError for a device that is asked for by its name and is not there."""
    if settings.device != "auto":
        device_of(settings)
