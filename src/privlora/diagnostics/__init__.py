"""The diagnostics of PRISM's paper: what a gauge, the noise and a preconditioner do to a private run."""

from privlora.diagnostics.experiments import FIGURES, Diagnostics, diagnose
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
