"""A wing that no run needs: studies, diagnostics, projections (Hu et al. 2026), audits of a mechanism by itself."""

from importlib import import_module
from typing import Any, Final

_NAMES: Final = {
    "audits.many_runs": ("RunsAudit", "audit_runs"),
    "audits.one_step": ("StepAudit", "audit_step", "trials_for"),
    "audits.spaces": ("check_space",),
    "diagnostics.choosing": ("FIGURES",),
    "diagnostics.experiments": ("Diagnostics", "diagnose"),
    "diagnostics.gauges": ("gauge_study",),
    "diagnostics.preconditioning": ("preconditioning_study",),
    "diagnostics.sweep": ("GaugeSweep", "gauge_sweep"),
    "studies.settings": ("Study", "load_study", "study_from"),
    "studies.study": ("StudyReport", "report_study", "run_study"),
    "first_step": ("first_step_asymmetries",),
    "wishart.head_settings": ("HeadSettings",),
    "wishart.heads": ("HeadData", "TrainedHeads", "static_poison", "train_heads"),
    "wishart.mechanism": ("WishartProjection",),
}
"""File -> its public names. Nothing is imported before it is asked for."""


def __getattr__(name: str) -> Any:
    for file, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"privlora.lab.{file}"), name)
    raise AttributeError(f"module 'privlora.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *(name for names in _NAMES.values() for name in names)])
