"""privlora: private fine-tuning of language models with low-rank adapters.

    from privlora import fine_tune

The parts for a loop of one's own live in their rooms: ``privlora.data``, ``privlora.adapters``,
``privlora.coordinates``, ``privlora.mechanisms``, ``privlora.optimizers``, ``privlora.accounting``.
"""

from __future__ import annotations

from importlib import import_module
from logging import getLogger
from typing import TYPE_CHECKING, Any

from privlora.version import __version__

if TYPE_CHECKING:
    from privlora.api import (
        Result,
        SynthesisResult,
        federate,
        fine_tune,
        resume_federation,
        resume_run,
        synthesize,
        train_run,
    )
    from privlora.trainer import PrivateConfig, PrivateTrainer

__all__ = [
    "PrivateConfig",
    "PrivateTrainer",
    "Result",
    "SynthesisResult",
    "__version__",
    "federate",
    "fine_tune",
    "resume_federation",
    "resume_run",
    "synthesize",
    "train_run",
]

# peft imports bitsandbytes, whatever is asked of it, and that tells of a kernel that nothing here uses.
getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda told: "kernels-community" not in str(told.msg))


def __getattr__(name: str) -> Any:
    # What a call is given is looked at before torch and transformers are imported, which takes seconds.
    if name in __all__:  # all but __version__, which is here
        room = "trainer" if name.startswith("Private") else "api"
        return getattr(import_module(f"privlora.{room}"), name)
    raise AttributeError(f"module 'privlora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
