"""The diagnostics of PRISM's paper: what a gauge, the noise and a preconditioner do to a private run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from privlora.diagnostics.choosing import FIGURES
    from privlora.diagnostics.experiments import Diagnostics, diagnose
    from privlora.diagnostics.gauges import gauge_study
    from privlora.diagnostics.preconditioning import preconditioning_study
    from privlora.diagnostics.sweep import GaugeSweep, gauge_sweep

__all__ = [
    "FIGURES",
    "Diagnostics",
    "GaugeSweep",
    "diagnose",
    "gauge_study",
    "gauge_sweep",
    "preconditioning_study",
]

_FILES: Final = {
    "FIGURES": "choosing",
    "gauge_study": "gauges",
    "preconditioning_study": "preconditioning",
    **dict.fromkeys(("GaugeSweep", "gauge_sweep"), "sweep"),
}
"""Of what is not in ``experiments``."""


def __getattr__(name: str) -> Any:
    # Names of figures are looked at before torch is imported.
    if name in __all__:
        return getattr(import_module(f"privlora.diagnostics.{_FILES.get(name, 'experiments')}"), name)
    raise AttributeError(f"module 'privlora.diagnostics' has no attribute {name!r}")
